"""The bar on a terminal, plain lines elsewhere, the pace and the time left."""

from __future__ import annotations

import io
import logging
import re
import signal
import sys
import threading
import time

import pytest
import torch

from hezar_train.events import Row
from hezar_train.hooks import StopFlag
from hezar_train.runtime.logging import make_visible
from hezar_train.terminal import progress as module
from hezar_train.terminal.progress import Progress
from tests.terminal.streams import CountingStream, Terminal, without_colours


def test_a_terminal_shows_a_bar_with_every_number():
    terminal = Terminal()
    progress = Progress(300, 3, stream=terminal.stream)
    time.sleep(0.01)
    progress.advance(149, 2, 4800, torch.tensor(0.7), 2e-5)
    progress.advance(150, 2, 4800, torch.tensor(0.693147), 2e-5)
    progress.close()
    final = without_colours(terminal.text()).split("\x1b[J")[-1]
    assert re.fullmatch(
        r"epoch 2/3  ━{30,40}  150/300  loss 0\.6931    lr 2e-05     +[\d,]+ samples/s  0:00:0\d left\r\n", final
    )


def test_the_bar_fills_with_the_steps():
    terminal = Terminal()
    progress = Progress(4, 1, stream=terminal.stream)
    progress.advance(1, 1, 8, 0.5, 0.1)
    progress.close()
    bar = re.findall(r"(\x1b\[[0-9;]*m)(━+)\x1b\[0m", terminal.text())[-2:]
    assert [len(marks) for _, marks in bar] == [10, 30]


def test_a_print_lands_on_the_empty_line_above_the_bar():
    terminal = Terminal()
    progress = Progress(10, 1, stream=terminal.stream)
    progress.advance(1, 1, 8, 0.5, 0.1)
    terminal.stream.write("mine\n")
    progress.refresh()
    progress.close()
    frames = without_colours(terminal.text()).split("\x1b[J")
    assert re.fullmatch(r"\r\nepoch 1/1 .*\x1b\[1A\rmine\r\n", frames[1])
    assert re.fullmatch(r"\r\nepoch 1/1 .*\x1b\[1A\r", frames[2])
    assert re.fullmatch(r"epoch 1/1 .*\r\n", frames[3])


def test_a_message_is_printed_above_the_bar_as_it_is():
    terminal = Terminal()
    progress = Progress(10, 1, stream=terminal.stream)
    progress.say("[bold]before[/bold]")
    progress.advance(1, 1, 8, 0.5, 0.1)
    progress.say("saved")
    progress.close()
    frames = without_colours(terminal.text()).split("\x1b[J")
    assert frames[1] == "[bold]before[/bold]\r\n"
    assert frames[3] == "saved\r\n"
    assert frames[4].startswith("\r\nepoch 1/1")


def test_a_notice_about_a_signal_leaves_nothing_of_the_bar(monkeypatch):
    terminal = Terminal(columns=60)
    monkeypatch.setattr(sys, "__stderr__", terminal.stream)
    progress = Progress(10, 1, stream=terminal.stream)
    with StopFlag():
        progress.advance(1, 1, 8, 0.5, 0.1)
        signal.raise_signal(signal.SIGINT)
    progress.refresh()
    progress.close()
    frames = without_colours(terminal.text()).split("\x1b[J")
    first, second = "SIGINT: finishing this update, then saving. Ctrl-C again", "leaves at once."
    assert frames[2] == f"\r\n{first}\r\n  {second}\r\n"
    assert frames[3].startswith("\r\nepoch 1/1")


def test_a_log_message_leaves_nothing_of_the_bar_and_is_folded_between_words(monkeypatch):
    terminal = Terminal(columns=40)
    monkeypatch.setattr(sys, "stderr", terminal.stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = logging.Logger("fresh")
    make_visible(log)
    progress = Progress(10, 1, stream=terminal.stream)
    progress.advance(1, 1, 8, 0.5, 0.1)
    log.warning("step %d is not saved: the disk is too full for the logs.", 12)
    progress.close()
    frames = without_colours(terminal.text()).split("\x1b[J")
    assert frames[2] == "step 12 is not saved: the disk is too\r\n  full for the logs.\r\n"


def test_an_evaluation_has_a_second_bar_that_goes_away(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    terminal = Terminal()
    progress = Progress(10, 1, stream=terminal.stream)
    progress.advance(5, 1, 8, 0.5, 0.1)
    progress.start_evaluation(4)
    progress.advance_evaluation(3)
    progress.end_evaluation()
    progress.line(Row(5, 1, 0.0, {"evaluation.loss": 0.25, "evaluation.accuracy": 0.912345}))
    progress.close()
    text = without_colours(terminal.text())
    assert re.search(r"\nepoch 1/1 [^\n]*\nevaluation  ━+  3/4 batches\x1b\[2A\r", text)
    assert "step 5/10  evaluation  loss 0.25  accuracy 0.9123\r\n" in text
    assert "evaluation  ━" not in text[text.rindex("\x1b[J") :]


@pytest.mark.parametrize("columns", [20, 60, 100])
def test_a_bar_never_wraps(columns):
    terminal = Terminal(columns)
    progress = Progress(3000, 30, stream=terminal.stream)
    progress.advance(1500, 15, 8, 0.123456, 1.23456e-5)
    progress.close()
    lines = re.split(r"[\r\n]+|\x1b\[\d*[AJ]", without_colours(terminal.text()))
    assert columns // 3 < max(map(len, lines)) < columns


RATES = (0.002, 0.001953, 8e-05, 0.0001234567, 1.23456789e-10)


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
@pytest.mark.parametrize(("steps", "epochs"), [(900, 20), (1878, 6), (1_000_000, 100)])
def test_no_part_of_the_bar_moves_from_frame_to_frame(now, columns, steps, epochs):
    terminal = Terminal(columns)
    progress = Progress(steps, epochs, stream=terminal.stream)
    for number, rate in enumerate(RATES, start=1):
        now[0] += 1.0
        progress.advance(number * steps // 9, number, 8 * number, -1e-4 / 3 if number == 2 else 10 / number**5, rate)
    progress.close()
    frames = re.findall(r"epoch [^\r\n\x1b]*|━[^\r\n\x1b]*", without_colours(terminal.text()))
    assert len(frames) == len(RATES) + 1
    starts = {tuple(found.start() for found in re.finditer(r"━+|/|loss|lr|samples", frame)) for frame in frames}
    assert len(starts) == 1
    assert all(len(re.search("━*", frame[frame.index("━") :]).group()) >= 10 for frame in frames)
    assert all(frame.endswith(" left") for frame in frames[1:])


def test_a_narrow_terminal_does_without_the_pace_then_the_rate_then_the_loss(now):
    shown = {}
    for columns in (100, 80, 70, 55):
        terminal = Terminal(columns)
        progress = Progress(900, 20, stream=terminal.stream)
        for step in (1, 2):
            now[0] += 1.0
            progress.advance(step, 1, 8, 0.5, 0.1)
        progress.close()
        shown[columns] = re.findall("loss|lr|samples|left", without_colours(terminal.text()).split("\x1b[J")[-1])
    assert shown == {
        100: ["loss", "lr", "samples", "left"],
        80: ["loss", "lr", "left"],
        70: ["loss", "left"],
        55: ["left"],
    }


def test_a_terminal_is_told_the_time_of_day_and_no_date():
    terminal = Terminal(columns=80)
    progress = Progress(900, 20, stream=terminal.stream)
    progress.line(Row(45, 1, 0.0, {"evaluation.loss": 0.6461, "evaluation.accuracy": 0.8694}))
    said = without_colours(terminal.text()).removeprefix("\x1b[J")
    assert re.fullmatch(r"\d\d:00:00  epoch 1/20  step 45/900  evaluation  loss 0\.6461  accuracy 0\.8694\r\n", said)


def test_a_message_goes_on_in_another_line_between_its_words():
    terminal = Terminal(columns=40)
    progress = Progress(10, 1, stream=terminal.stream)
    progress.say("all pushes arrived: the last one is that of step 630")
    progress.close()
    progress.say("the best one has evaluation.held_out.cer 0.021")
    lines = terminal.text().removeprefix("\x1b[J").split("\r\n")
    assert lines[:2] == ["all pushes arrived: the last one is that", "  of step 630"]
    assert lines[2:] == ["the best one has evaluation.held_out.cer", "  0.021", ""]


def test_what_an_evaluation_found_goes_on_in_another_line_where_the_terminal_ends():
    terminal = Terminal(columns=60)
    progress = Progress(10, 1, stream=terminal.stream)
    progress.line(Row(5, 1, 0.0, {f"evaluation.set_{number}.loss": 0.125 for number in range(5)}))
    lines = [line for line in without_colours(terminal.text()).split("\r\n") if "evaluation" in line or "set_" in line]
    assert len(lines) > 1
    assert max(map(len, (line.removeprefix("\x1b[J") for line in lines))) <= 60
    assert " ".join(lines).count("loss 0.125") == 5


def test_no_write_happens_until_a_refresh_is_due(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_SECONDS", 3600.0)
    stream = CountingStream()
    progress = Progress(1000, 1, stream=stream, is_terminal=True)
    for step in range(1, 1001):
        progress.advance(step, 1, 8, 0.5, 0.1)
        progress.advance_evaluation(step)
    assert stream.num_writes == 1
    assert (progress.step, progress.samples) == (1000, 8000)
    progress.close()
    progress.close()
    assert stream.num_writes == 2


def test_a_loss_on_the_device_is_read_only_for_a_refresh(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_SECONDS", 3600.0)
    reads = []
    real = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda self: reads.append(1) or real(self))
    progress = Progress(100, 1, stream=CountingStream(), is_terminal=True)
    for step in range(1, 101):
        progress.advance(step, 1, 8, torch.tensor(0.5), 0.1)
    assert len(reads) == 1


def test_a_file_gets_one_plain_line_per_row_even_where_colours_are_forced(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = tmp_path / "train.log"
    with path.open("w") as stream:
        progress = Progress(300, 3, stream=stream)
        time.sleep(0.01)
        for step in range(1, 51):
            progress.advance(step, 1, 8, 0.5, 2e-5)
        losses = {"train.loss": 0.693147, "train.recent_loss": 0.024}
        others = {"train.learning_rate": 2e-5, "train.grad_norm": 2.0, "train.samples_per_second": 1578.4}
        progress.line(Row(50, 1, 0.0, losses | others))
        assert path.read_text().count("\n") == 1
        progress.start_evaluation(3)
        progress.advance_evaluation(3)
        progress.end_evaluation()
        progress.line(Row(50, 1, 0.0, {"train.loss": 0.5, "evaluation.loss": 1 / 3, "evaluation.accuracy": 1.0}))
        progress.say("Training done!")
        progress.close()
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  epoch 1/3  step 50/300  "
    expected = [
        when + r"loss 0\.024  mean_loss 0\.6931  lr 2e-05  grad_norm 2  1,578 samples/s  0:00:0\d left",
        when + r"mean_loss 0\.5  lr 2e-05  0:00:0\d left",
        when + r"evaluation  loss 0\.3333  accuracy 1",
        "Training done!",
    ]
    lines = path.read_text().splitlines()
    assert len(lines) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, lines, strict=True)), lines
    assert all(character.isprintable() for line in lines for character in line)


def test_only_the_enabled_process_shows_anything():
    stream = CountingStream()
    for is_terminal in (True, False):
        progress = Progress(10, 1, stream=stream, is_terminal=is_terminal, enabled=False)
        progress.advance(1, 1, 8, 0.5, 0.1)
        progress.line(Row(1, 1, 0.0, {"train.loss": 0.5, "evaluation.loss": 0.5}))
        progress.start_evaluation(2)
        progress.end_evaluation()
        progress.say("hello")
        progress.close()
    assert (stream.num_writes, stream.num_flushes) == (0, 0)


@pytest.fixture
def now(monkeypatch):
    """The time of a clock that only the test moves."""
    now = [100.0]
    for timed in (module,):
        monkeypatch.setattr(timed, "perf_counter", lambda: now[0])
    return now


def test_what_is_done_aside_and_evaluations_do_not_slow_the_pace(now):
    progress = Progress(100, 1, step=40, stream=CountingStream())
    now[0] += 2.0
    progress.advance(50, 1, 80, 0.5, 0.1)
    with progress.aside("evaluation"):
        progress.start_evaluation(1)
        now[0] += 8.0
        assert progress.samples_per_second() == 40.0
        progress.end_evaluation()
        now[0] += 3.0
    assert progress.samples_per_second() == 40.0


def test_the_last_bar_has_the_pace_that_was_logged_with_its_step(now):
    terminal = Terminal()
    progress = Progress(2, 1, stream=terminal.stream)
    for step in (1, 2):
        now[0] += 1.0
        progress.advance(step, 1, 80, 0.5, 0.1)
    progress.line(Row(2, 1, 0.0, {"train.samples_per_second": progress.samples_per_second()}))
    now[0] += 9.0  # of closing files and ending workers
    progress.close()
    assert "  80 samples/s" in without_colours(terminal.text()).split("\x1b[J")[-1]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_pace_is_that_of_the_last_seconds_with_and_without_a_bar(now, is_terminal):
    progress = Progress(1000, 1, stream=CountingStream(), is_terminal=is_terminal)
    for step in range(1, 201):
        now[0] += 1.0 if step <= 100 else 0.5
        progress.advance(step, 1, 8, 0.5, 0.1)
    assert progress.samples_per_second() == 16.0


def test_a_long_evaluation_does_not_push_the_last_steps_out_of_the_pace(now):
    progress = Progress(1000, 1, stream=CountingStream(), is_terminal=True)
    for step in (1, 2, 3):
        now[0] += 2.0
        progress.advance(step, 1, 8, 0.5, 0.1)
    progress.start_evaluation(100)
    for batch in range(100):
        now[0] += 1.0
        progress.advance_evaluation(batch)
    progress.end_evaluation()
    assert progress.samples_per_second() == 4.0


def test_the_first_step_has_a_pace_and_the_start_does_not_slow_later_ones(now):
    progress = Progress(100, 1, stream=CountingStream())
    now[0] += 8.0
    progress.advance(1, 1, 8, 0.5, 0.1)
    assert (progress.samples_per_second(), progress.seconds_left()) == (1.0, None)
    now[0] += 1.0
    progress.advance(2, 1, 8, 0.5, 0.1)
    assert (progress.samples_per_second(), progress.seconds_left()) == (8.0, 98.0)


def test_an_evaluation_done_again_after_a_resume_counts_only_as_often_as_it_is_to_come(now):
    progress = Progress(1000, 1, step=400, stream=CountingStream(), steps_between={"evaluation": 200.0})
    with progress.aside("evaluation"):
        now[0] += 30.0
    for step in range(401, 412):
        now[0] += 1.0
        progress.advance(step, 1, 8, 0.5, 0.1)
    assert progress.seconds_left() == 589 + 3 * 30
    progress.advance(1000, 1, 8, 0.5, 0.1)
    assert progress.seconds_left() == 0


def test_an_evaluation_that_nobody_planned_counts_by_the_step(now):
    progress = Progress(100, 1, stream=CountingStream())
    for step in (1, 2, 3):
        now[0] += 1.0
        progress.advance(step, 1, 8, 0.5, 0.1)
    progress.start_evaluation(1)
    now[0] += 4.0
    progress.end_evaluation()
    assert progress.seconds_left() == 97 * (2.0 + 4.0) / 2


@pytest.mark.parametrize(
    ("periods", "distance"),
    [([10, None], 10), ([10, 10, 40], 10), ([10, 15], 6), ([None], float("inf"))],
)
def test_what_falls_due_for_two_reasons_at_once_counts_once(periods, distance):
    assert module.mean_distance(periods) == pytest.approx(distance)


def test_nothing_is_foretold_before_the_first_step_or_without_an_end():
    assert Progress(100, 1, step=40, stream=CountingStream()).seconds_left() is None
    endless = Progress(None, None, stream=CountingStream(), is_terminal=True)
    endless.advance(7, 1, 8, None, None)
    endless.close()
    assert endless.seconds_left() is None
    assert "epoch 1  7" in without_colours(endless._stream.getvalue())


def test_a_terminal_that_goes_away_does_not_stop_the_run():
    class Gone(CountingStream):
        def write(self, text: str) -> int:
            super().write(text)
            raise BrokenPipeError

    stream = Gone()
    progress = Progress(10, 1, stream=stream, is_terminal=True)
    for step in range(1, 11):
        progress.advance(step, 1, 8, 0.5, 0.1)
        progress.say("hello")
    progress.close()
    assert stream.num_writes == 1


def test_letters_that_the_stream_cannot_hold_are_escaped():
    raw = io.BytesIO()
    progress = Progress(10, 1, stream=io.TextIOWrapper(raw, encoding="ascii", newline="\n"))
    progress.say("آ done")
    assert raw.getvalue() == b"\\u0622 done\n"


def test_after_close_lines_are_plain():
    stream = CountingStream()
    progress = Progress(10, 1, stream=stream, is_terminal=True)
    progress.advance(10, 1, 8, 0.5, 0.1)
    progress.close()
    stream.seek(0)
    stream.truncate()
    progress.start_evaluation(2)
    progress.advance_evaluation(2)
    progress.end_evaluation()
    progress.say("done")
    assert stream.getvalue() == "done\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    progress = Progress(10, 1, stream=terminal.stream)
    progress.advance(1, 1, 8, 0.5, 0.1)
    progress.say("hello")
    progress.close()
    assert terminal.text() == "hello\r\n"


def test_standard_output_is_left_alone(capsys):
    before = sys.stdout, sys.stderr, threading.active_count()
    progress = Progress(10, 1, is_terminal=True)
    progress.advance(1, 1, 8, 0.5, 0.1)
    assert (sys.stdout, sys.stderr, threading.active_count()) == before
    progress.close()
    shown = capsys.readouterr().out
    assert "1/10" in shown
    assert "\x1b[?25l" not in shown


def test_a_time_that_no_calendar_holds_is_still_told() -> None:
    assert module._time_left(1e300) == "more than 9999 days left"
    assert module._time_left(3661.2) == "1:01:01 left"

"""Pushes in the background: the caller goes on at once, the newest wins, and the record of what happened is true."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hezar_train.hub import HubRecord, Pace, Pusher, PushTarget
from tests.hub.runs import REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub

QUICK = Pace(first_seconds=0.02, longest_seconds=0.1, closing_seconds=0.05)
SLOWEST_NOTE_SECONDS = 0.001


@pytest.fixture
def run(tmp_path: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> HandmadeRun:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return finished_run(tmp_path / "run")


@pytest.fixture
def pusher_of(run: HandmadeRun) -> Iterator[Callable[..., Pusher]]:
    made: list[Pusher] = []

    def build(strategy: str = "every_save", pace: Pace = QUICK, **target: Any) -> Pusher:
        made.append(Pusher(run.root, PushTarget(REPO, strategy=strategy, **target), pace))
        made[-1].start()
        return made[-1]

    yield build
    for pusher in made:
        pusher.abandon()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def told(run: HandmadeRun) -> list[tuple[int, str, str]]:
    return [(one["step"], one["reason"], one["outcome"]) for one in HubRecord(run.root / "hub.json").entries()]


def test_each_save_is_pushed_and_the_end_at_last(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    pusher = pusher_of()
    pusher.note_saved(10)
    wait_for(lambda: len(pusher.outcomes) == 1)
    run.save(15)
    pusher.note_saved(15)
    wait_for(lambda: len(pusher.outcomes) == 2)
    assert pusher.close(wait_seconds=20)
    assert told(run) == [(10, "save", "done"), (15, "save", "done"), (15, "end", "done")]
    titles = [commit.title for commit in hub.commits(REPO)]
    assert titles == ["Step 15", "Step 10", "initial commit"]  # the end brought nothing new
    assert pusher.summary().startswith(f"pushed to {REPO}: 3 times, 0 superseded\n  last: step 15 (end)")


@pytest.mark.parametrize("strategy", ["end", "best"])
def test_saves_alone_are_not_pushed_by_the_other_strategies(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], strategy: str
) -> None:
    pusher = pusher_of(strategy)
    pusher.note_saved(5)
    pusher.note_saved(10)
    assert pusher.close(wait_seconds=20)
    expected = 10 if strategy == "end" else 5
    assert told(run) == [(expected, "end", "done")]
    weights = (run.store.path(expected) / "model.safetensors").read_bytes()
    assert hub.files(REPO)["model.safetensors"] == weights


def test_the_best_is_pushed_once_it_is_both_judged_and_on_disk(
    run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    pusher = pusher_of("best")
    pusher.note_best(5)  # on disk from an earlier start
    wait_for(lambda: len(pusher.outcomes) == 1)
    pusher.note_best(15)  # still being written
    pusher.note_best(15)
    run.save(15)
    pusher.note_saved(15)
    wait_for(lambda: len(pusher.outcomes) == 2)
    assert told(run) == [(5, "best", "done"), (15, "best", "done")]


def test_the_newest_wins_and_the_others_are_written_down(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    hub.faults.set("commit", "slow", times=1, seconds=1.0)
    pusher = pusher_of()
    pusher.note_saved(5)
    wait_for(lambda: any(request.route == "commit" for request in hub.requests))
    for step in (11, 12, 13):
        run.save(step)
        pusher.note_saved(step)
    assert pusher.close(wait_seconds=30)
    outcomes = told(run)
    assert outcomes[0] == (5, "save", "done")
    assert sorted(outcomes[1:4]) == [(11, "save", "superseded"), (12, "save", "superseded"), (13, "save", "superseded")]
    assert outcomes[4:] == [(13, "end", "done")]


def test_a_note_costs_the_caller_under_a_millisecond_and_opens_no_socket(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    create = socket.socket.__init__

    def watched(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        opened.append(threading.current_thread().name)
        create(self, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "__init__", watched)
    hub.faults.set("*", 503)
    pusher = pusher_of()
    seconds = []
    for step in range(1000):
        begin = time.perf_counter()
        pusher.note_saved(step)
        pusher.note_best(step)
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.0005)
    assert sorted(seconds)[990] < SLOWEST_NOTE_SECONDS  # the rest is the operating system's
    wait_for(lambda: any(name.startswith("hub-attempt") for name in opened))
    assert "MainThread" not in opened


def test_a_dead_server_at_the_start_is_a_warning_and_all_is_pushed_once_it_is_back(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], caplog: pytest.LogCaptureFixture
) -> None:
    hub.stop()
    pusher = pusher_of()
    pusher.note_saved(10)
    wait_for(lambda: "Trying again" in caplog.text)
    assert "Training goes on; pushes will be tried when they are due." in caplog.text
    hub.start()
    wait_for(lambda: pusher.outcomes)
    assert pusher.outcomes[0].outcome == "done"
    assert pusher.outcomes[0].attempts > 1


@pytest.mark.parametrize(("route", "fault"), [("commit", 503), ("commit", "cut"), ("info", 500), ("create", 429)])
def test_faults_in_the_middle_are_overcome(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], route: str, fault: Any
) -> None:
    pusher = pusher_of()
    pusher.note_saved(5)
    wait_for(lambda: pusher.outcomes)
    given = {"retry_after": 0} if fault in {429, 503} else {}
    hub.faults.set(route, fault, times=3, **given)
    pusher.note_saved(10)
    assert pusher.close(wait_seconds=30)
    assert hub.files(REPO)["model.safetensors"] == (run.store.path(10) / "model.safetensors").read_bytes()
    assert max(one.attempts for one in pusher.outcomes) > 1 or told(run)[1][2] == "superseded"


def test_the_breaker_opens_after_many_failures_and_a_closing_pusher_tries_at_once(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], caplog: pytest.LogCaptureFixture
) -> None:
    pace = Pace(first_seconds=0.01, breaker_failures=3, breaker_seconds=1000, closing_seconds=0.05)
    hub.faults.set("commit", 500)
    pusher = pusher_of(pace=pace)
    pusher.note_saved(5)
    wait_for(lambda: "failed 3 times in a row" in caplog.text)
    attempts = sum(request.route == "commit" for request in hub.requests)
    pusher.note_saved(10)
    time.sleep(0.3)
    assert sum(request.route == "commit" for request in hub.requests) == attempts == 3
    hub.faults.clear()
    assert pusher.close(wait_seconds=20)
    assert told(run) == [(5, "save", "superseded"), (10, "save", "superseded"), (10, "end", "done")]


def test_the_time_to_wait_is_kept_and_what_was_not_finished_is_told(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher], caplog: pytest.LogCaptureFixture
) -> None:
    hub.stop()
    pusher = pusher_of("end")
    begin = time.monotonic()
    assert not pusher.close(wait_seconds=0.5)
    assert time.monotonic() - begin < 3
    assert told(run) == [(10, "end", "unfinished")]
    assert "ConnectError" in HubRecord(run.root / "hub.json").entries()[0]["error"]
    assert not HubRecord(run.root / "hub.json").is_uploaded(10)
    assert "unfinished" in pusher.summary()


def test_a_server_that_never_answers_is_left_behind(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    hub.faults.set("info", "slow", times=1, seconds=60)
    pusher = pusher_of(pace=Pace(first_seconds=0.01, attempt_seconds=1.5))
    pusher.note_saved(10)
    wait_for(lambda: pusher.outcomes)
    assert (pusher.outcomes[0].outcome, pusher.outcomes[0].attempts) == ("done", 2)


def test_a_refusal_is_told_and_the_next_push_is_tried(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    hub.faults.set("commit", 403, times=1)
    pusher = pusher_of()
    pusher.note_saved(5)
    wait_for(lambda: pusher.outcomes)
    assert pusher.outcomes[0].outcome == "failed"
    assert "HF_TOKEN" in str(pusher.outcomes[0].error)
    assert pusher.close(wait_seconds=20)


def test_retention_may_delete_a_checkpoint_while_it_is_pushed(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    weights = (run.store.path(5) / "model.safetensors").read_bytes()
    hub.faults.set("preupload", "slow", times=1, seconds=0.7)
    pusher = pusher_of()
    pusher.note_saved(5)
    wait_for(lambda: any(request.route == "preupload" for request in hub.requests))
    assert run.store.prune(keep=1) == [5]
    wait_for(lambda: pusher.outcomes)
    assert pusher.outcomes[0].outcome == "done"
    assert hub.files(REPO)["checkpoints/last/model.safetensors"] == weights


def test_a_checkpoint_deleted_before_its_turn_is_superseded(run: HandmadeRun, pusher_of: Callable[..., Pusher]) -> None:
    run.store.prune(keep=1)
    pusher = pusher_of()
    pusher.note_saved(5)
    wait_for(lambda: pusher.outcomes)
    assert told(run) == [(5, "save", "superseded")]


def test_a_run_without_checkpoints_fails_with_a_sentence(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    run = HandmadeRun(tmp_path / "empty")
    pusher = Pusher(run.root, PushTarget(REPO), QUICK)
    pusher.start()
    assert not pusher.close(wait_seconds=10)
    assert "holds no checkpoint" in str(pusher.outcomes[0].error)


def test_pushing_leaves_the_global_generator_alone(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    hub.faults.set("commit", 500, times=2)
    random.seed(3)
    expected = random.getstate()
    pusher = pusher_of()
    pusher.note_saved(10)
    assert pusher.close(wait_seconds=20)
    assert random.getstate() == expected


def test_an_abandoned_pusher_waits_for_nothing_and_pushes_no_end(
    hub: LoopbackHub, run: HandmadeRun, pusher_of: Callable[..., Pusher]
) -> None:
    hub.faults.set("info", "slow", seconds=5)
    pusher = pusher_of()
    pusher.note_saved(10)
    wait_for(lambda: any(request.route == "info" for request in hub.requests))
    begin = time.monotonic()
    pusher.abandon()
    assert time.monotonic() - begin < 1
    assert told(run) == [(10, "save", "unfinished")]
    pusher.note_saved(11)
    assert not any(one.reason == "end" for one in pusher.outcomes)

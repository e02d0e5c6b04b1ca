"""A signal ends a run after its update and a save; nothing that happened is lost, and the resumed run is the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from workload import (
    Crash,
    CrashAt,
    NoisyPoints,
    checkpoint_steps,
    differences,
    last_checkpoint,
    make_long_trainer,
    make_trainer,
)

from hezar_train import Hook
from hezar_train.checkpoint import CheckpointStore
from hezar_train.errors import NonFiniteError, TrainingInterrupted
from hezar_train.events import INTERRUPTED, Ledger
from hezar_train.events.run_records import end_of, read_starts
from hezar_train.hooks.signals import _tell_of_other_thread
from hezar_train.types import Mode

WORKLOAD = Path(__file__).with_name("workload.py")
# a long step outside of Python, as that of a real model: the news of all processes are there when it ends
BUSY_RUN = """
import sys, torch
from workload import Hook, make_long_trainer

class Busy(Hook):
    def after_step(self):
        torch.ones(2000, 2000) @ torch.ones(2000, 2000)

make_long_trainer(sys.argv[1], hooks=[Busy()], num_dataloader_workers=1).train()
"""
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The short run that nothing happened to."""
    out: Path = tmp_path_factory.mktemp("unbroken")
    make_trainer(out).train()
    return out


@pytest.fixture(scope="module")
def rarely_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, saved at epoch ends only."""
    out: Path = tmp_path_factory.mktemp("rarely-saved")
    make_trainer(out, save_steps=None).train()
    return out


@pytest.fixture(scope="module")
def long_unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the script that nothing happened to."""
    out: Path = tmp_path_factory.mktemp("long-unbroken")
    make_long_trainer(out).train()
    return out


class Send(Hook):
    """Send signals to this very process at a moment of the step that follows `step` finished ones."""

    def __init__(self, step: int, moment: str, *signals: signal.Signals, mode: Mode = Mode.TRAIN) -> None:
        self.modes = frozenset({mode})
        self._step, self._signals = step, signals
        setattr(self, moment, self._send)

    def _send(self, _: Any) -> None:
        if self.trainer.state.global_step == self._step:
            for number in self._signals:
                signal.raise_signal(number)


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(("step", "saved"), [(0, 3), (4, 6), (5, 6), (6, 8), (9, 11)])
def test_the_window_in_hand_is_finished_then_saved(
    tmp_path: Path, rarely_saved: Path, number: signal.Signals, step: int, saved: int
) -> None:
    with pytest.raises(TrainingInterrupted) as left:
        make_trainer(tmp_path, save_steps=None, hooks=[Send(step, "on_batch_forward", number)]).train()
    assert (left.value.code, isinstance(left.value, SystemExit)) == (CODES[number], True)
    assert str(left.value) == f"{number.name}: stopped, saved at step {saved}."
    assert checkpoint_steps(tmp_path)[-1] == saved
    make_trainer(tmp_path, save_steps=None).train()
    assert differences(rarely_saved, tmp_path) == []


@pytest.mark.parametrize("step", [8, 16])
@pytest.mark.parametrize("number", CODES)
def test_an_evaluation_is_abandoned_and_done_again(
    tmp_path: Path, unbroken: Path, number: signal.Signals, step: int
) -> None:
    batches: list[int] = []
    hook = Send(step, "on_batch_end", number, mode=Mode.VAL)
    trainer = make_trainer(tmp_path, hooks=[hook])
    trainer.hooks[Mode.VAL].register(lambda _: batches.append(trainer.state.global_step), "on_batch_end", after="Send")
    with pytest.raises(TrainingInterrupted) as left:
        trainer.train()
    assert left.value.code == CODES[number]
    assert str(left.value) == f"{number.name}: evaluation abandoned, saved at step {step}."
    assert batches.count(step) < 3
    assert checkpoint_steps(tmp_path)[-1] == step
    assert not (tmp_path / "evaluations" / f"{step:08d}.json").exists()
    make_trainer(tmp_path).train()
    assert differences(unbroken, tmp_path) == []


def test_the_same_trainer_can_go_on_after_a_signal(tmp_path: Path, unbroken: Path) -> None:
    trainer = make_trainer(tmp_path, hooks=[Send(4, "on_batch_start", signal.SIGTERM)])
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    trainer.train()
    assert differences(unbroken, tmp_path) == []


def test_a_second_interrupt_leaves_at_once(tmp_path: Path, unbroken: Path) -> None:
    steps: list[int] = []
    hooks = [Send(9, "on_batch_start", signal.SIGINT, signal.SIGINT)]
    trainer = make_trainer(tmp_path, async_save=False, hooks=hooks)
    trainer.hooks[Mode.TRAIN].register(lambda _: steps.append(trainer.state.global_step), "on_batch_end")
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (steps[-1], checkpoint_steps(tmp_path)) == (9, [3, 6, 8])
    make_trainer(tmp_path).train()
    assert differences(unbroken, tmp_path) == []


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in CODES]


def _ends_well(out: Path) -> None:
    make_trainer(out).train()


def _is_interrupted(out: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        make_trainer(out, hooks=[Send(4, "on_batch_start", signal.SIGTERM)]).train()


def _crashes(out: Path) -> None:
    with pytest.raises(Crash):
        make_trainer(out, hooks=[CrashAt(4, "on_batch_start")]).train()


@pytest.mark.parametrize("run", [_ends_well, _is_interrupted, _crashes])
def test_handlers_are_put_back(tmp_path: Path, run: Callable[[Path], None]) -> None:
    def own(*_: Any) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own)
    try:
        handlers = _handlers()
        run(tmp_path)
        assert _handlers() == handlers
    finally:
        signal.signal(signal.SIGTERM, before)


class Poisoned(NoisyPoints):
    """One sample is not a number."""

    def __init__(self, num_samples: int, index: int) -> None:
        super().__init__(num_samples)
        self.points[index] = float("nan")


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_samples(
    tmp_path: Path, accumulation: int
) -> None:
    order = NoisyPoints(30)
    make_trainer(tmp_path / "good", data=order, gradient_accumulation_steps=accumulation).train()
    index = order.fetched[17]
    trainer = make_trainer(tmp_path / "bad", data=Poisoned(30, index), gradient_accumulation_steps=accumulation)
    with pytest.raises(NonFiniteError, match=r"loss nan in the update at step .* it was not applied") as stopped:
        trainer.train()
    first, count, step = {1: (16, 4, 5), 3: (12, 12, 6)}[accumulation]
    assert (stopped.value.step, stopped.value.samples) == (step, order.fetched[first : first + count])
    assert ", ".join(map(str, stopped.value.samples)) in str(stopped.value)
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert checkpoint_steps(tmp_path / "bad") == [3]


def test_a_gradient_that_is_not_finite_stops_before_the_update(tmp_path: Path) -> None:
    class Overflow(Hook):
        def on_batch_backward(self, ctx: Any) -> None:
            if self.trainer.state.global_step == 7:
                next(iter(ctx.model.parameters())).grad.fill_(float("inf"))

    trainer = make_trainer(tmp_path, hooks=[Overflow()])
    with pytest.raises(NonFiniteError, match=r"gradient norm inf \(loss .*\) in the update at step 8"):
        trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert checkpoint_steps(tmp_path) == [3, 6]


def _start(out: Path, *options: str, program: Sequence[str] = (str(WORKLOAD),)) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(WORKLOAD.parent), os.environ.get("PYTHONPATH", "")])},
    )


def _wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    """Read what the run prints until it is past a step."""
    assert process.stdout is not None
    for line in process.stdout:
        if any(f"  step {number}/" in line for number in range(step, step + 4)):
            return
    raise AssertionError(f"the run ended with {process.wait()} before step {step}")


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGINT, 2)])
def test_a_real_process_ends_with_its_code_and_resumes(
    tmp_path: Path, long_unbroken: Path, number: signal.Signals, workers: int
) -> None:
    process = _start(tmp_path, "--workers", str(workers), "--step-seconds", "0.02")
    _wait_for_step(process, 18)
    os.killpg(process.pid, number)  # as a terminal and a scheduler do: the workers get it too
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == CODES[number], printed
    assert printed.count(f"{number.name}: finishing this update") == 1
    assert "Traceback" not in printed
    state = json.loads((last_checkpoint(tmp_path) / "trainer_state.json").read_text())["state"]
    lines = list(Ledger.read(tmp_path / "ledger.jsonl"))
    assert lines[-1].update == state["update_step"] == len(lines)
    make_long_trainer(tmp_path).train()
    assert differences(long_unbroken, tmp_path) == []


def test_a_real_process_leaves_at_once_after_a_second_interrupt(tmp_path: Path, long_unbroken: Path) -> None:
    process = _start(tmp_path, "--step-seconds", "0.7")
    _wait_for_step(process, 6)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in printed
    newest, rejected = CheckpointStore(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert (newest.step, rejected) == (6, [])  # the window in hand was neither finished nor saved
    make_long_trainer(tmp_path).train()
    assert differences(long_unbroken, tmp_path) == []


@pytest.mark.parametrize("pause_seconds", [0.1, 0.2, 0.4])
def test_two_interrupts_of_the_whole_group_are_an_interruption_and_no_crash_of_a_worker(
    tmp_path: Path, pause_seconds: float
) -> None:
    process = _start(tmp_path, program=["-c", BUSY_RUN])
    _wait_for_step(process, 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the worker gets it too
    time.sleep(pause_seconds)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0  # the second may come in the same step as the first, in a later one, or at the exit
    assert "DataLoader worker" not in printed
    assert end_of(read_starts(tmp_path)[-1])["how"] == INTERRUPTED
    with pytest.raises(ProcessLookupError):  # no worker is left
        os.killpg(process.pid, 0)


def test_a_run_in_another_thread_is_the_same_one_and_says_once_that_signals_save_nothing(
    tmp_path: Path, unbroken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hezar_train")
    _tell_of_other_thread.cache_clear()
    for part in ("first", "second"):
        thread = threading.Thread(target=lambda out=tmp_path / part: make_trainer(out).train())
        thread.start()
        thread.join()
        assert differences(unbroken, tmp_path / part) == []
    told = [line for line in caplog.messages if "SIGTERM and Ctrl-C will not be followed by a save" in line]
    assert len(told) == 1

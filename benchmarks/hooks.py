"""Measure what the hook system costs in a step without a user's hook, and fail if it is more than its limit.

    python benchmarks/hooks.py [--processes 8] [--rounds 150] [--steps 25] [--profile]

One thread, the parts of a real Trainer on the `tiny` workload of pace.py. One contestant walks the loop as
`train()` does: routine, hook set, frames. The other calls the same default hooks by hand, in the same order, in a plain
`for` loop over the same windows, with a bare namespace for a context; like the loop it lets go of what it made of a
batch when the batch is done. They take turns in many short rounds, and every step is timed for itself, from one window
to the next. A contestant's figure in a process is the mean of its fastest hundredth, so that no single lucky step
decides. Where things lie in memory differs from process to process and is worth more than what is measured, so the same
is done in several fresh processes, and what is judged is the ratio of the minima over them. The floor walked a second
time tells how much of it is noise.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from pace import MAX_GRAD_NORM, RATE, WORKLOADS, make_dataset, make_model

from hezar_train import Trainer, TrainerConfig
from hezar_train.data import Window
from hezar_train.loop import Context, Fit, Moment
from hezar_train.plan import End
from hezar_train.types import Mode

WORKLOAD = "tiny"
LIMIT = 1.02
MUCH_NOISE = 0.005
PROFILE_LINES = 25
LOOP, FLOOR, FLOOR_AGAIN = "loop", "by hand", "by hand again"


def make_trainer(folder: str) -> Trainer:
    """Build the trainer of the pace benchmark; nothing falls due in a round, so that only steps are measured."""
    config = TrainerConfig(
        output_dir=folder,
        batch_size=WORKLOADS[WORKLOAD].batch_size,
        use_cpu=True,
        optimizer="adamw",
        learning_rate=RATE,
        weight_decay=0.01,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler="linear",
        lr_scheduler_kwargs={"start_factor": 1.0, "end_factor": 0.0},
        lr_scheduling_steps=1,
        criterion="CrossEntropyLoss",
        save_enabled=False,
    )
    return Trainer(config, make_model(WORKLOAD), make_dataset(WORKLOAD))


def start_of(trainer: Trainer, num_steps: int) -> Fit:
    """Go back to the start of the epoch, for so many steps."""
    state = trainer.state
    state.update(epoch=1, position=0, epoch_step=0, epoch_finished=False)
    fit = trainer.parts.session.make_fit()
    fit.end, fit.num_epochs = End(state.global_step + num_steps), 1
    return fit


@contextmanager
def walk_the_loop(trainer: Trainer, num_steps: int) -> Iterator[Callable[[], object]]:
    """Yield what walks an epoch as `train()` does, inside of what `train()` opens around its epochs."""
    fit = start_of(trainer, num_steps)
    with trainer.parts.loop.entered(fit):
        yield partial(trainer.inner_training_loop, 1)


@contextmanager
def call_by_hand(trainer: Trainer, num_steps: int) -> Iterator[Callable[[], object]]:
    """Yield what calls the default hooks by hand."""
    fit = start_of(trainer, num_steps)
    hooks = trainer.hooks[Mode.TRAIN]
    seed, prepare_input = hooks.calls(Moment.BATCH_START)
    (forward,), (backward,) = hooks.calls(Moment.BATCH_FORWARD), hooks.calls(Moment.BATCH_BACKWARD)
    (gather,) = hooks.calls(Moment.GRADIENTS)
    guard, clip, step, zero_grad = hooks.calls(Moment.UPDATE)
    count, schedule, keep_place, progress, due = hooks.calls(Moment.BATCH_END)
    ctx = Context(storage=trainer.storage, model=trainer.model)
    own = ctx.step

    def loop() -> None:
        for window in fit.windows(1):
            own.window = window
            last = len(window.batches) - 1
            for number, batch in enumerate(window.batches):
                own.batch, own.batch_in_window, own.closes_window = batch, number, number == last
                seed(ctx)
                prepare_input(ctx)
                forward(ctx)
                backward(ctx)
                if number == last:
                    gather(ctx)
                    guard(ctx)
                    clip(ctx)
                    step(ctx)
                    zero_grad(ctx)
                count(ctx)
                schedule(ctx)
                keep_place(ctx)
                progress(ctx)
                due(ctx)
                own.batch = own.outputs = own.loss = None

    yield loop


CONTESTANTS = {LOOP: walk_the_loop, FLOOR: call_by_hand, FLOOR_AGAIN: call_by_hand}


@contextmanager
def stamped(trainer: Trainer) -> Iterator[list[int]]:
    """Note the time whenever a contestant asks for its next window."""
    source, stamps = trainer.setup.source, []
    windows, now = source.windows, time.perf_counter_ns

    def stamped_windows(*args: Any) -> Iterator[Window]:
        for window in windows(*args):
            stamps.append(now())
            yield window

    source.windows = stamped_windows  # type: ignore[method-assign]
    try:
        yield stamps
    finally:
        source.windows = windows  # type: ignore[method-assign]


def measure(trainer: Trainer, num_rounds: int, num_steps: int) -> dict[str, list[int]]:
    """Let the contestants take turns; return the nanoseconds of each step, the fastest first."""
    times: dict[str, list[int]] = {name: [] for name in CONTESTANTS}
    names = list(CONTESTANTS)
    with stamped(trainer) as stamps:
        for round_number in range(num_rounds):
            turn = round_number % len(names)  # so that nobody always follows the same neighbour
            for name in names[turn:] + names[:turn]:
                before = trainer.state.global_step
                with CONTESTANTS[name](trainer, num_steps) as run:
                    stamps.clear()
                    run()
                if trainer.state.global_step != before + num_steps:
                    sys.exit(f"{name} did {trainer.state.global_step - before} steps instead of {num_steps}")
                times[name] += [end - start for start, end in itertools.pairwise(stamps)]
    return {name: sorted(steps) for name, steps in times.items()}


def fast_steps(times: dict[str, list[int]]) -> dict[str, float]:
    """Return the microseconds of each contestant's fastest hundredth."""
    return {name: statistics.fmean(steps[: max(1, len(steps) // 100)]) / 1e3 for name, steps in times.items()}


def judge(found: list[dict[str, float]]) -> bool:
    """Print the table of minima and compare the loop with its limit."""
    best = {name: min(one[name] for one in found) for name in CONTESTANTS}
    for name, micros in best.items():
        print(f"{name:<15}{micros:>9.2f} us/step{micros / best[FLOOR]:>8.4f}")
    floor = min(best[FLOOR], best[FLOOR_AGAIN])  # the faster of the two, so that a slow floor flatters nobody
    noise, ratio = max(best[FLOOR], best[FLOOR_AGAIN]) / floor - 1, best[LOOP] / floor
    each = sorted(one[LOOP] / min(one[FLOOR], one[FLOOR_AGAIN]) for one in found)
    print("ratio in each process: " + " ".join(f"{one:.4f}" for one in each))
    if noise > MUCH_NOISE:
        print(f"the floor against itself is {1 + noise:.4f}: the machine is busy, run it again")
    passed = ratio <= LIMIT
    print(f"hook system {ratio:.4f}, limit {LIMIT}: {'PASS' if passed else 'FAIL'}")
    return passed


def measure_elsewhere(asked: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of its own."""
    told = [sys.executable, __file__, "--processes", "0", "--rounds", str(asked.rounds), "--steps", str(asked.steps)]
    answer = subprocess.run(told, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def show_profile(trainer: Trainer, num_rounds: int, num_steps: int) -> None:
    """Print where the loop spends its time."""
    profiler = cProfile.Profile()
    for _ in range(num_rounds):
        with walk_the_loop(trainer, num_steps) as run:
            profiler.runcall(run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(PROFILE_LINES)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=8, help="fresh processes; 0 measures in this one, prints JSON")
    parser.add_argument("--rounds", type=int, default=150, help="times that every contestant runs")
    parser.add_argument("--steps", type=int, default=25, help="steps of a round")
    parser.add_argument("--profile", action="store_true", help="profile the loop instead")
    return parser.parse_args()


def measure_here(asked: argparse.Namespace) -> None:
    """Measure in this process and print the figures as JSON, or print a profile."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        trainer.model.train()
        with trainer.parts.session.training():
            measure(trainer, num_rounds=5, num_steps=asked.steps)  # warm up
            gc.collect()
            gc.freeze()  # what the imports made is nobody's step
            if asked.profile:
                show_profile(trainer, asked.rounds, asked.steps)
            else:
                print(json.dumps(fast_steps(measure(trainer, asked.rounds, asked.steps))))


def main() -> int:
    asked = parse()
    if asked.profile or asked.processes == 0:
        measure_here(asked)
        return 0
    return 0 if judge([measure_elsewhere(asked) for _ in range(asked.processes)]) else 1


if __name__ == "__main__":
    sys.exit(main())

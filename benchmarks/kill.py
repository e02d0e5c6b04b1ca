"""Kill a run with SIGKILL at random moments, start it again with the same command, and compare it with an unbroken run.

    python benchmarks/kill.py [--kills 50] [--workers 0 2] [--kills-per-run 5] [--parallel 2] [--seed 1]

Each run is a fresh process that is killed a few times (the main process alone: its workers must not be in the way) and
then left to finish. Kills strike right after it has taken its place, while it trains, and while a checkpoint is being
written (the hidden folder that is left behind is the proof). Weights, optimizer state, every logged value, ledger,
evaluations and best result must be the same to the bit; only times, rates and memory may differ. Exits with 1 if a run
differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKLOAD = Path(__file__).parents[1] / "tests" / "behaviour" / "workload.py"
BALLAST = 400_000  # parameters that make a save take a while
POLL_SECONDS = 0.001
LONGEST_RUN_SECONDS = 120.0
START_SECONDS = 0.1  # in which files are cut back to the checkpoint and the first steps are done
SAVE_SECONDS = 0.02
BETWEEN_KILLS_SECONDS = 0.7  # of training, at most: so that a run is killed several times before it ends
STARTS, TRAINS, SAVES = "starts", "trains", "saves"
MIX = (STARTS, TRAINS, TRAINS, TRAINS, TRAINS, SAVES, SAVES, SAVES, SAVES, SAVES)


@dataclass
class Outcome:
    """What became of one run."""

    kills: int = 0
    inside_save: int = 0
    starts: int = 0
    differences: list[str] = field(default_factory=list)

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.kills + other.kills,
            self.inside_save + other.inside_save,
            self.starts + other.starts,
            self.differences + other.differences,
        )


@dataclass(frozen=True)
class Command:
    """The command line of a run, the same for every start."""

    workers: int
    ballast: int = BALLAST
    step_seconds: float = 0.01

    def start(self, run: Path) -> subprocess.Popen[bytes]:
        """Start or resume the run, with what it prints in a file beside it."""
        line = [sys.executable, str(WORKLOAD), str(run), "--workers", str(self.workers)]
        line += ["--ballast", str(self.ballast), "--step-seconds", str(self.step_seconds)]
        with _log_of(run).open("ab") as log:
            return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)

    def finish(self, run: Path) -> None:
        """Run to the end; raise with what was printed if it fails."""
        process = self.start(run)
        try:
            code = process.wait(LONGEST_RUN_SECONDS)
        finally:
            process.kill()
        if code != 0:
            raise RuntimeError(f"{run} ended with {code}:\n{_log_of(run).read_text(errors='replace')[-4000:]}")


def kill_and_compare(command: Command, run: Path, unbroken: Path, kinds: list[str], rng: random.Random) -> Outcome:
    """Kill a run once for each kind of moment, let it finish, and list its differences from the unbroken run."""
    outcome = Outcome()
    for kind in kinds:
        process = command.start(run)
        outcome.starts += 1
        hit = _kill_when(process, run, kind, rng)
        if process.wait() == 0:  # it was faster than the kill
            break
        if not hit:
            raise RuntimeError(f"{run} failed by itself:\n{_log_of(run).read_text(errors='replace')[-4000:]}")
        outcome.kills += 1
        outcome.inside_save += _is_saving(run)
    command.finish(run)
    outcome.starts += 1
    found = load_workload().differences(unbroken, run) + [path.name for path in _leftovers(run)]
    outcome.differences = [f"{run.name}: {name}" for name in found]
    return outcome


def _kill_when(process: subprocess.Popen[bytes], run: Path, kind: str, rng: random.Random) -> bool:
    """Wait for a moment of that kind and kill the main process; return False if it ended before."""
    _wait_until(process, lambda: _holder(run) == process.pid)
    time.sleep(rng.uniform(0.0, START_SECONDS if kind == STARTS else BETWEEN_KILLS_SECONDS))
    if kind == SAVES:
        _freeze_in_a_save(process, run, rng)
    alive = process.poll() is None
    process.kill()
    return alive


def _freeze_in_a_save(process: subprocess.Popen[bytes], run: Path, rng: random.Random) -> None:
    """Stop the process at a random moment of a save; if the save was faster, let it go on to the next one."""
    while process.poll() is None:
        _wait_until(process, lambda: not _is_saving(run))  # one that the last kill left, or that is under way
        _wait_until(process, lambda: _is_saving(run))
        time.sleep(rng.uniform(0.0, SAVE_SECONDS))
        process.send_signal(signal.SIGSTOP)
        time.sleep(POLL_SECONDS)
        if _is_saving(run):
            return
        process.send_signal(signal.SIGCONT)


def _wait_until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(POLL_SECONDS)


def _holder(run: Path) -> int | None:
    """Return the process that trains in the folder, by the note in the lock file."""
    try:
        return int(json.loads((run / "lock").read_text())["pid"])
    except (OSError, ValueError):
        return None


def _is_saving(run: Path) -> bool:
    return any(_leftovers(run))


def _leftovers(run: Path) -> Iterator[Path]:
    return (run / "checkpoints").glob(".tmp-*")


def _log_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.log")


def load_workload() -> Any:
    """Import the workload's file; torch comes with it."""
    sys.path.insert(0, str(WORKLOAD.parent))
    return importlib.import_module(WORKLOAD.stem)


def measure(workers: int, options: argparse.Namespace, folder: Path) -> Outcome:
    """Make an unbroken run and as many killed ones as it takes."""
    command, rng = Command(workers), random.Random(options.seed + workers)
    folder.mkdir()
    command.finish(folder / "unbroken")
    total, number = Outcome(), 0
    with ThreadPoolExecutor(options.parallel) as pool:
        while total.kills < options.kills:
            missing = options.kills - total.kills
            jobs = []
            while missing > 0:
                kinds = [rng.choice(MIX) for _ in range(min(missing, options.kills_per_run))]
                missing -= len(kinds)
                number += 1
                run, own = folder / f"run-{number:02d}", random.Random(rng.random())
                jobs.append(pool.submit(kill_and_compare, command, run, folder / "unbroken", kinds, own))
            total = sum((job.result() for job in jobs), start=total)
    return total


def main() -> int:
    """Print a line for each number of workers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--kills-per-run", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print("workers  kills  inside a save  starts  minutes  result", flush=True)
    is_good = True
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        for workers in options.workers:
            began = time.monotonic()
            found = measure(workers, options, Path(folder) / f"workers-{workers}")
            minutes = (time.monotonic() - began) / 60
            counts = f"{workers:7}  {found.kills:5}  {found.inside_save:13}  {found.starts:6}  {minutes:7.1f}"
            print(counts, "FAIL" if found.differences else "PASS", *found.differences, sep="  ", flush=True)
            is_good = is_good and not found.differences
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""Kill random ranks of a run under the elastic agent with SIGKILL, and compare it with an unbroken run.

    python benchmarks/elastic.py [--kills 20] [--num-processes 2] [--seed 1] [--epochs 100]

`hezar-train train image_classification --num-processes 2` is left alone but for the kills: each strikes a random rank
at a random moment after the run has saved something new. The agent must start all ranks again each time, the run must
end by itself, and its last checkpoint must be that of the unbroken run to the bit. How many updates each recovery
repeated is read from the ledger: what lies past a checkpoint is set aside when the run goes on. Exits with 1 if a kill
was not recovered from, if more was repeated than a save interval and what was trained while a checkpoint was written,
or if the weights differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hezar_train.events import Ledger

ROOT = Path(__file__).parents[1]
SAVE_STEPS = 20
WHILE_WRITING = 20
"""Updates that may be trained while a checkpoint of this small model is written, on a slow disk."""

POLL_SECONDS = 0.02
LONGEST_WAIT_SECONDS = 180.0
"""For a run to save something new, from the start of its processes on."""


class Group:
    """A run on several processes, started as a user starts it."""

    def __init__(self, out: Path, asked: argparse.Namespace) -> None:
        self.out, self._num_processes = out, asked.num_processes
        command = [
            sys.executable, "-m", "hezar_train", "train", str(ROOT / "recipes" / "image_classification"),
            f"output_dir={out}",
            "--num-processes", str(asked.num_processes), "--max-restarts", str(asked.kills),
            f"num_epochs={asked.epochs}", f"save_steps={SAVE_STEPS}", "global_batch_size=64", "batch_size=16",
            "do_evaluate=false", "metric_for_best_model=loss", "save_total_limit=3",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.log = out.with_suffix(".log")
        with self.log.open("wb") as log:
            self.front = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def newest(self) -> int:
        return max((int(one.name) for one in (self.out / "checkpoints").glob("[0-9]*")), default=0)

    @property
    def num_dropped(self) -> int:
        """Updates that were set aside because a checkpoint was older."""
        found = self.out / "ledger.jsonl.dropped"
        return sum(1 for _ in Ledger.read(found)) if found.exists() else 0

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that is alive."""
        found = {}
        try:
            for pid in Path(f"/proc/{self.front.pid}/task/{self.front.pid}/children").read_text().split():
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                found |= {int(one.removeprefix("RANK=")): int(pid) for one in variables if one.startswith("RANK=")}
        except OSError:  # it has ended meanwhile
            return {}
        return found

    def wait_for_progress(self, killed: int | None) -> bool:
        """Wait until all ranks are there again and something new is saved; return False if the run has ended."""
        until = time.monotonic() + LONGEST_WAIT_SECONDS
        before = self.newest
        while time.monotonic() < until:
            if self.front.poll() is not None:
                return False
            ranks = self.ranks()
            if len(ranks) == self._num_processes and killed not in ranks.values() and self.newest > before:
                return True
            time.sleep(POLL_SECONDS)
        self.front.kill()
        raise TimeoutError(f"nothing new was saved in {LONGEST_WAIT_SECONDS:.0f} s after a kill:\n{self.tail()}")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def kill_ranks(group: Group, asked: argparse.Namespace) -> list[int]:
    """Kill so many ranks; return the updates that each recovery repeated."""
    rng, killed, repeated = random.Random(asked.seed), None, []
    for number in range(asked.kills + 1):
        dropped = group.num_dropped
        if not group.wait_for_progress(killed):
            sys.exit(f"the run ended after {number} kills, of {asked.kills}: give it more --epochs\n{group.tail()}")
        if number:
            repeated.append(group.num_dropped - dropped)
            print(f"kill {number}: recovered, {repeated[-1]} updates repeated", flush=True)
        if number < asked.kills:
            time.sleep(rng.uniform(0.0, 0.5))
            ranks = group.ranks()
            killed = ranks[rng.choice(sorted(ranks))]
            os.kill(killed, signal.SIGKILL)
    return repeated


def last_weights(out: Path) -> str:
    newest = max((out / "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        unbroken = Group(Path(folder) / "unbroken", asked)
        if unbroken.front.wait() != 0:
            sys.exit(unbroken.tail())
        group = Group(Path(folder) / "killed", asked)
        try:
            repeated = kill_ranks(group, asked)
            code = group.front.wait()
        finally:
            group.front.kill()
        if code != 0:
            sys.exit(f"the run ended with {code}\n{group.tail()}")
        is_same = last_weights(unbroken.out) == last_weights(group.out)
    most = SAVE_STEPS // (64 // 16) + WHILE_WRITING
    passed = is_same and max(repeated) <= most
    print(f"{len(repeated)} kills, {len(repeated)} recoveries; repeated at most {max(repeated)} updates (limit {most})")
    print(f"weights {'equal' if is_same else 'DIFFER'}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Feed the readers of this package with files that somebody made up, guided by coverage, for as long as is asked.

    pip install atheris
    python benchmarks/fuzz.py checkpoint [--seconds 3600] [--corpus FOLDER] [--seed 1]

The targets are those of `tests/security/fuzzing.py`: checkpoint, config, hub, ledger, manifest, run_folder. A crash, an
exception that is not this package's, or more than five seconds of CPU time for one input ends it with exit code 77; the
input is then in `FOLDER/found`, to be mended and kept in `tests/security/corpus/TARGET`. Inputs that reached something
new are in `FOLDER/TARGET`, from where the next call goes on. `--seconds` is CPU time of this process.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "security" / "corpus"
NAMES = ("checkpoint", "config", "hub", "ledger", "manifest", "run_folder")
READERS = (
    *("checkpoint", "config", "errors", "events", "hooks.early_stopping", "hub", "optim.schedule", "optim.schedulers"),
    *("plan", "recipes", "report", "run_folder", "run_layout", "state", "cli.config", "cli.runs", "cli.verify"),
    *("trainer.checkpointing", "trainer.run_files", "data.streams"),
)
"""Modules whose coverage counts; the training loop would only slow it down."""
LONGEST_INPUT = 400
NUM_SEEDS = 100
MOST_MEGABYTES = 6144
WALL_SECONDS = 20  # of one input: a reader that waits instead of computing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=NAMES)
    parser.add_argument("--seconds", type=float, default=3600.0, help="CPU time")
    parser.add_argument("--corpus", type=Path, default=Path("fuzz-corpus"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="keep inputs that raise, each kind once, and go on")
    given = parser.parse_args()
    run(given.target, given.seconds, given.corpus, given.seed, keep_going=given.keep_going)


def run(target: str, seconds: float, corpus: Path, seed: int, *, keep_going: bool) -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("benchmarks/fuzz.py needs atheris: pip install atheris (Linux, and a Python that it has a wheel for)")
    sys.path.insert(0, str(ROOT))
    packages = ["hezar_train", *(["yaml"] if target == "config" else [])]
    with atheris.instrument_imports(include=packages, exclude=list(others_than(READERS))):
        from tests.security.fuzzing import TARGETS, ByteChoices, judged
    work = tempfile.TemporaryDirectory(prefix="hezar-train-fuzz-", dir=_memory())
    atexit.register(work.cleanup)
    call = TARGETS[target](Path(work.name))
    count = Count(target, seconds, work)

    def test_one(data: bytes) -> None:
        try:
            judged(call, ByteChoices(data))
        except Exception as error:
            if not keep_going:
                raise
            keep(data, error, corpus / "found", target)
        count.note()

    folders = [corpus / target, corpus / "found"]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    _plant(folders[0], seed)
    seeds = [str(KEPT / target)] if (KEPT / target).is_dir() else []
    atheris.Setup([
        sys.argv[0], str(folders[0]), *seeds, f"-artifact_prefix={folders[1]}/{target}-", f"-seed={seed}",
        f"-max_len={LONGEST_INPUT}", f"-timeout={WALL_SECONDS}", f"-rss_limit_mb={MOST_MEGABYTES}", "-len_control=0",
        "-print_final_stats=1", f"-max_total_time={int(seconds * 4)}",
    ], test_one)  # fmt: skip
    atheris.Fuzz()


def others_than(readers: tuple[str, ...]) -> Iterator[str]:
    """Yield the modules of the package that are none of these, nor below them."""
    for path in sorted((ROOT / "hezar_train").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(tuple(f"hezar_train.{reader}" for reader in readers)):
            yield name


def _plant(folder: Path, seed: int) -> None:
    """Give an empty corpus inputs of several lengths to begin with: at some dozens per second, none grow by chance."""
    chance = random.Random(seed)
    if not any(folder.iterdir()):
        for number in range(NUM_SEEDS):
            (folder / f"seed-{number}").write_bytes(chance.randbytes(chance.randint(8, LONGEST_INPUT // 2)))


def keep(data: bytes, error: Exception, folder: Path, target: str) -> None:
    """Keep an input by what it raised and where, the shortest of each kind."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    path = folder / f"{target}-{type(error).__name__}-{Path(last.filename).stem}-{last.lineno}"
    if not path.exists() or path.stat().st_size > len(data):
        path.write_bytes(data)
        print(f"found: {path.name}: {error!r:.200}", flush=True)


def _memory() -> str | None:
    """Return a folder in memory, if there is one: hundreds of files are written per second."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Count:
    """Count executions, and end the process when its CPU time is used up."""

    def __init__(self, target: str, seconds: float, work: Any) -> None:
        self._target, self._seconds, self._work = target, seconds, work
        self._executions, self._begun, self._told = 0, time.monotonic(), 0.0

    def note(self) -> None:
        self._executions += 1
        used = time.process_time()
        if used >= self._seconds or used - self._told > 300:
            self._told = used
            self._tell(used)
        if used >= self._seconds:
            self._work.cleanup()
            os._exit(0)  # libFuzzer has no other way out

    def _tell(self, used: float) -> None:
        wall = time.monotonic() - self._begun
        print(
            f"{self._target}: {self._executions:,} executions in {used:.0f} s of CPU time, {wall:.0f} s of wall time, "
            f"{self._executions / used:.1f} executions per second of CPU time",
            flush=True,
        )


if __name__ == "__main__":
    main()

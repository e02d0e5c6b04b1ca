"""Train recipes with another version of this package and with this one, and compare what they leave, bit by bit.

    git worktree add ../before COMMIT
    python benchmarks/versions.py --old ../before [--recipes image_classification vae gan text_classification]

Each recipe is trained three times, every start a process of its own that imports one version and has that version's
recipe: by the old version; by the new one; and by the old one, killed with SIGKILL half way, and then by the new one to
its end. All three must be the same: each file of each checkpoint by its SHA-256, logged rows, ledger, evaluations with
their pictures, best result, plan and config. What a clock decides is left out, and listed below; so are settings and
counters that only one of the two versions has, which are named. Exits with 1 if something differs.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RECIPES = ("image_classification", "vae", "gan", "text_classification")
OVERRIDES = (  # two epochs whose last windows are short, for 83, 45 and 23 steps are odd
    *("num_epochs=2", "gradient_accumulation_steps=2"),
    *("log_steps=6", "save_steps=10", "eval_steps=30", "save_total_limit="),
)
WHOLE_FILES = ("best.json", "plan.json", "train_config.yaml", "checkpoints/**/*", "evaluations/**/*")
UNEQUAL_KEYS = {  # sizes and names of logs, which have times in them, and hashes of files that have these
    "trainer_state.json": (("state", "files"), ("state", "logs_dir")),
    "manifest.json": (("sha256",), ("files", "trainer_state.json"), ("files", "train_config.yaml")),
}
READ_FILES = (*UNEQUAL_KEYS, "plan.json", "train_config.yaml")
"""Files that are compared value by value, because another version may have a name more in them."""
UNEQUAL_COLUMNS = ("time", "samples_per_second", "memory", "seconds")  # a column with one of these in its name
PUT_ASIDE = ".dropped"  # what a run had done beyond the checkpoint that it went on from
LONGEST_RUN_SECONDS = 300.0
POLL_SECONDS = 0.001
MOST_NAMED = 6
MOST_TOLD = 1500  # characters of what a run printed that failed


@dataclass(frozen=True)
class Version:
    """A checkout of the package."""

    root: Path

    def start(self, recipe: str, folder: Path) -> subprocess.Popen[bytes]:
        """Start or resume the run of a recipe in a folder; what it prints goes to a file beside it."""
        line = [sys.executable, "-P", "-m", "hezar_train", "train", str(self.root / "recipes" / recipe)]
        with _log_of(recipe, folder).open("ab") as log:
            return subprocess.Popen(
                [*line, *OVERRIDES, f"output_dir={recipe}"], cwd=folder, env=self.environment(), stdout=log, stderr=log
            )

    def finish(self, recipe: str, folder: Path) -> Path:
        """Train to the end; return the run, or raise with what was printed if it fails."""
        process = self.start(recipe, folder)
        try:
            code = process.wait(LONGEST_RUN_SECONDS)
        finally:
            process.kill()
        if code != 0:
            raise RuntimeError(f"ended with {code}: {_tail(recipe, folder)}")
        return folder / recipe

    def environment(self) -> dict[str, str]:
        """Return variables with which Python imports this version, on one thread, and writes nothing beside it."""
        own = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    def check(self) -> None:
        """Raise unless it is this version that is imported."""
        code = "import hezar_train; print(hezar_train.__file__)"
        line = [sys.executable, "-P", "-c", code]
        done = subprocess.run(line, env=self.environment(), check=True, capture_output=True, text=True)
        if not Path(done.stdout.strip()).resolve().is_relative_to(self.root):
            raise RuntimeError(f"{self.root} has no package hezar_train: {done.stdout.strip()} was imported")


@dataclass(frozen=True)
class Outcome:
    """What became of one recipe."""

    recipe: str
    num_files: int
    killed_at: int
    seconds: float
    changed: list[str]
    changed_when_handed_over: list[str]
    only_in_one: list[str]
    """Names in the files that one version has and the other does not."""

    @property
    def is_good(self) -> bool:
        """Tell whether all three runs are the same."""
        return self.num_files > 0 and not self.changed and not self.changed_when_handed_over


def compare(recipe: str, old: Version, new: Version, folder: Path) -> Outcome:
    """Train a recipe in all three ways, and list in what the second and the third differ from the first."""
    began = time.monotonic()
    places = [folder / name for name in ("old", "new", "old-then-new")]
    for place in places:
        place.mkdir(exist_ok=True)
    unbroken = fingerprints(old.finish(recipe, places[0]))
    only_in_one: set[str] = set()
    changed = changes_of(new, recipe, places[1], unbroken, only_in_one)
    killed_at = kill_half_way(old, recipe, places[2])
    changed_when_handed_over = changes_of(new, recipe, places[2], unbroken, only_in_one)
    seconds = time.monotonic() - began
    return Outcome(recipe, len(unbroken), killed_at, seconds, changed, changed_when_handed_over, sorted(only_in_one))


def changes_of(
    version: Version, recipe: str, folder: Path, unbroken: dict[str, Any], only_in_one: set[str]
) -> list[str]:
    """Train to the end, and name what only one of two runs has or is not the same in both; a failure is one, too."""
    try:
        found = fingerprints(version.finish(recipe, folder))
    except RuntimeError as failure:
        return [str(failure)]
    names = sorted(unbroken.keys() | found.keys())
    return [
        name for name in names
        if name not in unbroken or name not in found
        or not _is_same(unbroken[name], found[name], Path(name).name, only_in_one)
    ]  # fmt: skip


def _is_same(one: Any, other: Any, where: str, only_in_one: set[str]) -> bool:
    """Compare two values; names of mappings that only one has are noted and left out."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return bool(one == other)
    only_in_one |= {f"{where}: {key}" for key in one.keys() ^ other.keys()}
    both = one.keys() & other.keys()
    same = [_is_same(one[key], other[key], f"{where}: {key}", only_in_one) for key in both]  # all are looked at
    return all(same)


def kill_half_way(version: Version, recipe: str, folder: Path) -> int:
    """Kill a run once it has a checkpoint of its second half; return the step of its newest one."""
    run, process = folder / recipe, version.start(recipe, folder)
    try:
        while process.poll() is None and not _is_half_way(run):
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
    if process.wait() != -signal.SIGKILL or max(_saved_steps(run)) >= _total_steps(run):
        raise RuntimeError(f"{run} ended before it could be killed: {_tail(recipe, folder)}")
    return max(_saved_steps(run))


def fingerprints(run: Path) -> dict[str, Any]:
    """Return what a run must leave in the same way each time, by name: a SHA-256, or the values of what is read."""
    files = {path.relative_to(run) for pattern in WHOLE_FILES for path in run.glob(pattern) if path.is_file()}
    found: dict[str, Any] = {str(path): _equal_content(run / path) for path in sorted(files) if _counts(path)}
    for name, read in (("metrics.json", _json_rows), ("training_logs.csv", _csv_rows)):
        rows = [_equal_part(row) for path in sorted(run.glob(f"logs/*/{name}")) for row in read(path)]
        found[f"{len(rows)} rows of {name}"] = _sha256(json.dumps(rows).encode())
    updates = [update for line in _json_rows(run / "ledger.jsonl") for update in _updates_of(line)]
    found[f"{len(updates)} updates of the ledger"] = _sha256(json.dumps(updates).encode())
    return found


def _updates_of(line: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Yield what a line of the ledger says of each update; versions differ in how many share a line."""
    for number in range(line.get("updates", 1)):
        yield line["update"] + number, line["epoch"], line["first"] + number * line["count"], line["count"]


def _counts(path: Path) -> bool:
    """Tell whether a file of a run belongs to it, and was not put aside or left half written by a kill."""
    return path.suffix != PUT_ASIDE and not any(part.startswith(".") for part in path.parts)


def _equal_content(path: Path) -> Any:
    """Return the SHA-256 of a file; of one that is read its values, without those that a clock decides."""
    if path.name not in READ_FILES:
        return _sha256(path.read_bytes())
    content = yaml.safe_load(path.read_text(encoding="utf-8"))  # which reads JSON as well
    for *outer, last in UNEQUAL_KEYS.get(path.name, ()):
        inner: dict[str, Any] = content
        for key in outer:
            inner = inner[key]
        inner.pop(last, None)
    return content


def _equal_part(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not any(part in name for part in UNEQUAL_COLUMNS)}


def _json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_half_way(run: Path) -> bool:
    """Tell whether there is a checkpoint of the second half, which does not begin with the end of the first."""
    steps = list(_saved_steps(run))
    return bool(steps) and 2 * max(steps) > _total_steps(run)


def _saved_steps(run: Path) -> Iterator[int]:
    return (int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def _total_steps(run: Path) -> int:
    return int(json.loads((run / "plan.json").read_text(encoding="utf-8"))["total_steps"])


def _log_of(recipe: str, folder: Path) -> Path:
    return folder / f"{recipe}.log"


def _tail(recipe: str, folder: Path) -> str:
    return _log_of(recipe, folder).read_text(errors="replace")[-MOST_TOLD:].strip()


def print_row(outcome: Outcome) -> None:
    """Print a line of the table, and the names of what differs below it."""
    verdicts = [_verdict(names) for names in (outcome.changed, outcome.changed_when_handed_over)]
    handed_over = f"{verdicts[1]} (killed after {outcome.killed_at})"
    counts = f"{outcome.recipe:24}{outcome.num_files:>5}  {verdicts[0]:15}{handed_over:38}{outcome.seconds:>7.0f}"
    print(counts, "PASS" if outcome.is_good else "FAIL", sep="  ", flush=True)
    _print_names("new", outcome.changed)
    _print_names("old, then new", outcome.changed_when_handed_over)
    if outcome.only_in_one:
        print(f"    only in one version, left out: {'; '.join(outcome.only_in_one)}", flush=True)


def _verdict(names: list[str]) -> str:
    return f"{len(names)} differ" if names else "the same"


def _print_names(what: str, names: list[str]) -> None:
    for name in names[:MOST_NAMED]:
        print(f"    {what}: {name}")
    if len(names) > MOST_NAMED:
        print(f"    {what}: and {len(names) - MOST_NAMED} more", flush=True)


@contextmanager
def _place(keep: Path | None) -> Iterator[Path]:
    """Yield the folder to keep the runs in, or one that goes when they have been compared."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        yield Path(folder)


def measure(recipes: Iterable[str], old: Version, new: Version, keep: Path | None) -> bool:
    """Print a line for each recipe; tell whether all are the same."""
    print(f"{'recipe':24}files  {'new':15}{'old, then new':38}seconds  result", flush=True)
    is_good = True
    with _place(keep) as folder:
        for recipe in recipes:
            outcome = compare(recipe, old, new, folder)
            print_row(outcome)
            is_good = is_good and outcome.is_good
    return is_good


def main() -> int:
    """Compare two versions; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout of another version")
    parser.add_argument("--new", type=Path, default=Path(__file__).parents[1], help="without it, this checkout")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--keep", type=Path, help="a new folder to keep the runs in, to look at what differs")
    options = parser.parse_args()
    old, new = (Version(path.resolve()) for path in (options.old, options.new))
    old.check()
    new.check()
    is_good = measure(options.recipes, old, new, options.keep)
    print("PASS" if is_good else "FAIL")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

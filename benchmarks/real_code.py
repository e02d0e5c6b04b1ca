"""Draw real files of a system's users for a trial behind its door, and count the lines that such a trial had to change.

    python benchmarks/real_code.py draw SYSTEM OWN [STRANGER ...] [--seed 14] [--count 20]
    python benchmarks/real_code.py changes ORIGINAL CHANGED

`draw` reads work trees that somebody has cloned, the system's own repository first, finds every Python file that
imports the system's trainer, and prints a sample of them. The sample depends on the files and the seed alone, so nobody
can choose what works. Own files and strangers' take turns; a stranger is drawn before a file of his, so that a
repository with a hundred copies of a script does not fill the sample. A file that forks share is its first clone's, and
a path is drawn once. Files that the door stands in for, the trainer itself, are not users of it and are left out.

`changes` compares a file with what was run in its place. Lines that only turn oneflow into torch do not count.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

BUILT = frozenset({"build", "dist", "site-packages"})
"""Folders with copies; those of editors begin with a dot."""


@dataclass(frozen=True)
class System:
    """How the users of a system are told from its trainer."""

    imports: re.Pattern[str]
    """What a file has in it that imports the trainer."""

    is_trainer: re.Pattern[str]
    """The paths of files that the door stands in for."""


def _imports(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(rf"^[ \t]*{pattern}" for pattern in patterns), re.MULTILINE)


SYSTEMS = {
    "federatedscope": System(
        _imports(
            r"(from|import)\s+([\w.]+\.)?federatedscope\.core\.trainers\b",
            r"from\s+([\w.]+\.)?federatedscope\.core\s+import\s+([^\n(]*|\([^)]*)\btrainers\b",
            r"from\s+([\w.]+\.)?federatedscope\.register\s+import\s+([^\n(]*|\([^)]*)\bregister_trainer\b",
        ),
        re.compile(
            r"(^|/)federatedscope/core/(trainers/(__init__|base_trainer|trainer|torch_trainer|trainer_multi_model"
            r"|context|enums|utils)|auxiliaries/(trainer_builder|decorators|ReIterator))\.py$"
        ),
    ),
    "libai": System(
        _imports(
            r"(from|import)\s+libai\.(engine|trainer)\b",
            r"from\s+libai\s+import\s+([^\n(]*|\([^)]*)\b(engine|trainer)\b",
        ),
        re.compile(r"(^|/)libai/(engine|trainer)/\w+\.py$"),
    ),
    "lernomatic": System(
        _imports(
            r"(from|import)\s+lernomatic\.(train|infer)\b",
            r"from\s+lernomatic\s+import\s+([^\n(]*|\([^)]*)\b(train|infer)\b",
        ),
        re.compile(r"(^|/)lernomatic/train/(__init__|trainer|schedule)\.py$"),
    ),
    "hezar": System(
        _imports(
            r"(from|import)\s+hezar\.trainer\b",
            r"from\s+hezar(\.\w+)*\s+import\s+([^\n(]*|\([^)]*)\b(Trainer|TrainerConfig)\b",
        ),
        re.compile(r"(^|/)hezar/(__init__|configs|constants|trainer/\w+)\.py$"),
    ),
}  # fmt: skip


# --- draw ---


@dataclass(frozen=True)
class Found:
    """A file of a clone that imports the trainer."""

    clone: Path
    path: str
    """Where it lies in the clone."""

    text: str


def users_of(system: System, clones: Iterable[Path]) -> list[Found]:
    """Return the files that import the trainer; what several clones have in common is of the first of them."""
    found: dict[tuple[str, str], Found] = {}
    for clone in clones:
        for one in _files_of(clone):
            if system.imports.search(one.text) and not system.is_trainer.search(one.path):
                found.setdefault((one.path, one.text), one)
    return list(found.values())


def _files_of(clone: Path) -> Iterable[Found]:
    for file in sorted(clone.rglob("*.py")):
        relative = file.relative_to(clone)
        if file.is_file() and not any(part in BUILT or part.startswith(".") for part in relative.parts):
            yield Found(clone, relative.as_posix(), file.read_text(encoding="utf-8", errors="replace"))


def draw(files: Iterable[Found], own: Path, seed: int, count: int) -> list[Found]:
    """Draw files of the own clone and of strangers in turn, all of them where there are no more than `count`."""
    chance = random.Random(seed)
    left = sorted(files, key=lambda one: (one.clone.name, one.path))
    drawn: list[Found] = []
    while left and len(drawn) < count:
        is_turn_of_own = len(drawn) % 2 == 0
        pool = [one for one in left if (one.clone == own) == is_turn_of_own] or left
        clone = chance.choice(sorted({one.clone for one in pool}))
        drawn.append(chance.choice([one for one in pool if one.clone == clone]))
        left = [one for one in left if one.path != drawn[-1].path]
    return drawn


# --- changes ---


@dataclass(frozen=True)
class Changes:
    """How many lines were changed, added or taken away."""

    imports: int
    others: int


def changes(original: str, changed: str) -> Changes:
    """Count lines that differ; a line in the place of another is one, blank lines are none."""
    before, after = _counted_lines(original), _counted_lines(changed)
    imports = others = 0
    for kind, start, end, new_start, new_end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        longer = max(before[start:end], after[new_start:new_end], key=len)
        of_imports = sum(_is_import(line) for line in longer)
        imports, others = imports + of_imports, others + len(longer) - of_imports
    return Changes(imports, others)


def _counted_lines(text: str) -> list[str]:
    """Return the lines that are not blank, with torch in the place of oneflow."""
    text = re.sub(r"\bimport (oneflow|torch) as flow\b", "import torch", text)
    text = re.sub(r"\boneflow\b", "torch", text)
    text = re.sub(r"\bflow\.(?=\w)", "torch.", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _is_import(line: str) -> bool:
    return re.match(r"\s*(from\s+[\w.]+\s+import|import)\b", line) is not None


# --- the command ---


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw files, or count changed lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="list drawn files that import a system's trainer")
    drawing.add_argument("system", choices=sorted(SYSTEMS))
    drawing.add_argument(
        "clones", nargs="+", type=Path, metavar="CLONE", help="folders with repositories' files, the system's own first"
    )
    drawing.add_argument("--seed", type=int, default=14)
    drawing.add_argument("--count", type=int, default=20)
    counting = commands.add_parser("changes", help="count the lines in which two files differ")
    counting.add_argument("original", type=Path)
    counting.add_argument("changed", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "draw":
        _print_draw(given.system, given.clones, given.seed, given.count)
    else:
        counted = changes(given.original.read_text(encoding="utf-8"), given.changed.read_text(encoding="utf-8"))
        print(f"{counted.imports + counted.others} changed lines: {counted.imports} imports, {counted.others} others")


def _print_draw(system: str, clones: Sequence[Path], seed: int, count: int) -> None:
    if missing := [str(clone) for clone in clones if not clone.is_dir()]:
        raise SystemExit(f"no such folder: {', '.join(missing)}. Give folders with the files of cloned repositories.")
    files = users_of(SYSTEMS[system], clones)
    print(f"{len(files)} different files import {system}'s trainer; drawn with seed {seed}:")
    for found in draw(files, clones[0], seed, count):
        print(f"{found.clone.name}  {found.path}")


if __name__ == "__main__":
    main()

"""Draw real files of a system's users for a trial behind its door, and count the lines that such a trial had to change.

    python benchmarks/real_code.py draw SYSTEM CLONE [CLONE ...] [--seed 14] [--count 20]
    python benchmarks/real_code.py changes ORIGINAL CHANGED

`draw` reads work trees that somebody has cloned, finds every Python file that imports the system's trainer, and prints
a sample of them. The sample depends on the files and the seed alone, so nobody can choose what works. A path that
several clones have (forks) is drawn once, and which of its different versions is tried is drawn, too. Files that the
door stands in for, the trainer itself, are not users of it and are left out.

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

SKIPPED_FOLDERS = frozenset({".git", "build", "dist", "site-packages", "node_modules"})


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


def users_of(system: System, clones: Iterable[Path]) -> dict[str, list[Found]]:
    """Return the different versions of each file that imports the trainer, by path."""
    versions: dict[str, list[Found]] = {}
    for clone in clones:
        for found in _files_of(clone):
            if system.is_trainer.search(found.path) or not system.imports.search(found.text):
                continue
            same_path = versions.setdefault(found.path, [])
            if all(one.text != found.text for one in same_path):
                same_path.append(found)
    return versions


def _files_of(clone: Path) -> Iterable[Found]:
    for file in sorted(clone.rglob("*.py")):
        relative = file.relative_to(clone)
        if file.is_file() and not SKIPPED_FOLDERS.intersection(relative.parts):
            yield Found(clone, relative.as_posix(), file.read_text(encoding="utf-8", errors="replace"))


def draw(versions: dict[str, list[Found]], seed: int, count: int) -> list[Found]:
    """Draw paths, and a version of each; all of them where there are no more than `count`."""
    chance = random.Random(seed)
    paths = sorted(versions)
    drawn = chance.sample(paths, min(count, len(paths)))
    return [chance.choice(sorted(versions[path], key=lambda one: (one.clone.name, one.text))) for path in drawn]


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
    drawing.add_argument("clones", nargs="+", type=Path, metavar="CLONE", help="a folder with a repository's files")
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
    versions = users_of(SYSTEMS[system], clones)
    number = sum(map(len, versions.values()))
    print(f"{number} different files at {len(versions)} paths import {system}'s trainer; drawn with seed {seed}:")
    for found in draw(versions, seed, count):
        print(f"{found.clone.name}  {found.path}")


if __name__ == "__main__":
    main()

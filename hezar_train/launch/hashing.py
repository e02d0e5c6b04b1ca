"""By what a run knows its recipe again: a hash over everything in the recipe's folder that `build` may read.

Left out is what cannot change what is built: hidden files, caches and runs, wherever they lie, and beside `recipe.py`
the README, pictures, `runs/` and the YAML configs, of which the run keeps what they said. A link to a file counts as
the file; one to a folder as where it leads, for what lies there may be endless. Of a very large file the size counts.

Runs were once recorded with the hash of `recipe.py` alone; that is still understood.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hezar_train.config import CONFIG_FILE
from hezar_train.launch.finding import RECIPE_NAME

__all__ = ["changed_parts", "hash_of", "hash_of_parts", "is_hash_of", "parts_of"]

UNREAD_SUFFIXES = (".png", ".yaml", ".yml")
UNREAD_NAMES = ("readme", "readme.md", "readme.rst", "readme.txt", "runs")
LARGE_BYTES = 100_000_000
MARKS_OF_A_RUN = (CONFIG_FILE, "lock")  # the second is there before anything else is


def hash_of(folder: Path) -> str:
    """Return the hash of a recipe."""
    return hash_of_parts(parts_of(folder))


def hash_of_parts(digests: Mapping[str, str]) -> str:
    """Return one hash of many, with their names."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def is_hash_of(folder: Path, sha256: Any) -> bool:
    """Tell whether a recipe is the one that a hash was taken of, today or when only its source counted."""
    return any(sha256 == take(folder) for take in (_hash_of_source, hash_of))


def parts_of(folder: Path) -> dict[str, str]:
    """Return the hash of each file and folder beside `recipe.py`, and its own, by name."""
    if _is_run(folder):  # the recipe lies among the files of its own run
        return {RECIPE_NAME: _hash_of_source(folder)}
    return _digests(path for path in folder.iterdir() if not _is_unread(path.name))


def changed_parts(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Name what is not as it was when a run wrote its record of a recipe; nothing if the recipe is the same."""
    if is_hash_of(folder, record.get("sha256")):
        return []
    before, now = record.get("parts"), parts_of(folder)
    if not isinstance(before, dict):
        return [RECIPE_NAME]
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)) or [RECIPE_NAME]


def _hash_of_source(folder: Path) -> str:
    return _digest(folder / RECIPE_NAME)


def _digests(entries: Iterable[Path]) -> dict[str, str]:
    """Return the hash of each entry of a folder that counts, by name."""
    counted = (path for path in sorted(entries) if not path.name.startswith((".", "__pycache__")))
    return {_text(path.name): digest for path in counted if (digest := _digest(path))}


def _digest(path: Path) -> str:
    """Return the hash of a file or a folder; empty where nothing can be read, which `build` cannot either."""
    try:
        if path.is_dir():
            return _digest_of_folder(path)
        if not path.is_file():
            return ""
        if (size := path.stat().st_size) > LARGE_BYTES:
            return f"{size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _digest_of_folder(path: Path) -> str:
    if path.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
    found = {} if _is_run(path) else _digests(path.iterdir())
    return hash_of_parts(found) if found else ""


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS_OF_A_RUN)


def _is_unread(name: str) -> bool:
    return name.lower() in UNREAD_NAMES or name.lower().endswith(UNREAD_SUFFIXES)


def _text(name: str) -> str:
    """Return a name that can be written to a file, also where the disk has one that is no UTF-8."""
    return name.encode(errors="replace").decode()

"""The folder of this user's files that belong to no run, and a place in it that nobody else can write to.

It is `$HEZAR_TRAIN_CACHE`, else `$XDG_CACHE_HOME/hezar_train`, else `~/.cache/hezar_train`. Compiled code from there is
run. So `own_folder` takes no folder that another user owns, can write to or can exchange, on any level: where there is
none, it makes a new one that is gone when the program ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder", "is_closed", "make_closed", "own_folder"]

CACHE_VARIABLE = "HEZAR_TRAIN_CACHE"
PREFIX = "hezar_train_"
ROOT = 0


def cache_folder() -> Path:
    """Return the folder in which this user's files that belong to no run are kept."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hezar_train"


def own_folder(name: str) -> Path:
    """Return a folder of a name in the user's cache, made if need be; else one for as long as the program runs."""
    try:
        wanted = cache_folder().absolute() / name
    except RuntimeError:  # a user without a home
        return _passing_folder(name)
    # Links are followed once: one on the way may be another user's, and lead elsewhere in a moment.
    folder = Path(os.path.realpath(make_closed(wanted)))
    return folder if is_closed(folder) and os.access(folder, os.W_OK) else _passing_folder(name)


def make_closed(folder: Path) -> Path:
    """Make a folder for this user alone, if nothing has its name, and return its path."""
    with contextlib.suppress(OSError):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def is_closed(folder: Path) -> bool:
    """Tell whether this is a folder that nobody but this user, and root, can write to or put another one in place of.

    A link on the way is none.
    """
    if not folder.is_dir() or os.path.realpath(folder) != os.path.abspath(folder):
        return False
    if not hasattr(os, "getuid"):
        return True
    above = [parent.stat() for parent in folder.absolute().parents]
    return not _is_open(folder.lstat()) and not any(_is_open(one) and not _keeps_apart(one) for one in above)


def _keeps_apart(found: os.stat_result) -> bool:
    """Tell whether a folder that all may write to lets nobody rename what is another's, as /tmp does."""
    return found.st_uid == ROOT and bool(found.st_mode & stat.S_ISVTX)


def _is_open(found: os.stat_result) -> bool:
    if found.st_uid not in (os.getuid(), ROOT):
        return True
    # A group that a user has alone has the user's number.
    writers = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid not in (os.getuid(), ROOT) else 0)
    return bool(found.st_mode & writers)


@functools.cache
def _passing_folder(name: str) -> Path:
    folder = tempfile.mkdtemp(prefix=f"{PREFIX}{name}_")
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:  # not from a forked child, which inherits what is to be done at the end
        shutil.rmtree(folder, ignore_errors=True)

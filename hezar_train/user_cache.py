"""The folder of this user's files that belong to no run, and a place in it that nobody else can write to.

It is `$HEZAR_TRAIN_CACHE`, else `$XDG_CACHE_HOME/hezar_train`, else `~/.cache/hezar_train`. Compiled code from there is
run. So `own_folder` takes no folder that another user owns, can write to or can exchange, on any level: where there is
none, it makes a new one that is gone when the program ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cache_folder", "is_closed", "own_folder"]

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
        folder = cache_folder().absolute() / name
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()  # a link on the way may be another user's, and lead elsewhere in a moment
        is_usable = is_closed(folder) and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # the second: a user without a home
        is_usable = False
    return folder if is_usable else _passing_folder(name)


def is_closed(folder: Path) -> bool:
    """Tell whether nobody but this user, and root, can write to a folder, or put another one in its place.

    The path is absolute and has no links.
    """
    if not hasattr(os, "getuid"):
        return True
    above = [parent.stat() for parent in folder.parents]
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

"""Open, read and delete inside a run's folder, whoever made it: the one module that does.

A run's folder may come from anywhere. Links on the way to it are the user's own and are followed; a link inside it
would lead a write, a cut or a deletion to any file of the user, so it is refused. So is a file with a second name (a
hard link) where it would be written to in its place, names that lead out of the folder, and files that are no files: a
FIFO would wait for ever, a device never ends.

Everything that is read has a size that is known beforehand: `read_file` takes the most bytes that make sense. Nothing
here knows the names in a run's folder (`run_layout` does) or what is in its files.

A folder that another user can write to *while* it is used is not safe, and nothing here pretends that it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from hezar_train.errors import CheckpointError

__all__ = [
    "RunFolderError",
    "can_be_path",
    "is_inside",
    "is_plain",
    "open_file",
    "plain_path",
    "read_file",
    "refuse_links",
    "refuse_odd_file",
    "refuse_second_name",
    "refuse_second_names",
    "remove_files",
    "remove_folder",
    "write_anew",
]

LONGEST_NAME, LONGEST_PATH = 255, 4096  # in bytes: what file systems take
MOST_SMALL_BYTES = 64 << 20
"""Of a file that people or this package write by hand: configs, plans, records."""


class RunFolderError(CheckpointError):
    """Something in a run's folder that is not touched: a link, a name that leads out of it, a file that is no file."""


def can_be_path(name: str) -> bool:
    """Tell whether a text is one that a file can be called: no zero byte, no part that is too long."""
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return b"\0" not in encoded and len(encoded) < LONGEST_PATH and max(map(len, encoded.split(b"/"))) <= LONGEST_NAME


def is_inside(name: str) -> bool:
    """Tell whether a relative path stays inside its folder, and is one that a file can have."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and can_be_path(name)


def is_plain(root: Path, path: Path) -> bool:
    """Tell whether a path lies below `root` by its words, and no link is on the way from there; both are absolute."""
    if not path.is_relative_to(root):
        return False
    parts = path.relative_to(root).parts
    return not any(os.path.islink(root.joinpath(*parts[:length])) for length in range(1, len(parts) + 1))


def plain_path(root: Path, name: str | os.PathLike[str]) -> Path:
    """Return the path of a name below `root`; refuse one that leads out of it, by its words or through a link."""
    relative = os.fspath(name)
    if not is_inside(relative):
        raise RunFolderError(f"{relative!r} is not a name inside {root}")
    path = root
    for part in PurePosixPath(relative).parts:
        path = path / part
        if path.is_symlink():
            raise _link_refused(path)
    return path


def refuse_links(root: Path, names: Iterable[str | os.PathLike[str]], *, deeply: bool = True) -> None:
    """Raise if one of these files or folders below `root` is a link or, `deeply`, holds one."""
    for name in names:
        path = plain_path(root, name)
        for parent, folders, files in os.walk(path) if deeply else ():
            for entry in (*folders, *files):
                if os.path.islink(os.path.join(parent, entry)):
                    raise _link_refused(Path(parent, entry))


def refuse_odd_file(path: str | os.PathLike[str]) -> None:
    """Raise if something is there that is no regular file, such as a FIFO or a device; links are followed."""
    if not stat.S_ISREG(mode := os.stat(path).st_mode):
        raise RunFolderError(f"{path} is {_kind(mode)}; expected a file")


def refuse_second_name(path: str | os.PathLike[str], descriptor: int) -> None:
    """Raise if an open file has another name: that may be any file of the user, which tools for archives can link to.

    A copy of a run that shares its files with the original (`cp -l`) is one of these: a run in it changes both.
    """
    if os.fstat(descriptor).st_nlink > 1:
        raise _second_name_refused(path)


def refuse_second_names(folder: Path) -> None:
    """Raise if a file below a folder that somebody else's code will write to has a second name."""
    for parent, _, files in os.walk(folder):
        for entry in files:
            if os.lstat(path := os.path.join(parent, entry)).st_nlink > 1:
                raise _second_name_refused(path)


def open_file(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    *,
    follow_links: bool = False,
    accept_second_name: bool = False,
) -> int:
    """Open a regular file, or make one if the flags say so, and return its descriptor.

    One with a second name is opened to be read only, unless the caller answers for what is written.
    """
    extra = os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | (0 if follow_links else getattr(os, "O_NOFOLLOW", 0))
    try:
        # Without waiting: the open of a FIFO would last until somebody opens its other end.
        descriptor = os.open(path, flags | extra, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise _link_refused(Path(path)) from None
        if error.errno == errno.ENXIO:
            raise RunFolderError(f"{path} is a FIFO or a socket; expected a file") from None
        raise
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunFolderError(f"{path} is {_kind(mode)}; expected a file")
    if flags & (os.O_WRONLY | os.O_RDWR) and not accept_second_name:
        try:
            refuse_second_name(path, descriptor)
        except RunFolderError:
            os.close(descriptor)
            raise
    return descriptor


def write_anew(path: Path, content: bytes) -> None:
    """Write a file in the place of what has that name, which is not written to: it may be a link."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def read_file(path: str | os.PathLike[str], most_bytes: int = MOST_SMALL_BYTES, *, follow_links: bool = True) -> bytes:
    """Return a file's content; refuse one that is no regular file or has more than `most_bytes`."""
    with os.fdopen(open_file(path, follow_links=follow_links), "rb") as file:
        # Python takes the memory for all that a read may bring before it reads, and `most_bytes` may come from a file.
        if (size := os.fstat(file.fileno()).st_size) > most_bytes:
            raise RunFolderError(f"{path} has more than {most_bytes:,} bytes, which no such file has")
        return file.read(size)


def remove_folder(folder: Path) -> bool:
    """Delete a folder as far as possible; return whether it is gone. A link is left where it is, and what it names."""
    if folder.is_symlink():
        return False
    shutil.rmtree(folder, ignore_errors=True)  # links inside are deleted, not followed
    return not folder.exists()


def remove_files(folder: Path, suffixes: Collection[str]) -> None:
    """Delete the files of these suffixes in a folder, and the folder once it is empty; all else in it stays."""
    if folder.is_symlink():
        return
    for path in folder.glob("*"):
        if path.suffix in suffixes and (path.is_symlink() or path.is_file()):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _link_refused(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} is a link. Links inside a run's folder are not followed, because they can lead to any file of yours: "
        "put the file or folder itself in its place, or move the whole run and link to that"
    )


def _second_name_refused(path: str | os.PathLike[str]) -> RunFolderError:
    return RunFolderError(
        f"{path} has a second name (a hard link): what is done to it is done to another file, which may be any of "
        "yours. Put a copy in its place, or copy the whole folder: cp -r"
    )


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")

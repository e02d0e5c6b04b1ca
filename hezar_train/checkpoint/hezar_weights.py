"""The weights of a Hezar model: `model.pt`, a pickle by its format, read without running anything that it says.

Two walls, each enough by itself: every opcode of the pickle is looked at before it is loaded, and only those that name
tensors and their containers pass; then `torch.load(weights_only=True)` reads it. The archive must be what `torch.save`
writes: entries that are not compressed and no larger together than the file, a directory that every reader of such
archives finds in the same place, and a small pickle. What the pickle makes is counted before it is made: a value that
is remembered and used twice, again and again, is soon more than any memory holds.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from hezar_train.checkpoint.format import refuse_odd_bools
from hezar_train.errors import CheckpointError
from hezar_train.run_folder import open_file
from hezar_train.run_layout import HEZAR_CONFIG_FILE

__all__ = ["HEZAR_MODEL_FILE", "is_hezar_weights", "read_hezar_weights", "refuse_endless_pickles"]

HEZAR_MODEL_FILE = "model.pt"
MOST_PICKLE_BYTES = 64 << 20  # a hundred thousand names need a tenth of it
MOST_VALUES = 1_000_000
"""Opcodes, and values that come of them: some forty for each tensor."""
PICKLE_ENTRY = "data.pkl"
STORAGES = frozenset(
    f"torch {kind}Storage"
    for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
NAMES_OF_TENSORS = STORAGES | {
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
}  # fmt: skip
DAMAGED = (
    pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError,
    AssertionError,
)  # fmt: skip
"""What `torch.load` raises of a pickle that names nothing but tensors and puts them together otherwise."""
MOST_VALUES_SHARED = 16_000_000
"""Of a file in which values may stand in several places."""
ARCHIVE_START, NUM_PICKLES_BEFORE_ARCHIVES = b"PK\3\4", 5
"""How torch knows its archives, and of how many pickles a file of its earlier form is."""
REFUSED_OPCODES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "DUP"})
FETCHING = frozenset({"GET", "BINGET", "LONG_BINGET"})
REMEMBERING = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
CHANGING = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
END, END_64, PLACE_64 = (struct.Struct(form) for form in ("<4s4H2LH", "<4sQ2H2L4Q", "<4sLQL"))
"""The last of a zip archive: its end, and before it what torch adds for large ones and where that is."""


def is_hezar_weights(path: Path) -> bool:
    """Tell whether a file is the weights of a Hezar model: `model.pt` beside `model_config.yaml`."""
    return path.name == HEZAR_MODEL_FILE and path.is_file() and (path.parent / HEZAR_CONFIG_FILE).is_file()


def read_hezar_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a `model.pt`; refuse one that holds, or could make, anything else."""
    if problem := _problem(path):
        raise CheckpointError(
            f"{path} {problem}, and is not read: loading such a file can run any code. Load it with hezar's own "
            "Model.load and pass the model to the trainer, if you trust it."
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DAMAGED as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    tensors = {name: value for name, value in found.items() if _is_plain(name, value)} if _is_named(found) else {}
    for name, tensor in tensors.items():
        refuse_odd_bools(name, _stored(tensor))
    if not tensors:
        raise CheckpointError(f"{path} holds no weights by name; expected what hezar's model.save() writes")
    return tensors


def refuse_endless_pickles(path: str | os.PathLike[str]) -> None:
    """Raise if a file of `torch.save` makes far more than it holds; which values those are is the reader's affair."""
    with os.fdopen(open_file(path, follow_links=True), "rb") as file:
        try:
            if file.read(len(ARCHIVE_START)) == ARCHIVE_START:
                problem = _archive_problem(Path(path), lambda content: _refuse_endless(io.BytesIO(content)))
            else:
                file.seek(0)
                for _ in range(NUM_PICKLES_BEFORE_ARCHIVES):
                    _refuse_endless(file)
                problem = None
        except (ValueError, LookupError) as error:
            problem = f"has a pickle that cannot be read ({error})"
    if problem:
        raise CheckpointError(f"{os.fspath(path)} {problem}, and is not read")


def _refuse_endless(file: BinaryIO) -> None:
    made = _Made()
    for number, (opcode, argument, _) in enumerate(pickletools.genops(file)):
        made.follow(opcode, argument)
        if made.most > max(number + 1, MOST_VALUES_SHARED):
            raise ValueError("it makes far more values than it holds")


def _problem(path: Path) -> str | None:
    """Say what makes a file something else than tensors by name, as `torch.save` writes them; None if nothing does."""
    return _archive_problem(path, lambda content: next(_strange(content), None))


def _archive_problem(path: Path, problem_of: Callable[[bytes], str | None]) -> str | None:
    """Say what is wrong with an archive, or with its pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if Path(entry.filename).name == PICKLE_ENTRY]
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return "is compressed"
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                return "claims to hold more than it has bytes"
            if not _ends_as_written(path):
                return "has a directory that not every reader would find"
            if len(pickles) != 1 or pickles[0].file_size > MOST_PICKLE_BYTES:
                return "has no pickle of names of a size that weights have"
            content = archive.read(pickles[0])
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError, struct.error):
        return "is no archive of torch.save()"
    return problem_of(content)


def _strange(content: bytes) -> Iterator[str]:
    """Yield what a pickle names beside tensors and their containers; it is looked through, never run."""
    made = _Made()
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if opcode.name in REFUSED_OPCODES:
                yield f"holds an object of its own ({opcode.name})"
            if opcode.name == "GLOBAL" and argument not in NAMES_OF_TENSORS:
                yield f"names {str(argument).replace(' ', '.')!r}, which is no tensor"
            made.follow(opcode, argument)
            if number > MOST_VALUES or made.most > MOST_VALUES:
                yield "makes more values than weights have"
    except (ValueError, UnicodeDecodeError) as error:
        yield f"has a pickle that cannot be read ({error})"
    except LookupError:
        yield "is damaged: its pickle takes what is not there"


@dataclass(eq=False, slots=True)
class _Counted:
    """A value that a pickle makes: of how many it consists, and whether it stands in several places."""

    size: int = 1
    is_shared: bool = False


class _Made:
    """Follow the opcodes of a pickle with sizes in place of values."""

    def __init__(self) -> None:
        self.most = 0
        self._stack: list[_Counted | None] = []  # None is a mark
        self._memory: dict[int, _Counted] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """Do what an opcode does; a LookupError if there is not what it takes."""
        if opcode.name in FETCHING:
            self._memory[int(argument)].is_shared = True
            self._stack.append(self._memory[int(argument)])
        elif opcode.name in REMEMBERING:
            if (top := self._stack[-1]) is None:
                raise ValueError("a mark is no value")
            self._memory[len(self._memory) if argument is None else int(argument)] = top
        elif opcode.name == "MARK":
            self._stack.append(None)
        else:
            self._make(opcode)

    def _make(self, opcode: pickletools.OpcodeInfo) -> None:
        taken = self._taken(opcode.stack_before) if opcode.stack_before else []
        size = 1 + sum([one.size for one in taken])
        if opcode.name in CHANGING:
            target = taken[0]
            if target.is_shared:  # it may hold itself, and what holds it has been counted
                raise ValueError("a value changes after it was used")
            target.size = size
            self._stack.append(target)
        elif opcode.stack_after:
            self._stack.append(_Counted(size))
        self.most = max(self.most, size)

    def _taken(self, wanted: list[Any]) -> list[_Counted]:
        """Take off the stack what an opcode takes: so many values, down to a mark if it takes all of those above."""
        found: list[_Counted | None] = []
        if pickletools.markobject in wanted:
            while (one := self._stack.pop()) is not None:
                found.append(one)
            wanted = wanted[: wanted.index(pickletools.markobject)]
        found += [self._stack.pop() for _ in wanted]
        if not all(found):
            raise ValueError("a mark is no value")
        return [one for one in reversed(found) if one is not None]


def _ends_as_written(path: Path) -> bool:
    """Tell whether an archive ends with its directory and nothing behind, as torch writes it.

    Readers look for the directory in two ways, and are led to two by a file that has both.
    """
    with os.fdopen(open_file(path, follow_links=True), "rb") as file:
        end = file.seek(-END.size, 2)
        mark, *_, nbytes, start, num_comment = END.unpack(file.read(END.size))
        file.seek(max(0, end - PLACE_64.size))
        mark_of_place, _, place, _ = PLACE_64.unpack(file.read(PLACE_64.size))
        if mark_of_place == b"PK\6\7":
            end -= PLACE_64.size + END_64.size
            file.seek(max(0, end))
            mark_64, *_, nbytes, start = END_64.unpack(file.read(END_64.size))
            if (mark_64, place) != (b"PK\6\6", end):
                return False
    return bool(mark == b"PK\5\6" and not num_comment and start + nbytes == end)


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided


def _stored(tensor: Tensor) -> Tensor:
    """Return the values that lie in the file, each once: a view may show one of them any number of times."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())

"""The weights of a Hezar model: `model.pt`, a pickle by its format, read without running anything that it says.

Two walls, each enough by itself: every opcode of the pickle is looked at before it is loaded, and only those that name
tensors and their containers pass; then `torch.load(weights_only=True)` reads it. The archive must be what `torch.save`
writes: entries that are not compressed and no larger together than the file, and a small pickle.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hezar_train.checkpoint.format import refuse_odd_bools
from hezar_train.errors import CheckpointError
from hezar_train.run_layout import HEZAR_CONFIG_FILE

__all__ = ["HEZAR_MODEL_FILE", "is_hezar_weights", "read_hezar_weights"]

HEZAR_MODEL_FILE = "model.pt"
MOST_PICKLE_BYTES = 64 << 20  # a hundred thousand names need a tenth of it
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
REFUSED_OPCODES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})


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
    tensors = {str(name): value for name, value in found.items() if _is_plain(value)} if _is_named(found) else {}
    for name, tensor in tensors.items():
        refuse_odd_bools(name, tensor)
    if not tensors:
        raise CheckpointError(f"{path} holds no weights by name; expected what hezar's model.save() writes")
    return tensors


def _problem(path: Path) -> str | None:
    """Say what makes a file something else than tensors by name, as `torch.save` writes them; None if nothing does."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if Path(entry.filename).name == PICKLE_ENTRY]
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return "is compressed"
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                return "claims to hold more than it has bytes"
            if len(pickles) != 1 or pickles[0].file_size > MOST_PICKLE_BYTES:
                return "has no pickle of names of a size that weights have"
            return next(_strange(archive.read(pickles[0])), None)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError):
        return "is no archive of torch.save()"


def _strange(content: bytes) -> Iterator[str]:
    """Yield what a pickle names beside tensors and their containers; it is looked through, never run."""
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in REFUSED_OPCODES:
                yield f"holds an object of its own ({opcode.name})"
            if opcode.name == "GLOBAL" and argument not in NAMES_OF_TENSORS:
                yield f"names {str(argument).replace(' ', '.')!r}, which is no tensor"
    except (ValueError, UnicodeDecodeError) as error:
        yield f"has a pickle that cannot be read ({error})"


def _is_named(found: Any) -> bool:
    return isinstance(found, Mapping)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided

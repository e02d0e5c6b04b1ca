"""A model's weights as several files with an index, as on the Hub: how large each is, and what a reader finds where.

`write_split` takes names with sizes and reads the tensors of one file at a time, so whoever writes never holds more.
Names of files are those of the Hub, `model-00001-of-00003.safetensors` and `model.safetensors.index.json`; what fits
into one file is one, without an index. Names of tensors are the model's own; `hub_tensors` knows those models of
transformers whose files have others.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hezar_train.checkpoint.format import tensor_file
from hezar_train.checkpoint.manifest import replace_file
from hezar_train.checkpoint.modules import unwrap
from hezar_train.errors import ConfigError
from hezar_train.run_layout import MODEL_FILE

__all__ = ["MODEL_INDEX_FILE", "hub_tensors", "most_bytes", "write_split", "write_split_tensors"]

MODEL_INDEX_FILE = f"{MODEL_FILE}.index.json"
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", re.ASCII)


def most_bytes(size: int | str) -> int:
    """Return the bytes of a size such as "5GB", which counts in powers of ten as the Hub does."""
    found = SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is not None and found[2].upper() in UNITS:
        size = int(float(found[1]) * UNITS[found[2].upper()])
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"max_shard_size={size!r} is no size. Expected bytes (int), or a text such as '5GB' or '500MB'."
        )
    return size


def write_split(
    folder: Path, sizes: Mapping[str, tuple[int, int]], read: Callable[[list[str]], dict[str, Tensor]], most: int,
    model_file: str = MODEL_FILE,
) -> list[Path]:  # fmt: skip
    """Write files of at most so many bytes of tensors, and their index; return them.

    `sizes` has the bytes and the values of each tensor, by name. What an earlier export left of other files of these
    names is removed last, so that a reader finds the old weights or the new ones.
    """
    groups = list(_groups({name: nbytes for name, (nbytes, _) in sizes.items()}, most))
    names = _file_names(model_file, len(groups))
    folder.mkdir(parents=True, exist_ok=True)
    for file, group in zip(names, groups, strict=True):
        replace_file(folder / file, tensor_file(read(group)))
    written = [folder / file for file in names]
    index = folder / f"{model_file}.index.json"
    if len(groups) > 1:
        replace_file(index, [_index(names, groups, sizes)])
        written.append(index)
    _remove_others(folder, model_file, {path.name for path in written})
    return written


def write_split_tensors(folder: Path, tensors: Mapping[str, Tensor], most: int, model_file: str = MODEL_FILE) -> None:
    """Write tensors that are in memory as several files."""
    sizes = {name: (tensor.nbytes, tensor.numel()) for name, tensor in tensors.items()}
    write_split(folder, sizes, lambda names: {name: tensors[name] for name in names}, most, model_file)


def _groups(nbytes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the names in their order, as many together as fit; one that is larger than that stands alone."""
    group: list[str] = []
    size = 0
    for name, one in nbytes.items():
        if group and size + one > most:
            yield group
            group, size = [], 0
        group.append(name)
        size += one
    yield group


def _file_names(model_file: str, count: int) -> list[str]:
    path = Path(model_file)
    return (
        [model_file]
        if count == 1
        else [f"{path.stem}-{number:05d}-of-{count:05d}{path.suffix}" for number in range(1, count + 1)]
    )


def _index(names: list[str], groups: list[list[str]], sizes: Mapping[str, tuple[int, int]]) -> bytes:
    files = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    totals = {
        "total_parameters": sum(count for _, count in sizes.values()),
        "total_size": sum(nbytes for nbytes, _ in sizes.values()),
    }
    index = {"metadata": totals, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2) + "\n").encode("utf-8")


def _remove_others(folder: Path, model_file: str, kept: set[str]) -> None:
    path = Path(model_file)
    ours = re.compile(rf"{re.escape(path.stem)}(-\d{{5}}-of-\d{{5}})?{re.escape(path.suffix)}(\.index\.json)?")
    for found in folder.iterdir():
        if ours.fullmatch(found.name) and found.name not in kept and (found.is_file() or found.is_symlink()):
            found.unlink()


def hub_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors under the names, and in the form, that its library gives them in files.

    Those of transformers may be joined, split or renamed in memory: experts that are one tensor are many in files.
    """
    library = sys.modules.get("transformers")
    bare: Any = unwrap(model)
    if library is None or not isinstance(bare, library.PreTrainedModel):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    ignored = bare._keys_to_ignore_on_save or ()
    converted: dict[str, Tensor] = revert_weight_conversion(
        bare, {name: tensor for name, tensor in tensors.items() if name not in ignored}
    )
    return converted

"""What a checkpoint holds: the parts on their way in, the opened checkpoint on its way out.

This module owns which value lives in which file (the table is in the package's docstring). It refuses to hand out
anything that has not been verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.manifest import (
    CONFIG_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Manifest,
    verify,
)
from hezar_train.checkpoint.modules import module_state
from hezar_train.checkpoint.shards import ShardIndex
from hezar_train.checkpoint.snapshot import SnapshotBuffers
from hezar_train.checkpoint.tensors import check_storable, tensor_file
from hezar_train.checkpoint.trees import pack, tensor_names, unpack
from hezar_train.errors import CheckpointError

__all__ = ["Checkpoint", "Parts"]

EXTRA_PREFIX = "extra"
SECTIONS = ("state", "model", "optimizer", "extra")


@dataclass(frozen=True)
class Parts:
    """Everything one checkpoint will hold; made by `gather`, written by a `CheckpointWriter`."""

    model: dict[str, Tensor]
    """The bare module's tensors by name: model.safetensors."""
    optimizer: dict[str, Tensor]
    """The optimizer's tensors, and those of `extra` under "extra.": optimizer.safetensors."""
    files: dict[str, bytes]
    """All other files by name, trainer_state.json among them."""
    folders: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """Subfolders and the functions that fill them; they run in the writing thread."""
    before_commit: Callable[[], None] | None = None
    """Called in the writing thread when all is on disk but the name: make the logs durable here."""

    @classmethod
    def gather(
        cls,
        model: nn.Module,
        optimizer: Any,
        state: dict[str, Any],
        texts: Mapping[str, str],
        extra: Any = None,
        folders: Mapping[str, Callable[[Path], None]] | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> Parts:
        """Collect the live tensors by reference and turn everything else into bytes, as it is now."""
        if CONFIG_FILE not in texts:
            raise CheckpointError(f"a checkpoint needs the text {CONFIG_FILE!r}; given: {sorted(texts)}")
        tensors, meta = module_state(model)
        optimizer_json, optimizer_tensors = pack(optimizer)
        extra_json, extra_tensors = pack(extra, prefix=EXTRA_PREFIX, taken=optimizer_tensors)
        others = optimizer_tensors | extra_tensors
        for name, tensor in others.items():
            check_storable(name, tensor)
        sections = {"state": _plain(state), "model": meta, "optimizer": optimizer_json, "extra": extra_json}
        files = {STATE_FILE: json.dumps(sections, indent=1, allow_nan=False).encode("utf-8")}
        files |= {name: text.encode("utf-8") for name, text in texts.items()}
        return cls(tensors, others, files, dict(folders or {}), before_commit)

    @property
    def nbytes(self) -> int:
        """Return the size of the known files, headers left out."""
        tensors = [*self.model.values(), *self.optimizer.values()]
        return sum(tensor.nbytes for tensor in tensors) + sum(len(content) for content in self.files.values())

    def reserve(self, buffers: SnapshotBuffers) -> None:
        """Make the buffers that a snapshot of these parts needs."""
        buffers.reserve(self._labelled())

    def snapshot(self, buffers: SnapshotBuffers) -> Parts:
        """Return the same parts with all tensors copied to the host, so that training may go on."""
        copies = buffers.copy(self._labelled())
        model = {name: copies[f"model/{name}"] for name in self.model}
        return replace(self, model=model, optimizer={name: copies[f"optimizer/{name}"] for name in self.optimizer})

    def write(self, draft: Draft) -> None:
        """Write all parts."""
        draft.write(MODEL_FILE, tensor_file(self.model))
        draft.write(OPTIMIZER_FILE, tensor_file(self.optimizer))
        for name, content in self.files.items():
            draft.write(name, [content])
        for name, fill in self.folders.items():
            draft.write_folder(name, fill)

    def _labelled(self) -> dict[str, Tensor]:
        model = {f"model/{name}": tensor for name, tensor in self.model.items()}
        return model | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}


class Checkpoint:
    """One verified checkpoint; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest: Manifest = verify(path)
        self.step = self._manifest.step
        self._sections = _read_sections(path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step})"

    def model(self) -> tuple[dict[str, Tensor], Any]:
        """Return the model's tensors and their JSON, for `load_module_state`."""
        return ShardIndex(self.path).read_whole("model"), self._sections["model"]

    def optimizer(self) -> Any:
        """Return the optimizer's state dict, equal to the one that was saved."""
        return self._tree("optimizer")

    def state(self) -> dict[str, Any]:
        """Return the trainer's state."""
        state: dict[str, Any] = unpack(self._sections["state"], {})
        return state

    def extra(self) -> Any:
        """Return the state of the schedule, the hooks, the data and whatever else was given."""
        return self._tree("extra")

    def text(self, name: str) -> str:
        """Return a text file of the checkpoint."""
        if name not in self._manifest.files:
            known = ", ".join(sorted(self._manifest.files))
            raise CheckpointError(f"{self.path} has no file {name!r}. It has: {known}")
        return (self.path / name).read_text("utf-8")

    def _tree(self, section: str) -> Any:
        packed = self._sections[section]
        return unpack(packed, ShardIndex(self.path).read_whole("optimizer", tensor_names(packed)))


def _plain(state: dict[str, Any]) -> Any:
    packed, tensors = pack(state, prefix="state")
    if tensors:
        raise CheckpointError(f"the trainer's state holds tensors ({', '.join(tensors)}): put them into `extra`")
    return packed


def _read_sections(path: Path) -> dict[str, Any]:
    try:
        sections = json.loads((path / STATE_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{STATE_FILE} cannot be read: {error}") from error
    if not isinstance(sections, dict) or any(name not in sections for name in SECTIONS):
        raise CheckpointError(f"{STATE_FILE} must hold the sections {', '.join(SECTIONS)}")
    return sections

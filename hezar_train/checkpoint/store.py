"""What a checkpoint holds, and the folder in which a run keeps its checkpoints.

From top to bottom: `Contents` is everything one checkpoint will hold, gathered from a live model and optimizer;
`SnapshotBuffers` is the host memory that a background save copies it into; `Checkpoint` is one that was opened and
verified; `CheckpointStore` is the run's folder of them: names, publication, the newest that verifies, retention;
`write_checkpoint` and `open_checkpoint` write and open a single one at a path of the caller's choice.

This module owns which value lives in which file (the table is in the package's docstring) and the names in the folder:
`00000120` is the checkpoint of step 120 (any zero padding is read), names that start with a dot are not checkpoints. It
refuses to hand out anything that has not been verified, to rewrite a checkpoint that verifies, to delete the newest or
a folder that has no manifest of ours, and to answer "there is none" where there were some.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hezar_train.checkpoint.format import (
    JSON,
    MOST_JSON_BYTES,
    check_storable,
    needed_tensors,
    pack,
    parse_json,
    refuse_large_json,
    tensor_file,
    tensor_names,
    unpack,
)
from hezar_train.checkpoint.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Draft,
    Manifest,
    make_folder_durably,
    read_manifest,
    remove_folder,
    rename_durably,
    verify,
)
from hezar_train.checkpoint.modules import check_meta, module_state, refuse_missing_tensors
from hezar_train.checkpoint.shard_files import SHARD_NAME, ShardIndex
from hezar_train.checkpoint.trained_part import BaseRecord, HeldPart
from hezar_train.errors import CheckpointError, NoSuchCheckpointError
from hezar_train.run_folder import read_file
from hezar_train.run_layout import (
    BASE_FILE,
    CHECKPOINTS_FOLDER,
    DAMAGED_PREFIX,
    DROPPED_PREFIX,
    MODEL_CONFIG_FOLDER,
    PREPROCESSOR_FOLDER,
    REPLACED_PREFIX,
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    step_name,
    step_of,
)

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Contents",
    "Rejected",
    "SnapshotBuffers",
    "open_checkpoint",
    "put_back",
    "to_delete",
    "write_checkpoint",
]

SECTIONS = ("state", "model", "optimizer", "extra")  # of trainer_state.json
HIDDEN_NAME = re.compile(rf"(?:{re.escape(TEMPORARY_PREFIX)}|{re.escape(TRASH_PREFIX)}).+-[0-9]+")
OWN_NAMES = frozenset({
    *(MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, CONFIG_FILE, MANIFEST_FILE, BASE_FILE),
    *(PREPROCESSOR_FOLDER, MODEL_CONFIG_FOLDER, CHECKPOINTS_FOLDER),  # the last of a download
})  # fmt: skip
MOST_TEXT_BYTES = 64 << 20  # of a config, a vocabulary
EXTRA_PREFIX = "extra"  # of the names of its tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """Everything one checkpoint will hold; made by `gather`, written by a `CheckpointWriter`."""

    model: dict[str, Tensor]
    """The bare module's tensors by name, or those of its trained part: model.safetensors."""
    optimizer: dict[str, Tensor]
    """The optimizer's tensors, and those of `extra` under "extra.": optimizer.safetensors."""
    files: dict[str, bytes]
    """All other files by name, trainer_state.json among them."""
    folders: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    """Subfolders and the functions that fill them; they run in the writing thread."""
    before_commit: Callable[[], None] | None = None
    """Called in the writing thread when all is on disk but the name: make the logs durable here."""
    part: HeldPart | None = None
    """What is left out of the model, and what is said of it: base_model.json."""

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
        part: HeldPart | None = None,
    ) -> Contents:
        """Collect live tensors by reference, values and texts as bytes of now; `folders` are filled when written.

        With a `part`, what it leaves out of the model is not collected.
        """
        if CONFIG_FILE not in texts:
            raise CheckpointError(f"a checkpoint needs the text {CONFIG_FILE!r}; given: {sorted(texts)}")
        tensors, meta = module_state(model, frozenset() if part is None else part.left_out)
        optimizer_json, optimizer_tensors = pack(optimizer)
        extra_json, extra_tensors = pack(extra, prefix=EXTRA_PREFIX, taken=optimizer_tensors)
        others = optimizer_tensors | extra_tensors
        for name, tensor in others.items():
            check_storable(name, tensor)
        sections = {"state": _plain(state), "model": meta, "optimizer": optimizer_json, "extra": extra_json}
        files = {STATE_FILE: json.dumps(sections, indent=1, allow_nan=False).encode("utf-8")}
        refuse_large_json(files[STATE_FILE], STATE_FILE)
        files |= {name: text.encode("utf-8") for name, text in texts.items()}
        return cls(tensors, others, files, dict(folders or {}), before_commit, part)

    @property
    def nbytes(self) -> int:
        """Return the size of the known files, headers left out."""
        tensors = [*self.model.values(), *self.optimizer.values()]
        return sum(tensor.nbytes for tensor in tensors) + sum(len(content) for content in self.files.values())

    def reserve(self, buffers: SnapshotBuffers) -> None:
        """Make the buffers that a snapshot of these parts needs."""
        buffers.reserve(self._labelled())

    def snapshot(self, buffers: SnapshotBuffers) -> Contents:
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
        if self.part is not None:
            draft.write(BASE_FILE, [self.part.record()])
        for name, fill in self.folders.items():
            draft.write_folder(name, fill)

    def _labelled(self) -> dict[str, Tensor]:
        model = {f"model/{name}": tensor for name, tensor in self.model.items()}
        return model | {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}


def _plain(state: dict[str, Any]) -> Any:
    packed, tensors = pack(state, prefix="state")
    if tensors:
        raise CheckpointError(f"the trainer's state holds tensors ({', '.join(tensors)}): put them into `extra`")
    return packed


class SnapshotBuffers:
    """Hold one host buffer per tensor name; what `copy` returned is valid until the next `copy`.

    A background save stalls training for this copy alone. The buffers are made once and used at every save, and touched
    when they are reserved: a page that is touched for the first time costs several times its copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Return the host memory held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, named: dict[str, Tensor]) -> None:
        """Make and touch the buffers that these tensors will need; only shape, dtype and device are looked at."""
        for name, tensor in named.items():
            if not _fits(self._buffers.get(name), tensor):
                self._buffers[name] = _touched_buffer(tensor)

    def copy(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy all tensors to the host, done when this returns; buffers of names that are gone are freed."""
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in named}
        self.reserve(named)
        sources = [tensor.detach() for tensor in named.values()]
        targets = [self._buffers[name] for name in named]
        if targets:
            with torch.no_grad():
                # One call for all, not a kernel and a wait for each; pinned targets let copies from a GPU overlap.
                torch._foreach_copy_(targets, sources, non_blocking=True)
        for device in {source.device for source in sources if source.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return dict(zip(named, targets, strict=True))


def _fits(buffer: Tensor | None, tensor: Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _touched_buffer(tensor: Tensor) -> Tensor:
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    buffer.reshape(-1).view(torch.uint8).zero_()  # as bytes, whatever the dtype
    return buffer


class Checkpoint:
    """One verified checkpoint; tensors are read when asked for."""

    def __init__(self, path: Path, *, believes_shards: bool = False) -> None:
        """Open and verify it; of one that another process of the run has just verified, all but the shards' bytes.

        Else each of many processes would read what all of them have written.
        """
        self.path = path
        self._manifest: Manifest = verify(path, unread=SHARD_NAME if believes_shards else None)
        self.step = self._manifest.step
        self._index = ShardIndex(path, self._manifest)
        self._sections = _read_sections(path)
        _check_sections(self._sections, self._index)
        self.base = self._read_base()
        """What is left out of the model, and which files others load; None if it is held whole, without adapters."""

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step})"

    def model(self) -> tuple[dict[str, Tensor], Any]:
        """Return the model's tensors and their JSON, for `load_module_state`."""
        return self._index.read_whole("model"), self._sections["model"]

    def packed(self, section: str) -> JSON:
        """Return a section of the state as it is stored, its tensors by name."""
        packed: JSON = self._sections[section]
        return packed

    @property
    def shards(self) -> ShardIndex:
        """What lies in shards."""
        return self._index

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
        try:
            return read_file(self.path / name, MOST_TEXT_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path / name} is no text in UTF-8: {error}") from error

    def _read_base(self) -> BaseRecord | None:
        if BASE_FILE not in self._manifest.files:
            return None
        record = BaseRecord.read(read_file(self.path / BASE_FILE, MOST_JSON_BYTES))
        record.refuse_misfits(self._index.tensors("model").keys())
        return record

    def _tree(self, section: str) -> Any:
        packed = self._sections[section]
        return unpack(packed, self._index.read_whole("optimizer", tensor_names(packed)))


def _read_sections(path: Path) -> dict[str, Any]:
    try:
        content = read_file(path / STATE_FILE, MOST_JSON_BYTES)
    except OSError as error:
        raise CheckpointError(f"{STATE_FILE} cannot be read: {error}") from error
    sections = parse_json(content, STATE_FILE)
    if not isinstance(sections, dict) or any(name not in sections for name in SECTIONS):
        raise CheckpointError(f"{STATE_FILE} must hold the sections {', '.join(SECTIONS)}")
    return sections


def _check_sections(sections: dict[str, Any], index: ShardIndex) -> None:
    """Read every node of the state, and see that the tensors which it names are there, before anything is used."""
    if needed_tensors(sections["state"]) or not isinstance(unpack(sections["state"], {}), dict):
        raise CheckpointError(f"{STATE_FILE}: the state must be names with plain values")
    check_meta(sections["model"], index.tensors("model"))
    stored = index.tensors("optimizer")
    for section in ("optimizer", "extra"):
        refuse_missing_tensors(sections[section], stored, section)


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


class CheckpointStore:
    """Keep checkpoints under one folder; every method that changes it expects the caller to hold the run's lock."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending; none of them is verified."""
        return sorted({step for step, _ in self._names()})

    def path(self, step: int) -> Path:
        """Return the folder of a step, existing under any zero padding or yet to be written."""
        usual = self.root / step_name(step)
        if usual.is_dir() and not usual.is_symlink():  # asked first: there may be thousands of others
            return usual
        return self.root / min((name for found, name in self._names() if found == step), default=usual.name)

    def open(self, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint at a path, verified."""
        folder = Path(path)
        if not folder.exists():
            raise NoSuchCheckpointError(
                f"there is no checkpoint at {folder}: the path does not exist. {self._advice()}"
            )
        if not (folder / MANIFEST_FILE).exists():
            raise CheckpointError(f"{folder} is not a checkpoint: it has no {MANIFEST_FILE}. {self._advice()}")
        try:
            return Checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {error}. {self._advice()}") from error

    def newest(self, check: Callable[[Checkpoint], None] = lambda _: None) -> tuple[Checkpoint | None, list[Rejected]]:
        """Return the newest checkpoint that verifies and those passed over; None only if there never was one.

        `check` may raise a `CheckpointError` for one that verifies and yet cannot be used.
        """
        rejected: list[Rejected] = []
        for step, folder in reversed(self._folders()):
            try:
                found = self._open_as(step, folder)
                check(found)
            except CheckpointError as error:
                rejected.append(Rejected(folder, str(error)))
            else:
                return found, rejected
        rejected += [Rejected(folder, "was set aside as damaged") for folder in self._hidden(DAMAGED_PREFIX)]
        if rejected:
            reasons = "\n".join(f"  {one.path.name}: {one.reason}" for one in rejected)
            raise CheckpointError(
                f"no checkpoint in {self.root} can be loaded:\n{reasons}\n"
                "Restore one from a copy, or move the folder away to start from scratch."
            )
        return None, []

    def publish(
        self, step: int, fill: Callable[[Draft], None], before_commit: Callable[[], None] | None = None
    ) -> Path:
        """Write a checkpoint so that it appears whole or not at all; one that is already there and verifies stays."""
        if self._is_good(step):
            return self.path(step)
        make_folder_durably(self.root)
        draft = Draft(self.root / _draft_name(step_name(step)))
        draft.folder.mkdir()
        try:
            fill(draft)
            draft.seal(step)
            if before_commit is not None:
                before_commit()
            return self._commit(step, draft.folder)
        except BaseException:
            remove_folder(draft.folder)
            raise

    def confirm(self, path: Path) -> None:
        """Read a checkpoint back and verify it: the bytes on the disk are those that were meant."""
        try:
            verify(path)
        except CheckpointError as error:
            raise CheckpointError(f"the checkpoint {path} is damaged: {error}. {self._advice()}") from error

    def prune(self, keep: int | None, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the newest `keep` and the protected checkpoints; return the steps deleted."""
        if keep is None:
            return []
        surplus = set(to_delete(self.steps(), keep, protect))
        found = [(step, self.root / name) for step, name in sorted(self._names()) if step in surplus]
        deleted = [one for one in found if _is_ours(*one)]
        for _, folder in deleted:
            # Renamed first: a half deleted folder must not look like a damaged checkpoint.
            self._remove(self._set_aside(folder, TRASH_PREFIX))
        return sorted({step for step, _ in deleted})

    def clean(self) -> list[str]:
        """Remove what killed writers left behind; return the names."""
        hidden = [*self._hidden(TEMPORARY_PREFIX), *self._hidden(TRASH_PREFIX)]
        leftovers = [folder for folder in hidden if _is_leftover(folder)]
        for folder in leftovers:
            self._remove(folder)
        return [folder.name for folder in leftovers]

    def set_aside(self, rejected: Iterable[Rejected]) -> list[Path]:
        """Rename damaged checkpoints, so that they do not count for retention any more; return the new paths."""
        return [self._set_aside(one.path, DAMAGED_PREFIX) for one in rejected if step_of(one.path.name) is not None]

    def drop_after(self, step: int) -> list[Path]:
        """Rename all checkpoints newer than `step`: a run that leaves their history must not find them later."""
        return [self._set_aside(folder, DROPPED_PREFIX) for found, folder in self._folders() if found > step]

    def _commit(self, step: int, draft: Path) -> Path:
        if any(found == step for found, _ in self._names()):
            self._set_aside(self.path(step), DAMAGED_PREFIX)
        final = self.root / step_name(step)
        rename_durably(draft, final)
        return final

    def _is_good(self, step: int) -> bool:
        folder = self.path(step)
        if not folder.exists():
            return False
        try:
            self._open_as(step, folder)
        except CheckpointError as error:
            logger.warning("The checkpoint %s is damaged (%s); it is set aside and written anew.", folder, error)
            return False
        return True

    def _open_as(self, step: int, folder: Path) -> Checkpoint:
        checkpoint = Checkpoint(folder)
        if checkpoint.step != step:
            raise CheckpointError(f"the folder is named after step {step} but holds step {checkpoint.step}")
        return checkpoint

    def _folders(self) -> list[tuple[int, Path]]:
        return [(step, self.root / name) for step, name in sorted(self._names())]

    def _names(self) -> list[tuple[int, str]]:
        """Return the folders in the order of the disk; there may be thousands, so no more is made of each."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            numeric = [(step, entry) for entry in entries if (step := step_of(entry.name)) is not None]
            # A link is none: what is renamed and deleted here must lie here.
            return [(step, entry.name) for step, entry in numeric if entry.is_dir(follow_symlinks=False)]

    def _hidden(self, prefix: str) -> list[Path]:
        return sorted(self.root.glob(f"{prefix}*"))

    def _set_aside(self, folder: Path, prefix: str) -> Path:
        names = (self.root / f"{prefix}{folder.name}-{number}" for number in itertools.count(1))
        target = next(path for path in names if not path.exists())
        rename_durably(folder, target)
        return target

    def _remove(self, folder: Path) -> None:
        if not remove_folder(folder):
            logger.warning("%s could not be deleted completely; the next start tries again.", folder)

    def _advice(self) -> str:
        if not (steps := self.steps()):
            return f"There are no checkpoints in {self.root}."
        names = ", ".join(self.path(step).name for step in steps)
        return f"{self.root} has {names}; resume_from_checkpoint=True takes the newest."


def to_delete(steps: Iterable[int], keep: int | None, protect: Collection[int] = ()) -> list[int]:
    """Return the steps that retention lets go: all but the newest `keep` and the protected; the newest never goes."""
    if keep is None:
        return []
    oldest_first = sorted(set(steps))
    surplus = oldest_first[: max(len(oldest_first) - max(keep, 1), 0)]
    return [step for step in surplus if step not in protect]


def _is_ours(step: int, folder: Path) -> bool:
    """Tell whether a folder is a checkpoint of a step, whole or not: whether its manifest says so."""
    try:
        return read_manifest(folder).step == step
    except CheckpointError as error:
        logger.warning("%s is older than save_total_limit allows, but is left alone: %s", folder, error)
        return False


def _is_leftover(folder: Path) -> bool:
    """Tell whether a hidden folder holds what a save writes, or nothing: others may have hidden folders, too."""
    if not HIDDEN_NAME.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return not names or any(name in OWN_NAMES or SHARD_NAME.fullmatch(name) for name in names)


def _draft_name(name: str) -> str:
    """Return a hidden name that `clean` knows and nobody can guess: no two drafts share one, none is waited for."""
    return f"{TEMPORARY_PREFIX}{name}-{secrets.randbits(64)}"


def write_checkpoint(path: Path, parts: Contents, step: int) -> Path:
    """Write a checkpoint to the folder `path`, in place of one that may be there; return the path.

    It appears whole or not at all. A checkpoint that is there keeps its place until the new one is verified; anything
    else that is there is refused, never replaced.
    """
    if path.exists() and not (path / MANIFEST_FILE).exists():
        raise CheckpointError(f"{path} is there and is not a checkpoint: give a path that does not exist yet")
    make_folder_durably(path.parent)
    draft = Draft(path.with_name(_draft_name(path.name)))
    draft.folder.mkdir()
    try:
        parts.write(draft)
        draft.seal(step)
        verify(draft.folder)
        _put_in_place(draft.folder, path)
    except BaseException:
        remove_folder(draft.folder)
        raise
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at a path, verified; one that a killed `write_checkpoint` was replacing is put back."""
    put_back(path)
    return CheckpointStore(path.parent).open(path)


def put_back(path: Path) -> None:
    """Put a checkpoint back that a killed `write_checkpoint` was replacing."""
    replaced = path.with_name(REPLACED_PREFIX + path.name)
    if not path.exists() and replaced.exists():
        rename_durably(replaced, path)


def _put_in_place(draft: Path, final: Path) -> None:
    # A folder cannot be renamed onto one with files in it: the old one goes aside first, where `put_back` looks for it.
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if replaced.exists() and not (replaced / MANIFEST_FILE).is_file():
        raise CheckpointError(f"{replaced} is there and is not a checkpoint that was replaced: move it away")
    if final.exists():
        remove_folder(replaced)
        rename_durably(final, replaced)
    rename_durably(draft, final)
    remove_folder(replaced)

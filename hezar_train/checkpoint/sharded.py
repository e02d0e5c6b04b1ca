"""Checkpoints of a model whose parameters are sharded over processes (FSDP2), and of any optimizer on them.

Saving: `gather_shards` collects what this process writes, and all processes write one checkpoint together through a
`SharedStore`. In the folder, `model.safetensors` and `optimizer.safetensors` hold what every process has whole
(buffers, step counters), written by the main process; `shard_files.py` tells of the files beside them. `gather_whole`
collects everything on one process instead.

Loading: `load_shards` reads what this process holds from a checkpoint of any number of processes, plain ones included;
a plain model loads a sharded checkpoint, a sharded model a plain one. `load_whole` cuts whole tensors to this process's
part, `export_model` makes one plain file of a checkpoint.

Names, ties, strictness and the JSON are those of every checkpoint: seen through `as_shards`, a sharded module is a
plain one whose parameters are its shards. Neither gathering shards nor loading sends anything between processes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hezar_train.checkpoint.format import pack, tensor_file, tensor_names, unpack
from hezar_train.checkpoint.manifest import (
    Draft,
    FileRecord,
    rename_durably,
    write_file_durably,
)
from hezar_train.checkpoint.modules import clean_name, load_module_state, module_names, unwrap
from hezar_train.checkpoint.optimizer_state import fitted_state
from hezar_train.checkpoint.shard_files import (
    Box,
    Place,
    ShardIndex,
    local_part,
    place_of,
    whole,
    write_shards,
)
from hezar_train.checkpoint.split_files import most_bytes, write_split
from hezar_train.checkpoint.store import Checkpoint, CheckpointStore, Contents
from hezar_train.checkpoint.trained_part import HeldPart, base_differences, refuse_other_base
from hezar_train.config.files import is_disk_full
from hezar_train.errors import CheckpointError
from hezar_train.run_layout import TEMPORARY_PREFIX
from hezar_train.runtime.group import verify_group

__all__ = [
    "SavingGroup",
    "ShardedContents",
    "ShardedSource",
    "SharedStore",
    "as_shards",
    "as_whole",
    "export_model",
    "gather_shards",
    "gather_whole",
    "held_box",
    "load_shards",
    "load_whole",
    "places_of",
    "replicated_like",
    "sharded_like",
    "share_of",
    "state_dict_as",
]

Fill = Callable[[Draft], None]
"""Write files into the draft of a checkpoint."""


@dataclass(frozen=True)
class ShardedContents(Contents):
    """What one process writes of a checkpoint: its shards and, if it is the main one, all that is whole."""

    places: Mapping[str, Mapping[str, Place]] = field(default_factory=lambda: {"model": {}, "optimizer": {}})
    """Where the sharded tensors of the "model" and the "optimizer" belong, by name."""
    rank: int = 0
    count: int = 1

    def write(self, draft: Draft) -> None:
        """Write this process's files."""
        if any(self.places.values()):
            shards = {
                "model": self._shards("model", self.model),
                "optimizer": self._shards("optimizer", self.optimizer),
            }
            write_shards(draft, f"{self.rank + 1:05d}-of-{self.count:05d}", shards)
        if self.rank == 0:
            model, optimizer = self._whole("model", self.model), self._whole("optimizer", self.optimizer)
            Contents(model, optimizer, self.files, self.folders, part=self.part).write(draft)

    def _shards(self, part: str, tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Place]]:
        return {name: (tensors[name], place) for name, place in self.places[part].items() if name in tensors}

    def _whole(self, part: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self.places[part]}


def gather_shards(
    model: nn.Module,
    optimizer: Any,
    state: dict[str, Any],
    texts: Mapping[str, str],
    extra: Any = None,
    folders: Mapping[str, Callable[[Path], None]] | None = None,
    before_commit: Callable[[], None] | None = None,
    part: HeldPart | None = None,
    *,
    rank: int,
    count: int,
) -> ShardedContents:
    """Collect what this process writes of all that `Contents.gather` takes; nothing is sent between processes."""
    packed, tensors = pack(optimizer)
    local = unpack(packed, {name: local_part(tensor) for name, tensor in tensors.items()})
    with as_shards(model) as model_places:
        parts = Contents.gather(model, local, state, texts, extra, folders, before_commit, part)
    places = {"model": model_places, "optimizer": places_of(tensors)}
    return ShardedContents(
        _written(rank, parts.model, places["model"]),
        _written(rank, parts.optimizer, places["optimizer"]),
        parts.files,
        parts.folders,
        parts.before_commit,
        parts.part,
        places,
        rank,
        count,
    )


def gather_whole(
    model: nn.Module,
    optimizer: Any,
    state: dict[str, Any],
    texts: Mapping[str, str],
    extra: Any = None,
    folders: Mapping[str, Callable[[Path], None]] | None = None,
    before_commit: Callable[[], None] | None = None,
    part: HeldPart | None = None,
    *,
    is_kept: bool,
) -> Contents:
    """Collect all that `Contents.gather` takes, put together of all processes' shards, where it `is_kept`.

    One tensor after another becomes whole, and goes to the host or is let go.
    """

    def whole_or_empty(tensor: Tensor) -> Tensor:
        if place_of(tensor) is None:
            return tensor
        found = whole(tensor)
        return found.cpu() if is_kept else found.new_empty(0)

    packed, tensors = pack(optimizer)
    joined = unpack(packed, {name: whole_or_empty(tensor) for name, tensor in tensors.items()})
    with state_dict_as(model, whole_or_empty, frozenset() if part is None else part.left_out):
        return Contents.gather(model, joined, state, texts, extra, folders, before_commit, part)


def _written(rank: int, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """Return what this process is the one to write; an empty shard is written by the main one, for its name."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (places[name].is_first and (rank == 0 or tensor.numel() > 0) if name in places else rank == 0)
    }


class SharedStore(CheckpointStore):
    """A store whose `publish` all processes call together; the main process alone does all else that changes it.

    The order of such a save:

        the main process            makes the hidden folder and names it to the others
        every process               writes its own files there, durably, and reports their hashes, or what went wrong
        the main process            seals the manifest of all files, renames the folder, and says how it ended

    A process that fails says so like one that succeeds, so none waits for it, and all raise. One that dies breaks the
    channel, which raises in the others at once. The checkpoint has no name before the last step, so whoever dies when,
    the checkpoints that were there stay as they were.
    """

    def __init__(self, root: str | os.PathLike[str], group: SavingGroup) -> None:
        super().__init__(root)
        self._group = group

    def publish(self, step: int, fill: Fill, before_commit: Callable[[], None] | None = None) -> Path:
        """Let every process fill its draft of one checkpoint; it appears whole, or no process returns."""
        if not self._group.is_main:
            return self._follow(step, fill)
        try:
            path = super().publish(step, functools.partial(self._lead, step, fill), before_commit)
        except BaseException as error:
            self._group.broadcast(_error_report(error))
            raise
        self._group.broadcast({"name": path.name})
        return path

    def confirm(self, path: Path) -> None:
        """Verify a checkpoint on the main process, for all of them."""
        if not self._group.is_main:
            if "error" in (outcome := self._group.broadcast()):
                raise self._failure(outcome["error"], outcome["is_full"])
            return
        try:
            super().confirm(path)
        except BaseException as error:
            self._group.broadcast(_error_report(error))
            raise
        self._group.broadcast({})

    def prune(self, keep: int | None, protect: Collection[int] = ()) -> list[int]:
        """Delete as `CheckpointStore.prune` does, on the main process; the others return nothing deleted."""
        return super().prune(keep, protect) if self._group.is_main else []

    def _lead(self, step: int, fill: Fill, draft: Draft) -> None:
        self._group.broadcast({"folder": draft.folder.name, "step": step})
        error = _attempt(fill, draft)
        outcomes = self._group.gather(_outcome(draft, error))
        failed = {rank: one for rank, one in enumerate(outcomes) if "error" in one}
        if failed:
            texts = "; ".join(f"process {rank}: {one['error']}" for rank, one in failed.items())
            raise self._failure(texts, all(one["is_full"] for one in failed.values())) from error
        for one in outcomes:
            draft.add_records({name: FileRecord(**record) for name, record in one["records"].items()})

    def _follow(self, step: int, fill: Fill) -> Path:
        message, error = self._group.broadcast(), None
        if "folder" in message:
            draft = Draft(self.root / message["folder"])
            # The shards of two steps make a model that never was: a process that missed a save must not join the next.
            error = _attempt(fill, draft) if message["step"] == step else _out_of_step(step, message["step"])
            self._group.gather(_outcome(draft, error))
            message = self._group.broadcast()
        if "name" in message:
            return self.root / str(message["name"])
        raise self._failure(message["error"], message["is_full"]) from error

    def _failure(self, text: str, is_full: bool) -> Exception:
        if is_full:
            return OSError(errno.ENOSPC, text, str(self.root))
        return CheckpointError(f"the checkpoint could not be saved. {text}")


def _attempt(fill: Fill, draft: Draft) -> BaseException | None:
    if not draft.folder.is_dir():
        return CheckpointError(f"{draft.folder} is not there: all processes must see the same folder of checkpoints")
    try:
        fill(draft)
    except BaseException as error:  # noqa: BLE001 - raised again once the other processes know
        return error
    return None


def _out_of_step(step: int, main_step: int) -> CheckpointError:
    return CheckpointError(f"this process saves step {step} while the main process saves step {main_step}")


def _outcome(draft: Draft, error: BaseException | None) -> dict[str, Any]:
    if error is not None:
        return _error_report(error)
    return {"records": {name: asdict(record) for name, record in draft.records.items()}}


def _error_report(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "is_full": is_disk_full(error)}


class SavingGroup:
    """The processes that save together, and this one's number among them; only one thread of each may use it.

    What they say is JSON, on a channel of its own: a thread may save while the main thread trains.
    """

    def __init__(self, rank: int = 0, count: int = 1, channel: Any = None) -> None:
        self.rank, self.count, self._channel = rank, count, channel

    @classmethod
    def form(cls, timeout: timedelta | None = None) -> SavingGroup:
        """Open a channel between all processes of the run; all of them call this, once, at the same place."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        # Gloo, whatever the run computes on: these messages must not queue behind kernels.
        channel = dist.new_group(backend="gloo", timeout=timeout)
        verify_group(channel)
        return cls(dist.get_rank(), dist.get_world_size(), channel)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gave, in the order of their numbers."""
        if self.count == 1:
            return [value]
        # Not torch's `all_gather_object`, which sends pickles.
        text = json.dumps(value).encode("utf-8")
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._channel)
        room = max(int(size) for size in sizes)
        texts = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, _as_tensor(text.ljust(room)), group=self._channel)
        return [_parsed(one) for one in texts]

    def broadcast(self, value: Any = None) -> Any:
        """Return what the main process gave."""
        if self.count == 1:
            return value
        text = json.dumps(value).encode("utf-8") if self.is_main else b""
        room = torch.tensor([len(text)])
        dist.broadcast(room, 0, group=self._channel)
        data = _as_tensor(text.ljust(int(room)))
        dist.broadcast(data, 0, group=self._channel)
        return _parsed(data)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _parsed(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def load_shards(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None = None, *, is_base_checked: bool = False
) -> None:
    """Load what this process holds, of the model and the optimizer, from any checkpoint.

    Of a checkpoint of the trained part, the model must have the base that it was trained on: unless the caller has seen
    to that, it is compared, for which all processes with shares call this together. Else nothing is sent.
    """
    source, base = ShardedSource(checkpoint), checkpoint.base
    left_out = () if base is None else base.tensors.keys()
    if base is not None and not is_base_checked:
        refuse_other_base(checkpoint.path, base, base_differences(model, base))
    with as_shards(model) as places:
        load_module_state(model, source.model(places), checkpoint.packed("model"), left_out)
    if optimizer is None:
        return
    packed = checkpoint.packed("optimizer")
    parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
    state = unpack(packed, source.optimizer(tensor_names(packed), parameters))
    try:
        optimizer.load_state_dict(fitted_state(state, optimizer))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the optimizer state of {checkpoint.path} does not fit this optimizer: {error}"
        ) from error


def load_whole(model: nn.Module, tensors: Mapping[str, Tensor], meta: Any) -> None:
    """Load whole tensors as `load_module_state` does, into a model of which this process may hold a part."""
    with as_shards(model) as places:
        boxes = {name: held_box(tuple(tensor.shape), places.get(name)) for name, tensor in tensors.items()}
        cut = {name: boxes[name].cut(tensor) for name, tensor in tensors.items()}
        load_module_state(model, cut, meta)


def export_model(
    checkpoint: Checkpoint, path: str | os.PathLike[str], *, max_shard_size: int | str | None = None
) -> Path:
    """Write the model of a checkpoint as one plain safetensors file; one process does it, in its own memory.

    With a `max_shard_size` such as "5GB", `path` is a folder of files of at most that size, named as on the Hub, with
    their index; no more than one of them is in memory.
    """
    if checkpoint.base is not None and checkpoint.base.tensors:
        raise CheckpointError(
            f"{checkpoint.path} holds what was trained, and not its base model, {checkpoint.base}: one file with all "
            "weights can only be made with that model. Use hezar-train export RUN FOLDER --merge, or trainer.save("
            "folder, merge=True)."
        )
    target = Path(path)
    if max_shard_size is not None:
        return _export_split(checkpoint.shards, target, most_bytes(max_shard_size))
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}-{secrets.token_hex(6)}")
    try:
        write_file_durably(temporary, tensor_file(checkpoint.shards.read_whole("model")))
        rename_durably(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _export_split(shards: ShardIndex, folder: Path, most: int) -> Path:
    shapes, widths = shards.all_shapes("model"), shards.widths("model")
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    sizes = {name: (count * widths[name], count) for name, count in counts.items()}
    write_split(folder, sizes, lambda names: shards.read_whole("model", names), most)
    return folder


class ShardedSource:
    """The tensors of a checkpoint as this process needs them: of each the box that it holds, or all.

    They fit a sharded model and its optimizer, whatever number of processes wrote them, one without shards included.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._index = checkpoint.shards

    def model(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Return the model's tensors, those that have a place cut to it; refuse one of another shape."""
        names = self._index.tensors("model").keys()
        tensors, shapes = self._read("model", names, places)
        wrong = [name for name in places if shapes.get(name, places[name].shape) != places[name].shape]
        if wrong:
            lines = [f"{name} (model {list(places[name].shape)}, checkpoint {list(shapes[name])})" for name in wrong]
            raise CheckpointError(f"the checkpoint does not fit the model, of another form: {', '.join(lines)}")
        return tensors

    def optimizer(self, names: Set[str], parameters: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the named tensors of the optimizer, those of a sharded parameter in its form."""
        owners = {name: parameters[i] for name in names if (i := _parameter_number(name, len(parameters))) is not None}
        places = places_of(owners)
        tensors, shapes = self._read("optimizer", names, places)
        was_sharded = self._index.shapes("optimizer").keys()
        for name in tensors.keys() & places.keys():
            if shapes[name] == places[name].shape:
                tensors[name] = sharded_like(owners[name], tensors[name])
            elif name in was_sharded:  # of another form than its parameter: every process keeps all of it
                tensors[name] = replicated_like(owners[name], tensors[name])
        return tensors

    def _read(
        self, part: str, names: Set[str], places: Mapping[str, Place]
    ) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
        """Return a tensor for each name, cut to its place if the place is in a tensor of that shape; and all shapes."""
        shapes = {name: shape for name, shape in self._index.all_shapes(part).items() if name in names}
        boxes = {name: held_box(shape, places.get(name)) for name, shape in shapes.items()}
        return self._index.read_boxes(part, boxes), shapes


def held_box(shape: tuple[int, ...], place: Place | None) -> Box:
    """Return the box that a place has of a tensor; of one of another shape than the place's, all of it."""
    return place.box if place is not None and place.shape == shape else Box.whole(shape)


def _parameter_number(name: str, count: int) -> int | None:
    """Return which parameter an optimizer's tensor belongs to: `pack` calls it "state.12.exp_avg"."""
    section, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    is_state = section == "state" and number.isascii() and number.isdigit() and int(number) < count
    return int(number) if is_state else None


@contextlib.contextmanager
def as_shards(module: nn.Module) -> Iterator[dict[str, Place]]:
    """Let a module's state dict hold its shards instead of sharded tensors, both ways; yield their places by name."""
    bare = unwrap(module)
    names, sharded = module_names(bare), _sharded_state(bare)

    def join(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: sharded_like(one, state[name]) for name, one in sharded.items() if name in state})

    joining = bare.register_load_state_dict_pre_hook(join)  # type: ignore[no-untyped-call]
    try:
        with state_dict_as(bare, local_part):
            yield places_of({clean: sharded[name] for clean, name in names.items() if name in sharded})
    finally:
        joining.remove()


def as_whole(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a module's state dict hold whole tensors, gathered by all processes together, instead of sharded ones."""
    return state_dict_as(module, whole)


@contextlib.contextmanager
def state_dict_as(
    module: nn.Module, form: Callable[[Tensor], Tensor], left_out: Collection[str] = ()
) -> Iterator[None]:
    """Let a module's state dict hold another form of its sharded tensors, tied ones as one; some may be left out.

    By a hook of torch's own state dict: whoever takes one inside, through any wrapper, meets the other form.
    """
    bare = unwrap(module)
    sharded = {name: one for name, one in _sharded_state(bare).items() if clean_name(name) not in left_out}

    def replace(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        # Each tensor once: two forms of a tied one would no longer be one memory.
        formed = {one: form(one) for one in dict.fromkeys(sharded.values())}
        state.update({name: formed[one] for name, one in sharded.items()})

    replacing = bare.register_state_dict_post_hook(replace)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        replacing.remove()


def share_of(sharded: Tensor, value: Tensor) -> Tensor:
    """Return the share of a whole value, cut as a tensor of its shape is; of a plain tensor, all of it."""
    place = place_of(sharded)
    return value if place is None else sharded_like(sharded, place.box.cut(value).clone())


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, Place]:
    """Return the place of each tensor that is sharded, by name."""
    found = {name: place_of(tensor) for name, tensor in tensors.items()}
    return {name: place for name, place in found.items() if place is not None}


def sharded_like(sharded: Any, local: Tensor) -> Tensor:
    """Make a sharded tensor of this process's part, in the form of another one."""
    form = {"shape": sharded.shape, "stride": sharded.stride()}
    return _distributed(sharded, local, sharded.placements, **form)


def replicated_like(sharded: Any, values: Tensor) -> Tensor:
    """Make a tensor of which every process has all, on the mesh of another one."""
    from torch.distributed.tensor import Replicate

    return _distributed(sharded, values, [Replicate()] * sharded.device_mesh.ndim)


def _sharded_state(bare: nn.Module) -> dict[str, Tensor]:
    """Return the sharded parameters by the names of the state dict; a tied one is the same object under each."""
    state = nn.Module.state_dict(bare, keep_vars=True)
    return {name: one for name, one in state.items() if isinstance(one, Tensor) and place_of(one) is not None}


def _distributed(sharded: Any, local: Tensor, placements: Any, **form: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    moved = local.to(sharded.to_local().device)
    # Unchecked: the check is a collective, and loading sends nothing.
    return DTensor.from_local(moved, sharded.device_mesh, placements, run_check=False, **form)

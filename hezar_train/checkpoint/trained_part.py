"""The trained part of a model: what a checkpoint holds where the frozen base model is left out, and how that is known.

A checkpoint of the trained part holds every parameter that is trained, or ever was in this run, all adapters of peft,
all buffers and what modules keep besides tensors. What it leaves out never changed: parameters that were frozen from
the beginning, and what a quantized layer keeps beside such a one. `base_model.json` names it:

    {"format": 1,
     "base": {"name": "gpt2", "revision": null, "class": "GPT2LMHeadModel"},
     "tensors": {name: {"dtype", "shape", "sha256"}},                    what is left out
     "adapters": [{"folder": "", "tensors": {peft's name: name}, "computed": [peft's name]}],
     "others": [name]}                                                   what is trained outside of adapted modules

Freezing may change while a run trains, and code may change a frozen parameter without telling (an average of weights
does). So whatever ever required a gradient is held from then on, and so is a parameter that was written to: seen by
torch's count of writes, and by a few values of each tensor that are compared at every save.

The digests are those of the bytes of each frozen tensor. They are made once, in a thread of their own while the run
trains: a frozen tensor does not change. Loading compares them with the model at hand, and refuses another base.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hezar_train.checkpoint.format import MOST_DIMENSIONS, parse_json, raw_bytes
from hezar_train.checkpoint.manifest import SHA256, is_inside
from hezar_train.checkpoint.modules import EXTRA_STATE, clean_name, tied_names, unwrap
from hezar_train.checkpoint.peft_adapters import AdapterTensors, adapted_modules, adapter_tensors, base_of, named_base
from hezar_train.checkpoint.shard_files import local_part, whole
from hezar_train.errors import CheckpointError, printable
from hezar_train.run_layout import ADAPTER_FILE, BASE_FILE, TRAINED_FILE

__all__ = [
    "AdapterFile",
    "BaseRecord",
    "BaseTensor",
    "HeldPart",
    "TrainedPart",
    "base_differences",
    "files_for_others",
    "other_base",
    "refuse_other_base",
]

FORMAT = 1
NUM_SAMPLED = 8
MOST_SHOWN = 3


@dataclass(frozen=True)
class BaseTensor:
    """What identifies a tensor that is left out."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @classmethod
    def of(cls, tensor: Tensor) -> BaseTensor:
        """Read a tensor to its end."""
        digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()
        return cls(_dtype_name(tensor), tuple(tensor.shape), digest)

    @classmethod
    def read(cls, entry: Any, name: str) -> BaseTensor:
        """Read an entry of `base_model.json`."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "sha256"}:
            raise CheckpointError(f"{BASE_FILE}: {name!r} must have dtype, shape and sha256")
        dtype, shape, sha256 = entry["dtype"], entry["shape"], entry["sha256"]
        is_shape = isinstance(shape, list) and len(shape) <= MOST_DIMENSIONS
        is_shape = is_shape and all(type(size) is int and size >= 0 for size in shape)
        if not isinstance(dtype, str) or not is_shape or not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise CheckpointError(f"{BASE_FILE}: {name!r} has a type, a shape or a hash that is none")
        return cls(dtype, tuple(shape), sha256)


@dataclass(frozen=True)
class AdapterFile:
    """One adapter's file for others: its folder, and the model's names of its tensors by peft's."""

    folder: str
    tensors: dict[str, str]
    computed: list[str] = field(default_factory=list)
    """Peft's names of tensors that a checkpoint keeps apart from the model's."""

    @classmethod
    def read(cls, entry: Any) -> AdapterFile:
        """Read an entry of `base_model.json`."""
        if not isinstance(entry, dict) or entry.keys() != {"folder", "tensors", "computed"}:
            raise CheckpointError(f"{BASE_FILE}: an adapter must have folder, tensors and computed")
        folder, tensors, computed = entry["folder"], entry["tensors"], entry["computed"]
        if not isinstance(folder, str) or (folder and not _is_plain_folder(folder)):
            raise CheckpointError(f"{BASE_FILE}: an adapter has the folder {folder!r}, which is refused")
        if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors.values()):
            raise CheckpointError(f"{BASE_FILE}: the tensors of an adapter must be names by names")
        return cls(folder, tensors, _names(computed, "what is computed of an adapter"))


def _is_plain_folder(folder: str) -> bool:
    return is_inside(folder) and all(
        part and not part.startswith(".") and part.isprintable() for part in folder.split("/")
    )


def _names(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{BASE_FILE}: {what} must be a list of names")
    return value


@dataclass(frozen=True)
class BaseRecord:
    """What a checkpoint says of the base model that it leaves out, and of files that others load."""

    name: str | None
    """Under which the base model is loaded, or its path, where the model tells it."""
    revision: str | None
    model_class: str
    tensors: dict[str, BaseTensor]
    """What is left out."""
    adapters: list[AdapterFile]
    others: list[str]

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        content = {
            "format": FORMAT,
            "base": {"name": self.name, "revision": self.revision, "class": self.model_class},
            "tensors": {name: vars(one) for name, one in self.tensors.items()},
            "adapters": [vars(one) for one in self.adapters],
            "others": self.others,
        }
        return json.dumps(content, indent=1).encode("utf-8")

    @classmethod
    def read(cls, content: bytes) -> BaseRecord:
        """Read a file; refuse what `to_bytes` cannot have written."""
        found = parse_json(content, BASE_FILE)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(f"{BASE_FILE} is not of the form that this version of hezar_train reads")
        base, tensors, adapters = found.get("base"), found.get("tensors"), found.get("adapters")
        if not isinstance(base, dict) or not isinstance(tensors, dict) or not isinstance(adapters, list):
            raise CheckpointError(f"{BASE_FILE} must tell of a base, its tensors and adapters")
        name, revision = base.get("name"), base.get("revision")
        is_told = all(one is None or isinstance(one, str) for one in (name, revision))
        if not is_told or not isinstance(base.get("class"), str):
            raise CheckpointError(f"{BASE_FILE}: name, revision and class of the base must be texts")
        left_out = {name: BaseTensor.read(entry, name) for name, entry in tensors.items()}
        others = _names(found.get("others"), "what is trained beside adapters")
        return cls(name, revision, base["class"], left_out, list(map(AdapterFile.read, adapters)), others)

    def refuse_misfits(self, stored: Collection[str]) -> None:
        """Raise unless the names are those of tensors that a checkpoint holds, or of ones that it does not."""
        named = {name for one in self.adapters for name in one.tensors.values()} | set(self.others)
        if (missing := named - set(stored)) or (missing := self.tensors.keys() & set(stored)):
            raise CheckpointError(f"{BASE_FILE} does not fit the tensors that are stored: {ascii(min(missing))[:80]}")

    def __str__(self) -> str:
        named = f"{self.model_class} {self.name!r}" if self.name else self.model_class
        return printable(f"{named}, revision {self.revision}" if self.revision else named)


@dataclass(frozen=True)
class HeldPart:
    """What one save leaves out of the model, and what it says of it."""

    left_out: frozenset[str]
    record: Callable[[], bytes]
    """Makes the content of `base_model.json`; called in the writing thread, it may wait for digests."""
    computed: dict[str, dict[str, Tensor]]
    """Tensors of adapters that are no part of the model's state, by folder and peft's name."""


class TrainedPart:
    """Know what of a model is trained, or ever was since the run began.

    With `holds_all` nothing is left out of checkpoints, and adapters are told apart for exports alone.
    """

    def __init__(self, model: nn.Module, *, holds_all: bool = False) -> None:
        self._model, self.holds_all = unwrap(model), holds_all
        self._trained: set[str] = set()
        self._digests: dict[str, BaseTensor] = {}
        self._lock = threading.Lock()
        self._adapters: tuple[Any, list[AdapterTensors]] = (None, [])
        self._first_writes: dict[str, tuple[int, bytes]] = {}
        self.begin()

    def begin(self, record: BaseRecord | None = None, *, is_same_base: bool = True) -> None:
        """Take the weights of now as those that the run begins with.

        `record` is that of a checkpoint just loaded, and the model's base is its base unless the user accepted another.
        """
        parameters = _parameters(self._model)
        self._digests = {}  # a new one: a thread may still be at work for the old one
        if record is not None and record.tensors:
            self._digests |= record.tensors if is_same_base else {}
            self._trained |= {name for name in parameters if name not in record.tensors}
        elif record is not None:
            self._trained |= {name for one in record.adapters for name in one.tensors.values()} | set(record.others)
        self._first_writes = {name: _write_mark(one) for name, one in parameters.items()}

    def note_trained(
        self, optimizers: Iterable[Optimizer] = (), agree: Callable[[list[int]], Sequence[float]] | None = None
    ) -> None:
        """Hold from now on what requires a gradient, or was stepped or written to.

        With `agree`, which sums over processes, what any of them says so of.
        """
        parameters = _parameters(self._model)
        stepped = {id(one) for optimizer in optimizers for one in optimizer.state}
        found = [int(id(one) in stepped or self._is_trained(name, one)) for name, one in parameters.items()]
        agreed: Sequence[float] = found if agree is None else agree(found)
        self._trained |= {name for name, is_trained in zip(parameters, agreed, strict=True) if is_trained}

    def _is_trained(self, name: str, parameter: nn.Parameter) -> bool:
        if name in self._trained or parameter.requires_grad or parameter.grad is not None:
            return True
        return self._first_writes.get(name) != _write_mark(parameter)

    def digest_in_background(self) -> None:
        """Begin to read the frozen tensors, in a thread of its own."""
        left_out = self._left_out()
        if any(name not in self._digests for name in left_out):
            thread = threading.Thread(target=self._digest, args=(left_out,), name="base-digest", daemon=True)
            thread.start()

    def digest(self) -> dict[str, BaseTensor]:
        """Read the frozen tensors; where each process has a share of them, all processes call this together."""
        return self._digest(self._left_out())

    def held(self) -> HeldPart | None:
        """Return what a save of now leaves out, and what it says of it; None where all is held and all is the model's.

        Where each process has a share, the frozen tensors were read before.
        """
        state = _tensors(self._model)
        ties = tied_names({name: local_part(tensor) for name, tensor in state.items()})
        adapters = self._adapter_tensors(len(state))
        frozen = self._frozen(state)
        left_out = {} if self.holds_all else {name: tensor for name, tensor in state.items() if name in frozen}
        if not left_out and not adapters:
            return None
        files = _adapter_files(adapters, [name for name in state if name not in frozen], ties)
        inside = {name for one in files for name in one.tensors.values()}
        others = [name for name in state if name not in frozen and name not in inside and name not in ties]
        others = [name for name in others if not any(_is_below(name, one.prefix) for one in adapters)]
        name, revision = named_base(self._model)
        model_class = type(base_of(self._model)).__name__

        def record() -> bytes:
            digests = self._digest(left_out)
            return BaseRecord(name, revision, model_class, digests, files, others).to_bytes()

        computed = {one.folder: one.computed for one in adapters if one.computed}
        return HeldPart(frozenset(left_out), record, computed)

    def _left_out(self) -> dict[str, Tensor]:
        state = {} if self.holds_all else _tensors(self._model)
        frozen = self._frozen(state)
        return {name: tensor for name, tensor in state.items() if name in frozen}

    def _frozen(self, state: Mapping[str, Tensor]) -> set[str]:
        """Return the names of what was never trained: parameters, and what quantized layers keep beside them."""
        parameters = _parameters(self._model)
        adapters = self._adapter_tensors(len(state))
        of_adapters = {name for one in adapters for name in (*one.names.values(), *one.sources)}
        frozen = {
            name
            for name, one in parameters.items()
            if name not in self._trained and name not in of_adapters and not one.requires_grad
        }
        buffers = {clean_name(name) for name, _ in self._model.named_buffers(remove_duplicate=False)}
        beside = [name for name in state if name not in parameters and name not in buffers]
        beside = [name for name in beside if name.rpartition(".")[2] != EXTRA_STATE]
        owned = _by_module(parameters)
        frozen |= {name for name in beside if _is_beside_frozen(name, owned, frozen)}
        held_memory = _places(tensor for name, tensor in state.items() if name not in frozen)
        return {name for name in frozen if name in state and not held_memory & _places([state[name]])}

    def _adapter_tensors(self, num_names: int) -> list[AdapterTensors]:
        """Return the adapters; found anew where there are others, or tensors that are computed."""
        found = {name: list(module.peft_config) for name, module in adapted_modules(self._model).items()}
        signature = (found, num_names)
        known, adapters = self._adapters
        if known != signature or any(one.computed for one in adapters):
            adapters = adapter_tensors(self._model) if found else []
            self._adapters = (signature, adapters)
        return adapters

    def _digest(self, tensors: Mapping[str, Tensor]) -> dict[str, BaseTensor]:
        """Return the digests of tensors, made where they are not known; two threads may."""
        known = self._digests
        for name, tensor in tensors.items():
            with self._lock:
                if name not in known:
                    known[name] = BaseTensor.of(whole(tensor))
        return {name: known[name] for name in tensors}


def _adapter_files(adapters: list[AdapterTensors], held: list[str], ties: Mapping[str, str]) -> list[AdapterFile]:
    """Return each adapter's file: its tensors, and what else was trained in its module, under peft's names."""
    of_adapters = {name for one in adapters for name in (*one.names.values(), *one.sources)}
    files = []
    for one in adapters:
        others = [name for name in held if name not in of_adapters and _is_below(name, one.prefix)]
        start = len(one.prefix) + 1 if one.prefix else 0
        names = {one.name_prefix + name[start:]: name for name in others} | one.names
        named = {key: ties.get(name, name) for key, name in names.items()}
        files.append(AdapterFile(one.folder, named, list(one.computed)))
    return files


def files_for_others(record: BaseRecord, tensors: Mapping[str, Tensor], computed: Any) -> dict[str, dict[str, Tensor]]:
    """Return the files of tensors that others load, by their paths: those of adapters, and what else was trained.

    `computed` are tensors by folder and peft's name, as `HeldPart` has them; they may come from a checkpoint.
    """
    if not isinstance(computed, Mapping) or not all(map(_is_tensors, computed.values())):
        raise CheckpointError("the checkpoint keeps tensors of adapters in a form that is never saved")
    files = {}
    for one in record.adapters:
        own = {key: tensors[name] for key, name in one.tensors.items()}
        apart = computed.get(one.folder, {})
        if missing := [key for key in one.computed if key not in apart]:
            raise CheckpointError(f"the checkpoint lacks {missing[0]!r} of an adapter")
        path = f"{one.folder}/{ADAPTER_FILE}" if one.folder else ADAPTER_FILE
        files[path] = own | {key: apart[key] for key in one.computed}
    others = {name: tensors[name] for name in record.others}
    return files | ({TRAINED_FILE: others} if others else {})


def _is_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, Tensor) for one in value.values())


def base_differences(model: nn.Module, record: BaseRecord) -> list[str]:
    """List what a model has otherwise than the base model of a record; of a sharded one, all processes call this."""
    state = _tensors(unwrap(model))
    return [f"{name} ({why})" for name, one in record.tensors.items() if (why := _difference(state.get(name), one))]


def _difference(ours: Tensor | None, expected: BaseTensor) -> str:
    if ours is None:
        return "not in the model"
    found = (_dtype_name(ours), tuple(ours.shape))
    if found != (expected.dtype, expected.shape):
        return f"{list(expected.shape)} {expected.dtype} when it was saved, {list(found[1])} {found[0]} here"
    return "" if BaseTensor.of(whole(ours)).sha256 == expected.sha256 else "other values"


def refuse_other_base(source: object, record: BaseRecord, differences: list[str]) -> None:
    """Raise if a model does not stand on the base that a checkpoint was saved on."""
    if differences:
        raise CheckpointError(
            f"{other_base(source, record, differences)} Build the model on the same base as when the run began; or "
            "begin another run, in another output_dir; or go on all the same with accept_changes=True."
        )


def other_base(source: object, record: BaseRecord, differences: list[str]) -> str:
    """Say in what a model's base is another one than that of a checkpoint."""
    shown = printable(", ".join(differences[:MOST_SHOWN]) + (", ..." if len(differences) > MOST_SHOWN else ""))
    return (
        f"{source} holds what was trained, and not the frozen base model that it was trained on: {record}. The model "
        f"here has another base: {len(differences)} of {len(record.tensors)} frozen tensors differ: {shown}."
    )


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(name): one for name, one in model.named_parameters(remove_duplicate=False)}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    # Called on the class: a model's own `state_dict` may rename its parts or leave some out.
    state = nn.Module.state_dict(model)
    return {clean_name(name): one for name, one in state.items() if isinstance(one, Tensor)}


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name.startswith(f"{prefix}.")


def _by_module(parameters: Collection[str]) -> dict[str, list[str]]:
    owned: dict[str, list[str]] = {}
    for name in parameters:
        owned.setdefault(name.rpartition(".")[0], []).append(name)
    return owned


def _is_beside_frozen(name: str, owned: Mapping[str, list[str]], frozen: Collection[str]) -> bool:
    """Tell whether a state that is neither parameter nor buffer belongs to parameters that are all frozen.

    `owned` are the parameters by their modules.
    """
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        if owner in owned:
            return all(one in frozen for one in owned[owner])
    return False


def _places(tensors: Any) -> set[tuple[Any, ...]]:
    """Return where tensors lie; none for those without values."""
    local = [local_part(tensor) for tensor in tensors]
    return {(one.device, one.data_ptr()) for one in local if one.numel() and not one.is_meta}


def _write_mark(parameter: Tensor) -> tuple[int, bytes]:
    """Return what changes when a parameter is written to: torch's count of writes, and a few of its values.

    The count does not see what is written through `.data`; values that are sampled do, if all are written.
    """
    local = local_part(parameter.detach())
    count = 0 if local.is_inference() else parameter._version
    flat = local.reshape(-1)
    return count, bytes(raw_bytes(flat[:: max(1, flat.numel() // NUM_SAMPLED)][: NUM_SAMPLED + 1]))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

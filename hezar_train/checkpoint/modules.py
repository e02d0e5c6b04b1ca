"""A module's state as named tensors, and how it is loaded again.

This module owns the names (those of the bare module, whatever wraps it), tied tensors and strict loading. It refuses to
match by position, to load a part, and to cast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hezar_train.checkpoint.format import (
    JSON,
    StoredTensor,
    check_storable,
    needed_tensors,
    pack,
    raw_bytes,
    tensor_names,
    unpack,
)
from hezar_train.errors import CheckpointError

__all__ = [
    "EXTRA_STATE",
    "check_meta",
    "clean_name",
    "load_module_state",
    "module_names",
    "module_state",
    "refuse_missing_tensors",
    "stored_state",
    "tied_names",
    "unwrap",
]

COMPILED_CHILD = "_orig_mod"
EXTRA_STATE = "_extra_state"
SHOWN_NAMES = 20


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's, DistributedDataParallel's and DataParallel's wrappers."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif _is_compiled(module):
            module = module.get_submodule(COMPILED_CHILD)
        else:
            return module


def module_state(module: nn.Module, left_out: Collection[str] = ()) -> tuple[dict[str, Tensor], JSON]:
    """Return a module's tensors by name, each memory once, and the JSON that says what else belongs to them.

    The tensors are the live ones, not copies; those whose names are `left_out` are not among them. The JSON holds
    `aliases` (tied names and the name they are stored under), `versions` (of modules whose state has changed its form
    over time) and `extra` (what `get_extra_state` returned).
    """
    # Called on the class, here and below: a model's own `state_dict` may rename its parts or leave some out.
    raw = nn.Module.state_dict(unwrap(module))
    state = {name: value for name, value in _by_clean_name(raw).items() if name not in left_out}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    aliases = tied_names(tensors)
    tensors = {name: tensor.detach() for name, tensor in tensors.items() if name not in aliases}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    extra, extra_tensors = pack(others, taken=tensors)
    return tensors | extra_tensors, {"aliases": dict(aliases), "versions": _versions(raw), "extra": extra}


def load_module_state(
    module: nn.Module, tensors: dict[str, Tensor], meta: JSON, left_out: Collection[str] = ()
) -> None:
    """Copy stored values into a module's own parameters and buffers; names, shapes and dtypes must all agree.

    What was `left_out` when it was saved stays as it is in the module.
    """
    bare = unwrap(module)
    raw = nn.Module.state_dict(bare)
    current, stored = _by_clean_name(raw), stored_state(tensors, meta)
    current = {name: value for name, value in current.items() if name in stored or name not in left_out}
    if differences := _differences(current, stored):
        raise _misfit_error(bare, "\n" + "\n".join(differences))
    names = [name for name in raw if clean_name(name) in current]
    loadable: OrderedDict[str, Any] = OrderedDict((name, stored[clean_name(name)]) for name in names)
    loadable._metadata = _metadata(raw, meta)  # type: ignore[attr-defined]
    try:
        # Called on the class: a model's own `load_state_dict` may be lenient, or match by position.
        nn.Module.load_state_dict(bare, loadable, strict=not left_out)
    except RuntimeError as error:
        raise _misfit_error(bare, f" {error}") from error


def check_meta(meta: Any, stored: Mapping[str, StoredTensor]) -> None:
    """Raise unless the JSON of a module is as `module_state` writes it and fits the tensors that are stored."""
    if not isinstance(meta, dict) or meta.keys() != {"aliases", "versions", "extra"}:
        raise CheckpointError("what is stored of the model must be its aliases, versions and extra")
    aliases, versions = meta["aliases"], meta["versions"]
    if not isinstance(aliases, dict) or not all(isinstance(name, str) and name in stored for name in aliases.values()):
        raise CheckpointError("the model's tied names must be names of tensors that are stored")
    if not isinstance(versions, dict) or not all(type(version) is int for version in versions.values()):
        raise CheckpointError("the versions of the model's modules must be numbers")
    refuse_missing_tensors(meta["extra"], stored, "model")
    if not isinstance(meta["extra"], dict) or not {"$dict"} >= {name for name in meta["extra"] if name[:1] == "$"}:
        raise CheckpointError("what the model's modules keep besides tensors must be listed by their names")


def refuse_missing_tensors(packed: JSON, stored: Mapping[str, StoredTensor], section: str) -> None:
    """Read every node of a packed tree; raise if a tensor that it names is not stored, or not of the size it says."""
    for name, form in needed_tensors(packed).items():
        if name not in stored:
            raise CheckpointError(f"the stored state of {section} needs the tensor {name!r}, which is not there")
        if form is not None and not stored[name].is_bytes(form.nbytes):
            raise CheckpointError(
                f"the stored state of {section} has an array {name!r} of {form.nbytes} bytes; {stored[name]} is there"
            )


def module_names(module: nn.Module) -> dict[str, str]:
    """Return, for each clean name of a module's state, the name that the bare module itself uses."""
    return {clean_name(name): name for name in nn.Module.state_dict(unwrap(module))}


def stored_state(tensors: dict[str, Tensor], meta: Any) -> dict[str, Any]:
    """Undo `module_state`: every name with its value, tied names with the very same tensor."""
    inner: dict[str, Any] = unpack(meta["extra"], tensors)
    inner_names = tensor_names(meta["extra"])
    stored: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if name not in inner_names}
    stored |= {alias: tensors[name] for alias, name in meta["aliases"].items()}
    return stored | inner


def tied_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return {alias: name} for tensors that are one memory under several names; the first name stands for all."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.is_meta:  # no memory to share
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
    return aliases


def _is_compiled(module: nn.Module) -> bool:
    return list(module._modules) == [COMPILED_CHILD] and not module._parameters and not module._buffers


def clean_name(name: str) -> str:
    """Return a name without what torch.compile puts into it."""
    return ".".join(part for part in name.split(".") if part != COMPILED_CHILD)


def _by_clean_name(raw: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in raw.items():
        if clean_name(name) in state:
            raise CheckpointError(
                f"two entries of the model are both called {clean_name(name)} once wrappers are removed"
            )
        state[clean_name(name)] = value
    return state


def _versions(raw: dict[str, Any]) -> dict[str, JSON]:
    metadata: dict[str, dict[str, int]] = getattr(raw, "_metadata", {})
    return {clean_name(name): entry["version"] for name, entry in metadata.items() if entry.get("version", 1) != 1}


def _metadata(raw: dict[str, Any], meta: Any) -> dict[str, dict[str, int]]:
    return {name: {"version": meta["versions"].get(clean_name(name), 1)} for name in getattr(raw, "_metadata", {})}


def _differences(current: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    missing = [name for name in current if name not in stored]
    unexpected = [name for name in stored if name not in current]
    shared = [name for name in current if name in stored]
    misfits = [misfit for name in shared if (misfit := _misfit(name, current[name], stored[name]))]
    torn = list(_torn_ties(current, stored))
    lines = [_line("missing in the checkpoint", missing), _line("not in the model", unexpected)]
    return [line for line in [*lines, _line("of another form", misfits), _line("no longer tied", torn)] if line]


def _misfit(name: str, ours: Any, theirs: Any) -> str:
    # Extra state has no fixed form, and a lazy parameter takes the form of what is loaded.
    if name.rpartition(".")[2] == EXTRA_STATE or is_lazy(ours):
        return ""
    if ours.is_meta:
        return f"{name} (model on the meta device, where values cannot be loaded)"
    if not isinstance(theirs, Tensor):
        return f"{name} (model a tensor, checkpoint {type(theirs).__name__})"
    if ours.shape == theirs.shape and ours.dtype == theirs.dtype:
        return ""
    return f"{name} (model {list(ours.shape)} {ours.dtype}, checkpoint {list(theirs.shape)} {theirs.dtype})"


def _torn_ties(current: dict[str, Any], stored: dict[str, Any]) -> Iterator[str]:
    ours = {name: value for name, value in current.items() if isinstance(value, Tensor)}
    lazy = {name for name, value in ours.items() if is_lazy(value)}
    for alias, name in tied_names({key: value for key, value in ours.items() if key not in lazy}).items():
        mine, other = stored.get(alias), stored.get(name)
        if isinstance(mine, Tensor) and isinstance(other, Tensor) and not _same_bits(mine, other):
            yield f"{alias} and {name} (one memory in the model, two values in the checkpoint)"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one is other or bytes(raw_bytes(one)) == bytes(raw_bytes(other))


def _misfit_error(module: nn.Module, details: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not fit the model {type(module).__name__}:{details}\n"
        "Build the model as it was when it was saved, or begin another run, in another output_dir."
    )


def _line(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    # they may come from a file, and need not be names
    shown = [name if isinstance(name, str) and name.isprintable() else ascii(name) for name in names[:SHOWN_NAMES]]
    return f"  {title}: {', '.join(shown)}{more}"

"""Modules and tensors that are sharded over processes (FSDP2), in other forms: as plain shards, or whole.

This module owns how a sharded module is looked at: seen through `as_shards`, it is a plain one whose parameters are its
shards, so that names, ties and strictness are those of every module. It reads and writes no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hezar_train.checkpoint.modules import module_names, unwrap
from hezar_train.checkpoint.shards import Place, local_part, place_of, whole

__all__ = ["as_shards", "as_whole", "places_of", "replicated_like", "seen_as", "sharded_like", "share_of"]


@contextlib.contextmanager
def as_shards(module: nn.Module) -> Iterator[dict[str, Place]]:
    """Let a module's state dict hold its shards instead of sharded tensors, both ways; yield their places by name."""
    bare = unwrap(module)
    names, sharded = module_names(bare), _sharded_state(bare)

    def join(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: sharded_like(one, state[name]) for name, one in sharded.items()})

    joining = bare.register_load_state_dict_pre_hook(join)  # type: ignore[no-untyped-call]
    try:
        with seen_as(bare, local_part):
            yield places_of({clean: sharded[name] for clean, name in names.items() if name in sharded})
    finally:
        joining.remove()


def as_whole(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let a module's state dict hold whole tensors, gathered by all processes together, instead of sharded ones."""
    return seen_as(module, whole)


@contextlib.contextmanager
def seen_as(module: nn.Module, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a module's state dict hold another form of its sharded tensors, tied ones as one."""
    bare = unwrap(module)
    sharded = _sharded_state(bare)

    def replace(_module: nn.Module, state: dict[str, Any], *_: Any) -> None:
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
    return DTensor.from_local(moved, sharded.device_mesh, placements, run_check=False, **form)

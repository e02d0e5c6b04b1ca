"""The state of an optimizer, held against the optimizer and its parameters before it is loaded.

Torch's `load_state_dict` looks at numbers of groups and parameters alone. Its fused kernels take as many values from an
average as its parameter has, and look at no size: one that is shorter, as a file may have it, would be read and written
past its end. Settings of another type, or averages that are not there, would fail in the middle of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from hezar_train.errors import CheckpointError, state_for

__all__ = ["fitted_state", "load_state"]

ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta"}
    | {"exp_inf", "ax", "prev", "step_size"}
)
"""What torch's optimizers keep for each value of a parameter."""

IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""Settings that say how to compute, not what: those of the optimizer at hand hold, not the checkpoint's."""

LARGEST_WHOLE = 1 << 63
UNTRIED = (LBFGS, SparseAdam)  # they step with a closure, with sparse gradients


def load_state(owner: Any, state: Any, what: str) -> None:
    """Give an object the state that a file has for it, an optimizer only one that it can step with; `what` is it."""
    with state_for(what):
        owner.load_state_dict(fitted_state(state, owner) if isinstance(owner, Optimizer) else state)


def fitted_state(state: Any, optimizer: Optimizer) -> Any:
    """Return a state that this optimizer can load and step with; raise if it is none.

    A state without parameter groups, as several optimizers together have it, is returned as it is.
    """
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return state
    saved, own = state["param_groups"], optimizer.param_groups
    if not isinstance(saved, list) or len(saved) != len(own):
        count = len(saved) if isinstance(saved, list) else "no list of"
        raise CheckpointError(f"{count} parameter groups in the checkpoint, {len(own)} here")
    groups = list(map(_fitted_group, saved, own))
    fitted = {**state, "param_groups": groups}
    for group in groups:
        needed = _needed_names(group, optimizer)
        for number, kept in _kept_of(group, state):
            if kept and (missing := needed - kept.keys()):
                raise CheckpointError(f"the state of parameter {number} lacks {', '.join(sorted(missing))}")
    for kept, parameter in _kept_of_parameters(fitted, optimizer):
        _refuse_other_shapes(kept, parameter)
    return fitted


def _fitted_group(saved: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a saved group; raise if they are of other types than this optimizer's."""
    if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), list):
        raise CheckpointError("a parameter group of the optimizer is not settings with a list of parameters")
    here = {name: own[name] for name in IMPLEMENTATION if name in own}
    group = {**{name: value for name, value in own.items() if name != "params"}, **saved, **here}
    for name, value in own.items():
        if name != "params" and not _is_like(group[name], value):
            raise CheckpointError(f"{name}={ascii(group[name])[:80]} in a parameter group, {ascii(value)[:80]} here")
    return group


def _is_like(value: Any, own: Any) -> bool:
    """Tell whether a value can stand where another one does: a number for a number, a pair for a pair."""
    if own is None:
        return value is None or isinstance(value, bool | str) or _is_number(value)
    if isinstance(own, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, Tensor):
        return isinstance(value, Tensor) and value.shape == own.shape and value.is_floating_point()
    if isinstance(own, bool) or not isinstance(own, int | float):
        return isinstance(value, type(own))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number that kernels take: they have no whole numbers beyond 64 bits."""
    return type(value) is float or (type(value) is int and abs(value) < LARGEST_WHOLE)


def _needed_names(group: Mapping[str, Any], optimizer: Optimizer) -> Set[str]:
    """Return what one of torch's optimizers keeps of a parameter, by stepping one value with the settings of a group.

    Its constructor refuses numbers that it cannot work with; a rate below zero is one to which a schedule may come.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or isinstance(optimizer, UNTRIED):
        return frozenset()
    known = inspect.signature(kind).parameters.keys() - {"params", *IMPLEMENTATION}
    parameter = torch.zeros(1, 1, requires_grad=True)
    settings = {name: group[name] for name in known if name in group}
    tried = kind([parameter], **{**settings, "lr": abs(settings["lr"])} if "lr" in settings else settings)
    parameter.grad = torch.zeros_like(parameter)
    tried.step()
    # Plain gradient descent makes up for a momentum that is not there.
    return set(tried.state[parameter]) - ({"momentum_buffer"} if isinstance(optimizer, SGD) else set())


def _kept_of(group: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[Any, Any]]]:
    """Yield what a state keeps of the parameters of a group, with their numbers."""
    states = state.get("state", {})
    if not isinstance(states, Mapping) or not all(type(number) is int for number in group["params"]):
        raise CheckpointError("the optimizer's state is not listed by the numbers of its parameters")
    for number in group["params"]:
        if not isinstance(kept := states.get(number, {}), Mapping):
            raise CheckpointError(f"the state of parameter {number} is {type(kept).__name__}")
        yield number, kept


def _kept_of_parameters(state: Mapping[str, Any], optimizer: Optimizer) -> Iterator[tuple[Mapping[Any, Any], Tensor]]:
    kept = [one for group in state["param_groups"] for _, one in _kept_of(group, state)]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    yield from zip(kept, parameters, strict=False)  # other numbers of them are refused when loaded


def _refuse_other_shapes(kept: Mapping[Any, Any], parameter: Tensor) -> None:
    """Raise if averages have not the shape of their parameter, or a step is no number."""
    for name, value in kept.items():
        if not _fits(name, value, parameter):
            given = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{str(name)[:80]} of a parameter of shape {list(parameter.shape)} is {given}. If other parameters "
                "were trained when it was saved, freeze and unfreeze the same ones (requires_grad) as then"
            )


def _fits(name: Any, value: Any, parameter: Tensor) -> bool:
    if name == "step":
        return _is_count(value)
    if name not in ELEMENTWISE or (value is None and name == "momentum_buffer"):
        return True
    shapes = {parameter.shape, parameter.to_local().shape} if hasattr(parameter, "to_local") else {parameter.shape}
    return isinstance(value, Tensor) and value.shape in shapes and value.is_complex() == parameter.is_complex()


def _is_count(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return _is_number(value) and value >= 0
    if value.numel() != 1 or value.is_complex():
        return False
    return hasattr(value, "to_local") or value.item() >= 0  # of a sharded one, only all processes together could tell

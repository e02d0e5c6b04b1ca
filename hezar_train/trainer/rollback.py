"""Keep what training changes, and put it back bit by bit, however the body ends.

Owns the list of what training changes: parameters, buffers (also those that no checkpoint holds), extra state,
gradients and modes of the model; the optimizer's state and groups, the schedule, the scaler, the counters, the place
of data that keeps one itself, the global generators and the device's. The very same tensors come back, with the
values they had. It takes memory for a second copy of model and optimizer, and does not know of a module's plain
attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hezar_train.checkpoint import local_part
from hezar_train.data import preserved_randomness
from hezar_train.errors import DataError
from hezar_train.optim import Schedule
from hezar_train.runtime.gradient_exchange import gradient_to_keep
from hezar_train.state import TrainerState

__all__ = ["keepers_of", "untouched", "untouched_model"]

Restore = Callable[[], Any]
Memo = dict[int, Restore]


@contextmanager
def untouched(
    model: nn.Module,
    optimizer: Optimizer,
    schedule: Schedule,
    scaler: torch.amp.GradScaler | None,
    state: TrainerState,
    data: Any,
    device: torch.device,
) -> Iterator[None]:
    """Put everything back when the body ends, fails or is interrupted; it starts without gradients."""
    _refuse_what_cannot_come_back(model, data)
    memo: Memo = {}
    with ExitStack() as stack:  # what is kept last comes back first, and each comes back even if another fails
        stack.enter_context(preserved_randomness())
        stack.enter_context(_preserved_generator(device))
        stack.enter_context(untouched_model(model, memo))
        for container in (optimizer.param_groups, optimizer.state):
            stack.callback(_kept(container, memo))
        stack.callback(schedule.load_state_dict, copy.deepcopy(schedule.state_dict()))
        if scaler is not None:
            stack.callback(_kept_scaler(scaler))
        stack.callback(state.update, state.to_dict())
        for owner in keepers_of(data):
            stack.callback(owner.load_state_dict, copy.deepcopy(owner.state_dict()))
        stack.callback(_kept_gradients(model.parameters()))
        yield


@contextmanager
def untouched_model(model: nn.Module, memo: Memo | None = None) -> Iterator[None]:
    """Put back a model's tensors, modes and extra state when the body ends."""
    memo = {} if memo is None else memo
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(_kept_module(module, memo))
        yield


def _kept(value: Any, memo: Memo) -> Restore:
    """Return a function that gives back the same object with the same content."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        restore = _kept_tensor(value)
    elif isinstance(value, dict):
        restore = _kept_dict(value, memo)
    elif isinstance(value, list):
        restore = _kept_list(value, memo)
    else:
        saved = copy.deepcopy(value)
        return lambda: saved  # not noted: small values share their ids
    memo[id(value)] = restore
    return restore


def _kept_tensor(tensor: torch.Tensor) -> Restore:
    own = local_part(tensor)
    saved = own.detach().clone()
    # an expanded tensor has one value in many places, which may be written only once
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in own.stride())

    def restore() -> torch.Tensor:
        with torch.no_grad():
            own[once].copy_(saved[once])
        return tensor

    return restore


def _kept_dict(mapping: dict[Any, Any], memo: Memo) -> Restore:
    parts = {key: _kept(value, memo) for key, value in mapping.items()}

    def restore() -> dict[Any, Any]:
        mapping.clear()
        mapping.update({key: part() for key, part in parts.items()})
        return mapping

    return restore


def _kept_list(values: list[Any], memo: Memo) -> Restore:
    parts = [_kept(value, memo) for value in values]

    def restore() -> list[Any]:
        values[:] = [part() for part in parts]
        return values

    return restore


def _kept_module(module: nn.Module, memo: Memo) -> Restore:
    """Keep a module's own tensors, mode and extra state; its children are kept by themselves."""
    parameters, buffers, training = _kept(module._parameters, memo), _kept(module._buffers, memo), module.training
    has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
    extra = copy.deepcopy(module.get_extra_state()) if has_extra else None

    def restore() -> None:
        parameters()
        buffers()
        module.training = training
        if has_extra:
            module.set_extra_state(extra)

    return restore


def _kept_gradients(parameters: Iterable[nn.Parameter]) -> Restore:
    """Set gradients aside."""
    before = {parameter: gradient_to_keep(parameter) for parameter in parameters}
    for parameter in before:
        parameter.grad = None

    def restore() -> None:
        for parameter, gradient in before.items():
            parameter.grad = gradient

    return restore


def _kept_scaler(scaler: torch.amp.GradScaler) -> Restore:
    saved = scaler.state_dict()

    def restore() -> None:
        scaler._per_optimizer_states.clear()  # an update that failed half way was unscaled and never stepped
        scaler.load_state_dict(saved)

    return restore


def _preserved_generator(device: torch.device) -> AbstractContextManager[None]:
    """Put back the generator of an accelerator; those of the CPU are kept apart."""
    if device.type == "cpu" or not hasattr(torch.get_device_module(device), "default_generators"):
        return nullcontext()
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def keepers_of(data: Any) -> list[Any]:
    """Return what keeps its own place in the data: a stream, a loader, a loader's sampler or dataset."""
    owners = [data, *(getattr(data, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    return [one for one in owners if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def _refuse_what_cannot_come_back(model: nn.Module, data: Any) -> None:
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise DataError(
            f"the parameters {', '.join(lazy)} have no shape before the first forward, to which they could not go "
            "back. Run the model once on a batch first."
        )
    if any(hasattr(one, "__next__") for one in (data, getattr(data, "dataset", None))):
        raise DataError(
            f"the training data is a {type(data).__name__} that can be read only once, so what is read now would be "
            "missing later. Pass a dataset, or an iterable that starts anew each time."
        )

"""The state of an optimizer, held against its parameters before it is loaded.

Torch's fused kernels take as many values from an average as its parameter has, and look at no size: one that is
shorter, as a file may have it, would be read and written past its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hezar_train.errors import CheckpointError

__all__ = ["refuse_other_shapes"]

ELEMENTWISE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "acc_delta"}
    | {"exp_inf", "ax", "prev", "step_size"}
)
"""What torch's optimizers keep for each value of a parameter."""


def refuse_other_shapes(state: Any, optimizer: Optimizer) -> None:
    """Raise if a state holds, for a parameter, averages that have not its shape, or a step that is no number."""
    for kept, parameter in _kept_of_parameters(state, optimizer):
        for name, value in kept.items():
            if not _fits(name, value, parameter):
                given = list(value.shape) if isinstance(value, Tensor) else f"of type {type(value).__name__}"
                raise CheckpointError(f"{str(name)[:80]} of a parameter of shape {list(parameter.shape)} is {given}")


def _kept_of_parameters(state: Any, optimizer: Optimizer) -> Iterator[tuple[Mapping[Any, Any], Tensor]]:
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    numbers = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=False):  # other numbers of them are refused when loaded
        kept = state.get("state", {}).get(number, {})
        if not isinstance(kept, Mapping):
            raise CheckpointError(f"the state of parameter {number} is {type(kept).__name__}")
        yield kept, parameter


def _fits(name: Any, value: Any, parameter: Tensor) -> bool:
    if name == "step":
        return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float)
    if name not in ELEMENTWISE or (value is None and name == "momentum_buffer"):
        return True
    shapes = {parameter.shape, parameter.to_local().shape} if hasattr(parameter, "to_local") else {parameter.shape}
    return isinstance(value, Tensor) and value.shape in shapes

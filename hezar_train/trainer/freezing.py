"""Parameters that do not learn for a while: the first so many tensors of a model, in the order of its parameters.

What is frozen is left bit by bit as it is by every optimizer, because it gets no gradient at all.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.optim import Optimizer

from hezar_train.errors import ConfigError

__all__ = ["freeze_first", "freeze_named", "frozen_names", "unfreeze_first"]


def freeze_first(model: nn.Module, count: int) -> None:
    """Freeze the first `count` parameter tensors; the others stay as they are."""
    for parameter in _first(model, count).values():
        parameter.requires_grad_(False)
        parameter.grad = None  # one that is left would be applied by the next update


def unfreeze_first(model: nn.Module, count: int, optimizer: Optimizer) -> None:
    """Let the first `count` parameter tensors learn again; the others stay as they are."""
    first = _first(model, count)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if strangers := [name for name, parameter in first.items() if id(parameter) not in held]:
        raise ConfigError(
            f"the optimizer does not hold {', '.join(strangers)}, which did not require a gradient when the trainer "
            "was built. Build it with every parameter that will ever learn, then call freeze_to()."
        )
    for parameter in first.values():
        parameter.requires_grad_(True)


def frozen_names(model: nn.Module) -> list[str]:
    """List what does not learn."""
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def freeze_named(model: nn.Module, frozen: Collection[str]) -> None:
    """Freeze what is named and let all others learn."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _first(model: nn.Module, count: int) -> dict[str, nn.Parameter]:
    named = list(model.named_parameters())
    if not 0 <= count <= len(named):
        raise ConfigError(f"{count} parameter tensors were asked for; expected 0 to {len(named)}, which the model has")
    return dict(named[:count])

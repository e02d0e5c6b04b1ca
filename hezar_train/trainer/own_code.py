"""The user's own code in a step: its backward is weighed, its optimizer step is the update, its optimizers are kept.

A hook that replaces `backward`, or an overridden `training_step`, `optimization_step`, `run_step` or `train_epoch`, may
call `accelerator.backward(loss)` and `optimizer.step()` itself. Then that step is the update: gradients are joined
before it, and no second step follows. One in the middle of a window, or with a scaler (fp16), is refused before it
changes a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from hezar_train.errors import DataError, HookError, choices
from hezar_train.loop import Context, share_of
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["OwnSteps", "kept_attributes", "weighed_backward"]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})


class OwnSteps:
    """See the steps of optimizers that the trainer did not take."""

    def __init__(self, ctx: Context | None = None, num_processes: int = 1) -> None:
        self._ctx, self._num_processes = None if ctx is None else weakref.ref(ctx), num_processes
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.hooks: weakref.WeakSet[Callable[..., None]] = weakref.WeakSet()
        """What watched optimizers call at their steps; it does nothing in the trainer's own."""
        self.is_ours = False
        """Whether the step under way is the trainer's own."""

    def watch(self, optimizer: Optimizer, gather: Callable[[object, float], None], *, is_scaled: bool) -> None:
        """See the steps of an optimizer; `gather` makes its gradients those of a window, so many times."""
        if self._ctx is None or optimizer in self._watched:
            return
        self._watched.add(optimizer)
        hooks = (
            lambda *_: None if self.is_ours else self._before(gather, is_scaled),
            lambda *_: None if self.is_ours else self._after(),
        )
        optimizer.register_step_pre_hook(hooks[0])
        optimizer.register_step_post_hook(hooks[1])
        self.hooks.update(hooks)

    def _learning(self) -> Context | None:
        """Return the context if there is a batch of a learning routine that the user's own step belongs to."""
        ctx = None if self._ctx is None else self._ctx()
        return ctx if ctx is not None and ctx.get("mode") in LEARNING and ctx.step.window is not None else None

    def _before(self, gather: Callable[[object, float], None], is_scaled: bool) -> None:
        """Refuse a step that would come too early, and make the gradients those of the whole window."""
        ctx = self._learning()
        if ctx is None:
            return
        step = ctx.step
        if not step.closes_window:
            raise HookError(
                f"your own code stepped the optimizer on micro-batch {step.batch_in_window + 1} of "
                f"{len(step.window.batches)} of an update. Step on the last one alone, which optimization_step() is "
                "called on (ctx.closes_window); or set gradient_accumulation_steps=1."
            )
        if is_scaled:
            raise HookError(
                "your own code stepped the optimizer, with gradients that mixed_precision='fp16' has scaled. Let "
                "super().optimization_step() do it, or use mixed_precision='bf16'."
            )
        gather(step.window, self._factor(ctx))

    def _after(self) -> None:
        """Note that the update is done."""
        ctx = self._learning()
        if ctx is not None:
            ctx.step.applied = ctx.step.is_own = True

    def _factor(self, ctx: Context) -> float:
        """Return what the gradients of an own backward are to be multiplied by: a plain one knows no weights.

        The default backward has weighed the loss that it has noted, `accelerator.backward` any.
        """
        step = ctx.step
        if step.is_weighed or step.is_loss_noted or self._num_processes == 1:
            return 1.0
        return share_of(step.window, step.batch_in_window) * self._num_processes


@contextmanager
def weighed_backward(
    accelerator: Accelerator, ctx: Context, num_processes: int, exchanging: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let `accelerator.backward` weigh a loss as the default backward does, while the body runs.

    `exchanging` is held while a backward of an update's last micro-batch runs, as it is in the default one.
    """
    outer = vars(accelerator).get("backward")  # of a routine around this one
    plain = getattr(outer, "plain", accelerator.backward)

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        step = ctx.step
        if step.window is None:
            plain(loss, **kwargs)
            return
        step.is_weighed = True
        # Accelerate divides by the number of steps that it was told; the window knows better.
        factor = share_of(step.window, step.batch_in_window) * num_processes * accelerator.gradient_accumulation_steps
        with exchanging() if step.closes_window else nullcontext():
            plain(loss if factor == 1.0 else loss * factor, **kwargs)

    backward.plain = plain  # type: ignore[attr-defined]
    vars(accelerator)["backward"] = backward
    try:
        yield
    finally:
        del vars(accelerator)["backward"]
        if outer is not None:
            vars(accelerator)["backward"] = outer


def kept_attributes(trainer: Any, known: Optimizer) -> dict[str, Any]:
    """Return the optimizers that a user keeps as attributes, by name, and the modules that only they train.

    Without their state a run that is killed and resumed would not be the same.
    """
    attributes = {name: value for name, value in vars(trainer).items() if name not in {"model", "optimizer", "models"}}
    found = {
        name: one for name, one in _flat(attributes, Optimizer).items() if one is not known and not _is_in(one, known)
    }
    trained = {id(one) for optimizer in found.values() for group in optimizer.param_groups for one in group["params"]}
    of_model = {id(one) for one in trainer.model.parameters()}
    modules = {
        name: module
        for name, module in _flat(attributes, nn.Module).items()
        if any(id(one) in trained - of_model for one in module.parameters())
    }
    held = of_model | {id(one) for module in modules.values() for one in module.parameters()}
    if not trained <= held:
        strangers = [name for name, one in found.items() if any(id(p) not in held for p in _parameters(one))]
        raise DataError(
            f"{choices(strangers)} of the trainer steps parameters that no checkpoint would hold: they are neither the "
            "model's nor those of a module that the trainer has as an attribute. Keep that module: self.net = net."
        )
    return {**found, **modules}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _is_in(optimizer: Optimizer, known: Any) -> bool:
    """Tell whether an optimizer is the trainer's, or one of several that it drives."""
    return any(optimizer is one for one in (known, *getattr(known, "optimizers", {}).values()))


def _flat(attributes: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Return attributes of a kind, also those in lists, tuples and dicts, by name."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, kind):
            found[name] = value
        elif isinstance(value, list | tuple):
            found |= {f"{name}.{number}": one for number, one in enumerate(value) if isinstance(one, kind)}
        elif isinstance(value, dict):
            found |= {f"{name}.{key}": one for key, one in value.items() if isinstance(one, kind)}
    return found

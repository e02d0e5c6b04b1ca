"""Fields of `finetune()`: its length, its optimizer, what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hezar_train.config.checks import flag, keywords, known_name, number, one_of, whole
from hezar_train.config.fields.optimizer import KNOWN_OPTIMIZERS
from hezar_train.config.fields.rounds import BATCH_OR_EPOCH, names_problems
from hezar_train.config.fields.schedule import SHOWN_SCHEDULERS
from hezar_train.config.names import OPTIMIZERS, SCHEDULERS, SHORT_SCHEDULERS, optimizer_name, scheduler_name
from hezar_train.errors import choices
from hezar_train.types import LRSchedulerType, OptimizerType

__all__ = ["FinetuneFields"]


@dataclass(kw_only=True)
class FinetuneFields:
    finetune_before_eval: bool = False
    """Evaluate a finetuned copy of the model; the model itself goes on as it was."""

    finetune_steps: int = 1
    """Batches or epochs that `finetune()` does."""

    finetune_batch_or_epoch: str = "batch"
    """What `finetune_steps` counts: "batch" or "epoch"."""

    finetune_optimizer: str | OptimizerType | None = None
    """Optimizer of `finetune()`, made anew for each call. None: that of the training."""

    finetune_optimizer_kwargs: dict[str, Any] | None = None
    """Further keyword arguments of that optimizer."""

    finetune_learning_rate: float | None = None
    """Learning rate of `finetune()`. None: that of the training."""

    finetune_weight_decay: float | None = None
    """Weight decay of `finetune()`. None: that of the training."""

    finetune_lr_scheduler: str | LRSchedulerType | None = None
    """Schedule of `finetune()`, ticking after each update. None: the rate stays."""

    finetune_lr_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of that schedule."""

    finetune_freeze_param: list[str] | None = None
    """Parts of names: parameters that have one stay as they are in `finetune()`."""

    finetune_param: list[str] | None = None
    """Parts of names: only parameters that have one are trained in `finetune()`. None: all."""

    finetune_reinit: bool = False
    """Give the modules of `finetune_param` new weights before `finetune()` trains them."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("finetune_before_eval", self.finetune_before_eval)
        yield from whole("finetune_steps", self.finetune_steps, least=1)
        yield from one_of("finetune_batch_or_epoch", self.finetune_batch_or_epoch, BATCH_OR_EPOCH, optional=False)
        yield from known_name(
            "finetune_optimizer", self.finetune_optimizer, KNOWN_OPTIMIZERS, choices(OPTIMIZERS), optimizer_name
        )
        yield from keywords("finetune_optimizer_kwargs", self.finetune_optimizer_kwargs)
        yield from number("finetune_learning_rate", self.finetune_learning_rate, optional=True)
        yield from number("finetune_weight_decay", self.finetune_weight_decay, optional=True)
        yield from known_name(
            "finetune_lr_scheduler", self.finetune_lr_scheduler, (*SHORT_SCHEDULERS, *SCHEDULERS), SHOWN_SCHEDULERS,
            scheduler_name,
        )  # fmt: skip
        yield from keywords("finetune_lr_scheduler_kwargs", self.finetune_lr_scheduler_kwargs)
        yield from names_problems("finetune_freeze_param", self.finetune_freeze_param)
        yield from names_problems("finetune_param", self.finetune_param)
        yield from flag("finetune_reinit", self.finetune_reinit)
        if self.finetune_reinit is True and not self.finetune_param:
            yield "finetune_reinit=True needs finetune_param: name the modules that get new weights"

"""Fields of the update: the loss, its weight, the optimizer, clipping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hezar_train.config.checks import keywords, known_name, number, one_of
from hezar_train.config.names import LOSSES, OPTIMIZERS, optimizer_name
from hezar_train.errors import choices
from hezar_train.types import OptimizerType

__all__ = ["OptimizerFields"]

KNOWN_OPTIMIZERS = tuple(name.lower() for name in OPTIMIZERS)
FIELD_OF_KEYWORD = {"lr": "learning_rate", "weight_decay": "weight_decay"}


@dataclass(kw_only=True)
class OptimizerFields:
    optimizer: str | OptimizerType | None = None
    """A class of torch.optim in any case, or a dotted path. None: adam."""

    optimizer_kwargs: dict[str, Any] | None = None
    """Further keyword arguments of the optimizer, such as `betas`."""

    learning_rate: float = 2e-5
    """First learning rate; a schedule changes it."""

    momentum: float | None = None
    """The optimizer's momentum, or the first of its betas; a schedule changes it. None: the optimizer's default."""

    weight_decay: float = 0.0
    """Weight decay that is passed to the optimizer."""

    weight_decay_norm: float | None = None
    """Weight decay of normalising layers, in a group of their own. None: as of all others."""

    weight_decay_bias: float | None = None
    """Weight decay of biases, in a group of their own. None: as of the layer they belong to."""

    max_grad_norm: float | None = None
    """Longest gradient, as a 2-norm over all parameters; longer ones are scaled down. None: no clipping."""

    criterion: str | None = None
    """A loss class of torch.nn, or a dotted path, for models that do not return a loss."""

    loss_weight: str | None = None
    """What a loss is the mean of: "samples" or "labels" (those that are not -100). None: what the task says."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from known_name("optimizer", self.optimizer, KNOWN_OPTIMIZERS, choices(OPTIMIZERS), optimizer_name)
        yield from keywords("optimizer_kwargs", self.optimizer_kwargs)
        yield from self._problems_of_doubled_keywords()
        yield from number("learning_rate", self.learning_rate)
        yield from self._problems_of_momentum()
        yield from number("weight_decay", self.weight_decay)
        yield from number("weight_decay_norm", self.weight_decay_norm, optional=True)
        yield from number("weight_decay_bias", self.weight_decay_bias, optional=True)
        yield from number("max_grad_norm", self.max_grad_norm, above=0, optional=True)
        yield from known_name("criterion", self.criterion, LOSSES, choices(LOSSES))
        yield from one_of("loss_weight", self.loss_weight, ("samples", "labels"))

    def _problems_of_momentum(self) -> Iterator[str]:
        wrong = list(number("momentum", self.momentum, optional=True))
        yield from wrong
        if self.momentum is None or wrong:
            return
        if self.momentum >= 1:
            yield f"momentum={self.momentum!r} must be below 1"
        given = self.optimizer_kwargs if isinstance(self.optimizer_kwargs, Mapping) else {}
        for keyword in ("momentum", "betas"):
            if keyword in given:
                yield f"optimizer_kwargs[{keyword!r}] contradicts momentum={self.momentum!r}: give one of the two"

    def _problems_of_doubled_keywords(self) -> Iterator[str]:
        given = self.optimizer_kwargs if isinstance(self.optimizer_kwargs, Mapping) else {}
        for keyword, field in FIELD_OF_KEYWORD.items():
            if keyword in given:
                yield f"optimizer_kwargs[{keyword!r}]={given[keyword]!r}: give it as the field {field} instead"

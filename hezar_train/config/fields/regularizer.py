"""Fields of what is added to the loss before the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import number, text

__all__ = ["RegularizerFields"]


@dataclass(kw_only=True)
class RegularizerFields:
    regularizer: str | None = None
    """A registered regulariser or a dotted path: a function of the context; its value is trained on, not logged."""

    regularizer_mu: float = 0.0
    """Factor of the regulariser."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        if self.regularizer is not None:
            yield from text("regularizer", self.regularizer)
        yield from number("regularizer_mu", self.regularizer_mu)

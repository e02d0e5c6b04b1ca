"""The batches of a set to look at, for an overridden `val_epoch` or `test_epoch` that goes over them itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from hezar_train.data import Source
from hezar_train.plan import UNLIMITED, one_pass

__all__ = ["LookingBatches"]


class LookingBatches:
    """All batches of a source, in order, each as `prepare` makes it; every walk over them is a new one."""

    def __init__(self, source: Source, prepare: Callable[[Any], Any]) -> None:
        self._source, self._prepare = source, prepare

    def __len__(self) -> int:
        if self._source.num_samples is None:
            raise TypeError("the length of the data is unknown")
        return math.ceil(self._source.num_samples / self._source.batch_size)

    def __iter__(self) -> Iterator[Any]:
        plan = one_pass(self._source.num_samples, self._source.batch_size)
        try:
            for window in self._source.windows(plan, 0, 0, UNLIMITED):
                yield from map(self._prepare, window.batches)
        finally:
            self._source.close()

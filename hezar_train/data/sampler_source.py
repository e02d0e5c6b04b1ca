"""Windows of a ready DataLoader whose sampler is the user's own: the sampler says what comes next, the rest is ours."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from hezar_train.data.cursor_source import CursorSource, keeps_its_place, seeded_each
from hezar_train.data.fetch import Collator, batch_fetcher
from hezar_train.data.grouping import Item, Left
from hezar_train.data.seeds import SeedStream
from hezar_train.data.window_fetcher import WindowFetcher
from hezar_train.data.windows import Order, Window
from hezar_train.errors import ConfigError
from hezar_train.plan import Plan

__all__ = ["SamplerSource"]


class SamplerSource(CursorSource):
    """A dataset read in the order of a user's own sampler, which keeps its own place.

    Where the loader has a batch size, the sampler's indices are taken one by one; a batch sampler of the user's own
    makes batches that stay whole.
    """

    drop_last = False  # a loader's own dropping is counted in num_samples

    def __init__(self, loader: DataLoader[Any], collate: Collator, order: Order) -> None:
        self._batches: Any = loader.batch_sampler
        self._samplers = [loader.sampler, self._batches, getattr(self._batches, "sampler", None)]
        keeper = next(filter(keeps_its_place, self._samplers), None)
        super().__init__(keeper, order, by_sample=loader.batch_size is not None)
        self.batch_size = loader.batch_size or 1
        self.num_samples, self.num_batches = _counted(loader)
        self.fetch = batch_fetcher(loader.dataset, collate, order.seed)  # type: ignore[arg-type]
        self._fetcher = WindowFetcher(self.fetch, order)

    @property
    def resume_problem(self) -> str | None:
        if self._keeper is not None:
            return None
        sampler = self._samplers[0] if self._by_sample else self._batches
        return (
            f"the DataLoader's sampler {type(sampler).__name__} has no state_dict() and load_state_dict(), so its "
            "place in the epoch is not in the checkpoint. Add both methods, or pass the dataset instead of the loader."
        )

    def close(self) -> None:
        self._fetcher.close()

    def _windows(self, plan: Plan, epoch: int, position: int, left: Left) -> Iterator[Window]:
        return self._fetcher.filled(self._with_indices(plan, epoch, position, left), epoch)

    def _with_indices(self, plan: Plan, epoch: int, position: int, left: Left) -> Iterator[Window]:
        if self._by_sample and plan.window_samples % self.batch_size:
            raise ConfigError(
                f"global_batch_size={plan.window_samples} is no multiple of the DataLoader's batch_size="
                f"{self.batch_size}, whose sampler keeps its place batch by batch. Change one of them, or pass the "
                "dataset instead of the loader."
            )
        for window, cells in self._cut_windows(plan, epoch, position, left):
            window.indices = [np.concatenate([np.atleast_1d(np.asarray(part)) for part in cell]) for cell in cells]
            yield window

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        """Read the sampler; one that draws from the global generators draws by (seed, epoch, place)."""
        seeds = SeedStream(self._order.seed, "sampler", epoch)
        batches = seeded_each(self._batches, seeds.at, position, len)
        return _one_by_one(batches) if self._by_sample else batches

    def _epoch_followers(self) -> list[Any]:
        return self._samplers


def _counted(loader: DataLoader[Any]) -> tuple[int | None, int | None]:
    """Return the samples of an epoch, or else its batches, as far as the loader's sampler tells."""
    if loader.batch_size is None:
        return None, len(loader.batch_sampler) if isinstance(loader.batch_sampler, Sized) else None
    if not isinstance(loader.sampler, Sized):
        return None, None
    size = len(loader.sampler)
    return size - size % loader.batch_size if loader.drop_last else size, None


def _one_by_one(batches: Iterator[Item]) -> Iterator[Item]:
    """Yield the indices of batches one at a time."""
    for indices, _ in batches:
        for index in indices:
            yield index, 1

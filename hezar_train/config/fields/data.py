"""Fields of the data: batches, their order, and who fetches them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import flag, whole

__all__ = ["DataFields"]


@dataclass(kw_only=True)
class DataFields:
    batch_size: int = 1
    """Samples in one step, on each process."""

    eval_batch_size: int | None = None
    """Samples in one evaluation batch, on each process. None: `batch_size`."""

    global_batch_size: int | None = None
    """Samples in one update over all processes, at most `batch_size` in a step on each. None: from the fields below."""

    gradient_accumulation_steps: int = 1
    """Steps whose gradients make one update; the result is that of one batch as large as all of them."""

    dataloader_shuffle: bool = True
    """Train in a shuffled order, which the seed and the epoch fix; evaluation is never shuffled."""

    reshuffle_each_epoch: bool = True
    """Shuffle each epoch differently. False: every epoch has the order of the first."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill an update."""

    num_dataloader_workers: int = 0
    """Processes that fetch samples ahead; 0: the training process does. The samples are the same."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("batch_size", self.batch_size, least=1)
        yield from whole("eval_batch_size", self.eval_batch_size, least=1, optional=True)
        yield from whole("global_batch_size", self.global_batch_size, least=1, optional=True)
        yield from whole("gradient_accumulation_steps", self.gradient_accumulation_steps, least=1)
        if self.global_batch_size is not None and self.gradient_accumulation_steps != 1:
            yield (
                f"global_batch_size={self.global_batch_size} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} were given; the second follows from the first: leave it out"
            )
        yield from flag("dataloader_shuffle", self.dataloader_shuffle)
        yield from flag("reshuffle_each_epoch", self.reshuffle_each_epoch)
        yield from flag("drop_last", self.drop_last)
        yield from whole("num_dataloader_workers", self.num_dataloader_workers, least=0)

"""The data of a trainer, opened: where batches come from, in which order, and the plan of the run over them."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader

from hezar_train.data import Order, Source, open_source
from hezar_train.plan import Plan, make_plan, one_pass
from hezar_train.trainer.checks import max_steps_of
from hezar_train.trainer.parts import Parts

__all__ = ["Opening"]


class Opening(Parts):
    """From datasets to sources and the plan."""

    def create_train_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where training batches come from; an override may return any DataLoader.

        Called when the trainer is built or gets other data or another config (the plan and the schedule follow from
        what it returns), and by `find_lr`.
        """
        return self._open(dataset)

    def create_eval_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where evaluation batches come from, in order; an override may return any DataLoader."""
        return self._open(dataset, training=False)

    def _open(self, data: Any, *, training: bool = True) -> Source:
        return open_source(data, self.data_collator, self._order(training=training))

    def _order(self, *, training: bool) -> Order:
        config, runtime = self.config, self.runtime
        return Order(
            batch_size=config.batch_size if training else config.eval_batch_size or config.batch_size,
            seed=config.seed,
            shuffle=config.dataloader_shuffle and training,
            reshuffle=config.reshuffle_each_epoch,
            num_workers=config.num_dataloader_workers,
            pin_memory=runtime.device.type == "cuda",
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            processes=runtime.processes,
            splits_streams=training and config.global_batch_size is None,
        )

    def _train_source(self) -> Source:
        if self.only_for_eval:
            return self._open([])
        return self._as_source(self.create_train_dataloader(self.train_dataset), training=True)

    def _eval_source(self, data: Any) -> Source:
        return self._as_source(self.create_eval_dataloader(data), training=False)

    def _as_source(self, loader: Any, *, training: bool) -> Source:
        return self._open(loader, training=training) if isinstance(loader, DataLoader) else loader

    def _make_plan(self, source: Source) -> Plan:
        if self.only_for_eval:
            return one_pass(source.num_samples, source.batch_size, self.runtime.num_processes)
        asked = copy.copy(self.config)
        asked.drop_last = asked.drop_last or source.drop_last
        if source.num_batches is not None:  # a batch sampler counts batches, not samples
            asked.max_steps = max_steps_of(asked, source.num_batches * asked.num_epochs)
        return make_plan(asked, source.num_samples, self.runtime.num_processes, source.batch_size)

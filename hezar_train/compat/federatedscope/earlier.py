"""What FederatedScope called otherwise in version 0.1, whose config has no section `dataloader`.

    0.1                                                     since 0.2
    ctx.cur_data_split                                      ctx.cur_split
    ctx.train_y_true, ctx.train_y_prob                      ctx.ys_true, ctx.ys_prob, for the length of a routine
    ctx.num_samples_train, ctx.loss_batch_total_train       ctx.num_samples, ctx.loss_batch_total
    cfg.data.batch_size, .shuffle, .drop_last               cfg.dataloader.batch_size, ...
    trainer.metric_calculator.eval(ctx)                     ctx.monitor.eval(ctx)

Names with a split in them are those of the routine under way while it is that split's, and what the last one left
afterwards.
"""

from __future__ import annotations

import importlib
from typing import Any

from hezar_train.compat.federatedscope.config import STANDS_FOR_DATA
from hezar_train.compat.federatedscope.context import Context
from hezar_train.federated import MetricCalculator
from hezar_train.loop import CtxVar
from hezar_train.runtime import logger

__all__ = ["EarlierContext", "is_earlier", "metric_calculator", "tell_finetuning"]

WITH_SPLIT = {
    "ys_true": "{}_y_true",
    "ys_prob": "{}_y_prob",
    "num_samples": "num_samples_{}",
    "loss_batch_total": "loss_batch_total_{}",
    "loss_regular_total": "loss_regular_total_{}",
}
RENAMED = {"cur_data_split": "cur_split", "cur_data_splits_used_by_routine": "split_stack"}


def is_earlier(cfg: Any) -> bool:
    """Tell whether a config is one of version 0.1."""
    return bool(cfg.dataloader.get(STANDS_FOR_DATA, False))


def metric_calculator(cfg: Any) -> Any:
    """Make what measures a routine: FederatedScope's own where the config is its own, else ours."""
    package, is_of_core, _ = type(cfg).__module__.partition(".core.")
    if not is_of_core:
        return MetricCalculator(list(cfg.eval.metrics))
    return importlib.import_module(f"{package}.core.monitors.metric_calculator").MetricCalculator(
        list(cfg.eval.metrics)
    )


def tell_finetuning() -> None:
    """Say in what a routine is not that of version 0.1."""
    logger.warning(
        "finetune() trains, as since FederatedScope 0.2; version 0.1 called no hooks of on_batch_backward in it, so "
        "that weights stayed as they were"
    )


class EarlierContext(Context):
    """A context that knows its names by those of version 0.1, too."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._today(name))

    def __setitem__(self, name: str, value: Any) -> None:
        name = self._today(name)
        if not isinstance(value, CtxVar):  # 0.1 knows no lives: what a hook assigns outlives the batch
            dict.get(self, "lifecycles", {}).get("batch", set()).discard(name)
        super().__setitem__(name, value)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._today(str(name)))

    def __delitem__(self, name: str) -> None:
        super().__delitem__(self._today(name))

    def clear(self, lifecycle: Any = None) -> None:
        """Drop the variables whose life ends now; of a routine, keep them under their names with the split."""
        if lifecycle == "routine":
            for name, earlier in WITH_SPLIT.items():
                if name in self:
                    dict.__setitem__(self, earlier.format(self.cur_split), self[name])
        super().clear(lifecycle)

    def _today(self, name: str) -> str:
        """Return the name by which a value is kept: of the routine under way, today's."""
        if name in RENAMED:
            return RENAMED[name]
        split = dict.get(self, "cur_split")
        if split is None:
            return name
        return next((today for today, earlier in WITH_SPLIT.items() if name == earlier.format(split)), name)

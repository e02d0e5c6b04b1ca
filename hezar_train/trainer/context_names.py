"""The names that hooks find in the context beside those of the batch: shared objects, and aliases worked out when read.

Every name that FederatedScope documents is here, whichever routine runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint import unwrap
from hezar_train.data import SPLITS, batch_length
from hezar_train.loop import Alias, Context
from hezar_train.trainer.model_runner import labels_of
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer.assembly import Assembly as Trainer

__all__ = ["context_names"]


def context_names(trainer: Trainer) -> dict[str, Any]:
    """Return everything that hooks share; values that change are aliases."""
    return {
        **_objects(trainer),
        **_data_names(trainer),
        **_of_the_batch(),
        **_of_the_routine(weakref.proxy(trainer)),
    }


def _objects(trainer: Trainer) -> dict[str, Any]:
    weak = weakref.proxy(trainer)
    return {
        "config": trainer.config,
        "model": trainer.model,
        "state": trainer.state,
        "storage": trainer.storage,
        "device": trainer.runtime.device,
        "cfg": Alias(lambda _: weak.config),
        "models": Alias(lambda _: [weak.model]),
        "mirrored_models": False,
        "grad_clip": trainer.config.max_grad_norm,
        "monitor": Alias(lambda _: getattr(weak, "monitor", None)),
        "criterion": Alias(lambda _: weak.criterion),
        "regularizer": Alias(lambda _: weak.regularizer),
        "trainable_para_names": Alias(
            lambda _: [name for name, one in unwrap(weak.model).named_parameters() if one.requires_grad]
        ),
    }


def _data_names(trainer: Trainer) -> dict[str, Any]:
    weak, given = weakref.proxy(trainer), trainer.splits.entries.get("train_loader")
    entries = {f"{split}_data": None for split in SPLITS} | {f"{split}_loader": None for split in SPLITS}
    counts: dict[str, Any] = {f"num_{split}_data": 0 for split in SPLITS}
    lengths: dict[str, Any] = {f"num_{split}_epoch": 1 for split in SPLITS}
    return {
        **lengths,
        **{f"num_{split}_batch": _batches_in(trainer, split) for split in SPLITS},
        "num_train_batch_last_epoch": _batches_in(trainer, "train"),
        "num_total_train_batch": trainer.plan.total_steps,
        **entries,
        **counts,
        **trainer.splits.entries,
        "data": trainer.splits.data,
        "train_loader": Alias(lambda _: given if given is not None else getattr(weak, "train_loader", None)),
    }


def _batches_in(trainer: Trainer, split: str) -> int | None:
    """Return the batches of a split as the config has them; a routine under way sets its own."""
    loader = trainer.splits.entries.get(f"{split}_loader")
    if loader is not None and hasattr(loader.dataset, "__len__"):
        return len(loader)
    config, count = trainer.config, trainer.splits.entries.get(f"num_{split}_data")
    size = config.batch_size if split == "train" else config.eval_batch_size or config.batch_size
    return None if count is None else -(-count // size)


def _of_the_batch() -> dict[str, Any]:
    return {
        "y_true": Alias(lambda ctx: labels_of(ctx.batch)),
        "y_prob": Alias(lambda ctx: ctx.outputs.get("logits")),
        "loss_batch": Alias(_loss_of_the_batch),
        "loss_task": Alias(lambda ctx: ctx.loss + ctx.get("loss_regular", 0.0)),
        "batch_size": Alias(lambda ctx: batch_length(ctx.batch)),
        "data_batch": Alias(lambda ctx: ctx.batch),
        "cur_mode": Alias(lambda ctx: ctx.mode),
        "cur_split": Alias(lambda ctx: ctx.split),
    }


def _regular_total(trainer: Trainer, mode: Mode | None) -> float:
    if mode not in {Mode.TRAIN, Mode.FINETUNE}:
        return 0.0
    return float((trainer._tuning.steps if mode is Mode.FINETUNE else trainer._steps).loss_regular_total)


def _loss_of_the_batch(ctx: Context) -> Any:
    return ctx.outputs["loss"] if "loss" not in ctx.__dict__ else ctx.loss


def _of_the_routine(trainer: Trainer) -> dict[str, Any]:
    def while_learning(read: Callable[[], Any], looking: Callable[[], Any]) -> Alias:
        return Alias(lambda ctx: read() if ctx.get("mode") in {Mode.TRAIN, Mode.FINETUNE} else looking())

    return {
        "optimizer": Alias(
            lambda ctx: trainer._tuning.optimizer if ctx.get("mode") is Mode.FINETUNE else trainer.optimizer
        ),
        "scheduler": Alias(
            lambda ctx: (trainer._tuning if ctx.get("mode") is Mode.FINETUNE else trainer).schedule.scheduler
        ),
        "cur_epoch_i": while_learning(lambda: trainer._course.state.epoch - 1, lambda: 0),
        "num_samples": while_learning(lambda: trainer._course.num_samples, lambda: trainer._evaluation.num_samples),
        "loss_batch_total": while_learning(lambda: trainer._course.loss_total, lambda: trainer._evaluation.sums[0]),
        "loss_regular_total": Alias(lambda ctx: _regular_total(trainer, ctx.get("mode"))),
        "ys_true": None,
        "ys_prob": None,
        "eval_metrics": {},
    }

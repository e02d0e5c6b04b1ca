"""The names that hooks find in the context beside those of the step: shared objects, and aliases worked out when read.

Every name that FederatedScope documents is here, whichever routine runs. What a hook may assign is written through to
what the loop uses next (`loss_batch`, `loss_task`, `data_batch`, `y_prob`, `grad_clip`); what the loop would not look
at again is refused, with the way to change it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint import unwrap
from hezar_train.data import SPLITS, batch_length
from hezar_train.loop import Alias, Context, Fixed, Loop
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.model_runner import labels_of
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer.assemble import Parts

__all__ = ["context_names", "setup_names"]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})

BUILT_IN = "Pass it to the Trainer, or override the method that makes it."
FROM_CONFIG = "Set it in the config: trainer.reconfigure(config)."
FROM_DATA = "Pass the data to the Trainer, or call trainer.reconfigure(splits=...)."
COUNTED = "The loop counts it."
WAYS = {
    "model": "Change the weights in place (ctx.model.load_state_dict), or pass another model to a new Trainer.",
    "optimizer": "Pass optimizer= to the Trainer, or override build_optimizer().",
    "scheduler": "Pass lr_scheduler= to the Trainer, or call trainer.reschedule().",
    "criterion": "Set `criterion` in the config, or override compute_loss().",
    "regularizer": "Set `regularizer` in the config; register_regularizer() adds one by name.",
    "config": FROM_CONFIG,
    "cfg": FROM_CONFIG,
    "data": FROM_DATA,
    **dict.fromkeys(("state", "storage", "device", "models", "mirrored_models"), BUILT_IN),
    **dict.fromkeys(("num_samples", "cur_epoch_i", "loss_batch_total", "loss_regular_total"), COUNTED),
    **{f"{split}_data": FROM_DATA for split in SPLITS},
    **{f"{split}_loader": FROM_DATA for split in SPLITS},
    **{f"num_{split}_data": COUNTED for split in SPLITS},
}
"""How to change what a hook cannot assign."""


def context_names(parts: Parts, trainer: Any) -> dict[str, Any]:
    """Return everything that hooks share; values that change are aliases."""
    return _fixed(_objects(parts, weakref.proxy(trainer)) | _of_the_batch() | _of_the_routine(parts)) | setup_names(
        parts.setup
    )


def _fixed(names: Mapping[str, Any]) -> dict[str, Any]:
    """Let nobody assign what would have no effect."""
    return {name: Fixed(value, WAYS[name]) if name in WAYS else value for name, value in names.items()}


def setup_names(setup: RunSetup) -> dict[str, Any]:
    """Return the names that follow from config and data, which another setup changes."""
    entries = {f"{split}_data": None for split in SPLITS} | {f"{split}_loader": None for split in SPLITS}
    counts: dict[str, Any] = {f"num_{split}_data": 0 for split in SPLITS}
    lengths: dict[str, Any] = {f"num_{split}_epoch": 1 for split in SPLITS}
    given = {name: value for name, value in setup.splits.entries.items() if name != "train_loader"}
    names = {
        "config": setup.config,
        "cfg": setup.config,
        **lengths,
        **{f"num_{split}_batch": _batches_in(setup, split) for split in SPLITS},
        "num_train_batch_last_epoch": _batches_in(setup, "train"),
        "num_total_train_batch": setup.plan.total_steps,
        **{name: value for name, value in entries.items() if name != "train_loader"},
        **counts,
        **given,
        "data": setup.splits.data,
    }
    return _fixed(names)


def _objects(parts: Parts, trainer: Any) -> dict[str, Any]:
    model, loop = parts.model, parts.loop
    return {
        "model": model,
        "state": parts.state,
        "storage": parts.storage,
        "device": parts.runtime.device,
        "models": [model],
        "mirrored_models": False,
        "criterion": parts.criterion,
        "regularizer": parts.regularizer,
        "monitor": Alias(lambda _: getattr(trainer, "monitor", None)),
        "train_loader": Alias(lambda _: _train_loader(trainer, loop)),
        "trainable_para_names": Alias(
            lambda _: [name for name, one in unwrap(model).named_parameters() if one.requires_grad]
        ),
    }


def _train_loader(trainer: Any, loop: Loop) -> Any:
    given = trainer.splits.entries.get("train_loader")
    return loop.batches if given is None else given


def _batches_in(setup: RunSetup, split: str) -> int | None:
    """Return the batches of a split as the config has them; a routine under way sets its own."""
    loader = setup.splits.entries.get(f"{split}_loader")
    if loader is not None and hasattr(loader.dataset, "__len__"):
        return len(loader)
    config, count = setup.config, setup.splits.entries.get(f"num_{split}_data")
    size = config.batch_size if split == "train" else config.eval_batch_size or config.batch_size
    return None if count is None else -(-count // size)


def _of_the_batch() -> dict[str, Any]:
    return {
        "y_true": Alias(lambda ctx: labels_of(ctx.batch)),
        "y_prob": Alias(lambda ctx: ctx.outputs.get("logits"), _set_output),
        "loss_batch": Alias(lambda ctx: ctx.outputs["loss"] if ctx.step.loss is None else ctx.step.loss, _set_loss),
        "loss_task": Alias(lambda ctx: ctx.loss + ctx.get("loss_regular", 0.0)),
        "batch_size": Alias(lambda ctx: batch_length(ctx.batch)),
        "data_batch": Alias(lambda ctx: ctx.batch, _set_batch),
        "cur_mode": Alias(lambda ctx: ctx.mode),
        "cur_split": Alias(lambda ctx: ctx.split),
    }


def _set_batch(ctx: Context, batch: Any) -> None:
    ctx.step.batch = batch


def _set_output(ctx: Context, logits: Any) -> None:
    ctx.step.outputs = {**(ctx.step.outputs or {}), "logits": logits}


def _set_loss(ctx: Context, loss: Any) -> None:
    """Let a loss be the batch's: trained on and counted, or averaged by an evaluation."""
    ctx.loss = loss  # refused where the batch's backward is done
    ctx.step.outputs = {**(ctx.step.outputs or {}), "loss": loss}


def _of_the_routine(parts: Parts) -> dict[str, Any]:
    loop, steps, finetuning = parts.loop, parts.train_step, parts.finetuning
    evaluation, optimization = parts.evaluator.steps, parts.optimization

    def is_finetuning(ctx: Context) -> bool:
        return ctx.get("mode") is Mode.FINETUNE

    def while_learning(read: Callable[[Any], Any], otherwise: Callable[[], Any]) -> Alias:
        """Read from the fit under way, or else from elsewhere."""
        return Alias(lambda ctx: read(loop.current) if ctx.get("mode") in LEARNING and loop.current else otherwise())

    def regular_total(ctx: Context) -> float:
        if ctx.get("mode") not in LEARNING:
            return 0.0
        return float((finetuning.steps if is_finetuning(ctx) else steps).loss_regular_total)

    def optimization_of(ctx: Context) -> Any:
        return finetuning.optimization if is_finetuning(ctx) else optimization

    def set_max_norm(ctx: Context, norm: float | None) -> None:
        optimization_of(ctx).max_grad_norm = None if norm is None or norm <= 0 else float(norm)

    return {
        "grad_clip": Alias(lambda ctx: optimization_of(ctx).max_grad_norm, set_max_norm),
        "optimizer": Alias(lambda ctx: optimization_of(ctx).optimizer),
        "scheduler": Alias(lambda ctx: optimization_of(ctx).schedule.scheduler),
        "cur_epoch_i": while_learning(lambda fit: fit.state.epoch - 1, lambda: 0),
        "num_samples": while_learning(lambda fit: fit.num_samples, lambda: evaluation.num_samples),
        "loss_batch_total": while_learning(lambda fit: fit.loss_total, lambda: evaluation.sums[0]),
        "loss_regular_total": Alias(regular_total),
        "ys_true": None,
        "ys_prob": None,
        "eval_metrics": {},
    }

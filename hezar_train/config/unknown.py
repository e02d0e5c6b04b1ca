"""What to say about a field that does not exist: the nearest spelling, or our word for another trainer's.

`tells_unknown_fields` makes a dataclass report such fields as one `ConfigError`, together with every other problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar

from hezar_train.errors import ConfigError, suggestion

__all__ = ["FOREIGN_FIELDS", "tells_unknown_fields", "unknown_field"]

FOREIGN_FIELDS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "activation_checkpoint": "gradient_checkpointing",
    "amp": "mixed_precision",
    "before_eval": "finetune_before_eval",
    "best_res_update_round_wise_key": "metric_for_best_model",
    "bf16": "mixed_precision",
    "checkpoint_dir": "checkpoints_dir",
    "checkpointer": "save_steps",
    "clip_grad_max_norm": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "data_para_dids": "distributed",
    "dataloader_drop_last": "drop_last",
    "dataloader_num_workers": "num_dataloader_workers",
    "default_root_dir": "output_dir",
    "delta": "early_stopping_threshold",
    "device_id": "device",
    "disp_freq": "log_steps",
    "early_stop": "early_stopping_patience",
    "early_stopping": "early_stopping_patience",
    "epoch_linear": "finetune_steps",
    "epochs": "num_epochs",
    "eval_freq": "eval_steps",
    "eval_iter": "max_eval_batches",
    "eval_metric": "metric_for_best_model",
    "eval_period": "eval_steps",
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "fedprox_mu": "regularizer_mu",
    "fp16": "mixed_precision",
    "freeze_param": "finetune_freeze_param",
    "full_determinism": "deterministic",
    "grad_accum_count": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "graph": "compile",
    "improve_indicator_mode": "early_stopping_mode",
    "load_weight": "init_weights_from",
    "log_every_n_steps": "log_steps",
    "log_period": "log_steps",
    "logging_dir": "logs_dir",
    "logging_steps": "log_steps",
    "loss_fn": "criterion",
    "loss_function": "criterion",
    "lr": "learning_rate",
    "lr_linear": "finetune_learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "min_delta": "early_stopping_threshold",
    "max_epochs": "num_epochs",
    "max_to_keep": "save_total_limit",
    "mtm_scheduler": "momentum_scheduler",
    "mu": "regularizer_mu",
    "no_cuda": "use_cpu",
    "num_accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "num_epochs",
    "num_workers": "num_dataloader_workers",
    "optim": "optimizer",
    "optim_function": "optimizer",
    "patience": "early_stopping_patience",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
    "precision": "mixed_precision",
    "print_every": "log_steps",
    "regular_weight": "regularizer_mu",
    "report_to": "trackers",
    "restore_from": "resume_from_checkpoint",
    "resume": "resume_from_checkpoint",
    "save_every": "save_steps",
    "save_strategy": "save_steps",
    "save_to": "output_dir",
    "share_local_model": "offload_after_routine",
    "shuffle": "dataloader_shuffle",
    "simple_tuning": "finetune_reinit",
    "stop_when_acc": "stop_when",
    "test_batch_size": "eval_batch_size",
    "test_micro_batch_size": "eval_batch_size",
    "torch_compile": "compile",
    "train_epoch": "num_epochs",
    "train_iter": "max_steps",
    "train_micro_batch_size": "batch_size",
    "val_batch_size": "eval_batch_size",
    "val_check_interval": "eval_steps",
    "val_freq": "eval_steps",
    "warmup_ratio": "lr_scheduler_kwargs",
    "wd": "weight_decay",
}
"""Other trainers' fields, each with ours for the same purpose."""

T = TypeVar("T")


def unknown_field(name: str, known: Collection[str]) -> str:
    """Tell that `name` is no field, and which one was probably meant."""
    ours = FOREIGN_FIELDS.get(name)
    if ours in known:
        return f"{name!r} is not a field. Here it is called {ours!r}."
    return f"{name!r} is not a field.{suggestion(name, known)}"


def tells_unknown_fields(cls: type[T]) -> type[T]:
    """Make a dataclass collect unknown keywords and a missing first field with the problems of all others.

    The class must check itself in `__post_init__` by raising `ConfigError`, and refuse None in its first field.
    """
    init: Callable[..., None] = cls.__init__
    first, *_ = known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def __init__(self: T, *args: Any, **given: Any) -> None:  # noqa: N807
        unknown = [unknown_field(name, known) for name in given if name not in known]
        values = {name: value for name, value in given.items() if name in known}
        if not args:
            values.setdefault(first, None)
        try:
            init(self, *args, **values)
        except ConfigError as error:
            raise ConfigError([*unknown, *error.problems]) from None
        if unknown:
            raise ConfigError(unknown)

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls

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
    "bf16": "mixed_precision",
    "clip_grad_norm": "max_grad_norm",
    "dataloader_drop_last": "drop_last",
    "dataloader_num_workers": "num_dataloader_workers",
    "default_root_dir": "output_dir",
    "disp_freq": "log_steps",
    "epochs": "num_epochs",
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "fp16": "mixed_precision",
    "full_determinism": "deterministic",
    "grad_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "log_every_n_steps": "log_steps",
    "log_period": "log_steps",
    "logging_dir": "logs_dir",
    "logging_steps": "log_steps",
    "loss_fn": "criterion",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_scheduler",
    "max_epochs": "num_epochs",
    "no_cuda": "use_cpu",
    "num_accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "num_epochs",
    "num_workers": "num_dataloader_workers",
    "optim": "optimizer",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
    "precision": "mixed_precision",
    "report_to": "trackers",
    "resume": "resume_from_checkpoint",
    "save_strategy": "save_steps",
    "shuffle": "dataloader_shuffle",
    "train_epoch": "num_epochs",
    "train_iter": "max_steps",
    "train_micro_batch_size": "batch_size",
    "val_check_interval": "eval_steps",
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

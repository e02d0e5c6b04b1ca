"""Which door of `hezar_train.compat` has a name that other trainers' users know; the core never imports a door."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hezar_train.errors import ConfigError

__all__ = ["CALLED_BY_DOOR", "NAMES_BY_DOOR", "door_of", "refuse_methods_of_doors", "refuse_methods_of_others"]

NAMES_BY_DOOR: dict[str, frozenset[str]] = {
    "hezar": frozenset({"checkpoints_dir", "logs_dir", "steps_in_epoch", "total_steps", "train_loss_tracker"}),
    "federatedscope": frozenset(
        {"cfg", "discharge_model", "load_model", "parse_data", "print_trainer_meta_info", "save_model"}
    ),
    "libai": frozenset(
        {
            "after_step", "after_train", "before_step", "before_train", "build_evaluator", "build_test_loader",
            "build_tokenizer", "build_train_loader", "iter", "max_iter", "resume_or_load", "start_iter", "test",
            "write_metrics",
        }
    ),
    "lernomatic": frozenset(
        {
            "freeze_to", "get_acc_history", "get_cur_acc", "get_cur_epoch", "get_cur_epoch_loss",
            "get_cur_epoch_val_loss", "get_cur_loss", "get_cur_val_loss", "get_learning_rate", "get_loss_history",
            "get_lr_scheduler", "get_model", "get_model_params", "get_momentum", "get_mtm_scheduler", "get_num_epochs",
            "get_trainer_params", "get_val_loss_history", "load_checkpoint", "load_history", "load_model_checkpoint",
            "save_checkpoint", "save_history", "set_batch_size", "set_learning_rate", "set_lr_scheduler",
            "set_momentum", "set_mtm_scheduler", "set_num_epochs", "set_tb_writer", "set_test_dataset",
            "set_train_dataset", "set_trainer_params", "set_val_dataset", "tb_writer", "test_epoch", "test_loader",
            "train_epoch", "train_loader", "unfreeze_to", "val_epoch", "val_loader",
            "acc_history", "acc_iter", "apply_lr_schedule", "apply_mtm_schedule", "batch_size", "cur_epoch",
            "drop_last", "learning_rate", "loss_history", "loss_iter", "momentum", "mtm_scheduler", "num_epochs",
            "num_workers", "shuffle", "test_batch_size", "test_dataset", "val_batch_size", "val_dataset",
            "val_loss_history", "val_loss_iter", "weight_decay",
        }
    ),
}  # fmt: skip

CALLED_BY_DOOR: dict[str, frozenset[str]] = {
    "federatedscope": frozenset(
        {
            "_run_batch", "_run_epoch", "_run_routine", "_switch_model_ctx", "parse_data",
            "register_default_hooks_eval", "register_default_hooks_ft", "register_default_hooks_train", "setup_data",
        }
    ),
    "libai": frozenset(
        {
            "after_step", "after_train", "auto_scale_hyperparams", "before_step", "before_train", "build_evaluator",
            "build_graph", "build_test_loader", "build_tokenizer", "build_train_loader", "get_batch",
        }
    ),
    "lernomatic": frozenset(
        {
            "_init_dataloaders", "_init_device", "_init_history", "_init_optimizer", "_send_to_device", "test_epoch",
            "train_epoch", "val_epoch",
        }
    ),
}  # fmt: skip
"""Methods that a door calls and the plain Trainer does not: overridden there, they would have no effect."""

OURS = "hezar_train."
HOOK_PREFIX = "_hook_on_"
"""What the names of FederatedScope's default hooks begin with, each a method that a subclass may override."""


ATTRIBUTES_OF_OTHERS = {
    "save_model": "save(folder)", "fit": "train()", "validate": "evaluate()", "add_callback": "register_hooks([hook])",
    "args": "config", "tokenizer": "preprocessor", "processing_class": "preprocessor", "callbacks": "hooks",
}  # fmt: skip
"""What users of transformers or Lightning ask a trainer for, each with ours for the same purpose."""


def door_of(name: str) -> str:
    """Return what a name is here, or where it is to be found, as the end of a sentence; empty for other names."""
    here = f". Here it is {ATTRIBUTES_OF_OTHERS[name]}" if name in ATTRIBUTES_OF_OTHERS else ""
    for door, names in NAMES_BY_DOOR.items():
        if name in names:
            return f"{here}. It is {door}'s: from hezar_train.compat.{door} import Trainer"
    return here


def refuse_methods_of_doors(kind: type) -> None:
    """Raise if a user's subclass of the plain Trainer has a method that only a door would call."""
    own = {name for base in kind.__mro__ if not base.__module__.startswith(OURS) for name in vars(base)}
    for door, names in CALLED_BY_DOOR.items():
        module = f"{OURS}compat.{door}"
        if any(base.__module__.startswith(module) for base in kind.__mro__):
            continue
        hooks = {name for name in own if name.startswith(HOOK_PREFIX)} if door == "federatedscope" else set[str]()
        if misplaced := sorted(own & names | hooks):
            raise ConfigError(
                f"{kind.__name__} has {', '.join(misplaced)}, which a Trainer never calls. It is {door}'s: "
                f"from {module} import Trainer"
            )


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
METHODS_OF_OTHERS = {
    "configure_optimizers": "build_optimizer() and build_lr_scheduler", "create_optimizer": "build_optimizer",
    "create_scheduler": "build_lr_scheduler", "get_train_dataloader": "create_train_dataloader",
    "train_dataloader": "create_train_dataloader", "get_eval_dataloader": "create_eval_dataloader",
    "val_dataloader": "create_eval_dataloader", "validation_step": "evaluation_step",
    "prediction_step": "evaluation_step",
}  # fmt: skip
"""Methods that transformers or Lightning call, each with the one of ours for the same purpose."""


def refuse_methods_of_others(kind: type) -> None:
    """Raise if a user's subclass has a method that nothing calls, or overrides one with other arguments."""
    ours = [base for base in kind.__mro__ if base.__module__.startswith(OURS)]
    for base in kind.__mro__:
        for name, found in () if base in ours else vars(base).items():
            theirs = next((vars(one)[name] for one in ours if name in vars(one)), None)
            if name in METHODS_OF_OTHERS and theirs is None:
                raise ConfigError(
                    f"{kind.__name__} has {name}(), which a Trainer never calls. Override {METHODS_OF_OTHERS[name]}() "
                    "instead."
                )
            if name == "compute_loss" and inspect.isfunction(found) and {"model", "inputs"} <= _names_of(found):
                raise ConfigError(
                    f"{kind.__name__}.compute_loss{inspect.signature(found)} is transformers'; a Trainer calls it with "
                    "the model's outputs and the labels. Write it so: def compute_loss(self, model_outputs, labels, "
                    "**kwargs)"
                )
            if inspect.isfunction(found) and inspect.isfunction(theirs) and not name.startswith("_"):
                _refuse_other_arguments(kind, name, found, theirs)


def _refuse_other_arguments(kind: type, name: str, found: Callable[..., Any], ours: Callable[..., Any]) -> None:
    needed = [p for p in inspect.signature(ours).parameters.values() if p.default is p.empty and p.kind in POSITIONAL]
    try:
        inspect.signature(found).bind(*needed)
    except TypeError as error:
        shown = ", ".join(p.name for p in needed)
        raise ConfigError(
            f"{kind.__name__}.{name}{inspect.signature(found)} cannot be called as a Trainer does ({error}). Write it "
            f"so: def {name}({shown}{', **kwargs' if _takes_any(ours) else ''})"
        ) from error


def _names_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

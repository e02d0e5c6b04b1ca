"""Which door of `hezar_train.compat` has a name that other trainers' users know; the core never imports a door."""

from __future__ import annotations

__all__ = ["NAMES_BY_DOOR", "door_of"]

NAMES_BY_DOOR: dict[str, frozenset[str]] = {
    "federatedscope": frozenset(
        {"cfg", "discharge_model", "load_model", "parse_data", "print_trainer_meta_info", "save_model"}
    ),
    "libai": frozenset(
        {
            "build_evaluator", "build_test_loader", "build_tokenizer", "build_train_loader", "iter", "max_iter",
            "resume_or_load", "start_iter", "test", "write_metrics",
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
            "train_epoch", "unfreeze_to", "val_epoch", "val_loader",
        }
    ),
}  # fmt: skip


def door_of(name: str) -> str:
    """Return where a name is to be found, as the end of a sentence; empty where no door has it."""
    for door, names in NAMES_BY_DOOR.items():
        if name in names:
            return f". It is {door}'s: from hezar_train.compat.{door} import Trainer"
    return ""

"""What lernomatic's document about its Trainer prints: the constructor, its keywords, what a trainer needs at least."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train.compat.lernomatic import Trainer

CONSTRUCTOR = """
    def __init__(self, model=None, **kwargs) -> None:
        self.model           = model
        # Training loop options
        self.num_epochs      :int   = kwargs.pop('num_epochs', 10)
        self.learning_rate   :float = kwargs.pop('learning_rate', 1e-4)
        self.momentum        :float = kwargs.pop('momentum', 0.5)
        self.weight_decay    :float = kwargs.pop('weight_decay', 1e-5)
        self.loss_function   :str   = kwargs.pop('loss_function', 'CrossEntropyLoss')
        self.optim_function  :str   = kwargs.pop('optim_function', 'Adam')
        self.cur_epoch       :int   = 0
        # validation options
        # checkpoint options
        self.checkpoint_dir  :str   = kwargs.pop('checkpoint_dir', 'checkpoint')
        self.checkpoint_name :str   = kwargs.pop('checkpoint_name', 'ck')
        self.save_hist       :bool  = kwargs.pop('save_hist', True)
        # Internal options
        self.verbose         :float = kwargs.pop('verbose', True)
        self.print_every     :int   = kwargs.pop('print_every', 10)
        self.save_every      :float = kwargs.pop('save_every', -1)  # unit is iterations, -1 = save every epoch
        self.save_best       :float = kwargs.pop('save_best', False)
        # Device options
        self.device_id       :int   = kwargs.pop('device_id', -1)
        self.device_map      :float = kwargs.pop('device_map', None)
        # dataset/loader
        self.batch_size      :int   = kwargs.pop('batch_size', 64)
        self.test_batch_size :int   = kwargs.pop('test_batch_size', 0)
        self.train_dataset          = kwargs.pop('train_dataset', None)
        self.test_dataset           = kwargs.pop('test_dataset', None)
        self.val_dataset            = kwargs.pop('val_dataset', None)
        self.shuffle         :float = kwargs.pop('shuffle', True)
        self.num_workers     :int   = kwargs.pop('num_workers' , 1)
        self.drop_last       :bool  = kwargs.pop('drop_last', True)
        # parameter scheduling
        self.lr_scheduler           = kwargs.pop('lr_scheduler', None)
        self.mtm_scheduler          = kwargs.pop('mtm_scheduler', None)
        self.stop_when_acc   :float = kwargs.pop('stop_when_acc', 0.0)
        self.early_stop      :dict  = kwargs.pop('early_stop', None)
"""
PRINTED = {
    name: ast.literal_eval(default) for name, default in re.findall(r"kwargs\.pop\('(\w+)' ?, (.+?)\)", CONSTRUCTOR)
}
CALLS = ["_init_device", "_init_optimizer", "_init_dataloaders", "_init_history", "_send_to_device"]


def points() -> TensorDataset:
    return TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))


def test_every_keyword_that_is_printed_was_found() -> None:
    assert len(PRINTED) == CONSTRUCTOR.count("kwargs.pop") == 27


@pytest.mark.parametrize("name", sorted(set(PRINTED) - {"test_batch_size"}))
def test_a_keyword_has_the_default_that_is_printed_and_becomes_an_attribute(name: str) -> None:
    assert getattr(Trainer(nn.Linear(4, 3)), name) == PRINTED[name]
    assert getattr(Trainer(nn.Linear(4, 3), **{name: PRINTED[name]}), name) == PRINTED[name]


def test_a_batch_size_of_the_evaluation_of_nought_is_that_of_the_training() -> None:
    assert Trainer(nn.Linear(4, 3), batch_size=7, test_batch_size=0).val_batch_size == 7
    trainer = Trainer(nn.Linear(4, 3), batch_size=7, test_batch_size=3)
    assert (trainer.val_batch_size, trainer.test_batch_size) == (3, 3)
    trainer.test_batch_size = 5
    assert trainer.val_batch_size == 5


def test_the_methods_of_the_constructor_are_called_as_they_are_printed() -> None:
    called: list[str] = []

    def noted(name: str) -> Any:
        return lambda self: (called.append(name), getattr(Trainer, name)(self))[0]

    type("Noted", (Trainer,), {name: noted(name) for name in CALLS})(nn.Linear(4, 3))
    assert called == CALLS


def test_the_end_of_the_constructor_settles_saving() -> None:
    trainer = Trainer(nn.Linear(4, 3), train_dataset=points(), batch_size=4)
    assert (trainer.best_acc, trainer.start_epoch, trainer.save_every, trainer.save_best) == (0.0, 0, 2, True)
    assert Trainer(nn.Linear(4, 3), train_dataset=points(), save_every=0).save_best is False


def test_a_trainer_needs_a_model_an_optimizer_a_loss_and_an_epoch_and_no_validation(tmp_path: Path) -> None:
    class Least(Trainer):
        def train_epoch(self) -> None:
            for data, target in self.train_loader:
                loss = self.criterion(self.model(data), target)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.loss_history[self.loss_iter] = loss.item()
                self.loss_iter += 1

        def val_epoch(self) -> None:
            pass

    trainer = Least(
        nn.Linear(4, 3), train_dataset=points(), val_dataset=points(), num_epochs=2, batch_size=4,
        checkpoint_dir=str(tmp_path),
    )  # fmt: skip
    trainer.train()
    assert (trainer.cur_epoch, trainer.loss_iter) == (2, 6)


def test_histories_and_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    trainer = Trainer(nn.Linear(4, 3), train_dataset=points(), num_epochs=1, batch_size=4, checkpoint_dir=str(tmp_path))
    trainer.train()
    trainer.save_checkpoint(str(tmp_path / "kept.pkl"))
    trainer.save_history(str(tmp_path / "history.pkl"))
    other = Trainer(nn.Linear(4, 3), checkpoint_dir=str(tmp_path))
    other.load_checkpoint(str(tmp_path / "kept.pkl"))
    other.load_history(str(tmp_path / "history.pkl"))
    assert torch.equal(other.model.weight, trainer.model.weight)
    assert (other.cur_epoch, other.get_loss_history().tolist()) == (1, trainer.get_loss_history().tolist())

"""lernomatic's Trainer, built from a config: bodies of epochs, getters, setters, histories, checkpoints at any path.

Everything that is set holds from the next call of `train()` on and is refused while one is under way: a hook asks
(`request_save`, `request_stop`), and `save_steps` saves by the step. What is set is in the next checkpoint, the frozen
parameters included.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import unwrap
from hezar_train.checkpoint.store import open_checkpoint, write_checkpoint
from hezar_train.compat.lernomatic.attributes import showing
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, choices
from hezar_train.events import EventStorage, EventWriter, SummaryWriterAdapter
from hezar_train.loop import note_loss
from hezar_train.optim import MomentumSchedule, get_momentum, set_learning_rate, set_momentum
from hezar_train.state import TrainerState
from hezar_train.trainer import Given, Parts
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.evaluator import EvalBatches
from hezar_train.trainer.finetuning import FROZEN, freeze_first, frozen_names, unfreeze_first
from hezar_train.trainer.optimizer_setup import FirstSettings, refuse_foreign_optimizer
from hezar_train.trainer.reconfigure import refuse_while_learning

__all__ = ["ConfigTrainer", "all_writers"]

STEP_LOSS = "train.step_loss"
PERIOD_LOSS = "train.recent_loss"
EVALUATION_LOSS = "evaluation.loss"
EVALUATION_ACCURACY = "evaluation.accuracy"

Points = list[tuple[float, int]]
Floats = NDArray[np.float64]


def all_writers(trainer: Any) -> list[EventWriter]:
    """Make the writers of a run: those of `build_writers`, which may be overridden, and the one that was set."""
    own = [] if trainer.tb_writer is None else [SummaryWriterAdapter(trainer.tb_writer)]
    return [*trainer.build_writers(), *own]


class ConfigTrainer(PlainTrainer):
    """Train a model as lernomatic's Trainer does; override `train_epoch()` and `val_epoch()` for tasks of your own."""

    tb_writer: Any = None
    train_loader: Any = None
    """The batches that are left of the epoch under way, for an overridden `train_epoch`."""

    # Construction, step by step. An override sees what the trainer has made, and may set `model` or `optimizer` anew.

    def _init_device(self) -> None:
        """Called first; `runtime` has the device, the processes and the precision."""

    def _send_to_device(self) -> None:
        """Called when `model` is on the device, as the config asks for it."""

    def _init_dataloaders(self) -> None:
        """Called when the training data is open, by `create_train_dataloader`, and the run is planned over it."""

    def _init_optimizer(self) -> None:
        """Called when `optimizer` is the one passed, else what `build_optimizer` makes; an override may set another."""

    def _init_history(self) -> None:
        """Called last; `storage` is where everything measured goes."""

    def make_parts(self, given: Given) -> Parts:
        """Go through the steps of the construction, and make the parts of what they leave behind."""
        self._init_device()
        self._send_to_device()
        self._init_dataloaders()
        self._init_optimizer()
        self._refuse_too_late(given)
        verbs = dataclasses.replace(given.verbs, build_writers=partial(all_writers, self))
        parts = super().make_parts(dataclasses.replace(self._with_optimizer(given), model=self.model, verbs=verbs))
        self.state, self.storage = parts.state, parts.storage
        self._init_history()
        if self.storage is not parts.storage:
            raise ConfigError("_init_history() set another storage; put into the one that is there: self.storage")
        return parts

    def _refuse_too_late(self, given: Given) -> None:
        """Raise if a step has set what the trainer was made of already."""
        splits = given.setup.splits
        made = {
            "runtime": given.runtime, "accelerator": given.runtime.accelerator, "plan": given.setup.plan,
            "splits": splits, "train_dataset": splits.train, "eval_dataset": splits.for_evaluation,
        }  # fmt: skip
        if late := [name for name, value in made.items() if getattr(self, name) is not value]:
            raise ConfigError(
                f"the _init_ methods of {type(self).__name__} set {choices(late)}, which the trainer is made of by "
                "then. Pass accelerator and data to the Trainer, or override create_train_dataloader()."
            )

    def _with_optimizer(self, given: Given) -> Given:
        """Take another optimizer, or one for another model, with a schedule of its own."""
        if self.optimizer is given.optimizer and self.model is given.model:
            return given
        if not given.setup.only_for_eval:
            refuse_foreign_optimizer(self.optimizer, self.model)
        if self.optimizer is given.optimizer:
            return given
        first = FirstSettings(self.optimizer, self.build_schedule, given.first.given)
        return dataclasses.replace(given, optimizer=self.optimizer, first=first)

    # Training and validation.

    def inner_training_loop(self, epoch_num: int) -> Mapping[str, float]:
        """Train on the rest of an epoch, by `train_epoch`; return the mean loss since the start of the training."""
        loop = self.parts.loop
        with loop.epoch_batches(epoch_num) as batches:
            with showing(self):
                self.train_loader = batches
            self.train_epoch()
        fit = loop.current
        return {"loss": (self.state if fit is None else fit.state).loss_tracker_avg}

    def train_epoch(self) -> None:
        """Step through the batches that are left of the epoch.

        An override goes over `self.train_loader` itself, and for each batch calls `run_step()`, or does the step in its
        own way and calls `note_loss(loss)`.
        """
        for _ in self.train_loader:
            outputs = self.run_step()
            if not self.ctx.step.is_loss_noted:  # an override that goes its own way
                note_loss(self.ctx, outputs, "run_step")
            del outputs  # else they would live through the next step

    def evaluate_while_training(self) -> dict[str, float]:
        """Run `val_epoch` and, where it is overridden, `test_epoch`, whose metrics are called "test.*"."""
        metrics = self.val_epoch() or {}
        if type(self).test_epoch.__module__.startswith(str(__package__)):  # nobody has overridden it
            return metrics
        return metrics | {f"test.{name}": value for name, value in (self.test_epoch() or {}).items()}

    def val_epoch(self) -> dict[str, float] | None:
        """Evaluate while training; an override returns metrics by name, or None if it has none."""
        return self.evaluate()

    def test_epoch(self) -> dict[str, float] | None:
        """Evaluate on the split "test". An override also runs after each `val_epoch` of a training, as "test.*"."""
        return self.evaluate("test")

    @property
    def val_loader(self) -> EvalBatches | None:
        """The batches of the split "val" in order, for an overridden `val_epoch`; None without such data."""
        return self._eval_batches("val")

    @property
    def test_loader(self) -> EvalBatches | None:
        """The batches of the split "test" in order, for an overridden `test_epoch`; None without such data."""
        return self._eval_batches("test")

    def _eval_batches(self, split: str) -> EvalBatches | None:
        data = self.splits.data.get(split)
        return None if data is None else self.parts.evaluator.batches(data)

    # Getters and setters.

    def get_num_epochs(self) -> int:
        """Return how many epochs the whole run has."""
        return self.config.num_epochs

    def set_num_epochs(self, num_epochs: int) -> None:
        """Extend or shorten the run; `train()` then goes on to that epoch as if it had been planned at once."""
        self.reconfigure(self._changed(num_epochs=num_epochs))

    def get_cur_epoch(self) -> int:
        """Return how many epochs are finished: `state.epoch`, less the one under way."""
        return self.state.epoch - (not self.state.epoch_finished)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float, param_zero: bool = False) -> None:
        """Set the learning rate of every parameter group, or of the first alone; a schedule sets its own at a tick."""
        set_learning_rate(self.optimizer, lr, 0 if param_zero else None)
        self.parts.first.note_settings()

    def get_momentum(self) -> float | None:
        """Return the momentum, or the first of the betas; None for an optimizer without one."""
        return get_momentum(self.optimizer)

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum, or the first of the betas, of every parameter group."""
        set_momentum(self.optimizer, momentum)
        self.parts.first.note_settings()

    def get_lr_scheduler(self) -> LRScheduler | None:
        """Return the scheduler of the learning rate."""
        return self.schedule.scheduler

    def set_lr_scheduler(self, lr_scheduler: LRScheduler | str | None, **settings: Any) -> None:
        """Follow another schedule from its first tick on: by its name and settings, or one built over the optimizer."""
        if isinstance(lr_scheduler, LRScheduler):
            self.reschedule(self.config, lr_scheduler)
        else:
            self.reschedule(self._changed(lr_scheduler=lr_scheduler, lr_scheduler_kwargs=settings or None))

    def get_mtm_scheduler(self) -> MomentumSchedule | None:
        """Return the schedule of the momentum."""
        return self.schedule.momentum

    def set_mtm_scheduler(self, mtm_scheduler: str | None, **settings: Any) -> None:
        """Let the momentum follow another curve, by its name and settings; both schedules begin anew."""
        named = {"momentum_scheduler": mtm_scheduler, "momentum_scheduler_kwargs": settings or None}
        self.reschedule(self._changed(**named), self.parts.first.given)

    def set_batch_size(self, batch_size: int) -> None:
        """Train with batches of another size from the next epoch on."""
        self.reconfigure(self._changed(batch_size=batch_size))

    def set_train_dataset(self, dataset: Any) -> None:
        """Train on other data from the next epoch on."""
        self.reconfigure(splits=self.splits.replaced("train", dataset))

    def set_val_dataset(self, dataset: Any) -> None:
        """Evaluate on other data, or, with None, no longer."""
        self.reconfigure(splits=self.splits.replaced("val", dataset))

    def set_test_dataset(self, dataset: Any) -> None:
        """Say what `test_epoch()` and `evaluate("test")` go over."""
        self.reconfigure(splits=self.splits.replaced("test", dataset))

    def set_tb_writer(self, tb_writer: Any) -> None:
        """Pass every logged row on to a `SummaryWriter` as well, from the next call of `train()` on."""
        self.tb_writer = tb_writer

    def get_model(self) -> nn.Module:
        """Return the bare model."""
        return unwrap(self.model)

    def get_model_params(self) -> dict[str, Any]:
        """Return the bare model's state by name: the live tensors, no copies."""
        return self.get_model().state_dict()

    def freeze_to(self, num_tensors: int) -> None:
        """Stop training the first so many parameter tensors; the others stay as they are."""
        freeze_first(unwrap(self.model), num_tensors)
        self.state.hooks[FROZEN] = frozen_names(unwrap(self.model))

    def unfreeze_to(self, num_tensors: int) -> None:
        """Train the first so many parameter tensors again; the others stay as they are."""
        unfreeze_first(unwrap(self.model), num_tensors, self.optimizer)
        self.state.hooks[FROZEN] = frozen_names(unwrap(self.model))

    def get_trainer_params(self) -> dict[str, Any]:
        """Return every field of the config in plain values."""
        return self.config.to_dict()

    def set_trainer_params(self, params: Mapping[str, Any]) -> None:
        """Change fields of the config: those that a trainer which is built can still follow."""
        self.reconfigure(self._changed(**params))

    def _changed(self, **changes: Any) -> TrainerConfig:
        return copy.deepcopy(self.config).update(changes)

    # Checkpoints.

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to a folder of your own, whole or not at all; one that is there is replaced."""
        refuse_while_learning(self.parts.loop, "save_checkpoint()", "set save_steps, or call request_save()")
        contents = self.parts.checkpointing.gather_whole()
        self.runtime.processes.on_main(lambda: write_checkpoint(Path(path), contents, self.state.global_step))
        return Path(path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go to where a checkpoint was saved; without training data, load its weights alone."""
        refuse_while_learning(self.parts.loop, "load_checkpoint()")
        checkpoint = open_checkpoint(Path(path))
        if self.setup.only_for_eval:
            self.parts.checkpointing.load_weights(checkpoint)
        else:
            self.parts.session.restore(checkpoint)

    def load_model_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint, all of which must fit; optimizer, rate and epoch stay."""
        self.parts.checkpointing.load_weights(open_checkpoint(Path(path)))

    # History: None for arrays and 0.0 for numbers before the first value. Losses of the training are one per update,
    # those of an evaluation one per evaluation, over its whole data.

    def get_loss_history(self) -> Floats | None:
        """Return the loss of every update; before a resume, the mean loss of every log period."""
        return _array(_losses(self.storage))

    def get_cur_loss(self) -> float:
        """Return the loss of the last update."""
        return _latest(self.storage, STEP_LOSS, PERIOD_LOSS)

    def get_cur_epoch_loss(self) -> Floats | None:
        """Return the losses of the epoch under way, or of the one just finished."""
        return _array(_of_this_epoch(_losses(self.storage), self.state))

    def get_val_loss_history(self) -> Floats | None:
        """Return the loss of every evaluation."""
        return _array(_points(self.storage, EVALUATION_LOSS))

    def get_cur_val_loss(self) -> float:
        """Return the loss of the last evaluation."""
        return _latest(self.storage, EVALUATION_LOSS)

    def get_cur_epoch_val_loss(self) -> Floats | None:
        """Return the losses of the evaluations in the epoch under way, or in the one just finished."""
        return _array(_of_this_epoch(_points(self.storage, EVALUATION_LOSS), self.state))

    def get_acc_history(self) -> Floats | None:
        """Return the accuracy of every evaluation."""
        return _array(_points(self.storage, EVALUATION_ACCURACY))

    def get_cur_acc(self) -> float:
        """Return the accuracy of the last evaluation."""
        return _latest(self.storage, EVALUATION_ACCURACY)

    def save_history(self, path: str | os.PathLike[str]) -> Path:
        """Write everything measured so far into one JSON file."""
        self.runtime.processes.on_main(lambda: self.storage.save_history(path))
        return Path(path)

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Read a saved history; what this trainer measures from now on follows it."""
        self.storage.load_history(path)


def _points(storage: EventStorage, name: str) -> Points:
    history = storage.histories().get(name)
    return [] if history is None else history.values()


def _losses(storage: EventStorage) -> Points:
    """Return the loss of each update, and of the time before the first one held what the rows say."""
    losses, periods = _points(storage, STEP_LOSS), _points(storage, PERIOD_LOSS)
    return [point for point in periods if not losses or point[1] < losses[0][1]] + losses


def _latest(storage: EventStorage, *names: str) -> float:
    histories = storage.histories()
    return next((histories[name].latest() for name in names if name in histories), 0.0)


def _of_this_epoch(points: Points, state: TrainerState) -> Points:
    """Return the last points that lie in this epoch; a loaded history may end with higher steps than are done."""
    if not state.epoch_step:
        return []
    first, last, found = state.global_step - state.epoch_step, state.global_step, []
    for value, step in reversed(points):
        if not first < step <= last:
            break
        found.append((value, step))
        last = step
    return found[::-1]


def _array(points: Iterable[tuple[float, int]]) -> Floats | None:
    values = [value for value, _ in points]
    return np.array(values) if values else None

"""lernomatic's Trainer: bodies of epochs to override, getters, setters, histories, checkpoints at a path of one's own.

    from hezar_train.compat.lernomatic import Trainer

    class MyTrainer(Trainer):
        def train_epoch(self):
            for batch in self.train_loader:
                self.optimizer.zero_grad()
                loss = cross_entropy(self.model(batch["x"]), batch["labels"])
                loss.backward()
                self.optimizer.step()
                self.note_loss(loss)

        def val_epoch(self):
            pass

    trainer = MyTrainer(TrainerConfig("run", num_epochs=2), model, train_dataset, val_dataset)
    trainer.train()
    trainer.set_num_epochs(5)
    trainer.train()

Everything that is set holds from the next call of `train()` on and is refused while one is under way: a hook asks
(`request_save`, `request_stop`), and `save_steps` saves by the step. What is set is in the next checkpoint, the frozen
parameters included. `LogFinder` is lernomatic's finder of learning rates, over `Trainer.find_lr`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import unwrap
from hezar_train.checkpoint.store import open_checkpoint, write_checkpoint
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, choices
from hezar_train.events import EventStorage, EventWriter, SummaryWriterAdapter
from hezar_train.loop import note_loss
from hezar_train.multi_model import MultiModelTrainer as PlainMultiModelTrainer
from hezar_train.optim import MomentumSchedule, get_momentum, set_learning_rate, set_momentum
from hezar_train.state import TrainerState
from hezar_train.trainer import Given, Parts
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.evaluator import EvalBatches
from hezar_train.trainer.finetuning import FROZEN, freeze_first, frozen_names, unfreeze_first
from hezar_train.trainer.lr_finder import DEFAULT_STEPS, LRFinderResult, SweepSettings
from hezar_train.trainer.optimization import FirstSettings, refuse_foreign_optimizer
from hezar_train.trainer.reconfigure import refuse_while_learning

__all__ = ["LogFinder", "MultiModelTrainer", "Trainer", "find_lr", "lr_finder_auto_load"]

STEP_LOSS = "train.step_loss"
PERIOD_LOSS = "train.recent_loss"
EVALUATION_LOSS = "evaluation.loss"
EVALUATION_ACCURACY = "evaluation.accuracy"

Points = list[tuple[float, int]]
Floats = NDArray[np.float64]


class Trainer(PlainTrainer):
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
        verbs = dataclasses.replace(given.verbs, build_writers=self._all_writers)
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
        with loop.epoch_batches(epoch_num) as self.train_loader:
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
        if type(self).test_epoch is Trainer.test_epoch:
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
        freeze_first(self.get_model(), num_tensors)
        self.state.hooks[FROZEN] = frozen_names(self.get_model())

    def unfreeze_to(self, num_tensors: int) -> None:
        """Train the first so many parameter tensors again; the others stay as they are."""
        unfreeze_first(self.get_model(), num_tensors, self.optimizer)
        self.state.hooks[FROZEN] = frozen_names(self.get_model())

    def get_trainer_params(self) -> dict[str, Any]:
        """Return every field of the config in plain values."""
        return self.config.to_dict()

    def set_trainer_params(self, params: Mapping[str, Any]) -> None:
        """Change fields of the config: those that a trainer which is built can still follow."""
        self.reconfigure(self._changed(**params))

    def _changed(self, **changes: Any) -> TrainerConfig:
        return copy.deepcopy(self.config).update(changes)

    def _all_writers(self) -> list[EventWriter]:
        """Make the writers of a run: those of `build_writers`, which may be overridden, and the one that was set."""
        own = [] if self.tb_writer is None else [SummaryWriterAdapter(self.tb_writer)]
        return [*self.build_writers(), *own]

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


class MultiModelTrainer(Trainer, PlainMultiModelTrainer):
    """Train several models in one run, as lernomatic's trainers of GANs and autoencoders do, under the same names."""


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


def find_lr(trainer: PlainTrainer, settings: SweepSettings) -> LRFinderResult:
    """Sweep over the rates of a trainer, on the first updates of its first epoch; then everything is as it was."""
    return trainer.find_lr(**dataclasses.asdict(settings))


@dataclass
class LogFinder:
    """Sweep over a trainer's learning rates, under the names of lernomatic.

    `num_epochs`, `gamma`, `grad_thresh` and `expr_id` have no effect: one epoch leads from `lr_min` to `lr_max`.
    """

    trainer: PlainTrainer | None
    num_epochs: int = 8
    lr_min: float = 1e-6
    lr_max: float = 1.0
    explode_thresh: float = 4.0
    beta: float = 0.999
    gamma: float = 0.999995
    lr_min_factor: float = 2.0
    lr_max_scale: float = 1.0
    lr_select_method: str = "max_acc"
    lr_trunc: int = 10
    max_batches: int = 0
    """Updates of the sweep; 0: those of an epoch."""

    grad_thresh: float = 0.002
    acc_test: bool = True
    print_every: int = 20
    verbose: bool = False
    expr_id: str | None = None
    result: LRFinderResult | None = field(default=None, repr=False)

    def find(self) -> tuple[float, float]:
        """Sweep; return the lowest and the highest rate to train with."""
        if self.trainer is None:
            raise DataError("this finder has no trainer: it was read from a file, and can only show what was found")
        num_steps = self.max_batches or self.trainer.plan.updates_in_epoch or DEFAULT_STEPS
        self.result = self.trainer.find_lr(
            self.lr_min, self.lr_max, num_steps, explode_thresh=self.explode_thresh, beta=self.beta,
            lr_select_method=self.lr_select_method, lr_min_factor=self.lr_min_factor, lr_max_scale=self.lr_max_scale,
            lr_trunc=self.lr_trunc, acc_test=self.acc_test, print_every=self.print_every if self.verbose else 0,
        )  # fmt: skip
        return self.get_lr_range()

    def get_lr_range(self) -> tuple[float, float]:
        """Return the lowest and the highest rate to train with, by `lr_select_method`."""
        return self._found().get_lr_range(self.lr_select_method)

    def get_lr_history(self) -> list[float] | None:
        """Return log10 of each rate that was tried; None before a sweep."""
        return self.log_lr_history or None

    @property
    def log_lr_history(self) -> list[float]:
        return [] if self.result is None else [math.log10(rate) for rate in self.result.rates]

    @property
    def smooth_loss_history(self) -> list[float]:
        return [] if self.result is None else self.result.smoothed

    @property
    def acc_history(self) -> list[float]:
        return [] if self.result is None else self.result.accuracies

    def plot_lr_vs_loss(self, ax: Any, title: str | None = None, log: bool = False) -> None:
        """Draw the smoothed loss over the rate, or over its log10, with the range."""
        self._draw(ax, self.smooth_loss_history, "smoothed loss", title, log)

    def plot_lr_vs_acc(self, ax: Any, title: str | None = None, log: bool = False) -> None:
        """Draw the accuracy over the rate, or over its log10, with the range."""
        if not self.acc_history:
            raise DataError("no accuracies were measured: set acc_test=True and call find()")
        self._draw(ax, self.acc_history, "accuracy", title, log)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what was found as JSON."""
        return self._found().save(path)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what `save` wrote, with the way it selected."""
        self.result = LRFinderResult.load(path)
        self.lr_select_method = self.result.lr_select_method

    def _draw(self, ax: Any, curve: list[float], name: str, title: str | None, log: bool) -> None:
        rates = self.log_lr_history if log else self._found().rates
        ax.plot(rates, curve)
        for rate in self.get_lr_range():
            ax.axvline(math.log10(rate) if log else rate, color="r")
        what = "log10 of the learning rate" if log else "learning rate"
        ax.set(xlabel=what, ylabel=name, title=title or f"Selected by {self.lr_select_method}")

    def _found(self) -> LRFinderResult:
        if self.result is None:
            raise DataError("nothing was found yet: call find() or load(path) first")
        return self.result


def lr_finder_auto_load(path: str | os.PathLike[str]) -> LogFinder:
    """Return a finder without a trainer that shows what a saved one found."""
    finder = LogFinder(None)
    finder.load(path)
    return finder

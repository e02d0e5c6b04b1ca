"""lernomatic's Trainer, as its documents and its users have it: keywords, attributes, `_init_*` methods, own epochs.

    from hezar_train.compat.lernomatic import Trainer

    class MyTrainer(Trainer):
        def train_epoch(self):
            self.model.train()
            for batch_idx, (data, labels) in enumerate(self.train_loader):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(data), labels)
                loss.backward()
                self.optimizer.step()
                self.loss_history[self.loss_iter] = loss.item()
                self.loss_iter += 1

    trainer = MyTrainer(model, train_dataset=train, val_dataset=val, num_epochs=2, checkpoint_dir="runs")
    trainer.train()
    trainer.num_epochs = 5
    trainer.train()

The attributes are what counts: the parts of the run are made of them when `train()` (or `evaluate()`, or a hook) first
needs them, and follow them at each further call. A field of `TrainerConfig` that lernomatic has no word for may be
given as a keyword as well (`resume_from_checkpoint=True`). `Trainer(TrainerConfig(...), model, ...)` builds everything
at once.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from abc import ABCMeta
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint.optimizer_state import load_state
from hezar_train.compat.lernomatic.attributes import (
    Setting,
    is_from_config,
    is_ready,
    own_values,
    set_ready,
    showing,
)
from hezar_train.compat.lernomatic.from_config import ConfigTrainer, all_writers
from hezar_train.compat.lernomatic.keeping import Keeper, histories, is_file, put_plain, read_file, write_file
from hezar_train.compat.lernomatic.making import (
    CLASSIFIES,
    KEYWORDS,
    OF_PARTS,
    EpochLoader,
    as_model,
    evaluation_data,
    follow_cur_epoch,
    follow_loader,
    follow_loss_iter,
    follow_momentum,
    follow_num_epochs,
    follow_rate,
    follow_schedule,
    follow_weight_decay,
    length_of,
    make_room,
    material_of,
    named_loss,
    named_optimizer,
    nets_of,
    noted_metrics,
    optimizers_of,
    or_empty,
    own_fields,
    own_optimizers,
    path_of,
    refuse_in_training,
    refuse_or_tell_own_train,
    refuse_schedule,
    refuse_unknown,
    renewed,
    run_config,
    splits_of,
    takes,
    trains_now,
    values_for_loaders,
    watch_steps,
    whole_model,
)
from hezar_train.compat.lernomatic.models import WrappedModel, find_class, parameters_of, params_of
from hezar_train.compat.lernomatic.schedule import is_schedule, rate_of
from hezar_train.config import TrainerConfig
from hezar_train.data import Splits
from hezar_train.errors import CheckpointError, ConfigError, DataError, choices
from hezar_train.multi_model import MultiModelTrainer as PlainMultiModelTrainer
from hezar_train.optim import get_momentum, set_learning_rate, set_momentum
from hezar_train.runtime import logger
from hezar_train.trainer import Given, Parts, RoutineResult
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.lr_finder import LRFinderResult
from hezar_train.trainer.own_code import kept_attributes

__all__ = ["MultiModelTrainer", "Trainer"]

PARAMS = ("num_epochs", "learning_rate", "momentum", "weight_decay", "loss_function", "optim_function", "cur_epoch",
          "iter_per_epoch", "save_every", "print_every", "batch_size", "val_batch_size", "shuffle")  # fmt: skip
"""What `get_trainer_params` tells and a checkpoint of lernomatic holds."""
HISTORY_COUNTERS = ("loss_iter", "val_loss_iter", "acc_iter", "cur_epoch", "iter_per_epoch")


class Built(ABCMeta):
    """Gives a trainer that goes on from a checkpoint what was saved as soon as its whole constructor is through."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        trainer = super().__call__(*args, **kwargs)
        if is_ready(trainer) and own_values(trainer)["fields"].get("resume_from_checkpoint"):
            trainer._make()
        return trainer


class Trainer(ConfigTrainer, metaclass=Built):
    """Train a model as lernomatic's Trainer does; override `train_epoch()` and `val_epoch()` for tasks of your own."""

    model = Setting(follow=refuse_in_training, convert=as_model, renew=renewed, falls_back=True)
    optimizer = Setting(follow=refuse_in_training, falls_back=True)
    criterion = Setting(write=lambda trainer, value: own_values(trainer).update(criterion=value))
    lr_scheduler = Setting(write=lambda t, one: t.set_lr_scheduler(one), follow=follow_schedule)
    mtm_scheduler = Setting(
        lambda t: t.get_mtm_scheduler(), lambda t, one: t.set_mtm_scheduler(one), follow=follow_schedule
    )
    num_epochs = Setting(lambda t: t.get_num_epochs(), lambda t, n: t.set_num_epochs(n), follow=follow_num_epochs)
    learning_rate = Setting(lambda t: t.get_learning_rate(), lambda t, lr: t.set_learning_rate(lr), follow=follow_rate)
    momentum = Setting(lambda t: t.get_momentum(), lambda t, value: t.set_momentum(value), follow=follow_momentum)
    weight_decay = Setting(lambda t: t.config.weight_decay, follow=follow_weight_decay)
    batch_size = Setting(lambda t: t.config.batch_size, lambda t, n: t.set_batch_size(n), follow=refuse_in_training)
    val_batch_size = Setting(lambda t: t.config.eval_batch_size or t.config.batch_size, follow=refuse_in_training)
    drop_last = Setting(lambda t: t.config.drop_last, follow=refuse_in_training)
    shuffle = Setting(lambda t: t.config.dataloader_shuffle, follow=refuse_in_training)
    num_workers = Setting(lambda t: t.config.num_dataloader_workers, follow=refuse_in_training)
    device = Setting(lambda t: t.runtime.device, follow=refuse_in_training)
    train_dataset = Setting(write=lambda t, data: t.set_train_dataset(data), follow=refuse_in_training)
    val_dataset = Setting(
        lambda t: t.splits.data.get("val"), lambda t, data: t.set_val_dataset(data), follow=refuse_in_training
    )
    test_dataset = Setting(
        lambda t: t.splits.data.get("test"), lambda t, data: t.set_test_dataset(data), follow=refuse_in_training
    )
    train_loader = Setting(lambda t: t._eval_batches("train"), follow=follow_loader)
    val_loader = Setting(lambda t: t._eval_batches("val"), follow=follow_loader)
    test_loader = Setting(lambda t: t._eval_batches("test"), follow=follow_loader)
    cur_epoch = Setting(lambda t: t.get_cur_epoch(), follow=follow_cur_epoch)
    loss_iter = Setting(lambda t: len(or_empty(t.get_loss_history())), follow=follow_loss_iter)
    val_loss_iter = Setting(lambda t: len(or_empty(t.get_val_loss_history())))
    acc_iter = Setting(lambda t: len(or_empty(t.get_acc_history())))
    loss_history = Setting(lambda t: or_empty(t.get_loss_history()))
    val_loss_history = Setting(lambda t: or_empty(t.get_val_loss_history()))
    acc_history = Setting(lambda t: or_empty(t.get_acc_history()))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take a model and the keywords of lernomatic; or a config, a model and what else the plain Trainer takes."""
        has_config = any(isinstance(one, TrainerConfig) for one in (*args, *kwargs.values()))
        if has_config or isinstance(self, PlainMultiModelTrainer):
            set_ready(self, from_config=True)
            with showing(self):
                super().__init__(*args, **kwargs)
            return
        given = _model_alone(type(self).__name__, args, kwargs)
        self._take_keywords(given, kwargs)
        self.train_loader = self.val_loader = self.test_loader = None  # an own _init_dataloaders may set some of them
        self._init_device()
        self._init_optimizer()
        self._init_dataloaders()
        self._init_history()
        self._send_to_device()
        self._settle_saving()
        refuse_or_tell_own_train(type(self), Trainer)
        own_values(self)["loaders_made_of"] = values_for_loaders(self)
        own_values(self)["device_made_of"] = self.device_id
        set_ready(self, from_config=False)

    save_every: int
    epochs_done: int
    """Epochs of the run whose `train_epoch` has returned."""

    def _take_keywords(self, model: Any, kwargs: dict[str, Any]) -> None:
        """Set the attributes that lernomatic's constructor sets, and put aside what is for the parts."""
        fields = {name: kwargs.pop(name) for name in [*kwargs] if name in own_fields()}
        parts = {name: kwargs.pop(name) for name in [*kwargs] if name in OF_PARTS}
        kwargs = {("val_batch_size" if name == "test_batch_size" else name): one for name, one in kwargs.items()}
        refuse_unknown(type(self).__name__, kwargs)
        self.model = model
        for name, default in KEYWORDS.items():
            setattr(self, name, kwargs.get(name, default))
        refuse_schedule("lr_scheduler", self.lr_scheduler)
        refuse_schedule("mtm_scheduler", self.mtm_scheduler)
        own_values(self).update(given=frozenset(kwargs), fields=fields, of_parts=parts)
        self.cur_epoch = self.start_epoch = self.epochs_done = 0
        self.val_batch_size = self.val_batch_size or self.batch_size

    @property
    def test_batch_size(self) -> int:
        """The name that `val_batch_size` had in lernomatic before."""
        return int(self.val_batch_size)

    @test_batch_size.setter
    def test_batch_size(self, value: int) -> None:
        self.val_batch_size = value

    def _settle_saving(self) -> None:
        own_values(self)["saves_each_epoch"] = self.save_every < 0
        self.best_acc = 0.0
        if self.train_loader is not None and self.save_every < 0:
            self.save_every = len(self.train_loader) - 1
        if self.save_every > 0:
            self.save_best = True

    # The steps of the construction, each of which may be overridden.

    def _init_device(self) -> None:
        """Set `device`; from a config, see `ConfigTrainer`."""
        if is_from_config(self):
            super()._init_device()
        else:
            self.device = torch.device("cpu" if self.device_id < 0 else f"cuda:{self.device_id}")

    def _init_optimizer(self) -> None:
        """Set `optimizer`, by `optim_function` over the model, and `criterion`, by `loss_function`."""
        if is_from_config(self):
            super()._init_optimizer()
            return
        self.optimizer = None if self.model is None else self._named_optimizer()
        self.criterion = named_loss(self.loss_function)

    def _named_optimizer(self) -> Optimizer:
        kind = named_optimizer(self.optim_function)
        settings = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        if "momentum" in own_values(self)["given"]:
            if takes(kind, "momentum"):
                settings["momentum"] = self.momentum
            else:
                logger.warning(
                    "momentum=%s changes nothing, as in lernomatic: %s has none", self.momentum, kind.__name__
                )
        made: Optimizer = kind(parameters_of(self.model), **settings)
        return made

    def _init_dataloaders(self) -> None:
        """Set `train_loader`, `val_loader` and `test_loader`, each None without its dataset."""
        if is_from_config(self):
            super()._init_dataloaders()
            return
        shared = {"num_workers": self.num_workers if "num_workers" in own_values(self)["given"] else 0}
        self.train_loader = self._loader(
            self.train_dataset, batch_size=self.batch_size, shuffle=self.shuffle, drop_last=self.drop_last, **shared
        )
        self.val_loader = self._loader(self.val_dataset, batch_size=self.val_batch_size, **shared)
        self.test_loader = self._loader(self.test_dataset, batch_size=self.val_batch_size, **shared)

    def _loader(self, dataset: Any, **settings: Any) -> DataLoader[Any] | None:
        return None if dataset is None else DataLoader(dataset, **settings)

    def _init_history(self) -> None:
        """Set the histories, arrays with room for `num_epochs`, and the number of values in each."""
        if is_from_config(self):
            super()._init_history()
            return
        self.loss_iter = self.val_loss_iter = self.acc_iter = 0
        size, val_size = length_of(self.train_loader), length_of(self.val_loader)
        self.iter_per_epoch = 0 if size is None else int(size / self.num_epochs)
        self.loss_history = None if size is None else np.zeros(size * self.num_epochs)
        self.val_loss_history = None if val_size is None else np.zeros(val_size * self.num_epochs)
        self.acc_history = None if val_size is None else np.zeros(val_size * self.num_epochs)

    def _send_to_device(self) -> None:
        """Bring the model to the device."""
        if is_from_config(self):
            super()._send_to_device()
        elif self.model is not None:
            self.model.to(self.device)

    # The parts, made of the attributes.

    def __getattr__(self, name: str) -> Any:
        """Make the parts when one of them is first asked for."""
        is_part = name in PlainTrainer.__annotations__ and not isinstance(getattr(type(self), name, None), Setting)
        if is_part and is_ready(self) and not vars(self).get("_is_making"):
            self._make()
            return getattr(self, name)
        return super().__getattr__(name)

    def make_parts(self, given: Given) -> Parts:
        """Make the parts, whose rows also go to `tb_writer`."""
        if is_from_config(self):
            return super().make_parts(given)
        verbs = dataclasses.replace(given.verbs, build_writers=partial(all_writers, self))
        return PlainTrainer.make_parts(self, dataclasses.replace(given, verbs=verbs))

    def reconfigure(self, config: TrainerConfig | None = None, splits: Splits | None = None) -> None:
        with showing(self):
            super().reconfigure(config, splits)

    def reschedule(self, config: TrainerConfig | None = None, lr_scheduler: Any = None) -> None:
        with showing(self):
            super().reschedule(config, lr_scheduler)

    def _make(self) -> None:
        """Make the parts of what the attributes say, or let them follow it."""
        self._renew()
        material = material_of(self)
        made_of = vars(self).get("_made_of")
        if made_of is not None and len(made_of) == len(material) and all(map(operator.is_, made_of, material)):
            self._follow()
            return
        vars(self)["_is_making"] = True
        try:
            self._build()
        finally:
            vars(self)["_is_making"] = False
        vars(self)["_made_of"] = material

    def _renew(self) -> None:
        """Make anew what was made of attributes that have changed since."""
        own = own_values(self)
        if own["device_made_of"] != self.device_id:
            own["device_made_of"] = self.device_id
            self._init_device()
            self._send_to_device()
        if any(map(operator.is_not, own["loaders_made_of"], values_for_loaders(self))):
            self._init_dataloaders()
        make_room(self)

    def _build(self) -> None:
        """Make the parts of a run that begins at `cur_epoch`; what an earlier one has left is dropped."""
        own = own_values(self)
        for name in vars(self).pop("_of_last_build", ()):
            vars(self).pop(name, None)
        vars(self).pop("_shown_values", None)
        vars(self)["_first_epoch"] = self.cur_epoch
        vars(self)["nets"] = {name: one for name, one in nets_of(self).items() if name != "model"}
        scheduler, before = self.lr_scheduler, {*vars(self), "_shown_values", "_is_showing"}
        with showing(self):
            PlainTrainer.__init__(
                self, run_config(self), whole_model(self), Splits(splits_of(self), evaluation_data(self)),
                optimizer=optimizers_of(self)[0],
                lr_scheduler=scheduler if isinstance(scheduler, LRScheduler) else None, **own["of_parts"],
            )  # fmt: skip
        vars(self)["_of_last_build"] = set(vars(self)) - before
        self.register_hooks([Keeper(self, {*KEYWORDS, "cur_epoch", "start_epoch"})])
        for name, one in kept_attributes(self, self.optimizer).items():
            self.register_for_checkpointing(f"attribute.{name}", one)
        self._note_epoch()
        watch_steps(self)

    def _follow(self) -> None:
        """Let the parts follow attributes that have changed."""
        wanted = run_config(self)
        wanted.update(learning_rate=self.config.learning_rate, weight_decay=self.config.weight_decay)
        is_other = any(map(operator.is_not, splits_of(self).values(), self.splits.data.values()))
        splits = Splits(splits_of(self), evaluation_data(self)) if is_other else None
        if splits is not None or wanted != self.config:
            self.reconfigure(wanted, splits)

    def _note_epoch(self) -> None:
        own_values(self)["cur_epoch"] = vars(self)["_first_epoch"] + self.state.epoch - (not self.state.epoch_finished)

    # Training and validation.

    def train(self, *args: Any, **kwargs: Any) -> RoutineResult:
        """Train from `cur_epoch` to `num_epochs`, or from where a checkpoint was saved."""
        if is_from_config(self):
            return super().train(*args, **kwargs)
        if vars(self).get("_made_of") is None and self.cur_epoch >= self.num_epochs:
            logger.info("already trained: cur_epoch=%d of num_epochs=%d", self.cur_epoch, self.num_epochs)
            return RoutineResult(0, {}, self.get_model_params)
        if self.train_loader is None:
            raise DataError(
                f"{type(self).__name__} has nothing to train on: pass train_dataset, or set self.train_loader in "
                "_init_dataloaders()."
            )
        self._make()
        try:
            return super().train(*args, **kwargs)
        finally:
            self._note_epoch()

    def find_lr(self, *args: Any, **kwargs: Any) -> LRFinderResult:
        """Sweep as the plain Trainer does: with the model and the criterion, whatever `train_epoch` does."""
        if not is_from_config(self):
            self._make()
        vars(self)["_is_sweeping"] = True
        try:
            return super().find_lr(*args, **kwargs)
        finally:
            vars(self)["_is_sweeping"] = False

    def inner_training_loop(self, epoch_num: int) -> Mapping[str, float]:
        if is_from_config(self):
            return super().inner_training_loop(epoch_num)
        if vars(self).get("_is_sweeping"):
            return self.parts.loop.run_epoch(epoch_num)
        if self.epochs_done < epoch_num - 1:  # killed after its last step: what follows the loop is still to be done
            self._run_body(epoch_num - 1, ())
        with self.parts.loop.epoch_batches(epoch_num) as batches:
            self._run_body(epoch_num, batches)
        return {"loss": self.state.loss_tracker_avg}

    def _run_body(self, epoch_num: int, batches: Any) -> None:
        """Run `train_epoch` over batches of an epoch."""
        own = own_values(self)
        own["cur_epoch"] = vars(self)["_first_epoch"] + epoch_num - 1
        loader = own["train_loader"]
        own["train_loader"] = walked = EpochLoader(batches, loader, vars(self))
        try:
            self.train_epoch()
        finally:
            own["train_loader"] = loader
        if not walked.is_begun:
            raise DataError(
                f"train_epoch() of {type(self).__name__} did not go over self.train_loader, so that nothing of the run "
                "was counted. Go over it there, or override train() to go your own way."
            )
        self.epochs_done = epoch_num
        if not self.evaluates:
            self._keep_history()

    def _keep_history(self) -> None:
        """Write the history of an epoch, of its validation too, where lernomatic does."""
        if self.save_hist and self.runtime.is_main:
            self.save_history(str(path_of(self, after="_history.pkl")))

    def train_epoch(self) -> None:
        """Step through the batches of the epoch; note each loss, and apply the schedules."""
        if is_from_config(self):
            super().train_epoch()
            return
        self.model.train()
        for batch in self.train_loader:
            loss = self._step_loss() if trains_now(self) else self._lone_step(batch)
            if self.loss_history is not None:
                self.loss_history[self.loss_iter] = loss
            self.loss_iter += 1
            self.apply_lr_schedule()
            self.apply_mtm_schedule()

    def _step_loss(self) -> float:
        outputs, step = self.run_step(), self.ctx.step
        if not step.is_loss_noted:
            self.note_loss(outputs["loss"] if isinstance(outputs, Mapping) else outputs)
        return float(outputs["loss"] if step.loss_value is None else step.loss_value)

    def _lone_step(self, batch: Any) -> float:
        """Do a step outside of a run, for a `train()` of the user's own."""
        *inputs, labels = (one.to(self.device) for one in batch)
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(*inputs), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss)

    def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor:
        """Return what `criterion` says of the model's outputs and the labels."""
        criterion = own_values(self).get("criterion")
        if criterion is None or "logits" not in model_outputs:
            return super().compute_loss(model_outputs, labels, **kwargs)
        found: torch.Tensor = criterion(model_outputs["logits"], labels)
        return found

    def evaluate_while_training(self) -> dict[str, float]:
        """Run `val_epoch` and, where there is a `test_loader`, `test_epoch`; read the histories that they write."""
        if is_from_config(self):
            return super().evaluate_while_training()
        noted = (self.val_loss_iter, self.acc_iter) if self.val_loader is not None else None
        found = dict(self.val_epoch() or {}) if noted is not None else {}
        found = (noted_metrics(self, *noted) if noted is not None else {}) | found
        if self.test_loader is not None:
            found |= {f"test.{name}": value for name, value in (self.test_epoch() or {}).items()}
        self._keep_history()
        self._stop_if_due(found.get("accuracy"))
        if found and self.best_key not in {f"evaluation.{name}" for name in found}:
            for name, value in found.items():
                self.storage.put_scalar(f"evaluation.{name}", value)
            return {}
        return found

    def _stop_if_due(self, accuracy: float | None) -> None:
        """Ask to stop where `stop_when_acc` is reached, or where `early_stop` sees too little progress."""
        if accuracy is None:
            return
        if self.stop_when_acc > 0.0 and accuracy >= self.stop_when_acc:
            self.request_stop(f"accuracy {accuracy:.4f} has reached stop_when_acc={self.stop_when_acc}")
        if self.early_stop is None or self.acc_iter <= (back := self.early_stop["num_epochs"]):
            return
        gain = accuracy - float(self.acc_history[self.acc_iter - 1 - back])
        if gain < self.early_stop["improv"]:
            self.request_stop(f"accuracy has gained {gain:.4f} in {back} epochs, less than early_stop asks for")

    def val_epoch(self) -> dict[str, float] | None:
        """Measure loss and accuracy over `val_loader`, and note them; an override may note, return or do nothing."""
        if is_from_config(self):
            return super().val_epoch()
        losses, found = self._measured(self.val_loader)
        for loss in losses:
            if self.val_loss_history is not None:
                self.val_loss_history[self.val_loss_iter] = loss
            self.val_loss_iter += 1
        if (accuracy := found.get("accuracy")) is not None:
            self.acc_history[self.acc_iter] = accuracy
            self.acc_iter += 1
            self._note_best(accuracy)
        return found

    def _note_best(self, accuracy: float) -> None:
        if accuracy > self.best_acc:
            self.best_acc = accuracy
            if self.save_best and "save_best" in own_values(self)["given"] and self.runtime.is_main:
                self.save_checkpoint(str(path_of(self, before="best_", after=".pkl")))

    def test_epoch(self) -> dict[str, float] | None:
        """Measure loss and accuracy over `test_loader`."""
        return super().test_epoch() if is_from_config(self) else self._measured(self.test_loader)[1]

    def _measured(self, loader: Any) -> tuple[list[float], dict[str, float]]:
        """Return the loss of each batch, and the means over all samples."""
        self.model.eval()
        losses, total, hits, count = [], 0.0, 0, 0
        with torch.no_grad():
            for *inputs, labels in loader:
                outputs = self.model(*(one.to(self.device) for one in inputs))
                wanted = labels.to(self.device)
                losses.append(float(self.criterion(outputs, wanted)))
                total += losses[-1] * len(wanted)
                count += len(wanted)
                hits += int((outputs.argmax(1) == wanted).sum()) if isinstance(self.criterion, CLASSIFIES) else 0
        found = {"loss": total / max(count, 1)}
        return losses, found | ({"accuracy": hits / max(count, 1)} if isinstance(self.criterion, CLASSIFIES) else {})

    # Schedules.

    def apply_lr_schedule(self) -> None:
        """Ask the schedule object for the rate and set it; a schedule by name ticks by itself."""
        if (rate := self._asked(self.lr_scheduler, "lr")) is not None:
            self.set_learning_rate(rate)

    def apply_mtm_schedule(self) -> None:
        """Ask the momentum's schedule object and set what it says."""
        if (momentum := self._asked(self.mtm_scheduler, "mtm")) is not None:
            self.set_momentum(momentum)

    def _asked(self, schedule: Any, kind: str) -> float | None:
        if not is_schedule(schedule):
            return None
        value = rate_of(schedule, cur_iter=self.loss_iter, cur_epoch=self.cur_epoch, cur_acc=self.get_cur_acc())
        if self.tb_writer is not None:
            self.tb_writer.add_scalar(f"schedule/{kind}_{schedule!r}", value, self.loss_iter)
        return value

    # Getters and setters.

    def get_num_epochs(self) -> int:
        return super().get_num_epochs() if is_from_config(self) else self.num_epochs

    def set_num_epochs(self, num_epochs: int) -> None:
        if is_from_config(self):
            super().set_num_epochs(num_epochs)
        else:
            self.num_epochs = num_epochs

    def get_cur_epoch(self) -> int:
        return super().get_cur_epoch() if is_from_config(self) else self.cur_epoch

    def set_learning_rate(self, lr: float, param_zero: bool | None = None) -> None:
        """Set the rate of the first group; with `param_zero=False` (from a config the default), of all."""
        if is_from_config(self):
            super().set_learning_rate(lr, bool(param_zero))
        else:
            set_learning_rate(self._optimizer(), lr, None if param_zero is False else 0)

    def get_learning_rate(self) -> float:
        return super().get_learning_rate() if is_from_config(self) else float(self._optimizer().param_groups[0]["lr"])

    def get_momentum(self) -> float | None:
        return super().get_momentum() if is_from_config(self) else get_momentum(self._optimizer())

    def set_momentum(self, momentum: float) -> None:
        if is_from_config(self):
            super().set_momentum(momentum)
        else:
            set_momentum(self._optimizer(), momentum)

    def _optimizer(self) -> Optimizer:
        if (found := own_values(self).get("optimizer")) is None:
            raise ConfigError(
                f"{type(self).__name__} has no self.optimizer, whose settings are asked for. It has "
                f"{choices(own_optimizers(self)) or 'none'}: read or set their param_groups, or override this method."
            )
        return found  # type: ignore[no-any-return]

    def get_lr_scheduler(self) -> Any:
        return super().get_lr_scheduler() if is_from_config(self) else self.lr_scheduler

    def set_lr_scheduler(self, lr_scheduler: Any, **settings: Any) -> None:
        """Follow another schedule: an object of lernomatic's form, or a name with its settings, or one of torch."""
        if is_from_config(self):
            super().set_lr_scheduler(lr_scheduler, **settings)
            return
        self.lr_scheduler = lr_scheduler
        own_values(self)["fields"]["lr_scheduler_kwargs"] = settings or None

    def get_mtm_scheduler(self) -> Any:
        return super().get_mtm_scheduler() if is_from_config(self) else self.mtm_scheduler

    def set_mtm_scheduler(self, mtm_scheduler: Any, **settings: Any) -> None:
        """Let the momentum follow another schedule: an object of lernomatic's form, or a name with its settings."""
        if is_from_config(self):
            super().set_mtm_scheduler(mtm_scheduler, **settings)
            return
        self.mtm_scheduler = mtm_scheduler
        own_values(self)["fields"]["momentum_scheduler_kwargs"] = settings or None

    def set_batch_size(self, batch_size: int) -> None:
        if is_from_config(self):
            super().set_batch_size(batch_size)
        else:
            self._set_for_loaders("batch_size", batch_size)

    def set_train_dataset(self, dataset: Any) -> None:
        if is_from_config(self):
            super().set_train_dataset(dataset)
        else:
            self._set_for_loaders("train_dataset", dataset)

    def set_val_dataset(self, dataset: Any) -> None:
        if is_from_config(self):
            super().set_val_dataset(dataset)
        else:
            self._set_for_loaders("val_dataset", dataset)

    def set_test_dataset(self, dataset: Any) -> None:
        if is_from_config(self):
            super().set_test_dataset(dataset)
        else:
            self._set_for_loaders("test_dataset", dataset)

    def _set_for_loaders(self, name: str, value: Any) -> None:
        setattr(self, name, value)
        self._init_dataloaders()

    def get_model(self) -> Any:
        """Return the model as it was passed."""
        if is_from_config(self):
            return super().get_model()
        return vars(self.model)["wrapped"] if isinstance(self.model, WrappedModel) else self.model

    def get_model_params(self) -> dict[str, Any]:
        """Return the model's weights by name: the live tensors, no copies."""
        if is_from_config(self) or self.model is None:
            return {} if self.model is None else super().get_model_params()
        net = self.model.net if isinstance(self.model, WrappedModel) else self.model
        return net.state_dict()  # type: ignore[no-any-return]

    def get_trainer_params(self) -> dict[str, Any]:
        """Return the settings that lernomatic's checkpoints hold; from a config, every field of it."""
        if is_from_config(self):
            return super().get_trainer_params()
        return {name: getattr(self, name, None) for name in PARAMS}

    def set_trainer_params(self, params: Mapping[str, Any]) -> None:
        """Take such settings over, and make device and loaders anew."""
        if is_from_config(self):
            super().set_trainer_params(params)
            return
        for name in PARAMS:
            if name in params:
                setattr(self, name, params[name])
        self._init_device()
        self._init_dataloaders()

    # Checkpoints and histories.

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Write a folder that brings a run back whole; lernomatic's file at a path that ends in .pkl, .pt or .pth.

        In the middle of an epoch, where a folder could not bring it back, lernomatic's file at any path.
        """
        is_learning = not is_from_config(self) and self.parts.loop.current is not None
        if not is_file(path) and not is_learning:
            return super().save_checkpoint(path)
        return write_file(path, {
            "model": params_of(self.get_model()), "optim": self._optimizer_for_file().state_dict(),
            "trainer_params": self.get_trainer_params(),
        })  # fmt: skip

    def _optimizer_for_file(self) -> Optimizer:
        return self.optimizer if is_from_config(self) else self._optimizer()

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go to where a checkpoint was saved; from a file of lernomatic, to the beginning of its epoch."""
        if not is_file(path) or is_from_config(self):
            super().load_checkpoint(path)
            return
        found = read_file(path)
        self.set_trainer_params(found["trainer_params"])
        self._load_model(found["model"])
        self._init_optimizer()
        load_state(self._optimizer(), found["optim"], "the optimizer")
        self._send_to_device()

    def load_model_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint alone."""
        if not is_file(path) or is_from_config(self):
            super().load_model_checkpoint(path)
            return
        self._load_model(read_file(path)["model"])
        self._send_to_device()

    def _load_model(self, params: Mapping[str, Any]) -> None:
        """Load weights into the model that is there, or into one of the class that they are of."""
        if self.model is None:
            self.model = find_class(params["model_import_path"], params["model_name"])()
        model = self.get_model()
        if hasattr(model, "set_params"):
            model.set_params(params)
            self.model = model
        else:
            model.load_state_dict(params["model_state_dict"])

    def get_loss_history(self) -> Any:
        return super().get_loss_history() if is_from_config(self) else self._noted("loss_history", "loss_iter")

    def get_val_loss_history(self) -> Any:
        if is_from_config(self):
            return super().get_val_loss_history()
        return self._noted("val_loss_history", "val_loss_iter")

    def get_acc_history(self) -> Any:
        return super().get_acc_history() if is_from_config(self) else self._noted("acc_history", "acc_iter")

    def _noted(self, history: str, counter: str) -> Any:
        values, count = getattr(self, history, None), getattr(self, counter, 0)
        return None if values is None or count == 0 else values[:count]

    def get_cur_loss(self) -> float:
        return super().get_cur_loss() if is_from_config(self) else _last(self.get_loss_history())

    def get_cur_val_loss(self) -> float:
        return super().get_cur_val_loss() if is_from_config(self) else _last(self.get_val_loss_history())

    def get_cur_acc(self) -> float:
        return super().get_cur_acc() if is_from_config(self) else _last(self.get_acc_history())

    def get_cur_epoch_loss(self) -> Any:
        if is_from_config(self):
            return super().get_cur_epoch_loss()
        return _tail(self.get_loss_history(), length_of(self.train_loader))

    def get_cur_epoch_val_loss(self) -> Any:
        if is_from_config(self):
            return super().get_cur_epoch_val_loss()
        return _tail(self.get_val_loss_history(), length_of(self.val_loader))

    def save_history(self, path: str | os.PathLike[str]) -> Path:
        """Write the histories: at a path that ends in .pkl, .pt or .pth as lernomatic does, else as JSON."""
        if is_from_config(self) or not is_file(path):
            return super().save_history(path)
        return write_file(path, histories(self) | {name: getattr(self, name, 0) for name in HISTORY_COUNTERS})

    def load_history(self, path: str | os.PathLike[str]) -> None:
        """Read histories that were saved; what is noted from now on follows them."""
        if is_from_config(self) or not is_file(path):
            super().load_history(path)
            return
        found = read_file(path)
        if strange := [name for name in found if not (str(name).endswith("_history") or name in HISTORY_COUNTERS)]:
            raise CheckpointError(f"{os.fspath(path)} holds {strange[0]!r}; expected histories and their counters")
        put_plain(
            self,
            {name: one.numpy() if isinstance(one, torch.Tensor) else one for name, one in found.items()},
            own_values(self),
        )

    def __repr__(self) -> str:
        return super().__repr__() if is_from_config(self) else f"{type(self).__name__} ({self.num_epochs} epochs)"

    def __str__(self) -> str:
        if is_from_config(self):
            return super().__str__()
        params = self.get_trainer_params().items()
        return "".join([f"{type(self).__name__} :\n", *(f"\t [{name}] : {value}\n" for name, value in params)])


class MultiModelTrainer(Trainer, PlainMultiModelTrainer):  # type: ignore[misc]
    """Train several models in one run, each with its own optimizer, from a config; under the same names."""


def _model_alone(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model, which is all that is given without its name."""
    if len(args) > 1 or (args and "model" in kwargs):
        raise ConfigError(
            f"{kind}() was given {len(args)} values without names; expected the model alone, and lernomatic's keywords "
            "(train_dataset=..., num_epochs=...); or a TrainerConfig among them."
        )
    return args[0] if args else kwargs.pop("model", None)


def _last(values: Any) -> float:
    return 0.0 if values is None else float(values[-1])


def _tail(values: Any, count: int | None) -> Any:
    return None if values is None or not count else values[-count:]

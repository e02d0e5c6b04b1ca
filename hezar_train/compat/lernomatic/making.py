"""From lernomatic's attributes to a run: the config, the model, the optimizers and the data that they stand for.

Also what happens when an attribute is assigned (`follow_*`), and the loader that an overridden `train_epoch` goes over.
All functions take the trainer, whose attributes they read.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hezar_train.compat.lernomatic.attributes import own_values
from hezar_train.compat.lernomatic.keeping import histories
from hezar_train.compat.lernomatic.models import WrappedModel, is_wrapper, module_of
from hezar_train.compat.lernomatic.schedule import is_schedule
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError, HookError, choices, suggestion
from hezar_train.loop import share_of
from hezar_train.optim import get_momentum, set_learning_rate, set_momentum
from hezar_train.runtime import logger
from hezar_train.types import TaskType

__all__ = [
    "CLASSIFIES",
    "KEYWORDS",
    "OF_LOADERS",
    "OF_PARTS",
    "EpochLoader",
    "as_model",
    "evaluation_data",
    "follow_cur_epoch",
    "follow_loader",
    "follow_loss_iter",
    "follow_momentum",
    "follow_num_epochs",
    "follow_rate",
    "follow_schedule",
    "follow_weight_decay",
    "grow_histories",
    "length_of",
    "make_room",
    "material_of",
    "named_loss",
    "named_optimizer",
    "nets_of",
    "noted_metrics",
    "optimizers_of",
    "or_empty",
    "own_fields",
    "own_optimizers",
    "path_of",
    "refuse_in_training",
    "refuse_or_tell_own_train",
    "refuse_schedule",
    "refuse_unknown",
    "renewed",
    "run_config",
    "splits_of",
    "takes",
    "trains_now",
    "values_for_loaders",
    "watch_steps",
    "whole_model",
]

KEYWORDS: dict[str, Any] = {
    "num_epochs": 10, "learning_rate": 1e-4, "momentum": 0.5, "weight_decay": 1e-5,
    "loss_function": "CrossEntropyLoss", "optim_function": "Adam", "checkpoint_dir": "checkpoint",
    "checkpoint_name": "ck", "save_hist": True, "verbose": True, "print_every": 10, "save_every": -1,
    "save_best": False, "device_id": -1, "device_map": None, "batch_size": 64, "val_batch_size": 0,
    "train_dataset": None, "test_dataset": None, "val_dataset": None, "shuffle": True, "num_workers": 1,
    "drop_last": True, "lr_scheduler": None, "mtm_scheduler": None, "stop_when_acc": 0.0, "early_stop": None,
    "tb_writer": None,
}  # fmt: skip
"""The keywords of lernomatic's constructor, with their defaults."""

OF_PARTS = frozenset({"accelerator", "data_collator", "hooks", "metrics_handler", "preprocessor"})
"""What the plain Trainer takes beside a config, as keywords."""

OF_LOADERS = ("batch_size", "val_batch_size", "shuffle", "num_workers", "drop_last", "train_dataset", "val_dataset",
              "test_dataset")  # fmt: skip
"""What the loaders are made of."""

NOT_OF_TRAINING = ("val_", "test_", "train_val_")
EQUAL = 1e-6
CLASSIFIES = (nn.CrossEntropyLoss, nn.NLLLoss)


def trains_now(trainer: Any) -> bool:
    """Tell whether a learning routine is under way."""
    parts = vars(trainer).get("parts")
    return parts is not None and parts.loop.current is not None


def refuse_in_training(trainer: Any, _: Any = None, __: Any = None) -> None:
    """Raise if an attribute is assigned that the run under way would not look at again."""
    if trains_now(trainer):
        raise HookError(
            "an attribute that the run is made of was assigned in the middle of training, where it would change "
            "nothing: assign it between two calls of train()."
        )


def follow_num_epochs(trainer: Any, old: int, new: int) -> None:
    """Make room in the histories for more epochs."""
    refuse_in_training(trainer)
    if new > old and histories(trainer):
        grow_histories(trainer, new)


def follow_rate(trainer: Any, _: Any, new: float) -> None:
    """Give the optimizer the rate."""
    if (optimizer := own_values(trainer).get("optimizer")) is not None:
        set_learning_rate(optimizer, new)


def follow_momentum(trainer: Any, _: Any, new: float) -> None:
    """Give the optimizer the momentum, if it has one of its own."""
    optimizer = own_values(trainer).get("optimizer")
    if optimizer is not None and "momentum" in optimizer.param_groups[0] and get_momentum(optimizer) is not None:
        set_momentum(optimizer, new)


def follow_weight_decay(trainer: Any, _: Any, new: float) -> None:
    """Give the optimizer the weight decay."""
    optimizer = own_values(trainer).get("optimizer")
    for group in () if optimizer is None else optimizer.param_groups:
        group["weight_decay"] = new


def follow_loader(trainer: Any, _: Any, __: Any) -> None:
    """Note what a loader is made of: when that changes, all of them are made anew."""
    refuse_in_training(trainer)
    own_values(trainer)["loaders_made_of"] = values_for_loaders(trainer)


def follow_cur_epoch(trainer: Any, old: int, new: int) -> None:
    """Let the next call of train() begin another run, at that epoch."""
    refuse_in_training(trainer)
    if new != old:
        vars(trainer)["_made_of"] = None


def follow_loss_iter(trainer: Any, old: int, new: int) -> None:
    """Take the losses that a step has written to the histories for those of the step."""
    if new != old + 1 or not trains_now(trainer) or trainer.ctx.step.is_loss_noted:
        return
    written = {
        name.removesuffix("_history"): float(values[old])
        for name, values in histories(trainer).items()
        if name.endswith("loss_history") and not name.startswith(NOT_OF_TRAINING) and len(values) > old
    }
    if not written:
        return
    _share_losses(trainer, old, written)
    trainer.note_loss(torch.tensor(sum(written.values()), dtype=torch.float64))
    for name, value in written.items() if len(written) > 1 else ():
        trainer.storage.put_scalar(f"train.{name}", value)


def _share_losses(trainer: Any, number: int, written: Mapping[str, float]) -> None:
    """Where several processes train, write the loss over all of them to the histories."""
    if trainer.runtime.num_processes == 1:
        return
    share = share_of(trainer.ctx.step.window, trainer.ctx.step.batch_in_window)
    totals = trainer.runtime.processes.sum([value * share for value in written.values()])
    for name, total in zip(written, totals, strict=True):
        getattr(trainer, f"{name}_history")[number] = total


def follow_schedule(trainer: Any, _: Any, new: Any) -> None:
    """Check a schedule that is assigned; one that the parts tick takes the place of theirs."""
    refuse_schedule("a schedule", new)
    refuse_warmup(own_values(trainer).get("fields", {}), new)
    if isinstance(new, str | LRScheduler):
        refuse_in_training(trainer)
        vars(trainer)["_made_of"] = None


def refuse_schedule(name: str, given: Any) -> None:
    """Raise if something is no schedule."""
    if given is not None and not isinstance(given, str | LRScheduler) and not is_schedule(given):
        raise ConfigError(
            f"{name} is a {type(given).__name__}; expected an object with get_lr(iteration), such as those of "
            "hezar_train.compat.lernomatic.schedule, the name of a schedule, or a scheduler of torch."
        )


def refuse_warmup(fields: Mapping[str, Any], schedule: Any) -> None:
    """Raise if a schedule object sets the rate itself, and would undo the warm-up that was asked for."""
    if fields.get("warmup_steps") and is_schedule(schedule):
        raise ConfigError(
            f"warmup_steps={fields['warmup_steps']!r} would have no effect: {type(schedule).__name__} sets the rate of "
            "each batch itself. Leave it out; or name a schedule, such as lr_scheduler='triangular'."
        )


def grow_histories(trainer: Any, num_epochs: int) -> None:
    """Make the histories anew, with room for so many epochs, and keep what is in them."""
    own, kept = own_values(trainer), {name: values.copy() for name, values in histories(trainer).items()}
    counters = {name: value for name, value in {**vars(trainer), **own}.items() if name.endswith("_iter")}
    own["num_epochs"] = num_epochs
    trainer._init_history()
    for name, values in kept.items():
        now = getattr(trainer, name, None)
        if isinstance(now, np.ndarray) and len(now) >= len(values):
            now[: len(values)] = values
    for name, value in counters.items():
        setattr(trainer, name, value)


def make_room(trainer: Any) -> None:
    """Give the histories of the training room for the epochs that are left."""
    size = length_of(own_values(trainer).get("train_loader")) or 0
    before = getattr(trainer, "loss_iter", 0) - _steps_of_open_epoch(trainer)
    needed = before + size * max(0, trainer.num_epochs - trainer.cur_epoch)
    for name, values in histories(trainer).items():
        if name.endswith("loss_history") and not name.startswith(NOT_OF_TRAINING) and len(values) < needed:
            setattr(trainer, name, np.concatenate([values, np.zeros(needed - len(values))]))


def _steps_of_open_epoch(trainer: Any) -> int:
    """Return how many steps of an epoch are done that the next call of train() goes on with."""
    is_made = vars(trainer).get("_made_of") is not None
    return trainer.state.epoch_step if is_made and not trainer.state.epoch_finished else 0


def noted_metrics(trainer: Any, val_losses: int, accuracies: int) -> dict[str, float]:
    """Return what an evaluation has written to the histories, that had so many values before."""
    losses, found = trainer.get_val_loss_history(), {}
    if losses is not None and len(losses) > val_losses:
        found["loss"] = float(np.mean(losses[val_losses:]))
    if (noted := trainer.get_acc_history()) is not None and len(noted) > accuracies:
        found["accuracy"] = float(noted[-1])
    return found


def as_model(given: Any) -> Any:
    """Return a wrapper as a module, and anything else as it is."""
    return module_of(given) if is_wrapper(given) else given


def renewed(model: Any) -> Any:
    """Return a model whose wrapper may have made itself another module, with that one."""
    return model.renewed() if isinstance(model, WrappedModel) else model


def nets_of(trainer: Any) -> dict[str, nn.Module]:
    """Return the modules with parameters that a trainer has as attributes, bare or wrapped, by name."""
    found = {**vars(trainer), "model": renewed(own_values(trainer).get("model"))}
    nets = {
        name: one.net if is_wrapper(one) or isinstance(one, WrappedModel) else one
        for name, one in found.items()
        if not name.startswith("_")
    }
    modules = {name: one for name, one in nets.items() if isinstance(one, nn.Module)}
    return {name: one for name, one in modules.items() if next(one.parameters(), None) is not None}


def whole_model(trainer: Any) -> nn.Module:
    """Return what is trained as one module: `model`, or else all that the trainer has as attributes."""
    if (model := renewed(own_values(trainer).get("model"))) is not None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module or a LernomaticModel")
        return model
    if not (nets := nets_of(trainer)):
        raise ConfigError(
            f"{type(trainer).__name__} has no model: pass one, keep its modules as attributes, or load a checkpoint"
        )
    return nn.ModuleDict(nets)


def own_optimizers(trainer: Any) -> dict[str, Optimizer]:
    """Return the optimizers that a trainer has as attributes, `optimizer` first."""
    found = {"optimizer": own_values(trainer).get("optimizer"), **vars(trainer)}
    return {name: one for name, one in found.items() if isinstance(one, Optimizer)}


def optimizers_of(trainer: Any) -> list[Optimizer]:
    """Return a trainer's optimizers; the parts save the first as theirs, and the others beside it."""
    if not (found := list(own_optimizers(trainer).values())):
        raise ConfigError(f"{type(trainer).__name__} has no optimizer: set self.optimizer in _init_optimizer()")
    return found


def material_of(trainer: Any) -> list[Any]:
    """Return the objects that a run is made of: other ones are another run."""
    return [*nets_of(trainer).values(), *own_optimizers(trainer).values()]


def splits_of(trainer: Any) -> dict[str, Any]:
    """Return the loaders by split."""
    own = own_values(trainer)
    found = {split: own.get(f"{split}_loader") for split in ("train", "val", "test")}
    for split, loader in found.items():
        if loader is not None and not isinstance(loader, DataLoader):
            raise DataError(
                f"{split}_loader is a {type(loader).__name__}; expected a torch.utils.data.DataLoader, whose place can "
                "be kept. Make one of its dataset in _init_dataloaders()."
            )
    return {split: loader for split, loader in found.items() if loader is not None}


def evaluation_data(trainer: Any) -> Any:
    """Return what a run evaluates on; None: it does not."""
    found = splits_of(trainer)
    return found.get("val", found.get("test"))


def path_of(trainer: Any, before: str = "", after: str = "") -> Path:
    """Return where something of a trainer is saved: `checkpoint_name` in `checkpoint_dir`; None is the default."""
    given = {name: getattr(trainer, name) for name in ("checkpoint_dir", "checkpoint_name")}
    folder, name = (KEYWORDS[name] if one is None else one for name, one in given.items())
    return Path(folder) / f"{before}{name}{after}"


def run_config(trainer: Any) -> TrainerConfig:
    """Return the config that the attributes stand for, with the fields that were given beside them."""
    own = own_values(trainer)
    refuse_warmup(own["fields"], trainer.lr_scheduler)
    schedules = {name: value for name, value in (("lr_scheduler", trainer.lr_scheduler),
                 ("momentum_scheduler", trainer.mtm_scheduler)) if isinstance(value, str)}  # fmt: skip
    classifies = isinstance(own.get("criterion"), CLASSIFIES)
    is_default = type(trainer).val_epoch.__module__.startswith(str(__package__))
    settings = {
        "output_dir": path_of(trainer),
        "num_epochs": trainer.num_epochs - vars(trainer)["_first_epoch"],
        "batch_size": trainer.batch_size,
        "eval_batch_size": trainer.val_batch_size or None,
        "learning_rate": trainer.learning_rate,
        "weight_decay": trainer.weight_decay,
        "device": str(trainer.device),
        "save_enabled": trainer.save_every != 0 or own["saves_each_epoch"],
        "save_steps": _save_steps(trainer),
        "log_steps": trainer.print_every if trainer.print_every > 0 else None,
        "task": TaskType.IMAGE_CLASSIFICATION if classifies else None,  # whose metric is the accuracy
        "metric_for_best_model": "accuracy" if classifies and is_default and evaluation_data(trainer) else "loss",
    }
    return TrainerConfig(**settings | schedules | own["fields"])


def _save_steps(trainer: Any) -> int | None:
    size = length_of(own_values(trainer).get("train_loader"))
    if own_values(trainer)["saves_each_epoch"] and trainer.save_every in (-1, None if size is None else size - 1):
        return None
    return trainer.save_every if trainer.save_every > 0 else None


def values_for_loaders(trainer: Any) -> list[Any]:
    """Return what the loaders are made of."""
    return [own_values(trainer).get(name) for name in OF_LOADERS]


def own_fields() -> set[str]:
    """Return the fields of a config that lernomatic has no keyword for."""
    return set(TrainerConfig.fields()) - set(KEYWORDS) - {"optimizer", "criterion", "device"}


def refuse_unknown(kind: str, given: Mapping[str, Any]) -> None:
    """Raise if a keyword is neither lernomatic's nor ours, or says something that nobody would look at."""
    known = [*KEYWORDS, "test_batch_size", *own_fields(), *OF_PARTS]
    for name, value in given.items():
        if name not in known:
            there = f"{suggestion(name, known)} It has: {choices(KEYWORDS)}, and the fields of TrainerConfig"
            raise ConfigError(f"{name}={value!r} is no keyword of {kind}().{there}.")
    if given.get("device_map") is not None:
        raise ConfigError(
            f"device_map={given['device_map']!r}: nothing reads it. Say the device with device_id, or set self.device "
            "in _init_device()."
        )


def refuse_or_tell_own_train(kind: type, base: type) -> None:
    """Say what a `train()` of the user's own does without; refuse it on several processes, which would drift apart."""
    own: Any = vars(kind).get("train") or kind.train  # type: ignore[attr-defined]
    if own is getattr(base, "train", None) or "super" in own.__code__.co_names:
        return
    without = f"{kind.__name__}.train() goes its own way, so that the run has no folder, no log and no exact resume"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(f"{without}, and its processes would drift apart. Leave it out, or call super().train().")
    logger.warning("%s. Leave it out, or call super().train(), to have them.", without)


def watch_steps(trainer: Any) -> None:
    """Let every optimizer of a trainer raise before a step that would be wrong, and join gradients before its steps."""
    found, watched = optimizers_of(trainer), vars(trainer).setdefault("_watched", WeakSet())
    for optimizer in found:
        if optimizer not in watched:
            watched.add(optimizer)
            optimizer.register_step_pre_hook(lambda *_: _refuse_step(trainer))
    for optimizer in found[1:] if trainer.runtime.num_processes > 1 else ():
        trainer.parts.data_parallel.watch(optimizer)


def _refuse_step(trainer: Any) -> None:
    if vars(trainer).get("_looks"):
        raise HookError(
            "an optimizer was stepped on a batch of a second walk over self.train_loader, which nobody counts. "
            "Step on the batches of the first one; for more epochs raise num_epochs."
        )
    if not trains_now(trainer) or trainer.runtime.num_processes == 1 or len(optimizers_of(trainer)) == 1:
        return
    step = trainer.ctx.step
    if abs(share_of(step.window, step.batch_in_window) * trainer.runtime.num_processes - 1) > EQUAL:
        raise HookError(
            "several optimizers are stepped on several processes, which have unequal shares of this batch; expected "
            "equal ones, as with drop_last=True and a global_batch_size that the processes divide."
        )


class EpochLoader:
    """The batches of the epoch under way, once; a further walk over it looks at batches of the loader behind it."""

    def __init__(self, batches: Iterable[Any], loader: Any, flags: dict[str, Any]) -> None:
        self._batches, self._loader, self._flags = batches, loader, flags
        self.is_begun = False

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.is_begun:
            return self._looked_at()
        self.is_begun = True
        return iter(self._batches)

    def _looked_at(self) -> Iterator[Any]:
        self._flags["_looks"] = True
        try:
            yield from self._loader
        finally:
            self._flags["_looks"] = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def named_optimizer(given: Any) -> Any:
    """Return a class of torch.optim by its name, or the class itself."""
    if isinstance(given, type) and issubclass(given, Optimizer):
        return given
    found = getattr(torch.optim, given, None) if isinstance(given, str) else None
    if not isinstance(found, type):
        known = [name for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"]
        there = f"{suggestion(str(given), known)} There are: {choices(known)}"
        raise ConfigError(f"optim_function={given!r} is no optimizer of torch.optim.{there}.")
    return found


def named_loss(given: Any) -> Any:
    """Return a loss of torch.nn by its name, or the loss itself."""
    if isinstance(given, str):
        found = getattr(nn, given, None)
        if found is None:
            known = [name for name in dir(nn) if name.endswith("Loss")]
            there = f"{suggestion(given, known)} There are: {choices(known)}"
            raise ConfigError(f"loss_function={given!r} is no loss of torch.nn.{there}.")
        return found()
    return given() if isinstance(given, type) else given


def takes(function: Any, name: str) -> bool:
    """Tell whether a class or function has an argument of that name."""
    return name in inspect.signature(function).parameters


def length_of(loader: Any) -> int | None:
    """Return the batches of a loader; None without one."""
    return None if loader is None else len(loader)


def or_empty(values: Any) -> Any:
    """Return values, or none of them."""
    return np.zeros(0) if values is None else values

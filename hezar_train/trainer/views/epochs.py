"""lernomatic's names on the trainer: epochs to extend, rates and data to set, checkpoints at a path of one's own.

Owns names, not behaviour. Everything that is set holds from the next call of `train()` on and is refused while one is
under way: a hook asks (`request_save`, `request_stop`), and `save_steps` saves by the step. What is set is in the next
checkpoint, the frozen parameters included.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train.checkpoint import load_shards, unwrap
from hezar_train.checkpoint.store import open_checkpoint, write_checkpoint
from hezar_train.events import EventWriter, SummaryWriterAdapter
from hezar_train.optim import MomentumSchedule, get_momentum, set_learning_rate, set_momentum
from hezar_train.runtime import to_device
from hezar_train.trainer.evaluator import LookingBatches
from hezar_train.trainer.freezing import freeze_first, freeze_named, frozen_names, unfreeze_first

if TYPE_CHECKING:
    from hezar_train.checkpoint import Checkpoint
    from hezar_train.config import TrainerConfig
    from hezar_train.data import Source
    from hezar_train.data.splits import Splits
    from hezar_train.optim import Schedule
    from hezar_train.runtime import Runtime
    from hezar_train.state import TrainerState
    from hezar_train.trainer.checkpointing import Snapshot

__all__ = ["EpochView"]

FROZEN = "frozen"
"""Where the state keeps the names of the frozen parameters."""


class EpochView:
    """Getters and setters, for a Trainer to inherit."""

    tb_writer: Any = None

    if TYPE_CHECKING:
        config: TrainerConfig
        model: nn.Module
        optimizer: Optimizer
        schedule: Schedule
        state: TrainerState
        splits: Splits
        runtime: Runtime
        only_for_eval: bool
        _checkpoint: Checkpoint | None
        _snapshot: Snapshot
        _given_scheduler: LRScheduler | None
        _first_optimizer: tuple[Any, Any]

        def evaluate(self, eval_dataset: Any = None) -> dict[str, float]: ...

        def prepare_input_batch(self, batch: Any) -> Any: ...

        def _eval_source(self, data: Any) -> Source: ...

        def _replan(self, config: TrainerConfig, splits: Splits | None = None) -> None: ...

        def _reschedule(self, config: TrainerConfig, given: LRScheduler | None) -> None: ...

        def _note_settings(self, first_schedule: Any) -> None: ...

        def _refuse_while_learning(self, what: str, advice: str = "") -> None: ...

        def _restore(self, checkpoint: Checkpoint) -> None: ...

    def __repr__(self) -> str:
        model, name = type(unwrap(self.model)).__name__, type(self).__name__
        return f"{name}({model}, epoch {self.get_cur_epoch()}/{self.get_num_epochs()}, step {self.state.global_step})"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {name}: {self.config[name]}" for name in self.config)])

    def get_num_epochs(self) -> int:
        """Return how many epochs the whole run has."""
        return self.config.num_epochs

    def set_num_epochs(self, num_epochs: int) -> None:
        """Extend or shorten the run; `train()` then goes on to that epoch as if it had been planned at once."""
        self._replan(self._changed(num_epochs=num_epochs))

    def get_cur_epoch(self) -> int:
        """Return how many epochs are finished: `state.epoch`, less the one under way."""
        return self.state.epoch - (not self.state.epoch_finished)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, lr: float, param_zero: bool = False) -> None:
        """Set the learning rate of every parameter group, or of the first alone; a schedule sets its own at a tick."""
        set_learning_rate(self.optimizer, lr, 0 if param_zero else None)
        self._note_settings(self._first_optimizer[1])

    def get_momentum(self) -> float | None:
        """Return the momentum, or the first of the betas; None for an optimizer without one."""
        return get_momentum(self.optimizer)

    def set_momentum(self, momentum: float) -> None:
        """Set the momentum, or the first of the betas, of every parameter group."""
        set_momentum(self.optimizer, momentum)
        self._note_settings(self._first_optimizer[1])

    def get_lr_scheduler(self) -> LRScheduler | None:
        """Return the scheduler of the learning rate."""
        return self.schedule.scheduler

    def set_lr_scheduler(self, lr_scheduler: LRScheduler | str | None, **settings: Any) -> None:
        """Follow another schedule from its first tick on: by its name and settings, or one built over the optimizer."""
        if isinstance(lr_scheduler, LRScheduler):
            self._reschedule(self.config, lr_scheduler)
        else:
            self._reschedule(self._changed(lr_scheduler=lr_scheduler, lr_scheduler_kwargs=settings or None), None)

    def get_mtm_scheduler(self) -> MomentumSchedule | None:
        """Return the schedule of the momentum."""
        return self.schedule.momentum

    def set_mtm_scheduler(self, mtm_scheduler: str | None, **settings: Any) -> None:
        """Let the momentum follow another curve, by its name and settings; both schedules begin anew."""
        named = {"momentum_scheduler": mtm_scheduler, "momentum_scheduler_kwargs": settings or None}
        self._reschedule(self._changed(**named), self._given_scheduler)

    def set_batch_size(self, batch_size: int) -> None:
        """Train with batches of another size from the next epoch on."""
        self._replan(self._changed(batch_size=batch_size))

    def set_train_dataset(self, dataset: Any) -> None:
        """Train on other data from the next epoch on."""
        self._replan(self.config, self.splits.replaced("train", dataset))

    def set_val_dataset(self, dataset: Any) -> None:
        """Evaluate on other data, or, with None, no longer."""
        self._replan(self.config, self.splits.replaced("val", dataset))

    def set_test_dataset(self, dataset: Any) -> None:
        """Say what `test_epoch()`, `test()` and `evaluate("test")` go over."""
        self._replan(self.config, self.splits.replaced("test", dataset))

    @property
    def val_loader(self) -> LookingBatches | None:
        """The batches of the split "val" in order, for an overridden `val_epoch`; None without such data."""
        return self._looking_batches("val")

    @property
    def test_loader(self) -> LookingBatches | None:
        """The batches of the split "test" in order, for an overridden `test_epoch`; None without such data."""
        return self._looking_batches("test")

    def test_epoch(self) -> dict[str, float] | None:
        """Evaluate on the split "test". An override also runs after each `val_epoch` of a training, as "test.*"."""
        return self.evaluate("test")

    def set_tb_writer(self, tb_writer: Any) -> None:
        """Pass every logged row on to a `SummaryWriter` as well, from the next call of `train()` on."""
        self.tb_writer = tb_writer

    def get_model(self) -> nn.Module:
        """Return the bare model."""
        return unwrap(self.model)

    def get_model_params(self) -> dict[str, Any]:
        """Return the bare model's state by name: the live tensors, no copies."""
        return unwrap(self.model).state_dict()

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
        self._replan(self._changed(**params))

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint to a folder of your own, whole or not at all; one that is there is replaced."""
        self._refuse_while_learning("save_checkpoint()", "set save_steps, or call request_save()")
        parts = self._snapshot.take_whole()
        self.runtime.processes.on_main(lambda: write_checkpoint(Path(path), parts, self.state.global_step))
        return Path(path)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go to where a checkpoint was saved; without training data, load its weights alone."""
        self._refuse_while_learning("load_checkpoint()")
        checkpoint = open_checkpoint(Path(path))
        if self.only_for_eval:
            load_shards(checkpoint, self.model)
            return
        self._restore(checkpoint)
        self._checkpoint = checkpoint

    def load_model_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint, all of which must fit; optimizer, rate and epoch stay."""
        load_shards(open_checkpoint(Path(path)), self.model)

    def _changed(self, **changes: Any) -> TrainerConfig:
        return copy.deepcopy(self.config).update(changes)

    def _freeze_as_saved(self) -> None:
        """Freeze what a restored state says, if `freeze_to` or `unfreeze_to` was ever called."""
        if (frozen := self.state.hooks.get(FROZEN)) is not None:
            freeze_named(self.get_model(), frozen)

    def _looking_batches(self, split: str) -> LookingBatches | None:
        data = self.splits.data.get(split)
        if data is None:
            return None
        source = self._eval_source(data)
        return LookingBatches(source, lambda batch: self.prepare_input_batch(to_device(batch, self.runtime.device)))

    def _tests_while_training(self) -> bool:
        return type(self).test_epoch is not EpochView.test_epoch

    def _user_writers(self) -> list[EventWriter]:
        return [] if self.tb_writer is None else [SummaryWriterAdapter(self.tb_writer)]

"""A trainer that is built goes on with another config, other data or another schedule; weights and counters stay.

Owns which fields can still change, and refuses all others: a config that says one thing while the trainer does another
would be worse than none. What is refused leaves everything as it was. None of it is called by users.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hezar_train.config import TrainerConfig
from hezar_train.data.splits import Splits
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.loop import Moment
from hezar_train.plan import Plan, schedule_changes
from hezar_train.runtime import logger
from hezar_train.trainer.checks import best_key_of, decide_evaluation
from hezar_train.trainer.context_names import context_names
from hezar_train.trainer.looking import Looking
from hezar_train.trainer.optimization import Updater, driven_settings, reset_driven
from hezar_train.types import Mode

__all__ = ["Replanning"]

FOLLOWED = frozenset(
    {
        "accept_changes", "async_save", "batch_or_epoch", "batch_size", "dataloader_shuffle", "do_evaluate",
        "drop_last", "early_stopping_metric", "early_stopping_mode", "early_stopping_patience",
        "early_stopping_threshold", "eval_batch_size", "eval_steps", "finetune_before_eval", "fresh_optimizer",
        "gradient_accumulation_steps", "local_param", "local_update_steps", "log_steps", "max_eval_batches",
        "max_steps", "metric_for_best_model", "num_dataloader_workers", "num_epochs", "offload_after_routine",
        "reshuffle_each_epoch", "save_steps", "save_total_limit", "share_non_trainable_para", "stop_when", "trackers",
        "use_diff",
    }
)  # fmt: skip
"""Fields that a trainer reads anew; what the others say was built into it."""

SETTERS = {
    "learning_rate": "set_learning_rate",
    "momentum": "set_momentum",
    "lr_scheduler": "set_lr_scheduler",
    "lr_scheduler_kwargs": "set_lr_scheduler",
    "momentum_scheduler": "set_mtm_scheduler",
    "momentum_scheduler_kwargs": "set_mtm_scheduler",
}

OBJECTS = frozenset({"model", "models", "optimizer"})
"""Names of the context that a plan does not change."""


class Replanning(Looking):
    """Changes between two calls of `train()`."""

    lr_scheduler: LRScheduler | None
    _given_scheduler: LRScheduler | None
    _first_settings: list[dict[str, Any]]

    def _replan(self, config: TrainerConfig, splits: Splits | None = None) -> None:
        """Go on with another config or other data."""
        self._refuse_while_learning("another config or other data")
        config.validate()
        _refuse_built_in(self.config, config)
        before = dict(self.__dict__)
        try:
            self._plan_again(copy.deepcopy(config), self.splits if splits is None else splits)
        except BaseException:
            self.__dict__.update(before)
            raise
        self._follow_plan(is_new_data=self.train_dataset is not before["train_dataset"])

    def _plan_again(self, config: TrainerConfig, splits: Splits) -> None:
        old_config, old_plan, old_data = self.config, self.plan, self.train_dataset
        self.config, self.splits = config, splits
        self._settle_data()
        stopping = self._make_stopping()
        stopping.load_state_dict(self._stopping.state_dict())
        self._stopping = stopping
        self._source = self._train_source()
        self.plan = self._make_plan(self._source)
        if self.state.global_step and not self.only_for_eval:
            is_other = self.train_dataset is not old_data or self.plan.window_samples != old_plan.window_samples
            self._refuse_to_follow(old_config, old_plan, is_other=is_other)

    def _settle_data(self) -> None:
        """Work out what there is to train and to evaluate on, and what tells the best model."""
        self.train_dataset, self.eval_dataset = self.splits.train, self.splits.for_evaluation
        self.only_for_eval = self.train_dataset is None
        self.evaluates = decide_evaluation(self.config, self.eval_dataset)
        self.best_key = best_key_of(self.config, self.metrics_handler, self.eval_dataset if self.evaluates else None)

    def _refuse_to_follow(self, old_config: TrainerConfig, old_plan: Plan, *, is_other: bool) -> None:
        """Raise if a run that has begun cannot go on by the new plan."""
        if is_other and self.state.position and not self.state.epoch_finished:
            raise DataError(
                "the data and the samples of an update cannot change in the middle of an epoch: train to its end "
                "first, or build a new Trainer"
            )
        changes = schedule_changes(old_config.to_dict(), self.config.to_dict(), old_plan, self.plan)
        if changes and not self.config.accept_changes:
            raise ConfigError(
                f"the schedule is under way and cannot follow: {'; '.join(changes)}. Plan the whole run at once, set "
                "another schedule, or set accept_changes=True to go on with it as it is."
            )

    def _follow_plan(self, *, is_new_data: bool) -> None:
        """Tell every part of the new plan."""
        self.state.total_epochs = self.config.num_epochs
        self._settle_best()
        self._snapshot = dataclasses.replace(
            self._snapshot, config=self.config, plan=self.plan, facts=self._facts(), stopping=self._stopping,
            cursor=None if is_new_data else self._snapshot.cursor,
        )  # fmt: skip
        self._due.plan, self._due.end, self._due.evaluates = self.plan, self._end(), self.evaluates
        self._course = self._course_of_the_run(self._active())
        hooks = self.hooks[Mode.TRAIN]
        if not self.only_for_eval and "due" not in hooks.names(Moment.EPOCH_END):
            self._register_train_hooks(hooks)
        if self.state.global_step == 0:  # nothing was trained by it yet: it is laid out over the new length
            self._reschedule(self.config, self._given_scheduler)
        self.ctx.share({name: value for name, value in context_names(self).items() if name not in OBJECTS})

    def _settle_best(self) -> None:
        """Forget the best result if it is of another metric."""
        state = self.state
        if state.metric_for_best_checkpoint != self.best_key:
            before = state.metric_for_best_checkpoint
            logger.info("the best model was chosen by %s so far, from now on by %s", before, self.best_key)
            state.update(metric_for_best_checkpoint=self.best_key, best_metric_value=None, best_checkpoint=None)

    def _reschedule(self, config: TrainerConfig, given: LRScheduler | None) -> None:
        """Follow the schedules of a config, or the scheduler given, from their first tick on."""
        self._refuse_while_learning("another schedule")
        before, settings = self.config, driven_settings(self.optimizer)
        is_named = (config.scheduler_name or self.default_lr_scheduler or config.momentum_scheduler) is not None
        is_driven = self.schedule.scheduler is not None or self.schedule.momentum is not None
        if given is None and is_named and is_driven:
            reset_driven(self.optimizer, self._first_settings)
        self.config = config
        try:
            self.schedule = self._make_schedule(given)
        except BaseException:
            self.config = before
            reset_driven(self.optimizer, settings)
            raise
        self._given_scheduler, self.lr_scheduler = given, self.schedule.scheduler
        self._steps.rebind(self.state, Updater(self.optimizer, self.runtime.scaler, config), self.schedule)
        self._snapshot = dataclasses.replace(self._snapshot, config=config, schedule=self.schedule)
        self._note_settings(copy.deepcopy(self.schedule.state_dict()))

    def _note_settings(self, first_schedule: Any) -> None:
        """Let an optimizer that is made fresh for each call (`fresh_optimizer`) begin with the settings of now."""
        now = copy.deepcopy(self.optimizer.state_dict())
        self._first_optimizer = (_with_groups(self._first_optimizer[0], now), first_schedule)

    def _refuse_while_learning(self, what: str, advice: str = "do it between two calls of train()") -> None:
        if self._routine is not None:
            raise HookError(f"{what} in the middle of training, where weights and counters do not match: {advice}.")


def _with_groups(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the first state of an optimizer, or of several by name, with the parameter groups of now."""
    if "param_groups" in now:
        return {**first, "param_groups": now["param_groups"]}
    return {name: _with_groups(first[name], now[name]) for name in now}


def _refuse_built_in(old: TrainerConfig, new: TrainerConfig) -> None:
    """Raise if a config differs in what a trainer was built of."""
    before, now = old.to_dict(), new.to_dict()
    changed = [name for name in now if name not in FOLLOWED and before[name] != now[name]]
    if changed:
        told = ", ".join(f"{name} ({SETTERS[name]}() can)" if name in SETTERS else name for name in changed)
        raise ConfigError(f"a trainer that is built cannot change: {told}. Build a new one with this config.")

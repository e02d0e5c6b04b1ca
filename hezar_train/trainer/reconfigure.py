"""Reconfigure: a trainer that is built goes on with another config, other data or another schedule.

Weights and counters stay. Owns which fields can still change, and refuses all others: a config that says one thing
while the trainer does another would be worse than none. Everything is worked out before any part follows, so that
what is refused leaves everything as it was.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hezar_train.config import TrainerConfig
from hezar_train.data import Splits
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.loop import Loop
from hezar_train.optim import Schedule
from hezar_train.plan import Plan, keeping_ticks, schedule_changes
from hezar_train.state import TrainerState
from hezar_train.trainer.assemble import Parts
from hezar_train.trainer.context_names import setup_names
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.door_names import door_of
from hezar_train.trainer.optimizer_setup import driven_settings, reset_driven

__all__ = [
    "FOLLOWED",
    "OF_PARTS",
    "RESCHEDULED",
    "reconfigure",
    "refuse_assignment",
    "refuse_built_in",
    "refuse_while_learning",
    "reschedule",
]

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
    "learning_rate": "set_learning_rate() of hezar_train.compat.lernomatic's Trainer can",
    "momentum": "set_momentum() of hezar_train.compat.lernomatic's Trainer can",
    **dict.fromkeys(
        (
            "lr_scheduler",
            "lr_scheduler_kwargs",
            "momentum_scheduler",
            "momentum_scheduler_kwargs",
            "lr_scheduling_steps",
            "warmup_steps",
        ),
        "reschedule(config) can",
    ),
}
"""What changes a field of a trainer that is built by itself."""

RESCHEDULED = frozenset(
    {
        "lr_scheduler", "lr_scheduler_kwargs", "lr_scheduling_steps", "momentum_scheduler",
        "momentum_scheduler_kwargs", "warmup_steps",
    }
)  # fmt: skip
"""Fields that another schedule follows."""

OF_PARTS = {
    "model": "build a new Trainer with it; to change weights, load them into trainer.model",
    "optimizer": "pass it to a new Trainer, or override build_optimizer()",
    "lr_scheduler": "call reschedule(lr_scheduler=...)",
    "schedule": "call reschedule()",
    "criterion": "set `criterion` in the config, or override compute_loss()",
    "regularizer": "set `regularizer` in the config",
    "metrics_handler": "pass it to a new Trainer",
    "train_dataset": "call reconfigure(splits=trainer.splits.replaced('train', dataset))",
    "eval_dataset": "pass it to evaluate(dataset), or call reconfigure(splits=trainer.splits.replaced('val', dataset))",
    "splits": "call reconfigure(splits=...)",
    "config": "call reconfigure(config)",
    **dict.fromkeys(
        (
            "accelerator", "best_key", "ctx", "data", "data_collator", "evaluates", "folder", "hooks", "only_for_eval",
            "parts", "plan", "preprocessor", "progress", "runtime", "setup", "state", "storage",
        ),
        "it is made when the Trainer is built",
    ),
}  # fmt: skip
"""What the parts hold, and the way to change it."""


def refuse_assignment(name: str) -> None:
    """Raise if an attribute is assigned that no part would look at again."""
    if name in OF_PARTS:
        raise AttributeError(f"trainer.{name} was assigned, which would change nothing: {OF_PARTS[name]}.")
    if name in TrainerConfig.fields():
        way = "call reconfigure(config)" if name in FOLLOWED else "build a new Trainer with that config"
        raise AttributeError(
            f"trainer.{name} was assigned, which would change nothing: `{name}` is a field of the config; {way}"
            f"{door_of(name)}."
        )


def refuse_lost(early: Mapping[str, Any], now: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Raise if what a subclass has set before super().__init__() is not what the trainer was built with."""
    for name, value in early.items():
        if name in OF_PARTS and value is not None and value is not now.get(name) and value is not passed.get(name):
            raise AttributeError(
                f"self.{name} was set before super().__init__(), which has put its own in its place, so it would be "
                f"lost: {OF_PARTS[name]}. What is your own needs another name."
            )


def reconfigure(parts: Parts, config: TrainerConfig, splits: Splits) -> Parts:
    """Let every part follow another config and other data; return the parts.

    The config was checked by `refuse_built_in`. The schedule is left alone; before the first step, `reschedule` lays
    it out over the new length.
    """
    old, state = parts.setup, parts.state
    setup = parts.data.setup(config, splits, parts.handler)
    if state.global_step:  # what a tick is was decided when the run began
        plan = keeping_ticks(setup.plan, config.to_dict(), old.plan, old.config.to_dict())
        setup = dataclasses.replace(setup, plan=plan)
    setup.stopping.load_state_dict(old.stopping.state_dict())
    if state.global_step and not setup.only_for_eval:
        _refuse_to_follow(old, setup, state)
    state.total_epochs = config.num_epochs
    parts.checkpointing.follow(setup, is_new_data=splits.train is not old.splits.train)
    parts.checkpointing.note_best_metric()
    parts.evaluator.follow(setup)
    parts.session.follow(setup)
    parts.finetuning.follow(config)
    parts.hold.follow(offloads=config.offload_after_routine)
    parts.ctx.share(setup_names(setup))
    return dataclasses.replace(parts, setup=setup)


def reschedule(
    parts: Parts,
    config: TrainerConfig,
    plan: Plan,
    given: LRScheduler | None,
    make_schedule: Callable[[LRScheduler | None], Schedule],
    default: str | None,
) -> Parts:
    """Follow the schedules of a config, or the scheduler given, from their first tick on; return the parts.

    The plan has the ticks and the warm-up that go with them.
    """
    optimization = parts.optimization
    settings = driven_settings(optimization.optimizer)
    if given is not None and given is not parts.first.given and optimization.schedule.is_warming:
        raise ConfigError(
            "the rates of the optimizer are those of a warm-up (warmup_steps), so a scheduler that is built over it "
            "now begins too low. Name the schedule in the config, or do it after the warm-up."
        )
    optimization.schedule.end_warmup()
    is_named = (config.scheduler_name or default or config.momentum_scheduler) is not None
    is_driven = optimization.schedule.scheduler is not None or optimization.schedule.momentum is not None
    if given is None and is_named and is_driven:
        parts.first.reset_driven()
    try:
        schedule = make_schedule(given)
    except BaseException:
        reset_driven(optimization.optimizer, settings)
        raise
    optimization.follow(schedule)
    parts.first.note_schedule(schedule, given)
    setup = dataclasses.replace(parts.setup, config=config, plan=plan)
    parts.checkpointing.follow(setup)
    parts.evaluator.follow(setup)
    parts.session.follow(setup)
    parts.ctx.share(setup_names(setup))
    return dataclasses.replace(parts, setup=setup)


def refuse_while_learning(loop: Loop, what: str, advice: str = "do it between two calls of train()") -> None:
    """Raise if a learning routine is under way."""
    if loop.current is not None:
        raise HookError(f"{what} in the middle of training, where weights and counters do not match: {advice}.")


def refuse_built_in(old: TrainerConfig, new: TrainerConfig, followed: Collection[str] = FOLLOWED) -> TrainerConfig:
    """Return a checked copy of a config; raise if it differs in what a trainer was built of, or does not follow."""
    new.validate()
    before, now = old.to_dict(), new.to_dict()
    changed = [name for name in now if name not in followed and before[name] != now[name]]
    if changed:
        told = ", ".join(f"{name} ({SETTERS[name]})" if name in SETTERS else name for name in changed)
        raise ConfigError(f"a trainer that is built cannot change: {told}. Build a new one with this config.")
    return copy.deepcopy(new)


def _refuse_to_follow(old: RunSetup, new: RunSetup, state: TrainerState) -> None:
    """Raise if a run that has begun cannot go on by the new plan."""
    is_other = new.splits.train is not old.splits.train or new.plan.window_samples != old.plan.window_samples
    if is_other and state.position and not state.epoch_finished:
        raise DataError(
            "the data and the samples of an update cannot change in the middle of an epoch: train to its end "
            "first, or build a new Trainer"
        )
    changes = schedule_changes(old.config.to_dict(), new.config.to_dict(), old.plan, new.plan)
    if changes and not new.config.accept_changes:
        raise ConfigError(
            f"the schedule is under way and cannot follow: {'; '.join(changes)}. Plan the whole run at once, set "
            "another schedule, or set accept_changes=True to go on with it as it is."
        )

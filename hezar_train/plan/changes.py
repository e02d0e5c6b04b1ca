"""What keeps a run from going on exactly, in plain words: changes of the config, of the data, of the run's length.

Compares two configs and two plans; what to do about a difference is for who asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hezar_train.config import TrainerConfig, optimizer_name, precision_name, scheduler_name, to_plain
from hezar_train.plan.plan import Plan
from hezar_train.plan.schedules import LAID_OUT_IN_EPOCHS, schedules_over_the_run

__all__ = ["exactness_changes", "schedule_changes"]


def _keywords(given: Mapping[str, Any] | None) -> Any:
    return to_plain(given or {})


_NORMALISED: dict[str, Callable[[Any], Any]] = {
    "seed": to_plain,
    "dataloader_shuffle": to_plain,
    "reshuffle_each_epoch": to_plain,
    "drop_last": to_plain,
    "optimizer": optimizer_name,
    "optimizer_kwargs": _keywords,
    "learning_rate": to_plain,
    "momentum": to_plain,
    "weight_decay": to_plain,
    "weight_decay_norm": to_plain,
    "weight_decay_bias": to_plain,
    "max_grad_norm": to_plain,
    "lr_scheduler": scheduler_name,
    "lr_scheduler_kwargs": _keywords,
    "lr_scheduling_steps": to_plain,
    "momentum_scheduler": scheduler_name,
    "momentum_scheduler_kwargs": _keywords,
    "mixed_precision": precision_name,
    "loss_weight": to_plain,
    "criterion": to_plain,
    "deterministic": to_plain,
}
"""Fields that change what an update does, each with how to make equal meanings equal."""


def exactness_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> list[str]:
    """List, in plain words, every change of config or data with which a run cannot go on exactly.

    `old` and `new` are configs as dicts (a missing field has its default). The number of processes is not a change.
    """
    return [
        *_plan_changes(old_plan, new_plan),
        *_field_changes(old, new),
        *_pace_changes(old, new, old_plan, new_plan),
        *_length_changes(new, old_plan, new_plan),
    ]


def schedule_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> list[str]:
    """List, in plain words, every change of the run's length that a schedule under way cannot follow."""
    return [*_pace_changes(old, new, old_plan, new_plan), *_length_changes(new, old_plan, new_plan)]


def _change(name: str, before: Any, now: Any) -> Iterator[str]:
    if before != now:
        yield f"{name}: {before!r} in the checkpoint, {now!r} now"


def _plan_changes(old: Plan, new: Plan) -> Iterator[str]:
    yield from _change("num_samples", old.num_samples, new.num_samples)
    if old.window_samples == new.window_samples and old.num_processes != new.num_processes:
        return  # the same updates, cut for another number of processes
    yield from _change("batch_size", old.batch_size, new.batch_size)
    yield from _change("gradient_accumulation_steps", old.accumulation, new.accumulation)


def _field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    fields = TrainerConfig.fields()
    for name, normalised in _NORMALISED.items():
        default = fields[name].default
        yield from _change(name, normalised(old.get(name, default)), normalised(new.get(name, default)))


def _pace_changes(old: Mapping[str, Any], new: Mapping[str, Any], old_plan: Plan, new_plan: Plan) -> Iterator[str]:
    """Tell of a pace in updates that is another one, though the config says the same."""
    default = TrainerConfig.fields()["lr_scheduling_steps"].default
    steps = new.get("lr_scheduling_steps", default)
    if steps == old.get("lr_scheduling_steps", default):
        yield from _change(
            f"updates between ticks of the schedule (lr_scheduling_steps={steps!r})",
            old_plan.schedule_updates,
            new_plan.schedule_updates,
        )


def _length_changes(config: Mapping[str, Any], old: Plan, new: Plan) -> Iterator[str]:
    """Tell of a run of another length where the schedule is laid out over the whole run."""
    for field, name in schedules_over_the_run(config.get):
        is_by_epochs = name in LAID_OUT_IN_EPOCHS
        before, now = (old.num_epochs, new.num_epochs) if is_by_epochs else (old.total_ticks, new.total_ticks)
        if before != now:
            yield (
                f"total steps: {old.total_steps} in the checkpoint, {new.total_steps} now (from num_epochs, max_steps "
                f"and the data; {field}={name!r} is laid out over the whole run)"
            )

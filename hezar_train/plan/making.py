"""From a config, the number of samples and the number of processes to a `Plan`.

Lengths come first (of a window, an epoch, the run), in steps and in updates; then every period of the config, which is
written in steps, becomes one in updates. Raises where a config and the data do not go together.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.plan.plan import Plan
from hezar_train.plan.schedules import refuse_schedule_of_one_call

__all__ = ["make_plan", "steps_of"]


def make_plan(
    config: TrainerConfig, num_samples: int | None, num_processes: int = 1, batch_size: int | None = None
) -> Plan:
    """Work out a run; `num_samples` None is a stream, and `batch_size` overrides the config's.

    With `global_batch_size` it is the run of one process, cut for more of them: only the steps are others.
    """
    batch_size = config.batch_size if batch_size is None else batch_size
    if config.global_batch_size is None:
        return _plan_for(config, num_samples, num_processes, batch_size)
    plan = _plan_for(config, num_samples, 1, batch_size)
    if config.local_update_steps is None and (config.max_steps is not None or num_samples is None):
        plan = dataclasses.replace(plan, last_samples=plan.samples_of(0, plan.counted_steps))
    return plan if num_processes == 1 else plan.spread_over(num_processes)


def _plan_for(config: TrainerConfig, num_samples: int | None, num_processes: int, batch_size: int) -> Plan:
    step_samples = batch_size * num_processes
    accumulation, window_samples = _window(config, step_samples)
    epoch = _Epoch.cut(config, num_samples, step_samples, window_samples)
    total_steps = _total_steps(config, epoch)
    total_updates = _total_updates(total_steps, epoch, accumulation)
    periods = _periods(config, total_steps, accumulation)
    refuse_schedule_of_one_call(config)
    return Plan(
        num_samples=num_samples,
        num_processes=num_processes,
        batch_size=batch_size,
        accumulation=accumulation,
        num_epochs=_num_epochs(config, epoch, total_steps),
        drop_last=config.drop_last,
        window_samples=window_samples,
        steps_in_epoch=epoch.num_steps if epoch else None,
        updates_in_epoch=epoch.num_updates if epoch else None,
        total_steps=total_steps,
        total_updates=total_updates,
        total_ticks=_total_ticks(config, epoch, total_steps, total_updates, periods["schedule_updates"]),
        counted_steps=total_steps,
        **periods,
    )


def _window(config: TrainerConfig, step_samples: int) -> tuple[int, int]:
    """Return the steps and the samples of a whole window."""
    if config.global_batch_size is None:
        return config.gradient_accumulation_steps, step_samples * config.gradient_accumulation_steps
    return -(-config.global_batch_size // step_samples), config.global_batch_size


class _Epoch(NamedTuple):
    """An epoch of known size, cut into steps and updates."""

    num_steps: int
    num_updates: int

    @classmethod
    def cut(
        cls, config: TrainerConfig, num_samples: int | None, step_samples: int, window_samples: int
    ) -> _Epoch | None:
        """Count the steps and updates of an epoch; None for a stream."""
        if num_samples is None:
            return None
        if num_samples < 1:
            raise DataError("The training data is empty: expected at least one sample.")
        num_updates, rest = divmod(num_samples, window_samples)
        num_steps = num_updates * -(-window_samples // step_samples)
        if not config.drop_last:
            return cls(num_steps - (-rest // step_samples), num_updates + (rest > 0))
        if num_updates == 0:
            raise ConfigError(
                f"drop_last=True drops all of the training data: {num_samples} samples do not fill one update of "
                f"{window_samples} (batch_size x processes x gradient_accumulation_steps, or global_batch_size). Lower "
                "one of these, or set drop_last=False."
            )
        return cls(num_steps, num_updates)


def _total_steps(config: TrainerConfig, epoch: _Epoch | None) -> int:
    if config.local_update_steps is not None:
        return _steps_of_a_call(config, config.local_update_steps, epoch)
    if epoch is None:
        if not isinstance(config.max_steps, int):
            raise ConfigError(
                f"The length of the training data is unknown and max_steps={config.max_steps!r}: say where the run "
                "ends with a whole number of steps, for example max_steps=1000."
            )
        return config.max_steps
    whole = epoch.num_steps * config.num_epochs
    if config.max_steps is None:
        return whole
    return min(steps_of(config.max_steps, whole), whole)


def _steps_of_a_call(config: TrainerConfig, asked: int, epoch: _Epoch | None) -> int:
    if config.batch_or_epoch == "batch":
        return asked
    if epoch is None:
        raise ConfigError(
            f"local_update_steps={asked} counts epochs (batch_or_epoch='epoch'), but the length of the training data "
            "is unknown. Set batch_or_epoch='batch'."
        )
    return asked * epoch.num_steps


def steps_of(given: float, whole: int) -> int:
    """Return a count of steps as it is, and a share of the whole rounded up, as the decimal number that was written."""
    if isinstance(given, float):
        return max(1, math.ceil(Fraction(repr(float(given))) * whole))  # 0.7 * 10 in floats is more than 7
    return given


def _num_epochs(config: TrainerConfig, epoch: _Epoch | None, total_steps: int) -> int:
    """Return the epochs of the run, or those that a call of so many steps touches."""
    if config.local_update_steps is None:
        return config.num_epochs
    return 1 if epoch is None else -(-total_steps // epoch.num_steps)


def _total_updates(total_steps: int, epoch: _Epoch | None, accumulation: int) -> int:
    if epoch is None:
        return -(-total_steps // accumulation)
    whole_epochs, rest = divmod(total_steps, epoch.num_steps)
    return whole_epochs * epoch.num_updates - (-rest // accumulation)


def _periods(config: TrainerConfig, total_steps: int, accumulation: int) -> dict[str, int | None]:
    """Return the plan's periods by their names, in updates."""

    def updates(steps: float | None) -> int | None:
        return -(-steps_of(steps, total_steps) // accumulation) if steps else None

    return {
        "log_updates": updates(config.log_steps),
        "save_updates": updates(config.save_steps) if config.save_enabled else None,
        "eval_updates": updates(config.eval_steps) if config.do_evaluate is not False else None,
        "schedule_updates": updates(config.lr_scheduling_steps),
    }


def _total_ticks(
    config: TrainerConfig, epoch: _Epoch | None, total_steps: int, total_updates: int, schedule_updates: int | None
) -> int:
    if schedule_updates is not None:
        return max(1, total_updates // schedule_updates)
    return max(1, total_steps // epoch.num_steps) if epoch else config.num_epochs

"""Fields of the schedules of learning rate and momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hezar_train.config.checks import keywords, known_name, one_of, steps
from hezar_train.config.names import CURVES, SCHEDULERS, SHORT_SCHEDULERS, scheduler_name
from hezar_train.errors import choices
from hezar_train.types import LRSchedulerType

__all__ = ["ScheduleFields"]

SHOWN_SCHEDULERS = f"{choices(SHORT_SCHEDULERS)}, any class of torch.optim.lr_scheduler"


@dataclass(kw_only=True)
class ScheduleFields:
    lr_scheduler: str | LRSchedulerType | None = None
    """Short name, a class of torch.optim.lr_scheduler, LiBai or lernomatic, or a dotted path. None: the rate stays."""

    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of the schedule; lengths are counted in its ticks and filled in where they are left out."""

    lr_scheduling_steps: int | float | None = None
    """Steps between two ticks of the schedules; a float below 1 is a share of the run. None: one tick per epoch."""

    momentum_scheduler: str | None = None
    """Short name of the curve that the momentum (or the first beta) follows. None: the momentum stays."""

    momentum_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of that curve, such as `min` and `max`; lengths are filled in as those of `lr_scheduler`."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from known_name(
            "lr_scheduler", self.lr_scheduler, (*SHORT_SCHEDULERS, *SCHEDULERS), SHOWN_SCHEDULERS, scheduler_name
        )
        yield from keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)
        yield from steps("lr_scheduling_steps", self.lr_scheduling_steps)
        given = self.momentum_scheduler
        yield from one_of("momentum_scheduler", scheduler_name(given) if isinstance(given, str) else given, CURVES)
        yield from keywords("momentum_scheduler_kwargs", self.momentum_scheduler_kwargs)

"""Events written as a table: a line is a batch, or the beginning or the end of an epoch or a routine.

train:      fit_start epoch_start
train:      batch_start batch_forward batch_backward gradients update batch_end
val 0:      fit_start epoch_start                  (of the first model)
train 0 1:  batch_start batch_forward              (at each moment the first model, then the second)
"""

from __future__ import annotations

__all__ = ["events_of"]

Event = tuple[str, str] | tuple[str, str, int]


def events_of(table: str) -> list[Event]:
    """Return the events of a table, in order: (mode, moment), or (mode, moment, model) where a line names models."""
    return [event for line in table.splitlines() if line.strip() for event in _of_line(line)]


def _of_line(line: str) -> list[Event]:
    whose, _, moments = line.partition(":")
    mode, *models = whose.split()
    names = [f"on_{moment}" for moment in moments.split()]
    if not models:
        return [(mode, name) for name in names]
    return [(mode, name, int(model)) for name in names for model in models]

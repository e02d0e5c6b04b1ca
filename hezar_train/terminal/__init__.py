"""What a person sees of a run on a terminal: the live bar, lines of a log, tables of facts."""

from __future__ import annotations

from hezar_train.terminal.display import facts_of, num_parameters, print_facts
from hezar_train.terminal.progress import Progress, mean_distance

__all__ = ["Progress", "facts_of", "mean_distance", "num_parameters", "print_facts"]

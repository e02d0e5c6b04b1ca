"""What a person sees of a run on a terminal: the live bar, lines of a log, tables of facts."""

from hezar_train.terminal.display import print_facts
from hezar_train.terminal.progress import Progress

__all__ = ["Progress", "print_facts"]

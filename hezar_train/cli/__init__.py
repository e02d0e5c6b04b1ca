"""The command line, `hezar-train`: a module per group of commands, exit codes, and how results look on a terminal.

The work is done elsewhere: recipes and runs are loaded and built in `recipes`, several processes are started by
`launch`. Nothing here imports torch until it is needed: a mistake in a config, a list of recipes or of runs is answered
at once.
"""

from __future__ import annotations

from hezar_train.cli.exit_codes import EXIT_CODES
from hezar_train.cli.main import main, root

__all__ = ["EXIT_CODES", "main", "root"]

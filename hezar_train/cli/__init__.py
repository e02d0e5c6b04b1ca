"""The command line, `hezar-train`: words, exit codes, and how things look on a terminal.

What is done is done elsewhere: recipes and runs are `launch`'s, several processes `elastic`'s. Nothing here imports
torch until it is needed: a mistake in a config, a list of recipes or of runs is answered at once.
"""

from __future__ import annotations

from hezar_train.cli.exit_codes import EXIT_CODES
from hezar_train.cli.main import main, root

__all__ = ["EXIT_CODES", "main", "root"]

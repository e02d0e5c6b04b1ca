"""The root of all commands, and the program's entry."""

from __future__ import annotations

import sys

import click

from hezar_train import __version__
from hezar_train.cli.config import config
from hezar_train.cli.evaluate import evaluate, export, find_lr, predict
from hezar_train.cli.exit_codes import EXIT_CODES, PROGRAM, Commands, show_unexpected
from hezar_train.cli.options import debug_option
from hezar_train.cli.publish import push, report
from hezar_train.cli.recipes import recipes
from hezar_train.cli.runs import runs
from hezar_train.cli.train import reproduce, resume, train
from hezar_train.cli.verify import audit, verify
from hezar_train.launch import reported_exit

__all__ = [
    "main",
    "root",
]


@click.group(cls=Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name=PROGRAM)
@debug_option
def root() -> None:
    """Train PyTorch models from one config; kill a run anywhere and get the same model.

    \b
    A first look:
      hezar-train recipes list
      hezar-train train image_classification
      hezar-train runs
    """


for command in (
    train, resume, evaluate, predict, export, runs, report, recipes, config, find_lr, verify, audit, push, reproduce
):  # fmt: skip
    root.add_command(command)


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.excepthook = show_unexpected
    with reported_exit():
        sys.exit(root.main(prog_name=PROGRAM))

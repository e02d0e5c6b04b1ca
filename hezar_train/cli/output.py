"""The one way in which commands print text: names, data and errors may hold what a terminal would obey."""

from __future__ import annotations

import click

from hezar_train.errors import printable

__all__ = ["echo"]


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print text with everything that a terminal would obey replaced; `err` prints to standard error."""
    click.echo(printable(text), nl=nl, err=err)

"""How far a command is that only looks: a line on the terminal that counts batches and is gone at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hezar_train.loop import Context, HookSet

__all__ = ["counting"]

REFRESH_SECONDS = 0.25
ERASED_LINE = "\r\x1b[K"


@contextmanager
def counting(hooks: HookSet, what: str) -> Iterator[None]:
    """Count the batches of a hook set while the body runs; only a terminal shows it."""
    if not sys.stderr.isatty():
        yield
        return
    from hezar_train.loop import Moment

    num_batches, last_shown = 0, float("-inf")

    def count(ctx: Context) -> None:  # noqa: ARG001 - what a hook is called with
        nonlocal num_batches, last_shown
        num_batches += 1
        if perf_counter() - last_shown >= REFRESH_SECONDS:
            click.echo(f"{ERASED_LINE}{what}: {num_batches} batches", nl=False, err=True)
            last_shown = perf_counter()

    hooks.register(count, Moment.BATCH_END, name=count.__name__)
    try:
        yield
    finally:
        hooks.remove(Moment.BATCH_END, count.__name__)
        click.echo(ERASED_LINE, nl=False, err=True)

"""The line that counts batches: there on a terminal, gone at the end, nowhere else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from hezar_train.cli.evaluate import ERASED_LINE, counting
from hezar_train.recipes import load_run, open_run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_terminal_shows_how_many_batches_were_looked_at_and_a_file_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    opened = open_run(load_run(trained))
    before = opened.trainer.hooks_in_eval.names("on_batch_end")
    monkeypatch.setattr(sys, "stderr", stream)
    with counting(opened.trainer.hooks_in_eval, "evaluated"):
        opened.evaluate()
    shown = [ERASED_LINE + "evaluated: 1 batches", ERASED_LINE] if stream.isatty() else [""]
    assert (stream.getvalue().startswith(shown[0]), stream.getvalue().endswith(shown[-1])) == (True, True)
    assert bool(stream.getvalue()) is stream.isatty()
    assert opened.trainer.hooks_in_eval.names("on_batch_end") == before

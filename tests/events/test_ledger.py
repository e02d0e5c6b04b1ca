from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import Ledger, LedgerLine, keep_until

lines = st.builds(LedgerLine, *[st.integers(0, 10**13)] * 4)


@settings(deadline=None)
@given(st.lists(lines, max_size=20))
def test_a_ledger_reads_back_what_was_added(tmp_path_factory, added):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    for line in added:
        ledger.add(line.update, line.epoch, line.first, line.count)
    assert ledger.size == 0
    ledger.close()
    assert list(Ledger.read(ledger.path)) == added
    assert ledger.size == ledger.path.stat().st_size


def test_a_line_is_json_with_four_names(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.add(update=1, epoch=2, first=24, count=8)
    ledger.flush()
    ledger.sync()
    assert ledger.path.read_text() == '{"update": 1, "epoch": 2, "first": 24, "count": 8}\n'


def test_a_resumed_ledger_tells_each_update_once(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.add(1, 1, 0, 8)
    ledger.flush()
    recorded = ledger.size
    ledger.add(2, 1, 8, 8)
    ledger.flush()
    with path.open("a") as file:
        file.write('{"upda')
    assert len(list(Ledger.read(path))) == 2
    keep_until(path, recorded)
    again = Ledger(path)
    again.add(2, 1, 8, 8)
    again.close()
    assert [line.update for line in Ledger.read(path)] == [1, 2]


def test_lines_do_not_pile_up_in_memory(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for update in range(5000):
        ledger.add(update, 1, 0, 1)
    assert ledger.size > 0
    ledger.close()
    assert [line.update for line in Ledger.read(ledger.path)] == list(range(5000))


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"update": 1, "epoch": 1, "first": 0, "count": 8}\n{"update": 2}\n')
    with pytest.raises(DataError, match="line 2 is not a line of a ledger"):
        list(Ledger.read(path))

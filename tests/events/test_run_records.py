"""The ledger of updates; and the record of a run's starts: added to, amended, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import (
    FAILED,
    FINISHED,
    STARTS_FILE,
    Ledger,
    LedgerLine,
    add_start,
    amend_start,
    end_of,
    ended_for_good,
    keep_until,
    read_starts,
)

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


def test_starts_are_kept_in_order_and_facts_go_to_the_newest(tmp_path: Path) -> None:
    add_start(tmp_path, {"time": 1.0})
    amend_start(tmp_path, {"end": {"how": FAILED}})
    add_start(tmp_path, {"time": 2.0})
    amend_start(tmp_path, {"seconds": {"training": 3.0}})
    assert read_starts(tmp_path) == [
        {"time": 1.0, "end": {"how": FAILED}},
        {"time": 2.0, "seconds": {"training": 3.0}},
    ]


def test_without_a_start_there_is_nothing_to_amend(tmp_path: Path) -> None:
    amend_start(tmp_path, {"end": {}})
    assert not (tmp_path / STARTS_FILE).exists()


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", []),
        (b"\xff", []),
        (b"[" * 100_000, []),
        (b"[]", []),
        (b'{"starts": 5}', []),
        (b'{"starts": [7, {"time": 1}]}', [{"time": 1}]),
    ],
)
def test_what_cannot_be_read_is_not_there_and_a_new_start_is_written(
    tmp_path: Path, content: bytes, kept: list[Any]
) -> None:
    (tmp_path / STARTS_FILE).write_bytes(content)
    assert read_starts(tmp_path) == kept
    add_start(tmp_path, {"time": 2})
    assert json.loads((tmp_path / STARTS_FILE).read_bytes()) == {"starts": [*kept, {"time": 2}]}


@pytest.mark.parametrize("end", [None, 3, "finished"])
def test_an_end_that_is_none_is_empty(end: Any) -> None:
    assert end_of({"end": end}) == {}


def test_the_end_of_a_call_among_many_is_not_that_of_the_run() -> None:
    assert ended_for_good({"how": FINISHED}, {})
    assert not ended_for_good({"how": FINISHED}, {"local_update_steps": 5})
    assert not ended_for_good({"how": FAILED}, {})
    assert not ended_for_good({}, {})

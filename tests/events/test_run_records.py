"""The ledger of updates; and the record of a run's starts: added to, amended, and never a reason to fail."""

from __future__ import annotations

import json
from itertools import pairwise
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

lines = st.builds(LedgerLine, *[st.integers(0, 10**13) | st.integers(0, 3)] * 4)


@settings(deadline=None)
@given(st.lists(lines | st.builds(LedgerLine, *[st.integers(0, 3)] * 4, st.integers(1, 5)), max_size=20))
def test_a_ledger_reads_back_what_was_added(tmp_path_factory, added):
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
    added = [one for line in added for one in line.each()]
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


def filled(path: Path, flushed_after: int | None = None) -> Ledger:
    """Return a ledger of two epochs of 22 samples in updates of 8, flushed after one of them."""
    ledger = Ledger(path)
    for update, first in enumerate([0, 8, 16, 0, 8, 16]):
        ledger.add(update + 1, 1 + update // 3, first, min(8, 22 - first))
        if update + 1 == flushed_after:
            ledger.flush()
    return ledger


def test_updates_of_one_size_that_follow_one_another_share_a_line(tmp_path):
    filled(tmp_path / "ledger.jsonl").close()
    assert (tmp_path / "ledger.jsonl").read_text().splitlines() == [
        '{"update": 1, "epoch": 1, "first": 0, "count": 8, "updates": 2}',
        '{"update": 3, "epoch": 1, "first": 16, "count": 6}',
        '{"update": 4, "epoch": 2, "first": 0, "count": 8, "updates": 2}',
        '{"update": 6, "epoch": 2, "first": 16, "count": 6}',
    ]


def test_shared_lines_and_single_ones_tell_the_same(tmp_path):
    for flushed_after in (None, 1, 2, 3, 4, 5, 6):
        filled(tmp_path / f"{flushed_after}.jsonl", flushed_after).close()
        found = list(Ledger.read(tmp_path / f"{flushed_after}.jsonl"))
        assert [(one.update, one.first, one.end, one.updates) for one in found] == [
            (1, 0, 8, 1), (2, 8, 16, 1), (3, 16, 22, 1), (4, 0, 8, 1), (5, 8, 16, 1), (6, 16, 22, 1),
        ]  # fmt: skip


@pytest.mark.parametrize("saved_at", [1, 2, 4, 5])
def test_a_kill_at_any_byte_leaves_what_was_flushed_and_a_resume_cuts_it_there(tmp_path, saved_at):
    whole = filled(tmp_path / "whole.jsonl")
    whole.close()
    path = tmp_path / "ledger.jsonl"
    ledger = filled(path, saved_at)
    saved = ledger.size
    ledger.close()
    content = path.read_bytes()
    for size in range(saved, len(content) + 1):
        path.write_bytes(content[:size])
        kept = list(Ledger.read(path))
        assert [one.update for one in kept] == list(range(1, len(kept) + 1))
        assert len(kept) >= saved_at
        keep_until(path, saved)
        again = Ledger(path)
        for one in list(Ledger.read(whole.path))[saved_at:]:
            again.add(one.update, one.epoch, one.first, one.count)
        again.close()
        assert list(Ledger.read(path)) == list(Ledger.read(whole.path))


def test_what_follows_a_flush_begins_a_line_so_that_the_file_only_grows(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    contents = []
    for update in range(1, 6):
        ledger.add(update, 1, 8 * (update - 1), 8)
        ledger.flush()
        contents.append(ledger.path.read_bytes())
    assert all(later.startswith(before) for before, later in pairwise(contents))


def test_a_skipped_update_whose_number_comes_again_has_a_line_of_its_own(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for update, first in ((1, 0), (1, 8), (2, 16)):
        ledger.add(update, 1, first, 8)
    ledger.close()
    assert [(one.update, one.first) for one in Ledger.read(ledger.path)] == [(1, 0), (1, 8), (2, 16)]


@pytest.mark.parametrize("updates", [0, 4097, 1 << 60])
def test_a_line_that_claims_an_endless_run_is_refused(tmp_path, updates):
    path = tmp_path / "ledger.jsonl"
    path.write_text(f'{{"update": 1, "epoch": 1, "first": 0, "count": 8, "updates": {updates}}}\n')
    with pytest.raises(DataError, match=f"line 1 tells of {updates} updates; expected 1 to 4096"):
        list(Ledger.read(path))


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


@pytest.mark.parametrize("step", [0, 1], ids=["lines of their own", "shared lines"])
def test_lines_do_not_pile_up_in_memory(tmp_path, step):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for update in range(5000):
        ledger.add(update, 1, step * update, 1)
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

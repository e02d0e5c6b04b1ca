"""The record of a run's starts: added to, amended, and never a reason to fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hezar_train.events import (
    FAILED,
    FINISHED,
    STARTS_FILE,
    add_start,
    amend_start,
    end_of,
    ended_for_good,
    read_starts,
)


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

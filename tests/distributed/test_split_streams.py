"""Streams in several files, of which each process reads its own: no sample twice, no hang, the place kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import distance, ledger_of, points, samples_of_updates
from ranks import on_ranks, outcomes_on
from test_data import FailAfter, break_and_resume, train

PER_PROCESS = {"global_batch_size": None, "gradient_accumulation_steps": 2, "max_steps": 100}
"""A batch that is each process's own, which is when files are shared out."""


def files(num_samples: int = 25, num_files: int = 4) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": row["x"].tolist(), "labels": row["labels"], "number": row["number"]} for row in points(num_samples)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=num_files).with_format("torch")


class Counted:
    """Tell how many samples this process's pipeline has read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.read += 1
        return row


def read_and_train(out: Path) -> tuple[int, dict[str, Any]]:
    counted = Counted()
    told = train(out, files().map(counted), **PER_PROCESS | {"num_epochs": 1})
    return counted.read, told


def test_each_process_reads_its_own_files_only_and_every_sample_comes_once(tmp_path: Path) -> None:
    told = on_ranks(2, lambda: read_and_train(tmp_path))
    assert [read for read, _ in told] == [13, 12 + 2]  # two once more, to keep the other one company
    seen = [number for numbers in samples_of_updates([one for _, one in told]).values() for number in numbers]
    assert sorted(seen) == [*range(25)]
    assert told[0][1]["seen"] == told[1][1]["seen"] == 25
    assert distance(told[0][1]["weights"], told[1][1]["weights"]) == 0.0


@pytest.mark.parametrize("num_samples", [4, 6, 9, 17])
def test_files_of_unequal_length_hang_nobody(num_samples: int, tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: train(tmp_path, files(num_samples), **PER_PROCESS), seconds=60)
    assert [one.exit_code for one in outcomes] == [0, 0], outcomes[0].error
    seen = [number for updates in samples_of_updates([one.value for one in outcomes]).values() for number in updates]
    assert sorted(seen) == sorted([*range(num_samples)] * 2)


def test_drop_last_leaves_out_windows_that_one_process_cannot_fill(tmp_path: Path) -> None:
    told = on_ranks(2, lambda: train(tmp_path, files(25), drop_last=True, **PER_PROCESS))
    assert all(len(numbers) == 8 for numbers in samples_of_updates(told).values())
    assert told[0]["seen"] == 2 * 24


def test_files_that_do_not_divide_are_read_by_all_and_shared_out_by_number(tmp_path: Path) -> None:
    told = on_ranks(2, lambda: train(tmp_path, files(25, 3), **PER_PROCESS))
    seen = [number for numbers in samples_of_updates(told).values() for number in numbers]
    assert sorted(seen) == sorted([*range(25)] * 2)


def test_a_run_over_files_of_its_own_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    whole = on_ranks(2, lambda: train(tmp_path / "whole", files(41), save_steps=1, **PER_PROCESS))
    broken = on_ranks(2, lambda: break_and_resume(tmp_path / "broken", lambda: files(41), **PER_PROCESS))
    assert ledger_of(tmp_path / "broken") == ledger_of(tmp_path / "whole")
    assert distance(broken[1]["weights"], whole[1]["weights"]) == 0.0


def test_another_number_of_processes_is_told_why_it_cannot_go_on_inside_an_epoch(tmp_path: Path) -> None:
    def first() -> None:
        with pytest.raises(RuntimeError, match="stop here"):
            train(tmp_path, files(41), [FailAfter(4)], save_steps=1, **PER_PROCESS)

    on_ranks(2, first)
    again = {"resume_from_checkpoint": True, **PER_PROCESS}
    outcomes = outcomes_on(4, lambda: train(tmp_path, files(41), **again))
    assert all("samples in an update" in one.error for one in outcomes)
    outcomes = outcomes_on(4, lambda: train(tmp_path, files(41), accept_changes=True, **again))
    assert all("begun by 2 processes" in one.error for one in outcomes)

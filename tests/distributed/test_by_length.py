"""Batches by length on several processes: the same samples in every update, and the same weights in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import CASES, build
from ranks import on_ranks
from test_invariance import assert_same

from hezar_train.cli.verify import audit_run

TOKENS = {"batch_size": 1, "global_batch_size": None, "global_batch_tokens": 60, "length_column": "tokens"}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({**TOKENS, "max_tokens_per_batch": 24}, [2, 3]),
        ({**TOKENS, "max_tokens_per_batch": 24, "group_by_length": True, "max_steps": 7, "save_steps": 3}, [4]),
        ({"group_by_length": True, "length_column": "tokens", "max_tokens_per_batch": 16}, [2]),
    ],
    ids=["tokens", "grouped tokens, cut short", "grouped samples"],
)
def test_updates_by_length_are_the_same_on_any_number_of_processes(
    changes: dict[str, Any], counts: list[int], tmp_path: Path
) -> None:
    assert_same(
        "variable lengths", "AdamW in float64", counts, tmp_path, 60, lr_scheduler="one_cycle", lr_scheduling_steps=1,
        **changes,
    )  # fmt: skip
    for count in (1, *counts):
        found = audit_run(build("variable lengths", tmp_path / str(count), **changes).config)
        assert found.problems == []


def test_the_main_process_measures_and_the_others_are_told(tmp_path: Path) -> None:
    def measured() -> tuple[int, str]:
        reads = 0

        class Watched(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                nonlocal reads
                reads += 1
                return super().__getitem__(index)

        trainer = build("variable lengths", tmp_path, **TOKENS)
        reads = 0
        found = trainer.data.open(trainer.config, Watched(CASES["variable lengths"].data[0]))
        return reads, found.by_length.lengths.digest

    told = on_ranks(2, measured)
    assert [reads for reads, _ in told] == [40, 0]
    assert told[0][1] == told[1][1]

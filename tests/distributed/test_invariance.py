"""With a global batch size the training is the same on any number of processes: samples, rates, counts, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import ADAMW_FLOAT64, CASES, SGD_FLOAT32, distance, learn, ledger_of, samples_of_updates
from ranks import on_ranks

PRECISIONS = {
    "SGD in float32": (torch.float32, SGD_FLOAT32, 1e-5),
    "AdamW in float64": (torch.float64, ADAMW_FLOAT64, 1e-9),
}
ONE_CYCLE = {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 1}


def assert_same(case: str, precision: str, counts: list[int], tmp_path: Path, seconds: float, **changes: Any) -> None:
    dtype, settings, limit = PRECISIONS[precision]

    def train_on(count: int) -> list[dict[str, Any]]:
        return on_ranks(
            count, lambda: learn(case, tmp_path / str(count), dtype, **settings, **changes), seconds=seconds
        )

    (alone,) = train_on(1)
    for count in counts:
        told = train_on(count)
        assert samples_of_updates(told) == samples_of_updates([alone])
        assert ledger_of(tmp_path / str(count)) == ledger_of(tmp_path / "1")
        for one in told:
            assert one["counts"] == alone["counts"]
            assert one["rates"] == alone["rates"]
            assert one["losses"] == pytest.approx(alone["losses"], rel=limit)
            assert one["metrics"] == pytest.approx(alone["metrics"], rel=limit)
            assert scores(one) == scores(alone)
            assert distance(one["weights"], alone["weights"]) <= limit
            assert distance(one["weights"], told[0]["weights"]) == 0.0


def scores(told: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are counts; the losses are sums of floats."""
    return {name: value for name, value in told["metrics"].items() if not name.endswith("loss")}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one_does(case: str, tmp_path: Path) -> None:
    assert_same(case, "AdamW in float64", [2], tmp_path, 60, **ONE_CYCLE)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_updates_are_the_same_on_one_to_four_processes(case: str, precision: str, tmp_path: Path) -> None:
    num_epochs = 25 if CASES[case].num_samples % 12 == 0 or CASES[case].is_tagger else 20
    assert_same(case, precision, [2, 3, 4], tmp_path, 280, num_epochs=num_epochs, **ONE_CYCLE)
    assert len(ledger_of(tmp_path / "1")) == 100


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 1}, "lr_scheduling_steps": 4},
        {"lr_scheduler": "one_cycle", "lr_scheduling_steps": 0.2, "max_steps": 17},
        {"lr_scheduler": "warmup_linear", "warmup_steps": 0.3},
    ],
    ids=["a period of four steps", "a share of the run, cut inside an update", "a warm-up that is a share of the run"],
)
def test_steps_of_the_config_are_those_of_one_process(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_same("short last window", "SGD in float32", [3], tmp_path, 60, save_steps=5, **changes)


def test_without_a_global_batch_size_the_batch_is_that_of_each_process(tmp_path: Path) -> None:
    changes = {"batch_size": 6, "global_batch_size": None, "gradient_accumulation_steps": 2}
    told = on_ranks(2, lambda: learn("plain", tmp_path, **changes))
    assert [len(numbers) for numbers in samples_of_updates(told).values()] == [24] * 8
    (alone,) = on_ranks(1, lambda: learn("plain", tmp_path / "alone", **changes))
    assert [len(numbers) for numbers in samples_of_updates([alone]).values()] == [12] * 16


def test_drop_last_leaves_out_the_same_samples(tmp_path: Path) -> None:
    assert_same("short last window", "SGD in float32", [2], tmp_path, 60, drop_last=True)
    assert [line["count"] for line in ledger_of(tmp_path / "2")] == [12] * 8

"""Streams, samplers of one's own, ready batches, workers: every sample once, on any number of processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Points, Watch, distance, ledger_of, points, samples_of_updates
from ranks import on_ranks, outcomes_on
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from hezar_train import Hook, Trainer, TrainerConfig

NUM_SAMPLES = 21


class Stream(IterableDataset[dict[str, Any]]):
    """Points one after another; a counter keeps the place."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.rows = [{**row, "x": row["x"].float()} for row in points(num_samples)]
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < len(self.rows):
            self._next += 1
            yield self.rows[self._next - 1]
        self._next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


class Backwards(Sampler[int]):
    """An order of one's own."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES - 1, -1, -1))


class Fives(Sampler[list[int]]):
    """Batches of one's own: the samples by fives, the last is alone."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, min(first + 5, NUM_SAMPLES))) for first in range(0, NUM_SAMPLES, 5))


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches that are ready, of unequal sizes."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows, sizes = Stream().rows, (3, 1, 4, 2, 5, 5, 1)
        assert sum(sizes) == NUM_SAMPLES
        for size in sizes:
            taken, rows = rows[:size], rows[size:]
            yield {key: torch.stack([torch.as_tensor(row[key]) for row in taken]) for key in taken[0]}


class Noisy(Dataset[dict[str, Any]]):
    """Points through noise of the global generator, for workers to fetch."""

    def __init__(self) -> None:
        self.rows = Stream().rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "x": self.rows[index]["x"] + torch.randn(4)}


def train(out: Path, data: Any, hooks: list[Hook] | None = None, **changes: Any) -> dict[str, Any]:
    """Train over the data; return what is compared."""
    watch = Watch()
    settings = {
        "batch_size": 2, "global_batch_size": 8, "num_epochs": 2, "criterion": "CrossEntropyLoss", "optimizer": "sgd",
        "learning_rate": 0.1, "trackers": [],
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Points()
    trainer = Trainer(TrainerConfig(out, **settings | changes), model, data, hooks=[watch, *(hooks or [])])
    trainer.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"samples": dict(watch.samples), "weights": weights, "seen": trainer.state.samples_seen}


def assert_as_alone(tmp_path: Path, make: Callable[[], Any], count: int, **changes: Any) -> dict[int, list[int]]:
    (alone,) = on_ranks(1, lambda: train(tmp_path / "alone", make(), **changes))
    told = on_ranks(count, lambda: train(tmp_path / "many", make(), **changes))
    updates = samples_of_updates(told)
    assert updates == samples_of_updates([alone])
    assert ledger_of(tmp_path / "many") == ledger_of(tmp_path / "alone")
    assert all(distance(one["weights"], alone["weights"]) < 1e-6 for one in told)
    return updates


SOURCES: dict[str, Callable[[], Any]] = {
    "a stream": Stream,
    "a loader over a stream": lambda: DataLoader(Stream(), batch_size=2),
    "a sampler of one's own": lambda: DataLoader(Stream().rows, batch_size=2, sampler=Backwards()),
    "a shuffled loader": lambda: DataLoader(Stream().rows, batch_size=2, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_sample_comes_once_an_epoch_in_the_updates_of_one_process(source: str, tmp_path: Path) -> None:
    settings = {"max_steps": 24} if "stream" in source else {}  # what has no length ends by steps
    updates = assert_as_alone(tmp_path, SOURCES[source], 3, **settings)
    seen = [number for numbers in updates.values() for number in numbers]
    assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * 2)


BATCHED: dict[str, Callable[[], Any]] = {
    "a sampler": lambda: DataLoader(Stream().rows, batch_sampler=Fives()),
    "a stream": lambda: DataLoader(Batches(), batch_size=None),
}


@pytest.mark.parametrize("source", BATCHED)
def test_batches_that_are_ready_go_whole_to_one_process_each(source: str, tmp_path: Path) -> None:
    settings = {"global_batch_size": None, "gradient_accumulation_steps": 1, "batch_size": 1, "max_steps": 40}
    told = on_ranks(2, lambda: train(tmp_path, BATCHED[source](), **settings))
    seen = [number for numbers in samples_of_updates(told).values() for number in numbers]
    assert sorted(seen) == sorted([*range(NUM_SAMPLES)] * 2)
    assert told[0]["seen"] == told[1]["seen"] == 2 * NUM_SAMPLES
    assert distance(told[0]["weights"], told[1]["weights"]) == 0.0


class FailAfter(Hook):
    def __init__(self, update: int) -> None:
        self._update = update

    def on_batch_forward(self, _: Any) -> None:
        if self.trainer.state.update_step == self._update:
            raise RuntimeError("stop here")


def break_and_resume(out: Path, make: Callable[[], Any], **changes: Any) -> dict[str, Any]:
    with pytest.raises(RuntimeError, match="stop here"):
        train(out, make(), [FailAfter(4)], save_steps=1, **changes)
    return train(out, make(), save_steps=1, resume_from_checkpoint=True, **changes)


def test_a_stream_is_resumed_at_its_place_on_several_processes(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: train(tmp_path / "alone", Stream(), max_steps=24, save_steps=1))
    told = on_ranks(2, lambda: break_and_resume(tmp_path / "many", Stream, max_steps=24))
    assert ledger_of(tmp_path / "many") == ledger_of(tmp_path / "alone")
    assert distance(told[1]["weights"], alone["weights"]) < 1e-6


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@pytest.mark.parametrize("shorter", [1, 4, 13], ids=["in the window", "a window earlier", "far earlier"])
def test_a_stream_that_ends_earlier_on_one_process_is_told_and_hangs_nobody(shorter: int, tmp_path: Path) -> None:
    outcomes = outcomes_on(
        2, lambda: train(tmp_path, Stream(NUM_SAMPLES - shorter * rank()), max_steps=24, num_epochs=1), seconds=30
    )
    assert [one.exit_code for one in outcomes] == [1, 1]
    assert all("DataError" in one.error for one in outcomes)


def test_a_sampler_for_several_processes_is_refused(tmp_path: Path) -> None:
    from torch.utils.data import DistributedSampler

    def work() -> Any:
        data = Stream().rows
        return train(tmp_path, DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=rank())))

    for one in outcomes_on(2, work):
        assert "DistributedSampler" in one.error


def iterable_of_datasets() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"x": row["x"].tolist(), "labels": row["labels"], "number": row["number"]} for row in points(24)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4).with_format("torch")


def test_an_iterable_that_is_split_by_node_already_is_refused(tmp_path: Path) -> None:
    from datasets.distributed import split_dataset_by_node

    data = iterable_of_datasets()
    for one in outcomes_on(2, lambda: train(tmp_path, split_dataset_by_node(data, rank(), 2), max_steps=12)):
        assert "split" in one.error
        assert "DataError" in one.error


def test_an_iterable_of_the_datasets_library_is_shared_out_and_resumed(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: train(tmp_path / "alone", iterable_of_datasets(), max_steps=24, save_steps=1))
    told = on_ranks(2, lambda: break_and_resume(tmp_path / "many", iterable_of_datasets, max_steps=24))
    assert ledger_of(tmp_path / "many") == ledger_of(tmp_path / "alone")
    assert distance(told[1]["weights"], alone["weights"]) < 1e-6

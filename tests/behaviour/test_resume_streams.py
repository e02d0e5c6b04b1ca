"""Data that keeps its own place: streams and ready loaders resume exactly through their own state, or say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from workload import CrashAt, NoisyPoints, crash, differences, make_config, make_net

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError, DataError

MAX_STEPS = 16


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """The points one after another, in both ways in which such a dataset may keep its place."""

    def __init__(self, forgets_its_end: bool = True) -> None:
        self.points = NoisyPoints(30)
        self.position = self.start = 0
        self.forgets_its_end = forgets_its_end

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        first, self.start = self.start, 0
        for index in range(first, len(self.points)):
            self.position = index + 1
            yield self.points[index]
        if self.forgets_its_end:
            self.position = 0


class KeptStream(Stream):
    """A stream that can be resumed."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.position = state["position"]


class Shuffled(Sampler[int]):
    """An order from a generator that goes on from epoch to epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)
        self.before = self.generator.get_state()
        self.position = 0
        self.start: int | None = None

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        first = self.start or 0
        if self.start is None:
            self.before = self.generator.get_state()
        self.generator.set_state(self.before)
        order = torch.randperm(30, generator=self.generator).tolist()
        self.start = None
        for self.position in range(first + 1, len(order) + 1):
            yield order[self.position - 1]


class KeptShuffled(Shuffled):
    """The same, with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before, self.start = state["before"], state["position"]


class ByEpoch(Sampler[list[int]]):
    """Batches of its own making, in an order that `set_epoch` decides."""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.position = epoch, 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(30, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for start in range(4 * self.position, 30, 4):
            self.position += 1
            yield order[start : start + 4]
        self.position = 0


class KeptByEpoch(ByEpoch):
    """The same, with a state."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def loader_of(sampler: Callable[[], Sampler[int]], num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(NoisyPoints(30), batch_size=4, sampler=sampler(), num_workers=num_workers)  # type: ignore[arg-type]


def batches_of(sampler: Callable[[], Any], num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(NoisyPoints(30), batch_sampler=sampler(), num_workers=num_workers)  # type: ignore[arg-type]


def plain_loader(num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(NoisyPoints(30), batch_size=4, num_workers=num_workers, **options)  # type: ignore[arg-type]


def hub_stream(**shuffle: int) -> Any:
    import datasets

    points = NoisyPoints(30)
    rows = [{"x": points.points[i].tolist(), "labels": int(points.labels[i])} for i in range(30)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
    return stream.shuffle(**shuffle) if shuffle else stream


def tensors(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in ("x", "labels")}


EXACT: dict[str, Callable[[], Any]] = {
    "a stream that forgets its end": KeptStream,
    "a stream that stays at its end": lambda: KeptStream(forgets_its_end=False),
    "a loader over a stream": lambda: DataLoader(KeptStream(), batch_size=4),
    "a stream of the datasets library": hub_stream,
    "a loader in order": plain_loader,
    "a shuffled loader": lambda: plain_loader(shuffle=True),
    "a shuffled loader with workers": lambda: plain_loader(num_workers=2, shuffle=True),
    "a sampler with a state": lambda: loader_of(KeptShuffled),
    "a sampler with a state and workers": lambda: loader_of(KeptShuffled, num_workers=2),
    "batches with a state": lambda: batches_of(KeptByEpoch),
    "batches with a state and workers": lambda: batches_of(KeptByEpoch, num_workers=2),
    "batches of a sampler with a state": lambda: batches_of(lambda: BatchSampler(KeptShuffled(), 4, False)),
}

LOST: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (Stream, r"Stream has no state_dict\(\) and load_state_dict\(\)"),
    "a sampler": (lambda: loader_of(Shuffled), r"sampler Shuffled has no state_dict\(\)"),
    "a shuffle buffer": (lambda: hub_stream(seed=3, buffer_size=10), r"does not hold what is in it"),
    "a sampler of batches": (lambda: batches_of(ByEpoch), r"sampler ByEpoch has no state_dict\(\)"),
}


def build(out: Path, data: Any, *hooks: Hook, **changes: Any) -> Trainer:
    settings = {"num_epochs": 2, "max_steps": MAX_STEPS, "save_steps": 3, "eval_steps": None, "save_total_limit": None}
    collate = tensors if type(data).__module__.startswith("datasets") else None
    config = make_config(out, **settings | changes)
    return Trainer(config, make_net(), data, NoisyPoints(10), data_collator=collate, hooks=hooks)


@pytest.mark.parametrize("step", [7, 8, 14])
@pytest.mark.parametrize("form", EXACT)
def test_a_crashed_run_ends_like_the_unbroken_one(
    tmp_path: Path, unbroken_runs: Callable[[str], Path], form: str, step: int
) -> None:
    crash(build(tmp_path, EXACT[form](), CrashAt(step, "on_batch_start")))
    build(tmp_path, EXACT[form]()).train()
    assert differences(unbroken_runs(form), tmp_path) == []


@pytest.fixture(scope="module")
def unbroken_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the unbroken run of a form of data once."""
    made: dict[str, Path] = {}

    def run(form: str) -> Path:
        if form not in made:
            made[form] = tmp_path_factory.mktemp("unbroken")
            build(made[form], EXACT[form]()).train()
        return made[form]

    return run


@pytest.mark.parametrize("form", LOST)
def test_a_place_that_is_lost_is_not_guessed(tmp_path: Path, form: str) -> None:
    make, words = LOST[form]
    build(tmp_path / "unbroken", make()).train()
    crash(build(tmp_path / "broken", make(), CrashAt(7, "on_batch_start")))
    with pytest.raises(DataError, match=f"cannot resume in the middle of an epoch: .*{words}"):
        build(tmp_path / "broken", make())


def test_without_a_state_a_stream_still_goes_on_at_the_next_epoch(tmp_path: Path) -> None:
    build(tmp_path / "unbroken", Stream()).train()
    crash(build(tmp_path / "broken", Stream(), CrashAt(8, "on_epoch_start")))
    build(tmp_path / "broken", Stream()).train()
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []


def test_rebuilt_loaders_follow_the_run_and_its_seed(tmp_path: Path) -> None:
    build(tmp_path / "dataset", NoisyPoints(30)).train()
    build(tmp_path / "loader", plain_loader(shuffle=True)).train()
    build(tmp_path / "in-order", plain_loader()).train()
    assert differences(tmp_path / "dataset", tmp_path / "loader") == []
    assert "model" in differences(tmp_path / "dataset", tmp_path / "in-order")


def test_a_stream_needs_to_be_told_where_the_run_ends(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps=1000"):
        build(tmp_path, KeptStream(), max_steps=None)


def test_a_batch_sampler_with_a_length_needs_no_max_steps(tmp_path: Path) -> None:
    trainer = build(tmp_path, batches_of(KeptByEpoch), max_steps=None)
    trainer.train()
    assert (trainer.state.global_step, trainer.state.epoch, trainer.state.samples_seen) == (16, 2, 60)


def test_workers_cannot_read_a_stream_ahead(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="num_dataloader_workers=2, and the training data is an iterable dataset"):
        build(tmp_path, KeptStream(), num_dataloader_workers=2)

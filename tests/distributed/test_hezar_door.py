"""Hezar's door on two processes: the model that one process trains, also from loaders that Accelerate has prepared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hezar_train.compat.hezar import RangedSampler, Trainer, TrainerConfig
from hezar_train.errors import DataError

SAVED: list[str] = []


class Prepared(Trainer):
    """Make loaders as Hezar's own methods do, and override what its users override."""

    def create_train_dataloader(self, dataset: Any) -> Any:
        sampler = RangedSampler(dataset, self.config.batch_size, seed=self.config.seed, shuffle=True)
        return self.accelerator.prepare(DataLoader(dataset, batch_size=self.config.batch_size, sampler=sampler))

    def create_eval_dataloader(self, dataset: Any) -> Any:
        return self.accelerator.prepare(DataLoader(dataset, batch_size=2))

    def log(self, logs: Mapping[str, float], step: int) -> None:
        super().log({**logs, "own": 1.0}, step)

    def save(self, path: Any, *args: Any, **kwargs: Any) -> Path:
        SAVED.append(Path(path).name)
        return super().save(path, *args, **kwargs)


def rows(count: int) -> list[dict[str, Any]]:
    points = torch.randn(count, 4, generator=torch.Generator().manual_seed(3))
    return [{"x": point, "labels": int(point[:3].argmax())} for point in points]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


def trained(out: Path, kind: type[Trainer]) -> Any:
    config = TrainerConfig(
        out / kind.__name__, task="text_classification", batch_size=2, global_batch_size=4, num_epochs=2, use_cpu=True,
        learning_rate=0.1, criterion="CrossEntropyLoss", metrics=["accuracy"], reshuffle_each_epoch=False,
    )  # fmt: skip
    SAVED.clear()
    run = kind(config=config, model=Net(), train_dataset=rows(13), eval_dataset=rows(5))
    result = run.train()
    return result.metrics, run.model.state_dict(), list(SAVED)


@pytest.mark.parametrize("kind", [Trainer, Prepared])
def test_two_processes_train_what_one_does(kind: type[Trainer], tmp_path: Path) -> None:
    ((metrics, weights, saved),) = on_ranks(1, trained, tmp_path / "one", kind)
    for ours, our_weights, our_saved in on_ranks(2, trained, tmp_path / "two", kind):
        assert ours == pytest.approx(metrics, rel=1e-5)
        assert all(torch.allclose(value, our_weights[name], atol=1e-6) for name, value in weights.items())
        assert len(our_saved) == len(saved)  # by their steps, which are fewer on two


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows(8))


def test_a_prepared_stream_is_refused_on_several_processes(tmp_path: Path) -> None:
    class Streaming(Trainer):
        def create_train_dataloader(self, dataset: Any) -> Any:
            return self.accelerator.prepare(DataLoader(Stream(), batch_size=2))

    def build() -> str:
        config = TrainerConfig(tmp_path, batch_size=2, max_steps=2, use_cpu=True, criterion="CrossEntropyLoss")
        with pytest.raises(DataError, match=r"Return it without prepare\(\)"):
            Streaming(config=config, model=Net(), train_dataset=rows(4))
        return "refused"

    assert on_ranks(2, build) == ["refused", "refused"]

"""A small run of LiBai's for its tests: a model that returns named losses, instances, and a lazy config of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hezar_train.compat.libai.config import LazyCall, LazyConfig, as_config, get_config
from hezar_train.compat.libai.data import (
    DistTensorData,
    Instance,
    build_image_test_loader,
    build_image_train_loader,
)

__all__ = ["Classifier", "Points", "config_of", "weights_of"]


class Points(Dataset[Any]):
    """Points, and on which side of a plane each is."""

    def __init__(self, size: int = 32, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Instance:
        point = self.points[index]
        return Instance(images=DistTensorData(point), labels=DistTensorData((point.sum() > 0).long()))


class Classifier(nn.Module):
    """Two named losses in training, scores otherwise."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        scores = self.layers(images)
        if not self.training or labels is None:
            return {"prediction_scores": scores}
        return {"cls_loss": nn.functional.cross_entropy(scores, labels), "size_loss": 0.01 * scores.square().mean()}


def config_of(folder: Path, *overrides: str) -> Any:
    """Return LiBai's defaults with the small run: 12 iterations of 4 samples, 8 iterations an epoch."""
    cfg = as_config(
        {
            "train": get_config("common/train.py").train,
            "optim": get_config("common/optim.py").optim,
            "graph": {"enabled": False},
            "model": LazyCall(Classifier)(width=8),
            "dataloader": {
                "train": LazyCall(build_image_train_loader)(dataset=[LazyCall(Points)(size=32)], num_workers=0),
                "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(Points)(size=16, seed=1), num_workers=0)],
            },
        }
    )
    small = [
        f"train.output_dir={folder}", "train.train_micro_batch_size=4", "train.train_iter=12", "train.log_period=3",
        "train.evaluation.eval_period=5", "train.evaluation.evaluator.topk=[1]", "train.checkpointer.period=4",
        "train.warmup_ratio=0.25", "optim.lr=0.01",
    ]  # fmt: skip
    return LazyConfig.apply_overrides(cfg, [*small, *overrides])


def weights_of(trainer: Any) -> list[torch.Tensor]:
    """Return copies of the trained weights."""
    return [one.detach().clone() for one in trainer.model.parameters()]

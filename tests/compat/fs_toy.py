"""A small worker behind FederatedScope's door: points in four dimensions, a network with batch normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hezar_train.compat.federatedscope import CN, GeneralTorchTrainer, global_cfg

SIZES = {"train": (42, 1), "val": (10, 2), "test": (13, 3)}


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def loaders() -> dict[str, Any]:
    return {split: DataLoader(points(*size), batch_size=8) for split, size in SIZES.items()}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def cfg(folder: Path, **changes: Any) -> CN:
    """Return a config of rounds of 7 batches; `train__local_update_steps=3` changes a key."""
    made = global_cfg.clone()
    made.merge_from_other_cfg(
        {
            "outdir": str(folder),
            "dataloader": {"batch_size": 8},
            "criterion": {"type": "CrossEntropyLoss"},
            "train": {"local_update_steps": 7, "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
            "eval": {"metrics": ["acc"]},
        }
    )
    made.merge_from_list([part for key, value in changes.items() for part in (key.replace("__", "."), value)])
    return made


def build(
    folder: Path, kind: type[GeneralTorchTrainer] = GeneralTorchTrainer, data: Any = None, **changes: Any
) -> GeneralTorchTrainer:
    return kind(net(), loaders() if data is None else data, "cpu", cfg(folder, **changes))


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([value.flatten().double() for value in trainer.ctx.model.state_dict().values()])


def reference(rounds: int, steps: int, clip: float = 0.0, mu: float = 0.0) -> torch.Tensor:
    """Train as FederatedScope documents it: each round a new optimizer, and the loader from its first batch on."""
    model, batches = net(), list(loaders()["train"])
    for _ in range(rounds):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        start = [parameter.detach().clone() for parameter in model.parameters()]
        model.train()
        for step in range(steps):
            x, y = batches[step % len(batches)]
            far = sum(torch.norm(p - s, 2) ** 2 for p, s in zip(model.parameters(), start, strict=True)) / 2
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(x), y)
            (loss + mu * far if mu else loss).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])

"""A model to spread over processes, and what is told of its training: repeated blocks, tied weights, a buffer.

`Tower` has what sharding must get right: blocks that are cut by themselves, a weight under two names, rows that do not
divide by the number of processes, a layer that nobody uses and one that few samples use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import NUM_CLASSES, NUM_FEATURES, Watch, build, points
from torch import nn

from hezar_train import Trainer, TrainerConfig

WIDTH = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.inner(self.norm(x)).tanh()
        return mixed


class Tower(nn.Module):
    """Blocks between tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)
        self.tied = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        self.num_samples += len(x) if self.training else 0
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        is_rare = number % 24 == 5
        if is_rare.any():
            hidden = hidden + self.rare(hidden) * is_rare[:, None]
        logits: torch.Tensor = self.last(hidden) + self.tied(hidden.square())
        return logits


SETTINGS: dict[str, Any] = {
    "batch_size": 2, "global_batch_size": 12, "num_epochs": 2, "criterion": "CrossEntropyLoss",
    "task": "text_classification", "trackers": [], "optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1,
    "sharding": "full",
}  # fmt: skip


def tower(
    out: Path, hooks: Any = (), kind: type[Trainer] = Trainer, dtype: torch.dtype = torch.float64, **changes: Any
) -> Trainer:
    """Build a trainer of a Tower in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tower().to(dtype)
    train, evaluation = ([{**row, "x": row["x"].to(dtype)} for row in points(count, count)] for count in (49, 13))
    given = {name: changes.pop(name) for name in ("optimizer_object", "accelerator") if name in changes}
    optimizer = given["optimizer_object"](model) if "optimizer_object" in given else None
    config = TrainerConfig(out, **SETTINGS | changes)
    return kind(
        config, model, train, evaluation, optimizer=optimizer, accelerator=given.get("accelerator"), hooks=hooks
    )


def told(trainer: Trainer, watch: Watch | None = None) -> dict[str, Any]:
    """Train; return what can be compared between numbers of processes and shardings."""
    result = trainer.train()
    state = trainer.state
    return {
        "losses": [] if watch is None else watch.losses,
        "metrics": result.metrics,
        "counts": (state.update_step, state.samples_seen, state.epoch, state.position),
        "weights": trainer.get_model_para(),
    }


def climb(out: Path, **changes: Any) -> dict[str, Any]:
    """Train a Tower."""
    watch = Watch()
    return told(tower(out, [watch], **changes), watch)


def learn_spread(case: str, out: Path, dtype: torch.dtype, **changes: Any) -> dict[str, Any]:
    """Train one of the cases."""
    watch = Watch()
    return told(build(case, out, [watch], dtype, **changes), watch)

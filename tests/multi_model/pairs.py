"""Two models that differ, trained in one run: with plain layers, or with everything that could break a resume."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from workload import NUM_FEATURES, NUM_LABELS, Crash, NoisyPoints, make_config, make_net

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.loop import Context, Moment
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.types import Mode

BOTH = ("sequential", "parallel")
SETTINGS: dict[str, Any] = {
    "num_epochs": 2, "log_steps": 2, "save_steps": 3, "eval_steps": None, "save_total_limit": None
}  # fmt: skip


def seeded(seed: int, *layers: Any) -> nn.Sequential:
    """Build layers, given as (class, arguments...), with weights that depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(kind(*arguments) for kind, *arguments in layers))


class Plain(nn.Module):
    """Layers without chance."""

    def __init__(self, seed: int, width: int = 0) -> None:
        super().__init__()
        deep = ((nn.Linear, NUM_FEATURES, width), (nn.Tanh,), (nn.Linear, width, NUM_LABELS))
        self.layers = seeded(seed, *(deep if width else ((nn.Linear, NUM_FEATURES, NUM_LABELS),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


def plain_pair() -> dict[str, nn.Module]:
    """Return two models of different shapes."""
    return {"small": Plain(1), "wide": Plain(2, width=8)}


def noisy_pair() -> dict[str, nn.Module]:
    """Return two models with dropout, one of them with batch norm too."""
    deep = ((nn.Linear, NUM_FEATURES, 8), (nn.ReLU,), (nn.Dropout, 0.5), (nn.Linear, 8, NUM_LABELS))
    wide = Plain(3)
    wide.layers = seeded(3, *deep)
    return {"normed": make_net(), "wide": wide}


def plain_config(out: str | os.PathLike[str], **changes: Any) -> TrainerConfig:
    """Return the config of a run of two epochs of five steps."""
    settings = {"task": "text_classification", "num_epochs": 2, "batch_size": 4, "learning_rate": 0.1}
    return TrainerConfig(out, **settings | {"criterion": "CrossEntropyLoss"} | changes)


def make_plain(
    out: str | os.PathLike[str], interact: str = "sequential", cls: type[MultiModelTrainer] = MultiModelTrainer,
    models: Any = None, **changes: Any,
) -> MultiModelTrainer:  # fmt: skip
    """Build the trainer of the plain pair on twenty samples."""
    others = {name: changes.pop(name) for name in ("eval_model", "optimizers", "hooks") if name in changes}
    data = {"train_dataset": NoisyPoints(20), "eval_dataset": changes.pop("eval_dataset", None)}
    return cls(plain_config(out, **changes), models or plain_pair(), interact=interact, **data, **others)


def make_noisy(
    out: str | os.PathLike[str], interact: str, cls: type[MultiModelTrainer] = MultiModelTrainer,
    hooks: Iterable[Hook] = (), **changes: Any,
) -> MultiModelTrainer:  # fmt: skip
    """Build the trainer of the noisy pair: 2 epochs of 30 samples, 8 steps and 3 updates each."""
    config = make_config(out, **SETTINGS | changes)
    return cls(config, noisy_pair(), NoisyPoints(30), NoisyPoints(10), interact=interact, hooks=hooks)


def train_alone(out: str | os.PathLike[str], model: nn.Module, **changes: Any) -> nn.Module:
    """Train one model as a run of its own, on the data of the plain pair."""
    Trainer(plain_config(out, **changes), model, NoisyPoints(20)).train()
    return model


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two models have equal weights and buffers, bit by bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(key == name and torch.equal(value, like) for (key, value), (name, like) in pairs)


def crash_at_model(trainer: MultiModelTrainer, step: int, moment: str, model: int) -> None:
    """Raise in one model's turn at a moment of the step that follows `step` finished ones."""

    def raise_there(_: Context) -> None:
        if trainer.state.global_step == step:
            raise Crash(f"at step {step}")

    trainer.register_hook_in_train(raise_there, moment, model)


def crash_after(trainer: MultiModelTrainer, num_moments: int) -> None:
    """Raise after so many moments, whichever it then is: a model's, one that all share, or an evaluation's."""
    left = num_moments

    def count(_: Context) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash(f"after {num_moments} moments")

    for hooks in (*trainer.hooks_in_train_multiple_models, trainer.hooks[Mode.TRAIN], trainer.hooks[Mode.VAL]):
        for moment in Moment:
            hooks.register(count, moment)

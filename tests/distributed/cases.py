"""What is trained on several processes, and what is told of it: samples per update, rates, counts, weights, metrics.

Each case is a small model and data whose samples carry their number. `learn` is the function that runs on a process.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.events import Ledger

NUM_FEATURES, NUM_CLASSES, VOCABULARY, IGNORED = 4, 3, 20, -100

torch.set_num_threads(1)  # bits depend on the number of threads


class Points(nn.Module):
    """Two layers over a point."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 9), nn.Tanh(), nn.Linear(9, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


class Tagger(nn.Module):
    """A label for each token, from its neighbours too; padding has the token 0, which its neighbours see as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.mix(self.embedding(tokens).mT).mT.tanh())
        return logits


def points(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return labelled points, each with its number."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, NUM_FEATURES, generator=generator, dtype=torch.float64)
    return [{"x": x, "labels": int(x[:NUM_CLASSES].argmax()), "number": n} for n, x in enumerate(drawn)]


def sentences(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return token sequences of unequal lengths with a label per token, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = torch.where(tokens % 5 == 0, IGNORED, tokens % NUM_CLASSES)
        rows.append({"tokens": tokens, "labels": labels, "number": number})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad tokens with 0 and labels with -100."""
    batch = {"number": torch.tensor([row["number"] for row in rows])}
    for key, fill in (("tokens", 0), ("labels", IGNORED)):
        values = [row[key] for row in rows]
        batch[key] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    return batch


@dataclass(frozen=True)
class Case:
    """Data, model and settings of a run."""

    settings: Mapping[str, Any]
    num_samples: int
    is_tagger: bool = False

    @property
    def data(self) -> tuple[list[Any], list[Any]]:
        make = sentences if self.is_tagger else points
        return make(self.num_samples), make(13, seed=2)


CASES = {
    "plain": Case({"batch_size": 8, "global_batch_size": 24}, 96),
    "small micro-batches": Case({"batch_size": 1, "global_batch_size": 12}, 48),
    "variable lengths": Case({"batch_size": 3, "global_batch_size": 10, "task": "sequence_labeling"}, 40, True),
    "short last window": Case({"batch_size": 2, "global_batch_size": 12}, 49),
}
"""Four updates in each epoch; five where the last is short: one sample for all processes."""

SGD_FLOAT32 = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9}
ADAMW_FLOAT64 = {"optimizer": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}


class Watch(Hook):
    """Note, for every update, the numbers of the samples that the model was given here, its loss and its rate."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = defaultdict(list)
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_batch_forward(self, ctx: Any) -> None:
        if ctx.window.sizes[ctx.batch_in_window]:  # else it only keeps others company
            self.samples[self.trainer.state.update_step + 1] += ctx.batch["number"].tolist()

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window:
            self.losses.append(ctx.loss_value)
            self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])


class Fail(RuntimeError):  # noqa: N818 - what happens, not what went wrong
    """What a test's hook raises."""


class FailAt(Hook):
    """Raise in the forward that follows so many updates, on all processes or on one."""

    def __init__(self, update: int, rank: int | None = None) -> None:
        self._update, self._rank = update, rank

    def on_batch_forward(self, _: Any) -> None:
        if self.trainer.state.update_step == self._update and self._rank in {None, self.trainer.runtime.rank}:
            raise Fail(f"after update {self._update}")


def build(
    case: str,
    out: Path,
    hooks: Iterable[Hook] = (),
    dtype: torch.dtype = torch.float32,
    kind: type[Trainer] = Trainer,
    **changes: Any,
) -> Any:
    """Build the trainer of a case."""
    chosen = CASES[case]
    train, evaluation = chosen.data
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (Tagger() if chosen.is_tagger else Points()).to(dtype)
    if not chosen.is_tagger:
        train, evaluation = ([{**row, "x": row["x"].to(dtype)} for row in rows] for rows in (train, evaluation))
    settings = {"task": "text_classification", "criterion": "CrossEntropyLoss", "num_epochs": 2, "trackers": []}
    config = TrainerConfig(out, **settings | SGD_FLOAT32 | dict(chosen.settings) | changes)
    return kind(config, model, train, evaluation, padded if chosen.is_tagger else None, hooks=hooks)


def learn(case: str, out: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Train; return what can be compared between numbers of processes."""
    watch = Watch()
    trainer = build(case, out, [watch], dtype, **changes)
    result = trainer.train()
    state = trainer.state
    return {
        "samples": dict(watch.samples),
        "losses": watch.losses,
        "rates": watch.rates,
        "metrics": result.metrics,
        "counts": (state.update_step, state.samples_seen, state.epoch, state.position, result.num_samples),
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
    }


def samples_of_updates(told: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Return the samples of each update over all processes, sorted; one that came twice is there twice."""
    updates = sorted({update for one in told for update in one["samples"]})
    return {update: sorted(n for one in told for n in one["samples"].get(update, [])) for update in updates}


def ledger_of(out: Path) -> list[dict[str, Any]]:
    """Return what a run's ledger says of each update."""
    return [dataclasses.asdict(line) for line in Ledger.read(out / "ledger.jsonl")]


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of two models' weights."""
    assert set(ours) == set(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in theirs)


def steps_saved(out: Path) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())


def last_weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    found: dict[str, torch.Tensor] = load_file(out / f"checkpoints/{steps_saved(out)[-1]:08d}/model.safetensors")
    return found

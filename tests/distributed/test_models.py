"""Models that are awkward to train on several processes: unused, frozen and rarely used parameters, buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from cases import NUM_CLASSES, NUM_FEATURES, distance, points
from ranks import on_ranks
from torch import nn
from torch.nn.functional import cross_entropy

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.runtime import SyncedBatchNorm

NUM_SAMPLES = 48


class Net(nn.Module):
    """A layer that is used; subclasses add what makes a model awkward."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.other = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x)}


class OnOneProcess(Net):
    """`other` is used for a few samples only, so in most updates by one process or by none."""

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x)
        rare = number % 12 == 0
        return {"logits": logits + self.other(x) * rare[:, None] if rare.any() else logits}


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other.requires_grad_(False)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x) + self.other(x)}


class InTheLoss(Net):
    """Parameters that only the loss uses, as those of a CRF."""

    settings: ClassVar[dict[str, Any]] = {"criterion": None}

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits * self.other.bias.exp(), labels)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.layer.weight

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x) + self.other(x).tanh()}


class SparseRows(Net):
    """An embedding with gradients for the rows it used alone."""

    settings: ClassVar[dict[str, Any]] = {"optimizer_kwargs": {"fused": False}}  # fused kernels refuse such gradients

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_SAMPLES + 1, NUM_CLASSES, sparse=True)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.layer(x) + self.table(number)}


def trainer_of(
    make: Callable[[], nn.Module], out: Path, hooks: Any = (), kind: type[Trainer] = Trainer, **changes: Any
) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    rows = [{**row, "x": row["x"].float()} for row in points(NUM_SAMPLES + 1)]
    settings = {
        "batch_size": 3, "global_batch_size": 12, "num_epochs": 2, "criterion": "CrossEntropyLoss", "optimizer": "sgd",
        "learning_rate": 0.1, "task": "text_classification", "trackers": [],
    }  # fmt: skip
    return kind(TrainerConfig(out, **settings | changes), model, rows, rows[:7], hooks=hooks)


def train(make: Callable[[], nn.Module], out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    trainer = trainer_of(make, out, **changes)
    metrics = trainer.train().metrics
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}, metrics


@pytest.mark.parametrize("make", [Net, OnOneProcess, Frozen, InTheLoss, Tied, SparseRows])
def test_a_model_trains_without_configuration_as_on_one_process(make: type[Net], tmp_path: Path) -> None:
    ((weights, metrics),) = on_ranks(1, lambda: train(make, tmp_path, **make.settings))
    for count in (2, 3):
        for told, told_metrics in on_ranks(count, lambda: train(make, tmp_path, **make.settings)):
            assert distance(told, weights) < 1e-5
            assert told_metrics == pytest.approx(metrics, rel=1e-5)


def test_a_parameter_that_no_process_uses_is_not_even_decayed(tmp_path: Path) -> None:
    ((alone, _),) = on_ranks(1, lambda: train(Net, tmp_path, weight_decay=0.1))
    for weights, _ in on_ranks(2, lambda: train(Net, tmp_path, weight_decay=0.1)):
        assert torch.equal(weights["other.weight"], alone["other.weight"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


WHOLE = {"batch_size": 12, "drop_last": True}


def test_synchronised_batch_norm_sees_the_batch_of_one_process(tmp_path: Path) -> None:
    ((weights, metrics),) = on_ranks(1, lambda: train(Normed, tmp_path, **WHOLE))
    for count in (2, 3):
        told = on_ranks(count, lambda: train(Normed, tmp_path, sync_batchnorm=True, **WHOLE))
        for ours, our_metrics in told:
            assert distance(ours, weights) < 1e-5
            assert our_metrics == pytest.approx(metrics, rel=1e-5)


class OwnStep(Trainer):
    def training_step(self, batch: Any) -> dict[str, Any]:
        loss = cross_entropy(self.model(batch["x"]), batch["labels"])
        self.accelerator.backward(loss)
        return {"loss": loss.detach()}


def test_filler_counts_for_nothing_in_batch_norm_whoever_calls_the_model(tmp_path: Path) -> None:
    def weights(kind: type[Trainer]) -> tuple[dict[str, torch.Tensor], bool]:
        trainer = trainer_of(Normed, tmp_path / kind.__name__, kind=kind, sync_batchnorm=True, batch_size=12)
        trainer.train()  # the last update of an epoch has one sample, so that a process has none
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}, SyncedBatchNorm.skips

    default, own = on_ranks(2, weights, Trainer), on_ranks(2, weights, OwnStep)
    for (ours, skips), (expected, _) in zip(own, default, strict=True):
        assert distance(ours, expected) < 1e-6
        assert not skips  # what the process does next is no filler
    assert [skips for _, skips in default] == [False, False]


def test_without_it_all_processes_evaluate_with_the_statistics_that_are_saved(tmp_path: Path) -> None:
    def evaluate() -> tuple[dict[str, float], torch.Tensor]:
        trainer = trainer_of(Normed, tmp_path, **WHOLE)
        metrics = trainer.train().metrics
        return metrics, trainer.model.layers[1].running_mean.clone()  # type: ignore[index,union-attr]

    told = on_ranks(2, evaluate)
    assert torch.equal(told[0][1], told[1][1])
    saved = on_ranks(1, lambda: trainer_of(Normed, tmp_path, resume_from_checkpoint=True, **WHOLE).evaluate())[0]
    assert {f"evaluation.{name}": value for name, value in saved.items()} == pytest.approx(
        {name: value for name, value in told[0][0].items() if name.startswith("evaluation")}, rel=1e-6
    )


class Centred(nn.Module):
    """A model whose training depends on a buffer that follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.register_buffer("centre", torch.zeros(NUM_FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * x.mean(0))
        logits: torch.Tensor = self.layer(x - self.centre)
        return logits


class FailAfter(Hook):
    def __init__(self, update: int) -> None:
        self._update = update

    def on_batch_forward(self, _: Any) -> None:
        if self.trainer.state.update_step == self._update:
            raise RuntimeError("stop here")


def break_and_resume(out: Path) -> dict[str, torch.Tensor]:
    with pytest.raises(RuntimeError, match="stop here"):
        train(Centred, out, save_steps=1, hooks=[FailAfter(3)])
    return train(Centred, out, save_steps=1, resume_from_checkpoint=True)[0]


def test_a_buffer_that_training_depends_on_does_not_break_a_resume(tmp_path: Path) -> None:
    unbroken = on_ranks(2, lambda: train(Centred, tmp_path / "unbroken", save_steps=1)[0])
    resumed = on_ranks(2, break_and_resume, tmp_path / "resumed")
    assert distance(resumed[0], unbroken[0]) == 0.0
    assert distance(unbroken[1], unbroken[0]) == 0.0


IGNORED, VOCABULARY = -100, 50
BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def tagged(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    drawn = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"token_ids": one, "attention_mask": torch.ones_like(one), "labels": one % 3} for one in drawn]


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    fills = {"token_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        key: nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True, padding_value=fill)
        for key, fill in fills.items()
    }


def train_tagger(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    from hezar.models import BertSequenceLabeling, BertSequenceLabelingConfig

    torch.manual_seed(0)
    config = BertSequenceLabelingConfig(num_labels=3, id2label={0: "O", 1: "B-X", 2: "I-X"}, **BERT)
    settings = {"batch_size": 2, "global_batch_size": 6, "num_epochs": 2, "optimizer": "sgd", "learning_rate": 0.05}
    given = TrainerConfig(out, task="sequence_labeling", trackers=[], **settings)
    trainer = Trainer(given, BertSequenceLabeling(config), tagged(13), tagged(5), padded)
    return {"loss": trainer.train().metrics}["loss"], trainer.model.state_dict()


def test_hezars_tagger_with_an_unused_pooler_trains_as_on_one_process(tmp_path: Path) -> None:
    pytest.importorskip("hezar.models")
    ((metrics, weights),) = on_ranks(1, train_tagger, tmp_path)
    for told, told_weights in on_ranks(2, train_tagger, tmp_path):
        assert told == pytest.approx(metrics, rel=1e-5)
        assert distance(told_weights, weights) < 1e-5


def train_reader(out: Path) -> list[float]:
    from hezar.models import CRNNImage2Text, CRNNImage2TextConfig

    torch.manual_seed(0)
    names = {number: str(number) for number in range(6)}
    config = CRNNImage2TextConfig(map2seq_in_dim=1024, map2seq_out_dim=8, rnn_dim=8, id2label=names)
    generator = torch.Generator().manual_seed(4)
    rows = [
        {
            "pixel_values": torch.rand(1, 32, 24, generator=generator),
            "labels": torch.randint(1, 6, (3,), generator=generator),
        }
        for _ in range(8)
    ]
    given = TrainerConfig(out, task="image2text", batch_size=2, num_epochs=2, optimizer="sgd", trackers=[])
    trainer = Trainer(given, CRNNImage2Text(config), rows, rows[:2])
    trainer.train()
    return [float(value.double().sum()) for value in trainer.model.state_dict().values()]


def test_hezars_crnn_with_unused_batch_norms_trains_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("hezar.models")
    one, other = on_ranks(2, train_reader, tmp_path, seconds=120)
    assert one == other

"""An evaluation counts every sample once on any number of processes: results, tables, intervals, worst samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks, outcomes_on
from torch import nn

from hezar_train import Trainer, TrainerConfig
from hezar_train.metrics import MetricsHandler

Rows = list[dict[str, Any]]

NUM_SAMPLES, PLACES, WORDS = 13, 5, ("یک", "دو", "three", "four", "five five")
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


class Echo(nn.Module):
    """Give back the logits that lie in the data."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=TAGS)

    def forward(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": logits}


class Words:
    """A tokenizer: an id is a word."""

    pad_token_id = 0

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return [" ".join(WORDS[int(one)] for one in row) for row in ids]

    def save(self, folder: str) -> None:
        """Write nothing."""


def rows(labels: str, count: int = NUM_SAMPLES) -> Rows:
    """Return logits with labels of a kind."""
    generator = torch.Generator().manual_seed(7)

    def make() -> dict[str, torch.Tensor]:
        tokens, of_tokens = (PLACES,), torch.randn(PLACES, len(TAGS), generator=generator)
        one = torch.randn(len(TAGS), generator=generator)
        classes = torch.randint(0, len(TAGS), tokens, generator=generator)
        return {
            "class": {"logits": one, "labels": classes[0]},
            "several": {"logits": one, "labels": (one.roll(1) > 0).float()},
            "number": {"logits": one[0], "labels": one[0] + one[1]},
            "tags": {"logits": of_tokens, "labels": torch.where(classes == 4, -100, classes)},
            "next": {"logits": of_tokens, "labels": classes.index_fill(0, torch.tensor([0]), -100)},
            "words": {"logits": of_tokens, "labels": classes},
        }[labels]

    return [make() for _ in range(count)]


TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": (
        "class",
        {
            "task": "text_classification",
            "metrics": ["accuracy", "top_k_accuracy", "precision", "recall", "f1", "matthews", "auroc"],
        },
    ),
    "several labels": ("several", {"task": "text_classification", "criterion": "BCEWithLogitsLoss"}),
    "numbers": (
        "number",
        {
            "task": "regression",
            "criterion": "MSELoss",
            "metrics": ["mse", "rmse", "mae", "r2", "pearson", "spearman"],
        },
    ),
    "entities": ("tags", {"task": "sequence_labeling", "metrics": ["seqeval", "token_accuracy"]}),
    "next tokens": ("next", {"task": "language_modeling"}),
    "masked tokens": ("tags", {"task": "mask_filling", "metrics": ["perplexity", "token_accuracy"]}),
    "texts": ("words", {"task": "text_generation", "metrics": ["cer", "wer", "rouge", "bleu", "chrf"]}),
}


def evaluate(
    out: Path, labels: str, count: int, settings: dict[str, Any], handler: Any = None
) -> tuple[dict[str, float], Any, Any]:
    """Evaluate alone, without training; return metrics, tables and worst samples."""
    given = {"criterion": "CrossEntropyLoss", "batch_size": 2, "bootstrap_samples": 20, "trackers": []}
    trainer = Trainer(
        TrainerConfig(out, **given | settings),
        Echo(),
        eval_dataset=rows(labels, count),
        preprocessor=Words() if labels == "words" else None,
        metrics_handler=handler,
    )
    metrics = trainer.evaluate()
    (report,) = trainer.last_evaluation.values()
    return metrics, report.tables, report.worst_samples


def assert_as_alone(counts: list[int], work: Callable[[], tuple[dict[str, float], Any, Any]]) -> dict[str, float]:
    """Check that all processes tell what one alone tells: exactly, but for the means of batches that are cut."""
    ((metrics, tables, worst),) = on_ranks(1, work)
    for count in counts:
        for told, told_tables, told_worst in on_ranks(count, work):
            assert told == pytest.approx(metrics, rel=1e-6, nan_ok=True)
            assert counted(told) == pytest.approx(counted(metrics), rel=1e-12, nan_ok=True)
            assert told_tables == tables
            assert [row["sample"] for row in told_worst] == [row["sample"] for row in worst]
            assert told_worst == worst
    found: dict[str, float] = metrics
    return found


def counted(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("loss", "perplexity"))}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("count", [NUM_SAMPLES, 2], ids=["uneven", "fewer samples than processes"])
def test_every_handler_gives_the_results_of_one_process(task: str, count: int, tmp_path: Path) -> None:
    labels, settings = TASKS[task]
    found = assert_as_alone([3], lambda: evaluate(tmp_path, labels, count, settings))
    assert len(found) > 1
    assert any(name.endswith(".low") for name in found)


class OfTheWholeSet:
    """A handler as of old: it is given all predictions at once."""

    def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
        return {"right": float((predictions.argmax(-1) == labels).mean()), "first": float(labels[0])}


def test_a_function_of_the_whole_set_sees_it_in_the_order_of_the_data(tmp_path: Path) -> None:
    settings = {"task": "text_classification", "bootstrap_samples": 0}
    assert_as_alone([2], lambda: evaluate(tmp_path, "class", NUM_SAMPLES, settings, OfTheWholeSet()))


class Counting(MetricsHandler):
    """A handler that counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def reset(self) -> None:
        self.num_seen = 0

    def update(self, outputs: Any, labels: Any) -> None:
        self.num_seen += len(labels)

    def compute(self) -> dict[str, float]:
        return {"seen": float(self.num_seen)}


class Mergeable(Counting):
    def state(self) -> Any:
        return self.num_seen

    def merge(self, states: Any) -> None:
        self.num_seen += states


def test_a_handler_of_ones_own_that_can_be_merged_counts_every_sample_once(tmp_path: Path) -> None:
    settings = {"bootstrap_samples": 0}
    found = assert_as_alone([2], lambda: evaluate(tmp_path, "class", NUM_SAMPLES, settings, Mergeable()))
    assert found["seen"] == NUM_SAMPLES


def test_a_handler_of_ones_own_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, evaluate, tmp_path, "class", NUM_SAMPLES, {}, Counting())
    for one in outcomes:
        assert "Counting counts" in one.error
        assert "has no state() and merge()" in one.error


def test_only_so_many_batches_are_those_of_one_process(tmp_path: Path) -> None:
    settings = {"task": "text_classification", "max_eval_batches": 3}
    assert_as_alone([2, 3], lambda: evaluate(tmp_path, "class", NUM_SAMPLES, settings))


def evaluate_named_sets(out: Path) -> dict[str, float]:
    sets = {"dev": rows("class", 5), "hard": rows("class", 1)}
    config = TrainerConfig(out, task="text_classification", criterion="CrossEntropyLoss", batch_size=2, trackers=[])
    return Trainer(config, Echo(), eval_dataset=sets).evaluate()


def test_named_sets_are_evaluated_one_by_one(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, evaluate_named_sets, tmp_path)
    assert set(alone) == {"dev.loss", "dev.accuracy", "hard.loss", "hard.accuracy"}
    for told in on_ranks(2, evaluate_named_sets, tmp_path):
        assert told == pytest.approx(alone, rel=1e-6)


def predict(out: Path, count: int, name: str | None = None) -> Any:
    config = TrainerConfig(out / "run", task="text_classification", batch_size=2, trackers=[])
    trainer = Trainer(config, Echo(), eval_dataset=[{"logits": row["logits"]} for row in rows("class", count)])
    return trainer.predict(path=None if name is None else out / name)


@pytest.mark.parametrize("count", [NUM_SAMPLES, 2])
def test_predictions_are_complete_and_in_order_on_every_process(count: int, tmp_path: Path) -> None:
    expected = [int(row["logits"].argmax()) for row in rows("class", count)]
    assert on_ranks(3, predict, tmp_path, count) == [expected] * 3


@pytest.mark.parametrize("name", ["found.jsonl", "found.parquet"])
def test_predictions_are_written_once_by_the_main_process(name: str, tmp_path: Path) -> None:
    assert on_ranks(2, predict, tmp_path, NUM_SAMPLES, name) == [tmp_path / name] * 2
    expected = [int(row["logits"].argmax()) for row in rows("class")]
    if name.endswith("parquet"):
        table = pytest.importorskip("pandas").read_parquet(tmp_path / name)
        assert table["prediction"].tolist() == expected
    else:
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert lines == [{"sample": n, "prediction": value} for n, value in enumerate(expected)]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]


def test_a_name_that_cannot_be_written_to_is_refused_on_all_processes(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, predict, tmp_path, NUM_SAMPLES, "found.xml")
    assert all("cannot be written to" in one.error for one in outcomes)

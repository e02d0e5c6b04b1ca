"""Evaluation through the real trainer: exact for any batch size, any task, any form of metric, any number of sets."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hezar_train import Trainer
from hezar_train.config import MetricConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics import ClassificationHandler, MetricsHandler, build_metric
from hezar_train.trainer.report_samples import MOST_PLACES_SHOWN, WorstSamples
from hezar_train.types import MetricType, TaskType

Build = Callable[..., Trainer]

NUM_SAMPLES = 17
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
METRICS_OF_TOKENS = ("loss", "perplexity", "token_accuracy")
SCRIPT = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"share": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""


class Tagger(nn.Module):
    """A label per token, of names that the config tells."""

    def __init__(self, num_labels: int = len(TAGS), names: list[str] | None = TAGS) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=None if names is None else dict(enumerate(names)))
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.embedding = nn.Embedding(12, num_labels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embedding(tokens)
        return logits


class Causal(Tagger):
    """The token after each place."""

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Line(nn.Module):
    """A number, or several logits, per row of four."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(6)
            self.layer = nn.Linear(4, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x)
        return logits


def sentences(count: int = NUM_SAMPLES, num_labels: int = len(TAGS)) -> list[dict[str, torch.Tensor]]:
    """Return token rows of one length, of which the last places of some are padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(12, (count, 6), generator=generator)
    labels = torch.randint(num_labels, (count, 6), generator=generator)
    lengths = torch.randint(2, 7, (count, 1), generator=generator)
    labels = labels.where(torch.arange(6) < lengths, -100)
    return [{"tokens": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def cut_to_the_longest(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Make batches of unequal widths, as padding collators do."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    width = int((batch["labels"] != -100).sum(1).max())
    return {key: value[:, :width] for key, value in batch.items()}


def labelled(targets: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    points = torch.randn(len(targets), 4, generator=generator)
    return [{"x": point, "labels": target} for point, target in zip(points, targets, strict=True)]


def expected_and_predicted(trainer: Trainer, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and logits of a whole set, by the model alone."""
    inputs = torch.stack([next(iter(row.values())) for row in rows])
    with torch.no_grad():
        return torch.as_tensor([row["labels"].tolist() for row in rows]), trainer.model(inputs)


@pytest.fixture(params=[1, 3, 7, NUM_SAMPLES])
def batch_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class TestExactness:
    """The whole set's value, whatever the batches were."""

    def test_classification_equals_scikit_learn(self, toy: Build, batch_size: int) -> None:
        from sklearn import metrics as theirs

        rows = labelled(torch.arange(NUM_SAMPLES) % 3)
        names = ["accuracy", "f1", "precision", "recall", "matthews"]
        trainer = toy(
            task="text_classification", metrics=names, model=Line(3), train_dataset=rows, eval_dataset=rows,
            eval_batch_size=batch_size,
        )  # fmt: skip
        labels, logits = expected_and_predicted(trainer, rows)
        predicted, found = logits.argmax(1), trainer.evaluate()
        averaged = {"average": "macro", "zero_division": 0.0}
        assert found == {
            "loss": pytest.approx(float(nn.functional.cross_entropy(logits, labels)), rel=1e-6),
            "accuracy": pytest.approx(theirs.accuracy_score(labels, predicted), abs=1e-12),
            "f1": pytest.approx(theirs.f1_score(labels, predicted, **averaged), abs=1e-12),
            "precision": pytest.approx(theirs.precision_score(labels, predicted, **averaged), abs=1e-12),
            "recall": pytest.approx(theirs.recall_score(labels, predicted, **averaged), abs=1e-12),
            "matthews": pytest.approx(theirs.matthews_corrcoef(labels, predicted), abs=1e-12),
        }

    def test_sequence_labeling_equals_seqeval_also_in_batches_of_one(self, toy: Build, batch_size: int) -> None:
        theirs = pytest.importorskip("seqeval.metrics")
        rows = sentences()
        trainer = toy(
            task="sequence_labeling", model=Tagger(), train_dataset=rows, eval_dataset=rows, eval_batch_size=batch_size
        )
        labels, logits = expected_and_predicted(trainer, rows)
        pairs = list(zip(labels, logits.argmax(2), strict=True))
        true = [[TAGS[i] for i in row[row != -100]] for row, _ in pairs]
        ours = [[TAGS[i] for i in guess[row != -100]] for row, guess in pairs]
        found = trainer.evaluate()
        assert found["f1"] == pytest.approx(theirs.f1_score(true, ours), abs=1e-12)
        assert found["accuracy"] == pytest.approx(theirs.accuracy_score(true, ours), abs=1e-12)
        assert found["loss"] == pytest.approx(
            float(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())), rel=1e-6
        )

    def test_regression_equals_scikit_learn(self, toy: Build, batch_size: int) -> None:
        from sklearn import metrics as theirs

        rows = labelled(torch.randn(NUM_SAMPLES, generator=torch.Generator().manual_seed(9)))
        trainer = toy(
            task="regression", criterion="MSELoss", model=Line(1), train_dataset=rows, eval_dataset=rows,
            eval_batch_size=batch_size,
        )  # fmt: skip
        labels, values = expected_and_predicted(trainer, rows)
        found = trainer.evaluate()
        assert found["mse"] == pytest.approx(theirs.mean_squared_error(labels, values[:, 0]), rel=1e-6)
        assert found["r2"] == pytest.approx(theirs.r2_score(labels, values[:, 0]), rel=1e-6)
        assert found["loss"] == pytest.approx(found["mse"], rel=1e-6)

    def test_multi_label_classification_equals_scikit_learn(self, toy: Build, batch_size: int) -> None:
        from sklearn import metrics as theirs

        targets = torch.randint(2, (NUM_SAMPLES, 4), generator=torch.Generator().manual_seed(4)).float()
        rows = labelled(targets)
        trainer = toy(
            task="text_classification", metrics=["accuracy", "f1"], criterion="BCEWithLogitsLoss", model=Line(4),
            train_dataset=rows, eval_dataset=rows, eval_batch_size=batch_size,
        )  # fmt: skip
        labels, logits = expected_and_predicted(trainer, rows)
        found = trainer.evaluate()
        predicted = logits > 0
        assert found["f1"] == pytest.approx(theirs.f1_score(labels, predicted, average="macro", zero_division=0.0))
        assert found["accuracy"] == pytest.approx(theirs.accuracy_score(labels, predicted))

    @pytest.mark.parametrize("task", ["language_modeling", "mask_filling"])
    def test_perplexity_is_that_of_all_tokens(self, toy: Build, batch_size: int, task: str) -> None:
        rows = sentences(num_labels=12)
        shift = 1 if task == "language_modeling" else 0

        class Tokens(Tagger):
            def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                kept = slice(0, logits.shape[1] - shift)
                return nn.functional.cross_entropy(logits[:, kept].flatten(0, 1), labels[:, shift:].flatten())

        model = Tokens(12, names=None)
        trainer = toy(
            task=task, criterion=None, model=model, train_dataset=rows, eval_dataset=rows, eval_batch_size=batch_size
        )
        labels, logits = expected_and_predicted(trainer, rows)
        found = trainer.evaluate()
        assert found["loss"] == pytest.approx(float(model.compute_loss(logits, labels)), rel=1e-6)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-9)
        right, counted = labels[:, shift:], labels[:, shift:] != -100
        hits = (logits.argmax(2)[:, : 6 - shift] == right) & counted
        assert found["token_accuracy"] == pytest.approx(float(hits.sum() / counted.sum()), rel=1e-6)

    def test_averages_of_batches_would_be_something_else(self, toy: Build) -> None:
        rows = labelled(torch.tensor([0, 0, 1, 2, 1, 0, 2]))
        settings = {"task": "text_classification", "metrics": ["f1"], "train_dataset": rows, "eval_dataset": rows}
        whole, cut = (toy(model=Line(3), eval_batch_size=size, **settings) for size in (7, 3))
        pieces = [cut.evaluate(rows[start : start + 3])["f1"] for start in (0, 3, 6)]
        assert cut.evaluate()["f1"] == whole.evaluate()["f1"] != pytest.approx(sum(pieces) / 3)

    def test_data_of_a_shuffled_loader_is_evaluated_whole(self, toy: Build, rows: Any) -> None:
        trainer = toy(task="text_classification", eval_dataset=DataLoader(rows(9), batch_size=2, shuffle=True))
        assert trainer.evaluate() == pytest.approx(toy(task="text_classification", eval_dataset=rows(9)).evaluate())


class TestTasks:
    @pytest.mark.parametrize("task", [*TaskType])
    def test_every_task_constructs_with_its_own_metrics(self, toy: Build, rows: Any, task: TaskType) -> None:
        assert toy(task=task, eval_dataset=rows(3)).best_key == "evaluation.loss"

    @pytest.mark.parametrize("task", ["text_detection", "backbone", None, "image2text", "text_generation"])
    def test_without_metrics_or_a_way_to_text_there_is_the_loss(self, toy: Build, rows: Any, task: str | None) -> None:
        assert set(toy(task=task, eval_dataset=rows(3), loss_weight="samples").evaluate()) == {"loss"}

    def test_labels_without_names_are_judged_by_token(self, toy: Build) -> None:
        rows = sentences()
        trainer = toy(task="sequence_labeling", model=Tagger(names=None), train_dataset=rows, eval_dataset=rows)
        assert set(trainer.evaluate()) == {"loss", "token_accuracy"}

    def test_the_best_model_may_be_told_by_the_f1_of_entities(self, toy: Build, tmp_path: Path) -> None:
        rows = sentences()
        trainer = toy(
            task="sequence_labeling", model=Tagger(), train_dataset=rows, eval_dataset=rows, num_epochs=4,
            metric_for_best_model="f1",
        )  # fmt: skip
        trainer.train()
        best = json.loads((tmp_path / "run/best.json").read_text())
        records = [json.loads(path.read_text()) for path in sorted((tmp_path / "run/evaluations").glob("*.json"))]
        assert best["metric"] == "evaluation.f1"
        assert best["value"] == max(record["metrics"]["f1"] for record in records)
        assert next(iter(records))["metrics"]["f1"] != best["value"]


class TestFormsOfMetrics:
    def test_a_name_a_type_a_config_and_an_object(self, toy: Build, rows: Any) -> None:
        config = MetricConfig("f1", options={"average": "micro"})
        given = ["accuracy", MetricType.RECALL, config, build_metric("precision")]
        found = toy(task="text_classification", metrics=given, eval_dataset=rows(9)).evaluate()
        assert set(found) == {"loss", "accuracy", "recall", "f1", "precision"}
        assert found["f1"] == pytest.approx(found["accuracy"])

    def test_a_metric_of_torchmetrics(self, toy: Build, rows: Any) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")
        theirs = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        trainer = toy(task="text_classification", metrics=[theirs, "accuracy"], eval_dataset=rows(9), num_epochs=2)
        found = trainer.train().metrics
        assert found["evaluation.MulticlassAccuracy"] == pytest.approx(found["evaluation.accuracy"])

    def test_a_function_is_given_the_whole_set(self, toy: Build, rows: Any, caplog: Any) -> None:
        def hits(predictions: Any, targets: Any) -> float:
            assert len(targets) == 9
            return float((predictions == targets).mean())

        trainer = toy(
            task="text_classification", metrics=[hits, "accuracy"], eval_dataset=rows(9), metric_for_best_model="hits"
        )
        with caplog.at_level("WARNING"):
            found = trainer.train().metrics
        assert found["evaluation.hits"] == pytest.approx(found["evaluation.accuracy"])
        assert "needs the whole set at once" in caplog.text
        assert trainer.state.best_metric_value == found["evaluation.hits"]

    def test_a_script_of_evaluate(self, toy: Build, rows: Any, tmp_path: Path, monkeypatch: Any) -> None:
        import evaluate

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
        for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
            monkeypatch.delitem(sys.modules, name)  # a package of that name is bound to the folder of another test
        Path("share.py").write_text(SCRIPT)
        given = ["evaluate:./share.py", "accuracy"]
        found = toy(task="text_classification", metrics=given, eval_dataset=rows(9)).evaluate()
        assert found["share"] == pytest.approx(found["accuracy"])

    def test_an_unknown_metric_is_refused_when_the_trainer_is_built(self, toy: Build, rows: Any) -> None:
        with pytest.raises(
            ConfigError, match=r"metrics has 'recal'.* It computes: accuracy, .*Did you mean 'recall'\?"
        ):
            toy(task="text_classification", metrics=["recal"], eval_dataset=rows(3))

    def test_an_unknown_best_metric_is_refused_when_the_trainer_is_built(self, toy: Build, rows: Any) -> None:
        with pytest.raises(ConfigError, match=r"'acuracy' is not a result of this run.*Did you mean 'evaluation\.acc"):
            toy(task="text_classification", metric_for_best_model="acuracy", eval_dataset=rows(3))

    def test_a_best_metric_that_no_evaluation_gives_is_told_at_the_first(self, toy: Build, rows: Any) -> None:
        class Two:
            def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
                return {"one": 1.0, "two": 2.0}

        trainer = toy(metrics_handler=Two(), metric_for_best_model="tow", eval_dataset=rows(3))
        with pytest.raises(
            ConfigError, match=r"'evaluation\.tow', which the evaluation did not give.*'evaluation\.two'"
        ):
            trainer.train()

    def test_decimals_are_for_what_is_shown(
        self, toy: Build, rows: Any, capsys: Any, caplog: Any, logged: Callable[..., list[dict[str, Any]]]
    ) -> None:
        given = [MetricConfig("accuracy", n_decimals=1), "f1"]
        settings = {"task": "text_classification", "metrics": given, "eval_dataset": {"dev": rows(7)}}
        value = toy(**settings).train().metrics["evaluation.dev.accuracy"]
        assert f"dev.accuracy {value:.1f}  dev.f1" in capsys.readouterr().out
        assert logged()[-1]["evaluation.dev.accuracy"] == value != round(value, 1)
        with caplog.at_level("INFO"):
            toy(resume_from_checkpoint=True, **settings).train()
        assert f"evaluation.dev.accuracy {value:.1f}, " in caplog.text

    def test_values_are_never_rounded(self, toy: Build, rows: Any) -> None:
        given = [MetricConfig("accuracy", n_decimals=1)]
        found = toy(task="text_classification", metrics=given, eval_dataset=rows(7)).evaluate()
        assert (found["accuracy"] * 7) == pytest.approx(round(found["accuracy"] * 7), abs=1e-12)
        assert found["accuracy"] != round(found["accuracy"], 1)


class TestHandlersOfUsers:
    def test_a_subclass_that_reads_predictions_in_its_own_way(self, toy: Build, rows: Any) -> None:
        class Contrary(ClassificationHandler):
            def predictions(self, outputs: Any, labels: Any) -> Any:
                return outputs["logits"].argmin(dim=-1)

        data = rows(9)
        trainer = toy(eval_dataset=data, metrics_handler=Contrary(["accuracy"]))
        labels, logits = expected_and_predicted(
            trainer, [{"x": row["x"], "labels": torch.tensor(row["labels"])} for row in data]
        )
        assert trainer.evaluate()["accuracy"] == pytest.approx(float((logits.argmin(1) == labels).double().mean()))
        assert trainer.predict() == logits.argmin(1).tolist()

    def test_a_small_class_of_its_own(self, toy: Build, rows: Any) -> None:
        class Small(MetricsHandler):
            default_metrics = ("f1",)

            def predictions(self, outputs: Any, labels: Any) -> Any:
                return outputs["logits"].argmax(dim=-1)

        trainer = toy(eval_dataset=rows(9), metrics_handler=Small(), metric_for_best_model="f1")
        theirs = toy(task="text_classification", metrics=["f1"], eval_dataset=rows(9), out="other")
        assert trainer.train().metrics == theirs.train().metrics
        assert trainer.metrics_handler.trainer is trainer

    @pytest.mark.parametrize("batch_size", [1, 4, 9])
    def test_one_that_only_computes_gets_the_whole_set(self, toy: Build, rows: Any, batch_size: int) -> None:
        class Whole:
            trainer = None

            def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
                assert predictions.shape == (9, 3)
                return {"hits": float((predictions.argmax(1) == labels).mean())}

        handler = Whole()
        trainer = toy(
            eval_dataset=rows(9), metrics_handler=handler, eval_batch_size=batch_size, metric_for_best_model="hits"
        )
        theirs = toy(task="text_classification", eval_dataset=rows(9), out="other")
        assert trainer.train().metrics["evaluation.hits"] == theirs.train().metrics["evaluation.accuracy"]
        assert handler.trainer is trainer

    def test_what_is_ignored_is_shown_to_one_that_only_computes(self, toy: Build) -> None:
        data = sentences()

        class Whole:
            def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
                assert predictions.shape == (NUM_SAMPLES, 6, len(TAGS))
                return {"ignored": float((labels == -100).sum())}

        trainer = toy(
            task="sequence_labeling", model=Tagger(), train_dataset=data, eval_dataset=data, metrics_handler=Whole()
        )
        assert trainer.evaluate()["ignored"] == sum(int((row["labels"] == -100).sum()) for row in data)

    def test_anything_else_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="metrics_handler is an int; expected a MetricsHandler"):
            toy(metrics_handler=3)


class TestNamedSets:
    @pytest.fixture
    def trainer(self, toy: Build, rows: Any) -> Trainer:
        sets = {"dev": rows(9, seed=2), "test": rows(7, seed=3)}
        return toy(
            task="text_classification", metrics=["accuracy", "f1"], eval_dataset=sets, num_epochs=2,
            metric_for_best_model="dev.f1",
        )  # fmt: skip

    def test_results_have_the_name_of_their_set(self, trainer: Trainer, rows: Any) -> None:
        found = trainer.evaluate()
        assert set(found) == {f"{name}.{key}" for name in ("dev", "test") for key in ("loss", "accuracy", "f1")}
        assert set(trainer.last_evaluation) == {"dev", "test"}
        alone = trainer.evaluate("test")
        assert alone == {key: found[f"test.{key}"] for key in ("loss", "accuracy", "f1")}
        assert trainer.evaluate(rows(7, seed=3)) == alone
        assert set(trainer.evaluate({"other": rows(2)})) == {"other.loss", "other.accuracy", "other.f1"}

    def test_they_are_logged_and_the_best_is_of_one_set(
        self, trainer: Trainer, logged: Callable[..., list[dict[str, Any]]]
    ) -> None:
        metrics = trainer.train().metrics
        evaluated = [row for row in logged() if "evaluation.dev.f1" in row]
        assert evaluated[-1]["evaluation.test.f1"] == metrics["evaluation.test.f1"]
        assert trainer.state.metric_for_best_checkpoint == "evaluation.dev.f1"
        assert trainer.state.best_metric_value == max(row["evaluation.dev.f1"] for row in evaluated)

    def test_a_metric_without_the_name_of_a_set_is_the_first_ones(self, toy: Build, rows: Any) -> None:
        assert toy(eval_dataset={"dev": rows(3), "test": rows(3)}).best_key == "evaluation.dev.loss"

    def test_names_that_are_not_there_are_refused(self, toy: Build, trainer: Trainer, rows: Any) -> None:
        with pytest.raises(DataError, match=r"no evaluation set 'tset'. There are: dev, test, train"):
            trainer.evaluate("tset")
        with pytest.raises(DataError, match=r"several: dev, test"):
            trainer.predict()
        with pytest.raises(ConfigError, match=r"'tset\.f1' is not a result of this run"):
            toy(eval_dataset={"dev": rows(3)}, metric_for_best_model="tset.f1")


class TestIntervals:
    def intervals(self, toy: Build, rows: Any, batch_size: int) -> dict[str, float]:
        return toy(
            task="text_classification", metrics=["accuracy", "f1"], bootstrap_samples=200, eval_dataset=rows(40),
            eval_batch_size=batch_size, metric_for_best_model="f1", out=f"run{batch_size}",
        ).evaluate()  # fmt: skip

    def test_they_surround_the_value_and_do_not_depend_on_the_batch_size(self, toy: Build, rows: Any) -> None:
        found = self.intervals(toy, rows, 1)
        for key in ("accuracy", "f1"):
            assert found[f"{key}.low"] < found[key] < found[f"{key}.high"]
        for batch_size in (3, 7, 40):
            assert self.intervals(toy, rows, batch_size) == pytest.approx(found, abs=1e-6)

    def test_loss_and_perplexity_have_one(self, toy: Build) -> None:
        rows = sentences(40, num_labels=12)
        found = [
            toy(
                task="mask_filling", model=Tagger(12, names=None), train_dataset=rows, eval_dataset=rows,
                bootstrap_samples=100, eval_batch_size=size, out=f"run{size}",
            ).evaluate()
            for size in (1, 7, 40)
        ]  # fmt: skip
        assert set(found[0]) == {f"{key}{end}" for key in METRICS_OF_TOKENS for end in ("", ".low", ".high")}
        for key in METRICS_OF_TOKENS:
            assert found[0][f"{key}.low"] < found[0][key] < found[0][f"{key}.high"]
        assert all(one == pytest.approx(found[0], rel=1e-5) for one in found[1:])

    def test_they_are_logged_and_recorded(
        self, toy: Build, rows: Any, tmp_path: Path, logged: Callable[..., list[dict[str, Any]]]
    ) -> None:
        trainer = toy(task="text_classification", bootstrap_samples=200, eval_dataset=rows(40))
        metrics = trainer.train().metrics
        record = json.loads((tmp_path / "run/evaluations/00000005.json").read_text())["metrics"]
        for key in ("accuracy", "accuracy.low", "accuracy.high"):
            assert metrics[f"evaluation.{key}"] == record[key] == logged()[-1][f"evaluation.{key}"]


class TestReports:
    def test_tables_and_the_worst_samples_are_recorded(self, toy: Build, rows: Any, tmp_path: Path) -> None:
        data = rows(40)
        trainer = toy(task="text_classification", eval_dataset=data, eval_batch_size=7)
        trainer.train()
        record = json.loads((tmp_path / "run/evaluations/00000005.json").read_text())
        report = trainer.last_evaluation[""]
        assert record["tables"] == {"": report.tables}
        assert record["worst_samples"] == {"": report.worst_samples}
        tables = {table["name"]: table["values"] for table in report.tables}
        assert set(tables) == {"confusion_matrix", "per_class"}
        assert sum(map(sum, tables["confusion_matrix"])) == 40
        labels = [row["labels"] for row in data]
        assert [row[-1] for row in tables["per_class"]] == [labels.count(label) for label in range(3)]

    def test_the_worst_samples_are_those_of_the_largest_loss(self, toy: Build, rows: Any) -> None:
        data = rows(40)
        trainer = toy(task="text_classification", eval_dataset=data, eval_batch_size=7)
        trainer.evaluate()
        with torch.no_grad():
            logits = trainer.model(torch.stack([row["x"] for row in data]))
        labels = torch.tensor([row["labels"] for row in data])
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        found = trainer.last_evaluation[""].worst_samples
        assert [sample["sample"] for sample in found] == losses.argsort(descending=True)[:16].tolist()
        for sample in found:
            assert sample["target"] == labels[sample["sample"]]
            assert sample["prediction"] == logits[sample["sample"]].argmax()
            assert sample["loss"] == pytest.approx(float(losses[sample["sample"]]), rel=1e-5)

    @pytest.mark.parametrize("task", ["sequence_labeling", "mask_filling"])
    def test_the_worst_sequences_are_shown_where_labels_count(self, toy: Build, batch_size: int, task: str) -> None:
        rows = sentences()
        trainer = toy(
            task=task, model=Tagger(), train_dataset=rows, eval_dataset=rows, eval_batch_size=batch_size,
            data_collator=cut_to_the_longest,
        )  # fmt: skip
        trainer.evaluate()
        labels, logits = expected_and_predicted(trainer, rows)
        losses = torch.stack(
            [nn.functional.cross_entropy(some, their) for some, their in zip(logits, labels, strict=True)]
        )
        worst = trainer.last_evaluation[""].worst_samples
        assert [sample["sample"] for sample in worst] == losses.argsort(descending=True)[:16].tolist()
        for sample in worst:
            right, guess = labels[sample["sample"]], logits[sample["sample"]].argmax(1)
            assert sample["loss"] == pytest.approx(float(losses[sample["sample"]]), rel=1e-5)
            assert sample["target"] == right[right != -100].tolist()
            assert sample["prediction"] == guess[right != -100].tolist()

    def test_the_worst_sequences_of_a_causal_model_are_shown_place_by_place(self, toy: Build) -> None:
        rows = sentences(num_labels=12)
        trainer = toy(
            task="language_modeling",
            criterion=None,
            model=Causal(12, names=None),
            train_dataset=rows,
            eval_dataset=rows,
        )
        trainer.evaluate()
        labels, logits = expected_and_predicted(trainer, rows)
        for sample in trainer.last_evaluation[""].worst_samples:
            right, guess = labels[sample["sample"], 1:], logits[sample["sample"], :-1].argmax(1)
            assert sample["target"] == right[right != -100].tolist()
            assert sample["prediction"] == guess[right != -100].tolist()

    def test_the_worst_samples_of_several_labels(self, toy: Build) -> None:
        targets = torch.randint(2, (NUM_SAMPLES, 4), generator=torch.Generator().manual_seed(4)).float()
        rows = labelled(targets)
        trainer = toy(
            task="text_classification", criterion="BCEWithLogitsLoss", model=Line(4), train_dataset=rows,
            eval_dataset=rows, eval_batch_size=3,
        )  # fmt: skip
        trainer.evaluate()
        _, logits = expected_and_predicted(trainer, rows)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        worst = trainer.last_evaluation[""].worst_samples
        assert [sample["sample"] for sample in worst] == losses.argsort(descending=True)[:16].tolist()
        first = worst[0]["sample"]
        assert worst[0]["target"] == targets[first].tolist()
        assert worst[0]["prediction"] == (logits[first] > 0).long().tolist()

    def test_what_is_listed_of_a_long_sequence_is_bounded(self) -> None:
        worst = WorstSamples()
        worst.add([0, 1], torch.ones(2), torch.zeros(2, 5000, dtype=torch.long), torch.zeros(2, 5000, dtype=torch.long))
        assert [len(sample["target"]) for sample in worst.listed()] == [MOST_PLACES_SHOWN] * 2

    def test_a_result_that_is_no_number_is_never_the_best(self, toy: Build, rows: Any) -> None:
        one_class = [{"x": row["x"], "labels": 0} for row in rows(4)]
        trainer = toy(
            task="text_classification", metrics=["auroc"], eval_dataset=one_class, metric_for_best_model="auroc"
        )
        assert math.isnan(trainer.train().metrics["evaluation.auroc"])
        assert trainer.state.best_checkpoint is None


class OwnPlace(IterableDataset[Any]):
    """A stream that goes on where it was left, and can be told to go elsewhere."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.place, self.seen = rows, 0, []

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.rows):
            self.seen.append(self.place)
            self.place += 1
            yield self.rows[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("max_batches", [1, 2, None])
def test_each_evaluation_begins_a_stream_anew(toy: Build, rows: Any, max_batches: int | None) -> None:
    stream = OwnPlace(rows(8))
    trainer = toy(eval_dataset=stream, eval_batch_size=2, max_eval_batches=max_batches, num_epochs=3)
    found = [trainer.evaluate()]
    first = list(stream.seen)
    for _ in range(2):
        stream.seen.clear()
        found.append(trainer.evaluate())
        assert stream.seen == first
    assert found[0] == found[1] == found[2]


def test_an_evaluation_on_a_stream_of_the_datasets_library_begins_anew(toy: Build, rows: Any) -> None:
    given = [{"x": row["x"].tolist(), "labels": row["labels"]} for row in rows(8)]
    stream = datasets.Dataset.from_list(given).with_format("torch").to_iterable_dataset()
    trainer = toy(eval_dataset=stream, eval_batch_size=2, max_eval_batches=2)
    assert trainer.evaluate() == trainer.evaluate() == trainer.evaluate()
    assert trainer.evaluate([{"x": row["x"], "labels": row["labels"]} for row in rows(8)[:4]]) == trainer.evaluate()

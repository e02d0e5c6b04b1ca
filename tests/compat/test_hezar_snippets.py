"""Every snippet of Hezar's page on its trainer, run behind its door: only the import is another, the dots are filled.

Instead of the Hub there are a folder with weights that hezar itself has saved, and a few samples of the same form. On a
machine without CUDA `device="cuda"` becomes `use_cpu=True`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hezar_train.errors import CheckpointError

models = pytest.importorskip("hezar.models")

SIMPLE_EXAMPLE = """
from hezar.models import CRNNImage2TextConfig, CRNNImage2Text
from hezar.preprocessors import Preprocessor
from hezar.data import Dataset
from hezar.trainer import Trainer, TrainerConfig

base_model_path = "hezarai/crnn-base-fa-64x256"

train_dataset = Dataset.load("hezarai/persian-license-plate-v1", split="train", max_length=8, reverse_digits=True)
eval_dataset = Dataset.load("hezarai/persian-license-plate-v1", split="test", max_length=8, reverse_digits=True)

model = CRNNImage2Text(CRNNImage2TextConfig(id2label=train_dataset.config.id2label))
preprocessor = Preprocessor.load(base_model_path)

train_config = TrainerConfig(
    output_dir="crnn-plate-fa-v1",
    task="image2text",
    device="cuda",
    init_weights_from=base_model_path,
    batch_size=8,
    num_epochs=20,
    metrics=["cer"],
    metric_for_best_model="cer"
)

trainer = Trainer(
    config=train_config,
    model=model,
    train_dataset=train_dataset,
    eval_dataset=eval_dataset,
    data_collator=train_dataset.data_collator,
    preprocessor=preprocessor,
)
trainer.train()
"""

DATASETS = """
Trainer(
    ...
train_dataset = ...,
eval_dataset = ...,
...
)
"""

PRETRAINED = """
model = Model.load(pretrained_path)

trainer = Trainer(
    model=model,
    ...
)
"""

INITIAL_WEIGHTS = """
base_model_path = "hezarai/bert-base-fa"
model = BertTextClassification(BertTextClassificationConfig(id2label=id2label))  # Randomly initialized model

trainer_config = TrainerConfig(
    ...,
    init_weights_from=base_model_path,
    ...
)
trainer = Trainer(
    trainer_config,
    ...
)
"""

RESUMING = """
trainer_config = TrainerConfig(
    ...,
    resume_from_checkpoint=True,
    ...
)
"""

RESUMING_WITH_STEPS = """
trainer_config = TrainerConfig(
    ...,
    resume_from_checkpoint=True,
    save_steps=1000,
    ...
)
"""

MIXED_PRECISION = """
trainer_config = TrainerConfig(
    ...,
    mixed_precision="bf16",  # Also accepts `fp16` and `full`
    ...
)
"""

LABELS = dict(enumerate(["", *"۰۱۲۳۴۵۶۷۸۹"]))
CRNN = {"map2seq_in_dim": 1024, "map2seq_out_dim": 8, "rnn_dim": 8}
BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 16,
}  # fmt: skip


def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Run a snippet with the import changed, and the dots filled with `config` or `parts`."""
    code = snippet.replace("from hezar.trainer import", "from hezar_train.compat.hezar import")
    if not torch.cuda.is_available():
        code = code.replace('device="cuda"', "use_cpu=True")
    code = code.replace("    ...,\n", "    **config,\n", 1).replace(
        "    model=model,\n    ...\n", "    model=model, **parts,\n"
    )
    space: dict[str, Any] = {**names}
    exec(compile(code.replace("    ...\n", ""), "snippet", "exec"), space)
    return space


class Plates(list[Any]):
    """Pictures of the form of the licence plates, with Hezar's way to load them."""

    config = SimpleNamespace(id2label=LABELS)
    data_collator = None

    @classmethod
    def load(cls, path: str, split: str, **options: Any) -> Plates:
        assert path == "hezarai/persian-license-plate-v1"
        assert set(options) <= {"max_length", "reverse_digits"}
        generator = torch.Generator().manual_seed(1)
        return cls(
            {"pixel_values": torch.rand(1, 32, 24, generator=generator), "labels": torch.tensor([1, 2, 3])}
            for _ in range({"train": 3, "test": 2}[split])
        )


def sentences(count: int = 6) -> list[dict[str, Any]]:
    return [{"token_ids": torch.full((5,), number + 2), "labels": number % 3} for number in range(count)]


def bert(**given: Any) -> Any:
    return models.BertTextClassification(models.BertTextClassificationConfig(**BERT, **given))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder where the repositories' names are folders that hezar has saved."""
    monkeypatch.chdir(tmp_path)
    models.CRNNImage2Text(models.CRNNImage2TextConfig(id2label=LABELS, **CRNN)).save("hezarai/crnn-base-fa-64x256")
    bert(id2label={0: "x", 1: "y"}).save("hezarai/bert-base-fa")
    return tmp_path


@contextlib.contextmanager
def smaller(monkeypatch: pytest.MonkeyPatch, kind: Any, **sizes: Any) -> Iterator[None]:
    """Let a config class of hezar have other defaults, so that its model is trained in a second."""
    build: Callable[..., None] = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda self, **given: build(self, **sizes | given))
    yield


def test_a_simple_example(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hezar import data, preprocessors

    monkeypatch.setattr(data, "Dataset", Plates)
    grey = preprocessors.ImageProcessor(preprocessors.ImageProcessorConfig(mean=[0.6], std=[0.2], gray_scale=True))
    monkeypatch.setattr(preprocessors.Preprocessor, "load", lambda path: grey)
    with smaller(monkeypatch, models.CRNNImage2TextConfig, **CRNN):
        trainer = run(SIMPLE_EXAMPLE)["trainer"]
    assert trainer.state.epoch == 20
    assert len(trainer.load_csv_logs()["evaluation.cer"]) == 20
    assert (here / "crnn-plate-fa-v1/checkpoints/00000020").is_dir()


def test_datasets_are_any_with_a_length_and_items(here: Path) -> None:
    code = DATASETS.replace("    ...\n", "    config, model,\n").replace("= ...,\neval", "= rows,\neval")
    code = code.replace("eval_dataset = ...,\n...\n", "eval_dataset = rows,\n").replace(
        "Trainer(", "trainer = Trainer("
    )
    made = hezar_names(here)
    exec(code, made)
    assert set(made["trainer"].evaluate()) == {"loss", "accuracy"}


def hezar_names(here: Path, **changes: Any) -> dict[str, Any]:
    from hezar_train.compat.hezar import Trainer, TrainerConfig

    config = TrainerConfig(here / "run", task="text_classification", use_cpu=True, **changes)
    return {"Trainer": Trainer, "config": config, "model": bert(num_labels=3), "rows": sentences()}


def test_a_model_that_is_loaded_beforehand_is_trained_on(here: Path) -> None:
    names = hezar_names(here)
    parts = {"config": names["config"], "train_dataset": sentences()}
    bert(num_labels=3).save(here / "mine")
    made = run(
        PRETRAINED, Model=models.Model, pretrained_path=str(here / "mine"), Trainer=names["Trainer"], parts=parts
    )
    assert made["trainer"].train().num_samples == 6


def test_weights_of_another_model_are_a_start_as_far_as_they_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from hezar_train.compat.hezar import Trainer, TrainerConfig

    names = {
        "BertTextClassification": models.BertTextClassification, "TrainerConfig": TrainerConfig, "Trainer": Trainer,
        "BertTextClassificationConfig": models.BertTextClassificationConfig, "id2label": {0: "a", 1: "b", 2: "c"},
        "config": {"output_dir": "run", "task": "text_classification", "use_cpu": True},
    }  # fmt: skip
    with smaller(monkeypatch, models.BertTextClassificationConfig, **BERT):
        code = INITIAL_WEIGHTS.replace("    trainer_config,\n    ...\n", "    trainer_config, model, rows,\n")
        trainer = run(code, rows=sentences(), **names)["trainer"]
    saved = torch.load(here / "hezarai/bert-base-fa/model.pt", weights_only=True)
    ours = trainer.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in saved.items() if name.startswith("bert."))
    assert "of another shape, so left as they are: classifier.weight, classifier.bias" in caplog.text


@pytest.mark.parametrize("snippet", [RESUMING, RESUMING_WITH_STEPS], ids=["epochs", "steps"])
def test_resuming(here: Path, snippet: str) -> None:
    from hezar_train.compat.hezar import Trainer, TrainerConfig

    given = {"output_dir": "run", "task": "text_classification", "use_cpu": True, "batch_size": 2}
    for epochs in (1, 2):
        made = run(snippet, TrainerConfig=TrainerConfig, config=given | {"num_epochs": epochs})
        trainer = Trainer(made["trainer_config"], bert(num_labels=3), sentences())
        assert trainer.state.global_step == 3 * (epochs - 1)
        assert trainer.train().num_samples == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16", "full"])
def test_mixed_precision(here: Path, precision: str) -> None:
    from hezar_train.compat.hezar import Trainer, TrainerConfig

    snippet = MIXED_PRECISION.replace('"bf16"', repr(precision))
    given = {"output_dir": "run", "task": "text_classification", "use_cpu": True}
    made = run(snippet, TrainerConfig=TrainerConfig, config=given)
    trainer = Trainer(made["trainer_config"], bert(num_labels=3), sentences())
    assert trainer.runtime.precision == {"bf16": "bf16"}.get(precision, "no")
    assert trainer.train().num_samples == 6


def test_weights_of_which_nothing_fits_are_refused(here: Path) -> None:
    made = hezar_names(here, init_weights_from="hezarai/crnn-base-fa-64x256")
    with pytest.raises(CheckpointError, match=r"none of its \d+ tensors has the name and shape"):
        made["Trainer"](made["config"], made["model"], made["rows"])

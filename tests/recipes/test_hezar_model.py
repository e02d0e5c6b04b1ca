"""The recipe of a Hezar model: it learns, resumes, and is read back by hezar; Hezar's own data and weights go in."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError, MissingDependencyError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run
from hezar_train.report import write_report

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

pytest.importorskip("hezar.models")
FOLDER = Path(__file__).parents[2] / "recipes" / "hezar_model"
names: Any = import_recipe(FOLDER / "recipe.py")
SMOKE_RUN = "runs/hezar_model-smoke"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset in Hezar's form: Parquet files, and a config that names the columns."""
    datasets = pytest.importorskip("datasets")
    moods = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"review": datasets.Value("string"), "mood": moods})
    rows = {"review": ["خیلی بد بود", "عالی بود"] * 8, "mood": [0, 1] * 8}
    monkeypatch.setattr("hezar.data.Dataset.cache_dir", str(tmp_path / "cache"))
    folder = tmp_path / "reviews"
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows, features).to_parquet(folder / f"{split}.parquet")
    settings = {"name": "text_classification", "config_type": "dataset", "text_field": "review", "label_field": "mood"}
    (folder / "dataset_config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    return folder


def trainer_of(*overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", overrides))


def sha256_of_last(run: str) -> str:
    last = max(Path(run, "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def test_names_are_split_in_the_same_way_in_every_run_and_share_none() -> None:
    train, held_out, kinds = names.names()
    assert kinds == ["city", "currency", "language"]
    assert (len(train), len(held_out)) == (943, 255)
    assert not {name for name, _ in train} & {name for name, _ in held_out}


def test_it_learns_what_kinds_of_names_there_are() -> None:
    overrides = ["max_steps=", "num_epochs=6", "batch_size=32", "learning_rate=0.002", "save_enabled=false"]
    metrics = trainer_of("recipe.dropout=0", "recipe.hidden=32", *overrides).train().metrics
    assert metrics["evaluation.accuracy"] > 0.6  # always "language" has 0.48


def test_a_run_that_failed_half_way_goes_on_to_the_weights_of_an_unbroken_one() -> None:
    trainer_of("output_dir=unbroken").train()
    first = trainer_of("output_dir=broken")

    def fail(_: Any) -> None:
        if first.state.global_step == 5:
            raise RuntimeError("the power went")

    first.hooks_in_train.register(fail, "on_batch_end")
    with pytest.raises(RuntimeError, match="the power went"):
        first.train()
    second = trainer_of("output_dir=broken")
    assert second.state.global_step == 3
    second.train()
    assert sha256_of_last("broken") == sha256_of_last("unbroken")


def test_hezar_reads_back_what_was_trained_and_says_the_same() -> None:
    trainer_of().train()
    opened = open_run(load_run(SMOKE_RUN))
    opened.trainer.model.save("saved")  # type: ignore[operator]
    loaded = names.Model.load("saved")
    for name, value in opened.trainer.model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    for text in ("تهران", "زبان پارسی میانه", "ریال ایران"):
        assert [loaded.predict(text)[0][0]["label"]] == opened.predict([text])


def test_a_saved_model_of_hezars_is_trained_on_and_gets_a_layer_for_other_labels(reviews: Path) -> None:
    trainer_of("max_steps=1", "save_steps=").model.save("saved")  # type: ignore[operator]
    trainer = trainer_of(
        f"recipe.model={Path('saved').resolve()}", f"recipe.dataset={reviews}", "max_steps=", "num_epochs=30"
    )
    word = trainer.model.bert.embeddings.word_embeddings.weight  # type: ignore[union-attr]
    assert torch.equal(word, names.Model.load("saved").bert.embeddings.word_embeddings.weight)
    assert trainer.model.config.id2label == {0: "bad", 1: "good"}  # type: ignore[union-attr]
    assert trainer.train().metrics["evaluation.accuracy"] == 1.0
    assert open_run(load_run(SMOKE_RUN)).predict(["عالی بود"]) == ["good"]


def of_the_hub(override: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER, [override, "max_steps=2"]))


def test_a_dataset_of_hezars_on_the_hub_is_trained_on_with_one_override(reviews: Path, upload: Upload) -> None:  # noqa: F811
    upload(reviews="dataset")
    trainer = of_the_hub("recipe.dataset=tester/reviews")
    assert trainer.model.config.id2label == {0: "bad", 1: "good"}  # type: ignore[union-attr]
    assert "evaluation.accuracy" in trainer.train().metrics


def test_a_model_of_hezars_on_the_hub_is_trained_with_one_override(upload: Upload) -> None:  # noqa: F811
    saved = trainer_of().model
    saved.save("bert")  # type: ignore[operator]
    upload(bert="model")
    trainer = of_the_hub("recipe.model=tester/bert")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in saved.state_dict().items())
    assert "evaluation.accuracy" in trainer.train().metrics


def test_a_report_shows_the_names_that_were_misread() -> None:
    trainer_of().train()
    shown = json.loads(Path(SMOKE_RUN, "evaluations", "00000008.json").read_text())["worst_samples"][""]
    held_out = dict(names.names()[1])
    assert {names.names()[2][held_out[row["input"]]] == row["target"] for row in shown} == {True}
    assert shown[0]["input"] in write_report([SMOKE_RUN]).read_text(encoding="utf-8")


def test_a_file_that_is_no_text_is_refused_in_a_sentence() -> None:
    trainer_of("max_steps=1", "save_steps=").train()
    Path("bad.png").write_bytes(b"no picture")
    command = [sys.executable, "-m", "hezar_train", "predict", SMOKE_RUN, "bad.png"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "bad.png is a file; a text is expected. Put texts into a .txt file, a line each" in done.stderr


def test_a_dataset_that_lacks_the_split_or_names_of_labels_is_refused(reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)recipe\.eval_split=validation cannot be loaded.*Unknown split"):
        trainer_of(f"recipe.dataset={reviews}", "recipe.eval_split=validation")
    datasets = pytest.importorskip("datasets")
    for split in ("train", "test"):
        datasets.Dataset.from_dict({"review": ["a"], "mood": ["b"]}).to_parquet(reviews / f"{split}.parquet")
    with pytest.raises(DataError, match=r"is no dataset of texts with named labels \('Value' object"):
        trainer_of(f"recipe.dataset={reviews}")


def test_the_script_of_a_hezar_user_runs_with_two_imports_changed(reviews: Path) -> None:
    from hezar.data import Dataset
    from hezar.models import BertTextClassification, BertTextClassificationConfig

    tokenizer = names.letters(["خیلی بد بود", "عالی بود"])
    train, test = (Dataset.load(str(reviews), split=split, preprocessor=tokenizer) for split in ("train", "test"))
    model = BertTextClassification(
        BertTextClassificationConfig(id2label=train.config.id2label, vocab_size=len(tokenizer), **SIZES)
    )
    config = TrainerConfig(output_dir="run", task="text_classification", batch_size=8, num_epochs=2, metrics=["f1"])
    trainer = Trainer(
        config=config, model=model, train_dataset=train, eval_dataset=test, data_collator=train.data_collator,
        preprocessor=train.preprocessor,
    )  # fmt: skip
    assert "evaluation.f1" in trainer.train().metrics
    assert Path("run/checkpoints/00000004/preprocessor/preprocessor/tokenizer.json").is_file()


def test_a_model_that_is_neither_known_nor_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"recipe\.model='brt' is not known"):
        trainer_of("recipe.model=brt")


def test_a_model_for_another_task_is_refused() -> None:
    from hezar.models import BertSequenceLabeling, BertSequenceLabelingConfig

    config = BertSequenceLabelingConfig(num_labels=1, id2label={0: "O"}, vocab_size=9, **SIZES)
    BertSequenceLabeling(config).save("tagger")
    with pytest.raises(ConfigError, match="is a BertSequenceLabeling; expected a text classification model"):
        trainer_of(f"recipe.model={Path('tagger').resolve()}")


def test_without_hezar_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hezar.models", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hezar-train\[hezar\]'"):
        trainer_of()

"""The recipe of licence plates: plates from numbers alone, a reader that learns, resumes and reads a user's picture."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics.text import edit_distance
from hezar_train.recipes import build_trainer, import_recipe, load_recipe
from hezar_train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "license_plate"
plates: Any = import_recipe(FOLDER / "recipe.py")
TINY = ["recipe.channels=8", "recipe.hidden=32", "recipe.damage=0", "recipe.num_eval=8", "num_dataloader_workers=0"]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer_of(*overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", [*TINY, *overrides]))


def sha256_of_last(run: str) -> str:
    last = max(Path(run, "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def test_a_plate_is_a_function_of_seed_split_and_index_alone() -> None:
    def plate(split: str, index: int, seed: int = 0) -> tuple[bytes, str]:
        picture, text = plates.RenderedPlates(split, 9, ["vazirmatn", "rubik"], seed)[index]
        return picture.tobytes(), text

    first = plate("train", 3)
    np.random.random(5)
    assert plate("train", 3) == first
    others = [plate("train", 4), plate("held_out", 3), plate("train", 3, seed=1)]
    assert len({first, *others}) == 4


def test_held_out_texts_and_the_held_out_font_are_never_trained_on() -> None:
    sets = plates.rendered_sets(num_train=2000, num_eval=200, held_out_font="amiri", seed=0, damage=0.0)

    def texts(name: str) -> set[str]:
        split = sets[name]
        rngs = (np.random.default_rng((0, plates.SPLITS.index(name), index)) for index in range(len(split)))
        return {plates.plate_text(rng, name != "train") for rng in rngs}

    assert texts("train").isdisjoint(texts("held_out") | texts("held_out_font"))
    assert sets["train"].fonts == sets["held_out"].fonts
    assert sets["held_out_font"].fonts == ["amiri"]
    assert "amiri" not in sets["train"].fonts


def test_every_font_draws_every_symbol_and_no_two_alike() -> None:
    for path in sorted((FOLDER / "fonts").glob("*.ttf")):
        drawn = {plates.glyph_of(symbol, path.stem, 30)[0].tobytes() for symbol in plates.ALPHABET + plates.IRAN}
        assert len(drawn) == len(plates.ALPHABET) + 1, path.stem


def test_a_plate_has_the_form_that_iran_gives_it() -> None:
    for number in range(50):
        text = plates.plate_text(np.random.default_rng(number), is_held_out=False)
        assert len(text) == plates.LENGTH
        assert [symbol in plates.LETTERS for symbol in text] == [False, False, True, *[False] * 5]
        assert "۰" not in text[:7]


def test_the_processor_saves_plain_settings_and_reads_a_file_as_it_reads_the_picture(tmp_path: Path) -> None:
    picture, text = plates.RenderedPlates("train", 1, ["rubik"])[0]
    picture.save("plate.png")
    plates.PlateProcessor(height=16, width=64).save(tmp_path)
    again = plates.PlateProcessor.load(tmp_path)
    assert torch.equal(again("plate.png")["pixel_values"], again(picture)["pixel_values"])
    assert again(picture)["pixel_values"].shape == (1, 16, 64)
    ids = [again.alphabet.index(symbol) + 1 for symbol in text]
    assert again.batch_decode(torch.tensor([[*ids, 0, 0]])) == [text]


def test_it_learns_to_read_and_then_reads_a_picture_from_a_file() -> None:
    trainer = trainer_of(
        "recipe.channels=12", "recipe.hidden=48", "recipe.dropout=0", "recipe.num_train=4", "num_epochs=80",
        "max_steps=", "batch_size=4", "learning_rate=0.01", "save_enabled=false", "do_evaluate=false",
        "metric_for_best_model=loss",
    )  # fmt: skip
    trainer.train()
    assert trainer.evaluate({"known": trainer.train_dataset})["known.cer"] < 0.2
    picture, text = trainer.train_dataset.pairs[0]
    picture.resize((260, 64)).convert("RGB").save("photo.png")
    (answer,) = trainer.predict([plates.read(Path("photo.png"), trainer.preprocessor)])
    assert edit_distance(answer, text) <= 2


def test_a_run_that_failed_half_way_goes_on_to_the_weights_of_an_unbroken_one() -> None:
    photographed = ["recipe.damage=1", "lr_scheduler=one_cycle", "lr_scheduling_steps=1", "num_dataloader_workers=1"]
    trainer_of(*photographed, "output_dir=unbroken").train()
    first = trainer_of(*photographed, "output_dir=broken")

    def fail(_: Any) -> None:
        if first.state.global_step == 4:
            raise RuntimeError("the power went")

    first.hooks_in_train.register(fail, "on_batch_end")
    with pytest.raises(RuntimeError, match="the power went"):
        first.train()
    second = trainer_of(*photographed, "output_dir=broken")
    assert second.state.global_step == 3
    second.train()
    assert sha256_of_last("broken") == sha256_of_last("unbroken")


def test_the_held_out_font_is_reported_apart() -> None:
    metrics = trainer_of("max_steps=1").train().metrics
    assert {"evaluation.held_out.cer", "evaluation.held_out_font.cer"} <= metrics.keys()


def test_hezars_own_model_trains_by_one_override() -> None:
    pytest.importorskip("hezar")
    trainer = trainer_of("recipe.model=hezar", "recipe.num_train=4", "recipe.num_eval=2", "batch_size=2", "max_steps=1")
    assert trainer.train().metrics["evaluation.held_out.cer"] > 0
    assert type(trainer.model).__name__ == "CRNNImage2Text"
    saved = max(Path("runs/license_plate-smoke/checkpoints").iterdir()) / "preprocessor"
    assert "gray_scale: true" in next(saved.rglob("*.yaml")).read_text()
    trainer.train_dataset.pairs[0][0].save("photo.png")
    assert len(trainer.predict([plates.read("photo.png", trainer.preprocessor)])) == 1


def test_a_mirroring_model_from_a_folder_reads_backwards_and_answers_forwards(tmp_path: Path) -> None:
    pytest.importorskip("hezar")
    model, processor, _ = plates.hezar_model("hezar")
    processor.config.mirror, model.preprocessor = True, processor
    model.save(str(tmp_path / "pretrained"))
    built = plates.build(model=str(tmp_path / "pretrained"), num_train=1, num_eval=1, damage=0.0)
    text, sample = built.train_dataset.pairs[0][1], built.train_dataset[0]
    assert [plates.NAMES[number] for number in sample["labels"]] == list(reversed(text))
    assert built.model.post_process(torch.tensor([sample["labels"]]))[0].text == text


def _write_plates(folder: Path) -> list[str]:
    """Write a dataset of eight plates, the last with a label that is none; return what the others say."""
    datasets = pytest.importorskip("datasets")
    rows = [plates.RenderedPlates("train", 9, ["rubik"])[index] for index in range(8)]
    texts = [text for _, text in rows[:7]]
    labels = [*texts[:6], texts[6].replace("۱", "1"), "not a plate"]
    columns = {"image_path": [picture for picture, _ in rows], "label": labels}
    data = datasets.Dataset.from_dict(columns).cast_column("image_path", datasets.Image())
    for split in ("train", "test"):
        data.to_parquet(folder / f"{split}.parquet")
    return texts


def of_the_hub(*overrides: str) -> Trainer:
    few = ["max_steps=1", "batch_size=4", "max_eval_batches=1", "eval_batch_size=8", "num_dataloader_workers=0"]
    return build_trainer(load_recipe(FOLDER, [*overrides, *few]))


def test_a_dataset_of_pictures_and_labels_is_trained_on_by_one_override(tmp_path: Path) -> None:
    texts = _write_plates(tmp_path / "plates")
    trainer = trainer_of(f"recipe.dataset={tmp_path / 'plates'}", "max_steps=1", "batch_size=4")
    assert trainer.train().metrics["evaluation.held_out.cer"] > 0
    assert [text for _, text in trainer.train_dataset.pairs] == texts


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    texts = _write_plates(tmp_path / "plates")
    upload(plates="dataset")
    trainer = of_the_hub("recipe.dataset=tester/plates")
    assert trainer.train().metrics["evaluation.held_out.cer"] > 0
    assert [text for _, text in trainer.train_dataset.pairs] == texts


def test_a_model_of_hezars_on_the_hub_is_trained_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("hezar")
    model, model.preprocessor, _ = plates.hezar_model("hezar")
    model.save(str(tmp_path / "crnn"))
    upload(crnn="model")
    trainer = of_the_hub("recipe.model=tester/crnn")
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert trainer.train().metrics["evaluation.held_out.cer"] > 0


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({**plates.NAMES, 5: "x"}, "cannot write ۴, which the rendered plates have"),
        (None, "is a BertTextClassification; expected a CRNN of image to text"),
    ],
)
def test_a_model_of_hezars_that_does_not_fit_is_refused(
    tmp_path: Path, names: dict[int, str] | None, words: str
) -> None:
    hezar = pytest.importorskip("hezar.models")
    if names is None:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = hezar.BertTextClassificationConfig(num_labels=1, id2label={0: "a"}, vocab_size=9, **sizes)
        hezar.BertTextClassification(config).save(str(tmp_path / "model"))
    else:
        model, model.preprocessor, _ = plates.hezar_model("hezar")
        model.config.id2label = names
        model.save(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=words):
        trainer_of(f"recipe.model={tmp_path / 'model'}")


def test_what_is_neither_a_picture_nor_a_file_is_refused() -> None:
    with pytest.raises(DataError, match=r"\{'plate': 5\} is a JSON value of the type dict; a file is expected"):
        plates.read({"plate": 5}, plates.PlateProcessor())


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("recipe.model=crn", ConfigError, "recipe.model='crn' is not known"),
        ("recipe.held_out_font=lalezr", ConfigError, "Did you mean 'lalezar'"),
    ],
)
def test_a_name_that_is_not_known_is_refused(override: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        trainer_of(override)


def test_a_dataset_without_pictures_is_refused(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / "texts" / "train.parquet")
    with pytest.raises(DataError, match="has no column image_path, label"):
        trainer_of(f"recipe.dataset={tmp_path / 'texts'}")


def test_a_dataset_whose_labels_are_no_plates_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"image_path": ["a.png"], "label": ["abc"]})
    with pytest.raises(DataError, match="none of its 1 labels can be written with"):
        plates.HubPlates("recipe.dataset=letters", rows, plates.ALPHABET)

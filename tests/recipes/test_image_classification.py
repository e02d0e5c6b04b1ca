"""The recipe of digits with other data and other weights, and what it shares with the recipes that draw."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from huggingface_hub import HfApi

from hezar_train import Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run, small_greys

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.hub.server import LoopbackHub

RECIPES = Path(__file__).parents[2] / "recipes"
FOLDER = RECIPES / "image_classification"
KINDS = ["upright", "lying"]

datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["image_classification", "gan", "vae"])
def recipe(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the recipes that take pictures for the digits."""
    return import_recipe(RECIPES / request.param / "recipe.py")


@pytest.fixture
def bars(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """A dataset on the Hub, as MNIST is one: Parquet files with pictures, names of classes, no split for validation."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=KINDS)})
    for split, count in {"train": 64, "test": 16}.items():
        columns = {
            "image": [bar(KINDS[number % 2], number % 20) for number in range(count)],
            "label": [number % 2 for number in range(count)],
        }
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(tmp_path / "bars" / f"{split}-00000-of-00001.parquet")
    api = HfApi(token=hub.token)
    api.create_repo("tester/bars", repo_type="dataset")
    api.upload_folder(repo_id="tester/bars", repo_type="dataset", folder_path=tmp_path / "bars")
    return "tester/bars"


def bar(kind: str, place: int):  # type: ignore[no-untyped-def]
    """Draw a coloured bar on black, 24 pixels wide and 32 high."""
    picture = image.new("RGB", (24, 32))
    picture.paste((255, 200, 120), (place, 0, place + 4, 32) if kind == "upright" else (0, place, 24, place + 4))
    return picture


def trainer_of(*overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", overrides))


def test_a_dataset_of_the_hub_takes_the_place_of_the_digits_by_one_override(bars: str) -> None:
    trainer = build_trainer(load_recipe(FOLDER, [f"recipe.dataset={bars}"]))
    assert trainer.model.config.id2label == {0: "upright", 1: "lying"}
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (64, 16)
    assert trainer.train().metrics["evaluation.accuracy"] > 0.8
    for kind in KINDS:
        bar(kind, 5).resize((96, 96)).save(f"{kind}.png")
    run = open_run(load_run("runs/image_classification"))
    assert run.predict([Path("upright.png"), Path("lying.png")]) == KINDS


def test_a_folder_with_a_folder_of_pictures_for_each_class_is_a_dataset_of_any_size() -> None:
    for number in range(20):
        path = Path("pictures", KINDS[number % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        bar(KINDS[number % 2], number).save(path)
    trainer = trainer_of("recipe.dataset=pictures", "recipe.image_size=16", "recipe.test_share=0.3", "batch_size=8")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (14, 6)
    assert trainer.train_dataset[0][0].shape == (1, 16, 16)
    assert trainer.train().num_samples == 14


def test_a_run_begins_with_the_weights_of_another_as_far_as_they_fit(
    bars: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = trainer_of("output_dir=first")
    first.train()
    again = trainer_of("output_dir=again", "init_weights_from=first")
    assert all(torch.equal(one, other) for one, other in zip(weights(first), weights(again), strict=True))
    other = trainer_of("output_dir=other", "init_weights_from=first", f"recipe.dataset={bars}")
    assert "of another shape, so left as they are: classifier.4.weight, classifier.4.bias" in caplog.text
    assert torch.equal(other.model.features[0].weight, first.model.features[0].weight)
    assert other.model.classifier[-1].out_features == 2
    assert other.train().num_samples > 0


def test_a_run_begins_with_weights_of_the_hub(hub: LoopbackHub) -> None:  # noqa: F811
    first = trainer_of("output_dir=first")
    first.train()
    api = HfApi(token=hub.token)
    api.create_repo("tester/digits")
    api.upload_folder(repo_id="tester/digits", folder_path=first.save("exported"))
    again = trainer_of("output_dir=again", "init_weights_from=tester/digits")
    assert all(torch.equal(one, other) for one, other in zip(weights(first), weights(again), strict=True))


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())


def test_labels_without_names_are_classes_in_their_order(tmp_path: Path) -> None:
    keep(tmp_path / "rows", datasets.Value("int64"), [7, 30, 5] * 4)
    trainer = trainer_of("recipe.dataset=rows")
    assert trainer.model.config.id2label == {0: "5", 1: "7", 2: "30"}
    assert {*trainer.train_dataset.tensors[1].tolist()} == {0, 1, 2}


def test_a_label_without_a_class_is_refused(tmp_path: Path) -> None:
    keep(tmp_path / "rows", datasets.ClassLabel(names=KINDS), [0, 1, -1] * 4)
    with pytest.raises(DataError, match=r"recipe.dataset=rows has labels without a class: -1"):
        trainer_of("recipe.dataset=rows")


def keep(folder: Path, labels: object, values: list[int]) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    rows = {"image": [bar("lying", place) for place in range(len(values))], "label": values}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "train.parquet")


def test_pictures_are_as_grey_as_the_digits_whatever_their_size() -> None:
    half_white = image.new("L", (4, 4))
    half_white.paste(255, (0, 0, 2, 4))
    assert small_greys([half_white], 2).tolist() == [[[1, 0], [1, 0]]]
    greys = small_greys([image.linear_gradient("L")], 32)
    assert {*(16 * greys).flatten().tolist()} == set(range(17))


def test_a_dataset_without_the_columns_is_refused_with_those_it_has(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("picture,label\n" + 10 * "a,b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"table has no image. Its columns: label, picture. .* recipe.image_column="):
        recipe.build(dataset="table")
    with pytest.raises(DataError, match=r"table has no pictures in its column 'picture', but Value"):
        recipe.build(dataset="table", image_column="picture")


def test_a_dataset_that_is_not_there_is_refused_in_a_sentence(bars: str, recipe: ModuleType) -> None:
    assert bars == "tester/bars"
    with pytest.raises(DataError, match=r"recipe.dataset=tester/nowhere cannot be loaded. Expected OWNER/NAME"):
        recipe.build(dataset="tester/nowhere")


def test_the_digits_have_a_size_of_their_own(recipe: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"recipe.image_size=16 is for a recipe.dataset; the digits have 8"):
        recipe.build(image_size=16)

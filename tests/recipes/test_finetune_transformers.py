"""The recipe for models of transformers: its data, what it exports, its overrides; it learns and goes on exactly."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "recipes" / "finetune_transformers"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A trainer that has learnt something, in a run of a few seconds."""
    trainer = _trainer(
        tmp_path_factory.mktemp("runs") / "run", "recipe.width=32", "batch_size=16",
        "learning_rate=0.003", "max_steps=", "num_epochs=1", "save_steps=",
    )  # fmt: skip
    trainer.train()
    return trainer


def test_the_digits_are_those_of_the_recipe_image_classification_with_the_same_held_out(recipe: ModuleType) -> None:
    other = import_recipe(FOLDER.parent / "image_classification" / "recipe.py").build()
    train, test, names = recipe.digit_rows()
    for rows, digits in ((train, other.train_dataset), (test, other.eval_dataset)):
        assert [row["label"] for row in rows] == digits.tensors[1].tolist()
    ink = 1 - torch.tensor(list(test[0]["image"].get_flattened_data())).view(8, 8) / 255
    torch.testing.assert_close(ink, other.eval_dataset.tensors[0][0, 0], atol=1 / 255, rtol=0)
    assert names[test[0]["label"]] == str(test[0]["label"])


def test_the_pictures_to_train_on_move_and_those_to_test_on_do_not(recipe: ModuleType) -> None:
    built = recipe.build(max_shift=1)
    assert len({bytes(built.eval_dataset[0]["pixel_values"].numpy()) for _ in range(10)}) == 1
    assert len({bytes(built.train_dataset[0]["pixel_values"].numpy()) for _ in range(60)}) > 3


def test_a_shift_keeps_the_shape_and_repeats_the_edge(recipe: ModuleType) -> None:
    picture = torch.arange(9.0).view(1, 3, 3)
    assert recipe.shifted(picture, 0) is picture
    found = {tuple(recipe.shifted(picture, 1).flatten().tolist()) for _ in range(200)}
    assert len(found) == 9
    assert (0, 0, 1, 0, 0, 1, 3, 3, 4) in found


def test_the_loss_is_the_one_that_transformers_computes(trained: Trainer) -> None:
    batch = [trained.eval_dataset[number] for number in range(8)]
    pixels = torch.stack([one["pixel_values"] for one in batch])
    labels = torch.tensor([one["labels"] for one in batch])
    with torch.no_grad():
        expected = trained.model.eval()(pixel_values=pixels, labels=labels).loss
    assert trained.evaluate(batch)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_a_run_learns(trained: Trainer) -> None:
    found = trained.evaluate()
    assert found["accuracy"] > 0.3  # of ten classes
    assert found["loss"] < 0.85 * math.log(10)


def test_the_exported_folder_is_read_by_from_pretrained_and_answers_alike(trained: Trainer, tmp_path: Path) -> None:
    run = open_run(load_run(trained.folder.root))
    picture = trained.eval_dataset.rows[0]["image"].resize((80, 80))
    picture.save(tmp_path / "digit.png")
    predicted = run.predict([tmp_path / "digit.png"])
    assert run.predict([str(tmp_path / "digit.png")]) == predicted  # as a line of the standard input is
    exported = run.trainer.save(tmp_path / "exported")
    model = transformers.AutoModelForImageClassification.from_pretrained(exported)
    for name, weight in run.trainer.model.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    classify: Any = transformers.pipeline("image-classification", model=str(exported))
    assert [classify(str(tmp_path / "digit.png"))[0]["label"]] == predicted


def test_pretrained_weights_and_a_folder_of_pictures_take_their_places(
    trained: Trainer, recipe: ModuleType, tmp_path: Path
) -> None:
    exported = trained.save(tmp_path / "exported")
    _write_parity(recipe, tmp_path / "parity")
    options = (f"recipe.model={exported}", f"recipe.dataset={tmp_path}/parity", "max_steps=2", "batch_size=8")
    trainer = _trainer(tmp_path / "run", *options)
    assert trainer.model.config.id2label == {0: "even", 1: "odd"}
    body = "vit.embeddings.position_embeddings"
    assert torch.equal(trainer.model.state_dict()[body], trained.model.state_dict()[body])
    assert trainer.train().num_samples == 16
    predicted = open_run(load_run(tmp_path / "run")).predict(sorted((tmp_path / "parity" / "odd").iterdir()))
    assert set(predicted) <= {"even", "odd"}


def _write_parity(recipe: ModuleType, parent: Path) -> None:
    """Write pictures of digits into a folder for each of two classes."""
    pytest.importorskip("datasets")
    for number, row in enumerate(recipe.digit_rows()[0][:40]):
        folder = parent / ("even" if row["label"] % 2 == 0 else "odd")
        folder.mkdir(parents=True, exist_ok=True)
        row["image"].save(folder / f"{number}.png")


def _of_the_hub(folder: Path, override: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER, [override, "max_steps=2", f"output_dir={folder}"]))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(
    recipe: ModuleType,
    upload: Upload,  # noqa: F811
    tmp_path: Path,
) -> None:
    _write_parity(recipe, tmp_path / "parity")
    upload(parity="dataset")
    trainer = _of_the_hub(tmp_path / "run", "recipe.dataset=tester/parity")
    assert trainer.model.config.id2label == {0: "even", 1: "odd"}
    assert "evaluation.accuracy" in trainer.train().metrics


def test_weights_of_the_hub_are_trained_with_one_override(
    trained: Trainer,
    upload: Upload,  # noqa: F811
    tmp_path: Path,
) -> None:
    trained.save(tmp_path / "vit")
    upload(vit="model")
    trainer = _of_the_hub(tmp_path / "run", "recipe.model=tester/vit")
    assert all(
        torch.equal(value, trainer.model.state_dict()[name]) for name, value in trained.model.state_dict().items()
    )
    assert "evaluation.accuracy" in trainer.train().metrics


def test_what_is_neither_a_picture_nor_a_file_is_refused(recipe: ModuleType) -> None:
    with pytest.raises(DataError, match=r"\{'digit': 5\} is a JSON value of the type dict; a file is expected"):
        recipe.read({"digit": 5}, _nothing_done)


def test_labels_without_names_are_classes_in_their_order(recipe: ModuleType) -> None:
    picture = recipe.digit_rows()[0][0]["image"]
    rows = [{"image": picture, "label": label} for label in (7, 3, 5)]
    pictures = recipe.Pictures(rows, ("image", "label"), {3: "three", 5: "five", 7: "seven"}, _nothing_done)
    assert [one["labels"] for one in pictures] == [2, 0, 1]
    assert recipe.label_names({3: "three", 7: "seven"})["id2label"] == {0: "three", 1: "seven"}


def _nothing_done(_: Any, return_tensors: str) -> dict[str, torch.Tensor]:
    assert return_tensors == "pt"
    return {"pixel_values": torch.zeros(1, 3, 8, 8)}


def test_a_dataset_without_the_columns_is_refused_with_those_it_has(recipe: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.csv").write_text("picture,kind\na,b\nc,d\ne,f\n")
    with pytest.raises(DataError, match=r"has no image, label. Its columns: kind, picture"):
        recipe.hub_rows(str(tmp_path), "image", "label")


class BreakOff(Hook):
    """End a run as a kill would, behind a step that was not saved."""

    def after_step(self) -> None:
        if self.trainer.state.global_step == 7:
            raise KeyboardInterrupt


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    unbroken, broken = _trainer(tmp_path / "a"), _trainer(tmp_path / "b")
    unbroken.train()
    broken.register_hooks([BreakOff()])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = _trainer(tmp_path / "b")
    assert resumed.state.global_step == 5
    resumed.train()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def _trainer(run: Path, *overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", [f"output_dir={run}", *overrides]))

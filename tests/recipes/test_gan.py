"""The recipe of the GAN: a distance that is the textbook's, digits that come closer, a run that resumes."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.errors import DataError
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run
from hezar_train.report import write_report

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_image_classification import bars  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "gan"
gan: Any = import_recipe(FOLDER / "recipe.py")
SMOKE_RUN = "runs/gan-smoke"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer_of(*overrides: str) -> MultiModelTrainer:
    trainer = build_trainer(load_recipe(FOLDER / "smoke.yaml", overrides))
    assert isinstance(trainer, MultiModelTrainer)
    return trainer


def sha256_of_last(run: str) -> str:
    last = max(Path(run, "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


def test_the_distance_is_that_of_two_normal_distributions_for_any_batch_size() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    drawn, noise = torch.rand(2, 300, 8, 8, generator=torch.Generator().manual_seed(0))
    real = gan.build().eval_dataset.tensors[0][:300] + 0.1 * noise  # else some pixels never change, and have no root
    metric = gan.FrechetDistance()
    for first in range(0, 300, 90):
        metric.update(drawn[first : first + 90], real[first : first + 90])
    one, other = (images.flatten(1).double().numpy() for images in (drawn, real))
    spreads = [np.cov(images.T, bias=True) for images in (one, other)]
    mixed = np.trace(linalg.sqrtm(spreads[0] @ spreads[1]).real)
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(spreads[0]) + np.trace(spreads[1]) - 2 * mixed
    assert metric.compute()["frechet"] == pytest.approx(expected, rel=1e-4)


def test_drawn_digits_come_closer_to_held_out_ones() -> None:
    before = trainer_of().evaluate()["frechet"]
    trained = trainer_of("recipe.hidden=64", "max_steps=", "num_epochs=12", "save_steps=")
    after = trained.train().metrics["evaluation.frechet"]
    assert after < before / 3


def test_two_evaluations_of_the_same_weights_are_equal() -> None:
    trainer = trainer_of()
    assert trainer.evaluate() == trainer.evaluate()


def test_a_run_that_failed_half_way_goes_on_to_the_weights_of_an_unbroken_one() -> None:
    trainer_of("output_dir=unbroken").train()
    first = trainer_of("output_dir=broken")

    def fail(_: Any) -> None:
        if first.state.global_step == 7:
            raise RuntimeError("the power went")

    first.register_hook_in_train(fail, "on_batch_end", model_idx=None)
    with pytest.raises(RuntimeError, match="the power went"):
        first.train()
    second = trainer_of("output_dir=broken")
    assert second.state.global_step == 5
    second.train()
    assert sha256_of_last("broken") == sha256_of_last("unbroken")


def test_a_word_draws_a_digit_always_the_same_and_a_list_of_numbers_is_noise() -> None:
    trainer_of().train()
    opened = open_run(load_run(SMOKE_RUN))
    noise = gan.read("salam", None)[0].tolist()
    first, second, other = opened.predict(["salam", noise, "khodahafez"])
    assert first == second != other
    assert np.shape(first) == (8, 8)
    assert opened.evaluate()["frechet"] > 0


def test_noise_of_another_length_is_refused() -> None:
    trainer_of().train()
    with pytest.raises(DataError, match="expected 16 numbers, not 2"):
        open_run(load_run(SMOKE_RUN)).predict([[1.0, 2.0]])


def test_the_report_shows_what_is_drawn_of_the_same_texts_as_by_predict() -> None:
    trainer_of().train()
    record = json.loads(Path(SMOKE_RUN, "evaluations", "00000012.json").read_text(encoding="utf-8"))
    assert [one["noise of"] for one in record["examples"][""]] == [f'"{number}"' for number in range(20)]
    image = pytest.importorskip("PIL.Image")
    with image.open(Path(SMOKE_RUN, record["examples"][""][3]["image"])) as picture:
        shown = np.array(picture.resize((8, 8), image.Resampling.BOX)) / 255
    assert np.allclose(shown, open_run(load_run(SMOKE_RUN), "last").predict(["3"])[0], atol=1 / 255)
    assert write_report([SMOKE_RUN]).read_text(encoding="utf-8").count("<dt>noise of</dt>") == 20


def test_a_disk_that_takes_no_pictures_does_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer, taken = trainer_of(), Path("taken").absolute()
    taken.write_text("a file where a folder should be", encoding="utf-8")
    trainer.folder.pictures = lambda _: taken  # type: ignore[method-assign]
    assert trainer.train().metrics["evaluation.frechet"] > 0
    assert "the report will not show all that the model drew" in caplog.text


def test_pictures_of_the_hub_take_the_place_of_the_digits_by_one_override(bars: str) -> None:  # noqa: F811
    trainer = trainer_of(f"recipe.dataset={bars}")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (64, 16)
    assert trainer.train().metrics["evaluation.frechet"] > 0
    assert np.shape(open_run(load_run(SMOKE_RUN)).predict(["salam"])[0]) == (8, 8)


def test_larger_pictures_are_drawn_and_compared_at_the_size_of_digits(bars: str) -> None:  # noqa: F811
    trainer = trainer_of(f"recipe.dataset={bars}", "recipe.image_size=16")
    found = trainer.train().metrics["evaluation.frechet"]
    assert np.shape(open_run(load_run(SMOKE_RUN)).predict(["salam"])[0]) == (16, 16)
    twice = torch.rand(5, 8, 8).repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    assert torch.equal(gan.in_digit_size(twice), twice[:, ::2, ::2])
    assert found < 64


def test_a_run_begins_with_the_weights_of_another() -> None:
    trainer_of("output_dir=first").train()
    again = trainer_of("output_dir=again", "init_weights_from=first")
    assert again.evaluate() == trainer_of("output_dir=first").evaluate()

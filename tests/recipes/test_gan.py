"""The recipe of the GAN: a distance that is the textbook's, digits that come closer, a run that resumes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.errors import DataError
from hezar_train.launch import build_trainer, import_recipe, load_recipe, load_run, open_run
from hezar_train.multi_model import MultiModelTrainer

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

"""The recipe of the variational autoencoder: a bound that is one, digits drawn again, a run that resumes."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run
from hezar_train.report import write_report
from hezar_train.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_image_classification import bar, bars  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "vae"
vae: Any = import_recipe(FOLDER / "recipe.py")
SMOKE_RUN = "runs/vae-smoke"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer_of(*overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", overrides))


def sha256_of_last(run: str) -> str:
    last = max(Path(run, "checkpoints").glob("[0-9]*"))
    return hashlib.sha256((last / "model.safetensors").read_bytes()).hexdigest()


@torch.no_grad()
def test_the_bound_of_a_network_that_knows_nothing_is_that_of_equal_greys_and_of_what_its_codes_tell() -> None:
    built = vae.build(num_codes=6, hidden=4)
    for parameter in built.model.parameters():
        torch.nn.init.zeros_(parameter)
    pixels = built.eval_dataset.tensors[0]
    outputs = built.model(pixels)
    assert float(outputs["loss"]) == pytest.approx(64 * math.log(17), rel=1e-5)
    assert torch.allclose(outputs["logits"], torch.tensor(0.5))
    torch.nn.init.ones_(built.model.encoder[-1].bias[:6])  # means of 1 are 1/2 nat each from the standard normal
    assert float(built.model(pixels)["loss"]) == pytest.approx(64 * math.log(17) + 6 / 2, rel=1e-5)


def test_it_learns_to_draw_digits_again() -> None:
    before = trainer_of().evaluate()
    after = trainer_of("recipe.hidden=64", "max_steps=", "num_epochs=10", "save_steps=").train().metrics
    assert after["evaluation.loss"] < 108 < before["loss"]  # 108: each pixel guessed by how often it has each grey
    assert after["evaluation.mse"] < before["mse"] / 2


def test_a_run_that_failed_half_way_goes_on_to_the_weights_of_an_unbroken_one() -> None:
    trainer_of("output_dir=unbroken").train()
    first = trainer_of("output_dir=broken")

    def fail(_: Any) -> None:
        if first.state.global_step == 7:
            raise RuntimeError("the power went")

    first.hooks_in_train.register(fail, "on_batch_end")
    with pytest.raises(RuntimeError, match="the power went"):
        first.train()
    second = trainer_of("output_dir=broken")
    assert second.state.global_step == 5
    second.train()
    assert sha256_of_last("broken") == sha256_of_last("unbroken")


def test_a_picture_is_drawn_again_the_same_in_light_and_in_dark_ink() -> None:
    image = pytest.importorskip("PIL.Image")
    trainer_of().train()
    pixels = (255 * vae.build().eval_dataset.tensors[0][0]).byte().numpy()
    for name, shown in (("light.png", pixels), ("dark.png", 255 - pixels)):
        image.fromarray(shown).resize((80, 80), image.Resampling.NEAREST).save(name)
    light, dark = open_run(load_run(SMOKE_RUN)).predict([Path("light.png"), Path("dark.png")])
    assert np.shape(light) == (8, 8)
    assert np.allclose(light, dark, atol=1e-2)
    assert all(0 <= grey <= 1 for row in light for grey in row)


def test_the_report_shows_held_out_digits_beside_what_is_made_of_them() -> None:
    image = pytest.importorskip("PIL.Image")
    trainer = trainer_of()
    trainer.train()
    record = json.loads(Path(SMOKE_RUN, "evaluations", "00000012.json").read_text(encoding="utf-8"))
    shown = record["examples"][""][3]
    with image.open(Path(SMOKE_RUN, shown["image"])) as picture:
        pair = np.array(picture.resize((17, 8), image.Resampling.BOX)) / 255
    digit, redrawn = trainer.eval_dataset[3][0].numpy(), np.array(trainer.predict([trainer.eval_dataset[3]])[0])
    assert np.allclose(pair, np.hstack([digit, np.ones((8, 1)), redrawn]), atol=1 / 255)
    assert float(shown["mse"]) == pytest.approx(((digit - redrawn) ** 2).mean(), abs=1e-4)
    assert write_report([SMOKE_RUN]).read_text(encoding="utf-8").count("<dt>left</dt>") == 10


@pytest.mark.parametrize("side", [8, 16])
def test_pictures_of_the_hub_take_the_place_of_the_digits(bars: str, side: int) -> None:  # noqa: F811
    trainer = trainer_of(f"recipe.dataset={bars}", *([f"recipe.image_size={side}"] if side != 8 else []))
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (64, 16)
    before = trainer.evaluate()["loss"]
    assert trainer.train().metrics["evaluation.loss"] < before
    bar("upright", 5).resize((96, 96)).save("mine.png")
    redrawn = open_run(load_run(SMOKE_RUN)).predict([Path("mine.png")])[0]
    assert np.shape(redrawn) == (side, side)
    assert all(0 <= grey <= 1 for row in redrawn for grey in row)


def test_a_run_begins_with_the_weights_of_another() -> None:
    trainer_of("output_dir=first").train()
    again = trainer_of("output_dir=again", "init_weights_from=first")
    assert again.evaluate() == trainer_of("output_dir=first").evaluate()

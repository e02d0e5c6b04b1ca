"""A base model that another recipe makes: trained once, found again, resumed after a kill, and anew when changed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hezar_train import Trainer
from hezar_train.recipes import pretrained_by

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from ranks import on_ranks

LEARNS = """\
import os

import torch

from hezar_train import Recipe


class Samples(torch.utils.data.Dataset):
    num_fetched = 0

    def __len__(self):
        return 6

    def __getitem__(self, index):
        self.num_fetched += 1
        if self.num_fetched == int(os.environ.get("BREAK_OFF_AT", 0)):
            raise KeyboardInterrupt
        return torch.full((self.width,), index / 6), torch.ones(1)


def build(width: int = 2) -> Recipe:
    samples = Samples()
    samples.width = width
    return Recipe(model=torch.nn.Linear(width, 1), train_dataset=samples)
"""


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "cache"))
    (folder / "recipe.py").write_text(LEARNS)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_model_is_trained_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pretrained_by("line")
    assert made.parts[-4:-2] == ("cache", "pretrained")
    assert set(_weights(made)) == {"weight", "bias"}
    monkeypatch.setattr(Trainer, "train", lambda _: pytest.fail("it was trained again"))
    assert pretrained_by("line") == made
    assert not (tmp_path / "run").exists()


def test_what_is_drawn_afterwards_and_the_threads_are_as_if_nothing_had_been_trained() -> None:
    before = random.getstate(), torch.get_rng_state(), torch.get_num_threads()
    pretrained_by("line", ["num_threads=1", "seed=7"])
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[2]


def test_another_recipe_config_or_option_is_another_model_and_another_place_is_not(folder: Path) -> None:
    made = pretrained_by("line")
    assert pretrained_by(folder / "config.yaml", ["output_dir=elsewhere/run"]) == made
    others = [pretrained_by("line", [change]) for change in ("num_epochs=2", "recipe.width=5")]
    (folder / "recipe.py").write_text(LEARNS + "\n# another\n")
    others.append(pretrained_by("line"))
    assert len({made, *others}) == 4


def test_a_training_that_was_broken_off_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "unbroken"))
    unbroken = pretrained_by("line", ["save_steps=1"])
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "broken"))
    monkeypatch.setenv("BREAK_OFF_AT", "5")  # in the third of three steps
    with pytest.raises(KeyboardInterrupt):
        pretrained_by("line", ["save_steps=1"])
    assert [path.name for path in (tmp_path / "broken").rglob("0*")] == ["00000001", "00000002"]
    assert not list((tmp_path / "broken").rglob("model"))
    monkeypatch.delenv("BREAK_OFF_AT")
    resumed = pretrained_by("line", ["save_steps=1"])
    for name, weight in _weights(unbroken).items():
        assert torch.equal(weight, _weights(resumed)[name]), name


@pytest.mark.slow
def test_processes_train_one_model_together(tmp_path: Path) -> None:
    made = on_ranks(2, lambda: pretrained_by("line", ["batch_size=1", "use_cpu=true"]))
    assert made[0] == made[1]
    assert set(_weights(made[0])) == {"weight", "bias"}
    assert [path.name for path in (tmp_path / "cache" / "pretrained").iterdir()] == [made[0].parent.name]

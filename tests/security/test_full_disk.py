"""A full disk: a run whose end is not on it does not end well, and says what is."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hezar_train.cli import root

RECIPE = """\
import resource

import torch

from hezar_train import Recipe

class Large(torch.nn.Linear):
    calls, full_from = 0, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.full_from:
            limit(200_000)
        return super().forward(x)


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def build(full_from: int = 0) -> Recipe:
    model = Large(400, 400)
    model.full_from = full_from
    xs = torch.rand(8, 400)
    return Recipe(model, torch.utils.data.TensorDataset(xs, xs))
"""
CONFIG = "trainer: {output_dir: run, batch_size: 2, criterion: MSELoss, async_save: false, save_steps: 2}\n"


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("large").mkdir()
    Path("large/recipe.py").write_text(RECIPE)
    Path("large/config.yaml").write_text(CONFIG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(root, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("full_from", "saved", "words"),
    [(1, [], "there is no checkpoint"), (4, [2], "the newest checkpoint is that of step 2")],
)
def test_a_run_whose_end_could_not_be_saved_fails_and_says_what_is_there(
    full_from: int, saved: list[int], words: str
) -> None:
    done = invoke("train", "large", f"recipe.full_from={full_from}")
    assert done.exit_code == 1
    assert f"step 4 could NOT be saved, {words}" in done.stderr
    assert "Training done!" not in done.output
    assert [int(path.name) for path in Path("run/checkpoints").glob("[0-9]*")] == saved


def test_a_run_that_found_room_in_the_end_is_done_and_a_failed_one_goes_on() -> None:
    assert invoke("train", "large", "recipe.full_from=4").exit_code == 1
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[1], before[1]))
    done = invoke("resume", "run")
    assert done.exit_code == 0, done.output
    assert max(int(path.name) for path in Path("run/checkpoints").glob("[0-9]*")) == 4

"""A run that an earlier version left half way: this one reads it, and goes on with it to the same end.

The folders lie in `tests/data_of_versions`, with the script that made them and what the unbroken run came to. Bits
depend on the processor and on torch: they are compared where a loop without a trainer still gives the bits of the
machine that the folders were made on. Everywhere else the end must be the same but for rounding.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from hezar_train import Trainer
from hezar_train.cli import root

DATA = Path(__file__).parents[1] / "data_of_versions"
VERSIONS = sorted(path.parent.name for path in DATA.glob("*/expected.json"))
ROUNDED = ("loss", "learning_rate", "grad_norm")  # the logged values that are not counts of a few samples

sys.path.insert(0, str(DATA))
make_run: Any = importlib.import_module("make_run")


class Kept(NamedTuple):
    """A copy of an earlier version's run in the working directory, and what it must come to."""

    kind: str
    run: Path
    expected: dict[str, Any]
    weights: dict[str, torch.Tensor]
    is_same_machine: bool

    def trainer(self) -> Trainer:
        """Return the trainer that goes on with it."""
        trainer: Trainer = make_run.make_trainer(self.kind, self.run)
        return trainer


@pytest.fixture(params=[(version, kind) for version in VERSIONS for kind in make_run.FAILS_AFTER], ids="-".join)
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    version, kind = request.param
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(DATA / version / kind, Path("runs", kind))
    expected = json.loads((DATA / version / "expected.json").read_text(encoding="utf-8"))
    weights = load_file(DATA / version / f"{kind}.safetensors")
    return Kept(kind, run, expected["runs"][kind], weights, expected["arithmetic"] == make_run.arithmetic())


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(root, [str(one) for one in arguments], catch_exceptions=False, prog_name="hezar-train")


def test_it_goes_on_from_the_newest_checkpoint_with_every_step_done_once(kept: Kept) -> None:
    trainer = kept.trainer()
    assert trainer.state.global_step == kept.expected["saved_step"]
    trainer.train()
    found = make_run.outcome_of(kept.run)
    for name in ("state", "ledger", "evaluations"):
        assert found[name] == kept.expected[name]


def test_it_ends_with_the_kept_weights_but_for_rounding(kept: Kept) -> None:
    kept.trainer().train()
    found = load_file(make_run.last_checkpoint(kept.run) / make_run.MODEL_FILE)
    assert found.keys() == kept.weights.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, kept.weights[name], rtol=1e-3, atol=1e-3)


def test_its_log_is_that_of_the_unbroken_run_but_for_rounding(kept: Kept) -> None:
    kept.trainer().train()
    found, expected = make_run.rows_of(kept.run), kept.expected["rows"]
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert all(math.isfinite(value) for row in found for value in row.values())
    for row, like in zip(found, expected, strict=True):
        for name in (name for name in row if name.endswith(ROUNDED)):
            assert row[name] == pytest.approx(like[name], rel=1e-2, abs=1e-4), (row["step"], name)


def test_its_end_is_that_of_the_unbroken_run_of_either_version_bit_by_bit(kept: Kept) -> None:
    if not kept.is_same_machine:
        pytest.skip("this machine rounds in another way than the one that the run began on")
    kept.trainer().train()
    found = make_run.outcome_of(kept.run)
    if kept.kind != "epoch_ticks":  # which ticks after every update, if it is begun by this version
        make_run.make_trainer(kept.kind, "runs/unbroken").train()
        assert found == make_run.outcome_of(Path("runs/unbroken"))
    assert {"saved_step": kept.expected["saved_step"], **found} == kept.expected


def test_its_checkpoints_are_whole_before_and_after(kept: Kept) -> None:
    assert (done := invoke("verify", kept.run)).exit_code == 0, done.output
    assert f"{kept.expected['saved_step']:08d}" in done.stdout
    kept.trainer().train()
    assert (done := invoke("verify", kept.run)).exit_code == 0, done.output


def test_it_is_listed_as_failed_and_then_as_finished(kept: Kept) -> None:
    assert f" {make_run.FAILS_AFTER[kept.kind]}/" in _row_of(kept)
    assert "failed" in _row_of(kept).split()
    kept.trainer().train()
    assert "finished" in _row_of(kept).split()


def _row_of(kept: Kept) -> str:
    (row,) = [line for line in invoke("runs").stdout.splitlines() if line.startswith(f"{kept.kind} ")]
    return row


def test_its_report_tells_of_the_failure(kept: Kept) -> None:
    assert (done := invoke("report", kept.run)).exit_code == 0, done.output
    assert "failed: Broken" in (kept.run / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("kept", [(version, "one_model") for version in VERSIONS], indirect=True, ids="-".join)
def test_its_ledger_proves_that_every_sample_was_trained_once_before_and_after(kept: Kept) -> None:
    assert "as far as the run has come" in invoke("audit", kept.run).stdout
    kept.trainer().train()
    assert (done := invoke("audit", kept.run)).exit_code == 0, done.output
    assert done.stdout.endswith("Every sample was trained exactly once per epoch.\n")


@pytest.mark.parametrize("kept", [("0.1.0", "epoch_ticks")], indirect=True, ids="-".join)
def test_a_schedule_goes_on_with_the_tick_that_its_run_began_with_and_a_new_run_has_another(kept: Kept) -> None:
    trainer = kept.trainer()
    assert (trainer.plan.schedule_updates, trainer.plan.total_ticks) == (None, 3)
    trainer.train()
    again = kept.trainer()  # from a checkpoint of this version
    assert (again.plan.schedule_updates, again.plan.total_ticks) == (None, 3)
    new = make_run.make_trainer(kept.kind, "runs/new")
    assert (new.plan.schedule_updates, new.plan.total_ticks) == (1, 12)

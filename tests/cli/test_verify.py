"""`hezar-train verify` and `audit`: they find what is wrong, and say what they looked at."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from hezar_train import MultiModelTrainer, TrainerConfig
from hezar_train.cli.verify import num_before, reaches_all
from hezar_train.events import Ledger, LedgerLine

Invoke = Callable[..., Result]
VERSIONS = Path(__file__).parents[1] / "data_of_versions"


def change_ledger(run: Path, change: Callable[[list[dict[str, int]]], object]) -> None:
    lines = [dataclasses.asdict(line) for line in Ledger.read(run / "ledger.jsonl")]
    change(lines)
    (run / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_whole_checkpoints_are_told_with_the_best_marked(invoke: Invoke, trained: Path) -> None:
    done = invoke("verify", "runs/sums")
    assert (done.exit_code, done.stderr) == (0, "")
    first, second, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in (first, second)] == [["ok", "00000003"], ["ok", "00000006"]]
    assert f"{first}{second}".count("(best)") == 1
    assert last == "2 checkpoints, all whole"


def _flip_a_bit(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip_a_bit, "model.safetensors does not match its SHA-256"),
        (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "manifest.json does not match its own SHA-256"),
        (lambda folder: folder.rename(folder.with_name("00000004")), "named after step 4 but holds step 3"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_others_are_still_looked_at(
    invoke: Invoke, trained: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(trained / "checkpoints/00000003")
    done = invoke("verify", "runs/sums")
    assert done.exit_code == 1
    assert words in done.stdout
    assert "ok   00000006" in done.stdout
    assert "1 of 2 checkpoints damaged" in done.stderr


def test_a_best_checkpoint_that_is_gone_is_told(invoke: Invoke, trained: Path) -> None:
    (trained / "best.json").write_text('{"step": 5, "metric": "evaluation.loss", "value": 1.0}')
    done = invoke("verify", "runs/sums")
    assert (done.exit_code, "names step 5, which has no checkpoint" in done.stdout) == (1, True)


@pytest.mark.parametrize("content", [b"\xff{", b"{}", b'{"step": "x"}'])
def test_a_file_that_names_no_best_checkpoint_is_told_and_every_checkpoint_is_still_looked_at(
    invoke: Invoke, trained: Path, content: bytes
) -> None:
    (trained / "best.json").write_bytes(content)
    done = invoke("verify", "runs/sums")
    *checkpoints, bad = done.stdout.splitlines()
    assert (done.exit_code, [line.split()[:2] for line in checkpoints]) == (1, [["ok", "00000003"], ["ok", "00000006"]])
    assert bad.startswith("  BAD  runs/sums/best.json: ")
    assert "expected the step of the best checkpoint" in bad


def test_nothing_to_verify_is_no_health(invoke: Invoke, trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints")
    assert invoke("verify", "runs/sums").exit_code == 1


def test_an_audit_says_what_it_has_proven(invoke: Invoke, trained: Path) -> None:
    done = invoke("audit", "runs/sums")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "6 updates in runs/sums/ledger.jsonl",
        "  ok   epochs 1 to 2: the positions 0 to 11 came once each, in order, none left out",
        "  ok   the shuffle (seed 42) has each of 12 samples at one position: all 2 orders computed",
        "  ok   the checkpoint of step 6 has seen 24 samples, as many as the ledger has up to there",
        "Every sample was trained exactly once per epoch.",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines.insert(1, lines[0]), "epoch 1: positions 0 to 3 came twice"),
        (lambda lines: lines.pop(1), "epoch 1: positions 4 to 7 were left out"),
        (lambda lines: lines.pop(2), "epoch 1: positions 8 to 11 were left out"),
        (lambda lines: lines[2].update(count=5), "epoch 1: it went to position 12, but there are 12 samples"),
        (lambda lines: lines[5].update(epoch=4), "after epoch 2 comes epoch 4"),
        (lambda lines: lines.pop(), "the checkpoint of step 6 has seen 24 samples; the ledger has 20 up to there"),
    ],
    ids=["twice", "left out", "short epoch", "too far", "skipped epoch", "cut"],
)
def test_a_ledger_that_is_not_right_is_found_out(
    invoke: Invoke, trained: Path, change: Callable[[list[dict[str, int]]], object], words: str
) -> None:
    change_ledger(trained, change)
    done = invoke("audit", "runs/sums")
    assert (done.exit_code, words in done.stdout) == (1, True), done.stdout


def test_lines_that_updates_share_and_lines_of_one_each_prove_the_same(invoke: Invoke, trained: Path) -> None:
    assert invoke("train", "sums", "log_steps=100", "save_steps=100", "output_dir=runs/shared").exit_code == 0
    run = trained.parent / "shared"
    assert '"updates": ' in (run / "ledger.jsonl").read_text()
    shared = invoke("audit", "runs/shared")
    assert shared.exit_code == 0, shared.stdout
    change_ledger(run, lambda lines: lines)
    assert "updates" not in (run / "ledger.jsonl").read_text().replace('"updates": 1}', "}")
    assert invoke("audit", "runs/shared").stdout == shared.stdout


@pytest.mark.parametrize(
    ("epoch", "position", "update_step", "counts"),
    [
        (1, 0, 0, (0, 0)),
        (1, 24, 3, (0, 0)),
        (2, 16, 5, (1, 1)),
        (2, 31, 6, (2, 2)),
        (2, 40, 8, (4, 4)),
        (3, 0, 9, (4, 4)),
    ],
)
def test_of_a_line_that_updates_share_those_before_a_checkpoint_are_counted(
    epoch: int, position: int, update_step: int, counts: tuple[int, int]
) -> None:
    line = LedgerLine(update=5, epoch=2, first=8, count=8, updates=4)
    state = {"epoch": epoch, "position": position, "update_step": update_step}
    assert tuple(num_before(line, state, in_sequence=one) for one in (False, True)) == counts
    assert num_before(LedgerLine(5, 2, 8, 0), state, in_sequence=False) == int((epoch, position) >= (2, 8))


def test_a_run_under_way_is_proven_as_far_as_it_is(invoke: Invoke, trained: Path) -> None:
    shutil.rmtree(trained / "checkpoints/00000006")
    change_ledger(trained, lambda lines: lines.pop())
    done = invoke("audit", "runs/sums")
    assert done.exit_code == 0, done.stdout
    assert "epoch 1: the positions 0 to 11 came once each" in done.stdout
    assert "epoch 2: the first 8 positions of 12 came once each" in done.stdout
    assert done.stdout.endswith("exactly once per epoch, as far as the run has come.\n")


@pytest.mark.parametrize(("order", "is_whole"), [([2, 0, 1], True), ([2, 0, 2], False)])
def test_an_order_that_has_a_sample_twice_lacks_another(order: list[int], is_whole: bool) -> None:
    assert reaches_all(np.array(order)) is is_whole


def test_dropped_samples_are_no_fault_where_the_config_drops_them(invoke: Invoke, trained: Path) -> None:
    assert invoke("train", "sums", "batch_size=5", "drop_last=true", "output_dir=runs/dropped").exit_code == 0
    done = invoke("audit", "runs/dropped")
    assert done.exit_code == 0, done.stdout
    assert "the positions 0 to 9 came once each" in done.stdout
    assert "the rest of less than 5 is dropped (drop_last)" in done.stdout


def test_a_run_that_has_not_trained_has_nothing_to_audit(invoke: Invoke, trained: Path) -> None:
    (trained / "ledger.jsonl").unlink()
    assert invoke("audit", "runs/sums").exit_code == 2


def test_what_lies_in_the_newest_checkpoint_is_shown_on_request(invoke: Invoke, trained: Path) -> None:
    done = invoke("verify", "runs/sums", "--contents")
    assert done.exit_code == 0
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert lines["global_step"] == ["6"]
    assert lines["model:"][1:2] == ["tensors,"]
    assert lines["weight"][0] == "float32"
    assert lines["train.loss"][1] == "last"
    assert "weight" not in invoke("verify", "runs/sums").stdout


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    """A run of two models, one after another, of 3 epochs each; it failed in the second epoch of the second."""
    return shutil.copytree(VERSIONS / "0.1.0" / "two_models", tmp_path / "runs" / "two_models")


def test_models_that_learn_one_after_another_are_proven_each_by_itself(invoke: Invoke, two_models: Path) -> None:
    done = invoke("audit", "runs/two_models")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "19 updates in runs/two_models/ledger.jsonl",
        "  ok   first, epochs 1 to 3: the positions 0 to 26 came once each, in order, none left out",
        "  ok   second, epoch 1: the positions 0 to 26 came once each, in order, none left out",
        "  ok   second, epoch 2: the first 24 positions of 27 came once each, in order",
        "  ok   the shuffle (seed 42) has each of 27 samples at one position: all 3 orders computed",
        "  ok   the checkpoint of step 32 has seen 124 samples, as many as the ledger has up to there",
        "Every sample was trained exactly once per epoch, as far as the run has come.",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines.insert(1, lines[0]), "first, epoch 1: positions 0 to 7 came twice"),
        (lambda lines: lines.pop(13), "second, epoch 1: positions 8 to 15 were left out"),
        (lambda lines: lines.pop(11), "first, after epoch 3 comes epoch 1"),
        (lambda lines: lines.pop(17), "the checkpoint of step 32 has seen 124 samples; the ledger has 116 up to there"),
    ],
    ids=["twice", "left out", "passed on too early", "cut"],
)
def test_a_ledger_of_several_models_that_is_not_right_is_found_out(
    invoke: Invoke, two_models: Path, change: Callable[[list[dict[str, int]]], object], words: str
) -> None:
    change_ledger(two_models, change)
    done = invoke("audit", "runs/two_models")
    assert (done.exit_code, words in done.stdout) == (1, True), done.stdout


@pytest.mark.parametrize(
    ("changes", "num_calls", "proven"),
    [
        ({"local_update_steps": 5}, 3, ["a, epochs 1 to 2:", "a, epoch 3: the first 4", "b, epoch 3: the first 4"]),
        ({"local_update_steps": 1, "batch_or_epoch": "epoch"}, 2, ["a, epochs 1 to 2:", "b, epochs 1 to 2:"]),
        ({"max_steps": 8}, 1, ["a, epoch 2: the first 4 positions of 27", "b, epoch 2: the first 4 positions of 27"]),
        ({"save_enabled": False}, 1, ["model 1, epochs 1 to 2:", "model 2, epochs 1 to 2:"]),
    ],
    ids=["calls of batches", "calls of epochs", "steps", "nothing saved"],
)
def test_models_are_told_apart_however_long_each_of_them_learns(
    invoke: Invoke, tmp_path: Path, changes: dict[str, Any], num_calls: int, proven: list[str]
) -> None:
    points = torch.arange(54.0).reshape(27, 2) / 54
    data = torch.utils.data.TensorDataset(points, points.sum(dim=1, keepdim=True))
    config = TrainerConfig("run", batch_size=4, num_epochs=2, criterion="MSELoss", use_cpu=True, **changes)
    trainer = MultiModelTrainer(config, {"a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)}, data)
    for _ in range(num_calls):
        trainer.train()
    done = invoke("audit", "run")
    assert done.exit_code == 0, done.stdout
    assert [words for words in proven if f"  ok   {words}" not in done.stdout] == []

"""A model spread over processes trains as one that each has whole; its checkpoints go on wherever they are read."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp  # before the forks: it takes seconds
from cases import ADAMW_FLOAT64, CASES, SGD_FLOAT32, Fail, FailAt, distance, ledger_of, steps_saved
from ranks import Group, on_ranks, outcomes_on
from spread import climb, learn_spread, told, tower
from workload import Crash, CrashAt, differences, last_checkpoint, make_trainer

from hezar_train import Hook
from hezar_train.checkpoint import CheckpointStore, export_model, read_tensors
from hezar_train.checkpoint.shard_files import ShardIndex

PRECISIONS = {
    "SGD in float32": (torch.float32, SGD_FLOAT32, 1e-5),
    "AdamW in float64": (torch.float64, ADAMW_FLOAT64, 1e-9),
}
UNBROKEN = {"save_steps": 6, "resume_from_checkpoint": True}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], limit: float = 1e-9) -> None:
    assert ours["counts"] == theirs["counts"]
    assert ours["losses"] == pytest.approx(theirs["losses"][-len(ours["losses"]) :], rel=limit)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=limit)
    assert distance(ours["weights"], theirs["weights"]) <= limit


def assert_as_whole(case: str, precision: str, out: Path, seconds: float = 60, **changes: Any) -> None:
    """Train a case on two processes that have the whole model, and on two that have a share each."""
    dtype, settings, limit = PRECISIONS[precision]

    def train(sharding: str) -> list[dict[str, Any]]:
        settled = {**settings, **changes, "sharding": sharding}
        return on_ranks(2, lambda: learn_spread(case, out / sharding, dtype, **settled), seconds=seconds)

    copies, shares = train("none"), train("full")
    assert ledger_of(out / "full") == ledger_of(out / "none")
    for ours, theirs in zip(shares, copies, strict=True):
        assert_same(ours, theirs, limit)
    assert distance(shares[0]["weights"], shares[1]["weights"]) == 0.0


@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_shares_train_as_two_with_copies(case: str, tmp_path: Path) -> None:
    assert_as_whole(case, "AdamW in float64", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_updates_with_shares_are_those_with_copies(case: str, precision: str, tmp_path: Path) -> None:
    num_epochs = 25 if CASES[case].num_samples % 12 == 0 or CASES[case].is_tagger else 20
    assert_as_whole(case, precision, tmp_path, 280, num_epochs=num_epochs)
    assert len(ledger_of(tmp_path / "full")) == 100


@pytest.mark.parametrize("count", [2, 3])
def test_blocks_tied_rare_and_unused_weights_train_as_on_one_process(count: int, tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone"))
    for one in on_ranks(count, lambda: climb(tmp_path / "shares")):
        assert_same(one, alone)


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e-3])
def test_clipping_is_by_the_norm_over_all_shares(max_grad_norm: float, tmp_path: Path) -> None:
    settings = {"max_grad_norm": max_grad_norm, "optimizer": "sgd", "learning_rate": 0.5, "log_steps": 1}

    def norms(out: Path) -> list[float]:
        rows = next(out.glob("logs/*/metrics.json")).read_text().splitlines()
        return [row["train.grad_norm"] for row in map(json.loads, rows) if "train.grad_norm" in row]

    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone", **settings))
    for one in on_ranks(2, lambda: climb(tmp_path / "shares", **settings)):
        assert_same(one, alone)
    assert norms(tmp_path / "shares") == pytest.approx(norms(tmp_path / "alone"), rel=1e-9)
    assert max(norms(tmp_path / "alone")) > max_grad_norm


def test_all_processes_begin_with_the_weights_of_the_main_one(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, sharding="none")
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(trainer.runtime.rank)
        config = copy.deepcopy(trainer.config).update({"sharding": "full"})
        again = type(trainer)(config, trainer.model, trainer.train_dataset)
        return again.get_model_para()

    first, second = on_ranks(2, work)
    (alone,) = on_ranks(1, lambda: tower(tmp_path).get_model_para())
    assert distance(first, alone) == distance(second, alone) == 0.0


def test_in_bf16_shares_train_about_as_copies_do(tmp_path: Path) -> None:
    settings = {"mixed_precision": "bf16", "dtype": torch.float32}
    copies = on_ranks(2, lambda: climb(tmp_path / "copies", sharding="none", **settings))
    shares = on_ranks(2, lambda: climb(tmp_path / "shares", **settings))
    assert {value.dtype for value in shares[0]["weights"].values()} == {torch.float32}
    assert shares[0]["losses"] == pytest.approx(copies[0]["losses"], rel=0.05)
    assert distance(shares[0]["weights"], copies[0]["weights"]) < 0.05
    assert distance(shares[0]["weights"], shares[1]["weights"]) == 0.0


def test_on_one_process_there_is_nothing_to_share_out(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: climb(tmp_path / "none", sharding="none"))
    (spread,) = on_ranks(1, lambda: climb(tmp_path / "full"))
    assert distance(spread["weights"], alone["weights"]) == 0.0
    assert not list(last_checkpoint(tmp_path / "full").glob("*shard*"))


def climb_until(out: Path, update: int, **changes: Any) -> None:
    with pytest.raises(Fail):
        tower(out, [FailAt(update)], **{**UNBROKEN, **changes}).train()


WAYS = {
    "2, then 1": [(2, "full"), (1, "full")],
    "2, then 3": [(2, "full"), (3, "full")],
    "2, then 2 with copies": [(2, "full"), (2, "none")],
    "2 with copies, then 2": [(2, "none"), (2, "full")],
    "1, then 2": [(1, "none"), (2, "full")],
    "2, 1, 3, 2": [(2, "full"), (1, "full"), (3, "full"), (2, "full")],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_goes_on_with_any_number_of_processes_and_any_sharding(way: str, tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone", **UNBROKEN))
    *firsts, (count, sharding) = WAYS[way]
    for number, (first, first_sharding) in enumerate(firsts):
        update = 3 + 2 * number
        on_ranks(first, lambda u=update, s=first_sharding: climb_until(tmp_path / "run", u, sharding=s))
    for one in on_ranks(count, lambda: climb(tmp_path / "run", **{**UNBROKEN, "sharding": sharding})):
        assert one["losses"]
        assert len(one["losses"]) < len(alone["losses"])
        assert_same(one, alone)
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "alone")


WORKLOAD: dict[str, Any] = {
    "gradient_accumulation_steps": 1, "global_batch_size": 8, "batch_size": 4, "sharding": "full", "save_steps": 1,
}  # fmt: skip


def crash_twice_and_finish(out: Path, **changes: Any) -> None:
    for step in (3, 6):
        with pytest.raises(Crash):
            make_trainer(out, hooks=[CrashAt(step, "on_batch_forward")], **{**WORKLOAD, **changes}).train()
    make_trainer(out, **{**WORKLOAD, **changes}).train()


def shards_of(out: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in last_checkpoint(out).glob("*shard*")}
    assert len(found) == 6
    return found


@pytest.mark.parametrize("changes", [{}, {"async_save": False}], ids=["in the background", "in line"])
def test_at_the_same_number_of_processes_a_resumed_run_is_the_same_bit_by_bit(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(2, lambda: make_trainer(tmp_path / "unbroken", **WORKLOAD).train().metrics)
    on_ranks(2, lambda: crash_twice_and_finish(tmp_path / "broken", **changes))
    assert differences(tmp_path / "unbroken", tmp_path / "broken") == []
    assert shards_of(tmp_path / "unbroken") == shards_of(tmp_path / "broken")


class Slow(Hook):
    def after_step(self) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_whose_processes_are_killed_goes_on_bit_by_bit(victim: int, tmp_path: Path) -> None:
    out, settings = tmp_path / "killed", {**UNBROKEN, "save_steps": 1, "num_epochs": 4}
    with Group(2, lambda: tower(out, [Slow()], **settings).train()) as group:
        while not (out / "checkpoints").exists() or len(steps_saved(out)) < 4:
            assert all(process.is_alive() for process in group.processes), group.wait()
            time.sleep(0.005)
        group.send(victim, signal.SIGKILL)
        outcomes = group.wait()
    assert [outcomes[victim].exit_code, outcomes[1 - victim].exit_code] == [-signal.SIGKILL, 1]  # noticed, no hang
    on_ranks(2, lambda: climb(out, **settings))
    on_ranks(2, lambda: climb(tmp_path / "unbroken", **settings))
    assert shards_of(out) == shards_of(tmp_path / "unbroken")
    assert ledger_of(out) == ledger_of(tmp_path / "unbroken")


class SendAt(Hook):
    """Send SIGTERM to one process in the forward that follows so many updates."""

    def __init__(self, rank: int, update: int) -> None:
        self._place = (rank, update)

    def on_batch_forward(self, _: Any) -> None:
        if (self.trainer.runtime.rank, self.trainer.state.update_step) == self._place:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_process_saves_the_shares_of_all(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, lambda: make_trainer(tmp_path / "stopped", hooks=[SendAt(1, 2)], **WORKLOAD).train())
    assert [one.exit_code for one in outcomes] == [143, 143]
    assert all("TrainingInterrupted" in one.error for one in outcomes)
    for out in ("stopped", "unbroken"):
        on_ranks(2, lambda o=out: make_trainer(tmp_path / o, **WORKLOAD).train().metrics)
    assert shards_of(tmp_path / "stopped") == shards_of(tmp_path / "unbroken")


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a pickle was touched")


def climb_without_pickle(out: Path) -> None:
    """Train, save, go on and export in a process in which nothing can be pickled."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((pickle, ("dump", "dumps", "load", "loads")), (torch, ("save", "load"))):
            for name in names:
                patch.setattr(module, name, refuse)
        for module, name in ((pickle, "Pickler"), (pickle, "Unpickler"), (c10d, "_pickler"), (c10d, "_unpickler")):
            patch.setattr(module, name, type(name, (), {"__init__": refuse}))
        with pytest.raises(AssertionError, match="a pickle was touched"):
            pickle.dumps(0)
        for num_epochs in (1, 2):
            trainer = tower(out / "run", do_evaluate=False, num_epochs=num_epochs, **UNBROKEN)
            trainer.train()
        trainer.save(out / "export")


def test_no_pickle_is_written_read_or_sent(tmp_path: Path) -> None:
    on_ranks(2, climb_without_pickle, tmp_path)
    assert len(steps_saved(tmp_path / "run")) == 10
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"):
        assert path.suffix in {".safetensors", ".json", ".jsonl", ".yaml", ".csv", ".dropped"}
        assert not path.read_bytes().startswith((b"\x80", b"PK"))  # pickles, and torch's archives of them


def test_a_checkpoint_is_exported_as_one_plain_file(tmp_path: Path) -> None:
    one, _ = on_ranks(2, lambda: climb(tmp_path / "run"))
    folder = last_checkpoint(tmp_path / "run")
    assert set(read_tensors(folder / "model.safetensors")) == {"num_samples"}
    export_model(CheckpointStore(folder.parent).open(folder), tmp_path / "plain.safetensors")
    found = read_tensors(tmp_path / "plain.safetensors")
    assert int(found.pop("num_samples")) > 0
    assert distance({**found, "tied.weight": found["last.weight"]}, one["weights"]) == 0.0


@pytest.mark.parametrize("async_save", [True, False])
def test_retention_keeps_the_newest_and_the_best(async_save: bool, tmp_path: Path) -> None:
    settings = {"save_total_limit": 1, "metric_for_best_model": "accuracy", "learning_rate": 1.0, "num_epochs": 5}
    on_ranks(2, lambda: climb(tmp_path, async_save=async_save, save_steps=6, **settings))
    best = json.loads((tmp_path / "best.json").read_text())
    assert steps_saved(tmp_path) == sorted({best["step"], 65})
    assert best["step"] < 65  # else the test tells nothing
    assert not list((tmp_path / "checkpoints").glob(".*"))
    for step in steps_saved(tmp_path):
        assert ShardIndex(tmp_path / f"checkpoints/{step:08d}").read_whole("model")


class FailToWrite(Hook):
    """Break the writing of shards on one process, after so many saves."""

    def __init__(self, rank: int, problem: Exception, after: int = 1) -> None:
        self._rank, self._problem, self._after = rank, problem, after

    def before_train(self) -> None:
        from hezar_train.checkpoint import sharded

        write, saves = sharded.write_shards, iter(range(1000))

        def fail(*arguments: Any) -> None:
            write(*arguments)
            if next(saves) == self._after and self.trainer.runtime.rank == self._rank:
                raise self._problem

        sharded.write_shards = fail


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_process_is_no_checkpoint_and_stops_all(
    rank: int, async_save: bool, tmp_path: Path
) -> None:
    hook = FailToWrite(rank, PermissionError("the disk is read only"))
    outcomes = outcomes_on(2, lambda: tower(tmp_path, [hook], save_steps=1, async_save=async_save).train())
    assert [one.exit_code for one in outcomes] == [1, 1]
    assert all("the disk is read only" in one.error for one in outcomes)
    assert steps_saved(tmp_path) == [3]
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_disk_that_is_full_for_one_process_stops_the_save_of_all_and_no_training(tmp_path: Path) -> None:
    hook = FailToWrite(1, OSError(errno.ENOSPC, "No space left on device"))
    outcomes = outcomes_on(2, lambda: told(tower(tmp_path, [hook], save_steps=1)))
    assert [one.exit_code for one in outcomes] == [0, 0]
    assert "DISK FULL" in outcomes[0].output
    assert steps_saved(tmp_path) == [3, 9, 12, 13, 16, 19, 22, 25, 26]  # after each update but the second
    assert outcomes[0].value["counts"] == outcomes[1].value["counts"] == (10, 98, 2, 49)

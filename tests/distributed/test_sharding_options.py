"""The ways to spread a model that a config chooses: in bf16, in groups, from the host's memory, computed again.

Whatever is chosen, the samples are those of plain copies, the weights are theirs within the limits of
`test_sharding.py`, and a run that is killed goes on bit by bit at the same number of processes.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from cases import Fail, FailAt, distance, ledger_of, steps_saved
from ranks import Group, on_ranks, outcomes_on
from spread import Block, Tower, climb, tower
from torch import nn
from workload import last_checkpoint

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime.sharding import sharded_modules

BF16 = {"mixed_precision": "bf16", "dtype": torch.float32, "optimizer": "sgd", "learning_rate": 0.02}

OPTIONS: dict[str, dict[str, Any]] = {
    "in groups of two": {"sharding_group_size": 2},
    "from the host's memory": {"sharding_offload": True},
    "computed again": {"gradient_checkpointing": True},
    "all of these": {"sharding_group_size": 2, "sharding_offload": True, "gradient_checkpointing": True},
}


def assert_as_copies(ours: dict[str, Any], copies: dict[str, Any], limit: float) -> None:
    assert ours["counts"] == copies["counts"]
    assert ours["losses"] == pytest.approx(copies["losses"], rel=limit)
    assert distance(ours["weights"], copies["weights"]) <= limit


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_way_to_spread_a_model_trains_as_copies_do(option: str, count: int, tmp_path: Path) -> None:
    copies = on_ranks(count, lambda: climb(tmp_path / "copies", sharding="none"))
    spread = on_ranks(count, lambda: climb(tmp_path / "spread", **OPTIONS[option]))
    assert ledger_of(tmp_path / "spread") == ledger_of(tmp_path / "copies")
    for ours, theirs in zip(spread, copies, strict=True):
        assert_as_copies(ours, theirs, 1e-9)
    assert all(distance(one["weights"], spread[0]["weights"]) == 0.0 for one in spread)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("option", ["in groups of two", "from the host's memory", "all of these"])
def test_in_bf16_every_way_trains_as_copies_do_up_to_the_rounding_of_bf16(
    option: str, count: int, tmp_path: Path
) -> None:
    """Bfloat16 has 8 bits of mantissa: one rounding moves a value by up to 2**-8.

    Copies round products only (autocast); shares also the weights and the hidden values, by MixedPrecisionPolicy. Their
    gradients differ by some such roundings, and after ten steps of SGD at a rate of 0.02 weights and losses of size one
    by less than four times 2**-8 (measured: 0.5).
    """
    copies = on_ranks(count, lambda: climb(tmp_path / "copies", sharding="none", **BF16))
    spread = on_ranks(count, lambda: climb(tmp_path / "spread", **{**BF16, **OPTIONS[option]}))
    full = on_ranks(count, lambda: climb(tmp_path / "full", sharding="none", **{**BF16, "mixed_precision": "no"}))
    assert ledger_of(tmp_path / "spread") == ledger_of(tmp_path / "copies")
    assert {value.dtype for value in spread[0]["weights"].values()} == {torch.float32}
    assert_as_copies(spread[0], copies[0], 4 * 2.0**-8)
    assert distance(spread[0]["weights"], full[0]["weights"]) > 1e-5  # it did compute in bf16
    assert all(distance(one["weights"], spread[0]["weights"]) == 0.0 for one in spread)


class Slow(Hook):
    def after_step(self) -> None:
        time.sleep(0.02)


def shards_of(out: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in last_checkpoint(out).glob("*shard*")}
    assert found
    return found


KILLED = {**OPTIONS, "in bf16": {"mixed_precision": "bf16", "dtype": torch.float32}}


@pytest.mark.parametrize(("count", "victim"), [(2, 1), (4, 3), (4, 0)])
@pytest.mark.parametrize("option", KILLED)
def test_a_killed_run_goes_on_bit_by_bit(option: str, count: int, victim: int, tmp_path: Path) -> None:
    out, settings = tmp_path / "killed", {"resume_from_checkpoint": True, "save_steps": 1, **KILLED[option]}
    with Group(count, lambda: tower(out, [Slow()], **settings).train()) as group:
        while not (out / "checkpoints").exists() or len(steps_saved(out)) < 3:
            assert all(process.is_alive() for process in group.processes), group.wait()
            time.sleep(0.005)
        group.send(victim, signal.SIGKILL)
        outcomes = group.wait()
    assert outcomes[victim].exit_code == -signal.SIGKILL
    assert None not in {one.exit_code for one in outcomes}  # all noticed, none hung
    on_ranks(count, lambda: climb(out, **settings))
    on_ranks(count, lambda: climb(tmp_path / "unbroken", **settings))
    assert shards_of(out) == shards_of(tmp_path / "unbroken")
    assert ledger_of(out) == ledger_of(tmp_path / "unbroken")


GROUPS_OF_TWO = {"sharding_group_size": 2}
WAYS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "4 in groups, then 1": [(4, GROUPS_OF_TWO), (1, {})],
    "4 in groups, then 3": [(4, GROUPS_OF_TWO), (3, {})],
    "2, then 4 in groups": [(2, {}), (4, GROUPS_OF_TWO)],
    "4 in groups, then 4 with copies": [(4, GROUPS_OF_TWO), (4, {"sharding": "none"})],
    "4 from the host, then 2, then 4 in groups": [(4, {"sharding_offload": True}), (2, {}), (4, GROUPS_OF_TWO)],
}


@pytest.mark.parametrize("way", WAYS)
def test_its_checkpoint_goes_on_with_another_number_of_processes(way: str, tmp_path: Path) -> None:
    unbroken: dict[str, Any] = {"save_steps": 6, "resume_from_checkpoint": True}

    def fail_after(update: int, changes: dict[str, Any]) -> None:
        with pytest.raises(Fail):
            tower(tmp_path / "run", [FailAt(update)], **{**unbroken, **changes}).train()

    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone", **unbroken))
    *firsts, (count, changes) = WAYS[way]
    for number, (first, how) in enumerate(firsts):
        on_ranks(first, fail_after, 3 + 2 * number, how)
    for one in on_ranks(count, lambda: climb(tmp_path / "run", **{**unbroken, **changes})):
        assert 0 < len(one["losses"]) < len(alone["losses"])
        assert distance(one["weights"], alone["weights"]) <= 1e-9
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "alone")


def test_in_groups_each_group_has_the_model_and_one_of_them_saves_it(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, sharding_group_size=2)
        trainer.train()
        weight: Any = trainer.model.blocks[0].inner.weight
        return tuple(weight.device_mesh.shape), trainer.model.blocks[0].inner.weight.to_local().numel()

    told = on_ranks(4, work)
    assert [mesh for mesh, _ in told] == [(2, 2)] * 4
    assert [size for _, size in told] == [15, 10, 15, 10]  # of 5 rows of 5
    sizes = {path.name: path.stat().st_size for path in last_checkpoint(tmp_path).glob("model.shard-*")}
    assert sizes["model.shard-00003-of-00004.safetensors"] < sizes["model.shard-00001-of-00004.safetensors"] / 2


def test_shares_in_the_hosts_memory_are_stepped_there(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, sharding_offload=True)
        trainer.train()
        kinds = {type(module._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
                 for module in sharded_modules(trainer.model)}  # fmt: skip
        return kinds, {one.device.type for one in trainer.optimizer.state}

    assert on_ranks(2, work) == [({"CPUOffloadPolicy"}, {"cpu"})] * 2


class Counting(Block):
    """A block that counts how often its inner layer runs."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1  # not of its own class: FSDP2 gives each block another
        return super().forward(x)


class CountingTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(3))


@pytest.mark.parametrize("is_on", [False, True])
def test_blocks_run_once_more_in_the_backward_and_once_only_in_an_evaluation(is_on: bool, tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, gradient_checkpointing=is_on, num_epochs=1, do_evaluate=False)
        again = Trainer(trainer.config, CountingTower().double(), trainer.train_dataset, trainer.eval_dataset)
        assert isinstance(again.model.blocks[0], Counting)
        again.train()
        steps, after_training = again.state.global_step, Counting.calls
        again.evaluate()
        return after_training / steps, Counting.calls - after_training

    for per_step, in_evaluation in on_ranks(2, work):
        assert per_step == (6 if is_on else 3)
        assert in_evaluation == 3 * -(-13 // 4)


def test_a_model_with_a_method_of_its_own_uses_that(tmp_path: Path) -> None:
    class Own(Tower):
        switched = 0

        def gradient_checkpointing_enable(self) -> None:
            self.switched += 1

    def work() -> Any:
        plain = tower(tmp_path)
        config = plain.config.to_dict() | {"gradient_checkpointing": True}
        model = Own().double()
        Trainer(TrainerConfig.from_dict(config), model, plain.train_dataset)
        return model.switched, type(model.blocks[0]).__mro__[2] is Block

    assert on_ranks(2, work) == [(1, True)] * 2


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))


def trainer_of(model: nn.Module, out: Path, **changes: Any) -> Trainer:
    plain = tower(out, sharding="none")
    config = plain.config.to_dict() | {"sharding": "full", **changes}
    return Trainer(TrainerConfig.from_dict(config), model, plain.train_dataset)


REFUSED: dict[str, tuple[int, Any, str]] = {
    "a group size that does not divide": (
        4,
        lambda out: tower(out, sharding_group_size=3),
        "sharding_group_size=3 does not divide the 4 processes. Use 2, 4, or start another number of processes.",
    ),
    "more than there are": (
        2,
        lambda out: tower(out, sharding_group_size=4),
        "sharding_group_size=4 does not divide the 2 processes. Use 2, or start another number of processes.",
    ),
    "blocks that count batches": (
        2,
        lambda out: trainer_of(Normed().double(), out, gradient_checkpointing=True),
        "computes Sequential twice, and its batch normalisation would count each batch twice",
    ),
    "no blocks": (
        2,
        lambda out: trainer_of(nn.Linear(4, 3).double(), out, gradient_checkpointing=True),
        "Linear has no gradient_checkpointing_enable() to switch it on, and no list of blocks of one class",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused_when_the_trainer_is_built(what: str, tmp_path: Path) -> None:
    count, work, words = REFUSED[what]
    for one in outcomes_on(count, work, tmp_path):
        assert "ConfigError" in one.error, one.error
        assert words in one.error


@pytest.mark.parametrize("field", [{"sharding_group_size": 2}, {"sharding_offload": True}])
def test_without_sharding_its_fields_are_refused(field: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does nothing with sharding='none'\. Set sharding='full', or leave it out"):
        TrainerConfig(tmp_path, **field)


def test_on_one_process_there_is_nothing_to_group_or_to_offload(tmp_path: Path) -> None:
    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone", sharding="none"))
    (same,) = on_ranks(1, lambda: climb(tmp_path / "same", sharding_group_size=2, sharding_offload=True))
    assert distance(same["weights"], alone["weights"]) == 0.0

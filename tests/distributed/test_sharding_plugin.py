"""An Accelerator that `accelerate launch` set up with an FSDP2 plug-in spreads the model; all else is as with our own.

Accelerate takes such a plug-in only where it finds an accelerator, and drops it silently elsewhere. `accepted` makes it
take it on a CPU: what it does then is its own code.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from cases import Fail, FailAt, distance, ledger_of, points
from ranks import on_ranks, outcomes_on
from spread import SETTINGS, Tower, climb, tower
from workload import last_checkpoint

from hezar_train import Trainer, TrainerConfig
from hezar_train.runtime.accelerator import plugin_problems
from hezar_train.runtime.sharding import sharded_modules

LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
UNBROKEN = {"save_steps": 1, "resume_from_checkpoint": True, "sharding": "none"}


def accepted(work: Callable[[], Any], kind: DistributedType = DistributedType.FSDP, **variables: str) -> Any:
    """Work as a process that `accelerate launch` has started with a plug-in, where Accelerate accepts it on a CPU."""
    plain = AcceleratorState.__init__

    def init(state: Any, *arguments: Any, **named: Any) -> None:
        plain(state, *arguments, **named)
        if (plugin := named.get("fsdp_plugin")) is not None:
            state.distributed_type = PartialState._shared_state["distributed_type"] = kind
            state.fsdp_plugin = plugin
            if state._mixed_precision != "no":
                plugin.set_mixed_precision(state._mixed_precision)

    os.environ |= {**LAUNCHED, **variables}
    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    return work()


def test_a_plugin_of_the_launcher_spreads_the_model_and_trains_it_as_one_process_does(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path / "plugin", sharding="none")
        assert trainer.accelerator.is_fsdp2
        assert [type(module).__name__ for module in sharded_modules(trainer.model)] == ["FSDPTower", *["FSDPBlock"] * 3]
        assert type(trainer.optimizer) is torch.optim.AdamW
        result = trainer.train()
        return result.metrics, trainer.get_model_para()

    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone"))
    for metrics, weights in on_ranks(2, accepted, work):
        assert metrics == pytest.approx(alone["metrics"], rel=1e-9)
        assert distance(weights, alone["weights"]) <= 1e-9
    assert len(list(last_checkpoint(tmp_path / "plugin").glob("*shard*"))) == 6


@pytest.mark.parametrize(("count", "sharding"), [(1, "none"), (3, "full"), (2, "plugin")])
def test_its_checkpoint_goes_on_elsewhere(count: int, sharding: str, tmp_path: Path) -> None:
    def until_a_failure() -> None:
        with pytest.raises(Fail):
            tower(tmp_path / "run", [FailAt(4)], **UNBROKEN).train()

    def go_on() -> Any:
        return climb(tmp_path / "run", **{**UNBROKEN, "sharding": "full" if sharding == "full" else "none"})

    (alone,) = on_ranks(1, lambda: climb(tmp_path / "alone", **UNBROKEN))
    on_ranks(2, accepted, until_a_failure)
    for one in on_ranks(count, accepted, go_on) if sharding == "plugin" else on_ranks(count, go_on):
        assert distance(one["weights"], alone["weights"]) <= 1e-9
    assert ledger_of(tmp_path / "run") == ledger_of(tmp_path / "alone")


def test_a_users_own_accelerator_and_optimizer_are_taken(tmp_path: Path) -> None:
    def work(with_plugin: bool) -> Any:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if with_plugin else None)
        trainer = tower(
            tmp_path / str(with_plugin),
            sharding="none",
            accelerator=accelerator,
            optimizer_object=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        )
        trainer.train()
        return bool(sharded_modules(trainer.model)), trainer.get_model_para()

    told = on_ranks(2, accepted, lambda: work(True))
    (is_spread, alone), _ = on_ranks(2, work, False)
    assert not is_spread
    for is_spread, weights in told:
        assert is_spread
        assert distance(weights, alone) <= 1e-9


def test_in_bf16_the_plugin_computes_in_its_precision(tmp_path: Path) -> None:
    def work() -> Any:
        return climb(tmp_path, sharding="none", mixed_precision="bf16", dtype=torch.float32)

    told = on_ranks(2, accepted, work)
    assert {value.dtype for value in told[0]["weights"].values()} == {torch.float32}
    assert told[0]["losses"] == told[1]["losses"]
    assert told[0]["losses"][-1] < told[0]["losses"][0]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_trainer_that_only_evaluates_is_spread_too(is_frozen: bool, tmp_path: Path) -> None:
    def look() -> Any:
        torch.manual_seed(0)
        config = TrainerConfig(tmp_path, **SETTINGS | {"sharding": "none"})
        return Trainer(config, Tower().double().requires_grad_(not is_frozen), None, points(13, 13)).evaluate()

    (alone,) = on_ranks(1, look)
    for found in on_ranks(2, accepted, look):
        assert found == pytest.approx(alone, rel=1e-9)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a plug-in that is dropped": (
        lambda out: (os.environ.update(LAUNCHED), tower(out, sharding="none")),
        "ACCELERATE_USE_FSDP asks Accelerate for FSDP, but it made MULTI_CPU: where it finds no accelerator, it drops",
    ),
    "FSDP1": (
        lambda out: accepted(lambda: tower(out, sharding="none"), FSDP_VERSION="1"),
        "has an FSDP1 plug-in, whose state cannot be saved without pickles. Give it fsdp_version=2",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_a_reason(what: str, tmp_path: Path) -> None:
    work, words = REFUSED[what]
    for one in outcomes_on(2, work, tmp_path):
        assert "ConfigError" in one.error, one.error
        assert words in one.error


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_engines_that_keep_their_state_in_pickles_are_refused(kind: DistributedType) -> None:
    made = SimpleNamespace(distributed_type=kind, mixed_precision="no", is_fsdp2=False)
    (problem,) = plugin_problems(made)  # type: ignore[arg-type]
    assert problem.startswith(f"the Accelerator uses {kind.value}, which steps by itself")
    assert "Use sharding='full' in the config" in problem

"""Adapters on two processes: each with a copy of the model, or each with its share; killed, and read by one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from peft import PeftModel, PromptTuningConfig, get_peft_model
from ranks import Group, on_ranks, outcomes_on
from safetensors.torch import load_file
from tiny import LAST_STEP, Kill, adapted, base, checkpoint, logits, tensor_bytes, trainer

from hezar_train.checkpoint import CheckpointStore
from hezar_train.errors import CheckpointError

pytestmark = pytest.mark.slow

SAME = {"global_batch_size": 8, "num_epochs": 4}


def learn(out: Path, sharding: str, hooks: Any = (), **changes: Any) -> int:
    made = trainer("gpt2", out, hooks=hooks, **SAME | {"sharding": sharding} | changes)
    made.train()
    if not changes:
        made.save(out / "exported")
    return made.state.global_step


def held(out: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(out / "checkpoints")
    return store.open(store.path(store.steps()[-1])).model()[0]


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_hold_adapters_alone_and_are_resumed_after_a_kill(sharding: str, tmp_path: Path) -> None:
    assert on_ranks(2, lambda: learn(tmp_path / "unbroken", sharding)) == [LAST_STEP, LAST_STEP]
    tensors = held(tmp_path / "unbroken")
    assert all("lora" in name for name in tensors)
    assert tensor_bytes(checkpoint(tmp_path / "unbroken")) < 64 << 10
    with Group(2, lambda: learn(tmp_path / "killed", sharding, [Kill(5)])) as group:
        assert [one.exit_code for one in group.wait()] == [-signal.SIGKILL, -signal.SIGKILL]
    on_ranks(2, lambda: learn(tmp_path / "killed", sharding, resume_from_checkpoint=True))
    again = held(tmp_path / "killed")
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_goes_on_from_two_and_loads_what_they_exported(sharding: str, tmp_path: Path) -> None:
    on_ranks(2, lambda: learn(tmp_path, sharding))
    alone = trainer("gpt2", tmp_path, **SAME, resume_from_checkpoint=True)
    assert alone.state.global_step == LAST_STEP
    loaded = PeftModel.from_pretrained(base("gpt2"), tmp_path / "exported")
    assert torch.equal(logits("gpt2", loaded), logits("gpt2", alone.model))
    assert all("lora" in name for name in load_file(tmp_path / "exported" / "adapter_model.safetensors"))


def test_shares_of_another_base_are_refused_on_every_process(tmp_path: Path) -> None:
    on_ranks(2, lambda: learn(tmp_path, "full"))

    def resume() -> None:
        model = adapted("gpt2")
        with torch.no_grad():
            model.base_model.model.transformer.wpe.weight[0, 0] += 1.0
        with pytest.raises(CheckpointError, match=r"1 of \d+ frozen tensors differ"):
            trainer("gpt2", tmp_path, model, **SAME, sharding="full", resume_from_checkpoint=True)

    on_ranks(2, resume)


def test_prompts_and_merging_are_refused_where_each_process_has_a_share(tmp_path: Path) -> None:
    def prompts() -> None:
        model = get_peft_model(base("gpt2"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
        trainer("gpt2", tmp_path / "prompts", model, **SAME, sharding="full")

    def merge() -> None:
        trainer("gpt2", tmp_path / "merged", **SAME, sharding="full").save(tmp_path / "out", merge=True)

    for work, words in ((prompts, "cannot be used with PROMPT_TUNING"), (merge, "none can merge it")):
        assert all(words in one.error for one in outcomes_on(2, work))

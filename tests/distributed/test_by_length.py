"""Batches by length on several processes: the same samples in every update, and the same weights in the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, build, sentences
from ranks import on_ranks, outcomes_on
from test_invariance import assert_same

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.cli.verify import audit_run

TOKENS = {"batch_size": 1, "global_batch_size": None, "global_batch_tokens": 60, "length_column": "tokens"}


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        ({**TOKENS, "max_tokens_per_batch": 24}, [2, 3]),
        ({**TOKENS, "max_tokens_per_batch": 24, "group_by_length": True, "max_steps": 7, "save_steps": 3}, [4]),
        ({"group_by_length": True, "length_column": "tokens", "max_tokens_per_batch": 16}, [2]),
    ],
    ids=["tokens", "grouped tokens, cut short", "grouped samples"],
)
def test_updates_by_length_are_the_same_on_any_number_of_processes(
    changes: dict[str, Any], counts: list[int], tmp_path: Path
) -> None:
    assert_same(
        "variable lengths", "AdamW in float64", counts, tmp_path, 60, lr_scheduler="one_cycle", lr_scheduling_steps=1,
        **changes,
    )  # fmt: skip
    for count in (1, *counts):
        found = audit_run(build("variable lengths", tmp_path / str(count), **changes).config)
        assert found.problems == []


def test_the_main_process_measures_and_the_others_are_told(tmp_path: Path) -> None:
    def measured() -> tuple[int, str]:
        reads = 0

        class Watched(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                nonlocal reads
                reads += 1
                return super().__getitem__(index)

        trainer = build("variable lengths", tmp_path, **TOKENS)
        reads = 0
        found = trainer.data.open(trainer.config, Watched(CASES["variable lengths"].data[0]))
        return reads, found.by_length.lengths.digest

    told = on_ranks(2, measured)
    assert [reads for reads, _ in told] == [40, 0]
    assert told[0][1] == told[1][1]


class KillAt(Hook):
    """Kill this very process after so many updates."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window and self.trainer.state.update_step == self._update:
            os.kill(os.getpid(), signal.SIGKILL)


def packed(out: Path, hooks: Any = (), **changes: Any) -> Trainer:
    """Build the trainer of a small GPT-2 with dropout, over packed documents, by a budget of tokens."""
    import transformers

    torch.manual_seed(0)
    settings = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    rows = [{"input_ids": row["tokens"]} for row in sentences(60)]
    config = TrainerConfig(
        out, packing=True, global_batch_tokens=50, max_tokens_per_batch=20, num_epochs=2, save_steps=3, log_steps=2,
        learning_rate=0.01, lr_scheduler="one_cycle", lr_scheduling_steps=1, trackers=[],
        **{"group_by_length": True, "async_save": False} | changes,
    )  # fmt: skip
    return Trainer(config, transformers.GPT2LMHeadModel(settings), rows, hooks=hooks)


def trained(out: Path, hooks: Any = (), **changes: Any) -> tuple[int, dict[str, Any]]:
    """Train; return where it began and what came of it."""
    trainer = packed(out, hooks, **changes)
    began = trainer.state.update_step
    trainer.train()
    return began, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("count", [1, 2])
def test_a_packed_run_that_was_killed_ends_bit_by_bit_like_the_unbroken_one(count: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (_, whole), *_ = on_ranks(count, trained, tmp_path / "whole")
    for update in (4, 11):
        killed = outcomes_on(
            count, lambda at=update: trained(tmp_path / "killed", [KillAt(at)], resume_from_checkpoint=True)
        )
        assert -signal.SIGKILL in {one.exit_code for one in killed}
    resumed = on_ranks(count, lambda: trained(tmp_path / "killed", resume_from_checkpoint=True))
    for began, weights in resumed:
        assert began == 9
        assert all(torch.equal(weights[name], value) for name, value in whole.items())
    names = [tmp_path / name / "ledger.jsonl" for name in ("whole", "killed")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert audit_run(packed(tmp_path / "killed").config).problems == []


def test_an_evaluation_by_length_is_the_same_on_three_processes(tmp_path: Path) -> None:
    def evaluated() -> dict[str, float]:
        found: dict[str, float] = build(
            "variable lengths", tmp_path, dtype=torch.float64, **TOKENS, eval_batch_size=2
        ).evaluate()
        return found

    (alone,) = on_ranks(1, evaluated)
    for found in on_ranks(3, evaluated):
        assert found == pytest.approx(alone, rel=1e-12)

"""A run whose batches are made by length: what it trains on, what it refuses, what it keeps, and how it goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hezar_train import Hook, MultiModelTrainer, Trainer, TrainerConfig
from hezar_train.cli.verify import audit_run
from hezar_train.data import Lengths
from hezar_train.errors import ConfigError, DataError
from hezar_train.events import Ledger

VOCABULARY, NUM_SAMPLES, LONGEST = 12, 90, 16
BY_TOKENS = {"global_batch_tokens": 80, "max_tokens_per_batch": 32}


def rows(count: int = NUM_SAMPLES, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length = int(torch.randint(1, LONGEST + 1, (1,), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        found.append({"input_ids": tokens, "labels": tokens % 3, "number": torch.tensor(number)})
    return found


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def padded(key: str, fill: int) -> torch.Tensor:
        return nn.utils.rnn.pad_sequence([one[key] for one in samples], batch_first=True, padding_value=fill)

    numbers = torch.stack([one["number"] for one in samples])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "number": numbers}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.dropout(self.embedding(input_ids)))
        return logits


class Seen(Hook):
    """Note the samples, rows and widths of each step, by update."""

    def __init__(self) -> None:
        self.updates: dict[int, list[int]] = {}
        self.shapes: list[tuple[int, ...]] = []

    def on_batch_forward(self, ctx: Any) -> None:
        self.shapes.append(tuple(ctx.batch["input_ids"].shape))
        self.updates.setdefault(self.trainer.state.update_step, []).extend(ctx.batch["number"].tolist())


def build(folder: Path, data: Any = None, kind: type[Trainer] = Trainer, hooks: Any = (), **settings: Any) -> Trainer:
    config = TrainerConfig(
        folder, task="sequence_labeling", criterion="CrossEntropyLoss", trackers=[], learning_rate=0.01,
        **{"num_epochs": 2} | settings,
    )  # fmt: skip
    return kind(config, Tagger(), rows() if data is None else data, data_collator=pad, hooks=hooks)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"group_by_length": True, "batch_size": 8},
        {"group_by_length": True, "batch_size": 4, "max_tokens_per_batch": 32, "gradient_accumulation_steps": 3},
        BY_TOKENS,
        {**BY_TOKENS, "group_by_length": True},
        {**BY_TOKENS, "max_steps": 17},
        {**BY_TOKENS, "dataloader_shuffle": False},
        {"global_batch_tokens": 80, "reshuffle_each_epoch": False},
    ],
    ids=str,
)
def test_a_run_is_proven_and_ends_where_its_plan_says(settings: dict[str, Any], tmp_path: Path) -> None:
    seen = Seen()
    trainer = build(tmp_path, hooks=[seen], **settings)
    trainer.train()
    plan, state = trainer.plan, trainer.state
    assert (state.update_step, state.global_step) == (plan.total_updates, plan.total_steps)
    found = audit_run(trainer.config)
    assert found.problems == []
    assert any("at one position: all" in words for words in found.proven)
    lines = list(Ledger.read(tmp_path / "ledger.jsonl"))
    assert [line.count for line in lines] == [len(numbers) for numbers in seen.updates.values()]
    if plan.step_tokens is not None:
        assert max(count * width for count, width in seen.shapes) <= plan.step_tokens
    if plan.last_samples is None:
        first = [number for numbers in list(seen.updates.values())[: len(lines) // 2 + 1] for number in numbers]
        assert sorted(first[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))


def test_an_update_of_tokens_is_the_gradient_of_its_samples_at_once(tmp_path: Path) -> None:
    cut = build(tmp_path / "cut", global_batch_tokens=80, max_tokens_per_batch=20, optimizer="sgd")
    whole = build(tmp_path / "whole", global_batch_tokens=80, optimizer="sgd")
    for trainer in (cut, whole):
        trainer.model.dropout.p = 0.0
        trainer.train()
    assert cut.state.global_step > whole.state.global_step == whole.state.update_step == cut.state.update_step
    for name, value in weights(cut).items():
        assert torch.allclose(value, whole.model.state_dict()[name], atol=1e-6)


def test_steps_of_the_config_are_updates_where_tokens_are_counted(tmp_path: Path) -> None:
    trainer = build(tmp_path, **BY_TOKENS, save_steps=4, log_steps=3, lr_scheduler="one_cycle", lr_scheduling_steps=1)
    plan = trainer.plan
    assert (plan.save_updates, plan.log_updates, plan.schedule_updates) == (4, 3, 1)
    assert plan.total_ticks == plan.total_updates < plan.total_steps
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-5  # the schedule has come to its very end


@pytest.mark.parametrize("grouped", [False, True])
def test_a_resumed_run_ends_like_the_unbroken_one(grouped: bool, tmp_path: Path) -> None:
    settings = {**BY_TOKENS, "group_by_length": grouped, "save_steps": 3}
    whole = build(tmp_path / "whole", **settings)
    whole.train()

    class Break(Hook):
        def on_batch_end(self, ctx: Any) -> None:
            if ctx.closes_window and self.trainer.state.update_step == 11:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "broken", hooks=[Break()], **settings).train()
    read: list[int] = []

    class Watched(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    seen = Seen()
    data = Watched(rows())
    resumed = build(tmp_path / "broken", data, hooks=[seen], resume_from_checkpoint=True, **settings)
    assert resumed.state.update_step == 9
    read.clear()
    resumed.train()
    assert len(read) == sum(len(numbers) for numbers in seen.updates.values()) < 2 * NUM_SAMPLES
    for name, value in weights(whole).items():
        assert torch.equal(value, resumed.model.state_dict()[name])
    ledgers = [list(Ledger.read(tmp_path / name / "ledger.jsonl")) for name in ("whole", "broken")]
    assert ledgers[0] == ledgers[1]


def test_changed_lengths_and_fields_are_told_at_a_resume(tmp_path: Path) -> None:
    build(tmp_path, **BY_TOKENS).train()
    with pytest.raises(ConfigError, match=r"lengths of the samples: .* in the checkpoint"):
        build(tmp_path, rows(seed=1), **BY_TOKENS, resume_from_checkpoint=True)
    changes = {"global_batch_tokens": 90, "max_tokens_per_batch": 40, "group_by_length": True}
    with pytest.raises(ConfigError) as told:
        build(tmp_path, **changes, resume_from_checkpoint=True)
    assert all(f"{name}: " in str(told.value) for name in changes)
    with pytest.raises(ConfigError, match="group_by_length: False in the checkpoint, True now"):
        build(tmp_path, **BY_TOKENS, group_by_length=True, resume_from_checkpoint=True)


def test_an_audit_finds_an_update_that_is_not_what_the_lengths_say(tmp_path: Path) -> None:
    trainer = build(tmp_path, **BY_TOKENS)
    trainer.train()
    ledger = tmp_path / "ledger.jsonl"
    first, second, *rest = map(dataclasses.asdict, Ledger.read(ledger))
    first["count"] += 1
    second["first"] += 1
    second["count"] -= 1
    ledger.write_text("".join(json.dumps(line) + "\n" for line in (first, second, *rest)))
    problems = audit_run(trainer.config).problems
    assert problems == [
        f"epoch 1: its update 1 ended at position {first['count'] - 1}, and by the lengths it ends at "
        f"{first['count'] - 2}"
    ]
    (tmp_path / "lengths.bin").unlink()
    with pytest.raises(DataError, match=r"has no lengths\.bin, without which its order cannot be computed"):
        audit_run(trainer.config)


def test_lengths_that_are_kept_save_the_next_pass_if_they_are_those_of_the_data(tmp_path: Path) -> None:
    class Printed(list[Any]):
        fingerprint, reads = "one", 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    data = Printed(rows())
    build(tmp_path, data, **BY_TOKENS)
    assert data.reads == NUM_SAMPLES
    assert not (tmp_path / "lengths.bin").exists()  # nothing is written before it trains
    build(tmp_path, data, **BY_TOKENS).train()
    assert Lengths.load(tmp_path / "lengths.bin", NUM_SAMPLES).tokens.tolist() == [
        len(one["input_ids"]) for one in rows()
    ]
    data.reads = 0
    build(tmp_path, data, **BY_TOKENS)
    assert data.reads == 0
    data.fingerprint = "another"
    build(tmp_path, data, **BY_TOKENS)
    assert data.reads == NUM_SAMPLES


def test_a_length_is_what_the_user_says(tmp_path: Path) -> None:
    class Own(Trainer):
        def sample_length(self, sample: Any) -> int:
            return 2 * len(sample["input_ids"])

    own, usual = build(tmp_path, kind=Own, **BY_TOKENS), build(tmp_path, **BY_TOKENS)
    assert own.setup.source.by_length.lengths.total == 2 * usual.setup.source.by_length.lengths.total
    named = build(tmp_path, [{**one, "size": 4} for one in rows()], **BY_TOKENS, length_column="size")
    assert named.setup.source.by_length.lengths.total == 4 * NUM_SAMPLES
    assert usual.sample_length(rows()[0]) == len(rows()[0]["input_ids"])


def test_find_lr_and_verify_invariance_take_batches_by_tokens(tmp_path: Path) -> None:
    trainer = build(tmp_path, **BY_TOKENS)
    trainer.model.dropout.p = 0.0
    assert trainer.verify_invariance().holds
    assert len(trainer.find_lr(num_steps=8).losses) == 8


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (Stream(), BY_TOKENS, "Stream, which can only be read in its own order"),
        (DataLoader(rows(), collate_fn=pad), {"group_by_length": True}, "a ready DataLoader"),
        (rows(), {"global_batch_tokens": 10}, "has 16 tokens, and global_batch_tokens=10"),
        ([{"x": 1}] * 3, BY_TOKENS, "length is not known"),
        ([], BY_TOKENS, "The training data is empty"),
    ],
)
def test_data_that_cannot_be_cut_by_length_is_refused_when_the_trainer_is_built(
    data: Any, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        build(tmp_path, data, **settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_batch_tokens": 9, "batch_size": 4}, "global_batch_tokens=9 and batch_size=4 were given"),
        ({"global_batch_tokens": 9, "global_batch_size": 4}, "and global_batch_size=4 were given"),
        ({"global_batch_tokens": 9, "gradient_accumulation_steps": 2}, "and gradient_accumulation_steps=2 were given"),
        ({"global_batch_tokens": 9, "drop_last": True}, "drop_last=True with global_batch_tokens=9"),
        ({"max_tokens_per_batch": 9, "local_update_steps": 2}, "local_update_steps=2 counts steps"),
        ({"length_column": "x"}, "nothing reads it"),
        ({"global_batch_tokens": 0}, "must be at least 1"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainerConfig("run", **settings)


def test_what_counts_steps_in_other_ways_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"finetune\(\) counts finetune_steps in steps"):
        build(tmp_path, **BY_TOKENS).finetune()
    with pytest.raises(ConfigError, match="are planned for one model"):
        MultiModelTrainer(TrainerConfig(tmp_path, **BY_TOKENS), {"one": Tagger(), "two": Tagger()}, rows())


@pytest.mark.parametrize("settings", [{**BY_TOKENS, "eval_batch_size": 4}, {"group_by_length": True, "batch_size": 8}])
def test_an_evaluation_by_length_finds_what_one_in_order_finds(settings: dict[str, Any], tmp_path: Path) -> None:
    data, seen = rows(50, seed=3), Seen()
    plain = build(tmp_path, batch_size=1, bootstrap_samples=20)
    by_length = build(tmp_path, **settings, bootstrap_samples=20)
    by_length.hooks_in_eval.register(seen.on_batch_forward, "on_batch_forward")
    seen.attach(by_length)
    found, expected = by_length.evaluate(data), plain.evaluate(data)
    assert found == pytest.approx(expected, rel=1e-6)
    counted = [name for name in expected if not name.startswith("loss")]
    assert [found[name] for name in counted] == [expected[name] for name in counted]
    worst, usual = (one.last_evaluation[""].worst_samples for one in (by_length, plain))
    told = [[(row["sample"], row["prediction"]) for row in listed] for listed in (worst, usual)]
    assert told[0] == told[1]
    assert max(width * count for count, width in seen.shapes) <= settings.get("max_tokens_per_batch", 8 * LONGEST)
    lengths = {number: len(one["input_ids"]) for number, one in enumerate(data)}
    assert sum(count * width for count, width in seen.shapes) < 1.25 * sum(lengths.values())
    assert sorted(seen.updates[0]) == list(range(50))


def test_what_must_be_in_order_is_evaluated_in_order(tmp_path: Path) -> None:
    data = rows(50, seed=3)
    plain, by_length = build(tmp_path, batch_size=1), build(tmp_path, **BY_TOKENS)
    assert by_length.predict(data) == plain.predict(data)
    limited = build(tmp_path, **BY_TOKENS, max_eval_batches=7)
    assert limited.evaluate(data) == build(tmp_path, batch_size=1, max_eval_batches=7).evaluate(data)
    assert by_length.evaluate(DataLoader(data, collate_fn=pad))["loss"] == plain.evaluate(data)["loss"]
    numbers = [int(batch["number"]) for batch in by_length.parts.evaluator.batches(data)]
    assert numbers == list(range(50))


def test_data_of_unknown_lengths_is_evaluated_in_order(tmp_path: Path) -> None:
    trainer = build(
        tmp_path, [{**one, "size": len(one["input_ids"])} for one in rows()], **BY_TOKENS, length_column="size"
    )
    plain = build(tmp_path, batch_size=1)
    assert trainer.evaluate(rows(20)) == plain.evaluate(rows(20))

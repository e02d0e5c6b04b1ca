"""What keeps a run from going on exactly is listed in plain words, and nothing else is."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.plan import DECIDING_FIELDS, exactness_changes, make_plan


def changes(before: dict[str, Any], now: dict[str, Any], samples: tuple[int, int] = (12, 12)) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old spellings
        old, new = TrainerConfig("run", **before), TrainerConfig("run", **now)
    old_plan, new_plan = make_plan(old, samples[0]), make_plan(new, samples[1])
    return exactness_changes(old.to_dict(), new.to_dict(), old_plan, new_plan)


@pytest.mark.parametrize(
    ("before", "now", "sentence"),
    [
        ({"batch_size": 8}, {"batch_size": 16}, "batch_size: 8 in the checkpoint, 16 now"),
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: 1 in the checkpoint, 2 now"),
        ({}, {"seed": 0}, "seed: 42 in the checkpoint, 0 now"),
        ({}, {"dataloader_shuffle": False}, "dataloader_shuffle: True in the checkpoint, False now"),
        ({}, {"reshuffle_each_epoch": False}, "reshuffle_each_epoch: True in the checkpoint, False now"),
        ({}, {"drop_last": True}, "drop_last: False in the checkpoint, True now"),
        ({}, {"optimizer": "sgd"}, "optimizer: 'adam' in the checkpoint, 'sgd' now"),
        ({}, {"optimizer_kwargs": {"eps": 1.0}}, "optimizer_kwargs: {} in the checkpoint, {'eps': 1.0} now"),
        ({}, {"learning_rate": 0.5}, "learning_rate: 2e-05 in the checkpoint, 0.5 now"),
        ({}, {"weight_decay": 0.5}, "weight_decay: 0.0 in the checkpoint, 0.5 now"),
        ({}, {"max_grad_norm": 1.0}, "max_grad_norm: None in the checkpoint, 1.0 now"),
        ({}, {"lr_scheduler": "step"}, "lr_scheduler: None in the checkpoint, 'step' now"),
        ({}, {"lr_scheduler_kwargs": {"gamma": 1}}, "lr_scheduler_kwargs: {} in the checkpoint, {'gamma': 1} now"),
        ({}, {"lr_scheduling_steps": 2}, "lr_scheduling_steps: None in the checkpoint, 2 now"),
        ({}, {"mixed_precision": "bf16"}, "mixed_precision: 'no' in the checkpoint, 'bf16' now"),
        ({}, {"loss_weight": "labels"}, "loss_weight: None in the checkpoint, 'labels' now"),
        ({}, {"criterion": "MSELoss"}, "criterion: None in the checkpoint, 'MSELoss' now"),
        ({}, {"deterministic": True}, "deterministic: False in the checkpoint, True now"),
    ],
)
def test_each_change_is_told(before: dict[str, Any], now: dict[str, Any], sentence: str) -> None:
    assert changes(before, now) == [sentence]


def test_other_data_is_told() -> None:
    assert changes({}, {}, samples=(12, 13)) == ["num_samples: 12 in the checkpoint, 13 now"]


def test_several_changes_are_told_together() -> None:
    assert len(changes({"seed": 1}, {"seed": 2, "batch_size": 3, "learning_rate": 1.0})) == 3


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"optimizer": "Adam"}),
        ({"optimizer": "sdg"}, {"optimizer": "SGD"}),
        ({"lr_scheduler": "cosine_anealing"}, {"lr_scheduler": "cosine_annealing"}),
        ({"mixed_precision": "no"}, {"mixed_precision": "full"}),
        ({"mixed_precision": "full"}, {}),
        ({}, {"optimizer_kwargs": {}}),
        ({"optimizer_kwargs": {"betas": (0.9, 0.99)}}, {"optimizer_kwargs": {"betas": [0.9, 0.99]}}),
        ({"weight_decay": 0}, {"weight_decay": 0.0}),
        ({}, {"num_dataloader_workers": 2, "log_steps": 3, "save_steps": 2, "eval_batch_size": 7, "device": "cpu"}),
        ({"num_epochs": 1}, {"num_epochs": 30}),
        ({"num_epochs": 1, "lr_scheduler": "step"}, {"num_epochs": 30, "lr_scheduler": "step"}),
        ({"max_steps": 5}, {"max_steps": 9}),
    ],
)
def test_equal_meanings_and_harmless_changes_are_not_told(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert changes(before, now) == []


def test_a_missing_field_has_its_default() -> None:
    config = TrainerConfig("run")
    plan = make_plan(config, 12)
    assert exactness_changes({}, config.to_dict(), plan, plan) == []
    assert exactness_changes({"seed": 3}, {}, plan, plan) == ["seed: 3 in the checkpoint, 42 now"]


@pytest.mark.parametrize(
    "scheduler",
    [
        *("one_cycle", "linear", "polynomial", "cosine_annealing", "cyclic", "sequential", "OneCycleLR"),
        *("onecyclelr", "ChainedScheduler", "my_package.Schedule"),
    ],
)
def test_another_length_is_told_where_the_schedule_depends_on_it(scheduler: str) -> None:
    (change,) = changes({"lr_scheduler": scheduler}, {"lr_scheduler": scheduler, "num_epochs": 2})
    assert change.startswith("total steps: 12 in the checkpoint, 24 now")


@pytest.mark.parametrize(
    ("scheduler", "kwargs"),
    [("cosine_annealing", {"T_max": 9}), ("one_cycle", {"total_steps": 99}), ("LinearLR", {"total_iters": 5})],
)
def test_a_schedule_of_given_length_does_not_depend_on_the_runs(scheduler: str, kwargs: dict[str, int]) -> None:
    fields = {"lr_scheduler": scheduler, "lr_scheduler_kwargs": kwargs}
    assert changes(fields, {**fields, "num_epochs": 2}) == []


def test_a_pace_that_is_a_share_of_the_run_is_told_when_the_run_changes() -> None:
    fields = {"lr_scheduler": "step", "lr_scheduling_steps": 0.25}
    assert changes(fields, {**fields, "num_epochs": 2}) == [
        "updates between ticks of the schedule (lr_scheduling_steps=0.25): 3 in the checkpoint, 6 now"
    ]


def test_another_number_of_processes_is_told_where_it_changes_an_update() -> None:
    config = TrainerConfig("run", batch_size=4)
    before, now = make_plan(config, 64, num_processes=2), make_plan(config, 64, num_processes=1)
    assert exactness_changes(config.to_dict(), config.to_dict(), before, now) == [
        "samples in an update: 8 on 2 processes in the checkpoint, 4 on 1 now (global_batch_size=8 keeps them)"
    ]


def test_another_number_of_processes_with_a_global_batch_is_no_change() -> None:
    config, same = TrainerConfig("run", batch_size=4), TrainerConfig("run", batch_size=4, global_batch_size=8)
    before, now = make_plan(config, 64, num_processes=2), make_plan(same, 64, num_processes=1)
    assert exactness_changes(config.to_dict(), same.to_dict(), before, now) == []


TOLD_BY_THE_PLAN = {
    "batch_size", "global_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "local_update_steps",
    "batch_or_epoch", "length_column",
}  # fmt: skip
TOLD_BY_THE_CHECKPOINT = {"save_trained_only", "sharding", "sharding_group_size", "sharding_offload", "distributed"}
"""What the stored model or the start of the run has its own word on."""
ONLY_AT_THE_START_OF_A_RUN = {"output_dir", "init_weights_from", "resume_from_checkpoint", "accept_changes"}
LEAVES_EVERY_UPDATE_AS_IT_IS = {
    "task", "compile", "device", "use_cpu", "num_threads", "gradient_checkpointing", "eval_batch_size",
    "num_dataloader_workers", "do_evaluate", "eval_steps", "max_eval_batches", "evaluate_with_generate",
    "generation_kwargs",
    "bootstrap_samples", "metrics", "metric_for_best_model", "early_stopping_patience", "early_stopping_threshold",
    "early_stopping_mode", "early_stopping_metric", "stop_when", "save_enabled", "save_steps", "save_freq",
    "save_total_limit", "async_save", "checkpoints_dir", "log_steps", "logs_dir", "trackers", "use_diff",
    "offload_after_routine", "local_param", "share_non_trainable_para", "push_to_hub", "hub_model_id",
    "hub_strategy", "hub_private", "hub_revision", "hub_wait_seconds", "hub_card", "collective_timeout_seconds",
}  # fmt: skip
FINETUNES_ASIDE = {name for name in TrainerConfig.fields() if name.startswith("finetune_")}


def test_every_field_is_compared_at_a_resume_or_known_to_change_no_update() -> None:
    groups = (
        set(DECIDING_FIELDS), TOLD_BY_THE_PLAN, TOLD_BY_THE_CHECKPOINT, ONLY_AT_THE_START_OF_A_RUN,
        LEAVES_EVERY_UPDATE_AS_IT_IS, FINETUNES_ASIDE,
    )  # fmt: skip
    places = Counter(name for group in groups for name in group)
    assert set(places) == set(TrainerConfig.fields())
    assert set(places.values()) == {1}


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("regularizer", None, "l2"), ("regularizer_mu", 0.1, 10.0), ("sync_batchnorm", False, True),
     ("fresh_optimizer", False, True)],
)  # fmt: skip
def test_another_regulariser_batch_norm_or_optimizer_is_told(name: str, before: Any, now: Any) -> None:
    plan = make_plan(TrainerConfig("run", num_epochs=1, batch_size=4), 16)
    told = exactness_changes({name: before}, {name: now}, plan, plan)
    assert told == [f"{name}: {before!r} in the checkpoint, {now!r} now"]

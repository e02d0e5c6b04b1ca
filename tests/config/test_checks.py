"""Every mistake in a config is told, in words, and all of them at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hezar_train.config import MetricConfig, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.types import LRSchedulerType, OptimizerType, PrecisionType, TaskType


def problems_of(**fields: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**{"output_dir": "run", **fields})
    return caught.value.problems


def test_five_mistakes_are_five_problems_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig("run", "text_clasification", bacth_size=8, batch_size="8", optimizer="adamx", log_steps=1.0)
    problems = caught.value.problems
    assert len(problems) == 5
    assert problems[0] == "'bacth_size' is not a field. Did you mean 'batch_size'?"
    assert str(caught.value).startswith("5 problems:\n  1. ")


def test_a_wrong_type_says_what_was_expected_and_what_came() -> None:
    assert problems_of(batch_size="8") == ["batch_size: expected int, got str '8'; write 8 without quotes"]
    assert problems_of(batch_size=8.0) == ["batch_size: expected int, got float 8.0; write 8"]
    assert problems_of(batch_size="eight") == ["batch_size: expected int, got str 'eight'"]
    assert problems_of(trackers="wandb") == ["trackers: expected a list of names, got str 'wandb'; write [wandb]"]
    assert problems_of(compile="yes") == ["compile: expected True or False, got str 'yes'; write true or false"]


def test_an_unknown_keyword_is_told_with_the_missing_output_dir() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(bacth_size=8)
    assert [problem.split()[0] for problem in caught.value.problems] == ["'bacth_size'", "output_dir"]


def test_a_config_without_output_dir_says_so_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"output_dir is missing: .* output_dir='runs/first'"):
        TrainerConfig()


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("per_device_train_batch_size", "batch_size"),
        ("num_train_epochs", "num_epochs"),
        ("accumulate_grad_batches", "gradient_accumulation_steps"),
        ("gradient_clip_val", "max_grad_norm"),
        ("lr", "learning_rate"),
        ("fp16", "mixed_precision"),
        ("disp_freq", "log_steps"),
    ],
)
def test_other_trainers_fields_are_answered_with_ours(foreign: str, ours: str) -> None:
    assert problems_of(**{foreign: 1}) == [f"'{foreign}' is not a field. Here it is called '{ours}'."]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("output_dir", "", "output_dir must not be empty"),
        ("num_epochs", 0, "num_epochs=0 must be at least 1"),
        ("num_epochs", True, "num_epochs: expected int, got bool True"),
        ("seed", -1, "seed=-1 must be at least 0"),
        ("max_steps", 0, "max_steps=0 must be at least 1"),
        ("max_steps", -3, "max_steps=-3 must be at least 1"),
        ("max_steps", 1.0, "write 1 for one step, or give a share below 1"),
        ("save_steps", 1.0, "write 1 for one step, or give a share below 1"),
        ("save_steps", 0.0, "lies between 0 and 1, both excluded"),
        ("save_steps", 500.0, "write 500 for steps"),
        ("log_steps", float("nan"), "lies between 0 and 1, both excluded"),
        ("eval_steps", "half", "an int (steps) or a float between 0 and 1"),
        ("lr_scheduling_steps", 0, "lr_scheduling_steps=0 must be at least 1"),
        ("learning_rate", "1e-3", "learning_rate: expected a number, got str '1e-3'"),
        ("learning_rate", float("inf"), "learning_rate=inf must be finite"),
        ("weight_decay", -0.1, "weight_decay=-0.1 must not be negative"),
        ("max_grad_norm", 0.0, "max_grad_norm=0.0 must be greater than 0; leave it out (or write null) for no"),
        ("save_total_limit", 0, "save_total_limit=0 must be at least 1"),
        ("dataloader_shuffle", "yes", "dataloader_shuffle: expected True or False, got str 'yes'"),
        (
            "batch_size",
            None,
            "batch_size: expected int, got None (an empty value is None); give it a value, or leave it out",
        ),
        ("device", "gpu", "Did you mean 'cuda'?"),
        ("device", "meta", "device='meta' cannot train"),
        ("device", "cuda:first", "expected a number after the colon, such as 'cuda:0'"),
        ("mixed_precision", "half", "Choose from: bf16, fp16, fp8, full, no."),
        ("task", "classify", "Choose from: audio_classification, backbone,"),
        ("optimizer", "adamz", "Did you mean 'Adam'?"),
        ("optimizer", 3, "or a dotted path such as 'package.module.Class', got int 3"),
        ("optimizer_kwargs", {"lr": 0.1}, "optimizer_kwargs['lr']=0.1: give it as the field learning_rate instead"),
        (
            "optimizer_kwargs",
            [1],
            "optimizer_kwargs: expected a mapping of keyword arguments, such as {name: value}, got list [1]",
        ),
        ("lr_scheduler", "cosine", "Did you mean 'cosine_annealing'?"),
        ("lr_scheduler", "step.", "a dotted path such as 'package.module.Class'"),
        ("lr_scheduler_kwargs", {"a": object()}, "lr_scheduler_kwargs['a']: expected a plain value"),
        ("criterion", "crossentropyloss", "Did you mean 'CrossEntropyLoss'?"),
        ("loss_weight", "tokens", "Choose from: labels, samples."),
        ("metrics", "f1", "metrics: expected a list of names, such as [accuracy], or of MetricConfigs, got str 'f1'"),
        (
            "metrics",
            [{"name": "f1", "decimals": 2}],
            "metrics[0]: 'decimals' is not a field. Did you mean 'n_decimals'?",
        ),
        ("metrics", [3], "metrics[0]: a metric: expected a name, a MetricConfig, a function or an object with"),
        ("metric_for_best_model", "evaluation.", "lacks the metric's name"),
        ("trackers", "wandb", "trackers: expected a list of names, got str 'wandb'"),
        ("trackers", ["wandb", "neptune"], "trackers[1]='neptune' is not known"),
        (
            "resume_from_checkpoint",
            3,
            "resume_from_checkpoint: expected True (the newest checkpoint) or the folder of one, got int 3",
        ),
    ],
)
def test_a_mistake_is_one_problem_that_names_it(field: str, value: object, sentence: str) -> None:
    (problem,) = problems_of(**{field: value})
    assert sentence in problem


def test_use_cpu_contradicts_another_device() -> None:
    assert problems_of(use_cpu=True, device="cuda:0") == [
        "use_cpu=True contradicts device='cuda:0': give one of the two"
    ]
    assert TrainerConfig("run", use_cpu=True, device="cpu").use_cpu is True


def test_an_evaluation_metric_needs_evaluations() -> None:
    (problem,) = problems_of(metric_for_best_model="evaluation.loss", do_evaluate=False)
    assert re.search("'evaluation.loss' needs evaluations, but do_evaluate=False", problem)
    assert TrainerConfig("run", metric_for_best_model="evaluation.loss").do_evaluate is None


def test_every_word_and_form_that_is_offered_is_accepted() -> None:
    for task in TaskType:
        assert TrainerConfig("run", task).task == str(task)
    for scheduler in LRSchedulerType:
        assert TrainerConfig("run", lr_scheduler=scheduler).scheduler_name == str(scheduler)
    for precision in PrecisionType:
        TrainerConfig("run", mixed_precision=precision)
    for optimizer in (*OptimizerType, "RMSprop", "rmsprop", "RMSPROP", "my_package.optimizers.Lion"):
        TrainerConfig("run", optimizer=optimizer)
    TrainerConfig(Path("run"), criterion="my_package.Loss", resume_from_checkpoint=Path("run/checkpoints/5"))
    TrainerConfig("run", save_steps=0, log_steps=0, eval_steps=0.25, device="cuda:1", trackers=[])
    TrainerConfig("run", lr_scheduler="lambda", lr_scheduler_kwargs={"lr_lambda": lambda tick: 0.5**tick})
    TrainerConfig("run", metrics=["f1", MetricConfig("rouge")])


def test_a_metric_with_two_mistakes_has_two_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        MetricConfig("f1", objective="max", n_decimals=-1)
    assert caught.value.problems == [
        "objective='max' is not known. Choose from: maximize, minimize. Did you mean 'maximize'?",
        "n_decimals=-1 must be at least 0",
    ]

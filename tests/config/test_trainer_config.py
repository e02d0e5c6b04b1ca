"""What a config holds, how it is changed, and what it says about itself."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import pytest

from hezar_train.config import MetricConfig, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.types import OptimizerType, TaskType


def test_output_dir_and_task_are_positional_and_all_else_is_by_keyword() -> None:
    config = TrainerConfig("run", "text_generation")
    assert (config.output_dir, config.task) == ("run", "text_generation")
    with pytest.raises(TypeError):
        TrainerConfig("run", None, 3)


def test_the_defaults_are_as_documented() -> None:
    nones = {
        *(
            "task",
            "device",
            "init_weights_from",
            "resume_from_checkpoint",
            "max_steps",
            "optimizer",
            "optimizer_kwargs",
        ),
        *(
            "max_grad_norm",
            "lr_scheduler",
            "lr_scheduler_kwargs",
            "lr_scheduling_steps",
            "warmup_steps",
            "eval_batch_size",
            "criterion",
        ),
        *(
            "mixed_precision",
            "num_threads",
            "loss_weight",
            "do_evaluate",
            "eval_steps",
            "metrics",
            "save_steps",
            "save_freq",
        ),
        *(
            "save_total_limit",
            "save_trained_only",
            "log_steps",
            "trackers",
            "generation_kwargs",
            "max_eval_batches",
            "global_batch_size",
        ),
        *("momentum", "weight_decay_norm", "weight_decay_bias", "momentum_scheduler", "momentum_scheduler_kwargs"),
        *("early_stopping_patience", "early_stopping_metric", "stop_when", "regularizer"),
        *("local_update_steps", "local_param", "finetune_optimizer", "finetune_optimizer_kwargs"),
        *("finetune_learning_rate", "finetune_weight_decay", "finetune_lr_scheduler", "finetune_lr_scheduler_kwargs"),
        *("finetune_freeze_param", "finetune_param"),
        *("hub_model_id", "hub_private", "hub_revision", "hub_card"),
        *("global_batch_tokens", "max_tokens_per_batch", "length_column"),
        *("gradient_compression", "collective_timeout_seconds", "sharding_group_size"),
    }
    values = TrainerConfig("run").to_dict()
    assert {name for name, value in values.items() if value is None} == nones
    assert {name: value for name, value in values.items() if value is not None} == {
        "output_dir": "run",
        "num_epochs": 1,
        "seed": 42,
        "deterministic": False,
        "accept_changes": False,
        "use_cpu": False,
        "distributed": False,
        "batch_size": 1,
        "gradient_accumulation_steps": 1,
        "dataloader_shuffle": True,
        "reshuffle_each_epoch": True,
        "drop_last": False,
        "num_dataloader_workers": 0,
        "group_by_length": False,
        "packing": False,
        "learning_rate": 2e-5,
        "weight_decay": 0.0,
        "evaluate_with_generate": True,
        "bootstrap_samples": 0,
        "metric_for_best_model": "loss",
        "save_enabled": True,
        "async_save": True,
        "checkpoints_dir": "checkpoints",
        "logs_dir": "logs",
        "compile": False,
        "gradient_checkpointing": False,
        "sharding": "none",
        "sharding_offload": False,
        "sync_batchnorm": False,
        "early_stopping_threshold": 0.0,
        "early_stopping_mode": "best",
        "regularizer_mu": 0.0,
        "batch_or_epoch": "batch",
        "fresh_optimizer": False,
        "use_diff": False,
        "offload_after_routine": False,
        "share_non_trainable_para": False,
        "finetune_before_eval": False,
        "finetune_steps": 1,
        "finetune_batch_or_epoch": "batch",
        "finetune_reinit": False,
        "push_to_hub": False,
        "hub_strategy": "end",
        "hub_wait_seconds": 300.0,
    }


def test_assigning_an_unknown_name_raises_with_a_suggestion() -> None:
    config = TrainerConfig("run")
    with pytest.raises(ConfigError, match=r"'learning_rat' is not a field\. Did you mean 'learning_rate'\?"):
        config.learning_rat = 1.0
    config.learning_rate = 1.0
    assert config.learning_rate == 1.0


def test_update_changes_all_or_nothing_and_returns_the_config() -> None:
    config = TrainerConfig("run", batch_size=4)
    before = config.to_dict()
    with pytest.raises(ConfigError) as caught:
        config.update({"batch_size": 8, "sede": 3}, num_epochs=0)
    assert len(caught.value.problems) == 2
    assert config.to_dict() == before
    assert config.update({"batch_size": 8}, save_enabled=False, seed=0) is config
    assert (config.batch_size, config.save_enabled, config.seed) == (8, False, 0)


def test_it_reads_like_a_mapping() -> None:
    config = TrainerConfig("run", batch_size=4)
    assert config["batch_size"] == config.get("batch_size") == 4
    assert config.get("no_such", 7) == 7
    assert config.get("keys", 7) == 7
    assert list(config) == config.keys() == list(config.fields())
    assert len(config) == len(config.to_dict()) == len(dataclasses.fields(config))
    assert "batch_size" in config
    assert dict(config)["batch_size"] == 4
    with pytest.raises(KeyError, match="Did you mean 'batch_size'"):
        config["batchsize"]


def test_enums_equal_strings_and_are_written_as_strings() -> None:
    config = TrainerConfig("run", TaskType.TEXT_CLASSIFICATION, optimizer=OptimizerType.ADAMW)
    assert config == TrainerConfig("run", "text_classification", optimizer="adamw")
    assert [type(config.to_dict()[name]) for name in ("task", "optimizer")] == [str, str]


def test_copies_are_equal_and_a_changed_one_is_not() -> None:
    config = TrainerConfig("run", metrics=[MetricConfig("f1")], optimizer_kwargs={"betas": (0.9, 0.99)})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert twin == config
        assert twin is not config
    assert dataclasses.replace(config, seed=1) != config
    assert config != "run"


def test_the_old_spelling_of_an_optimizer_works_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'sdg' is an old spelling of 'sgd'"):
        config = TrainerConfig("run", optimizer="sdg")
    assert config.optimizer_name == "sgd"


def test_the_old_spelling_of_a_schedule_works_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'cosine_anealing' is an old spelling of 'cosine_annealing'"):
        config = TrainerConfig("run", lr_scheduler="cosine_anealing")
    assert config.scheduler_name == "cosine_annealing"


def test_save_freq_warns_and_becomes_save_steps() -> None:
    with pytest.warns(DeprecationWarning, match="write save_steps instead") as caught:
        config = TrainerConfig("run", save_freq=3)
    assert (config.save_steps, config.save_freq) == (3, None)
    assert caught[0].filename == __file__
    with pytest.raises(ConfigError, match="and not both"):
        TrainerConfig("run", save_freq=3, save_steps=4)


def test_a_file_of_hezar_loads_without_its_marks() -> None:
    written = {"name": "trainer", "config_type": "trainer", "output_dir": "run", "save_freq": "deprecated"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TrainerConfig.from_dict(written) == TrainerConfig("run")
    with pytest.raises(ConfigError, match="'name' is not a field"):
        TrainerConfig.from_dict({"output_dir": "run", "name": "mine"})


def test_a_period_inside_a_window_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="save_steps=3 is not a multiple .* here every 4 steps"):
        TrainerConfig("run", save_steps=3, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("given", "normalised"), [(None, "no"), ("no", "no"), ("full", "no"), ("bf16", "bf16"), ("fp16", "fp16")]
)
def test_precision_is_normalised(given: str | None, normalised: str) -> None:
    assert TrainerConfig("run", mixed_precision=given).precision == normalised


@pytest.mark.parametrize(
    ("given", "normalised"),
    [(None, "adam"), ("AdamW", "adamw"), ("SGD", "sgd"), ("torch.optim.SGD", "torch.optim.SGD")],
)
def test_optimizer_names_are_normalised(given: str | None, normalised: str) -> None:
    assert TrainerConfig("run", optimizer=given).optimizer_name == normalised


@pytest.mark.parametrize(
    ("given", "normalised"), [(None, None), ("One_Cycle", "one_cycle"), ("onecyclelr", "OneCycleLR"), ("a.B", "a.B")]
)
def test_scheduler_names_are_normalised(given: str | None, normalised: str | None) -> None:
    assert TrainerConfig("run", lr_scheduler=given).scheduler_name == normalised


def test_validate_finds_what_an_assignment_broke() -> None:
    config = TrainerConfig("run")
    config.batch_size = 0
    with pytest.raises(ConfigError, match="batch_size=0 must be at least 1"):
        config.validate()

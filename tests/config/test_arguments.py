"""The fields of a config as flags: one each, read as a config file would be, checked by the config alone."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.config.trainer_config import add_arguments, given_arguments
from hezar_train.errors import ConfigError


def _given(*words: str) -> dict[str, Any]:
    parser = add_arguments(argparse.ArgumentParser(), TrainerConfig)
    return given_arguments(parser.parse_args(words), TrainerConfig)


def test_there_is_one_flag_for_each_field() -> None:
    parser = add_arguments(argparse.ArgumentParser(), TrainerConfig)
    dests = [action.dest for action in parser._actions if action.dest != "help"]
    assert dests == TrainerConfig("run").keys()
    flags = {flag for action in parser._actions for flag in action.option_strings if not flag.startswith("--no-")}
    assert flags == {"-h", "--help", *(f"--{name.replace('_', '-')}" for name in dests)}


def test_a_flag_that_is_not_used_leaves_no_trace() -> None:
    assert _given() == {}
    assert _given("--batch-size", "8") == {"batch_size": 8}


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--num-epochs", "3"], "num_epochs", 3),
        (["--learning-rate", "1e-3"], "learning_rate", 0.001),
        (["--weight-decay", "1"], "weight_decay", 1.0),
        (["--save-steps", "0.5"], "save_steps", 0.5),
        (["--save-steps", "5"], "save_steps", 5),
        (["--max-steps", "None"], "max_steps", None),
        (["--max-steps", "null"], "max_steps", None),
        (["--drop-last"], "drop_last", True),
        (["--no-async-save"], "async_save", False),
        (["--no-do-evaluate"], "do_evaluate", False),
        (["--resume-from-checkpoint"], "resume_from_checkpoint", True),
        (["--resume-from-checkpoint", "runs/a"], "resume_from_checkpoint", "runs/a"),
        (["--output-dir", "2024"], "output_dir", "2024"),
        (["--output-dir", "*.run"], "output_dir", "*.run"),
        (["--mixed-precision", "no"], "mixed_precision", "no"),
        (["--stop-when", "accuracy >= 0.9"], "stop_when", "accuracy >= 0.9"),
        (["--optimizer-kwargs", "{betas: [0.8, 0.9]}"], "optimizer_kwargs", {"betas": [0.8, 0.9]}),
        (["--metrics", "f1", "accuracy"], "metrics", ["f1", "accuracy"]),
        (["--metrics", "{name: f1, kwargs: {}}"], "metrics", [{"name": "f1", "kwargs": {}}]),
        (["--local-param", "1"], "local_param", ["1"]),
        (["--trackers"], "trackers", []),
    ],
)
def test_a_value_is_read_as_the_field_takes_it(words: list[str], field: str, value: Any) -> None:
    (found,) = _given(*words).items()
    assert found == (field, value)
    assert type(found[1]) is type(value)


def test_what_was_given_makes_the_config_alone_or_over_a_file(tmp_path: Path) -> None:
    given = _given("--output-dir", str(tmp_path), "--batch-size", "8", "--drop-last")
    assert TrainerConfig(**given) == TrainerConfig(str(tmp_path), batch_size=8, drop_last=True)
    file = TrainerConfig("elsewhere", batch_size=4, num_epochs=7).save(tmp_path)
    over = TrainerConfig.load(file, **given)
    assert (over.output_dir, over.batch_size, over.num_epochs) == (str(tmp_path), 8, 7)


def test_all_mistakes_are_told_by_the_config_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        TrainerConfig(**_given("--batch-size", "four", "--num-epochs", "2.5", "--device", "gpu"))
    assert len(told.value.problems) == 4  # output_dir is missing too
    assert "batch_size: expected int, got str 'four'" in str(told.value)
    assert "num_epochs: expected int, got float 2.5" in str(told.value)


def test_what_else_a_parser_has_stays_with_its_owner() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    add_arguments(parser, TrainerConfig)
    found = parser.parse_args(["train.csv", "--seed", "1"])
    assert given_arguments(found, TrainerConfig) == {"seed": 1}
    assert found.data == "train.csv"


def test_the_help_of_a_flag_is_the_sentence_beneath_the_field_and_the_default() -> None:
    shown = " ".join(add_arguments(argparse.ArgumentParser(), TrainerConfig).format_help().split())
    assert "Samples in one step, on each process. (default: 1)" in shown
    assert "live under it. (required)" in shown
    assert "behind the 95 % interval" in shown


def test_flags_are_made_without_torch() -> None:
    code = (
        "import argparse, sys; from hezar_train.config import TrainerConfig; "
        "from hezar_train.config.trainer_config import add_arguments; "
        "add_arguments(argparse.ArgumentParser(), TrainerConfig); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_config_is_made_of_flags_which_win_over_values() -> None:
    parser = TrainerConfig.add_arguments(argparse.ArgumentParser())
    parser.add_argument("--mine")
    found = parser.parse_args(["--output-dir", "run", "--batch-size", "3", "--mine", "x"])
    config = TrainerConfig.from_arguments(found, batch_size=8, seed=7)
    assert (str(config.output_dir), config.batch_size, config.seed) == ("run", 3, 7)

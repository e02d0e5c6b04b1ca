"""The fields that end a run early: what they accept and refuse, and that files and overrides can hold them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hezar_train.config import TrainerConfig
from hezar_train.config.fields import Goal
from hezar_train.config.files import parse_yaml
from hezar_train.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("accuracy >= 0.9", Goal("accuracy", ">=", 0.9)),
        ("evaluation.dev.loss<=1e-3", Goal("evaluation.dev.loss", "<=", 0.001)),
        ("  top-5@all  >=  -.5 ", Goal("top-5@all", ">=", -0.5)),
    ],
)
def test_a_goal_is_a_metric_a_direction_and_a_number(text: str, goal: Goal) -> None:
    assert Goal.parse(text) == goal
    assert TrainerConfig("run", stop_when=text).stop_when == text


@pytest.mark.parametrize(
    "text", ["", "accuracy", "accuracy 0.9", "accuracy > 0.9", "accuracy == 0.9", "accuracy >= nan", "0.9 <= a.b >= 1"]
)
def test_any_other_text_is_refused_with_the_form_that_is_expected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"stop_when='.*' cannot be read: .*expected text such as 'accuracy >= 0.9'"):
        TrainerConfig("run", stop_when=text)


def test_a_bare_number_is_refused_because_it_names_no_metric() -> None:
    with pytest.raises(ConfigError, match=r"stop_when: expected text such as 'accuracy >= 0.9'.*, got float 0.9"):
        TrainerConfig("run", stop_when=0.9)  # type: ignore[arg-type]


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig("run", early_stopping_patience=-1, early_stopping_threshold=-0.1, early_stopping_mode="beste")
    assert caught.value.problems == [
        "early_stopping_patience=-1 must be at least 0",
        "early_stopping_threshold=-0.1 must not be negative",
        "early_stopping_mode='beste' is not known. Choose from: best, mean, window. Did you mean 'best'?",
    ]


def test_a_file_reads_back_what_was_asked(tmp_path: Path) -> None:
    config = TrainerConfig(
        tmp_path, early_stopping_patience=3, early_stopping_threshold=1e-4, early_stopping_mode="window",
        early_stopping_metric="dev.f1", stop_when="accuracy >= 0.9",
    )  # fmt: skip
    assert TrainerConfig.load(config.save(tmp_path)) == config


def test_a_goal_can_be_written_plainly_in_yaml_and_as_the_value_of_an_override() -> None:
    assert parse_yaml("stop_when: accuracy >= 0.9", Path("x")) == {"stop_when": "accuracy >= 0.9"}
    _, _, value = "stop_when=accuracy>=0.9".partition("=")
    assert Goal.parse(parse_yaml(value, Path("x"))) == Goal("accuracy", ">=", 0.9)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("stop_when_acc", "stop_when"),
        ("early_stop", "early_stopping_patience"),
        ("early_stopping", "early_stopping_patience"),
        ("patience", "early_stopping_patience"),
        ("delta", "early_stopping_threshold"),
        ("improve_indicator_mode", "early_stopping_mode"),
    ],
)
def test_other_trainers_fields_are_answered_with_ours(foreign: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"'{foreign}' is not a field. Here it is called '{ours}'"):
        TrainerConfig("run", **{foreign: 1})


@pytest.mark.parametrize(
    ("goal", "values"), [("f1 >= 0.5", [(0.5, True), (0.4, False)]), ("loss <= 0.5", [(0.5, True), (0.6, False)])]
)
def test_a_goal_is_reached_at_its_value_and_beyond_but_never_by_nan(
    goal: str, values: list[tuple[float, bool]]
) -> None:
    for value, expected in [*values, (float("nan"), False)]:
        assert Goal.parse(goal).is_reached_by(value) is expected

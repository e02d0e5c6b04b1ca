"""A state is read back as it was written, and remembers the best."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.state import TrainerState


def test_a_fresh_state_stands_before_the_first_sample_of_epoch_one() -> None:
    state = TrainerState()
    assert (state.epoch, state.global_step, state.update_step, state.position) == (1, 0, 0, 0)
    assert state.loss_tracker_avg == 0.0


def test_a_state_survives_its_file(tmp_path: Path) -> None:
    state = TrainerState(
        epoch=3,
        position=17,
        loss_tracker_sum=0.1 + 0.2,
        loss_tracker_count=3.0,
        hooks={"patience": {"bad": 2, "seen": [0.1, 1e-300]}},
        files={"ledger.jsonl": 123},
        stop_reason="سیگنال",
    )
    loaded = TrainerState.load(state.save(tmp_path / "checkpoint" / "trainer_state.json"))
    assert loaded == state
    assert loaded.loss_tracker_avg == (0.1 + 0.2) / 3.0


@settings(deadline=None, max_examples=50)
@given(st.floats())
def test_floats_are_held_exactly(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("state") / "trainer_state.json"
    loaded = TrainerState.load(TrainerState(loss_tracker_sum=value).save(path)).loss_tracker_sum
    assert loaded == value or (math.isnan(loaded) and math.isnan(value))


def test_fields_of_a_newer_version_are_ignored_and_missing_ones_have_defaults() -> None:
    state = TrainerState.from_dict({"version": 9, "epoch": 2, "from_the_future": {"a": 1}})
    assert state == TrainerState(epoch=2)


def test_none_can_be_left_out_of_the_file(tmp_path: Path) -> None:
    path = TrainerState(epoch=2).save(tmp_path / "a.json", drop_none=True)
    assert None not in json.loads(path.read_text()).values()
    assert TrainerState.load(path) == TrainerState(epoch=2)
    whole = TrainerState().save(tmp_path / "b.json")
    assert json.loads(whole.read_text())["best_checkpoint"] is None


def test_update_sets_what_it_knows_and_ignores_the_rest() -> None:
    state = TrainerState()
    state.update({"epoch": 2, "no_such": 1, "loss_tracker_avg": 3.0}, global_step=0, logs_dir="logs/x")
    assert state == TrainerState(epoch=2, logs_dir="logs/x")


def test_to_dict_is_a_copy() -> None:
    state = TrainerState(hooks={"a": {"count": 1}})
    state.to_dict()["hooks"]["a"]["count"] = 2
    assert state.hooks == {"a": {"count": 1}}


@pytest.mark.parametrize(
    ("objective", "values", "taken", "best", "step"),
    [
        ("minimize", [3.0, 2.0, 2.0, 5.0], [True, True, False, False], 2.0, 1),
        ("maximize", [3.0, 2.0, 3.0, 5.0], [True, False, False, True], 5.0, 3),
        ("maximize", [math.nan, -1.0, math.nan], [False, True, False], -1.0, 1),
        ("maximize", [math.inf, 0.0], [False, True], 0.0, 1),
        ("minimize", [0.0, -0.5], [True, True], -0.5, 1),
        ("minimize", [math.nan], [False], None, None),
    ],
)
def test_the_best_is_the_first_of_the_strictly_best(
    objective: str, values: list[float], taken: list[bool], best: float | None, step: int | None
) -> None:
    state = TrainerState()
    assert [state.update_best_results(value, objective, step) for step, value in enumerate(values)] == taken
    assert (state.best_metric_value, state.best_checkpoint) == (best, step)


def test_another_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective='max' is not known\. Choose from: maximize, minimize"):
        TrainerState().update_best_results(1.0, "max", 1)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"epoch": 1'])
def test_a_damaged_file_is_a_checkpoint_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "trainer_state.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        TrainerState.load(path)


def test_a_hook_state_that_is_not_plain_is_told(tmp_path: Path) -> None:
    state = TrainerState(hooks={"mine": {"tensor": object()}})
    with pytest.raises(CheckpointError, match="the state holds a object"):
        state.save(tmp_path / "trainer_state.json")
    assert list(tmp_path.iterdir()) == []

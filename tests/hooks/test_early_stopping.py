"""When a run stops early: each rule against a naive reading of the whole history, and the same after any resume."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, ConfigError, DataError
from hezar_train.hooks.early_stopping import EarlyStopper, Patience, Stopping, metric_key_of, objective_of

# few different values, so that plateaus, ties and exact thresholds are common
VALUES = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0, math.nan, math.inf, -math.inf]), st.floats(-1, 1))
HISTORIES = st.lists(VALUES, max_size=25)
SETTINGS = st.tuples(
    st.integers(1, 6), st.sampled_from([0.0, 0.125, 0.25]), st.sampled_from(["best", "mean", "window"]),
    st.sampled_from(["maximize", "minimize"]),
)  # fmt: skip
NAN = math.nan


def better(now: float, before: float | Fraction | None, threshold: float, objective: str) -> bool:
    """Say in one sentence what improvement is: finite, strictly better, by at least the threshold."""
    if not math.isfinite(now):
        return False
    if before is None:
        return True
    now, before = (now, float(before)) if objective == "maximize" else (-now, -float(before))
    return now > before and now >= before + threshold


def naive_verdicts(history: Sequence[float], patience: int, threshold: float, mode: str, objective: str) -> list[bool]:
    """Judge every prefix of a history from its beginning, with no memory between them."""
    return [_judge_all(history[: end + 1], patience, threshold, mode, objective) for end in range(len(history))]


def _judge_all(history: Sequence[float], patience: int, threshold: float, mode: str, objective: str) -> bool:
    if mode == "best":
        best, last_improved = None, -1
        for number, value in enumerate(history):
            if better(value, best, threshold, objective):
                best, last_improved = value, number
        return len(history) - 1 - last_improved >= patience
    if len(history) <= patience:
        return False
    before = [Fraction(v) if math.isfinite(v) else None for v in history[-patience - 1 : -1]]
    finite = [value for value in before if value is not None]
    mean = sum(finite, Fraction(0)) / len(finite) if finite else None
    return not better(history[-1], mean if mode == "mean" else before[0], threshold, objective)


@given(HISTORIES, SETTINGS)
def test_each_mode_judges_like_a_naive_reading_of_the_whole_history(
    history: list[float], settings: tuple[int, float, str, str]
) -> None:
    rule = Patience(*settings)
    assert [rule.is_over_after(value) for value in history] == naive_verdicts(history, *settings)


@given(HISTORIES, SETTINGS, st.data())
def test_a_rule_saved_anywhere_and_given_the_last_record_again_judges_as_the_unbroken_one(
    history: list[float], settings: tuple[int, float, str, str], data: st.DataObject
) -> None:
    """A checkpoint holds the state from before its evaluation; the resumed run is given that evaluation's record."""
    killed_at = data.draw(st.integers(0, len(history)))
    unbroken, broken, resumed = (Stopping("evaluation.f1", Patience(*settings)) for _ in range(3))
    expected = [unbroken.judge({"evaluation.f1": value}) for value in history]
    for value in history[:killed_at]:
        broken.judge({"evaluation.f1": value})
    saved = json.loads(json.dumps(broken.state_dict(), allow_nan=False))
    for value in history[killed_at : killed_at + 1]:
        broken.judge({"evaluation.f1": value})  # done, but not saved
    resumed.load_state_dict(saved)
    assert [resumed.judge({"evaluation.f1": value}) for value in history[killed_at:]] == expected[killed_at:]
    assert resumed.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("mode", ["best", "mean", "window"])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e-9])
@pytest.mark.parametrize("objective", ["maximize", "minimize"])
def test_a_plateau_is_no_improvement(mode: str, value: float, objective: str) -> None:
    rule = Patience(3, mode=mode, objective=objective)
    assert [rule.is_over_after(value) for _ in range(4)] == [False, False, False, True]


def test_a_value_that_improves_by_exactly_the_threshold_counts_and_one_below_it_does_not() -> None:
    enough, little = Patience(1, 0.25), Patience(1, 0.25)
    assert [enough.is_over_after(value) for value in (0.25, 0.5, 0.75)] == [False, False, False]
    assert [little.is_over_after(value) for value in (0.25, 0.49)] == [False, True]


def test_small_steps_below_the_threshold_do_not_creep_past_it_unseen() -> None:
    rule = Patience(5, threshold=0.25)  # the best stays where the last improvement was
    verdicts = [rule.is_over_after(value) for value in (0.0, 0.1, 0.2, 0.3, 0.4)]
    assert (verdicts, rule.best, rule.num_stalled) == ([False] * 5, 0.3, 1)


@pytest.mark.parametrize("mode", ["best", "mean", "window"])
def test_results_that_are_never_finite_end_the_run_and_a_late_finite_one_saves_it(mode: str) -> None:
    lost, saved = Patience(2, mode=mode), Patience(2, mode=mode)
    assert [lost.is_over_after(NAN) for _ in range(3)][-1]
    assert [saved.is_over_after(value) for value in (NAN, 0.1)] == [False, False]
    json.dumps(lost.state_dict(), allow_nan=False)


def test_the_window_is_that_of_lernomatic() -> None:
    rule = Patience(2, 0.02, "window")
    assert [rule.is_over_after(value) for value in (0.5, 0.6, 0.61, 0.61, 0.61)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"mode": "last"}, "mode='last' is not known. Choose from: best, mean, window."),
        ({"objective": "max"}, "objective='max' is not known. Choose from: maximize, minimize."),
        ({"patience": -1}, "patience=-1, threshold=0.0: neither may be negative"),
        ({"threshold": NAN}, "patience=3, threshold=nan: neither may be negative"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(given_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Patience(**{"patience": 3, **given_settings})
    assert str(caught.value) == message


def make(set_names: Sequence[str] = ("",), outputs: list[str] | None = None, **fields: Any) -> Stopping:
    keys = ["accuracy", "wer"] if outputs is None else outputs
    return Stopping.from_config(
        TrainerConfig("run", **fields), set_names, keys, lambda name: "minimize" if name == "wer" else "maximize"
    )


class TestStopping:
    def test_without_stopping_fields_nothing_stops_a_run_and_no_metric_is_asked_for(self) -> None:
        stopping = make()
        assert [stopping.judge({}) for _ in range(9)] == [None] * 9

    def test_a_goal_stops_at_the_first_evaluation_that_reaches_it(self) -> None:
        stopping = make(stop_when="accuracy >= 0.7")
        assert stopping.judge({"evaluation.accuracy": 0.69}) is None
        assert stopping.judge({"evaluation.accuracy": 0.7}) == "stop_when: evaluation.accuracy is 0.7 (>= 0.7)"
        assert stopping.judge({"evaluation.accuracy": NAN}) is None

    @pytest.mark.parametrize(
        ("metric", "values"), [("loss", [3, 2, 1, 1, 1]), ("wer", [3, 2, 1, 2, 3]), ("accuracy", [1, 2, 3, 2, 1])]
    )
    def test_the_direction_of_patience_is_the_metrics_own(self, metric: str, values: list[float]) -> None:
        stopping = make(early_stopping_patience=2, early_stopping_metric=metric)
        verdicts = [stopping.judge({f"evaluation.{metric}": value}) for value in values]
        assert verdicts[:4] == [None] * 4
        expected = f"early stopping: evaluation.{metric} has not improved on {values[2]} in 2 evaluations"
        assert verdicts[4] == expected

    def test_patience_watches_the_metric_of_the_best_model_unless_told_otherwise(self) -> None:
        stopping = make(early_stopping_patience=1, metric_for_best_model="train.loss")
        assert stopping.judge({"train.loss": 1.0, "evaluation.loss": 1.0}) is None
        assert stopping.judge({"train.loss": 1.0, "evaluation.loss": 0.5}) is not None

    def test_a_goal_that_is_reached_does_not_keep_patience_from_counting(self) -> None:
        both = make(early_stopping_patience=2, early_stopping_metric="loss", stop_when="accuracy >= 0.5")
        reached, missed = {"evaluation.loss": 1.0, "evaluation.accuracy": 0.6}, {"evaluation.accuracy": 0.4}
        assert "stop_when" in str(both.judge(reached))
        assert both.judge(reached | missed) is None
        assert "early stopping" in str(both.judge(reached | missed))

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            (
                {"early_stopping_mode": "window", "early_stopping_threshold": 0.5},
                "not improved by 0.5 in 1 evaluations",
            ),
            ({"early_stopping_mode": "mean"}, "not improved on the mean of the 1 evaluations before"),
        ],
    )
    def test_the_reason_names_what_was_not_improved_on(self, fields: dict[str, Any], reason: str) -> None:
        stopping = make(early_stopping_patience=1, **fields)
        stopping.judge({"evaluation.loss": 1.0})
        assert stopping.judge({"evaluation.loss": 1.0}) == f"early stopping: evaluation.loss has {reason}"

    @pytest.mark.parametrize("change", [{"early_stopping_metric": "accuracy"}, {"early_stopping_mode": "mean"}])
    def test_what_was_counted_of_another_metric_or_in_another_way_is_left(self, change: dict[str, str]) -> None:
        before, after = make(early_stopping_patience=2), make(early_stopping_patience=2, **change)
        fresh = after.state_dict()
        before.judge({"evaluation.loss": 1.0})
        after.load_state_dict(before.state_dict())
        assert after.state_dict() == fresh
        after.load_state_dict({})  # a checkpoint from before there was such a state
        assert after.state_dict() == fresh

    def test_more_patience_after_a_resume_goes_on_counting(self) -> None:
        short, long = make(early_stopping_patience=1), make(early_stopping_patience=3)
        assert [short.judge({"evaluation.loss": 1.0}) is None for _ in range(2)] == [True, False]
        long.load_state_dict(short.state_dict())
        assert [long.judge({"evaluation.loss": 1.0}) is None for _ in range(2)] == [True, False]

    @pytest.mark.parametrize("field", ["early_stopping_metric", "stop_when"])
    def test_an_unknown_metric_is_refused_with_the_nearest_one(self, field: str) -> None:
        given = {"early_stopping_metric": "acuracy", "stop_when": "acuracy >= 0.9"}[field]
        with pytest.raises(ConfigError, match=rf"{field}='acuracy' is not a result.*mean 'evaluation\.accuracy'\?"):
            make(**{field: given})

    def test_an_evaluation_that_gave_nothing_is_no_verdict_and_does_not_count(self) -> None:
        stopping = make(early_stopping_patience=1, stop_when="accuracy >= 0")
        before = stopping.state_dict()
        assert [stopping.judge({"train.loss": 1.0}) for _ in range(3)] == [None] * 3
        assert stopping.state_dict() == before

    def test_a_metric_that_could_not_be_known_and_is_not_there_is_told_at_the_first_evaluation(self) -> None:
        stopping = Stopping.from_config(TrainerConfig("run", stop_when="f1 >= 1"), [""], None, lambda _: "maximize")
        with pytest.raises(ConfigError, match=r"stopped by 'evaluation\.f1'.*There are: evaluation\.f2\. Did you mean"):
            stopping.judge({"evaluation.f2": 1.0})


class TestNames:
    @pytest.mark.parametrize(
        ("given_name", "set_names", "expected"),
        [
            ("f1", [""], "evaluation.f1"),
            ("evaluation.f1", [""], "evaluation.f1"),
            ("train.loss", [""], "train.loss"),
            ("loss", [], "train.loss"),
            ("f1", ["dev", "test"], "evaluation.dev.f1"),
            ("test.f1", ["dev", "test"], "evaluation.test.f1"),
            ("evaluation.loss", ["dev", "test"], "evaluation.dev.loss"),
        ],
    )
    def test_a_short_name_becomes_the_full_one(self, given_name: str, set_names: list[str], expected: str) -> None:
        assert metric_key_of("stop_when", given_name, set_names, ["f1"]) == expected

    @pytest.mark.parametrize(("given_name", "set_names"), [("f1", []), ("evaluation.loss", []), ("tset.f1", ["test"])])
    def test_what_will_not_be_there_is_refused(self, given_name: str, set_names: list[str]) -> None:
        with pytest.raises(
            ConfigError, match=r"stop_when='.*' is not a result of this run. There will be: .*train.loss"
        ):
            metric_key_of("stop_when", given_name, set_names, ["f1"])

    def test_the_objective_is_asked_for_by_the_bare_name(self) -> None:
        asked: list[str] = []
        tell = lambda name: asked.append(name) or "maximize"  # type: ignore[func-returns-value]  # noqa: E731
        assert objective_of("evaluation.dev.f1", ["dev", "test"], tell) == "maximize"
        assert objective_of("evaluation.test.loss", ["dev", "test"], tell) == "minimize"
        assert asked == ["f1"]


class TestEarlyStopper:
    def test_a_constant_metric_with_patience_2_stops_after_two_evaluations_without_improvement(self) -> None:
        stopper, history, verdicts = EarlyStopper(patience=2), [], []
        for _ in range(4):
            history.append(0.5)
            verdicts.append(stopper.track_and_check(history))
        assert verdicts == [False, False, True, True]
        assert stopper.early_stopped

    @given(st.lists(VALUES, min_size=1, max_size=15), SETTINGS)
    def test_a_growing_history_is_judged_like_the_run_judges_it(
        self, history: list[float], settings: tuple[int, float, str, str]
    ) -> None:
        patience, delta, mode, objective = settings
        stopper = EarlyStopper(patience, delta, mode, the_larger_the_better=objective == "maximize")
        verdicts = [stopper.track_and_check(history[: end + 1]) for end in range(len(history))]
        assert verdicts == naive_verdicts(history, *settings)

    @pytest.mark.parametrize(
        ("history", "stops"), [([1, 2, 3], False), ([1, 2, 1.5], True), ([1, 2, 1.6], False), ([3, 9], False)]
    )
    def test_the_mean_of_the_previous_values_must_be_beaten(self, history: list[float], stops: bool) -> None:
        assert EarlyStopper(2, improve_indicator_mode="mean").track_and_check(history) is stops

    def test_in_the_mode_best_only_the_last_result_is_read(self) -> None:
        stopper = EarlyStopper(patience=1)
        assert not stopper.track_and_check([9.0, 1.0])
        assert not stopper.track_and_check([2.0])
        assert stopper.track_and_check([2.0])

    def test_patience_0_never_stops(self) -> None:
        for mode in ("best", "mean", "window"):
            stopper = EarlyStopper(patience=0, improve_indicator_mode=mode)
            assert not any(stopper.track_and_check([1.0] * count) for count in range(1, 9))

    def test_an_empty_history_is_refused(self) -> None:
        with pytest.raises(DataError, match="empty history"):
            EarlyStopper().track_and_check([])


def test_results_that_no_float_holds_are_refused() -> None:
    rule = Patience(3, 0.0, "mean", "minimize")
    with pytest.raises(CheckpointError, match="no count of results"):
        rule.load_state_dict({"best": None, "num_stalled": 0, "recent": [10**400]})

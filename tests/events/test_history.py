"""The values of one name: held, smoothed, saved; and meters for display."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import AverageMeter, EventStorage, History, HistoryBuffer, MetricsTracker, smooth_loss


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 10), st.integers(1, 50))
def test_a_history_keeps_the_last_values_and_counts_all(values, max_length, window):
    history = History(max_length)
    for step, value in enumerate(values):
        history.append(value, step)
    kept = list(zip(values, range(len(values)), strict=True))[-max_length:]
    last = [value for value, _ in kept][-window:]
    assert history.values() == kept
    assert history.total == len(values)
    assert history.global_avg() == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert history.avg(window) == pytest.approx(sum(last) / len(last), abs=1e-6)
    assert history.median(window) == pytest.approx(float(torch.tensor(last, dtype=torch.float64).quantile(0.5)))


def test_unread_tensors_do_not_pile_up():
    history = History(max_length=5)
    for step in range(3000):
        history.append(torch.tensor(float(step)), step)
    assert len(history._unread) < 1024
    assert history.values() == [(float(step), step) for step in range(2995, 3000)]


def test_a_history_that_is_read_at_every_step_shows_its_last_values_and_holds_few_more():
    history = History(max_length=80)
    for step in range(1000):
        history.append(float(step), step)
        assert history.latest() == step
        assert len(history._values) <= 90
        assert history.values() == [(float(one), one) for one in range(max(0, step - 79), step + 1)]
    assert (history.avg(200), history.median(3), history.total) == (959.5, 998.0, 1000)


def test_a_value_that_is_read_takes_sixteen_bytes():
    history = History()
    tracemalloc.start()
    try:
        for step in range(100_000):
            history.append(step / 7, 10**6 + step)
        history.latest()
        assert tracemalloc.get_traced_memory()[0] < 100_000 * 18
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("value", "step"), [("1.0", "9" * 30), ("9" * 400, "1"), ("1.0", "1e400")])
def test_saved_numbers_that_no_run_has_are_refused(tmp_path, value, step):
    saved = f'{{"values": [{value}], "steps": [{step}], "num_ever": 1, "sum_ever": 1.0, "smoothing_hint": null}}'
    (tmp_path / "history.json").write_text(f'{{"version": 1, "histories": {{"loss": {saved}}}}}')
    with pytest.raises(DataError, match="is not a file of histories"):
        EventStorage().load_history(tmp_path / "history.json")


def test_the_mean_over_everything_includes_what_is_no_longer_held():
    buffer = HistoryBuffer(max_length=3)
    for value in (1.0, 2.0, torch.tensor(3.0), 4, 5.0):
        buffer.update(value)
    assert buffer.values() == [(3.0, 2), (4.0, 3), (5.0, 4)]
    assert (buffer.latest(), buffer.median(2), buffer.avg(2), buffer.global_avg()) == (5.0, 4.5, 4.5, 3.0)


def test_an_update_may_name_its_iteration():
    buffer = HistoryBuffer()
    buffer.update(0.5, iteration=40)
    buffer.update(0.25)
    assert buffer.values() == [(0.5, 40), (0.25, 1)]


@pytest.mark.parametrize("ask", [History.latest, History.avg, History.median, History.global_avg])
def test_an_empty_history_says_so(ask):
    with pytest.raises(DataError, match="no values yet"):
        ask(History())


def test_a_window_must_hold_something():
    history = History()
    history.append(1.0, 1)
    with pytest.raises(DataError, match="window_size=0 must be at least 1"):
        history.avg(0)


@given(st.floats(-100, 100), st.floats(0, 0.999), st.integers(1, 50))
def test_smoothing_leaves_a_constant_curve_as_it_is(value, beta, length):
    assert smooth_loss([value] * length, beta) == pytest.approx([value] * length)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.floats(0, 0.99))
def test_a_smoothed_value_is_the_mean_weighted_by_powers_of_beta(values, beta):
    for count, found in enumerate(smooth_loss(values, beta), start=1):
        weights = [beta ** (count - 1 - index) for index in range(count)]
        expected = sum(weight * value for weight, value in zip(weights, values[:count], strict=True))
        assert found == pytest.approx(expected / sum(weights), abs=1e-6)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 98])
def test_a_beta_that_does_not_smooth_is_refused(beta):
    with pytest.raises(DataError, match="0 <= beta < 1"):
        smooth_loss([1.0], beta)


@settings(deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=20))
def test_a_saved_history_reads_back_exactly(tmp_path_factory, values):
    storage = EventStorage(max_length=10)
    for step, value in enumerate(values):
        storage.step = step
        storage.put_scalar("خطا", value, smoothing_hint=False)
    other = EventStorage(max_length=10)
    other.load_history(storage.save_history(tmp_path_factory.mktemp("history") / "history.json"))
    ours, theirs = storage.history("خطا"), other.history("خطا")
    assert repr(theirs.values()) == repr(ours.values())
    assert (theirs.total, repr(theirs.global_sum())) == (ours.total, repr(ours.global_sum()))
    assert other.smoothing_hints() == {"خطا": False}
    assert other.unlogged() == {}


def test_what_is_measured_follows_what_was_loaded_before_or_after_it(tmp_path):
    first, second = EventStorage(step=1), EventStorage(step=1)
    first.put_scalar("loss", 1.0)
    second.put_scalar("loss", torch.tensor(2.0))
    second.load_history(first.save_history(tmp_path / "history.json"))
    second.step = 2
    second.put_scalar("loss", 3.0)
    assert second.history("loss").values() == [(1.0, 1), (2.0, 1), (3.0, 2)]
    assert second.unlogged() == {"loss": 3.0}


FIELDS = {"values": [1.0], "steps": [1], "num_ever": 1, "sum_ever": 1.0, "smoothing_hint": None}


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"histories": {}}',
        json.dumps({"version": 1, "histories": {"a": FIELDS | {"steps": [1, 2]}}}),
        json.dumps({"version": 1, "histories": {"a": FIELDS | {"values": [], "steps": []}}}),
        json.dumps({"version": 1, "histories": {"a": FIELDS | {"values": [None]}}}),
        json.dumps({"version": 1, "histories": {"a": {"values": [1.0]}}}),
    ],
)
def test_a_file_that_holds_no_histories_is_named_and_changes_nothing(tmp_path, content):
    path = tmp_path / "history.json"
    path.write_text(content)
    storage = EventStorage()
    with pytest.raises(DataError, match=r"history\.json is not a file of histories"):
        storage.load_history(path)
    assert storage.histories() == {}


def test_a_file_of_a_later_version_is_refused_by_its_number(tmp_path):
    path = tmp_path / "history.json"
    path.write_text('{"version": 2, "histories": []}')
    with pytest.raises(DataError, match="version 2 of the format, expected 1"):
        EventStorage().load_history(path)


def test_a_meter_weighs_each_value_by_its_count():
    meter = AverageMeter("loss")
    meter.update(1.0, n=3)
    meter.update(torch.tensor(5.0), n=1)
    assert (meter.val, meter.avg, meter.sum, meter.count) == (5.0, 2.0, 8.0, 4)
    meter.reset()
    assert (meter.val, meter.avg, meter.sum, meter.count) == (0, 0, 0, 0)


def test_a_meter_goes_on_from_a_saved_sum_and_count():
    meter = AverageMeter("loss", sum=6.0, count=3)
    assert meter.avg == 2.0
    meter.update(6.0)
    assert meter.avg == 3.0


@pytest.mark.parametrize(("fmt", "shown"), [(":f", "loss 5.000000 (2.500000)"), (":.2f", "loss 5.00 (2.50)")])
def test_a_meter_shows_its_last_value_and_its_mean(fmt, shown):
    meter = AverageMeter("loss", fmt=fmt)
    meter.update(0.0)
    meter.update(5.0)
    assert str(meter) == shown


def test_a_tracker_has_a_meter_per_output_and_one_for_the_loss():
    metric = SimpleNamespace(config=SimpleNamespace(output_keys=("f1", "precision")))
    tracker = MetricsTracker({"seqeval": metric})
    tracker.update({"f1": 0.5, "precision": 1.0, "loss": 2.0, "other": 9.0})
    tracker.update({"f1": 1.0, "precision": 1.0, "loss": 4.0})
    assert tracker.avg() == {"f1": 0.75, "precision": 1.0, "loss": 3.0}
    tracker.reset()
    assert tracker.avg() == {"f1": 0.0, "precision": 0.0, "loss": 0.0}


def test_a_tracker_accepts_plain_names():
    assert MetricsTracker(["accuracy", "loss"]).avg() == {"accuracy": 0.0, "loss": 0.0}

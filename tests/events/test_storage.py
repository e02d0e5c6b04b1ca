from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError, HezarTrainError
from hezar_train.events import EventStorage, EventWriter, History, Row, get_event_storage


class Collector(EventWriter):
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.calls: list[str] = []
        self.error: Exception | None = None

    def write(self, rows):
        if self.error is not None:
            raise self.error
        self.rows.extend(rows)

    def flush(self):
        self.calls.append("flush")

    def sync(self):
        self.calls.append("sync")

    def close(self):
        self.calls.append("close")


def test_a_put_value_comes_back_with_its_step():
    storage = EventStorage(step=3)
    storage.put_scalar("loss", 0.5)
    storage.step = 4
    storage.put_scalars(loss=0.25, accuracy=1)
    assert storage.history("loss").values() == [(0.5, 3), (0.25, 4)]
    assert storage.latest() == {"loss": (0.25, 4), "accuracy": (1.0, 4)}
    assert storage.history("loss").latest() == 0.25


def test_a_tensor_is_read_only_when_someone_asks(monkeypatch):
    reads = []
    for name in ("item", "tolist", "__float__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real: reads.append(1) or real(self))
    storage = EventStorage()
    for step in range(10):
        storage.step = step
        storage.put_scalar("loss", torch.tensor(step / 4))
    assert reads == []
    assert storage.history("loss").values() == [(step / 4, step) for step in range(10)]
    assert len(reads) == 1


def test_a_row_of_tensors_is_read_at_once(monkeypatch):
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or real(self))
    row = EventStorage().log({"a": torch.tensor(1.5), "b": 2, "c": torch.tensor([2.5])}, step=7, epoch=2)
    assert (row.step, row.epoch, row.values) == (7, 2, {"a": 1.5, "b": 2.0, "c": 2.5})
    assert all(type(value) is float for value in row.values.values())
    assert reads == [torch.Size([2])]


def test_values_of_different_dtypes_are_read_exactly():
    big = 2**40 + 1
    values = {"a": torch.tensor(big), "b": torch.tensor(0.1), "c": torch.tensor(1.5, dtype=torch.bfloat16), "d": 0.1}
    row = EventStorage().log(values, step=1, epoch=1)
    assert row.values == {"a": float(big), "b": torch.tensor(0.1).item(), "c": 1.5, "d": 0.1}


def test_a_put_loss_does_not_hold_its_graph():
    weight = torch.ones(1, requires_grad=True)
    storage = EventStorage()
    storage.put_scalar("loss", (weight * 2).sum())
    assert not storage.history("loss").peek()[0].requires_grad
    assert storage.history("loss").latest() == 2.0


@pytest.mark.parametrize("value", [torch.ones(2), "high", None])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(DataError, match="'loss'"):
        EventStorage().put_scalar("loss", value)


def test_an_unknown_name_is_answered_with_the_nearest():
    storage = EventStorage()
    storage.put_scalar("train.loss", 1.0)
    with pytest.raises(DataError, match=r"Measured: train\.loss\. Did you mean 'train\.loss'\?"):
        storage.history("train.los")


def test_a_name_scope_ends_also_after_an_error():
    storage = EventStorage()
    with pytest.raises(DataError), storage.name_scope("val"), storage.name_scope("inner"):
        storage.put_scalars(x=1.0, y=None)
    storage.put_scalar("x", 2.0)
    assert storage.latest() == {"val/inner/x": (1.0, 0), "x": (2.0, 0)}


def test_a_changed_smoothing_hint_is_refused():
    storage = EventStorage()
    storage.put_scalar("x", 1.0, smoothing_hint=False)
    with pytest.raises(DataError, match="smoothing_hint=False"):
        storage.put_scalar("x", 1.0)


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
    assert history.average(window) == pytest.approx(sum(last) / len(last), abs=1e-6)
    assert history.median(window) == pytest.approx(float(torch.tensor(last, dtype=torch.float64).quantile(0.5)))


def test_unread_tensors_do_not_pile_up():
    history = History(max_length=5)
    for step in range(3000):
        history.append(torch.tensor(float(step)), step)
    assert len(history._unread) < 1024
    assert history.values() == [(float(step), step) for step in range(2995, 3000)]


def test_each_writer_sees_each_row_once():
    first, late = Collector(), Collector()
    storage = EventStorage(writers=[first])
    one = storage.log({"a": 1.0}, step=1, epoch=1)
    storage.flush()
    storage.flush()
    storage.writers.append(late)
    two = storage.log({"a": 2.0}, step=1, epoch=1)
    storage.flush()
    assert first.rows == [one, two]
    assert late.rows == [two]
    assert storage.rows == []


def test_a_failing_writer_gets_its_rows_again_and_the_others_do_not():
    sound, broken = Collector(), Collector()
    storage = EventStorage(writers=[sound, broken])
    row = storage.log({"a": 1.0}, step=1, epoch=1)
    broken.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        storage.flush()
    broken.error = None
    storage.flush()
    assert sound.rows == broken.rows == [row]


def test_close_flushes_what_was_logged_last_and_closes_every_writer():
    broken, sound = Collector(), Collector()
    storage = EventStorage(writers=[sound, broken])
    row = storage.log({"a": 1.0}, step=1, epoch=1)
    broken.error = OSError("no")
    with pytest.raises(OSError, match="no"):
        storage.close()
    assert sound.rows == [row]
    assert sound.calls[-1] == broken.calls[-1] == "close"


def test_put_values_wait_until_they_are_logged():
    storage = EventStorage(step=5)
    storage.put_scalar("mine", 1.0)
    storage.log({"train.loss": 0.5}, step=5, epoch=1)
    assert storage.unlogged() == {"mine": 1.0}
    storage.log(storage.unlogged(), step=5, epoch=1)
    assert storage.unlogged() == {}
    storage.put_scalar("mine", 2.0)
    assert storage.unlogged() == {"mine": 2.0}
    assert storage.history("mine").values() == [(1.0, 5), (2.0, 5)]


def test_logged_values_join_the_history():
    storage = EventStorage()
    for step, value in ((10, 0.5), (20, 0.75), (20, 0.8)):
        storage.log({"evaluation.accuracy": value}, step=step, epoch=1)
    assert storage.history("evaluation.accuracy").values() == [(0.5, 10), (0.75, 20), (0.8, 20)]


@pytest.mark.parametrize("name", ["step", "epoch", "time", "two\nlines"])
def test_a_name_that_a_log_line_cannot_hold_is_refused(name):
    with pytest.raises(DataError, match="another name"):
        EventStorage().log({name: 1.0}, step=1, epoch=1)


def test_the_current_storage_is_the_innermost_and_ends_with_its_block():
    with EventStorage() as outer:
        with EventStorage() as inner:
            assert get_event_storage() is inner
        assert get_event_storage() is outer
    with pytest.raises(HezarTrainError, match="while a trainer runs"):
        get_event_storage()


def test_importing_events_loads_neither_torch_nor_tensorboard_nor_accelerate():
    code = "import sys, hezar_train.events; print(sorted({'torch', 'tensorboard', 'accelerate'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

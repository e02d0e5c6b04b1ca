from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hezar_train.events import AverageMeter, MetricsTracker


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

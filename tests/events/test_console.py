from __future__ import annotations

import io
import re

from hezar_train.events import CommonMetricPrinter, EventStorage, Row


def lines_of(storage: EventStorage, rows: list[Row], **options) -> list[str]:
    printer = CommonMetricPrinter(stream=io.StringIO(), **options)
    with storage:
        printer.write(rows)
        printer.flush()
    return printer._stream.getvalue().splitlines()


def test_a_line_has_everything_a_reader_of_libai_s_log_looks_for():
    storage = EventStorage()
    for step, loss in enumerate((9.0, 3.0, 1.0), start=1):
        storage.step = step
        storage.put_scalar("lm_loss", loss)
    storage.put_scalar("accuracy", 0.5)
    storage.samples = 96
    values = {"train.learning_rate": 2e-5, "train.data_seconds": 0.25}
    _, line = lines_of(storage, [Row(10, 1, 100.0, values), Row(20, 1, 105.0, values)], batch_size=32, max_iter=200)
    assert re.fullmatch(
        r"eta: 0:01:30  iteration: 20/200  consumed_samples: 96  lm_loss: 3  time: 0\.5 s/iter  "
        r"data_time: 0\.25 s/iter  total_throughput: 64\.00 samples/s  lr: 2\.00e-05  max_mem: \d+M",
        line,
    )
    assert storage.history("eta_seconds").values() == [(90.0, 3)]


def test_the_first_line_and_a_run_without_end_leave_out_what_is_not_known():
    first, second = lines_of(EventStorage(), [Row(1, 1, 1.0, {"x": 1.0}), Row(2, 1, 1.5, {"x": 1.0})], batch_size=2)
    assert first.startswith("iteration: 1  consumed_samples: 0  max_mem: ")
    assert second.startswith("iteration: 2  consumed_samples: 0  time: 0.5 s/iter  total_throughput: 4.00 samples/s")


def test_an_evaluation_has_no_line():
    assert lines_of(EventStorage(), [Row(1, 1, 1.0, {"evaluation.loss": 1.0})], batch_size=2) == []

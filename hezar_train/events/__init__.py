"""Events: what a run measures, the storage that anyone writes to, and the writers that make files of it.

The modules:

    storage       everything measured, while it is in memory
    history       the values of one name, and running averages
    writers       metrics.json, training_logs.csv, printed lines, trackers
    tensorboard   event files
    run_records   the ledger of updates, the record of starts
"""

from __future__ import annotations

from hezar_train.events.history import (
    AverageMeter,
    History,
    HistoryBuffer,
    LossTracker,
    MetricsTracker,
    Scalar,
    is_same_number,
    smooth_loss,
)
from hezar_train.events.run_records import (
    FAILED,
    FEWER_ROWS,
    FINISHED,
    INTERRUPTED,
    LEDGER_FILE,
    STARTS_FILE,
    Ledger,
    LedgerLine,
    add_start,
    amend_start,
    end_of,
    ended_for_good,
    read_starts,
    starts_in,
)
from hezar_train.events.storage import EventStorage, Histogram, Image, Row, get_event_storage
from hezar_train.events.tensorboard import SummaryWriterAdapter, TensorBoardWriter, TensorboardXWriter
from hezar_train.events.writers import (
    CSV_FILE,
    DROPPED_SUFFIX,
    METRICS_FILE,
    CommonMetricPrinter,
    CSVLogger,
    CSVWriter,
    EventWriter,
    JSONLinesWriter,
    JSONWriter,
    TrackerWriter,
    flatten_results_dict,
    keep_until,
    load_csv,
    print_csv_format,
    read_rows,
)

__all__ = [
    "CSV_FILE",
    "DROPPED_SUFFIX",
    "FAILED",
    "FEWER_ROWS",
    "FINISHED",
    "INTERRUPTED",
    "LEDGER_FILE",
    "METRICS_FILE",
    "STARTS_FILE",
    "AverageMeter",
    "CSVLogger",
    "CSVWriter",
    "CommonMetricPrinter",
    "EventStorage",
    "EventWriter",
    "Histogram",
    "History",
    "HistoryBuffer",
    "Image",
    "JSONLinesWriter",
    "JSONWriter",
    "Ledger",
    "LedgerLine",
    "LossTracker",
    "MetricsTracker",
    "Row",
    "Scalar",
    "SummaryWriterAdapter",
    "TensorBoardWriter",
    "TensorboardXWriter",
    "TrackerWriter",
    "add_start",
    "amend_start",
    "end_of",
    "ended_for_good",
    "flatten_results_dict",
    "get_event_storage",
    "is_same_number",
    "keep_until",
    "load_csv",
    "print_csv_format",
    "read_rows",
    "read_starts",
    "smooth_loss",
    "starts_in",
]

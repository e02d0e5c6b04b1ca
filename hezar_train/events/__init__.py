"""What a run measures: the storage that anyone writes to, and the writers that make files of it."""

from __future__ import annotations

from hezar_train.events.append_file import DROPPED_SUFFIX, keep_until
from hezar_train.events.console import CommonMetricPrinter
from hezar_train.events.history import History, HistoryBuffer, Scalar, smooth_loss
from hezar_train.events.ledger import LEDGER_FILE, Ledger, LedgerLine
from hezar_train.events.media import Histogram, Image
from hezar_train.events.meters import AverageMeter, MetricsTracker
from hezar_train.events.results import flatten_results_dict, print_csv_format
from hezar_train.events.starts import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STARTS_FILE,
    add_start,
    amend_start,
    end_of,
    ended_for_good,
    read_starts,
    starts_in,
)
from hezar_train.events.storage import EventStorage, Row, get_event_storage
from hezar_train.events.tensorboard import SummaryWriterAdapter, TensorBoardWriter, TensorboardXWriter
from hezar_train.events.writers import (
    CSV_FILE,
    METRICS_FILE,
    CSVLogger,
    CSVWriter,
    EventWriter,
    JSONLinesWriter,
    JSONWriter,
    TrackerWriter,
    load_csv,
    read_rows,
)

__all__ = [
    "CSV_FILE",
    "DROPPED_SUFFIX",
    "FAILED",
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
    "keep_until",
    "load_csv",
    "print_csv_format",
    "read_rows",
    "read_starts",
    "smooth_loss",
    "starts_in",
]

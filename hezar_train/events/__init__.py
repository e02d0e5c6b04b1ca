"""What a run measures: the storage that anyone writes to, and the writers that make files of it."""

from __future__ import annotations

from hezar_train.events.append_file import DROPPED_SUFFIX, keep_until
from hezar_train.events.ledger import LEDGER_FILE, Ledger, LedgerLine
from hezar_train.events.meters import AverageMeter, MetricsTracker
from hezar_train.events.storage import EventStorage, History, Row, Scalar, get_event_storage
from hezar_train.events.writers import (
    CSV_FILE,
    METRICS_FILE,
    CSVLogger,
    CSVWriter,
    EventWriter,
    JSONLinesWriter,
    TensorBoardWriter,
    TrackerWriter,
    load_csv,
    read_rows,
)

__all__ = [
    "CSV_FILE",
    "DROPPED_SUFFIX",
    "LEDGER_FILE",
    "METRICS_FILE",
    "AverageMeter",
    "CSVLogger",
    "CSVWriter",
    "EventStorage",
    "EventWriter",
    "History",
    "JSONLinesWriter",
    "Ledger",
    "LedgerLine",
    "MetricsTracker",
    "Row",
    "Scalar",
    "TensorBoardWriter",
    "TrackerWriter",
    "get_event_storage",
    "keep_until",
    "load_csv",
    "read_rows",
]

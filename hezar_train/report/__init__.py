"""Reports: one HTML page about a run or several, without network, and a picture of the curves, from the folders alone.

Everything is read from files, also while the run goes on: no trainer, no model, no torch is needed. A file that is
damaged or half written is named on the page and costs only what it held.
"""

from __future__ import annotations

from hezar_train.report.page import COMPARISON_FILE, REPORT_FILE, write_report
from hezar_train.report.picture import CURVES_FILE, curves_png

__all__ = ["COMPARISON_FILE", "CURVES_FILE", "REPORT_FILE", "curves_png", "write_report"]

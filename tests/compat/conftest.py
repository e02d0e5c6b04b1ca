"""The toy run of the trainer's own tests; each door's tests build it with that door's Trainer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what lies beside the tests

SPEC = importlib.util.spec_from_file_location("toy_run", Path(__file__).parents[1] / "trainer" / "conftest.py")
assert SPEC is not None
assert SPEC.loader is not None
toy_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(toy_run)

classifier, rows, toy, logged, saved_steps = (
    toy_run.classifier, toy_run.rows, toy_run.toy, toy_run.logged, toy_run.saved_steps
)  # fmt: skip

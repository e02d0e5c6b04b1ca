from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from hezar_train.user_cache import own_folder

# the same examples in every run: a failure is found when the code changes, not on somebody else's day
settings.register_profile("default", derandomize=True, deadline=None)
settings.load_profile("default")

# a shell that starts the tests in the background lets them ignore Ctrl-C, and so would every process that they start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# what is compiled for one run of the tests serves the next one, too
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own_folder("compiled")))

# what tests train with is not remembered as this user's own
os.environ["HEZAR_TRAIN_CACHE"] = tempfile.mkdtemp(prefix="hezar_train_cache_")

MANY_PROCESSES = [Path(__file__).parent / name for name in ("distributed", "launch")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what starts whole groups of processes to `make test-all`."""
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in MANY_PROCESSES):
            item.add_marker(pytest.mark.slow)

"""Memory that one step frees serves the next: measured as page faults, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from hezar_train.config import TrainerConfig
from hezar_train.runtime import build_runtime

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.zeros(2 << 20) for _ in range(3)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

build_runtime(TrainerConfig(output_dir="run", use_cpu=True))
faults()
print(faults())
"""


def page_faults(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_batches_reuse_memory_unless_the_environment_says_otherwise() -> None:
    assert page_faults() < 2000  # 24 MB are 6,000 pages, twenty times over
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > 20_000

"""What is set for all of this process, whatever it trains: threads, kernels, memory, and how it takes its leave."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys

import torch

__all__ = ["ask_for_deterministic_kernels", "keep_freed_memory", "leave_group_at_exit", "use_threads"]

# numbers of glibc's mallopt(), and what to set each to
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20)}


def use_threads(count: int | None) -> None:
    """Let torch compute with so many threads, in all of this process; None leaves it as it is."""
    if count is not None and count != torch.get_num_threads():
        torch.set_num_threads(count)


def ask_for_deterministic_kernels() -> None:
    """Let torch compute the same bits each time, or raise where it cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@functools.cache
def keep_freed_memory() -> None:
    """Let the process keep up to 256 MB that a step frees for the next step, instead of giving it back each time.

    Touching fresh pages for each batch's outputs costs up to a third of an evaluation. An environment that sets one of
    glibc's own variables is left as it is, and so is a C library without them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name in os.environ for name in KEPT_MEMORY):
        for number, value in KEPT_MEMORY.values():
            mallopt(number, value)


@functools.cache
def leave_group_at_exit() -> None:
    """Take leave of the other processes when this one ends: torch warns of those who do not."""
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())

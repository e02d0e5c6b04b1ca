"""Cutting an update's window of samples into micro-batches: who takes which positions at which step.

This module owns the arithmetic alone, in plain integers. A window is a run of consecutive epoch positions; it is cut
into `num_steps` x `num_processes` cells, read step by step and, within a step, process by process. The cells cover the
window exactly: nothing twice, nothing left out, nothing padded with repeats. It refuses to know about batch sizes
beyond this law: with num_steps = ceil(count / (batch_size * num_processes)) no cell exceeds batch_size.
"""

from __future__ import annotations

from hezar_train.errors import ConfigError

__all__ = ["cut_window", "rank_ranges"]


def cut_window(count: int, num_steps: int, num_processes: int = 1) -> list[list[int]]:
    """Return sizes[step][rank]: as even as can be, the larger cells first.

    Even cells avoid a lone sample, which BatchNorm refuses: there is none from two samples a cell on. Only a window
    with fewer samples than cells leaves cells empty, and those come last.
    """
    if count < 0 or num_steps < 1 or num_processes < 1:
        raise ConfigError(
            f"a window of count={count} cannot be cut into num_steps={num_steps} for num_processes={num_processes}: "
            "expected a count of 0 or more, and at least one step and one process."
        )
    smaller, num_larger = divmod(count, num_steps * num_processes)
    return [
        [smaller + (step * num_processes + rank < num_larger) for rank in range(num_processes)]
        for step in range(num_steps)
    ]


def rank_ranges(first: int, count: int, num_steps: int, rank: int, num_processes: int) -> list[tuple[int, int]]:
    """Return (start, size) for each step of one process, in epoch positions, for the window that starts at `first`."""
    sizes = cut_window(count, num_steps, num_processes)
    if not 0 <= rank < num_processes:
        raise ConfigError(f"rank={rank} is none of num_processes={num_processes}: expected 0 to {num_processes - 1}.")
    ranges, start = [], first
    for step_sizes in sizes:
        ranges.append((start + sum(step_sizes[:rank]), step_sizes[rank]))
        start += sum(step_sizes)
    return ranges

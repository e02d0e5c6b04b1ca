"""Plans, orders and noisy samples for the tests of sources, and what a resumed run must meet again of windows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hezar_train.config import TrainerConfig
from hezar_train.data import Order, Window
from hezar_train.plan import Plan, make_plan

UNLIMITED = 10**9


def plan_of(
    num_samples: int | None, batch_size: int = 2, accumulation: int = 1, processes: int = 1, **fields: Any
) -> Plan:
    config = TrainerConfig(
        output_dir="run", batch_size=batch_size, gradient_accumulation_steps=accumulation,
        max_steps=UNLIMITED if num_samples is None else None, **fields,
    )  # fmt: skip
    return make_plan(config, num_samples, processes)


def order_of(batch_size: int = 2, **fields: Any) -> Order:
    return Order(**{"batch_size": batch_size, "seed": 5, "shuffle": True, **fields})


def seen(windows: Iterator[Window] | list[Window]) -> list[tuple[int, int, bool, list[Any]]]:
    """Tell everything of windows that a resumed run must meet again."""
    return [(window.first, window.count, window.ends_epoch, window.batches) for window in windows]


def samples(windows: Iterator[Window] | list[Window]) -> list[Any]:
    return [sample for window in windows for batch in window.batches for sample in batch]


class Noisy:
    """Samples with a number drawn for each."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), torch.rand(()).item()

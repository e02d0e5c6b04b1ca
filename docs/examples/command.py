"""What every example does when it is run: measure, train, measure again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["run"]


def run(name: str, build: Callable[..., Any], measure: Callable[[Any], float], unit: str) -> None:
    """Read --output and --resume, train what `build` returns, and print the measure before and after."""
    parser = argparse.ArgumentParser(description=f"Train the example {name!r} on handwritten digits.")
    parser.add_argument("--output", type=Path, default=Path("runs") / name, help="folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on where the run in that folder was killed")
    options = parser.parse_args()
    torch.set_num_threads(1)  # small networks gain nothing from more, and the bits of a run depend on their number
    trainer = build(options.output, resume_from_checkpoint=options.resume)
    before, start = measure(trainer), time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    print(f"{name}: {unit} {before:.4g} -> {measure(trainer):.4g} in {seconds:.1f} seconds")

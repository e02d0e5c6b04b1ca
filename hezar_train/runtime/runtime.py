"""Processes, device and precision of a run, resolved once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from hezar_train.runtime.processes import Processes

__all__ = ["Runtime"]

AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Runtime:
    """Processes, device and precision of a run, resolved once."""

    accelerator: Accelerator
    device: torch.device
    num_processes: int
    rank: int
    precision: str

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def processes(self) -> Processes:
        """The processes of the run."""
        return Processes(self.rank, self.num_processes, self.device)

    @property
    def has_fsdp_plugin(self) -> bool:
        """Tell whether the Accelerator was set up to spread the model (FSDP2)."""
        return bool(self.accelerator.is_fsdp2)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        return self.accelerator.scaler  # type: ignore[no-any-return]

    def autocast(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what to enter around each forward: autocast to the run's precision, or nothing in full precision."""
        if self.precision == "no":
            return contextlib.nullcontext
        if self.precision not in AUTOCAST_TYPES:
            return self.accelerator.autocast  # type: ignore[no-any-return]
        # not Accelerate's: it looks the precision up in a global, which a second trainer may have changed
        handler = self.accelerator.autocast_handler
        options = {} if handler is None else handler.to_kwargs()
        return functools.partial(torch.autocast, self.device.type, dtype=AUTOCAST_TYPES[self.precision], **options)

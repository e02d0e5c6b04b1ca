"""Fields of the machine: device, processes, precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import flag, one_of, whole, wrong_type
from hezar_train.config.names import DEVICES
from hezar_train.errors import choices, suggestion
from hezar_train.types import PrecisionType

__all__ = ["HardwareFields"]

SHARDINGS = ("none", "full")


@dataclass(kw_only=True)
class HardwareFields:
    device: str | None = None
    """Where to train, such as "cpu" or "cuda:1"; honoured or refused. None: what is found."""

    use_cpu: bool = False
    """Train on the CPU even where there is an accelerator."""

    num_threads: int | None = None
    """Threads of the CPU that each process computes with; the last bits depend on it. None: as torch finds it."""

    distributed: bool = False
    """True: refuse to run as a single process. False: whatever the launcher made."""

    mixed_precision: str | PrecisionType | None = None
    """"bf16", "fp16" or "fp8"; None, "no" and "full" mean fp32. Refused where the device cannot."""

    compile: bool = False
    """Compile the model with torch.compile; the results are the same up to rounding, checkpoints are unchanged."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass to save memory; refused for models that cannot."""

    sharding: str = "none"
    """"full": each process keeps a share of weights, gradients and optimizer state (FSDP2); "none": a copy of all."""

    sync_batchnorm: bool = False
    """Let batch normalisation see the batches of all processes together."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("compile", self.compile)
        yield from one_of("sharding", self.sharding, SHARDINGS, optional=False)
        if self.sharding == "full" and self.mixed_precision in {"fp16", "fp8"}:
            asked = str(self.mixed_precision)
            yield f"mixed_precision={asked!r} cannot be used with sharding='full'. Use 'bf16' or None."
        yield from flag("sync_batchnorm", self.sync_batchnorm)
        yield from flag("gradient_checkpointing", self.gradient_checkpointing)
        yield from self._problems_of_device()
        yield from flag("use_cpu", self.use_cpu)
        if self.use_cpu is True and isinstance(self.device, str) and self.device.split(":")[0] != "cpu":
            yield f"use_cpu=True contradicts device={self.device!r}: give one of the two"
        yield from whole("num_threads", self.num_threads, least=1, optional=True)
        yield from flag("distributed", self.distributed)
        yield from one_of("mixed_precision", self.mixed_precision, [*PrecisionType])

    def _problems_of_device(self) -> Iterator[str]:
        if self.device is None:
            return
        if not isinstance(self.device, str):
            yield wrong_type("device", self.device, "str")
            return
        kind, colon, number = self.device.partition(":")
        if kind not in DEVICES:
            yield (
                f"device={self.device!r} cannot train. Choose from: {choices(DEVICES)}, with a number for one of "
                f"several ('cuda:1').{suggestion('cuda' if kind == 'gpu' else kind, DEVICES)}"
            )
        elif colon and not (number.isascii() and number.isdigit()):
            yield f"device={self.device!r}: expected a number after the colon, such as '{kind}:0'"

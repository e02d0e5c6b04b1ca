"""What lies in a checkpoint, as lines to read: the state, the tensors, and what the run has measured so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from hezar_train.checkpoint import Checkpoint

__all__ = ["contents_of"]


def contents_of(run: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the state of a checkpoint, its tensors with their shapes, and the series of the run with their lengths."""
    yield "state"
    for name, value in checkpoint.state().items():
        if value not in (None, {}, []) and not isinstance(value, dict):
            yield f"  {name:<34} {value}"
    tensors, _ = checkpoint.model()
    yield f"model: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} values"
    yield from (_line(name, tensor) for name, tensor in tensors.items())
    yield "measured so far"
    yield from _series(run, checkpoint.step)


def _line(name: str, tensor: Tensor) -> str:
    return f"  {name:<34} {str(tensor.dtype).removeprefix('torch.'):<10}{' x '.join(map(str, tensor.shape))}"


def _series(run: Path, step: int) -> Iterator[str]:
    from hezar_train.report.reading import read_run

    found: dict[str, list[float]] = {}
    for row in read_run(run).rows:
        for name, value in row.values.items() if row.step <= step else ():
            found.setdefault(name, []).append(value)
    for name, values in found.items():
        yield f"  {name:<34} {len(values):<10}last {values[-1]:.6g}"

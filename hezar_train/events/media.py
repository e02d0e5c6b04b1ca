"""Images and histograms on their way to a writer.

Owns their form: an image becomes 8-bit pixels, a histogram counts per bucket, both small and free of the graph they
came from. Owns no file format.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hezar_train.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Histogram", "Image", "make_histogram", "make_image"]

NUM_CHANNELS = (1, 3, 4)
"""Grey, RGB, RGB with transparency."""


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture put at one step."""

    name: str
    step: int
    time: float
    """Seconds since 1970."""
    pixels: Tensor
    """Channels, rows, columns in 8 bits; on its device until a writer reads it."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How the finite numbers of a tensor were distributed at one step."""

    name: str
    step: int
    time: float
    """Seconds since 1970."""
    min: float
    max: float
    num: int
    sum: float
    sum_squares: float
    bucket_limits: list[float]
    """The upper end of each bucket."""
    bucket_counts: list[int]


def make_image(name: str, step: int, image: Any) -> Image:
    """Copy a picture of channels, rows, columns; floats lie in 0..1 and are cut off there."""
    import torch

    pixels = torch.as_tensor(image).detach()
    if pixels.ndim != 3 or pixels.shape[0] not in NUM_CHANNELS or not pixels.numel():
        shape = tuple(pixels.shape)
        raise DataError(f"{name!r} has the shape {shape}, expected (channels, height, width) with 1, 3 or 4 channels")
    if pixels.is_floating_point():
        pixels = pixels.float().nan_to_num().clamp(0, 1).mul(255).round().to(torch.uint8)
    elif pixels.dtype == torch.uint8:
        pixels = pixels.clone()  # a view would hold the whole batch, and change with it
    else:
        raise DataError(f"{name!r} is of {pixels.dtype}, expected floats in 0..1 or torch.uint8")
    return Image(name, step, time.time(), pixels)


def make_histogram(name: str, step: int, values: Any, bins: int) -> Histogram:
    """Count the finite numbers of `values` in `bins` buckets of equal width."""
    import numpy as np
    import torch

    if bins < 1:
        raise DataError(f"bins={bins!r} of {name!r} must be at least 1")
    numbers = torch.as_tensor(values).detach().cpu().double().numpy().ravel()
    finite = numbers[np.isfinite(numbers)]
    counts, edges = np.histogram(finite, bins)
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    total, squares = float(finite.sum()), float(np.square(finite).sum())
    return Histogram(
        name, step, time.time(), low, high, finite.size, total, squares, edges[1:].tolist(), counts.tolist()
    )

"""Pictures as PNG without a library for images: what a model misread, small, and what it drew, as a report shows it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["drawn_png", "picture_of", "png"]

PICTURE_KEYS = ("pixel_values", "image", "images")
NUM_CHANNELS = (1, 3)
LEAST_SIDE, MOST_SIDE = 4, 320
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture_of(sample: Any) -> bytes | None:
    """Return the picture that a sample holds, stretched to 8 bits, as PNG; None if it holds none."""
    pixels = _pixels_of(sample)
    if pixels is None or min(pixels.shape[1:]) < LEAST_SIDE:
        return None
    stride = -(-max(pixels.shape[1:]) // MOST_SIDE)  # a large one is shown by every so manyth pixel
    return png(_in_8_bits(pixels[:, ::stride, ::stride]))


def drawn_png(picture: torch.Tensor) -> bytes:
    """Return a picture from 0 to 1, (rows, columns) or with 1 or 3 channels first, as PNG; beyond is cut off."""
    pixels = (255 * picture.detach().float().clamp(0, 1)).round().byte()
    return png(pixels.unsqueeze(0) if pixels.ndim == 2 else pixels)


def png(pixels: torch.Tensor) -> bytes:
    """Return 8-bit pixels (1 or 3 channels, rows, columns) as a PNG file."""
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels).cpu().numpy()
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # 0: the line is stored as it is
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = [_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)), _chunk(b"IEND", b"")]
    return SIGNATURE + b"".join(parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _pixels_of(sample: Any) -> torch.Tensor | None:
    """Return channels, rows and columns of a sample's picture: under its usual names, or first in a tuple."""
    if isinstance(sample, Mapping):
        found = next((sample[key] for key in PICTURE_KEYS if key in sample), None)
    else:
        found = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if not isinstance(found, torch.Tensor | np.ndarray):
        return None
    pixels = torch.as_tensor(found).detach()
    pixels = pixels.unsqueeze(0) if pixels.ndim == 2 else pixels
    return pixels if pixels.ndim == 3 and pixels.shape[0] in NUM_CHANNELS else None


def _in_8_bits(pixels: torch.Tensor) -> torch.Tensor:
    """Stretch pixels from their smallest to their largest value; 8 bits stay as they are."""
    if pixels.dtype == torch.uint8:
        return pixels
    values = pixels.double().nan_to_num(0.0, 0.0, 0.0)
    low, high = values.min(), values.max()
    return ((values - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)

"""Pictures of a dataset, made as small and as grey as the digits that three recipes begin with."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.errors import DataError
from hezar_train.launch.fetching import HELD_OUT, TRAIN, load_splits, refuse_missing_columns, with_held_out

if TYPE_CHECKING:
    import torch

__all__ = ["PictureSize", "load_pictures", "small_greys"]

BOX = 4  # of PIL.Image.Resampling: a pixel is the mean of those in its place
LARGEST_GREY = 16


@dataclass(frozen=True)
class PictureSize:
    """The side of a dataset's pictures, in pixels: what a recipe's `read` has to know, kept with each checkpoint."""

    side: int

    def save(self, folder: str) -> None:
        """Write it as JSON."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "picture_size.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def load_pictures(name: str, share: float, image_column: str, **others: str) -> tuple[Any, Any]:
    """Load the rows of `recipe.dataset` to train on and those held out; columns are given by the options' names."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), share)
    refuse_missing_columns(override, found[TRAIN], image_column=image_column, **others)
    kind = found[TRAIN].features[image_column]
    if type(kind).__name__ != "Image":
        raise DataError(f"{override} has no pictures in its column {image_column!r}, but {kind}")
    return found[TRAIN], found[HELD_OUT]


def small_greys(pictures: Iterable[Any], side: int) -> torch.Tensor:
    """Return pictures with so many pixels a side, in 17 greys from 0 to 1."""
    import numpy as np
    import torch

    small = [np.array(one.convert("L").resize((side, side), resample=BOX)) for one in pictures]
    return (torch.from_numpy(np.stack(small)).float() * LARGEST_GREY / 255).round() / LARGEST_GREY

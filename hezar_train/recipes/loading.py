"""Load what a recipe's override asks for, a dataset or weights, from the Hub or a folder; errors become one sentence.

Loading itself is the business of `datasets`, `transformers` and `hezar`. Pictures of a dataset are made as small and as
grey as the digits that three of the shipped recipes begin with.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.errors import DataError, HezarTrainError, MissingDependencyError, choices

if TYPE_CHECKING:
    import torch

__all__ = [
    "HELD_OUT",
    "TRAIN",
    "PictureSize",
    "asked_for",
    "load_pictures",
    "load_splits",
    "refuse_missing_columns",
    "small_greys",
    "with_held_out",
]

TRAIN, HELD_OUT = "train", "held_out"
EVALUATED = (HELD_OUT, "validation", "dev", "test")  # the first of them that there is chooses the best checkpoint
SPLIT_SEED = 0  # not the run's: every run is tested on the same rows
PLAIN_ERRORS = (OSError, ValueError, RuntimeError, KeyError, ImportError, EOFError, pickle.UnpicklingError)
OWN_ERRORS = {
    "datasets.exceptions": "DatasetsError",
    "httpx2": "HTTPError",
    "safetensors": "SafetensorError",
    "yaml": "YAMLError",
}
"""Those that are none of the plain ones, by their modules: one that was never imported raises none."""

BOX = 4  # of PIL.Image.Resampling: a pixel is the mean of those in its place
LARGEST_GREY = 16


@contextmanager
def asked_for(override: str) -> Iterator[None]:
    """Tell what goes wrong while something is loaded as a mistake in the override that asked for it."""
    try:
        yield
    except HezarTrainError:
        raise
    except _loading_errors() as error:
        reason = str(error).strip()
        raise DataError(
            f"{override} cannot be loaded. Expected OWNER/NAME on the Hub, which must be reachable and readable, or a "
            f"local folder.\n{type(error).__name__}{': ' if reason else ''}{reason}"
        ) from error


def load_splits(override: str, name: str) -> dict[str, Any]:
    """Load the splits of a dataset of the Hub, `OWNER/NAME` or `OWNER/NAME:CONFIG`, or of a folder of its files."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", "datasets", override) from error
    repository, _, config = name.partition(":")
    with asked_for(override):
        return dict(datasets.load_dataset(repository, config or None))


def with_held_out(override: str, splits: Mapping[str, Any], share: float = 0.1) -> dict[str, Any]:
    """Return "train", "held_out" and whatever else there is; what is not held out is cut from the rows to train on.

    The set that chooses the best checkpoint then has one name, whatever a dataset calls it, and a config can say it.
    """
    found = dict(splits)
    if len(found) == 1:
        found = {TRAIN: next(iter(found.values()))}
    if TRAIN not in found:
        raise DataError(f"{override} has the splits {choices(found)}; expected train, and validation or test")
    held_out = next((split for split in EVALUATED if split in found), None)
    if held_out is not None:
        return {TRAIN: found.pop(TRAIN), HELD_OUT: found.pop(held_out), **found}
    if len(found[TRAIN]) < 2:
        raise DataError(f"{override} has {len(found[TRAIN])} rows: too few to hold some out")
    parts = found.pop(TRAIN).train_test_split(test_size=share, seed=SPLIT_SEED)
    return {TRAIN: parts["train"], HELD_OUT: parts["test"], **found}


def refuse_missing_columns(override: str, rows: Any, **columns: str) -> None:
    """Raise if rows lack a column; each is given by the name of the option that says it."""
    if missing := set(columns.values()).difference(rows.column_names):
        options = " and ".join(f"recipe.{option}=..." for option in columns)
        there = choices(rows.column_names)
        raise DataError(f"{override} has no {choices(missing)}. Its columns: {there}. Name others with {options}")


def _loading_errors() -> tuple[type[Exception], ...]:
    own = (getattr(sys.modules[module], name) for module, name in OWN_ERRORS.items() if module in sys.modules)
    return (*PLAIN_ERRORS, *own)


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

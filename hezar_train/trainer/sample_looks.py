"""What the samples that an evaluation lists looked like: a picture or a text for each, kept for the report.

A sample is fetched once more, under the seeds that the evaluation gave it, so the record shows what the model saw. It
must cost a run nothing: the generators are put back, time and bytes are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from hezar_train.data import is_stream, preserved_randomness, sample_seed, seed_python_numpy_torch
from hezar_train.trainer.decoding import decoded_inputs
from hezar_train.trainer.pictures import picture_of

__all__ = ["SampleLooks", "is_cheap_to_fetch"]

MOST_SECONDS = 2.0
MOST_BYTES = 300_000
MOST_CHARACTERS = 1_000
MOST_IDS = 512

Rows = list[dict[str, Any]]


def is_cheap_to_fetch(data: Any) -> bool:
    """Tell whether the sample of a number can be had at once, and without moving a generator of the dataset's own."""
    if isinstance(data, DataLoader) or is_stream(data) or hasattr(data, "set_seed"):
        return False
    is_mapping = isinstance(data, Mapping) and 0 not in data
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_mapping


@dataclass
class SampleLooks:
    """Add to the rows of one evaluation what their samples looked like."""

    root: Path
    """The run's folder, which paths are relative to."""
    folder: Path
    """Where pictures go."""
    seed: int
    preprocessor: Any = None
    _known: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)
    _bytes_left: int = field(default=MOST_BYTES, repr=False)
    _until: float = field(default_factory=lambda: perf_counter() + MOST_SECONDS, repr=False)

    def added(self, rows: Rows, data: Any, prefix: str = "") -> Rows:
        """Return the rows with an `image` (a path) or `input` (a text) where there is one; a `prefix` for each set."""
        if not rows or not is_cheap_to_fetch(data):
            return rows
        with preserved_randomness():
            return [{**row, **self._look_of(data, row["sample"], prefix)} for row in rows]

    def _look_of(self, data: Any, number: int, prefix: str) -> dict[str, str]:
        name = f"{prefix}{number}.png"
        if name not in self._known:
            self._known[name] = self._fresh_look_of(data, number, name)
        return self._known[name]

    def _fresh_look_of(self, data: Any, number: int, name: str) -> dict[str, str]:
        if perf_counter() > self._until or not 0 <= number < len(data):
            return {}
        seed_python_numpy_torch(sample_seed(self.seed, 0, number))
        sample = data[number]
        if (picture := picture_of(sample)) is not None:
            return self._kept(picture, name)
        text = self._text_of(sample)
        return {} if text is None else {"input": text[:MOST_CHARACTERS]}

    def _kept(self, picture: bytes, name: str) -> dict[str, str]:
        if len(picture) > self._bytes_left:
            return {}
        self._bytes_left -= len(picture)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        path.write_bytes(picture)
        return {"image": path.relative_to(self.root).as_posix()}

    def _text_of(self, sample: Any) -> str | None:
        if not isinstance(sample, Mapping):
            return None
        if isinstance(sample.get("text"), str):
            return str(sample["text"])
        if "input_ids" not in sample:
            return None
        ids = torch.as_tensor(sample["input_ids"]).reshape(-1)[:MOST_IDS]
        texts = decoded_inputs(self.preprocessor, [ids.tolist()])
        return None if texts is None else texts[0]

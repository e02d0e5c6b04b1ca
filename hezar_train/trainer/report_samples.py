"""The samples a model was most wrong about: a bounded list, kept while an evaluation runs."""

from __future__ import annotations

import heapq
import inspect
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import is_stream, preserved_randomness, sample_seed, seed_python_numpy_torch
from hezar_train.metrics import (
    IGNORED_LABEL,
    ClassificationHandler,
    LanguageModelingHandler,
    MetricsHandler,
    SequenceLabelingHandler,
)
from hezar_train.run_folder import write_anew
from hezar_train.runtime import Runtime, logger
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.generation import decoded_inputs, generates, generator_of, label_names_of
from hezar_train.types import TaskType

if TYPE_CHECKING:
    from hezar_train.trainer.evaluator import EvaluationReport

__all__ = [
    "Drawn",
    "ReportDetails",
    "SampleLooks",
    "WorstSamples",
    "continuations",
    "drawn_png",
    "in_words",
    "is_cheap_to_fetch",
    "picture_of",
    "png",
]

KEPT = 16
MOST_PLACES_SHOWN = 256

Row = dict[str, Any]
Decode = Callable[[list[list[int]]], list[str] | None]


class WorstSamples:
    """Keep the `KEPT` samples of the largest loss; numbers stay on the device until they are read."""

    def __init__(self) -> None:
        self._columns: list[torch.Tensor] = []  # losses, samples, predictions, targets
        self._listed: list[Row] | None = None
        self._rows: list[tuple[float, int, Any, Any]] = []  # the same on the host, of texts and lists

    def add(self, samples: Sequence[int], losses: torch.Tensor, predictions: Any, targets: Any) -> None:
        """Look at a batch of the samples of these numbers."""
        samples = samples[: len(losses)]
        if not (isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)):
            self._add_on_host(samples, losses.tolist(), _plain(predictions), _plain(targets))
            return
        in_order = isinstance(samples, range)
        numbers = torch.arange(samples[0], samples[-1] + 1) if in_order and samples else torch.tensor(samples)
        columns = [losses.detach(), numbers.to(losses.device), predictions, targets.to(losses.device)]
        if self._columns:
            columns = [_joined(*pair) for pair in zip(self._columns, columns, strict=True)]
        chosen = columns[0].topk(min(KEPT, len(columns[0]))).indices
        self._columns = [column[chosen] for column in columns]

    @classmethod
    def of(cls, listed: list[Row]) -> WorstSamples:
        """Choose the worst of what several processes listed."""
        merged = cls()
        merged._listed = heapq.nsmallest(KEPT, listed, key=lambda row: (-row["loss"], row["sample"]))
        return merged

    def listed(self) -> list[Row]:
        """Return the samples, worst first; of a sequence the places that count, so many at most."""
        if self._listed is not None:
            return self._listed
        rows = self._rows or zip(*(column.tolist() for column in self._columns), strict=True)
        return [
            {"sample": number, "loss": loss, **_shown(prediction, target)} for loss, number, prediction, target in rows
        ]

    def _add_on_host(
        self, samples: Sequence[int], losses: list[float], predictions: list[Any], targets: list[Any]
    ) -> None:
        rows = zip(losses, samples, predictions, targets, strict=True)
        self._rows = heapq.nlargest(KEPT, [*self._rows, *rows], key=lambda row: row[0])


def in_words(handler: MetricsHandler, names: Mapping[int, str] | None, decode: Decode) -> Callable[[Row], Row]:
    """Return how a row is told: classes by their names, tokens as text, all else as it is.

    `decode` makes texts of rows of ids, or returns None.
    """
    if isinstance(handler, LanguageModelingHandler):
        told: Callable[[Any], Any] = partial(_as_text, decode)
    elif names and isinstance(handler, SequenceLabelingHandler):
        told = partial(_by_name, names)
    elif names and isinstance(handler, ClassificationHandler):
        told = partial(_of_those_on, names)
    else:
        return lambda row: row
    return lambda row: row | {key: told(row[key]) for key in ("prediction", "target")}


def _as_text(decode: Decode, value: Any) -> Any:
    texts = decode([value]) if isinstance(value, list) else None
    return value if texts is None else texts[0]


def _by_name(names: Mapping[int, str], value: Any) -> Any:
    return [names.get(one, one) for one in value] if isinstance(value, list) else names.get(value, value)


def _of_those_on(names: Mapping[int, str], value: Any) -> Any:
    """Return a class by its name, or those of several labels that are on at once."""
    if not isinstance(value, list):
        return names.get(value, value)
    return [names.get(number, number) for number, is_on in enumerate(value) if is_on]


def _joined(kept: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Put rows below rows; batches of sequences may differ in width."""
    if kept.ndim == 2 and kept.shape[1] != new.shape[1]:
        width = max(kept.shape[1], new.shape[1])
        kept, new = (pad(rows, (0, width - rows.shape[1]), value=IGNORED_LABEL) for rows in (kept, new))
    return torch.cat([kept, new])


def _plain(rows: Any) -> list[Any]:
    return rows.tolist() if hasattr(rows, "tolist") else list(rows)


def _shown(prediction: Any, target: Any) -> dict[str, Any]:
    if not (isinstance(target, list) and isinstance(prediction, list) and len(prediction) == len(target)):
        return {"prediction": prediction, "target": target}
    pairs = [pair for pair in zip(prediction, target, strict=True) if pair[1] != IGNORED_LABEL][:MOST_PLACES_SHOWN]
    return {"prediction": [guess for guess, _ in pairs], "target": [right for _, right in pairs]}


# Pictures as PNG without a library for images: what a model misread, small, and what it drew, as a report shows it.

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
    values = pixels.cpu().double().nan_to_num(0.0, 0.0, 0.0)
    low, high = values.min(), values.max()
    return ((values - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8)


# What the samples that an evaluation lists looked like: a picture or a text for each, kept for the report.
#
# A sample is fetched once more, under the seeds that the evaluation gave it, so the record shows what the model saw. It
# must cost a run nothing: the generators are put back, time and bytes are bounded.

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
        write_anew(path, picture)
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


# Sample texts of a language model: the beginnings of a few samples, and how the model goes on from there.

MOST_PROMPT_IDS = 24
LEAST_PROMPT_IDS = 2
NUM_NEW_IDS = 48
LENGTH_OPTION = "max_new_tokens"


def continuations(
    model: nn.Module, samples: Sequence[Any], preprocessor: Any, options: Mapping[str, Any] | None, device: torch.device
) -> list[dict[str, Any]]:
    """Return for each sample its beginning, what the model writes after it, and what was there; none if it cannot."""
    rows = [torch.as_tensor(one["input_ids"]).reshape(-1) for one in samples if _has_ids(one)]
    length = min([MOST_PROMPT_IDS, *(len(row) // 2 for row in rows)])
    if not rows or length < LEAST_PROMPT_IDS:
        return []
    prompts = torch.stack([row[:length] for row in rows]).to(device)
    generate = generator_of(model, options if options else _length_for(model.generate))  # type: ignore[arg-type]
    written = generate({"input_ids": prompts, "attention_mask": torch.ones_like(prompts)})
    said = torch.as_tensor(getattr(written, "sequences", written)).to(device)
    if said.shape[1] > length and bool((said[:, :length] == prompts).all()):  # most repeat what they were given
        said = said[:, length:]
    rests = [row[length : length + NUM_NEW_IDS].tolist() for row in rows]
    texts = [decoded_inputs(preprocessor, part) for part in (prompts.tolist(), said.tolist(), rests)]
    names = ("input", "prediction", "target")
    return [dict(zip(names, row, strict=True)) for row in zip(*(text or [] for text in texts), strict=True)]


def _has_ids(sample: Any) -> bool:
    return isinstance(sample, Mapping) and "input_ids" in sample


def _length_for(generate: Callable[..., Any]) -> dict[str, int]:
    """Return how long a text should be, if `generate` takes that."""
    named = inspect.signature(generate).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in named.values())
    return {LENGTH_OPTION: NUM_NEW_IDS} if takes_any or LENGTH_OPTION in named else {}


# What the record of an evaluation holds for a report alone: tables, the worst samples, texts, and how they looked.
#
# Nothing here decides anything in a run: what goes wrong with a user's dataset or tokenizer is told and left out.

NUM_TEXTS = 4

Drawn = tuple[torch.Tensor, Mapping[str, Any]]
"""A picture that the model made, and words about it by name."""


@dataclass
class ReportDetails:
    """Gather what a report shows of an evaluation, by the names of its sets."""

    config: TrainerConfig
    runtime: Runtime
    model: nn.Module
    handler: MetricsHandler
    preprocessor: Any
    root: Path
    """The run's folder, which paths are relative to."""

    pictures: Path
    """Where pictures go."""

    def of(
        self, reports: Mapping[str, EvaluationReport], data: Mapping[str, Any], drawn: Sequence[Drawn] = ()
    ) -> dict[str, Any]:
        """Return tables, worst samples and examples, how they looked where the data is known, and what was drawn."""
        found: dict[str, Any] = {
            "tables": {name: report.tables for name, report in reports.items()},
            "worst_samples": {name: report.worst_samples for name, report in reports.items()},
            "sample_loss_name": self.handler.sample_loss_name,
        }
        try:
            found |= self._as_they_looked(reports, data)
        except Exception as error:  # noqa: BLE001 - of the user's dataset or tokenizer: no picture is worth a run
            logger.warning("the report will not show what samples looked like: %s: %s", type(error).__name__, error)
        if drawn:
            examples = found.setdefault("examples", {}).setdefault(next(iter(reports), ""), [])
            examples += self._kept(drawn)
        return found

    def _kept(self, drawn: Sequence[Drawn]) -> list[dict[str, Any]]:
        """Write pictures down, and return a row for each; a full disk costs pictures, not the run."""
        rows: list[dict[str, Any]] = []
        try:
            self.pictures.mkdir(parents=True, exist_ok=True)
            for number, (pixels, words) in enumerate(drawn):
                path = self.pictures / f"drawn-{number}.png"
                write_anew(path, drawn_png(pixels))
                rows.append({"image": path.relative_to(self.root).as_posix(), **words})
        except OSError as error:
            logger.warning("the report will not show all that the model drew: %s", error)
        return rows

    def _as_they_looked(
        self, reports: Mapping[str, EvaluationReport], data: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        looks = SampleLooks(self.root, self.pictures, self.config.seed, self.preprocessor)
        names, decode = label_names_of(unwrap(self.model)), partial(decoded_inputs, self.preprocessor)
        told = in_words(self.handler, names, decode)
        worst, examples = {}, {}
        for place, (name, report) in enumerate(reports.items()):
            prefix, samples = f"{place}-" if name else "", data.get(name)
            worst[name] = looks.added([told(row) for row in report.worst_samples], samples, prefix)
            shown = looks.added(report.examples, samples, prefix) or self._texts_written_on(samples)
            examples[name] = [{key: row[key] for key in row if key != "sample"} for row in shown]
        return {"worst_samples": worst} | ({"examples": examples} if any(examples.values()) else {})

    def _texts_written_on(self, data: Any) -> list[dict[str, Any]]:
        """Return texts that a language model writes after the beginnings of a few samples."""
        model, config = unwrap(self.model), self.config
        is_asked = config.evaluate_with_generate and config.task == TaskType.LANGUAGE_MODELING
        if not is_asked or not generates(model) or is_sharded(self.model) or not is_cheap_to_fetch(data):
            return []
        with torch.no_grad(), self.runtime.autocast()():
            samples = [data[number] for number in range(min(NUM_TEXTS, len(data)))]
            return continuations(model, samples, self.preprocessor, config.generation_kwargs, self.runtime.device)

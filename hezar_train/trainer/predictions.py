"""Predictions: one for each sample, collected by the hooks of `predict()` and written as JSON lines or Parquet."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

import torch

from hezar_train.data import Window
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.metrics import MetricsHandler
from hezar_train.trainer.model_runner import labels_of

__all__ = ["PredictionFile", "PredictionSteps", "write_predictions"]

SUFFIXES = (".jsonl", ".json", ".parquet")


class PredictionSteps:
    """The default hooks of prediction."""

    def __init__(
        self, prepare: Callable[[Context], None], look: Callable[[Any], Mapping[str, Any]], handler: MetricsHandler
    ) -> None:
        self._prepare, self._look, self._handler = prepare, look, handler
        self._sink: Callable[[int, Any], None] = _nowhere

    def begin(self, sink: Callable[[int, Any], None]) -> None:
        """Hand the predictions that follow, each with its sample's number, to a function."""
        self._sink = sink

    def register(self, hooks: HookSet) -> None:
        """Put the default behaviour into a hook set, under its names."""
        hooks.register(self._prepare, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.collect, Moment.BATCH_END, name="collect")

    def forward(self, ctx: Context) -> None:
        """Run the model on the batch."""
        ctx.outputs = self._look(ctx.batch)

    def collect(self, ctx: Context) -> None:
        """Hand each sample's prediction on, with its number."""
        window: Window = ctx.window
        count = window.sizes[ctx.batch_in_window]
        if not count:  # a filler: the samples are those of another process
            return
        found = self._handler.predictions(ctx.outputs, labels_of(ctx.batch))
        if found is None:
            raise DataError(
                f"the model's outputs have no 'logits' to predict from; they are: {choices(ctx.outputs)}. Return "
                "logits, or pass a metrics_handler whose predictions() reads what there is."
            )
        values = found.tolist() if isinstance(found, torch.Tensor) else list(found)
        if len(values) != count:
            raise DataError(
                f"there are {len(values)} predictions for {count} samples; expected one each, in their order. "
                "Return logits whose first axis is the sample's, or pass a metrics_handler whose predictions() does."
            )
        for number, value in enumerate(values, start=window.firsts[ctx.batch_in_window]):
            self._sink(number, value)


def write_predictions(path: Path, numbered: Iterable[tuple[int, Any]]) -> None:
    """Write predictions that are all there, in order."""
    with PredictionFile(path) as file:
        for number, value in numbered:
            file.add(number, value)


class PredictionFile:
    """Write predictions line by line under a temporary name; the file appears if the body ends well."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise ConfigError(
                f"predictions cannot be written to {path}: expected a name that ends in {choices(SUFFIXES)}"
            )
        if path.suffix == ".parquet":
            _datasets()  # better missed now than after the last prediction
        self._path, self._temporary = path, path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self._temporary.open("x", encoding="utf-8")

    def add(self, number: int, value: Any) -> None:
        """Write one prediction."""
        self._file.write(json.dumps({"sample": number, "prediction": value}, ensure_ascii=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._publish()
        else:
            self._temporary.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Give the file its name; Parquet is made of the lines, batch by batch."""
        if self._path.suffix == ".parquet":
            table = self._temporary.with_suffix(".parquet")
            try:
                _to_parquet(self._temporary, table)
                table.replace(self._path)
            finally:
                table.unlink(missing_ok=True)
                self._temporary.unlink()
        else:
            self._temporary.replace(self._path)


def _to_parquet(lines: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{lines.name}.", dir=lines.parent) as cache:
        _datasets().Dataset.from_json(str(lines), cache_dir=cache).to_parquet(str(target))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependencyError("datasets", "datasets", "writing Parquet") from error
    return datasets


def _nowhere(_: int, __: Any) -> None:
    raise RuntimeError("predictions have nowhere to go")

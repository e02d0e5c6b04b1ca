"""What the record of an evaluation holds for a report alone: tables, the worst samples, texts, and how they looked.

Nothing here decides anything in a run: what goes wrong with a user's dataset or tokenizer is told and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.metrics import MetricsHandler
from hezar_train.runtime import Runtime, logger
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.continuations import continuations
from hezar_train.trainer.decoding import decoded_inputs, generates, label_names_of
from hezar_train.trainer.evaluation import EvaluationReport
from hezar_train.trainer.pictures import drawn_png
from hezar_train.trainer.sample_looks import SampleLooks, is_cheap_to_fetch
from hezar_train.trainer.worst import in_words
from hezar_train.types import TaskType

__all__ = ["Drawn", "ReportDetails"]

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
                path.write_bytes(drawn_png(pixels))
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

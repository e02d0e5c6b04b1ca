"""What a card says of a run, read from its folder: metrics with intervals, training settings, hours, data, versions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hezar_train.errors import DataError
from hezar_train.events import METRICS_FILE, read_rows, read_starts
from hezar_train.hub.run_paths import RunPaths
from hezar_train.types import TaskType

__all__ = ["Measured", "RunFacts"]

PIPELINE_TAGS = {
    TaskType.AUDIO_CLASSIFICATION: "audio-classification",
    TaskType.BACKBONE: "feature-extraction",
    TaskType.IMAGE2TEXT: "image-to-text",
    TaskType.IMAGE_CLASSIFICATION: "image-classification",
    TaskType.LANGUAGE_MODELING: "text-generation",
    TaskType.MASK_FILLING: "fill-mask",
    TaskType.SEQUENCE_LABELING: "token-classification",
    TaskType.SPEECH_RECOGNITION: "automatic-speech-recognition",
    TaskType.TEXT_CLASSIFICATION: "text-classification",
    TaskType.TEXT_GENERATION: "text-generation",
}
"""The Hub's words for tasks; it has none for the others."""

SHOWN_SETTINGS = (
    "num_epochs", "max_steps", "batch_size", "global_batch_size", "gradient_accumulation_steps", "optimizer",
    "learning_rate", "weight_decay", "momentum", "lr_scheduler", "warmup_steps", "max_grad_norm", "mixed_precision",
    "criterion", "seed", "deterministic",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One metric of the evaluation, on the set of that name (empty for a single one)."""

    name: str
    value: float
    set_name: str = ""
    low: float | None = None
    high: float | None = None


class RunFacts:
    """The facts of one run at one of its checkpoints."""

    def __init__(self, paths: RunPaths, step: int) -> None:
        self.step, self.settings = step, paths.settings
        self.plan = paths.json("plan.json")
        self.recipe = paths.json("recipe.json")
        starts = read_starts(paths.root)
        self.environment: dict[str, Any] = starts[-1] if starts else {}
        self._evaluation = paths.evaluation_at(step)
        self.hours = _hours(paths, [float(one.get("time", 0.0)) for one in starts])

    @property
    def task(self) -> str | None:
        """The config's task."""
        task = self.settings.get("task")
        return None if task is None else str(task)

    @property
    def pipeline_tag(self) -> str | None:
        """The Hub's word for the task."""
        return None if self.task not in [*TaskType] else PIPELINE_TAGS.get(TaskType(str(self.task)))

    @property
    def evaluated_step(self) -> int | None:
        """The step whose evaluation the metrics are from."""
        return self._evaluation.get("step")

    def measured(self) -> list[Measured]:
        """Return the metrics of the evaluation, each with its interval where one was computed."""
        found = {
            str(name): float(value)
            for name, value in (self._evaluation.get("metrics") or {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        bounds = {f"{name}{end}" for name in found for end in (".low", ".high") if f"{name}{end}" in found}
        return [
            Measured(*self._split(name, value), found.get(f"{name}.low"), found.get(f"{name}.high"))
            for name, value in found.items()
            if name not in bounds
        ]

    def training(self) -> dict[str, Any]:
        """Return the settings worth reading, as they were asked for, and what followed from them."""
        found = {name: self.settings[name] for name in SHOWN_SETTINGS if self.settings.get(name) is not None}
        followed = {"samples": "num_samples", "total steps": "total_steps", "total updates": "total_updates"}
        found |= {words: self.plan[name] for words, name in followed.items() if self.plan.get(name) is not None}
        return found | {"step of these weights": self.step}

    def data(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each dataset, by its use."""
        data = self.environment.get("data") or {}
        found = {"training": data.get("train") or {}}
        for name, one in (data.get("evaluation") or {}).items():
            found[f"evaluation {name}".strip()] = one
        return {use: one for use, one in found.items() if one}

    def base_model(self) -> str | None:
        """Return the repository that the first weights came from."""
        source = self.settings.get("init_weights_from")
        if not isinstance(source, str):
            return None
        from hezar_train.hub.addresses import names_hub_weights, parse_address

        return parse_address(source).repo_id if names_hub_weights(source) else None

    def _split(self, key: str, value: float) -> tuple[str, float, str]:
        """Return (metric, value, set) of a key, which begins with the set's name where there are several."""
        sets = (self.environment.get("data") or {}).get("evaluation") or {}
        for name in sorted(filter(None, sets), key=len, reverse=True):
            if key.startswith(f"{name}."):
                return key.removeprefix(f"{name}."), value, str(name)
        return key, value, ""


def _hours(paths: RunPaths, starts: list[float]) -> float | None:
    """Sum, over the starts, the time to the last row that was logged before the next one."""
    times: list[float] = []
    for folder in paths.log_folders():
        times += _row_times(folder / METRICS_FILE)
    if not times or not starts:
        return None
    total = 0.0
    for begun, following in zip(starts, [*starts[1:], math.inf], strict=True):
        during = [moment for moment in times if begun <= moment < following]
        total += max(during) - begun if during else 0.0
    return total / 3600


def _row_times(path: Path) -> list[float]:
    try:
        return [row.time for row in read_rows(path)]
    except DataError:
        return []

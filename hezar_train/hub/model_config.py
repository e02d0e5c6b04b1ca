"""The model's own config inside a checkpoint, so that a run's folder alone can become a repository others load from.

A model is asked for its config's `save_pretrained` (transformers) or `save` (hezar); one without either has none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MODEL_CONFIG_FOLDER", "model_config_writer"]

MODEL_CONFIG_FOLDER = "model_config"
HEZAR_CONFIG_FILE = "model_config.yaml"


def model_config_writer(model: Any) -> Callable[[Path], None] | None:
    """Return how to write a bare model's config into a folder; None for a model that has none to write."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        return lambda folder: _write_transformers(model, folder)
    if hasattr(config, "save"):
        return lambda folder: config.save(str(folder), filename=HEZAR_CONFIG_FILE)
    return None


def _write_transformers(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]  # as the library does; pipelines look for it
    config.save_pretrained(str(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(str(folder))

"""A copy of the trained model for others, apart from the run's checkpoints.

No pickle is written. A model's or dataset's config is written by its own `save_pretrained` or `save`, where it has one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hezar_train.checkpoint import CONFIG_FILE, STATE_FILE, Parts, unwrap
from hezar_train.checkpoint.disk import replace_file
from hezar_train.checkpoint.tensors import tensor_file
from hezar_train.config.files import write_atomically
from hezar_train.trainer.saving import Snapshot

__all__ = ["MODEL_CONFIG_FILE", "ExportNames", "export", "save_own_config"]

MODEL_CONFIG_FILE = "model_config.yaml"


@dataclass(frozen=True)
class ExportNames:
    """File names of an export; the trainer's own files lie in `subfolder`."""

    config: str
    model: str
    model_config: str
    subfolder: str
    dataset_config: str
    optimizer: str
    lr_scheduler: str
    state: str


def export(path: Path, snapshot: Snapshot, parts: Parts, dataset: Any, names: ExportNames) -> None:
    """Write weights, model config and preprocessor to `path`, the trainer's files to its subfolder.

    `parts` are the snapshot's, whole.
    """
    below = path / names.subfolder
    below.mkdir(parents=True, exist_ok=True)
    _write_tensors(path / names.model, parts.model)
    _write_tensors(below / names.optimizer, parts.optimizer)
    write_atomically(below / names.state, parts.files[STATE_FILE])
    write_atomically(below / names.config, parts.files[CONFIG_FILE])
    if snapshot.schedule.scheduler is not None:
        write_atomically(below / names.lr_scheduler, json.dumps(snapshot.schedule.state_dict(), indent=1) + "\n")
    _save_own(getattr(unwrap(snapshot.model), "config", None), path, names.model_config)
    _save_own(getattr(dataset, "config", None), below, names.dataset_config)
    if snapshot.write_preprocessor is not None:
        snapshot.write_preprocessor(path)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    replace_file(path, tensor_file(tensors))


def _save_own(config: Any, folder: Path, filename: str) -> None:
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(str(folder))
    elif hasattr(config, "save"):
        config.save(str(folder), filename=filename)


def save_own_config(dataset: Any, folder: Path, filename: str) -> None:
    """Write the config of a dataset that has one into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_own(getattr(dataset, "config", None), folder, filename)

"""The trained model for others: as files in a folder, on the Hub, or as parameters that travel between trainers.

An export is a copy apart from the run's checkpoints. No pickle is written. A model's or dataset's config is written by
its own `save_pretrained` or `save`, where it has one. Parameters that come in are tensors, lists and numbers; a text is
refused: it would have to be unpickled.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import (
    CONFIG_FILE,
    MODEL_FILE,
    STATE_FILE,
    has_adapters,
    merged_copy,
    module_state,
    share_of,
    unwrap,
    whole,
)
from hezar_train.checkpoint.format import tensor_file
from hezar_train.checkpoint.manifest import replace_file
from hezar_train.checkpoint.split_files import hub_tensors, most_bytes, write_split_tensors
from hezar_train.config import TrainerConfig
from hezar_train.config.files import write_atomically
from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.hub import PushNames, PushOutcome, model_config_writer, push_run, refuse_model_name
from hezar_train.optim import Schedule
from hezar_train.runtime import Processes
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.checkpointing import Checkpointing, write_weights

__all__ = [
    "ExportNames",
    "exchanged_names",
    "export",
    "export_merged",
    "give_parameters",
    "push",
    "refuse_hezar_format",
    "save_own_config",
    "shared_names",
    "take_parameters",
]

NO_PLACE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR),
}


def shared_names(model: nn.Module, local_parts: Iterable[str] | None, *, with_untrained: bool) -> list[str]:
    """Return the names that are exchanged: all but those that have a local part, and what is not trained."""
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    parts = list(local_parts or ())
    return [
        name
        for name in model.state_dict()
        if (with_untrained or name in trained) and not any(part in name for part in parts)
    ]


def exchanged_names(model: nn.Module, config: TrainerConfig) -> list[str]:
    """Return the names of the parameters that a config lets travel."""
    return shared_names(model, config.local_param, with_untrained=config.share_non_trainable_para)


def give_parameters(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return independent copies on the CPU: training on does not change them."""
    state = model.state_dict()
    return {name: whole(state[name]).detach().to("cpu", copy=True) for name in names}


def take_parameters(model: nn.Module, given: Mapping[str, Any], names: Iterable[str], *, strict: bool) -> None:
    """Copy values into the model, those of the names that are exchanged; the caller's dict is left as it is."""
    if not isinstance(given, Mapping):
        raise DataError(f"parameters are a {type(given).__name__}; expected a dict of values by name")
    state, wanted = model.state_dict(), set(names)
    if unknown := [name for name in given if name not in state]:
        raise DataError(
            f"the model has no parameter {choices(unknown)}.{suggestion(unknown[0], state)} Nothing was changed."
        )
    if strict and (missing := [name for name in wanted if name not in given]):
        raise DataError(f"strict=True, but there is no value for: {choices(missing)}. Nothing was changed.")
    values = {name: _as_tensor(name, value, state[name]) for name, value in given.items() if name in wanted}
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(share_of(state[name], value))


def _as_tensor(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(value, str | bytes):
        raise DataError(f"{name!r} is given as text; expected a tensor, a list or a number (texts are never unpickled)")
    try:
        tensor = torch.as_tensor(value, dtype=like.dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name!r} is a {type(value).__name__} that makes no tensor: {error}") from error
    if tensor.shape != like.shape:
        raise DataError(f"{name!r} has the shape {tuple(tensor.shape)}; expected {tuple(like.shape)}")
    return tensor


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


def export(
    path: Path, model: nn.Module, checkpointing: Checkpointing, schedule: Schedule, dataset: Any, names: ExportNames,
    processes: Processes, *, hezar_format: bool = False, max_shard_size: int | str | None = None,
) -> None:  # fmt: skip
    """Write weights, model config and preprocessor to `path`, the trainer's files to its subfolder.

    Where only what is trained is saved, the weights are that, and adapters are files that peft loads. All processes
    call this together; the main one writes.
    """
    if hezar_format:
        refuse_hezar_format(model)
    if max_shard_size is not None:
        most_bytes(max_shard_size)
    parts = checkpointing.gather_whole()
    if parts.part is not None:
        refuse_model_name(names.model)
        if max_shard_size is not None:
            raise ConfigError(
                f"max_shard_size={max_shard_size!r}, but this run saves only what is trained, which is one file. Leave "
                "it out, or save the whole model with merge=True."
            )

    @_writing_to(path)
    def write() -> None:
        below = path / names.subfolder
        below.mkdir(parents=True, exist_ok=True)
        write_weights(path, parts, names.model, model, max_shard_size)
        replace_file(below / names.optimizer, tensor_file(parts.optimizer))
        write_atomically(below / names.state, parts.files[STATE_FILE])
        write_atomically(below / names.config, parts.files[CONFIG_FILE])
        if schedule.scheduler is not None:
            write_atomically(below / names.lr_scheduler, json.dumps(schedule.state_dict(), indent=1) + "\n")
        _save_model_config(unwrap(model), path, names.model_config)
        _save_own(getattr(dataset, "config", None), below, names.dataset_config)
        checkpointing.write_preprocessor(path)
        if hezar_format:
            unwrap(model).save(str(path))  # type: ignore[operator]

    processes.on_main(write)


def export_merged(
    path: Path, model: nn.Module, checkpointing: Checkpointing, names: ExportNames, processes: Processes,
    max_shard_size: int | str | None = None,
) -> None:  # fmt: skip
    """Write the whole model, with its adapters merged into its weights, its config and the preprocessor to `path`.

    The trainer's model stays as it is: a copy is merged. All processes call this together; the main one writes.
    """
    if is_sharded(model):
        raise ConfigError(
            "merge=True, but each process has a share of the model, and none can merge it. Save without it, and merge "
            "the run on one process: hezar-train export RUN FOLDER --merge."
        )

    most = None if max_shard_size is None else most_bytes(max_shard_size)

    @_writing_to(path)
    def write() -> None:
        path.mkdir(parents=True, exist_ok=True)
        merged: Any = merged_copy(model) if has_adapters(model) else unwrap(model)
        if merged is not unwrap(model) and hasattr(merged, "save_pretrained") and names.model == MODEL_FILE:
            limit = {} if most is None else {"max_shard_size": most}
            merged.save_pretrained(str(path), **limit)  # its library knows how it calls its tensors in files
        else:
            if most is None:
                replace_file(path / names.model, tensor_file(module_state(merged)[0]))
            else:
                write_split_tensors(path, hub_tensors(merged, module_state(merged)[0]), most, names.model)
            _save_own(getattr(merged, "config", None), path, names.model_config)
        checkpointing.write_preprocessor(path)

    processes.on_main(write)


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Refuse a folder that cannot be made or written to; all other errors pass, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or "")
        if error.errno not in NO_PLACE or not (place.is_relative_to(folder) or place in folder.parents):
            raise
        raise ConfigError(
            f"{folder} cannot be written to: {error.strerror}. Expected a folder, or a place where one can be made. "
            "Name another: save(FOLDER)"
        ) from error


def _save_model_config(model: nn.Module, path: Path, filename: str) -> None:
    write = model_config_writer(model) if has_adapters(model) else None
    if write is not None:
        write(path)
    else:
        _save_own(getattr(model, "config", None), path, filename)


def push(
    run_folder: Path, model: nn.Module, dataset: Any, dataset_config: str, names: PushNames, *, repo_id: str | None,
    commit_message: str | None, private: bool | None, hezar_format: bool,
) -> PushOutcome:  # fmt: skip
    """Push the newest checkpoint of a run with everything that belongs to it in one commit, and wait for it."""
    if hezar_format:
        refuse_hezar_format(model)
    with TemporaryDirectory() as extra:
        save_own_config(dataset, Path(extra) / names.subfolder, dataset_config)
        if hezar_format:
            unwrap(model).save(extra)  # type: ignore[operator]
        return push_run(
            run_folder, repo_id, commit_message=commit_message, private=private, names=names, extra_folder=Path(extra)
        )


def refuse_hezar_format(model: nn.Module) -> None:
    """Raise unless a model writes itself as hezar's do, in this process alone."""
    bare = unwrap(model)
    if has_adapters(model):
        raise ConfigError(
            "hezar_format=True, but the model has adapters of peft, which hezar's save() does not know. Save with "
            "merge=True, load that into a hezar model with init_weights_from, and save it."
        )
    saves = callable(getattr(bare, "save", None)) and callable(getattr(getattr(bare, "config", None), "save", None))
    if not saves or getattr(bare, "model_filename", None) is None:
        raise ConfigError(
            f"hezar_format=True, but {type(bare).__name__} is no model of hezar: expected one with its save() and "
            "config. Leave hezar_format out; the export is safetensors, which any library reads."
        )
    if is_sharded(model):
        raise ConfigError(
            "hezar_format=True, but the model is sharded, and hezar's save() would write one process's share. Save "
            "without it, load the export into a hezar model with init_weights_from, and save that."
        )


def _save_own(config: Any, folder: Path, filename: str) -> None:
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(str(folder))
    elif hasattr(config, "save"):
        config.save(str(folder), filename=filename)


def save_own_config(dataset: Any, folder: Path, filename: str) -> None:
    """Write the config of a dataset that has one into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_own(getattr(dataset, "config", None), folder, filename)

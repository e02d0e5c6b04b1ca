"""From a checked recipe to a trainer, which keeps a record of it; and how a restarted process goes on."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hezar_train.config import TrainerConfig, read_mapping, write_mapping
from hezar_train.errors import ConfigError
from hezar_train.launch.hashing import changed_parts
from hezar_train.launch.recipe import LoadedRecipe, Recipe
from hezar_train.launch.record import RECORD_FILE

if TYPE_CHECKING:
    from hezar_train.loop import Hook
    from hezar_train.trainer import Trainer

__all__ = ["build_recipe", "build_trainer", "import_recipe", "resumed", "saved_checkpoints"]


def build_trainer(loaded: LoadedRecipe) -> Trainer:
    """Seed, build the model and the data, and return the trainer, which is at its checkpoint if it resumes."""
    if loaded.config.resume_from_checkpoint:
        _compare_with_record(loaded)
    built, _ = build_recipe(loaded)
    trainer = built.make_trainer(loaded.config)
    trainer.register_hooks([_record_keeper(loaded)])
    return trainer


def build_recipe(loaded: LoadedRecipe) -> tuple[Recipe, ModuleType]:
    """Seed everything and call the recipe's `build`; return what it built, and the recipe's module."""
    from hezar_train.data import seed_python_numpy_torch
    from hezar_train.runtime import use_threads

    use_threads(loaded.config.num_threads)  # what build() computes may depend on their number
    seed_python_numpy_torch(loaded.config.seed)  # the model's first weights are then a function of the seed, too
    module = import_recipe(loaded.source)
    built = module.build(**loaded.options)
    if not isinstance(built, Recipe):
        raise ConfigError(f"{loaded.source}: build() returned a {type(built).__name__}; expected a hezar_train.Recipe")
    return built, module


def import_recipe(source: Path) -> ModuleType:
    """Run a recipe's source as a module of its own name."""
    name = f"hezar_train_recipe_{source.resolve().parent.name}"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{source}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers and dataclasses look classes up by their module
    spec.loader.exec_module(module)
    return module


def saved_checkpoints(config: TrainerConfig) -> str:
    """Return a short text that changes whenever the checkpoints in a run's folder do."""
    folder = Path(config.output_dir) / config.checkpoints_dir
    found = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("[0-9]*"))
    return hashlib.sha256(repr(found).encode()).hexdigest() if found else ""


def resumed(loaded: LoadedRecipe, saved_before: str) -> LoadedRecipe:
    """Let a recipe go on from the newest checkpoint, if one was saved since `saved_before`; else start as it says.

    A run that died before it saved anything must begin as it was asked to: in its folder there may be the checkpoints
    of an earlier run, and `resume_from_checkpoint` may name one elsewhere.
    """
    saved = saved_checkpoints(loaded.config)
    if saved in {"", saved_before}:
        return loaded
    return replace(loaded, config=replace(loaded.config, resume_from_checkpoint=True))


def _compare_with_record(loaded: LoadedRecipe) -> None:
    """Refuse to go on with other options than the run was started with; tell of a changed recipe."""
    from hezar_train.checkpoint import CheckpointStore
    from hezar_train.runtime import logger

    path = Path(loaded.config.output_dir) / RECORD_FILE
    if not path.exists() or not CheckpointStore(path.parent / loaded.config.checkpoints_dir).steps():
        return  # killed before it had saved anything: the run starts from the beginning
    before, options = read_mapping(path), json.loads(json.dumps(loaded.options))
    if changed := changed_parts(before, loaded.folder):
        words = "%s has changed since this run began (%s): the run may not go on exactly"
        logger.warning(words, loaded.folder, ", ".join(changed))
    changes = list(_option_changes(before.get("options") or {}, options))
    if changes and not loaded.config.accept_changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{path.parent} cannot be resumed exactly, because something changed:\n{listed}\n"
            "Put it back; or begin another run, in another output_dir; or go on all the same with accept_changes=True."
        )


def _option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        old, new = (repr(values[name]) if name in values else "not given" for values in (before, now))
        if old != new:
            yield f"recipe.{name}: {old} when the run began, {new} now"


def _record_keeper(loaded: LoadedRecipe) -> Hook:
    """Return a hook that writes the record once the run's folder is locked and its own."""
    from hezar_train.loop import Hook

    class RecipeRecord(Hook):
        def before_train(self) -> None:
            if self.trainer.runtime.is_main:
                write_mapping(Path(loaded.config.output_dir) / RECORD_FILE, loaded.record())

    return RecipeRecord()

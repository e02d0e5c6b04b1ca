"""From a recipe to a trainer: find the folder, read its config, apply overrides, build.

A recipe is a folder with `recipe.py`, which defines `build(**options) -> Recipe` and never a loop, and `config.yaml`
with two sections: `recipe:` (the options of `build`) and `trainer:` (a `TrainerConfig`). This module owns the format,
the search for a name and the record that a run keeps of its recipe. It refuses to run anything before every mistake in
the config and the options is known: `build`'s options are read from its source, so that a check needs no torch.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hezar_train.config import TrainerConfig, read_mapping, write_mapping
from hezar_train.config.files import parse_yaml
from hezar_train.errors import ConfigError, choices, suggestion

if TYPE_CHECKING:
    from torch import nn

    from hezar_train.loop import Hook
    from hezar_train.metrics import MetricsHandler
    from hezar_train.trainer import Trainer

__all__ = [
    "CONFIG_NAME",
    "RECIPE_NAME",
    "RECORD_FILE",
    "LoadedRecipe",
    "Recipe",
    "build_trainer",
    "check_file",
    "load_recipe",
    "recipe_names",
    "resumed",
    "saved_checkpoints",
]

RECIPE_NAME = "recipe.py"
CONFIG_NAME = "config.yaml"
RECORD_FILE = "recipe.json"
SECTIONS = ("recipe", "trainer")
OPTION_PREFIX = "recipe."
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass
class Recipe:
    """What a recipe's `build` returns: all that a trainer needs besides its config."""

    model: nn.Module
    train_dataset: Any
    eval_dataset: Any = None
    data_collator: Any = None
    preprocessor: Any = None
    metrics_handler: MetricsHandler | None = None


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe whose config and options have been checked, not yet built."""

    config_file: Path
    config: TrainerConfig
    options: dict[str, Any]

    @property
    def source(self) -> Path:
        """Where `build` is defined."""
        return self.config_file.parent / RECIPE_NAME

    def record(self) -> dict[str, Any]:
        """Return what a run keeps of its recipe."""
        return {
            "path": str(self.config_file.parent),
            "config": self.config_file.name,
            "sha256": hashlib.sha256(self.source.read_bytes()).hexdigest(),
            "options": self.options,
        }


def load_recipe(path_or_name: str | Path, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Find a recipe by name, folder or config file, and check its config with the overrides; nothing is built."""
    config_file = _find(str(path_or_name))
    fields, options = _sections(config_file)
    for key, value in map(_override, overrides):
        if key.startswith(OPTION_PREFIX):
            options[key.removeprefix(OPTION_PREFIX)] = value
        else:
            fields[key] = value
    return _checked(config_file, fields, options)


def check_file(path: str | Path) -> TrainerConfig:
    """Read a config file, plain or with a recipe's sections, and return its config; raise with every problem."""
    source = Path(path)
    if not source.exists():
        raise ConfigError(f"{source}: there is no such file")
    if not set(SECTIONS) & read_mapping(source).keys():
        return TrainerConfig.load(source)
    return _checked(source, *_sections(source)).config


def build_trainer(loaded: LoadedRecipe) -> Trainer:
    """Seed, build the model and the data, and return the trainer, which is at its checkpoint if it resumes."""
    from hezar_train.data import seed_python_numpy_torch
    from hezar_train.trainer import Trainer

    if loaded.config.resume_from_checkpoint:
        _compare_with_record(loaded)
    seed_python_numpy_torch(loaded.config.seed)  # the model's first weights are then a function of the seed, too
    built = _import(loaded.source).build(**loaded.options)
    if not isinstance(built, Recipe):
        raise ConfigError(f"{loaded.source}: build() returned a {type(built).__name__}; expected a hezar_train.Recipe")
    trainer = Trainer(loaded.config, **vars(built))
    trainer.register_hooks([_record_keeper(loaded)])
    return trainer


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


def recipe_names() -> list[str]:
    """List the recipes that can be started by name."""
    found = {path.parent.name for root in _roots() for path in root.glob(f"*/{RECIPE_NAME}")}
    return sorted(found)


def _roots() -> list[Path]:
    """Return the folders in which names are looked up: the user's own, the wheel's, the source tree's."""
    package = Path(__file__).parent
    shipped = package / "_recipes"
    roots = [Path("recipes"), shipped if shipped.is_dir() else package.parent / "recipes"]
    return [root for root in roots if root.is_dir()]


def _find(given: str) -> Path:
    """Return the config file that a name, a folder or a path means."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES and path.is_file():
        return _beside_a_recipe(path)
    candidates = [path, *(root / given for root in _roots())] if given else []
    for folder in candidates:
        if (folder / RECIPE_NAME).is_file():
            if not (folder / CONFIG_NAME).is_file():
                raise ConfigError(f"the recipe {folder} has no {CONFIG_NAME}. Name another config file of it instead.")
            return folder / CONFIG_NAME
    names = recipe_names()
    raise ConfigError(
        f"there is no recipe {given!r}. Recipes found: {choices(names) or 'none'}.{suggestion(given, names)} "
        f"A recipe may also be a folder with {RECIPE_NAME} and {CONFIG_NAME}, or a config file in such a folder."
    )


def _beside_a_recipe(config_file: Path) -> Path:
    if not (config_file.parent / RECIPE_NAME).is_file():
        raise ConfigError(
            f"{config_file} has no {RECIPE_NAME} beside it, which would say what to train. Put the file into a "
            "recipe's folder, or start from Python: Trainer(TrainerConfig.load(file), model, train_dataset).train()."
        )
    return config_file


def _sections(config_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trainer's fields and the recipe's options of a config file."""
    content = read_mapping(config_file)
    problems = [
        f"{name!r} is not a section: expected {' and '.join(SECTIONS)}.{suggestion(name, SECTIONS)}"
        for name in content
        if name not in SECTIONS
    ]
    for name in SECTIONS:
        if not isinstance(content.get(name) or {}, dict):
            problems.append(f"the section {name!r} is a {type(content[name]).__name__}; expected names and values")
    if problems:
        raise ConfigError([f"{config_file}: {problem}" for problem in problems])
    return dict(content.get("trainer") or {}), dict(content.get("recipe") or {})


def _override(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: expected key=value, such as batch_size=16")
    try:
        return key, parse_yaml(value, Path(key))
    except ConfigError as error:
        raise ConfigError(f"the value of {text!r} cannot be read as YAML ({error}). Quote it: {key}='...'") from error


def _checked(config_file: Path, fields: Mapping[str, Any], options: dict[str, Any]) -> LoadedRecipe:
    """Build the config; report its problems and those of the options in one error."""
    problems = list(_option_problems(config_file.parent / RECIPE_NAME, options))
    try:
        config = TrainerConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return LoadedRecipe(config_file, config, options)


def _option_problems(source: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """Tell of options that `build` does not take, and of those that it needs."""
    if not source.is_file():
        return  # a config on its own way somewhere: its options are checked where the recipe is
    arguments = _build_arguments(source)
    known = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
    for name in options:
        if name not in known and arguments.kwarg is None:
            yield (
                f"recipe.{name} is not an option of this recipe. Its build() takes: {choices(known) or 'none'}."
                f"{suggestion(name, known)}"
            )
    for name in _needed(arguments):
        if name not in options:
            yield f"recipe.{name} is missing: the recipe's build() has no default for it"


def _build_arguments(source: Path) -> ast.arguments:
    """Read the arguments of `build` from the source, which is not run."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read as Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "build":
            return node.args
    raise ConfigError(f"{source}: expected a function build(**options) that returns a hezar_train.Recipe")


def _needed(arguments: ast.arguments) -> list[str]:
    num_without_default = len(arguments.args) - len(arguments.defaults)
    by_keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [
        *(each.arg for each in arguments.args[:num_without_default]),
        *(each.arg for each, default in by_keyword if default is None),
    ]


def _import(source: Path) -> ModuleType:
    """Run a recipe's source as a module of its own name."""
    name = f"hezar_train_recipe_{source.resolve().parent.name}"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{source}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers and dataclasses look classes up by their module
    spec.loader.exec_module(module)
    return module


def _compare_with_record(loaded: LoadedRecipe) -> None:
    """Refuse to go on with other options than the run was started with; tell of a changed recipe."""
    from hezar_train.checkpoint import CheckpointStore
    from hezar_train.runtime import logger

    path = Path(loaded.config.output_dir) / RECORD_FILE
    if not path.exists() or not CheckpointStore(path.parent / loaded.config.checkpoints_dir).steps():
        return  # killed before it had saved anything: the run starts from the beginning
    before, now = read_mapping(path), json.loads(json.dumps(loaded.record()))
    if before.get("sha256") != now["sha256"]:
        logger.warning("%s has changed since this run began: the run may not go on exactly", loaded.source)
    changes = list(_option_changes(before.get("options") or {}, now["options"]))
    if changes and not loaded.config.accept_changes:
        listed = "\n".join(f"  {change}" for change in changes)
        raise ConfigError(
            f"{path.parent} cannot be resumed exactly, because something changed:\n{listed}\n"
            "Put it back, or set accept_changes=True to go on all the same."
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

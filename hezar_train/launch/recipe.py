"""The format of a recipe: what `build` returns, what its config file holds, how overrides change it.

Everything that is wrong with the config and the options is told in one error. `build` is read, never run, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.config import TrainerConfig, read_mapping
from hezar_train.config.files import parse_yaml
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.launch.finding import CONFIG_NAME, RECIPE_NAME, find_config
from hezar_train.launch.hashing import hash_of_parts, parts_of
from hezar_train.launch.options import option_problems

if TYPE_CHECKING:
    from torch import nn

    from hezar_train.metrics import MetricsHandler
    from hezar_train.trainer import Trainer

__all__ = ["SECTIONS", "LoadedRecipe", "Recipe", "check_file", "checked", "load_recipe", "overridden", "read_sections"]

SECTIONS = ("recipe", "trainer")
OPTION_PREFIX = "recipe."


@dataclass
class Recipe:
    """What a recipe's `build` returns: all that a trainer needs besides its config."""

    model: nn.Module | Mapping[str, nn.Module]
    """One model; or several by name, for a trainer of several."""
    train_dataset: Any
    eval_dataset: Any = None
    data_collator: Any = None
    preprocessor: Any = None
    metrics_handler: MetricsHandler | None = None
    trainer_class: Callable[..., Trainer] | None = None
    """A trainer of the recipe's own, such as a MultiModelTrainer; it is called as a Trainer is."""

    def make_trainer(self, config: TrainerConfig) -> Trainer:
        """Pass everything to the recipe's own trainer, or to the plain one."""
        from hezar_train.trainer import Trainer

        if self.trainer_class is None and isinstance(self.model, Mapping):
            raise ConfigError(
                f"there are several models ({choices(map(str, self.model))}), and the plain trainer trains one. Say "
                "what trains them: Recipe(..., trainer_class=...), a subclass of MultiModelTrainer."
            )
        make: Callable[..., Trainer] = self.trainer_class or Trainer
        trainer = make(
            config, self.model, self.train_dataset, self.eval_dataset, data_collator=self.data_collator,
            preprocessor=self.preprocessor, metrics_handler=self.metrics_handler,
        )  # fmt: skip
        if not isinstance(trainer, Trainer):
            raise ConfigError(f"trainer_class made a {type(trainer).__name__}; expected a hezar_train.Trainer")
        return trainer


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe whose config and options have been checked, not yet built."""

    folder: Path
    config: TrainerConfig
    options: dict[str, Any]
    config_name: str = CONFIG_NAME
    """The file in the folder that it was started with."""

    @property
    def source(self) -> Path:
        """Where `build` is defined."""
        return self.folder / RECIPE_NAME

    def record(self) -> dict[str, Any]:
        """Return what a run keeps of its recipe."""
        parts = parts_of(self.folder)
        return {
            "path": str(self.folder),
            "config": self.config_name,
            "sha256": hash_of_parts(parts),
            "parts": parts,
            "options": self.options,
        }


def load_recipe(path_or_name: str | Path, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Find a recipe by name, folder or config file, and check its config with the overrides; nothing is built."""
    config_file = find_config(str(path_or_name))
    return checked(config_file.parent, *overridden(*read_sections(config_file), overrides), config_file.name)


def check_file(path: str | Path, overrides: Iterable[str] = ()) -> TrainerConfig:
    """Read a config file, plain or with a recipe's sections, and return its config; raise with every problem."""
    source = Path(path)
    fields, options = overridden(*read_sections(source), overrides)
    return checked(source.parent, fields, options, source.name).config


def read_sections(config_file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trainer's fields and the recipe's options of a config file; a plain one has no options."""
    if not config_file.exists():
        raise ConfigError(f"{config_file}: there is no such file")
    content = read_mapping(config_file)
    if not set(SECTIONS) & content.keys() and not (config_file.parent / RECIPE_NAME).is_file():
        return content, {}
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


def overridden(
    fields: dict[str, Any], options: dict[str, Any], overrides: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields and options with each `key=value` in its place; `recipe.key` is an option's."""
    fields, options = dict(fields), dict(options)
    for key, value in map(_override, overrides):
        if key.startswith(OPTION_PREFIX):
            options[key.removeprefix(OPTION_PREFIX)] = value
        else:
            fields[key] = value
    return fields, options


def checked(
    folder: Path, fields: Mapping[str, Any], options: dict[str, Any], config_name: str = CONFIG_NAME
) -> LoadedRecipe:
    """Build the config; report its problems and those of the options in one error."""
    problems = list(option_problems(folder / RECIPE_NAME, options))
    try:
        config = TrainerConfig.from_dict(fields)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return LoadedRecipe(folder, config, options, config_name)


def _override(text: str) -> tuple[str, Any]:
    """Split `key=value`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: expected key=value, such as batch_size=16")
    try:
        return key, parse_yaml(value, Path(key))
    except ConfigError as error:
        raise ConfigError(f"the value of {text!r} cannot be read as YAML ({error}). Quote it: {key}='...'") from error

"""The way back from a run's folder: its config, and its recipe by the record that it keeps.

`recipe.json` has the recipe's path as it was given, the hash of its source and the options. The recipe is looked for
there, seen from where the user is and from the folders around the run, then by its name; of several, the one with the
right hash is taken. A run that was moved, or is named from elsewhere, is still itself: its `output_dir` is where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hezar_train.config import CONFIG_FILE, TrainerConfig, read_mapping
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.launch.finding import (
    CONFIG_NAME,
    CONFIG_SUFFIXES,
    RECIPE_NAME,
    find_folder,
    hash_of,
    list_recipe_folders,
    recipe_folders,
    recipe_names,
)
from hezar_train.launch.recipe import LoadedRecipe, checked, load_recipe, overridden, read_sections

__all__ = [
    "RECORD_FILE",
    "load_any",
    "load_run",
    "load_target",
    "read_record",
    "recipe_of_hash",
    "refuse_changed_recipe",
    "run_config",
]

RECORD_FILE = "recipe.json"


def run_config(run: str | Path) -> TrainerConfig:
    """Read the config of a run; its `output_dir` is the folder given."""
    return TrainerConfig.from_dict(_run_fields(Path(run)))


def load_run(run: str | Path, overrides: Iterable[str] = (), recipe: str | None = None) -> LoadedRecipe:
    """Return what a run was started with, from its folder alone, with overrides; `recipe` says where its recipe is."""
    folder = Path(run)
    fields, record = _run_fields(folder), read_record(folder)
    home = _home_of(folder, record) if recipe is None else find_folder(recipe)
    fields, options = overridden(fields, record.get("options") or {}, overrides)
    return checked(home, fields, options, str(record.get("config") or CONFIG_NAME))


def recipe_of_hash(
    sha256: str,
    fields: Mapping[str, Any],
    options: Mapping[str, Any],
    overrides: Iterable[str] = (),
    recipe: str | None = None,
) -> LoadedRecipe:
    """Return the recipe on this machine whose source has a hash, with the config and the options given."""
    folders = list_recipe_folders() if recipe is None else [find_folder(recipe)]
    home = next((folder for folder in folders if hash_of(folder) == sha256), None)
    if home is None:
        raise ConfigError(
            f"no recipe on this machine has the SHA-256 {sha256}. Recipes: {choices(recipe_names()) or 'none'}. "
            "Install the version of this package that the card names, or put the recipe's folder below ./recipes/."
        )
    return checked(home, *overridden(dict(fields), dict(options), overrides))


def load_target(given: str, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Load what can be trained: a recipe, or the config of a run that came from one."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES and (path.parent / RECORD_FILE).is_file():
        return load_run(path.parent, overrides)
    if _is_run(path) and not (path / RECIPE_NAME).is_file():
        raise ConfigError(f"{given} is a run, not a recipe. To go on with it: hezar-train resume {given}")
    return load_recipe(given, overrides)


def load_any(given: str, overrides: Iterable[str] = ()) -> LoadedRecipe:
    """Return config and options of a config file, plain or with sections, of a recipe or of a run, to look at them."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES or path.is_file():
        return checked(path.parent, *overridden(*read_sections(path), overrides), path.name)
    if not _is_run(path):
        return load_recipe(given, overrides)
    record = read_mapping(path / RECORD_FILE) if (path / RECORD_FILE).is_file() else {}
    return checked(path, *overridden(_run_fields(path), record.get("options") or {}, overrides), CONFIG_FILE)


def read_record(run: Path) -> dict[str, Any]:
    """Return what a run keeps of its recipe; one that has none was started by a script of the user's own."""
    path = run / RECORD_FILE
    if not path.is_file():
        raise ConfigError(
            f"{run} was not started from a recipe: it has no {RECORD_FILE}. Its own script goes on with it, with "
            "resume_from_checkpoint=True."
        )
    return read_mapping(path)


def refuse_changed_recipe(loaded: LoadedRecipe) -> None:
    """Raise if the recipe is not the one that the run was started with, unless changes are accepted."""
    record = read_record(Path(loaded.config.output_dir))
    if record.get("sha256") != hash_of(loaded.folder) and not loaded.config.accept_changes:
        raise ConfigError(
            f"{loaded.source} has changed since this run began, so the run would not go on exactly. Put the file back, "
            "name a folder that has it as it was (--recipe FOLDER), or go on all the same: accept_changes=true."
        )


def _run_fields(run: Path) -> dict[str, Any]:
    if not _is_run(run):
        siblings = [path.name for path in run.parent.glob("*") if _is_run(path)]
        raise ConfigError(
            f"{run} is not the folder of a run: it has no {CONFIG_FILE}.{suggestion(run.name, siblings)} "
            "`hezar-train runs` lists those in ./runs."
        )
    # Whether changes were accepted is a decision of that start, not of the next one.
    return {**read_mapping(run / CONFIG_FILE), "output_dir": str(run), "accept_changes": False}


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def _home_of(run: Path, record: dict[str, Any]) -> Path:
    """Return the folder of a run's recipe: with the right hash if there is one, else the first that is there."""
    found = [folder for folder in _possible_homes(run, str(record.get("path", ""))) if (folder / RECIPE_NAME).is_file()]
    for folder in found:
        if hash_of(folder) == record.get("sha256"):
            return folder
    if not found:
        raise ConfigError(
            f"the recipe of {run} was {record.get('path')}, and is not there any more. Say where it is: --recipe FOLDER"
        )
    return found[0]


def _possible_homes(run: Path, path: str) -> Iterator[Path]:
    yield Path(path)
    if not Path(path).is_absolute():
        yield from (ancestor / path for ancestor in run.resolve().parents)
    if (name := Path(path).name) in (known := recipe_folders()):
        yield known[name]

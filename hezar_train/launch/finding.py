"""Where recipes lie: by name, by folder, by config file. Nothing of a recipe is run or imported here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hezar_train.errors import ConfigError, choices, suggestion

__all__ = [
    "CONFIG_NAME",
    "CONFIG_SUFFIXES",
    "OWN_RECIPES",
    "RECIPE_NAME",
    "copy_recipe",
    "find_config",
    "find_folder",
    "list_recipe_folders",
    "recipe_folders",
    "recipe_names",
]

RECIPE_NAME = "recipe.py"
CONFIG_NAME = "config.yaml"
CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
OWN_RECIPES = Path("recipes")


def recipe_names() -> list[str]:
    """List the recipes that can be started by name."""
    return sorted(recipe_folders())


def recipe_folders() -> dict[str, Path]:
    """Return the folder of each name, in the order of names."""
    found = {folder.name: folder for folder in reversed(list_recipe_folders())}
    return dict(sorted(found.items()))


def list_recipe_folders() -> list[Path]:
    """Return the folders of all recipes, the user's own first; one name may be there twice."""
    return [path.parent for root in _roots() for path in sorted(root.glob(f"*/{RECIPE_NAME}"))]


def find_config(given: str) -> Path:
    """Return the config file that a name, a folder or a path means."""
    path = Path(given)
    if path.suffix.lower() in CONFIG_SUFFIXES and path.is_file():
        return _beside_a_recipe(path)
    folder = find_folder(given)
    if not (folder / CONFIG_NAME).is_file():
        raise ConfigError(f"the recipe {folder} has no {CONFIG_NAME}. Name another config file of it instead.")
    return folder / CONFIG_NAME


def find_folder(given: str) -> Path:
    """Return the folder of a recipe, by its path or its name."""
    for folder in [Path(given), *(root / given for root in _roots())] if given else []:
        if (folder / RECIPE_NAME).is_file():
            return folder
    if Path(given).suffix.lower() in CONFIG_SUFFIXES and not Path(given).exists():
        raise _no_such_file(Path(given))
    names = recipe_names()
    raise ConfigError(
        f"there is no recipe {given!r}.{suggestion(given, names)} Recipes found: {choices(names) or 'none'}. "
        f"A recipe may also be a folder with {RECIPE_NAME} and {CONFIG_NAME}, or a config file in such a folder."
    )


def copy_recipe(name: str, target: Path | None = None) -> Path:
    """Copy a recipe to a folder, else to where names are looked up first; what is there already is not touched."""
    source = find_folder(name)
    target = OWN_RECIPES / source.name if target is None else target
    if target.exists():
        raise ConfigError(
            f"{target} is there already. Name another folder for the copy: hezar-train recipes copy {name} "
            f"{OWN_RECIPES / f'my_{source.name}'}"
        )
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    if target.name != source.name:
        for config in target.glob("*.yaml"):
            _rename(config, source.name, target)
    return target


def _rename(config: Path, before: str, target: Path) -> None:
    """Give a copied config its own folder for runs, and its own command: those of the original are another model's."""
    text = config.read_text(encoding="utf-8")
    text = re.sub(rf"(output_dir: *\S*?){re.escape(before)}\b", rf"\g<1>{target.name}", text)
    for command in (f"hezar-train train {before}", f"hezar-train train recipes/{before}"):
        text = re.sub(rf"{re.escape(command)}\b", f"hezar-train train {target.as_posix()}", text)
    config.write_text(text, encoding="utf-8")


def _roots() -> list[Path]:
    """Return the folders in which names are looked up: the user's own, the wheel's, the source tree's."""
    package = Path(__file__).parents[1]
    shipped = package / "_recipes"
    roots = [OWN_RECIPES, shipped if shipped.is_dir() else package.parent / "recipes"]
    return [root for root in roots if root.is_dir()]


def _no_such_file(path: Path) -> ConfigError:
    others = [other.name for other in path.parent.glob("*") if other.suffix.lower() in CONFIG_SUFFIXES]
    return ConfigError(
        f"{path}: there is no such file.{suggestion(path.name, others)} Name a config file in a recipe's folder, or a "
        "recipe: `hezar-train recipes list`."
    )


def _beside_a_recipe(config_file: Path) -> Path:
    if not (config_file.parent / RECIPE_NAME).is_file():
        raise ConfigError(
            f"{config_file} has no {RECIPE_NAME} beside it, which would say what to train. Put the file into a "
            "recipe's folder, or start from Python: Trainer(TrainerConfig.load(file), model, train_dataset).train()."
        )
    return config_file

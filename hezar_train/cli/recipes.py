"""`recipes list` and `recipes copy`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hezar_train.cli.options import complete_recipes, debug_option, show, shown_path, table
from hezar_train.cli.output import echo

__all__ = ["read_header", "recipes"]

HEADER_LINE = re.compile(r"#\s*(?:(For|Command|Time|Score):)?\s*(.*)")


@click.group("recipes", short_help="List the recipes, or copy one to change it.")
def recipes() -> None:
    """Look at the recipes that come with the package, and at your own in ./recipes."""


@recipes.command("list", short_help="List the recipes that can be started by name.")
@debug_option
def list_recipes() -> None:
    """List the recipes that can be started by name: what each is for and what it reaches.

    \b
    Example:
      hezar-train recipes list
    """
    from hezar_train.recipes import CONFIG_NAME, recipe_folders

    found = recipe_folders()
    rows = table("recipe", "what for", "score", lines_between=1)
    rows.columns[0].no_wrap = True
    for name, folder in found.items():
        header = read_header(folder / CONFIG_NAME)
        rows.add_row(name, *(_sentence(header.get(word, "")) for word in ("For", "Score")))
    show(rows)
    first = "image_classification" if "image_classification" in found else next(iter(found), "RECIPE")
    echo(f"\nTrain one:              hezar-train train {first}")
    echo(f"Copy one to change it:  hezar-train recipes copy {first}")


@recipes.command("copy", short_help="Copy a recipe into a folder of your own.")
@click.argument("name", metavar="NAME", shell_complete=complete_recipes)
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path))
@debug_option
def copy(name: str, folder: Path | None) -> None:
    """Copy a recipe to FOLDER, else to ./recipes/NAME, where names are looked for first.

    \b
    Examples:
      hezar-train recipes copy image_classification
      hezar-train recipes copy image_classification recipes/letters
    """
    from hezar_train.recipes import RECIPE_NAME, copy_recipe

    target = copy_recipe(name, folder)
    is_found_by_name = target.parent == Path("recipes")
    echo(f"Copied. Change {shown_path(target / RECIPE_NAME)}, then: "
               f"hezar-train train {target.name if is_found_by_name else target}")  # fmt: skip


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def read_header(config_file: Path) -> dict[str, str]:
    """Return what the comment at the head of a recipe's config says: For, Command, Time, Score."""
    try:
        lines = config_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    word = ""
    for line in lines:
        if (match := HEADER_LINE.fullmatch(line)) is None:
            break
        word = match[1] or word
        found[word] = f"{found.get(word, '')} {match[2]}".strip()
    return found

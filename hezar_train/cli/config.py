"""`config show`, `explain`, `validate` and `diff`: they read configs without torch, and without running a recipe."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import click

from hezar_train.cli.options import (
    complete_fields,
    complete_recipes,
    debug_option,
    overrides_argument,
    plain_warnings,
    show,
    table,
)
from hezar_train.cli.output import echo
from hezar_train.config import TrainerConfig, to_plain, to_yaml
from hezar_train.config.named_code import named_code
from hezar_train.config.names import FOREIGN_FIELDS, unknown_field
from hezar_train.config.trainer_config import GROUPS, field_meanings
from hezar_train.errors import ConfigError

__all__ = ["config"]

ABSENT = "-"
WIDTH = 100


@click.group("config", short_help="Look at configs: show, explain, validate, diff.")
def config() -> None:
    """Look at configs. Neither torch nor a recipe is imported."""


def _source_argument(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.argument(name, metavar=name.upper(), shell_complete=complete_recipes)


@config.command("show", short_help="Show what a file, a recipe or a run asks for.")
@_source_argument("source")
@overrides_argument
@click.option("--all", "shows_all", is_flag=True, help="Show the fields that have their defaults, too.")
@debug_option
def show_config(source: str, overrides: tuple[str, ...], shows_all: bool) -> None:
    """Show the config of a file, a recipe or a run, with overrides, as YAML that can be trained with.

    \b
    Examples:
      hezar-train config show image_classification
      hezar-train config show runs/image_classification --all
      hezar-train config show image_classification num_epochs=5 > recipes/image_classification/short.yaml
    """
    from hezar_train.recipes import load_any

    with plain_warnings():
        loaded = load_any(source, overrides)
    fields = loaded.config.to_dict() if shows_all else _changed(loaded.config)
    has_sections = loaded.options or loaded.source.is_file()
    echo(to_yaml({"recipe": loaded.options, "trainer": fields} if has_sections else fields), nl=False)


@config.command("explain", short_help="Explain a field, or list all of them.")
@click.argument("field", metavar="[FIELD]", required=False, shell_complete=complete_fields)
@debug_option
def explain(field: str | None) -> None:
    """Explain a field: what it means, what it takes, its default. Other trainers' names lead to ours.

    \b
    Examples:
      hezar-train config explain save_steps
      hezar-train config explain warmup_ratio
      hezar-train config explain
    """
    if field is None:
        _list_fields()
        return
    known = TrainerConfig.fields()
    name = field if field in known else FOREIGN_FIELDS.get(field, field)
    if name not in known:
        raise ConfigError(f"{unknown_field(field, known)} `hezar-train config explain` lists all fields.")
    if name != field:
        echo(f"{field} is another trainer's word. Here it is:\n")
    one = known[name]
    echo(f"{name}: {one.type}{'' if _is_required(one) else f' = {one.default!r}'}\n")
    echo(textwrap.fill(dict(field_meanings(TrainerConfig))[name], WIDTH))
    group = next(group for group in GROUPS if name in {each.name for each in dataclasses.fields(group)})
    echo(f"\nAmong the fields of {_title(group)}. On the command line: hezar-train train RECIPE {name}=...")
    if others := sorted(word for word, ours in FOREIGN_FIELDS.items() if ours == name):
        echo(f"Elsewhere it is called: {', '.join(others)}")


@config.command("validate", short_help="Tell all problems of a config at once.")
@_source_argument("source")
@overrides_argument
@debug_option
def validate(source: str, overrides: tuple[str, ...]) -> None:
    """Check a config file (plain, or with a recipe's sections), a recipe or a run; tell all problems at once.

    Code that it names (by a dotted path, or as a script of `evaluate`) is told, and not imported.

    \b
    Examples:
      hezar-train config validate recipes/image_classification/config.yaml
      hezar-train config validate image_classification batch_size=64 recipe.dropout=0.1
    """
    from hezar_train.recipes import load_any

    with plain_warnings():
        loaded = load_any(source, overrides)
    echo(f"{source}: no problems")
    if code := sorted(named_code(loaded.config.to_dict())):
        echo(f"{source} names code that a run would import: {', '.join(code)}")


@config.command("diff", short_help="Show where two configs differ.")
@_source_argument("a")
@_source_argument("b")
@debug_option
def diff(a: str, b: str) -> None:
    """Show the fields and options in which two files, recipes or runs differ.

    \b
    Examples:
      hezar-train config diff image_classification runs/image_classification
      hezar-train config diff runs/first runs/second
    """
    with plain_warnings():
        rows = list(_differences(_flat(a), _flat(b)))
    if not rows:
        echo("no differences")
        return
    shown = table("field", a, b)
    for row in rows:
        shown.add_row(*row)
    show(shown)


def _changed(found: TrainerConfig) -> dict[str, Any]:
    """Return the fields that do not have their defaults, and those that have none."""
    known = TrainerConfig.fields()
    return {name: value for name, value in found.to_dict().items() if value != to_plain(known[name].default)}


def _flat(source: str) -> dict[str, Any]:
    from hezar_train.recipes import load_any

    loaded = load_any(source)
    return {**{f"recipe.{name}": value for name, value in loaded.options.items()}, **loaded.config.to_dict()}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name, ABSENT) != b.get(name, ABSENT):
            yield name, _shown(a.get(name, ABSENT)), _shown(b.get(name, ABSENT))


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _list_fields() -> None:
    meanings = dict(field_meanings(TrainerConfig))
    for group in GROUPS:
        rows = table(_title(group), "")
        rows.columns[0].no_wrap = True
        for one in dataclasses.fields(group):
            default = "" if _is_required(one) else f" ({one.default!r})"
            rows.add_row(f"  {one.name}", f"{meanings[one.name]}{default}")
        show(rows)
        echo()


def _title(group: type) -> str:
    """Return what a group of fields is about, by the beginning of its docstring."""
    title, _, _ = (inspect.getdoc(group) or "").partition(":")
    return title[:1].lower() + title[1:].removesuffix(".")


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING

"""The options of a recipe, read from the source of its `build`, which is not run: names, types, and what is needed.

A type is checked where a config file can hold it: int, float, bool, str, None, lists of these, and one or the other of
them. What else an annotation says is the recipe's own affair.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hezar_train.config.checks import wrong_type
from hezar_train.errors import ConfigError, choices, suggestion

__all__ = ["option_problems", "options_of"]

PLAIN_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,), "list": (list,)
}  # fmt: skip


def options_of(source: Path) -> list[str]:
    """Return the names of the options that a recipe's `build` takes."""
    return [each.arg for each in _arguments(_build(source))]


def option_problems(source: Path, options: Mapping[str, Any]) -> Iterator[str]:
    """Tell of options that `build` does not take, of values that are of another type, and of what it needs."""
    if not source.is_file():
        return  # a config on its own way somewhere: its options are checked where the recipe is
    build = _build(source)
    known, defaults = {each.arg: each for each in _arguments(build)}, _defaults(build)
    for name, value in options.items():
        if name in known:
            yield from _type_problem(name, value, known[name].annotation, defaults.get(name))
        elif build.kwarg is None:
            yield (
                f"recipe.{name} is not an option of this recipe. Its build() takes: {choices(known) or 'none'}."
                f"{suggestion(name, known)}"
            )
    for name in known:
        if name not in options and name not in defaults:
            yield f"recipe.{name} is missing: the recipe's build() has no default for it"


def _build(source: Path) -> ast.arguments:
    """Read the arguments of `build` from the source."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{source}: cannot be read as Python: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "build":
            return node.args
    raise ConfigError(f"{source}: expected a function build(**options) that returns a hezar_train.Recipe")


def _arguments(build: ast.arguments) -> list[ast.arg]:
    return [*build.args, *build.kwonlyargs]


def _defaults(build: ast.arguments) -> dict[str, ast.expr]:
    with_default = build.args[len(build.args) - len(build.defaults) :]
    by_keyword = zip(build.kwonlyargs, build.kw_defaults, strict=True)
    return {
        **{each.arg: default for each, default in zip(with_default, build.defaults, strict=True)},
        **{each.arg: default for each, default in by_keyword if default is not None},
    }


def _type_problem(name: str, value: Any, annotation: ast.expr | None, default: ast.expr | None) -> Iterator[str]:
    is_default = value is None and isinstance(default, ast.Constant) and default.value is None
    if annotation is None or is_default or _fits(annotation, value):
        return
    expected = ast.unparse(annotation).strip("'\"")
    words = wrong_type(f"recipe.{name}", value, expected)
    if _fits(annotation, ""):  # a text that YAML reads as something else
        words += f". Text is quoted for YAML, too: recipe.{name}='\"{'' if value is None else value}\"'"
    yield words


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Tell whether a value is of a type; of one that is not known here, every value is."""
    match annotation:
        case ast.Constant(value=None):
            return value is None
        case ast.Constant(value=str(text)):
            return _fits_text(text, value)
        case ast.Name(id=name) if name in PLAIN_TYPES:
            return isinstance(value, PLAIN_TYPES[name]) and (name == "bool" or not isinstance(value, bool))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(left, value) or _fits(right, value)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return isinstance(value, list) and all(_fits(item, one) for one in value)
    return True


def _fits_text(annotation: str, value: Any) -> bool:
    """Judge by an annotation in quotes."""
    try:
        return _fits(ast.parse(annotation, mode="eval").body, value)
    except SyntaxError:
        return True

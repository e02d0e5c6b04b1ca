"""The fields of a config as flags of an `argparse` parser, and what was given there as values of fields.

Owns the flags' names, how their text is read (as YAML is, where a field takes more than text) and their help, which is
the sentence beneath the field. Checks nothing: the config tells everything that is wrong with it at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hezar_train.config.files import parse_yaml
from hezar_train.errors import ConfigError

__all__ = ["add_arguments", "field_meanings", "given_arguments"]

NOTHING = ("None", "none")
"""How people write YAML's null."""


def add_arguments(parser: argparse.ArgumentParser, config_class: type) -> argparse.ArgumentParser:
    """Give a parser one flag for each field, `--batch-size` for `batch_size`; return the parser.

    A flag that is not used leaves no trace, so a default is the config's, or that of a file read before.
    """
    group = parser.add_argument_group(config_class.__name__)
    meanings, hints = dict(field_meanings(config_class)), typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        kinds = _kinds(hints[field.name])
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(meanings.get(field.name, ""), field),
            **_form(field.name, kinds),
        )
    return parser


def given_arguments(namespace: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """Return the fields that were given as flags, by name; what else a parser has is left out."""
    given = vars(namespace)
    return {field.name: given[field.name] for field in dataclasses.fields(config_class) if field.name in given}


def _kinds(hint: Any) -> frozenset[type]:
    """Return the plain types that a field takes: of `list[str] | None`, list and NoneType."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return frozenset(typing.get_origin(part) or part for part in parts)


def _form(name: str, kinds: frozenset[type]) -> dict[str, Any]:
    """Say how a flag is written: alone, with a value, with several, or with a value or none."""
    if kinds <= {bool, types.NoneType}:
        return {"action": argparse.BooleanOptionalAction}
    metavar = name.rpartition("_")[2].upper()
    if list in kinds:
        return {"nargs": "*", "type": _reader(frozenset({str, dict})), "metavar": metavar}
    alone = {"nargs": "?", "const": True} if bool in kinds else {}
    return {"type": _reader(kinds), "metavar": metavar, **alone}


def _reader(kinds: frozenset[type]) -> Callable[[str], Any]:
    """Return how to read a flag's text: as a value of one of the types, else as the text it is."""

    def read(text: str) -> Any:
        if text in NOTHING and types.NoneType in kinds:
            return None
        try:
            value = parse_yaml(text, Path("command line"))
        except ConfigError:  # such as "*.txt"
            return text
        if type(value) is int and float in kinds and int not in kinds:
            return float(value)
        return text if str in kinds and type(value) not in kinds else value

    return read


def _help(meaning: str, field: dataclasses.Field[Any]) -> str:
    is_needed = field.default is dataclasses.MISSING
    told = "required" if is_needed else f"default: {field.default}"
    return f"{meaning} ({told})".strip().replace("%", "%%")


def field_meanings(config_class: type) -> Iterator[tuple[str, str]]:
    """Yield each field's name and the sentence beneath it; none where there is no source to read."""
    for group in reversed(config_class.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(group))).body
        except (OSError, SyntaxError, ValueError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for node, following in itertools.pairwise(body):
            is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            if is_field and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                yield node.target.id, " ".join(str(following.value.value).split())  # type: ignore[attr-defined]

"""What was asked for: the config as far as it differs from the defaults, and from one run to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hezar_train.config import TrainerConfig, to_plain

__all__ = ["Setting", "differing_settings", "settings_of", "shown"]

PRIVATE = frozenset({"output_dir"})
"""A field that every run has of its own."""


@dataclass(frozen=True)
class Setting:
    """One field of the config, as it was and as it would have been."""

    name: str
    value: Any
    default: Any
    is_default: bool


def settings_of(given: Mapping[str, Any]) -> list[Setting]:
    """Return all fields, those of a newer or older version at the end; None where a file leaves a field out."""
    defaults = _defaults()
    known = [_setting(name, given.get(name), default) for name, default in defaults.items()]
    strange = [Setting(name, value, None, False) for name, value in given.items() if name not in defaults]
    return known + strange


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields in which runs differ, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run if name not in PRIVATE)
    values = {name: [run.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def shown(value: Any) -> str:
    """Return a value as a config file would have it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _setting(name: str, value: Any, default: Any) -> Setting:
    return Setting(name, value, default, is_default=value == default and name not in PRIVATE)


def _defaults() -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(TrainerConfig):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = None if default is dataclasses.MISSING else to_plain(default)
    return found

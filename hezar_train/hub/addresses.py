"""How a place on the Hub is written: `owner/name[@revision]` and `hub://owner/name[@revision][#step]`.

This module owns the two forms and what is wrong with a text that is neither. It talks to nobody.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from hezar_train.errors import ConfigError

__all__ = ["SCHEME", "HubAddress", "is_hub_address", "names_hub_weights", "parse_address", "parse_repo_id"]

SCHEME = "hub://"
EXPECTED = "expected hub://owner/name, hub://owner/name@revision or hub://owner/name@revision#step"
LONGEST_NAME = 96  # what the Hub allows for each part
PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class HubAddress:
    """A repository, a revision of it (None: its main branch) and the step of a checkpoint (None: the newest)."""

    repo_id: str
    revision: str | None = None
    step: int | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{SCHEME}{self.repo_id}{revision}" + ("" if self.step is None else f"#{self.step}")


def is_hub_address(value: object) -> bool:
    """Tell whether a setting means a place on the Hub rather than a path."""
    return isinstance(value, str) and value.startswith(SCHEME)


def names_hub_weights(value: str | os.PathLike[str]) -> bool:
    """Tell whether `init_weights_from` means a repository: `hub://...`, or `owner/name` where no such path exists."""
    if not isinstance(value, str):
        return False
    if is_hub_address(value):
        return True
    repo_id = value.partition("@")[0]
    return not Path(value).exists() and not list(_repo_id_problems(repo_id))


def parse_address(text: str) -> HubAddress:
    """Read an address, with or without `hub://`; the error says which part is wrong."""
    rest, has_step, step = text.removeprefix(SCHEME).partition("#")
    repo_id, has_revision, revision = rest.partition("@")
    if problems := list(_repo_id_problems(repo_id)):
        raise ConfigError(f"{text!r}: {problems[0]}; {EXPECTED}")
    if has_revision and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"{text!r}: {revision!r} is no name of a branch, tag or commit; {EXPECTED}")
    if has_step and not (step.isascii() and step.isdigit()):
        raise ConfigError(f"{text!r}: the step after '#' must be a whole number, got {step!r}; {EXPECTED}")
    return HubAddress(repo_id, revision or None, int(step) if has_step else None)


def parse_repo_id(text: str) -> str:
    """Return `owner/name` as given, or say what is wrong with it."""
    if problems := list(_repo_id_problems(text)):
        raise ConfigError(f"{text!r}: {problems[0]}; expected owner/name")
    return text


def _repo_id_problems(repo_id: str) -> list[str]:
    parts = repo_id.split("/")
    if len(parts) != 2:
        return [f"{repo_id!r} has {len(parts) - 1} slashes, a repository has one"]
    wrong = [part for part in parts if not PART.fullmatch(part) or len(part) > LONGEST_NAME or "--" in part]
    wrong += [part for part in parts if ".." in part or part.endswith(".git")]
    return [f"{part!r} is no name that the Hub allows (letters, digits, '-', '_' and '.')" for part in wrong]

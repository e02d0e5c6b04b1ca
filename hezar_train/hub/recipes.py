"""How a pushed run came about, for running it again: its config and the hash of its recipe, never its code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hezar_train.checkpoint import CONFIG_FILE
from hezar_train.config.files import read_mapping
from hezar_train.errors import ConfigError
from hezar_train.hub.addresses import HubAddress, names_hub_weights, parse_address
from hezar_train.hub.layout import TRAIN_FOLDER
from hezar_train.hub.trust import SHA256, refuse_foreign_code

__all__ = ["FetchedRecipe", "fetch_recipe"]

OWN_FIELDS = (
    "output_dir", "checkpoints_dir", "logs_dir", "resume_from_checkpoint", "accept_changes", "push_to_hub", "trackers",
    "device",
)  # fmt: skip
RECIPE_FILE = "recipe.json"


@dataclass(frozen=True)
class FetchedRecipe:
    """What a repository says of how it came about; code is only named, by its hash."""

    repo_id: str
    commit: str | None
    fields: dict[str, Any]
    """The trainer's config without what is this machine's own affair: folders, devices, trackers, the Hub."""
    sha256: str
    """Of the recipe's source."""
    options: dict[str, Any]


def fetch_recipe(address: str | HubAddress) -> FetchedRecipe:
    """Read config and recipe record of a pushed run, to run them again with a recipe of that hash from this machine."""
    from hezar_train.hub.client import Repository

    place = parse_address(address) if isinstance(address, str) else address
    repository = Repository(place.repo_id, place.revision)
    head = repository.head()
    names = [f"{TRAIN_FOLDER}/{name}" for name in (CONFIG_FILE, RECIPE_FILE)]
    if missing := [name for name in names if name not in head.files]:
        raise ConfigError(f"{place} has no {missing[0]}: only runs that were started from a recipe can be reproduced")
    config, record = (read_mapping(repository.cached(name, head.oid)) for name in names)
    refuse_foreign_code(config, f"{place}: {names[0]}")
    sha256, options = record.get("sha256"), record.get("options")
    if not isinstance(sha256, str) or not SHA256.fullmatch(sha256) or not isinstance(options, dict):
        raise ConfigError(f"{place}: {names[1]} is not of the form that this package writes")
    return FetchedRecipe(place.repo_id, head.oid, _fields_for_anyone(config, place), sha256, options)


def _fields_for_anyone(config: Mapping[str, Any], place: HubAddress) -> dict[str, Any]:
    """Leave out what a config says of the machine it was written on; a folder there cannot be started from here."""
    kept = {name: value for name, value in config.items() if name not in OWN_FIELDS and not name.startswith("hub_")}
    source = kept.get("init_weights_from")
    if source is not None and not names_hub_weights(source):
        raise ConfigError(
            f"{place} was started from weights in a folder, init_weights_from={source!r}, which only its owner has"
        )
    return kept

"""Whose code may run: what the package ships, what the user names, and what this user has trained with before.

A run's folder says which recipe it came from, which classes by dotted path and which files and addresses it uses. The
folder may be a gift, so none of that is followed on its word. What this user has built once by naming it is remembered
in a file of the user's own, never in the run: the recipe by its path and its hash, with the code and the places that
were named beside it. So one's own runs go on with one command; on another machine `--trust` is typed once.

The file is `trusted.json` in the folder of the user's cache (`user_cache`).
"""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hezar_train.config.files import read_json, to_json, write_atomically
from hezar_train.config.named_code import named_code, named_places, outside_settings, texts_in
from hezar_train.errors import ConfigError
from hezar_train.recipes.recipe import CONFIG_NAME, LoadedRecipe, default_options, hash_of, read_sections, shipped_root
from hezar_train.user_cache import CACHE_VARIABLE, cache_folder

__all__ = [
    "Trusted",
    "is_shipped",
    "refuse_foreign_places",
    "refuse_foreign_push",
    "refuse_foreign_settings",
    "refuse_untrusted_code",
    "remember",
    "trust_file",
    "trusted_beside",
    "was_trained_with",
]

FORMAT = 1
MOST_REMEMBERED = 1000  # of each kind, for a recipe: the newest


@dataclass(frozen=True)
class Trusted:
    """What this user has named before, together with one recipe."""

    hashes: tuple[str, ...] = ()
    code: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()


def trust_file() -> Path:
    """Return the file in which trusted recipes are remembered."""
    return cache_folder() / "trusted.json"


def remember(loaded: LoadedRecipe) -> None:
    """Remember a recipe that is being built, and what its config and options name."""
    if os.environ.get("RANK", "0") != "0":
        return
    key, sha256, known = str(loaded.folder.resolve()), hash_of(loaded.folder), trusted_beside(loaded.folder)
    now = Trusted(
        known.hashes if sha256 in known.hashes else (*known.hashes, sha256)[-MOST_REMEMBERED:],
        known.code | named_code(loaded.config.to_dict()),
        known.places
        | set(texts_in(loaded.options))  # texts may name places later
        | _pushed_to(loaded.config.to_dict())
        | outside_settings(loaded.config.to_dict()),
    )
    if now == known:
        return
    entry = {"sha256": now.hashes, "code": sorted(now.code), "places": sorted(now.places)}
    try:
        _write({**_entries(), key: entry})
    except OSError as error:
        warnings.warn(
            f"{trust_file()} cannot be written ({error}): a run of a recipe of your own will ask for --trust to go on. "
            f"{CACHE_VARIABLE} may name another folder.",
            stacklevel=2,
        )


def is_shipped(folder: Path) -> bool:
    """Tell whether a recipe came with the package."""
    return folder.resolve().parent == shipped_root().resolve()


def was_trained_with(folder: Path, sha256: str) -> bool:
    """Tell whether this user has built the recipe at this path when it had a hash."""
    return sha256 in trusted_beside(folder).hashes


def trusted_beside(folder: Path) -> Trusted:
    """Return what is remembered of a recipe."""
    entry = _entries().get(str(folder.resolve()))
    if not isinstance(entry, dict):
        return Trusted()
    hashes, code, places = (_texts(entry.get(name)) for name in ("sha256", "code", "places"))
    return Trusted(tuple(hashes), frozenset(code), frozenset(places))


def refuse_untrusted_code(run: Path, fields: Mapping[str, Any], home: Path, accepted: Collection[str] = ()) -> None:
    """Raise if the config of a run names code that neither its recipe's own config nor this user has named before."""
    named = named_code(fields) - set(accepted) - trusted_beside(home).code - named_code(_own_config(home)[0])
    if named:
        raise ConfigError(
            f"the config of {run} names code, {', '.join(map(repr, sorted(named)))}, which would be imported and run, "
            f"and which you have not trained {home.name} with on this machine. Read it; if you trust it, give the same "
            "command with --trust, once."
        )


def refuse_foreign_places(
    source: str, options: Mapping[str, Any], home: Path, accepted: Iterable[str] = (), way: str | None = None
) -> None:
    """Raise if options from elsewhere name files or addresses that neither the recipe nor this user has named."""
    own = {**default_options(home), **_own_config(home)[1]}
    known = {*accepted, *trusted_beside(home).places, *texts_in(own)}
    foreign = {text: name for text, name in named_places(options).items() if text not in known}
    if not foreign:
        return
    listed = ", ".join(f"recipe.{name}={text!r}" for text, name in foreign.items())
    name, text = next((name, text) for text, name in foreign.items())
    way = way or f"If you want that, say it yourself: recipe.{name}={text}"
    raise ConfigError(
        f"{source} would have the recipe {home.name} read files or addresses that you have not named: {listed}. {way}"
    )


def refuse_foreign_push(run: Path, fields: Mapping[str, Any], home: Path, given: Mapping[str, Any]) -> None:
    """Raise if the config of a run would push, with this user's token, to where this user has not pushed before."""
    target = _pushed_to(fields)
    if target <= trusted_beside(home).places or "hub_model_id" in given:
        return
    raise ConfigError(
        f"the config of {run} would push the run to {fields.get('hub_model_id')!r} on the Hub, with your token, and "
        f"you have not trained {home.name} with that on this machine. If you want it, say so yourself: "
        f"hub_model_id={fields.get('hub_model_id')}; else push_to_hub=false."
    )


def refuse_foreign_settings(
    source: str, fields: Mapping[str, Any], home: Path, given: Mapping[str, Any], way: str = ""
) -> None:
    """Raise if a config from elsewhere leads to weights or services that neither the recipe nor this user has named.

    `given` are the fields that the user names now, `way` is what else can be done.
    """
    theirs = outside_settings({name: value for name, value in fields.items() if name not in given})
    foreign = sorted(theirs - trusted_beside(home).places - outside_settings(_own_config(home)[0]))
    if not foreign:
        return
    raise ConfigError(
        f"{source} leads to weights or services that you have not trained {home.name} with on this machine: "
        f"{', '.join(foreign)}. If you want that, say so yourself: {foreign[0]}; if not, "
        f"{foreign[0].partition('=')[0]}=null.{way}"
    )


def _pushed_to(fields: Mapping[str, Any]) -> set[str]:
    return {f"hub://{fields.get('hub_model_id')}"} if fields.get("push_to_hub") else set()


def _own_config(home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields and options of a recipe's own config; empty where it has none that can be read."""
    try:
        return read_sections(home / CONFIG_NAME)
    except ConfigError:
        return {}, {}


def _entries() -> dict[str, Any]:
    path = trust_file()
    if not _is_own(path):
        return {}
    found = read_json(path).get("recipes")
    return dict(found) if isinstance(found, dict) else {}


def _is_own(path: Path) -> bool:
    """Tell whether nobody but this user can have written a file: it is no link, and closed to others."""
    if not hasattr(os, "getuid"):
        return path.is_file()
    try:
        file, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    is_closed = folder.st_uid == os.getuid() and not folder.st_mode & 0o077
    return stat.S_ISREG(file.st_mode) and file.st_uid == os.getuid() and (is_closed or not file.st_mode & 0o022)


def _write(entries: Mapping[str, Any]) -> None:
    path = trust_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, to_json({"format": FORMAT, "recipes": entries}))
    path.chmod(0o600)


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []

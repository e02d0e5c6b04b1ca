"""Fetch from the Hub to the disk, believing nothing: checkpoints, weights, logs, and how a pushed run came about.

A repository may be anybody's. Of a checkpoint the manifest comes first; its names must stay inside the checkpoint and
must not be pickles or code; only what it lists is downloaded, from the one commit that was found at the start; sizes
and SHA-256 must agree before the checkpoint gets its name. Weights are safetensors, or those of a Hezar model. A recipe
is known by its hash, never by code from a repository. Nothing of a repository is ever executed, imported or unpickled,
and nothing is written but below the folder that was given.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hezar_train.checkpoint import Checkpoint, CheckpointStore, Rejected, verify
from hezar_train.checkpoint.hezar_weights import HEZAR_MODEL_FILE
from hezar_train.checkpoint.manifest import (
    FileRecord,
    Manifest,
    free_bytes,
    hash_file,
    is_inside,
    make_folder_durably,
    read_manifest,
    remove_folder,
    rename_durably,
    sync_and_hash_folder,
)
from hezar_train.checkpoint.split_files import MODEL_INDEX_FILE
from hezar_train.config.files import load_json, read_mapping
from hezar_train.config.named_code import named_code, refuse_foreign_code
from hezar_train.errors import CheckpointError, ConfigError, HubError
from hezar_train.hub import limits
from hezar_train.hub.client import Head, HubAddress, HubUnreachableError, Repository, names_hub_weights, parse_address
from hezar_train.hub.limits import SMALL_BYTES
from hezar_train.hub.pushed_files import CHECKPOINTS_FOLDER, LAST, TRAIN_FOLDER
from hezar_train.run_folder import plain_path, read_file
from hezar_train.run_layout import (
    ADAPTER_FILE,
    BASE_FILE,
    BEST_FILE,
    CONFIG_FILE,
    EVALUATIONS_FOLDER,
    EVENTS_PREFIX,
    HEZAR_CONFIG_FILE,
    LEDGER_FILE,
    LOGS_FOLDER,
    MANIFEST_FILE,
    MODEL_FILE,
    RECIPE_FILE,
    TEMPORARY_PREFIX,
    TRAINED_FILE,
    step_name,
    step_of,
)

__all__ = [
    "REFUSED_SUFFIXES",
    "SHA256",
    "FetchedRecipe",
    "checked_manifest",
    "fetch_checkpoint",
    "fetch_file",
    "fetch_recipe",
    "fetch_records",
    "fetch_weights",
    "named_code",
    "read_foreign_manifest",
    "refuse_foreign_code",
    "refuse_name",
    "refuse_paths",
]

TRAINED_PARTS = (ADAPTER_FILE, TRAINED_FILE)
MOST_MANIFEST_BYTES = 16 << 20
MOST_FILES = 20_000
"""Of a checkpoint, of records, of weights: a thousand processes write some thousands."""
RECORD_FOLDERS = (f"{TRAIN_FOLDER}/{LOGS_FOLDER}/", f"{TRAIN_FOLDER}/{EVALUATIONS_FOLDER}/")
RECORD_FILES = (f"{TRAIN_FOLDER}/{LEDGER_FILE}", f"{TRAIN_FOLDER}/{BEST_FILE}")
RECORD_SUFFIXES = frozenset({".json", ".jsonl", ".csv"})
OWN_FIELDS = (
    "output_dir", "checkpoints_dir", "logs_dir", "resume_from_checkpoint", "accept_changes", "push_to_hub", "trackers",
    "device",
)  # fmt: skip

REFUSED_SUFFIXES = frozenset({
    ".bin", ".ckpt", ".dill", ".dll", ".dylib", ".exe", ".joblib", ".msgpack", ".npy", ".npz", ".pickle", ".pkl", ".pt",
    ".pth", ".py", ".pyc", ".pyd", ".pyw", ".pyx", ".sh", ".so", ".tar", ".zip",
})  # fmt: skip
PLAIN_NAME = re.compile(r"[^\x00-\x1f\x7f\\:*?\"<>|]+")
SHA256 = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


def fetch_checkpoint(
    address: str | HubAddress, into: str | os.PathLike[str], *, own_config: Mapping[str, Any] | None = None
) -> Path:
    """Download a checkpoint to `into/{step}` and return that folder, verified; one that is there already is kept.

    `own_config` is the config of the run that goes on: code that it names may be named by the checkpoint's, too.
    """
    place = parse_address(address) if isinstance(address, str) else address
    root = Path(into)
    repository = Repository(place.repo_id, place.revision)
    head = repository.head(sizes=True)
    make_folder_durably(root)
    draft = root / _draft_name()
    try:
        folder = _find(repository, head, place, draft)
        manifest = checked_manifest(draft / folder, folder, head, place)
        target = root / step_name(manifest.step)
        if _is_there(target, draft / folder):
            return target
        _download(repository, head, draft, [f"{folder}/{name}" for name in manifest.files], _room(manifest))
        _prove(draft / folder, manifest, own_config, place)
        _set_damaged_aside(target)
        rename_durably(draft / folder, target)
        return target
    finally:
        remove_folder(draft)


def fetch_records(
    address: str | HubAddress, run_folder: str | os.PathLike[str], *, before_step: int | None = None
) -> list[Path]:
    """Download a run's logs and evaluations to where they are missing below `run_folder`; return the new files.

    Only those come that the manifest beside them lists, with the hashes that it lists. Of the evaluations only those
    come that are `before_step`: what is still to be decided is evaluated here, not taken from a record.
    """
    place = parse_address(address) if isinstance(address, str) else address
    root = Path(run_folder)
    repository = Repository(place.repo_id, place.revision)
    head = repository.head(sizes=True)
    draft = root / _draft_name()
    try:
        listed = _listed_records(repository, head, place, draft)
        wanted = [name for name in listed if _is_record(name) and not _is_evaluation_from(name, before_step)]
        missing = [name for name in wanted if not (root / name.removeprefix(f"{TRAIN_FOLDER}/")).exists()]
        _download(repository, head, draft, missing, sum(listed[name].size for name in missing))
        return [_moved(draft, name, root) for name in missing if _is_as_listed(draft / name, listed[name], place)]
    finally:
        remove_folder(draft)


def _draft_name() -> str:
    """Return a name that the store's `clean` knows, and nobody else beforehand."""
    return f"{TEMPORARY_PREFIX}hub-{secrets.randbits(64)}"


def _listed_records(repository: Repository, head: Head, place: HubAddress, draft: Path) -> dict[str, FileRecord]:
    """Return the trainer's files that are there in the size that their manifest says; none without a manifest."""
    if f"{TRAIN_FOLDER}/{MANIFEST_FILE}" not in head.files:
        if any(map(_is_record, head.files)):
            logger.warning("%s: its logs and evaluations have no %s and are not used", place, MANIFEST_FILE)
        return {}
    make_folder_durably(draft)
    _download_manifest(repository, head, TRAIN_FOLDER, draft)
    files = read_foreign_manifest(draft / TRAIN_FOLDER, place).files
    listed = {f"{TRAIN_FOLDER}/{name}": record for name, record in files.items()}
    return {name: one for name, one in listed.items() if name in head.files and head.files[name] in (None, one.size)}


def _is_evaluation_from(name: str, step: int | None) -> bool:
    """Tell whether a record is of an evaluation at a step or after it."""
    folder, _, file = name.removeprefix(f"{TRAIN_FOLDER}/").partition("/")
    found = step_of(file.partition(".")[0].partition("/")[0])
    return folder == EVALUATIONS_FOLDER and step is not None and (found is None or found >= step)


def _is_as_listed(path: Path, record: FileRecord, place: HubAddress) -> bool:
    if hash_file(path) == record:
        return True
    logger.warning("%s: %s is not what its %s says, and is not used", place, path.name, MANIFEST_FILE)
    return False


def _moved(draft: Path, name: str, root: Path) -> Path:
    target = plain_path(root, name.removeprefix(f"{TRAIN_FOLDER}/"))
    make_folder_durably(target.parent)
    (draft / name).rename(target)
    return target


def fetch_weights(address: str | HubAddress, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download the weights at a repository's root into the cache; return the file, or its index.

    Safetensors, or else the `model.pt` of a Hezar model, which whoever reads it must not unpickle.
    """
    place = parse_address(address) if isinstance(address, str) else address
    repository = Repository(place.repo_id, place.revision)
    head = repository.head(sizes=True)
    fetch = functools.partial(_cached, repository, head, cache_dir=cache_dir)
    if MODEL_FILE in head.files:
        return fetch(MODEL_FILE)
    if MODEL_INDEX_FILE not in head.files and (parts := [name for name in TRAINED_PARTS if name in head.files]):
        if BASE_FILE in head.files:
            _refuse_large(head, BASE_FILE, place.repo_id)
            fetch(BASE_FILE)  # beside which it is known what they were trained on
        return fetch(parts[0])
    if MODEL_INDEX_FILE not in head.files and {HEZAR_MODEL_FILE, HEZAR_CONFIG_FILE} <= head.files.keys():
        fetch(HEZAR_CONFIG_FILE)  # beside which the pickle is known as Hezar's
        return fetch(HEZAR_MODEL_FILE)
    if MODEL_INDEX_FILE not in head.files:
        raise CheckpointError(_no_weights(place, head))
    _refuse_large(head, MODEL_INDEX_FILE, place.repo_id)
    index = fetch(MODEL_INDEX_FILE)
    names = _shards(index, head, place)
    for name in _one_by_one(repository, names, sum(head.files[name] or 0 for name in names)):
        fetch(name)
    return index


def _cached(repository: Repository, head: Head, name: str, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Download a file of a commit into the cache: as many bytes as the Hub lists for it, or few."""
    if head.oid is None:
        raise HubError(f"{repository.repo_id} has no commit yet")
    most_bytes = head.files.get(name)
    if (most_bytes or 0) > (free := free_bytes(repository.cache(cache_dir))):
        raise HubError(f"{repository.repo_id} needs {most_bytes:,} bytes in the cache, and {free:,} are free")
    return repository.cached(name, head.oid, cache_dir, SMALL_BYTES if most_bytes is None else most_bytes)


def fetch_file(
    repo_id: str,
    filename: str,
    *,
    revision: str | None = None,
    repo_type: str = "model",
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Download one file of data, such as a config, into the cache; return its path."""
    refuse_name(filename, repo_id)
    repository = Repository(repo_id, revision, repo_type)
    head = repository.head(sizes=True)
    _refuse_large(head, filename, repo_id)
    return _cached(repository, head, filename, cache_dir)


def _refuse_large(head: Head, name: str, repo_id: str) -> None:
    """Raise if a file is listed with more bytes than a small one has."""
    if (head.files.get(name) or 0) > SMALL_BYTES:
        raise HubError(f"{repo_id}: {name} has {head.files[name]:,} bytes; expected at most {SMALL_BYTES:,}")


def _find(repository: Repository, head: Head, place: HubAddress, draft: Path) -> str:
    """Download the manifest of the checkpoint that is meant; return its folder in the repository."""
    folders = {name.rpartition("/")[0] for name in head.files if name.endswith(f"/{MANIFEST_FILE}")}
    known = {folder for folder in folders if re.fullmatch(rf"{CHECKPOINTS_FOLDER}/(last|[0-9]+)", folder)}
    named = {folder: step_of(folder.rpartition("/")[2]) for folder in known if folder != LAST}
    steps = {step: folder for folder, step in named.items() if step is not None}
    if LAST in known and place.step not in steps:
        _download_manifest(repository, head, LAST, draft)
        steps.setdefault(_step_of(draft / LAST, place), LAST)
    wanted = max(steps, default=None) if place.step is None else place.step
    if wanted is None or wanted not in steps:
        has = f"It has the steps {', '.join(map(str, sorted(steps)))}." if steps else "It has none."
        asked = "checkpoint" if place.step is None else f"checkpoint of step {place.step}"
        raise CheckpointError(
            f"{place} has no {asked} below {CHECKPOINTS_FOLDER}/. {has} Only runs with hub_strategy='every_save' or "
            "'all_checkpoints' push checkpoints; others can be started from: init_weights_from."
        )
    if steps[wanted] != LAST:
        _download_manifest(repository, head, steps[wanted], draft)
    return steps[wanted]


def _download_manifest(repository: Repository, head: Head, folder: str, draft: Path) -> None:
    name = f"{folder}/{MANIFEST_FILE}"
    if (head.files[name] or 0) > MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{repository.repo_id}: {name} has {head.files[name]} bytes, which no manifest has")
    repository.download(name, draft, head.oid)


def _step_of(folder: Path, place: HubAddress) -> int:
    return read_foreign_manifest(folder, place).step


def _room(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files.values())


def _download(repository: Repository, head: Head, draft: Path, names: Iterable[str], nbytes: int) -> None:
    make_folder_durably(draft)
    if nbytes > (free := free_bytes(draft)):
        raise HubError(f"{repository.repo_id} needs {nbytes:,} bytes in {draft.parent}, and {free:,} are free")
    for name in _one_by_one(repository, list(names), nbytes):
        listed = head.files.get(name)
        repository.download(name, draft, head.oid, nbytes if listed is None else listed)


def _one_by_one(repository: Repository, names: Sequence[str], nbytes: int) -> Iterator[str]:
    """Yield the names of files that are downloaded one after another, while all together have time left.

    Each has a limit of its own, which a server that wants to keep somebody can come close to every time.
    """
    if len(names) > MOST_FILES:
        raise HubError(
            f"{repository.repo_id} would have {len(names):,} files downloaded; expected at most {MOST_FILES:,}"
        )
    seconds = limits.files_seconds(len(names), nbytes)
    end = time.monotonic() + seconds
    for number, name in enumerate(names):
        if time.monotonic() > end:
            raise HubUnreachableError(
                f"{repository.repo_id} gave {number} of {len(names)} files within {seconds:.0f} seconds: given up."
            )
        yield name


def _prove(folder: Path, manifest: Manifest, own_config: Mapping[str, Any] | None, place: HubAddress) -> None:
    """Check what was downloaded against the manifest and this package's rules, and make it durable."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    if strange := sorted(found - manifest.files.keys() - {MANIFEST_FILE}):
        raise CheckpointError(f"{place}: {strange[0]} is not listed in its {MANIFEST_FILE}")
    if links := sorted(path.name for path in folder.rglob("*") if path.is_symlink()):
        raise CheckpointError(f"{place}: {links[0]} is a link, which no checkpoint holds")
    try:
        state = Checkpoint(folder).state()
    except CheckpointError as error:
        raise CheckpointError(f"{place} was downloaded and is not what its manifest says: {error}") from error
    refuse_paths(state, str(place))
    accepted = named_code(own_config or {})
    refuse_foreign_code(read_mapping(folder / CONFIG_FILE), f"{place}: {CONFIG_FILE}", accepted)
    sync_and_hash_folder(folder)


def _set_damaged_aside(target: Path) -> None:
    """Set a damaged checkpoint of the same step aside; refuse to touch one that is whole."""
    if not target.exists():
        return
    try:
        verify(target)
    except CheckpointError as error:
        CheckpointStore(target.parent).set_aside([Rejected(target, str(error))])
        return
    raise CheckpointError(f"{target} holds another checkpoint of the same step: move it away, or resume from it")


def _is_there(target: Path, downloaded: Path) -> bool:
    """Tell whether the very same checkpoint is on disk, whole."""
    try:
        same = (target / MANIFEST_FILE).read_bytes() == (downloaded / MANIFEST_FILE).read_bytes()
        return same and verify(target) is not None
    except (OSError, CheckpointError):
        return False


def _is_record(name: str) -> bool:
    if not (name.startswith(RECORD_FOLDERS) or name in RECORD_FILES):
        return False
    try:
        refuse_name(name, "")
    except CheckpointError:
        return False
    return Path(name).suffix in RECORD_SUFFIXES or Path(name).name.startswith(EVENTS_PREFIX)


def _shards(index: Path, head: Head, place: HubAddress) -> list[str]:
    """Return the files that an index of weights names, all of them safetensors at the root."""
    try:
        names = sorted(set(load_json(read_file(index, SMALL_BYTES))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{place}: {MODEL_INDEX_FILE} cannot be read: {error}") from error
    for name in names:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors") or name not in head.files:
            raise CheckpointError(
                f"{place}: {MODEL_INDEX_FILE} names {name!r}; expected safetensors files at the root of the repository"
            )
        refuse_name(name, str(place))
    return names


def _no_weights(place: HubAddress, head: Head) -> str:
    at_root = [name for name in sorted(head.files) if "/" not in name]
    pickles = [name for name in at_root if Path(name).suffix.lower() in REFUSED_SUFFIXES]
    words = f"{place} has no {MODEL_FILE} at its root"
    if pickles:
        return (
            f"{words}, only {pickles[0]}, which looks like a pickle; pickles are not read, because loading one can run "
            "any code. Load it with the model's own library and pass the model to the trainer."
        )
    return f"{words}. It has: {', '.join(at_root) or 'nothing'}."


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
    place = parse_address(address) if isinstance(address, str) else address
    repository = Repository(place.repo_id, place.revision)
    head = repository.head(sizes=True)
    names = [f"{TRAIN_FOLDER}/{name}" for name in (CONFIG_FILE, RECIPE_FILE)]
    if missing := [name for name in names if name not in head.files]:
        raise ConfigError(f"{place} has no {missing[0]}: only runs that were started from a recipe can be reproduced")
    if too_large := [name for name in names if (head.files[name] or 0) > SMALL_BYTES]:
        raise ConfigError(f"{place}: {too_large[0]} has {head.files[too_large[0]]:,} bytes, which no such file has")
    config, record = (read_mapping(_cached(repository, head, name)) for name in names)
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


def read_foreign_manifest(folder: Path, place: HubAddress) -> Manifest:
    """Read a manifest that may be made to mislead."""
    try:
        manifest = read_manifest(folder)
        is_sound = isinstance(manifest.step, int) and not isinstance(manifest.step, bool) and manifest.step >= 0
        for name, record in manifest.files.items():
            is_sound &= isinstance(name, str) and isinstance(record.size, int) and record.size >= 0
            is_sound &= isinstance(record.sha256, str) and bool(SHA256.fullmatch(record.sha256))
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error}") from error
    except (TypeError, KeyError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise CheckpointError(f"{place}: its {MANIFEST_FILE} is not of the form that this package writes")
    return manifest


def checked_manifest(folder: Path, remote: str, head: Head, place: HubAddress) -> Manifest:
    """Return the manifest, once every name and size in it is one that may be downloaded."""
    manifest = read_foreign_manifest(folder, place)
    names = {name.casefold() for name in manifest.files}  # some file systems know no capitals
    if len(names) < len(manifest.files) or MANIFEST_FILE in names:
        raise CheckpointError(f"{place}: its {MANIFEST_FILE} lists one file twice, or itself")
    for name, record in manifest.files.items():
        refuse_name(name, str(place))
        path = f"{remote}/{name}"
        if path not in head.files:
            raise CheckpointError(f"{place}: {name} is listed in its {MANIFEST_FILE} and missing in the repository")
        if head.files[path] not in (None, record.size):
            raise CheckpointError(
                f"{place}: {name} has {head.files[path]} bytes in the repository and {record.size} in {MANIFEST_FILE}"
            )
    return manifest


def refuse_name(name: str, source: str) -> None:
    """Raise unless a name is a plain path inside its folder, and neither a pickle nor code."""
    parts = name.split("/")
    is_plain = is_inside(name) and PLAIN_NAME.fullmatch(name) and not any(part in {"", ".", ".."} for part in parts)
    if not is_plain or any(part.startswith(".") or part.endswith((" ", ".")) for part in parts):
        raise CheckpointError(
            f"{source} names a file {name!r}, which is refused: expected a plain path that stays inside its folder"
        )
    if Path(name).suffix.lower() in REFUSED_SUFFIXES:
        raise CheckpointError(
            f"{source} holds {name!r}, which is refused: it may be a pickle or code, and loading one can run anything. "
            "Tensors are read from safetensors only."
        )


def refuse_paths(state: Any, source: str) -> None:
    """Raise if a trainer's state names files outside of the run's folder: a resume cuts those that it names."""
    known = state if isinstance(state, Mapping) else {}
    files, logs = known.get("files") or {}, known.get("logs_dir")
    names = [*files, *([] if logs is None else [logs])] if isinstance(files, Mapping) else [files]
    for name in names:
        if not isinstance(name, str) or not is_inside(name) or not PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{source}: its state names the file {name!r}, which is refused: it is outside the run"
            )

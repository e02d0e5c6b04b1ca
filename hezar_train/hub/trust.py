"""What may be believed of a repository that anybody may have made: names of files, a manifest, a config.

Nothing here downloads or opens anything but what lies on the disk already.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint import MANIFEST_FILE
from hezar_train.checkpoint.manifest import Manifest, is_inside, read_manifest
from hezar_train.config.names import is_dotted_path
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.hub.addresses import HubAddress

if TYPE_CHECKING:
    from hezar_train.hub.client import Head

__all__ = [
    "REFUSED_SUFFIXES",
    "SHA256",
    "checked_manifest",
    "named_code",
    "read_foreign_manifest",
    "refuse_foreign_code",
    "refuse_name",
    "refuse_paths",
]

REFUSED_SUFFIXES = frozenset({
    ".bin", ".ckpt", ".dill", ".dll", ".dylib", ".exe", ".joblib", ".msgpack", ".npy", ".npz", ".pickle", ".pkl", ".pt",
    ".pth", ".py", ".pyc", ".pyd", ".pyw", ".pyx", ".sh", ".so", ".tar", ".zip",
})  # fmt: skip
PLAIN_NAME = re.compile(r"[^\x00-\x1f\x7f\\:*?\"<>|]+")
SHA256 = re.compile(r"[0-9a-f]{64}")
CODE_FIELDS = (
    "optimizer", "lr_scheduler", "momentum_scheduler", "criterion", "regularizer", "finetune_optimizer",
    "finetune_lr_scheduler", "metrics",
)  # fmt: skip
SCRIPT_PREFIX = "evaluate:"  # a metric that is a script, on the Hub or in a file
REMOTE_CODE_KEYS = frozenset({"trust_remote_code", "custom_generate", "auto_map"})
HARMLESS = re.compile(r"(torch\.optim|torch\.optim\.lr_scheduler|torch\.nn|hezar_train\.(optim|metrics))\.[A-Z]\w*")
"""Classes where they are defined; deeper paths and functions reach everything that a module has imported."""


def named_code(config: Mapping[str, Any]) -> set[str]:
    """Return all by which a config names code to import or download, but for the classes of torch and this package."""
    settings = {name: value for name, value in config.items() if name in CODE_FIELDS or str(name).endswith("_kwargs")}
    return set(_named(settings))


def refuse_foreign_code(config: Mapping[str, Any], source: str, accepted: Collection[str] = ()) -> None:
    """Raise if a config from elsewhere names code that nobody here has asked for."""
    if foreign := sorted(named_code(config) - set(accepted)):
        raise ConfigError(
            f"{source} names code, {', '.join(map(repr, foreign))}, which would be imported and run. That is refused: "
            "read it, and if you trust it, name it in a config of your own."
        )


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.startswith(SCRIPT_PREFIX) or (is_dotted_path(value) and not HARMLESS.fullmatch(value)):
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in REMOTE_CODE_KEYS and item:
                yield f"{key}={item!r}"
            yield from _named(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item)


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

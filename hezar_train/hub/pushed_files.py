"""What a push uploads, made from a run's folder alone, and where it lies in the repository.

    model.safetensors  config.json ...     weights, the model's own config, tokenizer or preprocessor: at the root,
                                           where from_pretrained and the like look for them
    adapter_model.safetensors  adapter_config.json  base_model.json
                                           instead, where only what was trained is saved: adapters as peft loads them
                                           (trained.safetensors: what is no adapter), and which base they stand on
    README.md                              the card
    train/                                 train_config.yaml  trainer_state.json  plan.json  best.json  recipe.json
                                           environment.json  ledger.jsonl  evaluations/  logs/  curves.png
                                           manifest.json: size and hash of each of them; others are not believed
    checkpoints/last/                      with "every_save": the checkpoint, to resume from
    checkpoints/{step}/                    with "all_checkpoints": every one that is still there

`stage` gives a push files that nobody changes under it: checkpoints, which are written once, as hard links (copies
where the file system has no links), so that retention may delete them meanwhile; records, which grow, as copies. They
lie in the run's folder, under `.hub`, and are removed after the push. A checkpoint that vanished before it could be
staged is superseded: a newer one exists. A run with a link in it is refused: a link would send any file of the user to
the Hub. Nothing here opens a socket.

A checkpoint holds the model's own config (`model_config_writer`), so that nothing but the folder is needed.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hezar_train.checkpoint import (
    Checkpoint,
    CheckpointStore,
    files_for_others,
    has_adapters,
    verify,
    write_adapter_configs,
)
from hezar_train.checkpoint.format import tensor_file
from hezar_train.checkpoint.manifest import (
    Manifest,
    free_bytes,
    hash_file,
    is_inside,
    read_manifest,
    remove_folder,
    write_file_durably,
)
from hezar_train.checkpoint.shard_files import INDEX_NAME, ShardIndex
from hezar_train.config.files import read_json, read_mapping
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.report import curves_png
from hezar_train.run_folder import open_file, plain_path, refuse_odd_file, refuse_second_name
from hezar_train.run_layout import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    BASE_FILE,
    BEST_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    CURVES_FILE,
    DROPPED_SUFFIX,
    EVALUATIONS_FOLDER,
    HEZAR_CONFIG_FILE,
    LEDGER_FILE,
    LOGS_FOLDER,
    MANIFEST_FILE,
    MODEL_CONFIG_FOLDER,
    MODEL_FILE,
    OPTIMIZER_FILE,
    PLAN_FILE,
    PREPROCESSOR_FOLDER,
    RECIPE_FILE,
    STARTS_FILE,
    STATE_FILE,
    TRAINED_FILE,
    RunLayout,
    step_name,
    without_host,
)

__all__ = [
    "CARD_FILE",
    "CHECKPOINTS_FOLDER",
    "CURVES_FILE",
    "LAST",
    "MODEL_CONFIG_FOLDER",
    "TRAIN_FOLDER",
    "PushNames",
    "SavedRun",
    "Staged",
    "SupersededError",
    "model_config_writer",
    "refuse_model_name",
    "remove_leftovers",
    "stage",
]

TRAIN_FOLDER = "train"
LAST = f"{CHECKPOINTS_FOLDER}/last"
CARD_FILE = "README.md"
GENERATION_CONFIG_FILE = "generation_config.json"
PUSH_PREFIX = "push-"
RECORDS = (PLAN_FILE, BEST_FILE, RECIPE_FILE, STARTS_FILE, LEDGER_FILE)
NO_LINKS_ERRNOS = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class SavedRun:
    """A run as its folder has it, while it trains and afterwards; it is only read."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout.at(root)
        self.layout.refuse_links()
        self.settings: dict[str, Any] = read_mapping(self.layout.config)
        self.store = CheckpointStore(self.layout.checkpoints)

    def newest_step(self) -> int:
        """Return the step of the newest checkpoint."""
        if not (steps := self.store.steps()):
            raise CheckpointError(f"{self.store.root} holds no checkpoint: there is nothing to push")
        return steps[-1]

    def best_step(self) -> int:
        """Return the step of the best checkpoint, or of the newest where none was found best."""
        best = read_json(self.layout.best).get("step")
        return best if isinstance(best, int) and best in self.store.steps() else self.newest_step()

    def evaluation_at(self, step: int) -> dict[str, Any]:
        """Return the record of the newest evaluation that is not past a step; empty if there is none."""
        records = self.layout.evaluation_records()
        reached = [one for one in records if one <= step]
        return read_json(records[reached[-1]]) if reached else {}


class SupersededError(CheckpointError):
    """The checkpoint to push is gone: retention deleted it, because newer ones exist."""


@dataclass(frozen=True)
class PushNames:
    """What files are called in the repository, and which are left out."""

    config: str = CONFIG_FILE
    model: str = MODEL_FILE
    model_config: str | None = None
    """None: as the model's own library calls it."""
    optimizer: str = OPTIMIZER_FILE
    subfolder: str = TRAIN_FOLDER
    push_model: bool = True
    push_optimizer: bool = False
    push_logs: bool = True


@dataclass(frozen=True)
class Staged:
    """Files at rest, by their path in the repository."""

    folder: Path
    step: int
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def discard(self) -> None:
        """Remove the staged files."""
        remove_folder(self.folder)


def stage(
    run: SavedRun,
    step: int,
    strategy: str,
    names: PushNames | None = None,
    extra_folder: Path | None = None,
    *,
    verified: bool = False,
) -> Staged:
    """Put everything a push needs aside; `verified` says that the checkpoint's hashes need not be checked again."""
    names = names or PushNames()
    staged = Staged(_new_folder(run.layout.hub_staging), step)
    try:
        checkpoint = _link_checkpoint(run, step, staged.folder, verified=verified)
        staged.files.update(_root_files(checkpoint, names))
        staged.files.update(_train_files(run, checkpoint, staged.folder, names))
        if strategy == "every_save":
            staged.files.update(_checkpoint_files(checkpoint, LAST))
        elif strategy == "all_checkpoints":
            staged.files.update(_all_checkpoints(run, checkpoint, staged.folder, verified=verified))
        if extra_folder is not None:
            staged.files.update(_below(extra_folder, ""))
        _refuse_outside(staged.files)
    except BaseException:
        staged.discard()
        raise
    return staged


def remove_leftovers(run: SavedRun) -> None:
    """Remove what pushes of processes that are gone left behind on this host."""
    for folder in run.layout.hub_staging.glob(f"{PUSH_PREFIX}*"):
        host, _, pid = folder.name.removeprefix(PUSH_PREFIX).rpartition("-")[0].rpartition("-")
        if host == _host() and pid.isascii() and pid.isdigit() and not _is_alive(int(pid)):
            remove_folder(folder)


def _new_folder(parent: Path) -> Path:
    folder = parent / f"{PUSH_PREFIX}{_host()}-{os.getpid()}-{secrets.randbits(64)}"
    folder.mkdir(parents=True)
    return folder


def _host() -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in socket.gethostname())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no process can have that number
        return False
    except PermissionError:
        return True
    return True


def _link_checkpoint(run: SavedRun, step: int, folder: Path, *, verified: bool) -> Path:
    source, target = run.store.path(step), folder / CHECKPOINTS_FOLDER / step_name(step)
    try:
        manifest = read_manifest(source)
        for name in [*manifest.files, MANIFEST_FILE]:
            _link(plain_path(source, name), target / name)
    except (CheckpointError, FileNotFoundError) as error:
        if not source.exists():
            raise SupersededError(f"the checkpoint of step {step} is not there any more") from None
        raise CheckpointError(f"the checkpoint {source} is damaged and is not pushed: {error}") from error
    if not verified:
        verify(target)
    return target


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        refuse_odd_file(source)
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS_ERRNOS:
            raise
        _copy(source, target)


def _copy(source: Path, target: Path, *, accept_second_name: bool = True) -> None:
    with os.fdopen(open_file(source), "rb") as file, target.open("xb") as copy_of_it:
        if not accept_second_name:
            refuse_second_name(source, file.fileno())
        shutil.copyfileobj(file, copy_of_it)


def _root_files(checkpoint: Path, names: PushNames) -> dict[str, Path]:
    """Return the files that others load a model from."""
    if not names.push_model:
        return {}
    manifest = read_manifest(checkpoint)
    files = _below(checkpoint / PREPROCESSOR_FOLDER, "")
    for name, path in _below(checkpoint / MODEL_CONFIG_FOLDER, "").items():
        is_renamed = names.model_config is not None and path.suffix == Path(names.model_config).suffix
        is_renamed = is_renamed and Path(name).name not in (GENERATION_CONFIG_FILE, ADAPTER_CONFIG_FILE)
        files[str(names.model_config) if is_renamed else name] = path
    files.pop(CARD_FILE, None)
    if BASE_FILE in manifest.files:
        refuse_model_name(names.model)
        return files | _trained_part(checkpoint)
    return files | {names.model: _whole_model(checkpoint, manifest)}


def _trained_part(checkpoint: Path) -> dict[str, Path]:
    """Return the files of what was trained, adapters as peft loads them, and what is said of the base model."""
    opened, folder = Checkpoint(checkpoint), checkpoint.parent.parent / "trained"
    files = {BASE_FILE: checkpoint / BASE_FILE}
    if opened.base is not None:
        tensors, _ = opened.model()
        extra = opened.extra()
        computed = (isinstance(extra, dict) and extra.get("adapters")) or {}
        for name, part in files_for_others(opened.base, tensors, computed).items():
            files[name] = plain_path(folder, name)
            files[name].parent.mkdir(parents=True, exist_ok=True)
            write_file_durably(files[name], tensor_file(part))
    return files


def refuse_model_name(name: str) -> None:
    """Raise if the file of a trained part is to have a name of the user's: libraries find an adapter by its own."""
    if name != MODEL_FILE:
        raise ConfigError(
            f"the weights are to be called {name!r}, but only what was trained is saved: peft finds adapters as "
            f"{ADAPTER_FILE}, and anything else is called {TRAINED_FILE}. Leave the name out, or save with merge=True."
        )


def _whole_model(checkpoint: Path, manifest: Manifest) -> Path:
    """Return one file with all weights; shards, which only this package reads, are put together."""
    if not any(INDEX_NAME.fullmatch(name) for name in manifest.files):
        return checkpoint / MODEL_FILE
    whole = checkpoint.parent.parent / f"whole-{MODEL_FILE}"
    write_file_durably(whole, tensor_file(ShardIndex(checkpoint).read_whole("model")))
    return whole


def _train_files(run: SavedRun, checkpoint: Path, folder: Path, names: PushNames) -> dict[str, Path]:
    """Return the trainer's files: config and state, and the records, which are copied because they still grow."""
    train = names.subfolder.strip("/")
    copies = folder / "records"
    found = {CONFIG_FILE: run.layout.config} | {name: run.layout.root / name for name in RECORDS}
    records = _beside_checkpoints(run, _below(run.layout.evaluations, EVALUATIONS_FOLDER)).items()
    found |= {name: path for name, path in records if path.suffix != ".png"}  # samples stay at home
    if names.push_logs:
        found |= _without_hosts(_beside_checkpoints(run, _below(run.layout.all_logs, LOGS_FOLDER)))
    files = {f"{train}/{name}": path for name, path in _copies(found, copies).items()}
    files[f"{train}/{names.config}"] = files.pop(f"{train}/{CONFIG_FILE}")
    files[f"{train}/{STATE_FILE}"] = checkpoint / STATE_FILE
    if names.push_optimizer:
        files[f"{train}/{names.optimizer}"] = checkpoint / OPTIMIZER_FILE
    if names.push_logs and (curves := curves_png(run.layout.root, folder / CURVES_FILE)) is not None:
        files[f"{train}/{CURVES_FILE}"] = curves
    return files | {f"{train}/{MANIFEST_FILE}": _write_manifest(files, train, folder, int(checkpoint.name))}


def _beside_checkpoints(run: SavedRun, files: dict[str, Path]) -> dict[str, Path]:
    """Return the files that are none of a checkpoint's: a config may put those into the folder of records."""
    saved = run.layout.checkpoint_folders().values()
    return {name: path for name, path in files.items() if not any(path.is_relative_to(one) for one in saved)}


def _without_hosts(logs: dict[str, Path]) -> dict[str, Path]:
    """Return logs under names that tell no machine's; two folders of one second stay two."""
    published: dict[str, str] = {}
    for folder in sorted({name.rpartition("/")[0] for name in logs}):
        wanted = without_host(folder)
        names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        published[folder] = next(name for name in names if name not in published.values())
    parts = {name: (published[name.rpartition("/")[0]], name.rpartition("/")[2]) for name in logs}
    return {f"{folder}/{without_host(file)}": logs[name] for name, (folder, file) in parts.items()}


def _write_manifest(files: dict[str, Path], train: str, folder: Path, step: int) -> Path:
    """List the trainer's files with their hashes, as a checkpoint's are: who fetches them believes no others."""
    records = {name.removeprefix(f"{train}/"): hash_file(path) for name, path in files.items()}
    path = folder / f"records-{MANIFEST_FILE}"
    write_file_durably(path, [Manifest(step, records).to_bytes()])
    return path


def _refuse_outside(files: Iterable[str]) -> None:
    for name in files:
        if not is_inside(name):
            raise ConfigError(f"{name!r} cannot be the name of a file in a repository: it leads outside")


def _copies(found: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Copy records; one with a second name only if a manifest beside it says what is in it.

    A run without a config of its own has that of a checkpoint, whose files pushes link to.
    """
    needed = sum(source.stat().st_size for source in found.values() if source.is_file())
    if needed > (free := free_bytes(folder.parent)):  # a file with holes can claim any size, and a copy of it has none
        raise CheckpointError(f"the records of the run have {needed:,} bytes, and {free:,} are free in {folder.parent}")
    files = {}
    for name, source in found.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy(source, target, accept_second_name=_is_listed(source))
        except FileNotFoundError:  # a run without it, or a file that a resume has just put aside
            continue
        files[name] = target
    return files


def _is_listed(path: Path) -> bool:
    """Tell whether a file has the content that the manifest of its folder says: who made that up knew it already."""
    try:
        return (path.parent / MANIFEST_FILE).is_file() and read_manifest(path.parent).files.get(path.name) == hash_file(
            path
        )
    except (CheckpointError, OSError):
        return False


def _all_checkpoints(run: SavedRun, newest: Path, folder: Path, *, verified: bool) -> dict[str, Path]:
    files = _checkpoint_files(newest, f"{CHECKPOINTS_FOLDER}/{newest.name}")
    for step in run.store.steps():
        if step == int(newest.name):
            continue
        try:
            other = _link_checkpoint(run, step, folder, verified=verified)
        except SupersededError:  # retention was faster
            continue
        files |= _checkpoint_files(other, f"{CHECKPOINTS_FOLDER}/{other.name}")
    return files


def _checkpoint_files(checkpoint: Path, prefix: str) -> dict[str, Path]:
    """Return all files of a checkpoint: those that its manifest lists, and it."""
    return {f"{prefix}/{name}": checkpoint / name for name in [*read_manifest(checkpoint).files, MANIFEST_FILE]}


def _below(folder: Path, prefix: str) -> dict[str, Path]:
    """Return the files below a folder by their paths in the repository; links and hidden files are not followed."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    named = ((path.relative_to(folder), path) for path in found)
    return {"/".join(_parts(prefix, relative.parts)): path for relative, path in named if _is_wanted(relative)}


def _parts(prefix: str, parts: Iterable[str]) -> list[str]:
    return [part for part in (prefix, *parts) if part]


def _is_wanted(relative: Path) -> bool:
    return not any(part.startswith(".") for part in relative.parts) and relative.suffix != DROPPED_SUFFIX


def model_config_writer(model: Any) -> Callable[[Path], None] | None:
    """Return how to write a bare model's config into a folder; None for a model that has none to write.

    A model is asked for its config's `save_pretrained` (transformers) or `save` (hezar); of adapters, the config is
    what peft looks for.
    """
    if has_adapters(model):
        return lambda folder: write_adapter_configs(model, folder)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        return lambda folder: _write_transformers(model, folder)
    if hasattr(config, "save"):
        return lambda folder: config.save(str(folder), filename=HEZAR_CONFIG_FILE)
    return None


def _write_transformers(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    if hasattr(config, "architectures"):
        config.architectures = [type(model).__name__]  # as the library does; pipelines look for it
    config.save_pretrained(str(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(str(folder))

"""Fuzz targets: choices become files that somebody else could have made, and every reader of them is asked.

A target is called with `Choices`, which come from bytes (atheris, the kept corpus) or from hypothesis. It writes files
that are nearly right, hashes included, so that what is behind the first check is reached, too; then it calls the
readers. An answer is a value, or an error of this package; any other exception is a finding, and so are more than
`MOST_SECONDS` of CPU time. `benchmarks/fuzz.py` runs targets for hours.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint import Checkpoint, CheckpointStore, initial_weights
from hezar_train.checkpoint.manifest import (
    Draft,
    FileRecord,
    Manifest,
    _hash,
    read_best_step,
    read_manifest,
    verify,
)
from hezar_train.checkpoint.shard_files import Box, Place, write_shards
from hezar_train.cli import root
from hezar_train.config.files import to_yaml
from hezar_train.errors import HezarTrainError
from hezar_train.events import Ledger
from hezar_train.hooks import Checkpointed, EvalHook, PeriodicWriter
from hezar_train.hub import fetch_checkpoint, fetch_recipe, fetch_records, fetch_weights
from hezar_train.hub.card import RunFacts, render_card
from hezar_train.hub.pushed_files import SavedRun
from hezar_train.plan import Plan
from hezar_train.report import write_report
from hezar_train.report.read import read_run, saved_checkpoints, starts_of, time_split
from hezar_train.state import TrainerState
from tests.hub.conftest import _point_client, _point_environment

MOST_SECONDS = 5.0

Tree = Any
Files = dict[str, bytes]


class SlowError(AssertionError):
    """A reader that took too long."""


class Choices(Protocol):
    """Where the choices of a target come from."""

    def number(self, most: int) -> int:
        """Choose a number from 0 to `most`."""

    def raw(self) -> bytes:
        """Choose bytes."""


class ByteChoices:
    """Choices that a row of bytes makes; zeros once it has ended."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def number(self, most: int) -> int:
        size = (most.bit_length() + 7) // 8
        found = int.from_bytes(self._take(size), "little")
        return found % (most + 1)

    def raw(self) -> bytes:
        return self._take(len(self._data))

    def _take(self, size: int) -> bytes:
        found = self._data[self._place : self._place + size]
        self._place += size
        return found


def pick(choices: Choices, values: Any) -> Any:
    return values[choices.number(len(values) - 1)]


INTS = (
    0,
    1,
    -1,
    2,
    12,
    13,
    255,
    1 << 31,
    (1 << 53) + 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63),
    1 << 64,
    10**30,
    10**400,
)
FLOATS = (0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 1e300, -1e300, 1e19)
ODD_TEXTS = (
    *("", " ", "\x00", "\x1b[2J", "\ud800", "²", "../../x", "/etc/passwd", "nan", "1e400", "a" * 300, "none", "true"),
    *("__class__", "__dict__", "~", "*", "a.b", "os.system", "hub://a/b", "\u202e"),
)
TAGS = ("$tensor", "$array", "$scalar", "$tuple", "$float", "$bytes", "$dict", "$ordered", "$counter", "$other")
DTYPES = ("|O", "<f8", "|b1", "<U4", "<M8[ns]", "<M8", "|S0", "<f3", "<M8[zz]", "|V8", "<u8", ">i4", "<c16", "<U999999")


def value(choices: Choices, words: tuple[str, ...], depth: int = 3) -> Tree:  # noqa: PLR0911 - a line a kind
    """Make a value as JSON has them, tagged as in a checkpoint now and then."""
    kind = choices.number(12 if depth else 6)
    if kind <= 1:
        return pick(choices, INTS) if kind else pick(choices, (None, True, False))
    if kind == 2:
        return choices.number(300) - 20
    if kind == 3:
        return pick(choices, FLOATS)
    if kind <= 5:
        return pick(choices, words) if kind == 5 and words else pick(choices, ODD_TEXTS)
    if kind == 6:
        return {"$float": pick(choices, ("nan", "inf", "-inf", "x"))}
    if kind <= 8:
        return [value(choices, words, depth - 1) for _ in range(choices.number(3))]
    if kind <= 10:
        return {_name(choices, words): value(choices, words, depth - 1) for _ in range(choices.number(3))}
    return _tagged(choices, words, depth - 1)


def _name(choices: Choices, words: tuple[str, ...]) -> str:
    return str(pick(choices, words if words and choices.number(3) else ODD_TEXTS))


def _tagged(choices: Choices, words: tuple[str, ...], depth: int) -> Tree:
    tag = pick(choices, TAGS)
    if tag == "$array":
        shape = [pick(choices, INTS) for _ in range(choices.number(3))]
        return {tag: {"tensor": pick(choices, words or ("a",)), "dtype": pick(choices, DTYPES), "shape": shape}}
    if tag == "$scalar":
        return {tag: {"dtype": pick(choices, DTYPES), "hex": "00ff" * choices.number(8)}}
    if tag in ("$dict", "$ordered", "$counter"):
        pairs = range(choices.number(3))
        return {tag: [[value(choices, words, depth), value(choices, words, depth)] for _ in pairs]}
    return {tag: value(choices, words, depth)}


def places_in(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a tree with every key or index in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from places_in(tree[key])


def edited(choices: Choices, tree: Tree, words: tuple[str, ...]) -> Tree:
    """Return a tree with one place changed: another value, none, one more, or one from another place."""
    tree = copy.deepcopy(tree)
    places = list(places_in(tree))
    if not places:
        return value(choices, words)
    parent, key = pick(choices, places)
    how = choices.number(7)
    if how == 0:
        del parent[key]
    elif how == 1 and isinstance(parent, dict):
        parent[_name(choices, words)] = value(choices, words)
    elif how == 1:
        parent.insert(key, value(choices, words))
    elif how == 2:
        other, name = pick(choices, places)
        if name in other if isinstance(other, dict) else name < len(other):
            parent[key] = copy.deepcopy(other[name])
    elif how == 3 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        parent[key] += choices.number(8) - 4
    else:
        parent[key] = value(choices, words)
    return tree


def words_of(tree: Tree) -> tuple[str, ...]:
    """Return the names and texts that a tree has, in order, each once."""
    found = [str(key) for _, key in places_in(tree) if isinstance(key, str)]
    found += [parent[key] for parent, key in places_in(tree) if isinstance(parent[key], str)]
    return tuple(dict.fromkeys(found))


def edited_bytes(choices: Choices, content: bytes) -> bytes:
    """Change, cut or replace bytes."""
    if choices.number(3) == 0:
        return choices.raw()
    changed = bytearray(content)
    for _ in range(1 + choices.number(3)):
        if changed:
            changed[choices.number(len(changed) - 1)] = choices.number(255)
    return bytes(changed[: choices.number(len(changed))] if choices.number(7) == 0 else changed)


def edited_json(choices: Choices, content: bytes) -> bytes:
    """Change JSON: a few places of its tree, or its bytes."""
    if choices.number(15) == 0:
        return edited_bytes(choices, content)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):  # it was changed before
        return edited_bytes(choices, content)
    words = words_of(tree)
    for _ in range(1 + choices.number(2)):
        tree = edited(choices, tree, words)
    return json.dumps(tree).encode()


def edited_safetensors(choices: Choices, content: bytes) -> bytes:
    """Change a file of tensors: its header, or its bytes."""
    if choices.number(3) == 0:
        return edited_bytes(choices, content)
    size = int.from_bytes(content[:8], "little")
    header = edited_json(choices, content[8 : 8 + size])
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def edited_file(choices: Choices, name: str, content: bytes) -> bytes:
    if name.endswith(".json") and not name.endswith("metrics.json"):
        return edited_json(choices, content)
    if name.endswith((".jsonl", "metrics.json")):
        return edited_lines(choices, content)
    if name.endswith(".safetensors"):
        return edited_safetensors(choices, content)
    if name.endswith(".yaml"):
        return edited_yaml(choices, content)
    return edited_bytes(choices, content)


def edited_lines(choices: Choices, content: bytes) -> bytes:
    """Change a line of JSON, or leave one out, or have it twice."""
    lines = content.splitlines(keepends=True)
    if not lines:
        return edited_bytes(choices, content)
    for _ in range(1 + choices.number(2)):
        number, how = choices.number(len(lines) - 1), choices.number(7)
        if how == 0:
            lines.insert(number, lines[number])
        elif how == 1 and len(lines) > 1:
            del lines[number]
        else:
            lines[number] = edited_json(choices, lines[number] if lines[number].strip() else b"{}") + b"\n"
    return b"".join(lines)


YAML_PIECES = (
    *("&x ", "*x", "[", "]", "{", "}", "- ", "\n", "  ", "!!int ", "!!set ", "!!float ", "!!binary ", "!!omap ", "? "),
    *("<<: ", "|", ">", "'", '"', "1e5", "%", "!!timestamp ", "!!pairs ", "!!null ", "0x_", "1:2", ".inf", "---", "#"),
)


def edited_yaml(choices: Choices, content: bytes) -> bytes:
    """Change YAML: values of its mapping, or pieces of its text."""
    mapping: Tree = read_yaml(content) if choices.number(3) else None
    if mapping is not None:
        for _ in range(1 + choices.number(2)):
            mapping = edited(choices, mapping, words_of(mapping))
        return json.dumps(mapping).encode() if choices.number(1) else to_yaml_or_json(mapping)
    if choices.number(1):
        return edited_bytes(choices, content)
    text = content.decode("utf-8", "replace")
    for _ in range(1 + choices.number(5)):
        place = choices.number(len(text))
        text = text[:place] + pick(choices, YAML_PIECES) + text[place:]
    return text.encode()


def read_yaml(content: bytes) -> dict[str, Any] | None:
    """Return the mapping that YAML stands for; None if it was changed before and is none any more."""
    try:
        found = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def to_yaml_or_json(mapping: Tree) -> bytes:
    try:
        return to_yaml(mapping).encode()
    except (UnicodeEncodeError, AttributeError):  # a lone surrogate; no mapping any more
        return json.dumps(mapping).encode()


@contextlib.contextmanager
def answers() -> Iterator[None]:
    """Let errors of this package pass: they are answers."""
    with contextlib.suppress(HezarTrainError):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep logs, progress and warnings off the screen."""
    logging.disable(logging.CRITICAL)
    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def judged(target: Callable[[Choices], None], choices: Choices) -> None:
    """Call a target; raise if its readers take too long, or raise what is not this package's error."""
    begun = time.process_time()
    with quiet(), answers():
        target(choices)
    if (seconds := time.process_time() - begun) > MOST_SECONDS:
        raise SlowError(f"{seconds:.1f} seconds of CPU time")


def command(*arguments: str | Path) -> None:
    """Run a command of `hezar-train` in this process; what it did not expect is raised."""
    done = CliRunner().invoke(root, [str(one) for one in arguments], prog_name="hezar-train")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception


def write_files(folder: Path, files: Files) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def files_in(folder: Path) -> Files:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def sealed_manifest(step: int, files: Files) -> bytes:
    import hashlib

    records = {name: FileRecord(len(one), hashlib.sha256(one).hexdigest()) for name, one in files.items()}
    return Manifest(step, records).to_bytes()


def resealed(manifest: bytes) -> bytes:
    """Return a manifest with the hash that fits it, if it is one at all."""
    try:
        content = json.loads(manifest)
    except ValueError:
        return manifest
    if not isinstance(content, dict):
        return manifest
    content.pop("sha256", None)
    return json.dumps({**content, "sha256": _hash(content)}).encode()


class Counted(IterableDataset):  # type: ignore[type-arg]
    """A stream that keeps its own place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.linspace(-1, 1, 24).reshape(12, 2)
        for place in range(self.place, 12):
            self.place = place + 1
            yield numbers[place], numbers[place].sum().reshape(1)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not 0 <= state["place"] <= 12:
            raise ValueError(f"there is no place {state['place']}")
        self.place = int(state["place"])


GIVEN: dict[str, Any] = {"num_epochs": 2, "batch_size": 2, "save_steps": 4, "log_steps": 3, "criterion": "MSELoss"}
EVALUATED: dict[str, Any] = {"evaluate_with_generate": False, "eval_steps": 4, "early_stopping_patience": 2}
DESCENT = {"optimizer": "sgd"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cycle": {"lr_scheduler": "OneCycleLR", "lr_scheduler_kwargs": {"max_lr": 0.1}, **DESCENT},
    "plateau": {"lr_scheduler": "reduce_on_plateau", "early_stopping_mode": "window", **EVALUATED},
    "curves": {"lr_scheduler": "triangular", "momentum_scheduler": "decay_when_acc", "momentum": 0.9, **DESCENT},
    "stream": {"max_steps": 12, "lr_scheduler": "MultiStepLR", "lr_scheduler_kwargs": {"milestones": [1, 2]}},
    "hooks": {"lr_scheduler": "linear", **EVALUATED, "early_stopping_mode": "mean"},
    "shards": {},
}


def make_trainer(kind: str, folder: Path, **more: Any) -> Trainer:
    """Build the tiny trainer of a kind of run."""
    torch.manual_seed(0)
    numbers = torch.linspace(-1, 1, 24).reshape(12, 2)
    data = TensorDataset(numbers, numbers.sum(1, keepdim=True))
    settings = {**GIVEN, **SETTINGS[kind], **more}
    config = TrainerConfig(str(folder), **settings)
    evaluated = data if "eval_steps" in settings else None
    trainer = Trainer(config, nn.Linear(2, 1), Counted() if kind == "stream" else data, evaluated)
    if kind == "hooks":
        trainer.register_hooks([EvalHook(2, lambda: {"x": 1.0}), PeriodicWriter([], 2)])
        trainer.register_hooks([Checkpointed("more", torch.optim.SGD(nn.Linear(2, 1).parameters(), momentum=0.9))])
    return trainer


def put_in_shards(checkpoint: Path) -> None:
    """Lay the model's weight in the boxes of two processes."""
    from safetensors.torch import load_file, save_file

    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    weight = tensors.pop("weight")
    save_file(tensors, path, {"format": "pt", "complex128": "[]"})
    draft = Draft(checkpoint)
    for rank in range(2):
        place = Place((1, 2), Box((0, rank), (1, 1)), is_first=True)
        part = weight[:, rank : rank + 1].contiguous()
        write_shards(draft, f"{rank:05d}-of-00002", {"model": {"weight": (part, place)}})


def shorten_configs(folder: Path) -> None:
    """Leave out of every config what has its default: to read it takes longer than all else."""
    for path in folder.rglob("train_config.yaml"):
        defaults = {name: field.default for name, field in TrainerConfig.fields().items()}
        found = yaml.safe_load(path.read_bytes())
        path.write_text(to_yaml({name: one for name, one in found.items() if one != defaults[name]}))


class CheckpointTarget:
    """A sealed checkpoint in a run's folder: opened, read, and restored into a trainer, which goes on with it."""

    def __init__(self, folder: Path) -> None:
        self._run = folder / "run"
        self._kinds = list(SETTINGS)
        self._runs: dict[str, Files] = {}
        self._checkpoints: dict[str, Files] = {}
        with quiet():
            for kind in self._kinds:
                self._record(kind, folder / kind)

    def _record(self, kind: str, folder: Path) -> None:
        make_trainer(kind, folder).train()
        newest = max((folder / "checkpoints").glob("[0-9]*"))
        before = folder / "checkpoints" / "00000008"
        if kind == "shards":
            put_in_shards(before)
        shorten_configs(folder)
        self._checkpoints[kind] = {name: one for name, one in files_in(before).items() if name != "manifest.json"}
        shutil.rmtree(newest)
        shutil.rmtree(folder / "checkpoints")
        self._runs[kind] = files_in(folder)
        shutil.rmtree(folder)

    def __call__(self, choices: Choices) -> None:
        kind = pick(choices, self._kinds)
        files = dict(self._checkpoints[kind])
        names = ["trainer_state.json"] * 6 + sorted(files)
        for _ in range(1 + choices.number(1)):
            name = pick(choices, names)
            files[name] = edited_file(choices, name, files[name])
        manifest = sealed_manifest(8, files)
        if choices.number(31) == 0:
            manifest = resealed(edited_json(choices, manifest))
        path = self._write(kind, {**files, "manifest.json": manifest})
        self._read(kind, path, by_path=choices.number(1) == 0, trains=choices.number(1) == 1)

    def try_edits(self, kind: str, edits: list[tuple[str, list[Any], Any]]) -> None:
        """Read a checkpoint in which each place named, by a file and a path in it, has the value given."""
        files = dict(self._checkpoints[kind])
        for name, path, new in edits:
            is_json = name.endswith(".json")
            tree = json.loads(files[name]) if is_json else yaml.safe_load(files[name])
            put(tree, path, new)
            files[name] = json.dumps(tree).encode() if is_json else to_yaml(tree).encode()
        path = self._write(kind, {**files, "manifest.json": sealed_manifest(8, files)})
        self._read(kind, path, by_path=True, trains=True)

    def resumed(self, kind: str) -> Trainer:
        """Resume from the checkpoint as it was saved, to the end."""
        files = self._checkpoints[kind]
        path = self._write(kind, {**files, "manifest.json": sealed_manifest(8, files)})
        trainer = make_trainer(kind, self._run, resume_from_checkpoint=str(path))
        trainer.train()
        return trainer

    def _read(self, kind: str, path: Path, *, by_path: bool, trains: bool) -> None:
        with answers():
            found = Checkpoint(path)
            found.state()
            for part in (found.model, found.optimizer, found.extra):
                with answers():
                    part()
            initial_weights(nn.Linear(2, 1), path)
        with answers():
            trainer = make_trainer(kind, self._run, resume_from_checkpoint=str(path) if by_path else True)
            if trains:
                trainer.train()

    def _write(self, kind: str, files: Files) -> Path:
        shutil.rmtree(self._run, ignore_errors=True)
        write_files(self._run, self._runs[kind])
        path = self._run / "checkpoints" / "00000008"
        write_files(path, files)
        return path


def put(tree: Tree, path: list[Any], new: Any) -> None:
    """Put a value at a place of a tree; the text "$delete" takes it away."""
    for key in path[:-1]:
        tree = tree[key]
    if new == "$delete":
        del tree[path[-1]]
    else:
        tree[path[-1]] = new


CONFIG = """\
output_dir: run
optimizer_kwargs: {betas: [0.9, 0.99]}
metrics: [accuracy, {name: f1, options: {average: macro}}]
stop_when: "f1 >= 0.9"
"""
FIELDS = tuple(TrainerConfig.fields())
CONFIG_WORDS = (
    *FIELDS,
    *(
        "recipe",
        "trainer",
        "name",
        "adam",
        "warmup_cosine",
        "accuracy",
        "f1",
        "evaluation.loss",
        "bf16",
        "best",
        "last",
    ),
    *("every_save", "owner/name", "hub://owner/name@main#3", "cpu", "cuda:1", "MSELoss", "torch.nn.MSELoss", "csv"),
)


class ConfigTarget:
    """A config in YAML or JSON: loaded, validated, shown and compared by the commands."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = read_yaml(CONFIG.encode())
        (folder / "good.yaml").write_text(CONFIG)

    def __call__(self, choices: Choices) -> None:
        path = self._folder / pick(choices, ("a.yaml", "a.json"))
        how = choices.number(3)
        path.write_bytes(choices.raw() if how == 0 else self._made(choices, path.suffix, is_mixed=how == 1))
        what = choices.number(7)
        if what <= 2:
            TrainerConfig.load(path)
        elif what == 3:
            config = TrainerConfig.load(path)
            config.save(self._folder, "saved.yaml")
            assert TrainerConfig.load(self._folder / "saved.yaml") == config
        elif what == 4:
            command("config", "show", path)
        elif what == 5:
            command("config", "diff", path, self._folder / "good.yaml")
        else:
            command("config", "validate", path)

    def _made(self, choices: Choices, suffix: str, *, is_mixed: bool) -> bytes:
        mapping: Tree = copy.deepcopy(self._base)
        for _ in range(1 + choices.number(3)):
            if is_mixed or not isinstance(mapping, dict):
                mapping = edited(choices, mapping, CONFIG_WORDS)
            else:
                mapping[pick(choices, FIELDS)] = value(choices, CONFIG_WORDS)
        if choices.number(7) == 0:
            mapping = {"recipe": value(choices, CONFIG_WORDS), "trainer": mapping}
        if suffix == ".json":
            return json.dumps(mapping).encode()
        content = to_yaml_or_json(mapping)
        return edited_yaml(choices, content) if choices.number(7) == 0 else content


class ManifestTarget:
    """A manifest whose own hash is right, alone in its folder and in a run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints" / "00000008"
        self._files = {name: name.encode() for name in ("model.safetensors", "optimizer.safetensors",
                                                        "trainer_state.json", "train_config.yaml")}  # fmt: skip
        write_files(self._folder, self._files)

    def __call__(self, choices: Choices) -> None:
        content = edited_json(choices, sealed_manifest(8, self._files))
        (self._folder / "manifest.json").write_bytes(resealed(content) if choices.number(7) else content)
        for read in (read_manifest, verify, Checkpoint):
            with answers():
                read(self._folder)
        CheckpointStore(self._folder.parent).steps()
        with answers():
            CheckpointStore(self._folder.parent).newest()


LEDGER = (
    b"".join(
        b'{"update": %d, "epoch": %d, "first": %d, "count": 2}\n' % (step, 1 + (step - 1) // 6, 2 * ((step - 1) % 6))
        for step in range(1, 13)
    )
    + b'{"update": 13, "epoch": 3, "first": 0, "count": 2, "updates": 6}\n'
)


class LedgerTarget:
    """A ledger: read alone."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ledger.jsonl"

    def __call__(self, choices: Choices) -> None:
        content = choices.raw() if choices.number(3) == 0 else edited_lines(choices, LEDGER)
        self._path.write_bytes(content)
        list(Ledger.read(self._path))


class RunFolderTarget:
    """A run's folder with files that say something else: listed, reported, verified and audited."""

    def __init__(self, folder: Path) -> None:
        self._root, self._run = folder / "runs", folder / "runs" / "run"
        with quiet():
            make_trainer("plateau", folder / "base").train()
        shorten_configs(folder / "base")
        self._files = files_in(folder / "base")
        shutil.rmtree(folder / "base")
        self._names = sorted(name for name in self._files if not name.startswith("checkpoints/"))
        self._names += ["checkpoints/00000012/trainer_state.json", "checkpoints/00000012/manifest.json", "lock"]

    def __call__(self, choices: Choices) -> None:
        files = dict(self._files)
        for _ in range(1 + choices.number(2)):
            name = pick(choices, self._names)
            files[name] = edited_file(choices, name, files.get(name, b"{}"))
        if choices.number(7) == 0:
            files[f"{pick(choices, ('evaluations', 'logs/x', 'checkpoints/0', '.'))}/{choices.number(9)}.json"] = b"{}"
        shutil.rmtree(self._root, ignore_errors=True)
        write_files(self._run, files)
        self._read()
        command("runs", self._root)
        self._command(choices)

    def _read(self) -> None:
        for read in (lambda: Plan.load(self._run / "plan.json"), lambda: read_best_step(self._run / "best.json"),
                     lambda: TrainerState.load(self._run / "plan.json")):  # fmt: skip
            with answers():
                read()
        with answers():
            found = read_run(self._run)
            time_split(found, starts_of(found))
            saved_checkpoints(found.layout)
            assert isinstance(found.is_finished, bool)
            assert isinstance(found.is_running, bool)

    def _command(self, choices: Choices) -> None:
        what = choices.number(10)
        if what == 0:
            with answers():
                write_report([self._run], self._root / "report.html")
        elif what <= 3:
            command("verify", self._run, *(["--contents"] if choices.number(1) else []))
        elif what <= 6:
            command("audit", self._run)
        elif what == 7:
            command("config", "show", self._run)
        elif what == 8:
            render_card(RunFacts(SavedRun(self._run), 12), REPOSITORY, {})
        else:
            make_trainer("plateau", self._run, resume_from_checkpoint=True).train()


COMMIT = "a" * 40
REPOSITORY = "me/x"
ODD_HEADERS = ("", "x", '"../../../x"', "0", "-1", "9" * 20, "W/", "b" * 40, "a" * 65, "none", "/etc/passwd")
ODD_STATUSES = (200, 204, 206, 304, 400, 401, 403, 404, 409, 410, 416)


class BentHub:
    """A Hub on loopback with one repository, whose answers are bent before each call."""

    def __init__(self) -> None:
        self.files: Files = {}
        self.info = b"{}"
        self.headers: dict[str, str] = {}
        self.statuses: dict[str, int] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(hub: BentHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(has_body=False)

        def do_GET(self) -> None:
            self.answer(has_body=True)

        def answer(self, *, has_body: bool) -> None:
            is_file = "/resolve/" in self.path
            name = unquote(self.path.partition("/resolve/")[2].partition("/")[2].partition("?")[0])
            content = hub.files.get(name) if is_file else hub.info
            self.send_response(hub.statuses.get("file" if is_file else "info", 404 if content is None else 200))
            given = {"ETag": f'"{"0" * 40}"', "X-Repo-Commit": COMMIT, **(hub.headers if is_file else {})}
            for header, text in {**given, "Content-Length": str(len(content or b""))}.items():
                self.send_header(header, text)
            self.end_headers()
            if has_body and content:
                self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class HubTarget:
    """The answers of a server: lists of files, sizes, ids, headers, and files that say something else."""

    def __init__(self, folder: Path) -> None:
        with quiet():
            make_trainer("plain", folder / "base").train()
        self._files = self._pushed(folder / "base")
        shutil.rmtree(folder / "base")
        self._run, self._home = folder / "run", folder / "home"
        self._hub, self._patch = BentHub(), pytest.MonkeyPatch()
        _point_environment(self._hub, self._home, self._patch)  # type: ignore[arg-type]
        _point_client(self._hub, self._home, self._patch)  # type: ignore[arg-type]
        self._patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)

    def close(self) -> None:
        self._patch.undo()
        self._hub.close()

    def _pushed(self, run: Path) -> Files:
        records = {name: one for name, one in files_in(run).items() if not name.startswith("checkpoints/")}
        records["recipe.json"] = json.dumps({"sha256": "0" * 64, "options": {"size": 3}}).encode()
        records["manifest.json"] = sealed_manifest(12, records)
        last = files_in(run / "checkpoints" / "00000012")
        index = {"weight_map": {"weight": "part.safetensors"}}
        return {
            **{f"train/{name}": one for name, one in records.items()},
            **{f"checkpoints/last/{name}": one for name, one in last.items()},
            "part.safetensors": last["model.safetensors"],
            "model.safetensors.index.json": json.dumps(index).encode(),
            "train_config.yaml": last["train_config.yaml"],
        }

    def __call__(self, choices: Choices) -> None:
        for folder in (self._run, self._home):
            shutil.rmtree(folder, ignore_errors=True)
        self._bend(choices)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: fetch_checkpoint(f"hub://{REPOSITORY}", self._run),
            lambda: fetch_records(f"hub://{REPOSITORY}", self._run),
            lambda: fetch_recipe(REPOSITORY),
            lambda: fetch_weights(REPOSITORY),
            lambda: TrainerConfig.load(REPOSITORY),
        )
        pick(choices, calls)()

    def try_info(self, info: Any) -> None:
        """Ask for weights where the server's description of its repository is this one."""
        hub, hub.files, hub.headers, hub.statuses = self._hub, dict(self._files), {}, {}
        hub.info = json.dumps(info).encode()
        fetch_weights(REPOSITORY)

    def _bend(self, choices: Choices) -> None:
        hub, hub.files, hub.headers, hub.statuses = self._hub, dict(self._files), {}, {}
        what = choices.number(5)
        if what <= 1:
            self._bend_file(choices)
        siblings = [{"rfilename": name, "size": len(one)} for name, one in hub.files.items()]
        names = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT}
        info = {**names, "siblings": siblings, "tags": [], "private": False}
        hub.info = json.dumps(info).encode()
        if 2 <= what <= 4:
            hub.info = edited_json(choices, hub.info)
        if what == 5:
            names = ("ETag", "X-Repo-Commit", "X-Linked-Size", "X-Linked-Etag", "X-Xet-Hash", "Content-Type")
            hub.headers = {pick(choices, names): pick(choices, ODD_HEADERS) for _ in range(1 + choices.number(2))}
            if choices.number(1):
                hub.statuses[pick(choices, ("file", "info"))] = pick(choices, ODD_STATUSES)

    def _bend_file(self, choices: Choices) -> None:
        """Change a file, and have the manifest beside it say so."""
        files = self._hub.files
        name = pick(choices, sorted(files))
        files[name] = edited_file(choices, name, files[name])
        folder = name.rpartition("/")[0]
        while folder and f"{folder}/manifest.json" not in files:
            folder = folder.rpartition("/")[0]
        manifest = f"{folder}/manifest.json"
        if manifest == name:
            files[name] = resealed(files[name])
        elif folder and choices.number(3):
            beside = {one.removeprefix(f"{folder}/"): files[one] for one in files if one.startswith(f"{folder}/")}
            beside.pop("manifest.json")
            files[manifest] = sealed_manifest(12, beside)


TARGETS: dict[str, Callable[[Path], Callable[[Choices], None]]] = {
    "checkpoint": CheckpointTarget,
    "config": ConfigTarget,
    "hub": HubTarget,
    "ledger": LedgerTarget,
    "manifest": ManifestTarget,
    "run_folder": RunFolderTarget,
}

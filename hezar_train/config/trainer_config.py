"""`TrainerConfig`: what the user asked for, checked as a whole, read back from its file, or given as flags.

It holds no derived numbers (those are the plan's) and no progress (that is the state's), and nothing in this package
changes one. Mistakes are told all at once, in one `ConfigError`, when it is built.

`add_arguments` gives an `argparse` parser a flag for each field: its text is read as YAML is, where a field takes more
than text, and its help is the sentence beneath the field. Flags check nothing: the config built from them does.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hezar_train.config.credentials import secret_problems
from hezar_train.config.fields import (
    CheckpointFields,
    DataFields,
    EvaluationFields,
    FinetuneFields,
    HardwareFields,
    HubFields,
    LogFields,
    OptimizerFields,
    RegularizerFields,
    RoundFields,
    RunFields,
    ScheduleFields,
    StoppingFields,
    metric_to_plain,
    metrics_from_plain,
)
from hezar_train.config.files import no_such_file, parse_yaml, read_mapping, to_json, to_plain, to_yaml, write_mapping
from hezar_train.config.named_code import named_code, refuse_foreign_code
from hezar_train.config.names import (
    OPTIMIZER_ALIASES,
    SCHEDULER_ALIASES,
    optimizer_name,
    precision_name,
    scheduler_name,
    tells_unknown_fields,
    unknown_field,
)
from hezar_train.errors import ConfigError, suggestion

__all__ = [
    "CONFIG_FILE",
    "TrainerConfig",
    "add_arguments",
    "field_meanings",
    "given_arguments",
]

CONFIG_FILE = "train_config.yaml"

GROUPS = (
    RunFields,
    HardwareFields,
    DataFields,
    OptimizerFields,
    ScheduleFields,
    EvaluationFields,
    StoppingFields,
    CheckpointFields,
    LogFields,
    RegularizerFields,
    RoundFields,
    FinetuneFields,
    HubFields,
)
"""The groups in the order in which files, flags and messages have them."""

MARKS_OF_HEZAR = {"name": "trainer", "config_type": "trainer"}
"""Entries that Hezar writes into every config file; they say nothing here."""

PERIODS = ("save_steps", "log_steps", "eval_steps", "lr_scheduling_steps")

NOTHING = ("None", "none")
"""How people write YAML's null."""


@tells_unknown_fields
@dataclass(eq=False)
class TrainerConfig(  # the last parent's fields come first
    HubFields,
    FinetuneFields,
    RoundFields,
    RegularizerFields,
    LogFields,
    CheckpointFields,
    StoppingFields,
    EvaluationFields,
    ScheduleFields,
    OptimizerFields,
    DataFields,
    HardwareFields,
    RunFields,
):
    """Everything a training run is told, in one flat dataclass; construction reports all mistakes in one error."""

    def __post_init__(self) -> None:
        if self.save_freq == "deprecated":  # the value that Hezar's files hold
            self.save_freq = None
        renames = self.save_freq is not None and self.save_steps is None
        if renames:
            # A wrong value is then reported under the new name.
            self.save_steps, self.save_freq = self.save_freq, None  # type: ignore[assignment]
        self.metrics = metrics_from_plain(self.metrics)
        self.validate()
        if renames:
            warnings.warn("save_freq is deprecated: write save_steps instead", DeprecationWarning, stacklevel=4)
        for caution in self._cautions():
            warnings.warn(caution, stacklevel=4)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.fields():
            raise ConfigError(unknown_field(name, self.fields(), {name: value}))
        if self.__dict__.get("_is_followed"):
            raise ConfigError(
                f"{name}={value!r} was assigned to the config of a trainer that is built, which would not look at it. "
                "Change a copy: trainer.reconfigure(copy.deepcopy(trainer.config).update(...)); or build a new Trainer."
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_is_followed"}  # a copy may be changed

    def freeze(self) -> None:
        """Refuse assignments from now on, because a trainer has been built by this config; copies are free."""
        self.__dict__["_is_followed"] = True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainerConfig):
            return NotImplemented
        return type(self) is type(other) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields():
            raise KeyError(f"{name!r} is not a field.{suggestion(name, self.fields())}")
        return getattr(self, name)

    def __len__(self) -> int:
        return len(self.fields())

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields())

    @classmethod
    def fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the dataclass fields by name, in order."""
        return {field.name: field for field in dataclasses.fields(cls)}

    def keys(self) -> list[str]:
        """Return the names of all fields."""
        return list(self.fields())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field's value, or `default` where there is no such field."""
        return getattr(self, key) if key in self.fields() else default

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake, group by group."""
        for group in GROUPS:
            yield from group.problems(self)
        yield from secret_problems({name: getattr(self, name) for name in self})

    def validate(self) -> None:
        """Raise one `ConfigError` with every problem, if there are any."""
        if problems := list(self.problems()):
            raise ConfigError(problems)

    def update(self, changes: Mapping[str, Any] | None = None, **more: Any) -> Self:
        """Change several fields at once, or none if the result would have a problem; return the config itself."""
        current = {name: getattr(self, name) for name in self}
        changed = type(self).from_dict({**current, **(changes or {})}, **more)
        for name in self:
            setattr(self, name, getattr(changed, name))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in plain values, as a file holds them."""
        plain = {name: to_plain(getattr(self, name)) for name in self if name != "metrics"}
        metrics = None if self.metrics is None else [metric_to_plain(metric) for metric in self.metrics]
        return {name: metrics if name == "metrics" else plain[name] for name in self}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> Self:
        """Build a config from a mapping, in which `overrides` win."""
        given = {str(name): value for name, value in values.items() if (name, value) not in MARKS_OF_HEZAR.items()}
        return cls(**{**given, **overrides})

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        filename: str = CONFIG_FILE,
        subfolder: str | None = None,
        repo_type: str = "model",
        cache_dir: str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> Self:
        """Read a config from a YAML or JSON file, from the file of that name in a folder, or from the Hub."""
        source = _local(path, filename, subfolder, repo_type, cache_dir)
        if source.is_dir():
            source = source / (subfolder or "") / filename
        if not source.exists():
            raise no_such_file(source, f"Name a config file that is there, or a folder with {CONFIG_FILE}.")
        fields = read_mapping(source)
        if not Path(path).exists():  # it is somebody else's, from the Hub
            refuse_foreign_code({**fields, **overrides}, str(path), named_code(overrides))
        return cls.from_dict(fields, **overrides)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a parser one flag for each field; return the parser."""
        return add_arguments(parser, cls)

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace, **values: Any) -> Self:
        """Build a config from parsed flags, which win over `values`."""
        return cls.from_dict({**values, **given_arguments(namespace, cls)})

    def save(
        self,
        directory: str | os.PathLike[str],
        filename: str = CONFIG_FILE,
        subfolder: str | None = None,
        skip_none_fields: bool = True,
    ) -> Path:
        """Write the config as YAML or JSON, by the suffix of `filename`, and return the file's path."""
        values = {name: value for name, value in self.to_dict().items() if value is not None or not skip_none_fields}
        return write_mapping(Path(directory) / (subfolder or "") / filename, values)

    def push_config_to_hub(
        self,
        repo_id: str,
        filename: str = CONFIG_FILE,
        subfolder: str | None = None,
        repo_type: str = "model",
        skip_none_fields: bool = True,
        private: bool | None = None,
        commit_message: str | None = None,
    ) -> Any:
        """Put the config into a repository on the Hub, which is made if need be; return the commit."""
        from hezar_train.hub import push_files  # inside: a config loads without the Hub

        values = {name: value for name, value in self.to_dict().items() if value is not None or not skip_none_fields}
        content = (to_json if filename.endswith(".json") else to_yaml)(values).encode()
        name = f"{subfolder}/{filename}" if subfolder else filename
        message = commit_message or f"Upload {name}"
        return push_files({name: content}, repo_id, commit_message=message, private=private, repo_type=repo_type)

    @property
    def precision(self) -> str:
        """The precision to train in: "no" (fp32), "bf16", "fp16" or "fp8"."""
        return precision_name(self.mixed_precision)

    @property
    def optimizer_name(self) -> str:
        """The optimizer in lower case with old spellings resolved, or its dotted path."""
        return optimizer_name(self.optimizer)

    @property
    def scheduler_name(self) -> str | None:
        """The schedule's short name or torch class name with old spellings resolved, its dotted path, or None."""
        return scheduler_name(self.lr_scheduler)

    def _cautions(self) -> Iterator[str]:
        """Yield what works, but perhaps not as meant."""
        if self.optimizer is not None and self.optimizer.lower() in OPTIMIZER_ALIASES:
            yield f"optimizer={str(self.optimizer)!r} is an old spelling of {self.optimizer_name!r}"
        if self.lr_scheduler is not None and self.lr_scheduler.lower() in SCHEDULER_ALIASES:
            yield f"lr_scheduler={str(self.lr_scheduler)!r} is an old spelling of {self.scheduler_name!r}"
        accumulation = 1 if self.counts_tokens else self.gradient_accumulation_steps  # tokens: periods count updates
        for name in PERIODS:
            period = getattr(self, name)
            if isinstance(period, int) and period != 1 and period % accumulation:  # 1 plainly means every update
                updates = -(-period // accumulation)
                yield (
                    f"{name}={period} is not a multiple of gradient_accumulation_steps={accumulation}: what falls due "
                    f"inside an update happens at its end, here every {updates * accumulation} steps"
                )


def _local(
    path: str | os.PathLike[str],
    filename: str,
    subfolder: str | None,
    repo_type: str,
    cache_dir: str | os.PathLike[str] | None,
) -> Path:
    """Return the path of a config; one that is on the Hub is downloaded."""
    if Path(path).exists() or not isinstance(path, str) or path.endswith((".yaml", ".yml", ".json")):
        return Path(path)
    from hezar_train.hub import fetch_file, names_hub_weights, parse_address  # inside, as above

    if not names_hub_weights(path):
        return Path(path)
    place = parse_address(path)
    name = f"{subfolder}/{filename}" if subfolder else filename
    return fetch_file(place.repo_id, name, revision=place.revision, repo_type=repo_type, cache_dir=cache_dir)


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

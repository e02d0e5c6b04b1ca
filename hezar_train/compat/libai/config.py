"""LiBai's lazy configs: `LazyCall` describes a call, `instantiate` makes it, `LazyConfig` reads files of such calls.

A config is a `DictConfig` of OmegaConf that may hold any object. A `.py` config file is a program and runs when it is
loaded; a YAML file holds plain values alone. `get_config` has the groups that most LiBai configs begin with: its
defaults of `train`, `optim` and `graph`.
"""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hezar_train.errors import ConfigError, MissingDependencyError, choices, suggestion
from hezar_train.runtime import logger

__all__ = [
    "LazyCall",
    "LazyConfig",
    "as_config",
    "configurable",
    "default_argument_parser",
    "get_config",
    "instantiate",
    "try_get_key",
]

TARGET, RECURSIVE = "_target_", "_recursive_"
FLAGS = {"allow_objects": True}
PLAIN = (bool, int, float, str, type(None))


def _omegaconf() -> Any:
    try:
        return importlib.import_module("omegaconf")
    except ImportError:
        raise MissingDependencyError("omegaconf", "libai", "a lazy config of LiBai's") from None


def as_config(values: Any) -> Any:
    """Return a dict or a list as a config that may hold any object; anything else as it is."""
    found = _omegaconf()
    if isinstance(values, dict):
        return found.DictConfig(content=values, flags=FLAGS)
    return found.ListConfig(content=values, flags=FLAGS) if isinstance(values, list) else values


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or _omegaconf().OmegaConf.is_dict(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) or _omegaconf().OmegaConf.is_list(value)


class LazyCall:
    """Describe a call instead of making it: `LazyCall(nn.Linear)(in_features=4, out_features=2)` is a config."""

    def __init__(self, target: Callable[..., Any] | str | Mapping[str, Any]) -> None:
        if not (callable(target) or isinstance(target, str) or _is_mapping(target)):
            raise ConfigError(f"LazyCall({target!r}): expected something to call, or its dotted name")
        self._target = target

    def __call__(self, **arguments: Any) -> Any:
        """Return the call with these arguments, as a config; they may be changed before it is made."""
        # OmegaConf would take a dataclass for a config of its own kind, and cannot hold the kinds of containers
        is_by_name = dataclasses.is_dataclass(self._target) or self._target in (dict, list, tuple)
        target = _dotted_name(self._target) if is_by_name else self._target
        return as_config({**arguments, TARGET: target})


def instantiate(cfg: Any, **arguments: Any) -> Any:
    """Make the call that a config describes, those among its arguments first; what describes none stays as it is.

    A list gives a list. Further arguments go to the call; with `_recursive_=False` its own arguments are left as they
    are.
    """
    recursive = arguments.pop(RECURSIVE, True)
    if arguments and _is_mapping(cfg):
        cfg = as_config({**dict(cfg.items()), **arguments})
    return _made(cfg, recursive)


def _made(cfg: Any, recursive: bool) -> Any:
    if cfg is None or isinstance(cfg, str):
        return cfg
    if _is_list(cfg):
        return [_made(one, recursive) for one in cfg]
    if not _is_mapping(cfg) or TARGET not in cfg:
        return cfg
    recursive = cfg.get(RECURSIVE, recursive)
    call = _target_of(_made(cfg[TARGET], recursive=True))
    given = {str(name): value for name, value in cfg.items() if name not in {TARGET, RECURSIVE}}
    if recursive:
        given = {name: _made(value, recursive) for name, value in given.items()}
    try:
        return call(**given)
    except Exception as error:
        error.add_note(f"while making what a config describes: {_dotted_name(call)}({', '.join(given)})")
        raise


def _target_of(target: Any) -> Callable[..., Any]:
    found = _located(target) if isinstance(target, str) else target
    if not callable(found):
        raise ConfigError(f"{TARGET}={target!r} is a {type(found).__name__}; expected something to call")
    return found  # type: ignore[no-any-return]


def _located(name: str) -> Any:
    """Return what a dotted name means: a module's name, and one or more names in it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            continue
        try:
            return functools.reduce(getattr, parts[cut:], module)
        except AttributeError:
            break
    raise ConfigError(f"{TARGET}={name!r} cannot be found; expected a dotted name such as 'torch.nn.Linear'")


def _dotted_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"


def try_get_key(cfg: Any, *keys: str, default: Any = None) -> Any:
    """Return the first of some dotted keys that a config has, else the default."""
    absent = object()
    for key in keys:
        found = _omegaconf().OmegaConf.select(cfg, key, default=absent)
        if found is not absent:
            return found
    return default


class LazyConfig:
    """Read, change and write configs."""

    @staticmethod
    def load(filename: str | os.PathLike[str], keys: str | tuple[str, ...] | None = None) -> Any:
        """Read a config file: all of its configs by name, or those that are named."""
        path = Path(filename)
        if path.suffix not in {".py", ".yaml", ".yml"}:
            raise ConfigError(f"the config file {path} is neither Python (.py) nor YAML (.yaml, .yml)")
        found = _run(path) if path.suffix == ".py" else _plain_yaml(path)
        if keys is None:
            return as_config({name: as_config(value) for name, value in found.items() if _is_shown(name, value)})
        missing = [key for key in ([keys] if isinstance(keys, str) else keys) if key not in found]
        if missing:
            known = [name for name, value in found.items() if _is_shown(name, value)]
            raise ConfigError(f"{path} has no {choices(missing)}. It has: {choices(known)}.")
        return as_config(found[keys]) if isinstance(keys, str) else tuple(as_config(found[key]) for key in keys)

    @staticmethod
    def apply_overrides(cfg: Any, overrides: Sequence[str] | None) -> Any:
        """Set dotted keys in a config, in place: ["train.train_iter=100", "optim.lr=1e-3"]; return it."""
        for text in overrides or ():
            key, equals, value = text.partition("=")
            if not equals or key.startswith("~"):
                raise ConfigError(f"{text!r} is no override; expected key=value, for example train.train_iter=100")
            key = key.lstrip("+")
            _refuse_below_a_value(cfg, key)
            _omegaconf().OmegaConf.update(cfg, key, _value_of(value), merge=True, force_add=True)
        return cfg

    @staticmethod
    def save(cfg: Any, filename: str | os.PathLike[str]) -> None:
        """Write a config as YAML of plain values; a target by its dotted name, any other object as it prints itself."""
        objects: list[str] = []
        text = yaml.safe_dump(_plain(cfg, "", objects), default_flow_style=None, allow_unicode=True, width=9999)
        Path(filename).write_text(text, encoding="utf-8")
        if objects:
            logger.info("%s shows objects as they print themselves, at: %s", filename, ", ".join(objects))


def _is_shown(name: str, value: Any) -> bool:
    return not name.startswith("_") and (isinstance(value, dict) or _is_mapping(value) or _is_list(value))


def _plain_yaml(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; expected names with values")
    return found


def _run(path: Path) -> dict[str, Any]:
    """Run a config file; its relative imports are other files beside it, run anew each time."""
    # in a dict of its own: what a config imports relatively must not change how anybody else imports
    importing = {**vars(builtins), "__import__": functools.partial(_import_beside, path)}
    namespace: dict[str, Any] = {"__file__": os.fspath(path), "__name__": path.stem, "__builtins__": importing}
    exec(compile(path.read_text(encoding="utf-8"), os.fspath(path), "exec"), namespace)
    return {name: value for name, value in namespace.items() if name != "__builtins__"}


def _import_beside(
    path: Path, name: str, globals_: Any = None, locals_: Any = None, fromlist: Iterable[str] = (), level: int = 0
) -> Any:
    if level == 0:
        return builtins.__import__(name, globals_, locals_, tuple(fromlist or ()), 0)
    folder = path.parents[level - 1]
    names = list(fromlist or ())
    if not name:  # from . import one, two
        return types.SimpleNamespace(
            **{one: types.SimpleNamespace(**_found_beside(folder, one, path)) for one in names}
        )
    return types.SimpleNamespace(**_found_beside(folder, name, path))


def _found_beside(folder: Path, name: str, importer: Path) -> dict[str, Any]:
    wanted = folder.joinpath(*name.split(".")).with_suffix(".py")
    if not wanted.is_file():
        raise ImportError(f"{importer} imports {name!r} from beside it, but there is no {wanted}")
    return {one: as_config(value) if isinstance(value, dict) else value for one, value in _run(wanted).items()}


def _refuse_below_a_value(cfg: Any, key: str) -> None:
    """Raise where a part of a dotted key is no group but a value."""
    parts = key.split(".")
    for cut in range(1, len(parts)):
        prefix = ".".join(parts[:cut])
        found = try_get_key(cfg, prefix)
        if found is not None and not (_is_mapping(found) or _is_list(found)):
            raise ConfigError(f"{key}=... cannot be set: {prefix} is a {type(found).__name__}, not a group")


def _value_of(text: str) -> Any:
    """Read the value of an override: YAML, and numbers such as 1e-3, which YAML takes for a text."""
    try:
        return float(text) if "e" in text.lower() else yaml.safe_load(text)
    except ValueError:
        return yaml.safe_load(text)


def _plain(value: Any, where: str, objects: list[str]) -> Any:
    if isinstance(value, PLAIN):
        return value
    if _is_mapping(value):
        below = {str(name): (f"{where}.{name}".strip("."), one) for name, one in value.items()}
        return {
            name: _dotted_name(one) if name == TARGET else _plain(one, place, objects)
            for name, (place, one) in below.items()
        }
    if _is_list(value) or isinstance(value, tuple):
        return [_plain(one, f"{where}.{number}", objects) for number, one in enumerate(value)]
    objects.append(where)
    return str(value)


def get_config(config_path: str) -> Any:
    """Return a group of LiBai's defaults, `get_config("common/train.py").train`, or a file of ./configs."""
    from hezar_train.compat.libai.defaults import DEFAULTS

    own = Path("configs", config_path)
    if own.is_file():
        return LazyConfig.load(own)
    if config_path not in DEFAULTS:
        raise ConfigError(
            f"there is no config {config_path!r} here. There are: {choices(DEFAULTS)}."
            f"{suggestion(config_path, DEFAULTS)} Those of models and datasets are OneFlow's; one of your own goes to "
            f"{own}."
        )
    return as_config(DEFAULTS[config_path]())


def default_argument_parser(epilog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of `train_net.py`: a config file, what to do with it, and overrides of its keys."""
    parser = argparse.ArgumentParser(epilog=epilog)
    parser.add_argument("--config-file", default="", metavar="FILE", help="the config: Python or YAML")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--eval-only", action="store_true", help="only evaluate")
    parser.add_argument("--fast-dev-run", action="store_true", help="train and evaluate a few iterations")
    parser.add_argument("opts", nargs=argparse.REMAINDER, default=None, help="overrides, such as train.train_iter=100")
    return parser


def configurable(
    init_func: Callable[..., Any] | None = None, *, from_config: Callable[..., dict[str, Any]] | None = None
) -> Any:
    """Let an `__init__`, or a function, also take a config, of which `from_config` makes its arguments."""
    if init_func is not None:
        return _configured(init_func, lambda args: type(args[0]).from_config, num_before=1)
    if from_config is None:
        raise ConfigError("configurable() needs a function to decorate, or from_config=, which makes its arguments")
    return lambda function: _configured(function, lambda _: from_config, num_before=0)


def _configured(function: Callable[..., Any], maker: Callable[[Any], Any], num_before: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before, rest = args[:num_before], args[num_before:]
        if not (rest and _is_mapping(rest[0])) and not _is_mapping(kwargs.get("cfg")):
            return function(*args, **kwargs)
        return function(*before, **_arguments(maker(args), rest, kwargs))

    return called


def _arguments(from_config: Callable[..., dict[str, Any]], args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a config says, with the arguments given besides in its place; those it takes itself are its own."""
    accepted = inspect.signature(from_config).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    own = {name: value for name, value in kwargs.items() if takes_all or name in accepted}
    made = dict(from_config(*args, **own))
    return made | {name: value for name, value in kwargs.items() if name not in own}

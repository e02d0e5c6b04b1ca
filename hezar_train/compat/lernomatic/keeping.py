"""What a trainer with lernomatic's attributes keeps in checkpoints beside its parts, and the files that it writes.

`Keeper` is the state of the attributes: counters, histories and whatever number or array has changed since the training
began, the schedules' own counters included. The files are lernomatic's, by `torch.save`, of tensors and plain values
alone, so that they are read without running anything.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from hezar_train.checkpoint.format import ArrayForm, refuse_odd_bools
from hezar_train.checkpoint.hezar_weights import refuse_endless_pickles
from hezar_train.compat.lernomatic.attributes import own_values
from hezar_train.errors import CheckpointError, a_kind
from hezar_train.loop import Hook
from hezar_train.runtime import logger

__all__ = ["FILE_SUFFIXES", "Keeper", "histories", "is_file", "plain_values", "put_plain", "read_file", "write_file"]

FILE_SUFFIXES = (".pkl", ".pt", ".pth")
SCHEDULES = ("lr_scheduler", "mtm_scheduler")
KEPT = (bool, int, float, np.ndarray, np.generic)
NUMBER_KINDS = "biufc"
NO_PLAIN_VALUES = (UnpicklingError, TypeError, ValueError, LookupError, AttributeError, AssertionError, struct.error)
"""What torch's reader raises of a pickle that it was not made for."""


def histories(trainer: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that a trainer has as attributes named `*_history`."""
    found = {**vars(trainer), **own_values(trainer)}
    return {name: one for name, one in found.items() if name.endswith("_history") and isinstance(one, np.ndarray)}


def plain_values(trainer: Any, but: Iterable[str]) -> dict[str, Any]:
    """Return the numbers and arrays that a trainer has as attributes, those left out that have another owner."""
    left_out = set(but)
    found = {**vars(trainer), **own_values(trainer)}
    return {name: one for name, one in found.items() if name not in left_out and _is_plain(name, one)}


def _is_plain(name: str, value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return not name.startswith("_") and (isinstance(value, KEPT) or is_tensor)


class Keeper(Hook):
    """Keep a trainer's counters, histories and changed numbers in every checkpoint."""

    def __init__(self, owner: Any, settings: Iterable[str]) -> None:
        """`settings` are those that a run is planned by: a checkpoint must not change them."""
        self._owner, self._settings = owner, frozenset(settings)
        self._first = _copied(plain_values(owner, self._settings))
        self._waiting: dict[str, Mapping[str, Any]] = {}  # for schedules that are set after the trainer is built

    def state_dict(self) -> dict[str, Any]:
        now = plain_values(self._owner, self._settings)
        changed = {name: value for name, value in now.items() if _differs(value, self._first.get(name))}
        schedules = {name: _numbers(getattr(self._owner, name, None)) for name in SCHEDULES}
        return {"values": _copied(changed), "schedules": schedules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        values, schedules = state.get("values"), state.get("schedules")
        if not isinstance(values, Mapping) or not isinstance(schedules, Mapping) or schedules.keys() - set(SCHEDULES):
            raise CheckpointError("the stored attributes of the trainer are not of the form that is kept")
        put_plain(self._owner, values, own_values(self._owner), but=self._settings)
        for numbers in schedules.values():
            _refuse_others(None, numbers, _is_kept_number)
        self._waiting = {name: numbers for name, numbers in schedules.items() if numbers}
        self._fill_schedules()

    def on_fit_start(self, ctx: Any) -> None:
        """Give schedules that were set since what the checkpoint holds of theirs."""
        del ctx
        self._fill_schedules()
        for name in self._waiting:
            logger.warning(
                "the checkpoint holds where %s was, and there is none now: call set_%s() before train()", name, name
            )
        self._waiting = {}

    def _fill_schedules(self) -> None:
        there = {name: one for name in self._waiting if (one := getattr(self._owner, name, None)) is not None}
        for name, schedule in there.items():
            _put_numbers(schedule, self._waiting.pop(name))


def put_plain(owner: Any, values: Any, own: Mapping[str, Any], but: Iterable[str] = ()) -> None:
    """Set attributes as a file has them: the numbers and arrays that would be kept of them, and nothing else.

    `own` are the owner's values that are not in its `__dict__`.
    """
    _refuse_others(owner, values, lambda name, value: name not in but and _is_plain(name, value), own)
    for name, value in values.items():
        setattr(owner, name, value)


def _put_numbers(schedule: Any, values: Any) -> None:
    _refuse_others(schedule, values, _is_kept_number)
    for name, value in values.items():
        setattr(schedule, name, value)


def _is_kept_number(_: str, value: Any) -> bool:
    return isinstance(value, KEPT)


def _refuse_others(
    owner: Any, values: Any, is_kept: Callable[[str, Any], bool], own: Mapping[str, Any] | None = None
) -> None:
    if not isinstance(values, Mapping):
        raise CheckpointError("the stored attributes of the trainer are not names with values")
    now = {**getattr(owner, "__dict__", {}), **(own or {})}
    for name, value in values.items():
        is_attribute = isinstance(name, str) and is_kept(name, value)
        if not is_attribute or _is_no_number(now.get(name, getattr(type(owner), name, None))):
            raise CheckpointError(
                f"the checkpoint has a value for the attribute {name!r}, which is refused: expected numbers and "
                "arrays, and only those that a trainer keeps"
            )


def _is_no_number(value: Any) -> bool:
    """Tell whether an attribute stands for something else now: a method, a path, a text."""
    return callable(value) or isinstance(value, str | os.PathLike)


def _numbers(schedule: Any) -> dict[str, Any]:
    values = vars(schedule) if hasattr(schedule, "get_lr") and not hasattr(schedule, "get_last_lr") else {}
    return _copied({name: value for name, value in values.items() if isinstance(value, KEPT)})


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in values.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _differs(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not (isinstance(before, torch.Tensor) and torch.equal(value, before))
    if isinstance(value, np.ndarray):
        return not (isinstance(before, np.ndarray) and np.array_equal(value, before))
    return bool(value != before) or type(value) is not type(before)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path means one of lernomatic's files, and not a folder of ours: by its suffix, or as it is one."""
    return Path(path).suffix in FILE_SUFFIXES or Path(path).is_file()


def write_file(path: str | os.PathLike[str], contents: Mapping[str, Any]) -> Path:
    """Write tensors and plain values to one file, whole or not at all; arrays are written as tensors."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with beside.open("xb") as file:  # not through a link of that name
            torch.save({name: _as_tensor(value) for name, value in contents.items()}, file)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read such a file, or one that lernomatic has written; nothing that it holds is run."""
    try:
        refuse_endless_pickles(path)
        with torch.serialization.safe_globals(list(NUMPYS_NAMES)):
            found = _with_arrays(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error
    except NO_PLAIN_VALUES as error:
        raise CheckpointError(f"{os.fspath(path)} holds more than tensors and plain values: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{os.fspath(path)} holds {a_kind(found)}; expected names with values")
    return found


class StoredDtype:
    """What a file has in place of a numpy dtype: its short name and its byte order, and nothing that numpy obeys."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.name, self.order = name, "|"

    def __setstate__(self, state: Any) -> None:
        match state:
            case (int(), "<" | ">" | "|" as order, None, None, None, -1, -1, 0):
                self.order = order
            case _:
                raise CheckpointError("a dtype with parts, fields or flags of its own")

    def array(self, shape: tuple[Any, ...], data: bytes) -> np.ndarray[Any, Any]:
        """Make an array of numbers, by the rules of every checkpoint."""
        form = ArrayForm.of({"tensor": "array", "dtype": f"{self.order}{self.name}", "shape": list(shape)})
        if form.dtype.kind not in NUMBER_KINDS:
            raise CheckpointError(f"an array of {form.dtype}; expected numbers")
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        made: np.ndarray[Any, Any] = form.values(stored)
        return made


class StoredArray:
    """What a file has in place of a numpy array, until its bytes are held against its dtype and shape.

    Numpy's own classes would make arrays of objects of any bytes: those are taken for the addresses of objects.
    """

    values: np.ndarray[Any, Any] | None = None

    def __init__(self, *_: Any) -> None:
        """Take what numpy's functions take; all that counts comes as the state."""

    def __setstate__(self, state: Any) -> None:
        match state:
            case (int(), tuple(shape), StoredDtype() as dtype, bool(is_by_column), bytes(data)):
                made = dtype.array(shape[::-1] if is_by_column else shape, data)
                self.values = made.T if is_by_column else made
            case _:
                raise CheckpointError("an array that is not of the form that numpy writes")


def _stored_scalar(dtype: Any = None, data: Any = None) -> Any:
    if not isinstance(dtype, StoredDtype) or not isinstance(data, bytes):
        raise CheckpointError("a number that is not of the form that numpy writes")
    return dtype.array((), data)[()]


NUMPYS_NAMES: tuple[tuple[Any, str], ...] = (
    (StoredDtype, "numpy.dtype"),
    (StoredArray, "numpy.ndarray"),
    *((StoredArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_stored_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
)
"""What a file names to have numpy make an array, each with what stands for it here."""


def _with_arrays(value: Any) -> Any:
    """Return what a file holds with its arrays in place of what stood for them."""
    if isinstance(value, StoredDtype) or (isinstance(value, StoredArray) and value.values is None):
        raise CheckpointError("an array without values")
    if isinstance(value, StoredArray):
        return value.values
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        refuse_odd_bools("of a file", value)
    if isinstance(value, dict):
        for name in value:  # in its place: a state dict has attributes besides
            value[name] = _with_arrays(value[name])
        return value
    if isinstance(value, list):
        return [_with_arrays(one) for one in value]
    return tuple(map(_with_arrays, value)) if type(value) is tuple else value

"""The checks of single values that groups of fields are made of: whole numbers, shares, paths, names, keywords.

Each check yields sentences, never raises, and bears any type. It tells a wrong type and a wrong value apart, so that a
config can report every mistake at once.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hezar_train.config.names import VALUES_OF_OTHERS, is_dotted_path, is_importable, scheduler_name
from hezar_train.errors import choices, nearest, suggestion
from hezar_train.run_folder import can_be_path

__all__ = [
    "doubled_warmup",
    "flag",
    "folder_of_run",
    "instead_of",
    "keywords",
    "known_name",
    "number",
    "one_of",
    "parts_of_names",
    "path",
    "steps",
    "text",
    "whole",
    "wrong_type",
]

A_PATH = "a path (str)"
A_NONE = "for none, leave it out, or write null in YAML and on the command line (None without quotes in Python)"
PLAIN_ENTRY = re.compile(r"\w[\w./@:,+ -]*")
AS_NONE = f"{A_NONE[0].upper()}{A_NONE[1:]}."


def wrong_type(name: str, value: Any, expected: str) -> str:
    """Tell what was expected of a field and what it got."""
    if value is None:
        return f"{name}: expected {expected}, got None (an empty value is None); give it a value, or leave it out"
    rewritten = f"; {A_NONE}" if value == "None" else _rewritten(value, expected)
    return f"{name}: expected {expected}, got {type(value).__name__} {value!r}{rewritten}"


def _rewritten(value: Any, expected: str) -> str:
    """Say how a value would be written that was meant, where that is plain."""
    if isinstance(value, float) and expected == "int" and value.is_integer():
        return f"; write {int(value)}"
    if not isinstance(value, str):
        is_plain = expected == A_PATH and isinstance(value, int | float) and not isinstance(value, bool)
        return f"; write ./{value} for a path of that name" if is_plain else ""
    if expected.startswith("a list"):
        words = value.split()
        entries = words if len(words) > 1 and all(re.fullmatch(r"[\w.-]+", word) for word in words) else [value]
        return f"; write [{', '.join(map(_as_entry, entries))}]"
    if expected == "True or False":
        return "; write true or false" if value.lower() in {"yes", "no", "on", "off", "true", "false"} else ""
    if expected in {"int", "a number"} and value.strip("+-").replace("_", "")[:1].isdigit() and _is_number(value):
        plain = value.lstrip("0") if value.isdigit() and value.strip("0") else value  # YAML reads 08 as a text
        return f"; write {plain} without quotes" if plain == value else f"; write {plain}"
    return ""


def _as_entry(value: str) -> str:
    """Write a text as an entry of a list in YAML: in quotes where it would be read as something else."""
    return value if PLAIN_ENTRY.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flag(name: str, value: Any, optional: bool = False) -> Iterator[str]:
    """Check a switch."""
    if not isinstance(value, bool) and not (optional and value is None):
        yield wrong_type(name, value, "True or False")


def whole(name: str, value: Any, least: int, most: int | None = None, optional: bool = False) -> Iterator[str]:
    """Check a whole number."""
    if optional and value is None:
        return
    if not _is_whole(value):
        yield wrong_type(name, value, "int")
    elif value < least:
        yield f"{name}={value} must be at least {least}"
    elif most is not None and value > most:
        yield f"{name}={value} must be at most {most}"


def number(
    name: str, value: Any, above: float | None = None, optional: bool = False, without: str = ""
) -> Iterator[str]:
    """Check a finite number that is not negative; with `above`, one greater than that. `without` says what None is."""
    if optional and value is None:
        return
    if not (_is_whole(value) or isinstance(value, float)):
        yield wrong_type(name, value, "a number")
    elif not abs(value) <= sys.float_info.max:  # a whole number may be larger, and no float
        yield f"{name}={value!r:.80} must be finite"
    elif above is not None and value <= above:
        remedy = f"; leave it out (or write null) for {without}" if without else ""
        yield f"{name}={value!r} must be greater than {above}{remedy}"
    elif above is None and value < 0:
        yield f"{name}={value!r} must not be negative"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def steps(name: str, value: Any, least: int = 1, otherwise: str = "leave it out for the default") -> Iterator[str]:
    """Check a count of steps (int) or a share of the run (float between 0 and 1); `otherwise` says what None is."""
    if value is None:
        return
    if isinstance(value, float):
        yield from _share(name, value)
    elif not _is_whole(value):
        sentence = wrong_type(name, value, "an int (steps) or a float between 0 and 1 (a share of the run)")
        yield f"{sentence}; {otherwise}"
    elif value < least:
        yield f"{name}={value} must be at least {least}; {otherwise}"


def _share(name: str, value: float) -> Iterator[str]:
    if 0 < value < 1:
        return
    sentence = f"{name}={value!r}: a float is a share of the run and lies between 0 and 1, both excluded"
    if value == 1:
        yield f"{sentence}; write 1 for one step, or give a share below 1"
    elif math.isfinite(value) and value > 1:
        yield f"{sentence}; write {math.ceil(value)} for steps"
    else:
        yield sentence


def text(name: str, value: Any) -> Iterator[str]:
    """Check a string that says something."""
    if not isinstance(value, str):
        yield wrong_type(name, value, "str")
    elif not value.strip():
        yield f"{name} must not be empty"


def path(name: str, value: Any, optional: bool = False) -> Iterator[str]:
    """Check a path, given as a string or a path object."""
    if optional and value is None:
        return
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        yield wrong_type(name, value, A_PATH)
    elif not given.strip():
        yield f"{name} must not be empty"
    elif not can_be_path(given):
        yield f"{name}={ascii(given)[:80]} is no path that a file can have: it holds a zero byte, or is too long"


def folder_of_run(name: str, value: Any) -> Iterator[str]:
    """Check the path of a folder that a run has to itself: a new run moves an earlier one's aside."""
    yield from (problems := list(path(name, value)))
    if not problems and os.path.normpath(value) == os.curdir:
        yield f"{name}={os.fspath(value)!r} is the run's folder itself; name one below it, or leave it out"


def one_of(name: str, value: Any, known: Collection[str], optional: bool = True) -> Iterator[str]:
    """Check a word of a closed list."""
    if optional and value is None:
        return
    if not isinstance(value, str):
        yield wrong_type(name, value, f"one of {choices(known)}")
    elif value == "None" and optional:
        yield f"{name}='None' is a text. {AS_NONE} Else choose from: {choices(known)}."
    elif value not in known:
        meant = VALUES_OF_OTHERS.get(name, {}).get(value.lower())
        hint = f" Here it is {meant!r}." if meant else instead_of(value) or suggestion(value, known)
        yield f"{name}={str(value)!r} is not known. Choose from: {choices(known)}.{hint}"


def known_name(
    name: str,
    value: Any,
    known: Collection[str],
    shown: str,
    fold: Callable[[str], str | None] = str,
    needy: Collection[str] = (),
) -> Iterator[str]:
    """Check a name of torch (spelled after `fold`) or a dotted path; `shown` lists the names worth reading.

    Those that are `needy` are known and never offered: what is built of them says what it lacks.
    """
    if value is None:
        return
    if not isinstance(value, str):
        listed = f"one of {shown}, or a dotted path such as 'package.module.Class'"
        yield f"{wrong_type(name, value, listed)}{_path_of(value)}"
    elif not value.strip():
        yield f"{name} must not be empty"
    elif not is_dotted_path(value) and fold(value) not in known:
        listed = f"{shown}, or a dotted path such as 'package.module.Class'."
        if value == "None":
            yield f"{name}='None' is a text. {AS_NONE} Else choose from: {listed}"
            return
        if (near := nearest(value, known)) in needy:
            yield (
                f"{name}={str(value)!r} is not known. {near} of torch.nn needs more than logits and labels, which a "
                f"{name} does not get: compute it in the model's compute_loss(), or choose another."
            )
            return
        hint = instead_of(value) or suggestion(value, shown.split(", ")) or suggestion(value, known)
        yield f"{name}={str(value)!r} is not known. Choose from: {listed}{hint}"


def _path_of(value: Any) -> str:
    """Say how a class, a function or an object of a class is named that was given itself."""
    is_named = hasattr(value, "__qualname__")
    found = value if is_named else type(value)
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if module in (None, "builtins", "__main__") or "<" in name:
        return ""
    module = next((one for one in ("torch.nn.functional", "torch.nn", "torch.optim") if module.startswith(one)), module)
    path = f"; write '{module}.{name}'"
    if is_named:
        return path
    return f"{path}, which is made with its defaults; for other options, the path of a function of your own"


def instead_of(value: str) -> str:
    """Say how a name is written that was given as Python code."""
    name, bracket, _ = value.partition("(")
    return f" Write its name without brackets: {name!r}." if bracket and value.endswith(")") else ""


def parts_of_names(name: str, value: Any) -> Iterator[str]:
    """Check a list of parts of parameter names."""
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) and part for part in value):
        yield wrong_type(name, value, "a list of parts of parameter names, such as ['bn', 'head.']")


def keywords(name: str, value: Any) -> Iterator[str]:
    """Check keyword arguments: a mapping with string keys whose values can be written to a file."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        yield wrong_type(name, value, "a mapping of keyword arguments, such as {name: value}")
        return
    for key, item in value.items():
        if not isinstance(key, str):
            yield wrong_type(f"a key of {name}", key, "str")
        elif not _is_plain(item):
            yield wrong_type(
                f"{name}[{key!r}]", item, "a plain value (number, text, list, mapping) or an importable function"
            )


def doubled_warmup(warmup_steps: Any, scheduler: Any, kwargs: Any) -> Iterator[str]:
    """Check that a schedule which the field `warmup_steps` leads to has no warm-up of its own."""
    name = scheduler_name(scheduler) if isinstance(scheduler, str) else None
    if not warmup_steps or name is None:
        return
    if name == "warmup_noam":
        yield (
            f"warmup_steps={warmup_steps!r}: lr_scheduler='warmup_noam' has its warm-up in its formula. Give it there, "
            "as warmup_iter or warmup_ratio in lr_scheduler_kwargs; or take 'inverse_sqrt', which falls alike"
        )
    for key in ("warmup_iter", "warmup_ratio", "warmup_steps"):
        if name.startswith("warmup_") and isinstance(kwargs, Mapping) and kwargs.get(key):
            yield (
                f"warmup_steps={warmup_steps!r} and lr_scheduler_kwargs[{key!r}]={kwargs[key]!r} are two warm-ups: "
                "give one of them"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | os.PathLike) or is_importable(value)

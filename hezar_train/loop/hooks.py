"""Hooks: the moments of the loop, and the order in which hooks run at each of them.

A hook is a function `f(ctx)` at one moment, or a `Hook` object with methods named like the moments and a state of its
own. What the loop does by itself stands in the same lists under a name, so it can be listed, replaced and removed.
Hooks watch and ask; one default hook, `due`, last at BATCH_END and EPOCH_END, does what is due (with several processes
it also lets all know, at FIT_START and EPOCH_START, what one was asked for). At BATCH_END and EPOCH_END it is required,
and so are `count` and `keep_place`, which notes where the data is: they can be listed and not removed. Without them a
run would not end, or its checkpoints would not know where it was.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, overload

from hezar_train.errors import HookError, HookTypeError, a_kind, choices, is_ours, suggestion
from hezar_train.loop.context import Context
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = [
    "HOOK_TRIGGER",
    "TRIGGER",
    "Hook",
    "HookCall",
    "HookList",
    "HookSet",
    "Moment",
    "as_hooks",
    "insert_hook",
    "moment_named",
    "name_of",
    "refuse_uncalled",
    "replace_hook",
    "reset_hook",
]


class Moment(StrEnum):
    """A point of the walk; its value is the name of the method that a `Hook` has for it."""

    FIT_START = "on_fit_start"
    EPOCH_START = "on_epoch_start"
    BATCH_START = "on_batch_start"
    BATCH_FORWARD = "on_batch_forward"
    BATCH_BACKWARD = "on_batch_backward"
    GRADIENTS = "on_gradients"
    UPDATE = "on_update"  # a hook added here runs after the step, when the gradients are gone
    BATCH_END = "on_batch_end"
    EPOCH_END = "on_epoch_end"
    FIT_END = "on_fit_end"

    @classmethod
    def contains(cls, name: str) -> bool:
        """Tell whether there is a moment of that name."""
        return name in cls._value2member_map_


TRIGGER = Moment

HOOK_TRIGGER = [str(moment) for moment in Moment if moment not in {Moment.GRADIENTS, Moment.UPDATE}]
"""The moments that every routine has; an update belongs to learning alone."""


def moment_named(name: str | Moment) -> Moment:
    """Return the moment of that name, or raise with the nearest one."""
    try:
        return Moment(name)
    except ValueError:
        known = [str(moment) for moment in Moment]
        raise HookError(f"{name!r} is not a moment.{suggestion(name, known)} There are: {choices(known)}.") from None


HookCall = Callable[[Context], object]

# the four methods that take no argument, and the moment each stands for
PLAIN_METHODS = {
    "before_train": Moment.FIT_START,
    "before_step": Moment.BATCH_START,
    "after_step": Moment.BATCH_END,
    "after_train": Moment.FIT_END,
}


LIKE_MOMENTS = {
    "on_train_begin": "on_fit_start", "on_train_start": "on_fit_start", "on_train_end": "on_fit_end",
    "on_step_begin": "on_batch_start", "on_train_batch_start": "on_batch_start", "on_step_end": "on_batch_end",
    "on_train_batch_end": "on_batch_end", "on_epoch_begin": "on_epoch_start", "on_train_epoch_start": "on_epoch_start",
    "on_train_epoch_end": "on_epoch_end", "on_optimizer_step": "on_update", "on_pre_optimizer_step": "on_gradients",
    "on_before_optimizer_step": "on_gradients", "on_after_backward": "on_gradients",
}  # fmt: skip
"""Other trainers' moments, each with ours."""


class Hook:
    """Something that watches a run: override any of the methods below, or those named like a moment (`on_update(ctx)`).

    `self.trainer` is the trainer (a weak proxy) once the hook is registered. What `state_dict` returns, made of plain
    values and tensors, is saved in every checkpoint and handed back to `load_state_dict` at a resume.
    """

    modes: frozenset[Mode] = frozenset({Mode.TRAIN})
    trainer: Trainer

    @property
    def name(self) -> str:
        return type(self).__name__

    def before_train(self) -> None:
        """Run before the first step of each call of `train()`, also of one that resumes a run."""

    def before_step(self) -> None:
        """Run before each step."""

    def after_step(self) -> None:
        """Run after each step."""

    def after_train(self) -> None:
        """Run after the last step of each call of `train()`; also after a failure."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def attach(self, trainer: Trainer) -> None:
        """Let the hook see the trainer, without keeping it alive."""
        self.trainer = weakref.proxy(trainer)

    def calls(self) -> Iterable[tuple[Moment, HookCall]]:
        """Yield what the hook wants to run and when: only methods that a subclass has written."""
        for method, moment in PLAIN_METHODS.items():
            if getattr(type(self), method) is not getattr(Hook, method):
                yield moment, _without_context(getattr(self, method))
        for moment in Moment:
            if hasattr(self, moment.value):
                yield moment, getattr(self, moment.value)


def refuse_uncalled(hook: Hook) -> None:
    """Raise for a method that looks like one of a moment and would never be called, or not as it is written."""
    own = [name for kind in type(hook).__mro__ if not is_ours(_file_of(kind)) for name in vars(kind)]
    known = {str(moment) for moment in Moment} | PLAIN_METHODS.keys()
    for name in own:
        looks_known = name in known or name.startswith("on_") or f"on_{name}" in known
        if not looks_known or not _is_method(type(hook), name):
            continue
        if name in known:
            _refuse_other_arguments(type(hook).__name__, name, getattr(hook, name))
        else:
            near = suggestion(LIKE_MOMENTS.get(name, name), known)
            raise HookError(
                f"{type(hook).__name__}.{name}() would never be called: {name!r} is not a moment.{near} There are: "
                f"{choices(known)}. Rename it; a method of your own begins with an underscore."
            )


def _is_method(kind: type, name: str) -> bool:
    """Tell whether a name is a method, without running a property, which may read the trainer that is not there yet."""
    found = inspect.getattr_static(kind, name)
    return callable(found) or isinstance(found, classmethod)


def _file_of(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", ""))


def _refuse_other_arguments(owner: str, name: str, method: Callable[..., object]) -> None:
    expected = "no argument" if name in PLAIN_METHODS else "the context"
    try:
        inspect.signature(method).bind(*([] if name in PLAIN_METHODS else [None]))
    except TypeError as error:
        shown = "self" if name in PLAIN_METHODS else "self, ctx"
        raise HookError(
            f"{owner}.{name}() cannot be called with {expected} alone ({error}). Write it so: def {name}({shown})"
        ) from error
    except ValueError:  # one in C that does not tell
        return


def as_hooks(source: str, given: Any) -> list[Any]:
    """Return hooks as a list; refuse one alone, and None."""
    if given is None or isinstance(given, Hook | type) or not isinstance(given, Iterable):
        raise HookTypeError(f"{source} {a_kind(given)}; expected a list of Hook objects, [] for none.")
    return list(given)


@dataclass(frozen=True)
class _Entry:
    name: str
    call: HookCall
    is_last: bool = False
    is_required: bool = False


class HookList(MutableSequence[HookCall]):
    """The hooks of one moment as a list of functions, in the order they run; what is changed in it is changed there."""

    def __init__(self, entries: list[_Entry], moment: Moment, refuse_while_running: Callable[[], None]) -> None:
        self._entries, self._moment, self._refuse_while_running = entries, moment, refuse_while_running

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> HookCall: ...
    @overload
    def __getitem__(self, index: slice) -> list[HookCall]: ...
    def __getitem__(self, index: int | slice) -> HookCall | list[HookCall]:
        found = self._entries[index]
        return [entry.call for entry in found] if isinstance(found, list) else found.call

    @overload
    def __setitem__(self, index: int, value: HookCall) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[HookCall]) -> None: ...
    def __setitem__(self, index: int | slice, value: Any) -> None:
        changed = list(self._entries)
        if isinstance(index, slice):
            changed[index] = [_entry_of(one) for one in value]
        else:
            changed[index] = _entry_of(value, changed[index].name, is_last=changed[index].is_last)  # as `replace` does
        self._take(changed)

    def __delitem__(self, index: int | slice) -> None:
        changed = list(self._entries)
        del changed[index]
        self._take(changed)

    def insert(self, index: int, value: HookCall) -> None:
        """Add a hook before a position; none comes after the hook that does what is due."""
        self._refuse_while_running()
        end = sum(not entry.is_last for entry in self._entries)
        self._entries.insert(min(index, end) if index >= 0 else index, _entry_of(value))

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, HookList | list | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _take(self, changed: list[_Entry]) -> None:
        self._refuse_while_running()
        for entry in self._entries:
            if entry.is_required and entry not in changed:
                raise HookError(_needed(entry.name, self._moment))
        self._entries[:] = sorted(changed, key=lambda entry: entry.is_last)  # what is last stays behind all others


def _entry_of(call: HookCall, name: str | None = None, *, is_last: bool = False, is_required: bool = False) -> _Entry:
    """Return a hook under its name, by default that of the function; refuse what cannot be called."""
    if not callable(call):
        named = f"hook {name!r}" if name else "a hook"
        raise HookError(f"{named} is a {type(call).__name__}; expected a function of the context, f(ctx)")
    return _Entry(name or name_of(call), call, is_last, is_required)


def _needed(name: str, moment: Moment) -> str:
    return (
        f"the hook {name!r} at {moment} is required: without `count`, `keep_place` and `due` nothing is counted, no "
        "checkpoint knows where the data was, nothing falls due and no signal is seen, so the run would not end. Leave "
        "it, and put hooks of your own before it."
    )


class HookSet:
    """The hooks of one mode: a list per moment, in the order they run.

    A routine decides when it begins what runs at each moment; until it ends, its set refuses to be changed. So a run
    has the hooks that it was built with, on every process and after a resume.
    """

    def __init__(self) -> None:
        self._entries: dict[Moment, list[_Entry]] = {moment: [] for moment in Moment}
        self._num_running = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Refuse changes while the body runs; bodies may nest."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def refuse_while_running(self) -> None:
        """Raise if a routine with these hooks is under way."""
        if self._num_running:
            raise HookError(
                "hooks were added, replaced or removed while the routine that they belong to runs, which would change "
                "nothing until it is called again: what runs at each moment was decided when it began. Do it before, "
                "and let the hook return at once while it is not wanted: if ctx.state.epoch < 2: return"
            )

    def register(
        self,
        call: HookCall,
        moment: str | Moment,
        *,
        name: str | None = None,
        before: str | None = None,
        after: str | None = None,
        position: int | None = None,
        is_last: bool = False,
        is_required: bool = False,
    ) -> None:
        """Add a hook at a moment: before or after a named one, at a position (-1: the end), else at the end.

        The end is before `due`, which does what is due. `is_last` is for `due` itself: another hook with it would run
        after `due`, and what it changes would not be in that update's checkpoint. One that is required stays for good.
        """
        self.refuse_while_running()
        entries = self._entries[moment_named(moment)]
        entry = _entry_of(call, name, is_last=is_last, is_required=is_required)
        given = {"before": before, "after": after, "position": position}
        given = {word: value for word, value in given.items() if value is not None}
        if len(given) > 1:
            listed = " and ".join(f"{word}={value!r}" for word, value in given.items())
            raise HookError(f"hook {entry.name!r}: {listed} were given; give one of them")
        index = len(entries) if is_last else self._place(moment_named(moment), before, after, position)
        entries.insert(index, entry)

    def replace(self, call: HookCall, moment: str | Moment, name: str) -> None:
        """Put another hook in the place and under the name of an existing one."""
        self.refuse_while_running()
        entries = self._entries[moment_named(moment)]
        index = self._index(moment, name)
        entry = _entry_of(call, name, is_last=entries[index].is_last)
        self._refuse_needed(moment, entries[index])
        entries[index] = entry

    def remove(self, moment: str | Moment, name: str) -> int:
        """Take a hook out; return the position that it had."""
        self.refuse_while_running()
        index = self._index(moment, name)
        self._refuse_needed(moment, self._entries[moment_named(moment)][index])
        del self._entries[moment_named(moment)][index]
        return index

    def clear(self, moment: str | Moment) -> None:
        """Take all hooks of a moment out, also those that the loop brought, but for those that are required."""
        self.refuse_while_running()
        entries = self._entries[moment_named(moment)]
        entries[:] = [entry for entry in entries if entry.is_required]

    def missing_required(self, other: HookSet) -> list[str]:
        """Return what is required in this set and is not in another one."""
        return [
            f"{entry.name} at {moment}"
            for moment, entries in self._entries.items()
            for entry in entries
            if entry.is_required and entry not in other._entries[moment]
        ]

    def copy(self) -> HookSet:
        """Return another set with the same hooks."""
        other = HookSet()
        other._entries = {moment: list(entries) for moment, entries in self._entries.items()}
        return other

    def names(self, moment: str | Moment) -> list[str]:
        """List the hooks of a moment in the order they run."""
        return [entry.name for entry in self._entries[moment_named(moment)]]

    def calls(self, moment: Moment) -> tuple[HookCall, ...]:
        """Freeze a moment's hooks for a routine: what runs each step is decided once."""
        return tuple(entry.call for entry in self._entries[moment])

    def __getitem__(self, moment: str | Moment) -> HookList:
        """Return the hooks of a moment as a list that may be changed."""
        return HookList(self._entries[moment_named(moment)], moment_named(moment), self.refuse_while_running)

    def __iter__(self) -> Iterator[Moment]:
        return iter(Moment)

    def __str__(self) -> str:
        return "\n".join(f"{moment}: {', '.join(self.names(moment)) or '-'}" for moment in Moment)

    def _place(self, moment: Moment, before: str | None, after: str | None, position: int | None) -> int:
        entries = self._entries[moment]
        end = sum(not entry.is_last for entry in entries)
        if before is not None:
            return self._index(moment, before)
        if after is not None:
            index = self._index(moment, after)
            if entries[index].is_last:  # a checkpoint taken there would miss what the hook does next
                raise HookError(f"nothing runs after {after!r}, which does what is due: use before={after!r}")
            return index + 1
        if position is None or position == -1:
            return end
        if not 0 <= position <= end:
            raise HookError(f"position={position} at {moment}; expected 0 to {end}, or -1 for the end")
        return position

    @staticmethod
    def _refuse_needed(moment: str | Moment, entry: _Entry) -> None:
        if entry.is_required:
            raise HookError(_needed(entry.name, moment_named(moment)))

    def _index(self, moment: str | Moment, name: str) -> int:
        names = self.names(moment)
        if name not in names:
            known = choices(names) or "none"
            raise HookError(f"no hook {name!r} at {moment_named(moment)}.{suggestion(name, names)} There are: {known}.")
        return names.index(name)


def name_of(call: object) -> str:
    """Return the name that a hook has if it is given none: that of the function, or of the class."""
    return str(getattr(call, "__name__", type(call).__name__))


def _without_context(method: Callable[[], None]) -> HookCall:
    def call(_: Context) -> None:
        method()

    call.__name__ = method.__name__
    return call


INSERT_MODES = ("before", "after")


def insert_hook(
    hooks: HookSet, new_hook: HookCall, trigger: str | Moment, position: int | None,
    base_hook: HookCall | str | None, insert_mode: str,
) -> None:  # fmt: skip
    """Add a hook at a position (-1: the end), or before or after another one, else at the end."""
    if insert_mode not in INSERT_MODES:
        raise HookError(f"insert_mode={insert_mode!r} is not known. Choose from: before, after.")
    if position is not None or base_hook is None:
        hooks.register(new_hook, trigger, position=position)
        return
    base = base_hook if isinstance(base_hook, str) else name_of(base_hook)
    hooks.register(new_hook, trigger, **{insert_mode: base})  # type: ignore[arg-type]


def reset_hook(hooks: HookSet, trigger: str | Moment, name: str | None) -> int:
    """Take a hook out and return its position; without a name all but the required ones, and return -1."""
    if name is not None:
        return hooks.remove(trigger, name)
    hooks.clear(trigger)
    return -1


def replace_hook(hooks: HookSet, new_hook: HookCall, trigger: str | Moment, name: str | None) -> None:
    """Put a hook in the place of another one; without a name, of all."""
    if name is not None:
        hooks.replace(new_hook, trigger, name)
        return
    hooks.clear(trigger)
    hooks.register(new_hook, trigger)

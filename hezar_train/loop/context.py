"""What the current step, epoch and routine are doing.

`Step` declares everything that one step knows. `Context` is what hooks see: the step's names, a stack of frames so that
routines nest, and shared names (model, config, state, ...) that live as long as the trainer. A name that is set belongs
to the innermost frame and vanishes with it; `CtxVar` gives it a shorter life. A shared name may be a function of the
context: an `Alias`. What a hook assigns is what the loop then uses, or it is refused: a shared name that the loop would
not read again is `Fixed`, what the loop alone knows of a step is in `OF_THE_LOOP`, and names that count up to a certain
moment are closed after it. Nothing here is ever saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from hezar_train.data import Window
from hezar_train.errors import HookError
from hezar_train.types import Mode

__all__ = ["LIFECYCLE", "Alias", "Context", "CtxVar", "Fixed", "Lifecycle", "Step", "lifecycle"]

F = TypeVar("F", bound=Callable[..., Any])


class Lifecycle(StrEnum):
    """How long a variable of the context lives."""

    BATCH = "batch"
    EPOCH = "epoch"
    ROUTINE = "routine"
    NONE = "none"  # as long as its frame


LIFECYCLE = Lifecycle


class Step:
    """What one step knows, from its batch to its update; None is what is not known yet, or no longer.

    Through the context such a name raises AttributeError (`ctx.get(name)` returns None), but for `loss_value`.
    Slots, because the loop and the default hooks read and write these names in every step.
    """

    __slots__ = (
        "applied", "batch", "batch_in_window", "closes_window", "cur_batch_i", "grad_norm", "is_assigned", "is_counted",
        "is_loss_noted", "is_own", "is_settled", "is_skipped", "is_weighed", "loss", "loss_regular", "loss_task",
        "loss_value", "outputs", "window", "window_loss",
    )  # fmt: skip

    window: Window
    """The micro-batches of the update under way, and what each weighs."""
    batch: Any
    """The micro-batch, as `prepare_input_batch` made it; until the batch ends."""
    batch_in_window: int
    closes_window: bool
    """Whether this micro-batch is the last of its update."""
    cur_batch_i: int
    """The number of the batch in its epoch, from 0 on."""
    outputs: Any
    """What the model returned, as a dict; until the batch ends."""
    loss: Any
    """The loss of the micro-batch, with its graph; until the batch ends."""
    loss_regular: Any
    """What a regulariser adds to it; until the batch ends."""
    loss_task: Any
    """What is trained on instead of both, if a hook assigned it (`loss` is what is counted); until the batch ends."""
    window_loss: Any
    """The weighted loss of this process's micro-batches of the window so far, on the device; `loss_value` is all's."""
    is_loss_noted: bool
    """Whether this micro-batch is in `window_loss`."""
    loss_value: float | None
    """The loss of the update, over all processes, as a number; known when it is guarded."""
    grad_norm: float | None
    """The norm of the update's gradients before they are clipped; until the next update. Not known of a user's own."""
    applied: bool
    """Whether the update is done: the hook `step` says so, or `OwnSteps` of a user's own step.

    Where nothing has read the loss (no `guard`), the end of the batch takes the update for done unless it was skipped.
    """
    is_skipped: bool
    """Whether the scaler has skipped the update, because a gradient had overflowed."""
    is_own: bool
    """Whether the user's own code has stepped the optimizer, so that this update is done.

    `OwnSteps` notes it, with `applied`; it refuses such a step before the window's last micro-batch, and with a scaler.
    """
    is_weighed: bool
    """Whether the user's own backward went through `accelerator.backward`, which weighs the loss."""
    is_assigned: bool
    """Whether a hook has assigned `grad_norm` or `loss_value`, which `guard` would read again."""
    is_counted: bool
    """Whether the micro-batch is counted: assigning its `loss_value` or `applied` comes too late from then on."""
    is_settled: bool
    """Whether counters, schedule and the place in the data all know of the update: a call that fails may go on."""

    def __init__(self) -> None:
        for name in Step.__slots__:
            setattr(self, name, None)


STEP_NAMES = frozenset(Step.__slots__)
BATCH_NAMES = frozenset({"batch", "outputs", "loss", "loss_regular", "loss_task"})
"""Names of a step that end with its batch."""
MAY_BE_NONE = frozenset({"loss_value"})
"""Names of a step that the context shows as None while they are not known; all others raise AttributeError then."""
OF_THE_ROUTINE = frozenset({"mode", "split", "failed"})
"""Names that every routine sets for itself."""
OF_THE_LOOP: Mapping[str, str] = {
    **dict.fromkeys(
        ("window", "batch_in_window", "closes_window"),
        "The loop sets it; the config says how many samples an update has.",
    ),
    "cur_batch_i": "The loop counts it.",
    **dict.fromkeys(("window_loss", "is_loss_noted"), "trainer.note_loss(loss) tells the loss of a batch."),
    **dict.fromkeys(
        ("is_own", "is_skipped", "is_weighed", "is_assigned", "is_counted", "is_settled"), "The loop notes it."
    ),
}
"""What hooks may read and never assign, with what to do instead."""
LOSSES = frozenset({"loss", "loss_regular", "loss_task"})
OF_THE_UPDATE = frozenset({"loss_value", "grad_norm", "applied"})
INTERNAL = frozenset({"_frames", "_shared", "_lives", "_ways", "_closed", "step"})
STEP_IS_TAKEN = "ctx.step is what the step under way knows; choose another name"


@dataclass(frozen=True, slots=True)
class CtxVar:
    """A value with a life: `ctx.hits = CtxVar(0, Lifecycle.EPOCH)` stores 0, which is gone after the epoch."""

    obj: Any
    lifecycle: Lifecycle | str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A shared name whose value is worked out when it is read; with `write`, hooks may assign it.

    Without, what a hook assigns is a name of its own that hides the shared one.
    """

    read: Callable[[Context], Any]
    write: Callable[[Context, Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A shared name that hooks may read and not assign, because nobody would look at it again; `way` says what to do.

    Its value may be an `Alias`.
    """

    value: Any
    way: str


class Context:
    """One bag of names for hooks: `ctx.x`, `ctx["x"]`, `ctx.get("x")`, `del ctx.x`, `"x" in ctx`."""

    step: Step
    """What the step under way knows; its names are the context's, too."""

    def __init__(self, **shared: Any) -> None:
        own = self.__dict__
        own["_frames"], own["_shared"], own["_lives"], own["step"] = [], {}, _new_lives(), Step()
        own["_ways"], own["_closed"] = {}, {}
        self.share(shared)

    def __getattr__(self, name: str) -> Any:  # called only when the frame does not have the name
        own = self.__dict__
        if name in STEP_NAMES:
            value = getattr(own["step"], name)
            if value is not None or (name in MAY_BE_NONE and own["step"].window is not None):
                return value
        try:
            value = own["_shared"][name]
        except KeyError:
            raise AttributeError(f"the context has no {name!r} at this moment") from None
        return value.read(self) if type(value) is Alias else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "step":  # the loop would go on with another one than hooks see
            raise AttributeError(STEP_IS_TAKEN)
        if (way := self._way_instead(name, value.obj if type(value) is CtxVar else value)) is not None:
            raise HookError(f"ctx.{name} was assigned, which would change nothing: it is read only. {way}")
        self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        if type(value) is CtxVar:
            for names in self._lives.values():
                names.discard(name)
            self._lives[Lifecycle(value.lifecycle or Lifecycle.NONE)].add(name)
            value = value.obj
        if name in STEP_NAMES:
            setattr(self.step, name, value)
            return
        shared = self._shared.get(name)
        if type(shared) is Alias and shared.write is not None:
            shared.write(self, value)
        else:
            self.__dict__[name] = value

    def _way_instead(self, name: str, value: Any) -> str | None:
        """Return what to do instead of assigning a name now; None: what is assigned will be used."""
        if name in LOSSES and self.step.is_loss_noted:
            return "The backward of this batch is done and its loss counted: assign it before, at on_batch_forward."
        if name in OF_THE_UPDATE and self.step.window is not None:
            return self._way_to_update(name, value)
        if name in OF_THE_ROUTINE and self._frames:
            return "The routine sets it."
        return OF_THE_LOOP.get(name) or self._closed.get(name) or self._ways.get(name)

    def _way_to_update(self, name: str, value: Any) -> str | None:
        """Return what to do instead of assigning what is known of an update; note what `guard` must not read again."""
        step = self.step
        if not step.closes_window:
            return "An update is done on the last micro-batch of its window: assign it where ctx.closes_window."
        if step.is_counted and name != "grad_norm":  # which is logged after that
            return "The update is counted: assign it at on_update."
        if name == "applied":
            is_known = step.applied or step.is_skipped
            return (
                "The optimizer has stepped, or its scaler has skipped the step."
                if is_known and value != step.applied
                else None
            )
        step.is_assigned = True
        return None

    def put(self, values: Mapping[str, Any]) -> None:
        """Set names as the loop does, also those that hooks may only read; what `take` returned is put back so."""
        for name, value in values.items():
            self._set(name, value)

    def close(self, names: Iterable[str], way: str) -> None:
        """Refuse names from now on until the routine ends: what they say was taken over; `way` says what to do."""
        self._closed.update(dict.fromkeys(names, way))

    def __delattr__(self, name: str) -> None:
        if name == "step":
            raise AttributeError(STEP_IS_TAKEN)
        if name in OF_THE_LOOP:
            raise HookError(f"ctx.{name} was deleted, but the loop goes by it. {OF_THE_LOOP[name]}")
        self._delete(name)

    def _delete(self, name: str) -> None:
        if name in STEP_NAMES and getattr(self.step, name) is not None:
            setattr(self.step, name, None)
        elif name in self.__dict__:
            del self.__dict__[name]
        else:
            raise AttributeError(f"the context has no {name!r} at this moment")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __contains__(self, name: str) -> bool:
        return self._is_of_step(name) or name in self.__dict__ or name in self._shared

    def get(self, name: str, default: Any = None) -> Any:
        """Return a name's value, or `default` where it has none."""
        return getattr(self, name, default)

    def merge_from_dict(self, values: Mapping[str, Any]) -> None:
        """Set several names."""
        for name, value in values.items():
            setattr(self, name, value)

    def take(self, names: Iterable[str]) -> dict[str, Any]:
        """Take names out of the innermost frame; return what they had."""
        own = self.__dict__.keys() - INTERNAL
        taken = {name: getattr(self, name) for name in names if name in own or self._is_of_step(name)}
        for name in taken:
            self._delete(name)
        return taken

    def share(self, values: Mapping[str, Any]) -> None:
        """Make names readable in every frame, for as long as the trainer lives."""
        for name, value in values.items():
            is_fixed = type(value) is Fixed
            self._shared[name] = value.value if is_fixed else value
            self._ways.pop(name, None)
            if is_fixed:
                self._ways[name] = value.way

    def keys(self) -> list[str]:
        """List the names that have a value at this moment."""
        own = [name for name in self.__dict__ if name not in INTERNAL]
        of_step = [name for name in Step.__slots__ if self._is_of_step(name)]
        return list(dict.fromkeys([*own, *of_step, *self._shared]))

    def clear(self, life: Lifecycle | str) -> None:
        """Drop the variables of the innermost frame whose life ends now."""
        own = self.__dict__
        if life != Lifecycle.NONE:
            for name in own["_lives"][life]:
                if name in STEP_NAMES:
                    setattr(own["step"], name, None)
                else:
                    own.pop(name, None)

    @property
    def mode_stack(self) -> list[Mode]:
        """The modes of the routines under way, the innermost last."""
        return [frame["mode"] for frame in self._routines()]

    @property
    def split_stack(self) -> list[str]:
        """The splits of the routines under way, the innermost last."""
        return [frame["split"] for frame in self._routines()]

    @property
    def lifecycles(self) -> dict[str, set[str]]:
        """The names that have a shorter life than their frame."""
        return {str(life): set(names) for life, names in self._lives.items()}

    @contextmanager
    def frame(self, mode: Mode, split: str) -> Iterator[None]:
        """Open a frame for a routine; it and everything set in it are gone when the routine ends, however it ends."""
        # The names of the innermost frame are this object's attributes, so that reading one costs no look-up of ours.
        # A frame is opened by copying them away, emptying `__dict__` and filling it anew, and closed by putting the
        # copy back; the object itself stays the same, because hooks and the loop hold it. Only `_lives`, `_closed` and
        # `step` begin anew; the other INTERNAL names are shared by all frames.
        own = self.__dict__
        outer = dict(own)
        outer["_frames"].append(outer)
        own.clear()
        own.update({name: outer[name] for name in INTERNAL})
        own.update(_lives=_new_lives(), _closed={}, step=Step(), mode=mode, split=split, failed=None)
        try:
            yield
        finally:
            own.clear()
            own.update(outer["_frames"].pop())

    def _is_of_step(self, name: str) -> bool:
        return name in STEP_NAMES and getattr(self.step, name) is not None

    def _routines(self) -> list[dict[str, Any]]:
        return [frame for frame in (*self._frames, self.__dict__) if "mode" in frame]


def lifecycle(life: Lifecycle | str) -> Callable[[F], F]:
    """Drop the variables of a life after a trainer's method, also when it fails."""
    life = Lifecycle(life)

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            finally:
                self.ctx.clear(life)

        return limited  # type: ignore[return-value]

    return decorate


def _new_lives() -> dict[Lifecycle, set[str]]:
    return {life: set(BATCH_NAMES) if life is Lifecycle.BATCH else set() for life in Lifecycle}

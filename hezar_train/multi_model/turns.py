"""Models that take turns at each moment: whose turn it is, what each keeps to itself, and the order of it all.

A batch, and what shared hooks say of it at its start, is seen by all. What a model makes of it (outputs, loss, a hook's
batch variables) is its own: it is put away when the turn passes on and is back at the model's next turn. What is put
away lies in the frame of the routine, so that it ends with it, and an evaluation in between touches none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hezar_train.loop import Context, HookCall, HookSet, Lifecycle, Moment, Routine
from hezar_train.types import Mode

__all__ = ["Turns", "TurnsRoutine"]

PUT_AWAY, SEEN_BY_ALL = "_put_away", "_seen_by_all"
OWN_NAMES = frozenset({"window_loss", "grad_norm", "loss_value", "applied"})
NOT_YET_LEARNED: Mapping[str, Any] = {"loss_value": None, "applied": False}
OPENING = frozenset({Moment.FIT_START, Moment.EPOCH_START, Moment.BATCH_START})


class Turns:
    """Whose turn it is, and what the others have put away."""

    def __init__(self, switch: Callable[[int], None]) -> None:
        self._switch = switch
        self.index = 0

    def take(self, index: int, ctx: Context | None = None) -> None:
        """Give a model its turn, with what it has put away in the routine under way."""
        if index == self.index:
            return
        if ctx is not None:
            own = ctx.__dict__
            away = own.setdefault(PUT_AWAY, {})
            names = (own["_lives"][Lifecycle.BATCH] | OWN_NAMES) - own.get(SEEN_BY_ALL, {"batch"})
            away[self.index] = {name: own.pop(name) for name in names if name in own}
            own.update(away.pop(index, NOT_YET_LEARNED))
        self.index = index
        self._switch(index)

    def begin_batch(self, first: int, ctx: Context) -> None:
        """Let the first model begin; of what was made of the last batch only the loss of an open window goes on."""
        own = ctx.__dict__
        away = own.get(PUT_AWAY, {}) | {self.index: {name: own.pop(name) for name in OWN_NAMES if name in own}}
        own[PUT_AWAY] = {
            index: {**NOT_YET_LEARNED, **{name: kept[name] for name in kept if name == "window_loss"}}
            for index, kept in away.items()
        }
        own.update(own[PUT_AWAY].pop(first, NOT_YET_LEARNED))
        self.take(first)

    def share_batch(self, ctx: Context) -> None:
        """Let all models see what the batch brings so far."""
        own = ctx.__dict__
        own[SEEN_BY_ALL] = {name for name in own["_lives"][Lifecycle.BATCH] if name in own}

    def combine(self, ctx: Context) -> None:
        """Let the update be counted once: with the sum of the losses and the largest norm."""
        if not ctx.closes_window:
            return
        own = ctx.__dict__
        learned = [one for one in (*own[PUT_AWAY].values(), own) if one.get("loss_value") is not None]
        own["loss_value"] = sum(one["loss_value"] for one in learned)
        own["applied"] = any(one["applied"] for one in learned)
        if norms := [one["grad_norm"] for one in learned if "grad_norm" in one]:
            own["grad_norm"] = max(norms)


class TurnsRoutine(Routine):
    """A walk on which some models take turns at every moment, between the hooks that all of them share.

    What is shared comes first where something begins (a batch is prepared once, while the first model has its turn) and
    last where something ends (it is counted once, and then what is due is done).
    """

    def __init__(
        self, ctx: Context, shared: HookSet, models: Mapping[int, HookSet], turns: Turns, split: str,
        interact: Callable[[Moment], HookCall | None],
    ) -> None:  # fmt: skip
        """Walk with the hooks of each model; `interact` says what follows each turn of a moment."""
        super().__init__(ctx, shared, Mode.TRAIN, split)
        self._calls = {moment: _flat(moment, shared, models, turns, interact(moment)) for moment in Moment}
        self._keep_at_hand()


def _flat(
    moment: Moment, shared: HookSet, models: Mapping[int, HookSet], turns: Turns, interact: HookCall | None
) -> tuple[HookCall, ...]:
    """Put a moment's calls in their order, with the turns between them."""
    everyone, own = list(shared.calls(moment)), _own_calls(moment, models, turns, interact)
    if len(models) == 1:
        return tuple(everyone + own if moment in OPENING else own + everyone)
    first, *_, last = models
    if moment is Moment.BATCH_START:
        return (partial(turns.begin_batch, first), *everyone, turns.share_batch, *own)
    if moment in OPENING:
        return (partial(turns.take, first), *everyone, *own) if everyone or own else ()
    own += [partial(turns.take, last)] if own and everyone else []
    own += [turns.combine] if moment is Moment.BATCH_END else []
    return (*own, *everyone)


def _own_calls(
    moment: Moment, models: Mapping[int, HookSet], turns: Turns, interact: HookCall | None
) -> list[HookCall]:
    own: list[HookCall] = []
    for index, hooks in models.items():
        calls: Sequence[HookCall] = hooks.calls(moment)
        if interact is not None:
            calls = [*calls, interact]
        if calls and len(models) > 1:
            own.append(partial(turns.take, index))
        own += calls
    return own

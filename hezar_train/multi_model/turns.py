"""Several models on one walk: whose turn it is, what each keeps to itself, and one model's phase after another.

Taking turns (`Turns`): a batch, and what shared hooks say of it at its start, is seen by all models. What a model makes
of it (outputs, loss, a hook's batch variables) is its own: it is put away when the turn passes on and is back at the
model's next turn. What is put away lies in the frame of the routine, so that it ends with it, and an evaluation in
between touches none of it.

One after another (`Phases`): where each phase begins, and what of the run's state belongs to one model alone, is kept
in the state, as plain values: a phase that a kill broke off goes on where its last checkpoint has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from hezar_train.data import Window
from hezar_train.hooks import Stopping
from hezar_train.loop import Context, HookCall, HookSet, Lifecycle, Loop, Moment, Routine, Verbs
from hezar_train.state import TrainerState
from hezar_train.types import Mode

__all__ = ["MultiModelLoop", "Phases", "Turns", "TurnsRoutine"]

PUT_AWAY, SEEN_BY_ALL = "models_put_away", "seen_by_all_models"
OWN_NAMES = frozenset({"window_loss", "grad_norm", "loss_value", "applied", "is_own", "is_loss_noted", "is_assigned"})
NOT_YET_LEARNED: Mapping[str, Any] = {
    "loss_value": None, "applied": False, "is_own": False, "is_loss_noted": False, "is_assigned": False,
}  # fmt: skip
OPENING = frozenset({Moment.FIT_START, Moment.EPOCH_START, Moment.BATCH_START})

NAME = "multi_model"
OWN = (
    "epoch", "position", "epoch_step", "epoch_finished", "loss_tracker_sum", "loss_tracker_count", "best_metric_value",
    "best_checkpoint",
)  # fmt: skip
"""What of a run's state belongs to one model alone."""

InteractAt = Callable[[Moment], HookCall | None]


class Turns:
    """Whose turn it is, and what the others have put away."""

    def __init__(self) -> None:
        self.index = 0

    def take(self, index: int, ctx: Context | None = None) -> None:
        """Give a model its turn, with what it has put away in the routine under way."""
        if index == self.index:
            return
        if ctx is not None:
            away = ctx.get(PUT_AWAY, {})
            names = (ctx.lifecycles[Lifecycle.BATCH] | OWN_NAMES) - ctx.get(SEEN_BY_ALL, {"batch"})
            away[self.index] = ctx.take(names)
            ctx.put({**NOT_YET_LEARNED, **away.pop(index, {}), PUT_AWAY: away})
        self.index = index

    def begin_batch(self, first: int, ctx: Context) -> None:
        """Let the first model begin; of what was made of the last batch only the loss of an open window goes on."""
        away = ctx.get(PUT_AWAY, {}) | {self.index: ctx.take(OWN_NAMES)}
        left = {
            index: {**NOT_YET_LEARNED, **{name: kept[name] for name in kept if name == "window_loss"}}
            for index, kept in away.items()
        }
        ctx.put({**NOT_YET_LEARNED, **left.pop(first, {}), PUT_AWAY: left})
        self.take(first)

    def share_batch(self, ctx: Context) -> None:
        """Let all models see what the batch brings so far."""
        setattr(ctx, SEEN_BY_ALL, {name for name in ctx.lifecycles[Lifecycle.BATCH] if name in ctx})

    def combine(self, ctx: Context) -> None:
        """Let the update be counted once: with the sum of the losses and the largest norm."""
        step = ctx.step
        if not step.closes_window:
            return
        own = {"loss_value": step.loss_value, "applied": step.applied, "grad_norm": step.grad_norm}
        learned = [one for one in (*ctx[PUT_AWAY].values(), own) if one.get("loss_value") is not None]
        step.loss_value = sum(one["loss_value"] for one in learned)
        step.applied = any(one["applied"] for one in learned)
        if norms := [one["grad_norm"] for one in learned if one.get("grad_norm") is not None]:
            step.grad_norm = max(norms)


class TurnsRoutine(Routine):
    """A walk on which some models take turns at every moment, between the hooks that all of them share.

    What is shared comes first where something begins (a batch is prepared once, while the first model has its turn) and
    last where something ends (it is counted once, and then what is due is done).
    """

    def __init__(
        self, ctx: Context, shared: HookSet, models: Mapping[int, HookSet], turns: Turns, split: str,
        interact: InteractAt,
    ) -> None:  # fmt: skip
        """Walk with the hooks of each model; `interact` says what follows each turn of a moment."""
        self._models, self._turns, self._interact = models, turns, interact
        super().__init__(ctx, shared, Mode.TRAIN, split)

    def has_applied(self, ctx: Context) -> bool:
        """Tell whether the batch under way has changed weights of any model."""
        away = ctx.get(PUT_AWAY, {}).values()
        return super().has_applied(ctx) or any(one.get("applied") for one in away)

    def calls_of(self, hooks: HookSet) -> dict[Moment, tuple[HookCall, ...]]:
        """Put the calls of each moment in their order, with the turns between them."""
        models, turns = self._models, self._turns
        return {moment: _flat(moment, hooks, models, turns, self._interact(moment)) for moment in Moment}

    def sets_of(self, hooks: HookSet) -> list[HookSet]:
        """Return the sets of all models, and what they share."""
        return [hooks, *self._models.values()]


class MultiModelLoop(Loop):
    """A loop on which those models learn that are let."""

    def __init__(
        self,
        ctx: Context,
        model: nn.Module,
        hooks: HookSet,
        verbs: Verbs,
        weigh: Callable[[Window], Window],
        start_over: Callable[[], None],
        while_learning: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell_filler: Callable[[bool], None] | None = None,
        *,
        model_hooks: Mapping[str, HookSet],
        turns: Turns,
        interact: InteractAt,
    ) -> None:
        """Take what a `Loop` takes; the hooks of each model, by name, stand between those that all models share."""
        super().__init__(ctx, model, hooks, verbs, weigh, start_over, while_learning, tell_filler)
        self._context = ctx
        self._model_hooks, self._turns, self._interact = model_hooks, turns, interact
        self._learning: list[str] = []

    def let_learn(self, names: Sequence[str]) -> None:
        """Let models learn from the next routine on; none: the one whose turn it is."""
        self._learning = list(names)

    def training_routine(self, hooks: HookSet | None = None, split: str = "train") -> Routine:
        """Freeze hooks for training: those that all models share, by default the trainer's own, and each model's."""
        names = list(self._model_hooks)
        chosen = self._learning or [names[self._turns.index]]
        models = {names.index(name): self._model_hooks[name] for name in chosen}
        return TurnsRoutine(self._context, self.usable(hooks), models, self._turns, split, self._interact)


class Phases:
    """Let models learn one after another, each with its own place in the data, sums, best result and patience."""

    def __init__(self, state: TrainerState, names: Sequence[str], stopping: Callable[[], Stopping]) -> None:
        """Begin with the first model; `stopping` returns the judge of the run, which another config replaces."""
        self._state, self._names, self._stopping = state, list(names), stopping
        self._untouched = self._own(num_updates=0)

    @property
    def first_step(self) -> int:
        """The step that the phase under way began after."""
        return int(self._kept["first_step"])

    @property
    def updates_of_others(self) -> int:
        """Updates of the run that were not those of the model of this phase."""
        return int(self._kept["updates_of_others"])

    def enter(self, index: int) -> None:
        """Put away what is one model's own and give the next one its own, which at first is that of a new run."""
        state, kept = self._state, self._kept
        kept["models"][self._names[state.model_index]] = self._own(state.update_step - kept["updates_of_others"])
        found = copy.deepcopy(kept["models"].get(self._names[index], self._untouched))
        kept |= {"first_step": state.global_step, "updates_of_others": state.update_step - found["num_updates"]}
        self._stopping().load_state_dict(found["stopping"])
        state.update(found, model_index=index)

    @property
    def _kept(self) -> dict[str, Any]:
        at_first = {"first_step": 0, "updates_of_others": 0, "models": {}}
        found: dict[str, Any] = self._state.hooks.setdefault(NAME, at_first)
        return found

    def _own(self, num_updates: int) -> dict[str, Any]:
        own = {name: getattr(self._state, name) for name in OWN}
        return own | {"num_updates": num_updates, "stopping": copy.deepcopy(self._stopping().state_dict())}


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

"""One call of `train()` with several models: one phase after another, or turns at each moment of one walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import nn

from hezar_train.loop import Context, HookCall, HookSet, Moment, Routine
from hezar_train.multi_model.optimizers import OptimizerDict, ScheduleDict
from hezar_train.multi_model.phases import Phases
from hezar_train.multi_model.turns import Turns, TurnsRoutine
from hezar_train.plan import End
from hezar_train.trainer import Trainer
from hezar_train.types import Mode

__all__ = ["MultiModelCalls"]

OUTSIDE_BATCHES = frozenset({Moment.FIT_START, Moment.EPOCH_START, Moment.EPOCH_END, Moment.FIT_END})


class MultiModelCalls(Trainer):
    """The life of a run of several models, call by call."""

    optimizer: OptimizerDict
    schedule: ScheduleDict
    models: dict[str, nn.Module]
    model_names: list[str]
    model_hooks: dict[str, HookSet]
    interaction: str
    _turns: Turns
    _phases: Phases
    _interacts: bool
    _has_ended: bool

    def steps_in_call(self, name: str) -> int:  # noqa: ARG002 - an override may tell models apart
        """Return the steps that a call of train() trains a model for, where models learn one after another."""
        return self.plan.total_steps

    def interact(self, ctx: Context) -> None:
        """Let models act on one another: after each turn (parallel), or at the end of each routine (sequential).

        `ctx.moment` says at which moment. What is drawn at random follows from the step. It is not called after a
        failure, nor again for the start of a run or an epoch that a resume walks through a second time.
        """

    @property
    def current(self) -> str:
        """The name of the model whose turn it is."""
        return self.model_names[self._turns.index]

    def _begin_call(self) -> None:
        before = self.state.call_end
        super()._begin_call()
        if self.interaction == "sequential" and self.state.call_end not in {None, before}:
            self.state.call_end = self.state.global_step + sum(map(self.steps_in_call, self.models))
            self._phases.enter(0)

    def _walk_run(self, hooks: HookSet, split: str) -> None:
        try:
            if self.interaction == "parallel":
                self._learn(self._course_of_the_run(self._routine_of(hooks, split, self.model_names)))
            else:
                self._walk_phases(hooks, split)
            self._has_ended = True
        finally:
            self._turns.take(0)

    def _walk_phases(self, hooks: HookSet, split: str) -> None:
        for index in range(self.state.model_index, len(self.model_names)):
            self._enter_phase(index)
            self._learn(self._course_of_the_run(self._routine_of(hooks, split, [self.model_names[index]])))
            if self.state.stop_reason is not None:
                return

    def _enter_phase(self, index: int) -> None:
        """Let a model begin, or go on where its last phase ended; one that a kill broke off goes on."""
        if index != self.state.model_index:
            self._phases.enter(index)
            self._source.restore(self._snapshot.cursor)  # a stream has been read ahead of what was trained on
        self._turns.take(index)
        self.schedule.learning, self.schedule.updates_of_others = [self.current], self._phases.updates_of_others
        self._due.end = self._end()

    def _active(self) -> Routine:
        return self._routine or self._routine_of(self.hooks[Mode.TRAIN], "train", [self.current])

    def _routine_of(self, hooks: HookSet, split: str, names: Sequence[str]) -> TurnsRoutine:
        models = {self.model_names.index(name): self.model_hooks[name] for name in names}
        return TurnsRoutine(self.ctx, hooks, models, self._turns, split, self._interaction_at)

    def _interaction_at(self, moment: Moment) -> HookCall | None:
        if not self._interacts or (self.interaction == "sequential" and moment is not Moment.FIT_END):
            return None
        return partial(self._interact_once if moment in OUTSIDE_BATCHES else self._interact_at, moment)

    def _interact_at(self, moment: Moment, ctx: Context) -> None:
        ctx.moment = moment
        self.interact(ctx)

    def _interact_once(self, moment: Moment, ctx: Context) -> None:
        """Interact where something begins or ends: a resume begins again what had begun."""
        had_begun = {Moment.FIT_START: self.state.global_step > self._first_step(),
                     Moment.EPOCH_START: self.state.epoch_step > 0}  # fmt: skip
        if ctx.failed is None and not had_begun.get(moment, False):
            self._steps.seed(ctx)
            self._interact_at(moment, ctx)

    def _first_step(self) -> int:
        """Return the step that the routine of this call began after, also if a kill broke it off."""
        if self.interaction == "sequential":
            return self._phases.first_step
        return 0 if self.state.call_end is None else self.state.call_end - self.plan.total_steps

    def _end(self) -> End:
        end = super()._end()
        if self.interaction == "parallel" or end == End():
            return end
        return End(self._phases.first_step + self.steps_in_call(self.model_names[self.state.model_index]))

    def _is_finished(self) -> bool:
        self._due.end = self._end()  # a checkpoint may be of a later phase
        if not super()._is_finished() or (self._interacts and not self._has_ended):
            return False  # what the last interaction did is in no checkpoint
        return self.interaction == "parallel" or self.state.model_index == len(self.models) - 1 or self._is_stopped()

    def _is_stopped(self) -> bool:
        reason = self.state.stop_reason or self.folder.recorded_stop_reason(self.state.global_step)
        return reason is not None and not self.config.accept_changes

    def _total_steps(self) -> int:
        is_whole = self.interaction == "sequential" and self.state.call_end is None
        return super()._total_steps() * (len(self.models) if is_whole else 1)

    @contextmanager
    def _turn_of(self, name: str) -> Iterator[None]:
        before = self._turns.index
        self._turns.take(self.model_names.index(name))
        try:
            yield
        finally:
            self._turns.take(before)

"""One call of `train()` with several models: one phase after another, or turns at each moment of one walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hezar_train.loop import HookSet
from hezar_train.multi_model.optimizer_dict import ScheduleDict
from hezar_train.multi_model.turns import MultiModelLoop, Phases, Turns
from hezar_train.plan import End
from hezar_train.trainer.run_status import RunStatus
from hezar_train.trainer.session import RunSession

__all__ = ["MultiModelSession", "MultiModelStatus"]


@dataclass
class MultiModelStatus(RunStatus):
    """Where a run of several models stands: with models that learn one after another, each has an end of its own."""

    names: list[str]
    interaction: str
    interacts: bool
    """Whether models act on one another at moments of the walk."""
    steps_in_call: Callable[[str], int]
    has_ended: bool = field(default=False, init=False)
    """Whether the routine of a call was walked to its end, by this trainer."""

    def __post_init__(self) -> None:
        self.phases = Phases(self.state, self.names, lambda: self.setup.stopping)

    @property
    def first_step(self) -> int:
        """The step that the run, this call, or of models that learn one after another this one's part began after."""
        return self.phases.first_step if self.interaction == "sequential" else super().first_step

    def begin_call(self) -> None:
        """Say where this call ends: where models learn one after another, when all of them have done their part."""
        before = self.state.call_end
        super().begin_call()
        if self.interaction == "sequential" and self.state.call_end not in {None, before}:
            self.state.call_end = self.state.global_step + sum(map(self.steps_in_call, self.names))
            self.phases.enter(0)

    def end(self) -> End:
        """Return where the run, or this call, ends; of models that learn one after another, where this one's does."""
        end = super().end()
        if self.interaction == "parallel" or end == End():
            return end
        return End(self.phases.first_step + self.steps_in_call(self.names[self.state.model_index]))

    @property
    def total_steps(self) -> int:
        """The number of steps after which the run, or this call, ends, over all models."""
        is_whole = self.interaction == "sequential" and self.state.call_end is None
        return super().total_steps * (len(self.names) if is_whole else 1)

    def is_finished(self) -> bool:
        """Tell whether nothing is left to do, for any model; what the last interaction did is in no checkpoint."""
        if not super().is_finished() or (self.interacts and not self.has_ended):
            return False
        return self.interaction == "parallel" or self.state.model_index == len(self.names) - 1 or self.is_stopped

    def note_end(self) -> None:
        """Note that the routine of a call was walked to its end."""
        self.has_ended = True


@dataclass
class MultiModelSession(RunSession):
    """A run's session in which models learn one after another (sequential) or take turns (parallel)."""

    loop: MultiModelLoop
    status: MultiModelStatus
    names: list[str] = field(kw_only=True)
    turns: Turns = field(kw_only=True)
    interaction: str = field(kw_only=True)
    schedule: Callable[[], ScheduleDict] = field(kw_only=True)
    """Returns the schedules of all models."""

    def walk(self, hooks: HookSet | None, split: str) -> None:
        """Do the learning of one call of train()."""
        try:
            if self.interaction == "parallel":
                self.loop.let_learn(self.names)
                super().walk(hooks, split)
            else:
                self._walk_phases(hooks, split)
            self.status.note_end()
        finally:
            self.loop.let_learn([])
            self.turns.take(0)

    def _walk_phases(self, hooks: HookSet | None, split: str) -> None:
        for index in range(self.state.model_index, len(self.names)):
            self._enter_phase(index)
            super().walk(hooks, split)
            if self.state.stop_reason is not None:
                return

    def _enter_phase(self, index: int) -> None:
        """Let a model begin, or go on where its last phase ended; one that a kill broke off goes on."""
        if index != self.state.model_index:
            self.status.phases.enter(index)
            self.checkpointing.place_source()  # a stream has been read ahead of what was trained on
        self.turns.take(index)
        self.loop.let_learn([self.names[index]])
        self.schedule().let_learn([self.names[index]], self.status.phases.updates_of_others)

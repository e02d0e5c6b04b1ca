"""The one default hook that acts: after an update it does what is due, in one order: log, save, evaluate, best, stop.

Saving comes first, so that an evaluation that fails loses nothing. What an evaluation changes follows from its recorded
result, so a resume applies the record again, or evaluates if there is none (`after_save`). All other hooks only ask:
`request_save`, `request_stop`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hezar_train.errors import TrainingInterrupted
from hezar_train.hooks.signals import StopFlag
from hezar_train.loop import Context
from hezar_train.plan import End, Plan, is_due
from hezar_train.state import TrainerState

__all__ = ["Actions", "Due"]


@dataclass(frozen=True)
class Actions:
    """What can fall due, as functions: the hook decides when, the trainer says how."""

    log: Callable[[], None]
    save: Callable[[], None]
    judge: Callable[[], None]
    """Evaluate (or read the record), then update the best result and the plateau."""


class Due:
    """Decide after each update, and at each epoch's end, what is due."""

    actions: Actions  # set when a run begins

    def __init__(self, plan: Plan, state: TrainerState, flag: StopFlag, *, evaluates: bool, saves: bool) -> None:
        self.plan, self._state, self._flag = plan, state, flag
        self.evaluates, self._saves = evaluates, saves
        self._judged_step = -1
        self.save_requested = False
        self.end = End(plan.total_steps)
        self.agree: Callable[[], None] | None = None  # of several processes, on what was requested

    @property
    def run_ends(self) -> bool:
        """Tell whether this update is the last one."""
        return self._state.stop_reason is not None or self.is_at_end

    @property
    def is_at_end(self) -> bool:
        """Tell whether the run has done all that was planned."""
        return self.end.is_reached(self._state.global_step, self._state.samples_seen)

    def at_batch_end(self, ctx: Context) -> None:
        """Do what is due inside an epoch; an update that ends it leaves all to the epoch's end."""
        if ctx.closes_window and self.agree is not None:
            self.agree()
        if not ctx.closes_window or not ctx.applied or ctx.window.ends_epoch:
            return
        if not self.run_ends:
            self._act(at_epoch_end=False)

    def at_epoch_end(self, _: Context) -> None:
        """Do what is due at the end of an epoch, or of the run, unless this very update was judged already."""
        if self._judged_step != self._state.global_step:
            self._act(at_epoch_end=True)

    def forget(self) -> None:
        """Take no update for done: the state was put back to an earlier one."""
        self._judged_step, self.save_requested = -1, False

    def after_save(self) -> None:
        """Do the part that follows a save: at a resume it is done again from the record."""
        self.actions.judge()
        self._judged_step = self._state.global_step
        self._state.evaluation_pending = False

    def _act(self, *, at_epoch_end: bool) -> None:
        plan, state, now = self.plan, self._state, self._state.update_step
        evaluates = self.evaluates and (at_epoch_end or is_due(plan.eval_updates, now))
        if at_epoch_end or is_due(plan.log_updates, now):
            self.actions.log()
        due = at_epoch_end or evaluates or is_due(plan.save_updates, now)
        judged = evaluates or at_epoch_end
        saves = self._saves and (due or self.save_requested or self._flag.asked)
        if saves:
            state.evaluation_pending = judged
            self.actions.save()
            self.save_requested = False
        if saves or not self._saves:  # a signal that came too late for this save leaves with the next
            self._leave_if_asked()
        if judged:
            self.after_save()
            self._leave_if_asked()

    def what_is_saved(self) -> str:
        """Say what a run that is left after a save has saved."""
        return f"saved at step {self._state.global_step}" if self._saves else "nothing saved (save_enabled=False)"

    def _leave_if_asked(self) -> None:
        if not self._flag.asked or self._flag.signal is None:
            return
        words = f"{self._flag.signal.name}: stopped, {self.what_is_saved()}."
        raise TrainingInterrupted(self._flag.exit_code, words)

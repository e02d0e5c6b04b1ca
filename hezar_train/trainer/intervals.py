"""When to log, save and evaluate: after which updates each is due, and in which order it is done.

One default hook acts: log, save, evaluate. Saving (unless save_enabled=False) comes before evaluating, so that an
evaluation that fails loses nothing; a run that a signal asks to leave does so right after the save, or after the
evaluation (`TrainingInterrupted`). What an evaluation changes (best, plateau, early stop: `RunActions`) follows from
its recorded result, so a resume applies the record again, or evaluates if there is none (`conclude`). All other hooks
only ask: `request_save`, and `request_stop`, which notes a reason in the state by which the walk ends (`Fit.ends`). How
each is done is in `run_actions`.
"""

from __future__ import annotations

from typing import Protocol

from hezar_train.errors import TrainingInterrupted
from hezar_train.hooks.signals import StopFlag
from hezar_train.loop import Context, Fit
from hezar_train.plan import is_due
from hezar_train.runtime import Processes
from hezar_train.state import TrainerState
from hezar_train.trainer.data_setup import RunSetup

__all__ = ["Actions", "Due"]


class Actions(Protocol):
    """What can fall due: the hook decides when, `RunActions` says how."""

    def log(self) -> None:
        """Write a row of what was measured."""

    def save(self) -> None:
        """Save a checkpoint."""

    def evaluate_and_update_best(self) -> None:
        """Evaluate (or read the record), then update the best result and the plateau."""

    def what_is_saved(self) -> str:
        """Say what a run that is left after a save has saved."""


class Due:
    """Decide after each update, and at each epoch's end, what is due."""

    def __init__(
        self,
        setup: RunSetup,
        state: TrainerState,
        flag: StopFlag,
        actions: Actions,
        processes: Processes,
    ) -> None:
        self._state, self._flag, self._actions, self._processes = state, flag, actions, processes
        self._fit: Fit | None = None
        # Steps, by which nothing is done twice, and what a failed call left undone is seen by the next one:
        self._logged_step = -1  # of the last row
        self._done_step = -1  # after which nothing is left to do, also where nothing was due
        self._concluded_step = -1  # of the last evaluation, or epoch's end, whose conclusions are drawn
        self._first_step: int | None = None  # with which the first walk began
        self._owes_update = self._owes_end = False  # what the call before has left; whether at an epoch's end
        self.save_requested = False
        self.follow(setup)

    def begin(self, fit: Fit) -> None:
        """Go by the end of a walk that begins, and note what the one before it has left."""
        self._owes_update, self._owes_end = self.is_behind, self._is_at_end
        self._fit = fit
        if self._first_step is None:
            self._first_step = self._state.global_step

    @property
    def is_behind(self) -> bool:
        """Whether the last call failed after an update was counted and before what fell due then was done."""
        now = self._state.global_step
        if self._first_step in {None, now} or self._state.evaluation_pending:  # which `make_up` goes by
            return False
        return self._done_step != now or (self._is_at_end and self._concluded_step != now)

    @property
    def _is_at_end(self) -> bool:
        return self._state.epoch_finished or (self._fit is not None and self._fit.ends)

    def make_up(self) -> None:
        """Do what fell due after the last update and was not done: a call failed there, or a resume begins there."""
        if self._owes_update:
            self._owes_update = False
            self._act(at_epoch_end=self._owes_end)
        elif self._state.evaluation_pending:
            self.conclude()

    def follow(self, setup: RunSetup) -> None:
        """Go by another plan."""
        plan = self._plan = setup.plan
        self._evaluates, self._saves = setup.evaluates, setup.config.save_enabled
        periods = (plan.log_updates, plan.save_updates, plan.eval_updates)
        self._periods = [period for period in periods if period is not None]

    def at_batch_end(self, ctx: Context) -> None:
        """Do what is due inside an epoch.

        An update that ends the epoch or the run leaves all to EPOCH_END, which comes also where a run ends inside one;
        after an update that a scaler has skipped nothing is done: a request to save and a signal wait for the next.
        """
        step = ctx.step
        if step.closes_window and self._processes.count > 1:
            self.agree_on_requests()
        if not step.closes_window:  # a step that is taken back if the window fails: nothing is done with it
            return
        if not step.applied or step.window.ends_epoch or self._is_quiet:
            self._done_step = self._state.global_step
        elif self._fit is None or not self._fit.ends:
            self._act(at_epoch_end=False)

    @property
    def _is_quiet(self) -> bool:
        """Whether the last update is one of the many after which there is nothing to do."""
        if self.save_requested or self._flag.asked:
            return False
        # 0, for false, is the remainder of a period that is over
        return all(map(self._state.update_step.__mod__, self._periods))

    def at_start(self, _: Context) -> None:
        """Let all processes know what one was asked for before the first batch of an epoch, or of the run."""
        self.agree_on_requests()

    def at_epoch_end(self, _: Context) -> None:
        """Do what is due at the end of an epoch, or of the run, unless this very update was concluded already."""
        self.agree_on_requests()
        if self._concluded_step != self._state.global_step:
            self._act(at_epoch_end=True)

    def forget(self) -> None:
        """Take no update for done: the state was put back to an earlier one."""
        self._concluded_step = self._logged_step = self._done_step = -1
        self._first_step, self.save_requested = None, False

    def conclude(self) -> None:
        """Evaluate, where there is data for it, and draw the conclusions; at a resume again, from the record."""
        self._actions.evaluate_and_update_best()
        self._concluded_step = self._state.global_step
        self._state.evaluation_pending = False
        self.agree_on_requests()  # hooks of the evaluation may have asked

    def agree_on_requests(self) -> None:
        """Let all processes stop or save if one was asked to, by a hook or by a signal.

        On one process a signal needs no agreement: its flag is `asked` at once.
        """
        state, processes = self._state, self._processes
        asked = (state.stop_reason is not None, self.save_requested, self._flag.signal is not None)
        stops, saves, signals = processes.sum([float(one) for one in asked])
        if signals and processes.count > 1:
            self._flag.agree()
        if stops:
            state.stop_reason = next(reason for reason in processes.gather(state.stop_reason) if reason is not None)
        self.save_requested = saves > 0

    def _act(self, *, at_epoch_end: bool) -> None:
        plan, state, now = self._plan, self._state, self._state.update_step
        evaluates = self._evaluates and (at_epoch_end or is_due(plan.eval_updates, now))
        if (at_epoch_end or is_due(plan.log_updates, now)) and self._logged_step != state.global_step:
            self._logged_step = state.global_step
            self._actions.log()
        save_is_due = at_epoch_end or evaluates or is_due(plan.save_updates, now)
        concludes = evaluates or at_epoch_end
        saves = self._saves and (save_is_due or self.save_requested or self._flag.asked)
        if saves:
            self._save(concludes)
        self._done_step = state.global_step
        if saves or not self._saves:  # leave only after a save, so that nothing is lost; at once where none is made
            self._leave_if_asked()
        if concludes:
            self.conclude()
            # On one process a signal has ended the evaluation half way, unconcluded (`EvaluationSteps.measure`);
            # several finish it and agree on the signal at the end of `conclude`.
            self._leave_if_asked()

    def _save(self, concludes: bool) -> None:
        """Save, with a note of whether an evaluation follows; one that failed is made up for by the next call."""
        state = self._state
        state.evaluation_pending = concludes
        try:
            self._actions.save()
        except BaseException:
            state.evaluation_pending = False
            raise
        self.save_requested = False

    def _leave_if_asked(self) -> None:
        if not self._flag.asked or self._flag.signal is None:
            return
        words = f"{self._flag.signal.name}: stopped, {self._actions.what_is_saved()}."
        raise TrainingInterrupted(self._flag.exit_code, words)

"""The loop: `for epoch`, `for batch`, and the moments at which hooks run. It stands here and nowhere else.

A step is one micro-batch; an update is one step of the optimizer, over a window of micro-batches.

    fit()                         FIT_START
      for epoch                   EPOCH_START
        run_epoch()
          for batch               BATCH_START
            run_step()            BATCH_FORWARD, BATCH_BACKWARD; at a window's end GRADIENTS, UPDATE
                                  BATCH_END    when run_step() is done and the next batch is asked for
                                  EPOCH_END    not after a failure
                                  FIT_END      also after a failure, with ctx.failed set

Training, finetuning, the learning-rate finder, evaluation and prediction all walk here; they differ in a `Routine`
(mode, split and hooks) and, where something is learned, in a `Fit` (data, plan, counters, end).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import GEN_SUSPENDED, getgeneratorstate
from typing import Any

import torch
from torch import nn

from hezar_train.data import Source, Window, unfit_values
from hezar_train.errors import DataError, HookError, NonFiniteError, a_kind, choices
from hezar_train.events import EventWriter
from hezar_train.loop.context import Context, CtxVar, Lifecycle
from hezar_train.loop.hooks import HookCall, HookSet, Moment
from hezar_train.plan import UNLIMITED, End, Plan
from hezar_train.runtime.place import PLACE
from hezar_train.state import TrainerState
from hezar_train.types import Mode

__all__ = [
    "DONE_BY_USER",
    "EpochBatches",
    "Fit",
    "Loop",
    "Routine",
    "Verbs",
    "add_loss",
    "note_loss",
    "refuse_non_finite",
    "share_of",
]

MAX_NAMED_SAMPLES = 64
NOT_APPLIED = "it was not applied"
DONE_BY_USER = "your own code has applied it, so the weights may be spoilt"
DONE_UNGUARDED = "it was applied, because the hook `guard` was taken out, so the weights may be spoilt"


@dataclass(frozen=True)
class Verbs:
    """The trainer's methods that a user may override and that a step, an evaluation or a save calls.

    Parts reach the trainer through these alone; what is overridden to build something (loaders, the schedule, the
    weight of a batch) comes to the part that needs it as a function, when it is made.
    """

    inner_training_loop: Callable[[int], Mapping[str, float]]
    run_step: Callable[[], Any]
    prepare_input_batch: Callable[[Any], Any]
    forward: Callable[[Any], Any]
    compute_loss: Callable[..., torch.Tensor]
    evaluation_step: Callable[[Any], dict[str, Any]]
    evaluate_while_training: Callable[[], dict[str, float]]
    pictures: Callable[[], Iterable[tuple[torch.Tensor, Mapping[str, Any]]]]
    finetune: Callable[[], object]
    build_writers: Callable[[], list[EventWriter]]
    log: Callable[[dict[str, float], int], None] | None = None
    """A user's own `log`, called with what each evaluation and each epoch's end has found; None: there is none."""
    save: Callable[[str], object] | None = None
    """A user's own `save`, called on all processes when a save is due, with a folder for it; None: there is none."""


class Loop:
    """Walk over epochs and batches; know the routine and the fit that are under way."""

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
    ) -> None:
        """Walk with the hooks of training, unless a fit has others.

        `weigh` says what the micro-batches of a window weigh; `start_over` lets what joins the gradients
        forget a step that failed half way (the open window itself is taken back when the next call begins);
        `while_learning` is held while a fit is under way: a trainer's lets `accelerator.backward` weigh losses;
        `tell_filler` is told of each batch of a fit whether it is filler, and after it that none is under way.
        """
        self._ctx, self._model, self._hooks, self._verbs = ctx, model, hooks, verbs
        self._weigh, self._start_over, self._while_learning = weigh, start_over, while_learning
        self._tell_filler = tell_filler
        self._fits: list[Fit] = []
        self.batches: EpochBatches | None = None
        """The batches of the epoch under way, or of the last one."""

    def fit(self, fit: Fit, at_start: Callable[[], None] | None = None) -> None:
        """Walk a learning routine to its end; `at_start` is called after the hooks of FIT_START."""
        with self.entered(fit):  # FIT_START, FIT_END
            if at_start is not None:
                at_start()
            while not fit.ends and fit.enter_next_epoch():
                before = fit.progress
                with fit.routine.epoch():  # EPOCH_START, EPOCH_END
                    self._verbs.inner_training_loop(fit.state.epoch)
                fit.refuse_standstill(before)

    def run_epoch(self, epoch: int) -> dict[str, float]:
        """Step through the batches that are left of an epoch; return the mean loss since the start of the training."""
        run_step, step = self._verbs.run_step, self._ctx.step
        with self.epoch_batches(epoch) as batches:
            for _ in batches:  # BATCH_START, BATCH_END
                outputs = run_step()  # BATCH_FORWARD, BATCH_BACKWARD, GRADIENTS, UPDATE
                if not step.is_loss_noted:  # an override that goes its own way
                    note_loss(self._ctx, outputs, "run_step")
                del outputs  # else they would live through the next step
        return {"loss": self._fits[-1].state.loss_tracker_avg}

    @contextmanager
    def entered(self, fit: Fit) -> Iterator[None]:
        """Run a body as the learning routine of a fit, between the hooks of FIT_START and FIT_END."""
        self._fits.append(fit)
        try:
            self._model.train()
            with self._while_learning(), torch.enable_grad(), fit.routine.running(lambda: fit.announce(self._ctx)):
                fit.take_lengths(self._ctx)
                yield
        except BaseException:
            self._start_over()
            raise
        finally:
            self._fits.pop()

    @contextmanager
    def epoch_batches(self, epoch: int) -> Iterator[EpochBatches]:
        """Open the rest of an epoch, for a body that walks over all of its batches."""
        fit = self._fits[-1]
        before, self.batches = fit.state.global_step, EpochBatches(fit, self._ctx, epoch, self._tell_filler)
        batches = self.batches
        try:
            yield batches
            batches.refuse_left_batch()
        finally:
            batches.close()
        fit.close_epoch(before)

    def infer(self, routine: Routine, windows: Iterable[Window]) -> None:
        """Step through windows of which nothing is learned: a step is the moments of forward and backward."""
        with closing(routine.batches(windows)) as batches:  # a failed step must end its batch here, not some time later
            for _ in batches:
                routine.fire(Moment.BATCH_FORWARD)
                routine.fire(Moment.BATCH_BACKWARD)

    @property
    def current(self) -> Fit | None:
        """The fit under way, the innermost one; None between two calls."""
        return self._fits[-1] if self._fits else None

    def training_routine(self, hooks: HookSet | None = None, split: str = "train") -> Routine:
        """Freeze hooks for training, by default the trainer's own."""
        return Routine(self._ctx, self.usable(hooks), Mode.TRAIN, split)

    def usable(self, hooks: HookSet | None) -> HookSet:
        """Return hooks to train with, by default the trainer's own; raise if a run would not end with them."""
        if hooks is None or hooks is self._hooks:
            return self._hooks
        if missing := self._hooks.missing_required(hooks):
            raise HookError(
                f"the hooks given for this call lack {choices(missing)}, without which it would not end. Begin with a "
                "copy: trainer.hooks_in_train.copy()."
            )
        return hooks

    def run_model(self, batch: Any) -> dict[str, Any]:
        """Fire the moments of forward and backward on a batch; return the outputs."""
        if self._fits and self._ctx.step.window is None:
            raise DataError(
                "training_step() was given a batch that is none of the run's, so that nothing would count it. A loop "
                "of your own in inner_training_loop() goes over them: with self.parts.loop.epoch_batches(epoch_num) as "
                "batches: for batch in batches: self.run_step()."
            )
        ctx, step = self._ctx, self._ctx.step
        routine = self._fits[-1].routine if self._fits else self._routine_of_lone_step(batch)
        step.batch = batch
        for call in routine.forward_calls:
            call(ctx)
        for call in routine.backward_calls:
            call(ctx)
        if step.outputs is None:
            raise HookError(
                "no hook ran the model at on_batch_forward. A hook set for one call may start as a copy: "
                "trainer.hooks_in_train.copy()."
            )
        return step.outputs  # type: ignore[no-any-return]

    def run_update(self) -> None:
        """Fire the moments of an update, on the last micro-batch of a window."""
        ctx = self._ctx
        if not ctx.step.closes_window:
            return
        routine = self._fits[-1].routine if self._fits else self.training_routine()
        if not ctx.step.is_assigned:
            ctx.step.grad_norm = None  # that of the update before
        for call in routine.gradient_calls:
            call(ctx)
        for call in routine.update_calls:
            call(ctx)

    def _routine_of_lone_step(self, batch: Any) -> Routine:
        """Get ready for a step that is called on its own, outside of a fit: its batch is a whole window."""
        step = self._ctx.step
        step.window = self._weigh(Window(0, 0, False, [batch]))
        step.batch_in_window, step.closes_window = 0, True
        return self.training_routine()


class Routine:
    """One walk with a mode, a split and a hook set; what runs at each moment is frozen when it is made."""

    def __init__(self, ctx: Context, hooks: HookSet, mode: Mode, split: str) -> None:
        self._ctx, self.mode, self.split, self.is_ending = ctx, mode, split, False
        self.left_unsettled = False
        """Whether something failed after an update was applied and before all that counts knew of it."""
        self._calls, self._sets = self.calls_of(hooks), self.sets_of(hooks)
        if PLACE.is_shown:  # to the other processes of the run
            numbered = enumerate(self._calls.items())
            self._calls = {moment: (PLACE.noting(mode, n), *calls) for n, (moment, calls) in numbered}
        # at hand without a look-up, which costs more than an empty moment
        self.forward_calls = self._calls[Moment.BATCH_FORWARD]
        self.backward_calls = self._calls[Moment.BATCH_BACKWARD]
        self.gradient_calls = self._calls[Moment.GRADIENTS]
        self.update_calls = self._calls[Moment.UPDATE]

    def calls_of(self, hooks: HookSet) -> dict[Moment, tuple[HookCall, ...]]:
        """Return what runs at each moment, in order."""
        return {moment: hooks.calls(moment) for moment in Moment}

    def sets_of(self, hooks: HookSet) -> list[HookSet]:
        """Return the sets that are not to be changed while the routine runs."""
        return [hooks]

    def has_applied(self, ctx: Context) -> bool:
        """Tell whether the batch under way has changed weights."""
        return bool(ctx.step.applied)

    def fire(self, moment: Moment) -> None:
        """Run a moment's hooks."""
        ctx = self._ctx
        for call in self._calls[moment]:
            call(ctx)

    @contextmanager
    def running(self, announce: Callable[[], None] | None = None) -> Iterator[None]:
        """Open the routine's frame, with FIT_START before and FIT_END after the body, also when it fails.

        `announce` may set names in the frame before the first hook runs.
        """
        # The body of the `with` runs at the `yield` and raises there, so that FIT_END comes after a failure as well.
        # Hooks of FIT_END may fail, too: then the first failure is the one that is raised.
        failure: BaseException | None = None
        with self._ctx.frame(self.mode, self.split), ExitStack() as hooks_running:
            for hooks in self._sets:
                hooks_running.enter_context(hooks.running())
            try:
                if announce is not None:
                    announce()
                self.fire(Moment.FIT_START)
                yield
            except BaseException as error:  # noqa: BLE001 - raised again below
                failure = error
                self._ctx.put({"failed": error})
            self.is_ending = True
            try:
                self.fire(Moment.FIT_END)
            finally:
                if failure is not None:  # what went wrong first is what the caller must see
                    raise failure

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Fire EPOCH_START before and EPOCH_END after the body; the epoch's variables end with it."""
        try:
            self.fire(Moment.EPOCH_START)
            yield  # the epoch; one that fails has no EPOCH_END, where it would be logged and saved as if it were whole
            self.fire(Moment.EPOCH_END)
        finally:
            self._ctx.clear(Lifecycle.EPOCH)

    def batches(
        self,
        windows: Iterable[Window],
        number_in_epoch: int = 0,
        check_loss: Callable[[], None] | None = None,
        tell_filler: Callable[[bool], None] | None = None,
    ) -> Generator[Any, None, None]:
        """Yield each micro-batch between its BATCH_START and its BATCH_END; the batch's variables end with it.

        Where something is learned, `check_loss` is called before BATCH_END if the loss of an update is not known by
        then: on a batch that does not close its window, and in an update that the default `guard` has not read.
        """
        ctx, step = self._ctx, self._ctx.step
        starts, ends = self._calls[Moment.BATCH_START], self._calls[Moment.BATCH_END]
        for window in windows:
            step.window, last = window, len(window.batches) - 1
            for number, batch in enumerate(window.batches):
                step.batch, step.batch_in_window, step.closes_window = batch, number, number == last
                step.cur_batch_i = number_in_epoch
                step.is_loss_noted, step.loss_value, step.applied = False, None, False
                step.is_own = step.is_weighed = step.is_skipped = step.is_assigned = False
                step.is_counted = step.is_settled = False
                number_in_epoch += 1
                if tell_filler is not None:
                    tell_filler(window.is_filler(number))
                try:
                    for call in starts:
                        call(ctx)
                    # The step is done by whoever walks; asking for the next batch goes on from here, and a step that
                    # fails closes this generator, which raises GeneratorExit here.
                    yield step.batch
                    if check_loss is not None and (step.loss_value is None or not step.is_loss_noted):
                        check_loss()
                    for call in ends:
                        call(ctx)
                except BaseException:
                    self.left_unsettled = self.left_unsettled or (not step.is_settled and self.has_applied(ctx))
                    raise
                finally:
                    ctx.clear(Lifecycle.BATCH)
                    if tell_filler is not None:
                        tell_filler(False)


@dataclass
class Fit:
    """One learning routine: over which data, by which plan, with which counters, from where to where."""

    routine: Routine
    source: Source
    plan: Plan
    state: TrainerState
    end: End
    num_epochs: int
    weigh: Callable[[Window], Window]
    sum_loss: Callable[[Any], float] = float
    """Returns the loss of an update that was done in the user's own way, over all processes."""
    timed: Callable[[Iterator[Window]], Iterator[Window]] = iter
    """Counts the time that it takes to get data."""

    counts_from: int | None = None
    """The step that the run, or this call among many, began after; None: it begins now."""
    is_bounded: bool = False
    """Whether `end` stays where it is when hooks ask for more epochs, because the config gives the steps."""

    batches_in_epoch: int = UNLIMITED
    saw_data: bool = field(default=False, repr=False)
    is_cut_short: bool = field(default=False, repr=False)
    """Whether the epoch ends where hooks have said, before its data does."""

    def __post_init__(self) -> None:
        self.first_step = self.state.global_step  # which this walk began after
        self._origin = self.first_step if self.counts_from is None else self.counts_from
        self._first_samples, self._first_loss = self.state.samples_seen, self.state.loss_tracker_sum

    @property
    def num_samples(self) -> int:
        """Samples trained on since the routine began."""
        return self.state.samples_seen - self._first_samples

    @property
    def loss_total(self) -> float:
        """Weighted sum of the losses since the routine began."""
        return self.state.loss_tracker_sum - self._first_loss

    @property
    def progress(self) -> tuple[int, int, bool]:
        """How far the routine is, as something that changes with every step and every finished epoch."""
        return self.state.global_step, self.state.epoch, self.state.epoch_finished

    def refuse_standstill(self, before: tuple[int, int, bool]) -> None:
        """Raise if an epoch went by in which nothing was counted: the next one would do the same, for ever."""
        if self.progress == before and not self.ends:
            raise HookError(
                "an epoch went by without a step that was counted, so the run would not end. An overridden "
                "inner_training_loop() calls super().inner_training_loop(epoch_num); to train on other data, build a "
                "Trainer with it."
            )

    @property
    def ends(self) -> bool:
        """Tell whether no update may follow the one just done: a stop was asked for, or the end is reached."""
        state = self.state
        return state.stop_reason is not None or self.end.is_reached(state.global_step, state.samples_seen)

    @property
    def is_over(self) -> bool:
        """Tell whether no further step will follow: the last update is done, or the last epoch."""
        return self.ends or (self.state.epoch_finished and self.state.epoch >= self.num_epochs)

    def announce(self, ctx: Context) -> None:
        """Tell hooks how long the run, or this call, is from its start on; what they assign at FIT_START counts.

        At a resume the numbers are the same, so that what a hook makes of them is.
        """
        total = min(self.end.step - self._origin, self.plan.total_steps)
        per_epoch = max(1, self.plan.steps_in_epoch or total)
        lengths = {
            "num_train_batch": min(per_epoch, total),
            "num_train_batch_last_epoch": total % per_epoch or per_epoch,
            "num_train_epoch": min(self.num_epochs, max(self.plan.num_epochs, 1)),
            "num_total_train_batch": total,
        }
        ctx.merge_from_dict({name: CtxVar(value, Lifecycle.ROUTINE) for name, value in lengths.items()})
        self._announced = self._lengths(ctx)
        ctx.close(["num_train_batch_last_epoch"], "It follows from ctx.num_total_train_batch and ctx.num_train_batch.")

    def take_lengths(self, ctx: Context) -> None:
        """Take over the lengths that hooks assigned."""
        told = self._lengths(ctx)
        ctx.close(told, "The routine has begun: assign it at on_fit_start.")
        for name, value in told.items():
            if value == self._announced[name]:
                continue
            if name == "num_train_epoch" and self.num_epochs < UNLIMITED:
                self.num_epochs, self.end = value, self.end if self.is_bounded else End()
            elif name == "num_train_epoch":  # of one call among many
                self.end = End(self._origin + value * (self.plan.steps_in_epoch or 1))
            elif name == "num_total_train_batch":
                self.num_epochs, self.end = UNLIMITED, End(self._origin + value)
            else:
                self.batches_in_epoch = value

    def enter_next_epoch(self) -> bool:
        """Go to the next epoch if this one is finished; return False when there is none left."""
        state = self.state
        if state.epoch_finished:
            if state.epoch >= self.num_epochs:
                return False
            state.update(epoch=state.epoch + 1, position=0, epoch_step=0, epoch_finished=False)
        return True

    def rest_of_epoch(self) -> tuple[int, int, int]:
        """Return the place in the epoch, and how many steps and samples may follow it there at most."""
        state = self.state
        steps_left = min(self.end.step - state.global_step, self.batches_in_epoch - state.epoch_step)
        return state.position, steps_left, self.end.samples - state.samples_seen

    def windows(self, epoch: int) -> Iterator[Window]:
        """Yield the rest of an epoch, each window weighed before its first backward.

        A stop that a hook asked for after the last update is seen when the next window is there: it is dropped.
        """
        self.saw_data = self.is_cut_short = False
        for window in self.timed(self.source.windows(self.plan, epoch, *self.rest_of_epoch())):
            if self.ends:
                return
            self.saw_data = True
            is_last = self.state.epoch_step + len(window.batches) >= self.batches_in_epoch
            if is_last and not window.ends_epoch:
                window.ends_epoch = self.is_cut_short = True
            yield self.weigh(window)

    def close_epoch(self, steps_before: int) -> None:
        """Mark an epoch as finished where `count` could not know it: no step was left, or hooks have shortened it."""
        state = self.state
        went_on = state.global_step != steps_before
        if not went_on and self.ends:  # asked to stop before the first step: what is left of the epoch stays
            return
        if not went_on and not self.saw_data and state.position == 0:
            raise DataError(
                f"the training data gave no sample in epoch {state.epoch}; expected at least one in each. Look at what "
                "its __iter__ yields, and whether it begins anew when it is called again."
            )
        # no step was left: a resume began exactly where a stream ends, or hooks have made the epoch shorter
        if not went_on or state.epoch_step >= self.batches_in_epoch:
            state.epoch_finished = True

    @staticmethod
    def _lengths(ctx: Context) -> dict[str, int]:
        return {name: ctx[name] for name in ("num_train_epoch", "num_total_train_batch", "num_train_batch")}


class EpochBatches:
    """The batches that are left of an epoch; walking over them is walking the loop.

    Each batch comes after its BATCH_START; asking for the next one counts it and does what is due. Before that its loss
    must have been noted, which every step does by itself. Its length is what was left when it was opened.
    """

    def __init__(self, fit: Fit, ctx: Context, epoch: int, tell_filler: Callable[[bool], None] | None = None) -> None:
        self._fit, self._ctx, self._epoch, self._tell_filler = fit, ctx, epoch, tell_filler
        self._rest, self._length = fit.rest_of_epoch(), -1
        self._walk: Generator[Any, None, None] | None = None

    def __len__(self) -> int:
        if self._fit.plan.steps_in_epoch is None:
            raise TypeError("the length of the training data is unknown")
        if self._length < 0:
            self._length = sum(span.num_steps for span in self._fit.plan.windows(*self._rest))
        return self._length

    def __iter__(self) -> Generator[Any, None, None]:
        fit = self._fit
        self._walk = fit.routine.batches(
            fit.windows(self._epoch), fit.state.epoch_step, self._check_loss, self._tell_filler
        )
        return self._walk

    def close(self) -> None:
        """End the walk, also one that failed or was left early."""
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def refuse_left_batch(self) -> None:
        """Raise if the loop over the batches was left with one whose step is done, perhaps, and not counted."""
        if self._walk is not None and getgeneratorstate(self._walk) == GEN_SUSPENDED:
            raise DataError(
                "an overridden inner_training_loop() or train_epoch() left its loop before the epoch's end, so its "
                "last batch was not counted. To end the run there, call request_stop() and go on; for shorter epochs "
                "set max_steps."
            )

    def _check_loss(self) -> None:
        """Raise if a batch has noted no loss; at the end of a window whose loss no hook has read, read it.

        The second is an update that was done in the user's own way: an overridden `optimization_step` without super(),
        or other hooks in the place of `guard`.
        """
        step = self._ctx.step
        if not step.is_loss_noted:
            raise DataError(
                "a batch went by without a loss. An overridden train_epoch() or inner_training_loop() calls "
                "self.run_step(), or its own code and then self.note_loss(loss)."
            )
        if step.closes_window:
            was_applied_by_hook = step.applied and not step.is_own
            step.loss_value, step.applied = self._fit.sum_loss(step.window_loss), not step.is_skipped
            if step.is_skipped:  # the scaler has kept it from the weights, and goes on
                return
            how = DONE_UNGUARDED if was_applied_by_hook else DONE_BY_USER
            refuse_non_finite(step.loss_value, 0.0, self._fit.state, step.window, how=how)


LOOK_AT_THEM = "Look at them, lower learning_rate, or set max_grad_norm"
LOOK_AT_THE_MODEL = (
    "Nothing was trained yet, so learning_rate is not the cause: look at them, and at what forward() and the loss "
    "compute of them (a logarithm or a division of 0)"
)


def refuse_non_finite(
    loss: float, grad_norm: float, state: TrainerState, window: Window, *, whose: str = "", how: str = NOT_APPLIED
) -> None:
    """Raise, naming the samples, if an update would spoil the weights or has done so; `how` says which."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm} (loss {loss})"
    samples = window.samples()
    named = ", ".join(map(str, samples[:MAX_NAMED_SAMPLES])) or "not known: the data is a stream"
    more = f" and {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
    is_first = state.update_step == 0 and how == NOT_APPLIED
    remedy = unfit_values(window) or (LOOK_AT_THE_MODEL if is_first else LOOK_AT_THEM)
    raise NonFiniteError(
        f"{what}{whose} in the update at step {state.global_step + 1} (epoch {state.epoch}); {how}. Samples of the "
        f"update: {named}{more}. {remedy}; what was saved so far is intact.",
        step=state.global_step + 1,
        samples=samples,
    )


def share_of(window: Window, number: int) -> float:
    """Return a micro-batch's share of its window, which is that of all processes."""
    if window.total_weight == 0:
        return 0.0
    return window.weights[number] / window.total_weight


def add_loss(ctx: Context, part: torch.Tensor) -> None:
    """Add a micro-batch's part to the window's loss, on the device."""
    step = ctx.step
    step.window_loss = part if step.batch_in_window == 0 else step.window_loss + part
    step.is_loss_noted = True


def note_loss(ctx: Context, outputs: Any, method: str) -> None:
    """Add the loss that an overridden method returned."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(found, torch.Tensor):
        given = "note_loss() was given" if method == "note_loss" else f"the overridden {method}() returned"
        raise DataError(
            f"{given} {_shown(outputs)}; expected the step's loss as a tensor, or a mapping that has it under 'loss', "
            f"so that it can be logged.{' Is a return missing?' if outputs is None else ''}"
        )
    if method == "training_step":  # whoever overrides more than that takes the update over, weights included
        _refuse_unweighed(ctx)
    add_loss(ctx, found.detach() * share_of(ctx.step.window, ctx.step.batch_in_window))


def _refuse_unweighed(ctx: Context) -> None:
    """Raise if an own backward in a window of several micro-batches did not weigh its loss: their sum is no mean."""
    step = ctx.step
    if len(step.window.batches) > 1 and not step.is_weighed:
        raise DataError(
            "an overridden training_step(), or a hook in the place of `backward`, did its own backward in a window of "
            f"{len(step.window.batches)} micro-batches, whose losses must be weighed. Instead of loss.backward() call "
            "accelerator.backward(loss), which does it; or set gradient_accumulation_steps=1."
        )


def _shown(outputs: Any) -> str:
    return f"a mapping of {choices(outputs) or 'nothing'}" if isinstance(outputs, Mapping) else a_kind(outputs)

"""What the loop does by itself in a training step, as named hooks; users override the methods that some of them call.

    BATCH_START      seed, prepare_input
    BATCH_FORWARD    forward, regularize (where the config names a regulariser)
    BATCH_BACKWARD   backward
    GRADIENTS        gather: those of the whole window on all processes, unscaled, not clipped yet
    UPDATE           guard, clip, step, zero_grad; a hook that is added comes after them, when the gradients are gone
    BATCH_END        count, schedule, then `keep_place` and `progress` (`RunSession.register`), users' hooks, and `due`

With the default hooks an update amounts to this (`docs/examples/plain_loop.py` is such a loop, with the same bits):

    for number, batch in enumerate(window.batches):           # one update
        seed(step); batch = prepare_input_batch(batch)        # BATCH_START
        outputs = forward(batch)                              # BATCH_FORWARD
        loss = compute_loss(outputs, labels)
        share = weights[number] / sum of all weights of all processes
        (loss * share).backward()                             # BATCH_BACKWARD
        step += 1                                             # BATCH_END; that of the last one comes after the update
    gradients = sum over the processes, unscaled              # GRADIENTS; as a rule exchanged in the last backward
    norm, window_loss = read from the device                  # UPDATE: guard
    if the loss is not finite: raise; if the norm is not: raise, or with a scaler let it skip the step
    gradients *= min(1, max_grad_norm / (norm + 1e-6))        #   clip
    optimizer.step(); gradients = None                        #   step, zero_grad
    update_step += applied; schedule.after_update()           # BATCH_END: count, schedule; then log, save, evaluate

`TrainStep` holds these hooks; `Optimization` does what those of GRADIENTS and UPDATE ask for: it joins, unscales,
norms and clips the gradients, and steps the optimizer.

This is the hot path: nothing here waits for the device but the guard, in every update (one read; with several processes
one for the norm and one for the loss), a scaler, where one steps, and the joining of gradients, where a model is
sharded, leaves parameters unused or has sparse gradients. Two things outside of this module talk as well:
`intervals.Due` agrees on requests after every update of several processes, and `loss_weight.Weigher` sums the weights
of a window where they are not known from its samples alone.
"""

from __future__ import annotations

import copy
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hezar_train.data import Window, note_samples, seed_device, shown_of, step_seeds
from hezar_train.errors import ConfigError, DataError, HookError
from hezar_train.events import EventStorage
from hezar_train.events.run_records import Ledger
from hezar_train.loop import DONE_BY_USER, Context, HookSet, Moment, Verbs, add_loss, refuse_non_finite, share_of
from hezar_train.optim import DirectStep, Schedule
from hezar_train.runtime import DataParallel, Processes, Runtime, to_device
from hezar_train.runtime.data_parallel import gradient_mark
from hezar_train.runtime.sharding import gradient_norm, local_gradients
from hezar_train.state import TrainerState
from hezar_train.trainer.model_runner import Regularizer, as_outputs, labels_of, others_of
from hezar_train.trainer.own_code import OwnSteps

__all__ = ["Optimization", "TrainStep", "UpdateLog", "read_both"]

NOTHING = nullcontext()
CLIP_MARGIN = 1e-6  # what torch adds to the norm before it divides


class TrainStep:
    """The default hooks of a training step."""

    def __init__(
        self,
        verbs: Verbs,
        runtime: Runtime,
        seed: int,
        state: TrainerState,
        optimization: Optimization,
        log: UpdateLog | None = None,
    ) -> None:
        """Count in `state`, and note updates in `log`, where there is one."""
        self._verbs, self._state, self._optimization, self._log = verbs, state, optimization, log
        self._autocast, self._scaler = runtime.autocast(), runtime.scaler
        self._device, self._moves = runtime.device, runtime.device.type != "cpu"
        self._seeds, self._processes = step_seeds(seed, runtime.rank), runtime.processes
        self._regularizer: tuple[Regularizer, float] | None = None
        self._open_steps = 0
        self.loss_regular_total: torch.Tensor | float = 0.0
        """The weighted sum of what the regulariser added since the routine began."""

    def begin(self, state: TrainerState | None = None, optimization: Optimization | None = None) -> None:
        """Begin a routine, with other counters and another optimizer if they are given."""
        self._state = self._state if state is None else state
        self._optimization = self._optimization if optimization is None else optimization
        self.loss_regular_total, self._open_steps = 0.0, 0

    def register(self, hooks: HookSet, regularizer: Regularizer | None = None, factor: float = 0.0) -> None:
        """Put the default behaviour into a hook set, under its names; with a regulariser, so many times that too."""
        self.register_batch(hooks)
        self.register_model(hooks)
        if regularizer is not None:
            self.register_regularizer(hooks, regularizer, factor)

    def register_batch(self, hooks: HookSet) -> None:
        """Put in what happens once for a batch, however many models see it."""
        hooks.register(self.seed, Moment.BATCH_START, name="seed")
        hooks.register(self.prepare_input, Moment.BATCH_START, name="prepare_input")
        hooks.register(self.count, Moment.BATCH_END, name="count", is_required=True)
        hooks.register(self.schedule, Moment.BATCH_END, name="schedule")

    def register_model(self, hooks: HookSet) -> None:
        """Put in what happens to a model."""
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.backward, Moment.BATCH_BACKWARD, name="backward")
        hooks.register(self.gather, Moment.GRADIENTS, name="gather")
        hooks.register(self.guard, Moment.UPDATE, name="guard")
        hooks.register(self.clip, Moment.UPDATE, name="clip")
        hooks.register(self.step, Moment.UPDATE, name="step")
        hooks.register(self.zero_grad, Moment.UPDATE, name="zero_grad")

    def register_regularizer(self, hooks: HookSet, regularizer: Regularizer, factor: float) -> None:
        """Add a regulariser to the loss, as a hook after the forward."""
        self._regularizer = (regularizer, factor)
        hooks.register(self.regularize, Moment.BATCH_FORWARD, name="regularize", after="forward")

    def seed(self, _: Context) -> None:
        """Seed python, numpy, torch and the device by (seed, step, rank): whatever draws in a step, draws it again."""
        seed_device(self._seeds.at(self._state.global_step), self._device)

    def prepare_input(self, ctx: Context) -> None:
        """Bring the batch to the device and let the user's method change it."""
        step = ctx.step
        batch = to_device(step.batch, self._device) if self._moves else step.batch
        step.batch = self._verbs.prepare_input_batch(batch)

    def forward(self, ctx: Context) -> None:
        """Run the model and compute the loss."""
        step = ctx.step
        batch = step.batch
        with self._autocast():
            try:
                outputs = self._verbs.forward(batch)
                step.outputs = outputs = outputs if isinstance(outputs, dict) else as_outputs(outputs)
                step.loss = self._verbs.compute_loss(outputs, labels_of(batch), **others_of(batch))
            except Exception as error:
                note_samples(error, step.window, step.batch_in_window, "training data")
                raise

    def regularize(self, ctx: Context) -> None:
        """Set aside what the backward adds to the loss: it is trained on, and in no loss that is counted or logged."""
        if self._regularizer is not None:
            regularizer, factor = self._regularizer
            ctx.step.loss_regular = torch.as_tensor(regularizer(ctx), device=self._device) * factor

    def backward(self, ctx: Context) -> None:
        """Add this micro-batch's share of the window's mean to the gradients."""
        step = ctx.step
        if step.batch_in_window == 0:
            self._optimization.begin_window()
        share = share_of(step.window, step.batch_in_window)
        loss = _trainable(step.loss) if share else _zero_through(step.outputs, step.loss)
        scaled = loss if share == 1.0 else loss * share
        trained = scaled if step.loss_regular is None else scaled + self._regular_part(ctx, share)
        if step.loss_task is not None and share:  # a hook has put another loss in the place of both
            trained = _trainable(step.loss_task) * share
        if self._processes.count > 1:
            trained = trained * self._processes.count  # shares are of all processes' sum; joining gradients averages
        is_sent = self._processes.count > 1 and step.closes_window
        with self._optimization.exchanging() if is_sent else NOTHING:
            if trained.requires_grad:
                scaled_up = trained if self._scaler is None else self._scaler.scale(trained)
                try:
                    scaled_up.backward()  # type: ignore[no-untyped-call]
                except RuntimeError as error:
                    error.add_note(NO_BACKWARD)
                    raise
        outputs, found = step.outputs, loss.detach()
        # a copy, because an overridden forward() may keep what it returned
        step.outputs = outputs = dict(outputs) if type(outputs) is dict else copy.copy(outputs)
        outputs["loss"] = found
        add_loss(ctx, found if scaled is loss else scaled.detach())

    def _regular_part(self, ctx: Context, share: float) -> torch.Tensor:
        part: torch.Tensor = ctx.step.loss_regular * share
        self.loss_regular_total = self.loss_regular_total + part.detach() * ctx.step.window.total_weight
        return part

    # What follows is an update. Where the user's own code has stepped the optimizer and these hooks still run, that
    # step was the update. An overridden `optimization_step` without super() fires none: `EpochBatches` reads its loss.

    def gather(self, ctx: Context) -> None:
        """Make the gradients those of the whole window: joined over the processes and unscaled.

        A sharded model's backward has averaged them already; its processes still agree here on the parameters that none
        of them used, which are left without a gradient. A scaler unscales on one process, too.
        """
        if not ctx.step.is_own:
            self._optimization.gather_gradients(ctx.step.window)

    def guard(self, ctx: Context) -> None:
        """Read loss and gradient norm, once, and raise before an update that would poison the weights.

        Of an update that the user's own code has done, it can only tell afterwards.
        """
        optimization, step = self._optimization, ctx.step
        if step.is_own:
            self._guard_own(ctx)
            return
        if step.is_assigned:
            raise HookError(READ_AGAIN)
        optimization.gather_gradients(step.window)  # done already, unless the hook of that name was taken out
        grad_norm, loss = self._read(step.window_loss)
        step.grad_norm, step.loss_value = grad_norm, loss
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or optimization.skips_non_finite):
            refuse_non_finite(loss, grad_norm, self._state, step.window)

    def _guard_own(self, ctx: Context) -> None:
        """Read the loss of an update that is done, and raise if it is not finite; the norm nobody has seen."""
        step = ctx.step
        loss = self._processes.total(step.window_loss)
        step.grad_norm, step.loss_value = None, loss
        refuse_non_finite(loss, 0.0, self._state, step.window, how=DONE_BY_USER)

    def _read(self, loss: torch.Tensor) -> list[float]:
        if self._processes.count > 1:
            return self._optimization.read_on_all(loss, self._processes)
        norm = self._optimization.gradient_norm()
        return read_both(norm, loss) if self._moves else [float(norm), float(loss)]

    def clip(self, ctx: Context) -> None:
        """Limit the gradients to `max_grad_norm`."""
        if ctx.step.is_own or self._optimization.max_grad_norm is None:
            return
        if ctx.step.grad_norm is None:
            raise HookError(
                f"max_grad_norm={self._optimization.max_grad_norm} is set, but nothing has read the gradient norm: the "
                "hook 'guard' was taken out. Leave it, or let your own hook set ctx.grad_norm at on_gradients."
            )
        self._optimization.clip(ctx.step.grad_norm)

    def step(self, ctx: Context) -> None:
        """Step the optimizer."""
        if not ctx.step.is_own:
            ctx.step.applied = self._optimization.step()
            ctx.step.is_skipped = not ctx.step.applied

    def zero_grad(self, _: Context) -> None:
        """Free the gradients for the next window."""
        self._optimization.zero_grad()

    def count(self, ctx: Context) -> None:
        """Bring the state forward: `global_step` and `epoch_step` at each micro-batch, the rest at the end of a window.

        `update_step` counts the windows that were applied: a scaler may skip one. What hooks measure from here on
        belongs to the new `global_step`.
        """
        state, step = self._state, ctx.step
        step.is_counted = True
        state.global_step += 1
        state.epoch_step += 1
        self._open_steps += 1
        window: Window | None = None
        loss: float = 0.0
        if step.closes_window:
            self._open_steps = 0
            if step.loss_value is None:
                raise HookError("an update has no loss to count: no hook has read it, and none was noted.")
            window, loss = step.window, step.loss_value
            state.position = window.first + window.count
            state.epoch_finished = window.ends_epoch
            state.samples_seen += window.count
            state.update_step += step.applied
            if math.isfinite(loss):  # or a scaler has skipped it and `guard`, which raises, was taken out
                weighted = loss * window.total_weight
                state.loss_tracker_sum += weighted
                state.loss_tracker_count += window.total_weight
                state.period_loss_sum += weighted
                state.period_loss_count += window.total_weight
        if self._log is not None:
            self._log.note(state, window, loss)

    def forget_open_window(self) -> None:
        """Take back the steps of a window that a failure left open before its update: they changed no weight."""
        self._state.global_step -= self._open_steps
        self._state.epoch_step -= self._open_steps
        self._open_steps = 0
        self._optimization.zero_grad()

    def schedule(self, ctx: Context) -> None:
        """Tick the schedule after an applied update; one that ticks by the epoch also when the last one was skipped."""
        step = ctx.step
        if step.closes_window:
            schedule = self._optimization.schedule
            schedule.after_update(self._state.update_step, step.window.ends_epoch, step.applied)


NO_BACKWARD = (
    "This was raised while the gradients of the model's loss were computed. The model must leave what it computed as "
    "it is (no y += 1 or y[0] = 0) and not call backward() itself: the trainer does."
)


READ_AGAIN = (
    "ctx.grad_norm or ctx.loss_value was assigned before the hook 'guard' at on_update, which reads both itself, so it "
    "would change nothing. Register your hook after it (after='guard'), or put it in its place."
)


def _trainable(loss: Any) -> torch.Tensor:
    """Return a loss that has a gradient; anything else would train nothing, silently or with a puzzle."""
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.ndim == 0 and not loss.is_complex():
        return loss
    form, remedy = shown_of(loss), "Return such a tensor from compute_loss()"
    if isinstance(loss, torch.Tensor) and loss.is_complex():
        form, remedy = f"of dtype {loss.dtype}", "Return a real number: loss.abs() or loss.real"
    elif isinstance(loss, torch.Tensor) and not loss.requires_grad:
        form = f"{form} without a gradient: it was detached, or no trained parameter is in it"
        remedy = "Take detach(), item(), argmax() and no_grad() off the way from the model to the loss"
    raise DataError(f"the loss is {form}; expected a single number, as a tensor computed by the model. {remedy}.")


def read_both(norm: torch.Tensor, loss: torch.Tensor) -> list[float]:
    """Read gradient norm and loss together, because each read waits for the device; neither is rounded to the other."""
    dtype = torch.promote_types(torch.promote_types(norm.dtype, loss.dtype), torch.float32)
    found: list[float] = torch.stack([norm.to(dtype), loss.detach().to(norm.device, dtype)]).tolist()
    return found


def _zero_through(outputs: Mapping[str, Any], loss: torch.Tensor) -> torch.Tensor:
    """Return a zero that reaches the parameters, made of the outputs: a mean over no unit is NaN, and NaN * 0 too.

    A model that returns its loss alone leaves no other way to them: where that is 0 / 0 it stays so; `guard` raises.
    """
    # A micro-batch without a unit (all its labels ignored, or filler) must still go backward: sharded models and
    # synchronised batch norms talk there, and every process has to join in. So the zero is made of the outputs, which
    # are finite, not of the loss, whose 0 / 0 would write NaN into every gradient.
    reached = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad and v is not loss]
    if not reached and loss.requires_grad:  # a model that returns its loss alone
        return loss * 0.0
    return sum((value.float().sum() * 0.0 for value in reached), start=loss.detach() * 0.0).nan_to_num()


class Optimization:
    """Join, unscale, norm and clip the gradients of a window, step the optimizer, and drive the schedule.

    The plain optimizer and a cached parameter list are used: Accelerate's wrapper costs more than a small model's step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        data_parallel: DataParallel | None = None,
        own_steps: OwnSteps | None = None,
    ) -> None:
        """`data_parallel` joins the gradients of several processes (copies or shares); None where there is one only.

        `own_steps` sees what others than this class do with the optimizer.
        """
        self.optimizer, self.schedule = optimizer, schedule
        self._scaler, self._data_parallel = scaler, data_parallel
        self.max_grad_norm = max_grad_norm
        """What the norm of the gradients is limited to; None: nothing."""
        self._parameters: list[Tensor] = []
        self._list_parameters()
        self._gathered: object = None
        self._own_steps = OwnSteps() if own_steps is None else own_steps
        gather = weakref.WeakMethod(self._gather_own)  # an optimizer may outlive the trainer that it was passed to
        # Watched first, so called first: gradients are weighed before they are joined, here or, where nobody has done
        # it by then, by the data-parallel part.
        self._own_steps.watch(optimizer, partial(_call_weak, gather), is_scaled=scaler is not None)
        if data_parallel is not None:
            data_parallel.watch(optimizer)
        self._step_optimizer = DirectStep(optimizer, self._own_steps.hooks.__contains__)

    def _list_parameters(self) -> list[Tensor]:
        """List what the optimizer steps, if its groups have changed; return what is new in it.

        add_param_group() and group["params"].append() come at any time: all that is stepped is normed, clipped and
        freed, too. To compare costs less than to free the gradients.
        """
        groups, before = self.optimizer.param_groups, self._parameters
        now: list[Tensor] = (
            groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        )
        if len(now) == len(before) and all(map(operator.is_, now, before)):
            return []
        self._parameters = now = list(now)
        self._is_uniform = len({(p.device, p.dtype) for p in now}) == 1
        self._is_sharded = any(hasattr(p, "device_mesh") for p in now)
        known = set(map(id, before))
        return [parameter for parameter in now if id(parameter) not in known]

    def begin_window(self) -> None:
        """Drop the gradients that parameters added to the optimizer since the last window bring along from before."""
        for parameter in self._list_parameters():
            parameter.grad = None

    def _gather_own(self, update: object, factor: float) -> None:
        """Weigh the gradients of a user's own plain backward by `factor`, then gather them.

        `OwnSteps` calls it right before the user's own `optimizer.step()`, so that the step sees what ours would.
        With a scaler it never comes here: such a step is refused.
        """
        self._list_parameters()
        if factor != 1.0:
            for gradient in self._gradients():
                gradient.mul_(factor)
        self.gather_gradients(update)

    def exchanging(self) -> AbstractContextManager[None]:
        """Join the gradients of all processes while the body computes those of a window's last micro-batch.

        Most of them while it runs, those of the first such backward at its end; what cannot be sent then waits for
        `gather_gradients`.
        """
        return NOTHING if self._data_parallel is None else self._data_parallel.exchanging()

    @property
    def trained(self) -> list[Tensor]:
        """The parameters that learn."""
        return [parameter for parameter in self._parameters if parameter.requires_grad]

    @property
    def skips_non_finite(self) -> bool:
        """Tell whether a scaler expects overflows and skips such updates by itself."""
        return self._scaler is not None

    def gather_gradients(self, update: object) -> None:
        """Join the gradients of all processes (an average) and unscale them, once for an update, told by its window.

        As a rule the window's last backward has joined them by now (`exchanging`). Joined here are those that DDP could
        not send during it (sparse gradients, `sync_batchnorm`, several backwards in an update), and those of a user's
        own backward, of which it was not told. Every backward of a sharded model joins its own; its processes only drop
        here those that none of them used.
        """
        self._list_parameters()
        if self._gathered is update:  # no flag: whoever frees the gradients instead of `zero_grad` would leave it set
            return
        self._gathered = update
        if self._data_parallel is not None:
            self._data_parallel.join_gradients()  # all processes come here, those with shares of a model, too
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)

    def gradient_norm(self) -> Tensor:
        """Return the norm over all gradients; it stays on the device."""
        if self._is_sharded:
            return gradient_norm(self._parameters)
        gradients = self._gradients()
        if not gradients:
            return torch.zeros(())
        if not self._is_uniform or any(g.is_sparse for g in gradients):
            return torch.nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
        norms = list(torch._foreach_norm(gradients))
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def read_on_all(self, loss: Tensor, processes: Processes) -> list[float]:
        """Return the gradient norm, the same on all processes, and the sum of their losses; all call this together.

        Norms differ where a user's hook has changed joined gradients on one process, or each in another way: then they
        are averaged once more, or the copies of the model would part.
        """
        norm = float(self.gradient_norm())
        (total,), is_same = processes.sum_and_compare([loss], gradient_mark(norm))
        if self._data_parallel is not None:
            if not is_same:
                self._data_parallel.join_again()
                norm = float(self.gradient_norm())
            self._data_parallel.note_compared()
        return [norm, total]

    def clip(self, norm: float) -> None:
        """Scale the gradients down to `max_grad_norm`, if they are longer."""
        if self.max_grad_norm is None or norm + CLIP_MARGIN <= self.max_grad_norm:
            return
        factor = self.max_grad_norm / (norm + CLIP_MARGIN)
        gradients = self._gradients()
        if self._is_uniform and not any(g.is_sparse for g in gradients):
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def step(self) -> bool:
        """Step the optimizer; return False if the scaler skipped it."""
        self._own_steps.is_ours = True
        try:
            if self._scaler is None:
                self._step_optimizer()
                return True
            # The scaler does not say whether it has stepped. After an overflow it skips the step and lowers its scale;
            # otherwise it keeps or raises it. So a scale that has not fallen means that the step was applied.
            before = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            return bool(self._scaler.get_scale() >= before)
        except (AttributeError, LookupError, TypeError) as error:
            if not _is_raised_by_torch_optim(error):  # but by a user's own optimizer, or a hook on it
                raise
            raise ConfigError(
                f"{type(self.optimizer).__name__} cannot step: {type(error).__name__}: {str(error)[:300]}. Its "
                "settings, or the state that came with a checkpoint, do not fit the parameters."
            ) from error
        finally:
            self._own_steps.is_ours = False

    def apply(self, norm: float) -> bool:
        """Do an update whose loss was found finite: clip, step, free the gradients; False if the scaler skipped it."""
        self.clip(norm)
        is_applied = self.step()
        self.zero_grad()
        return is_applied

    def zero_grad(self) -> None:
        """Free the gradients of what the optimizer steps, and of nothing else; what comes next is another update."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._gathered = None
        if self._data_parallel is not None:
            self._data_parallel.forget()

    def follow(self, schedule: Schedule) -> None:
        """Drive another schedule from now on."""
        self.schedule = schedule

    def _gradients(self) -> list[Tensor]:
        """Return what this process holds of the gradients."""
        if self._is_sharded:
            return local_gradients(self._parameters)
        return [p.grad for p in self._parameters if p.grad is not None]


def _is_raised_by_torch_optim(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("torch.optim.")


def _call_weak(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if (found := method()) is not None:
        found(*arguments)


class UpdateLog:
    """Where a run's updates are noted while it trains: the ledger, which writes later, and each loss in the storage."""

    def __init__(self, storage: EventStorage) -> None:
        self._storage, self._is_open = storage, False
        self._ledger: Ledger | None = None

    def open(self, ledger: Ledger | None) -> None:
        """Write to a ledger as well, which only the main process has."""
        self._ledger, self._is_open = ledger, True

    def close(self) -> None:
        """Write nothing down from now on."""
        self._ledger, self._is_open = None, False

    def note(self, state: TrainerState, window: Window | None, loss: float) -> None:
        """Let what hooks measure belong to this step; of an update, write down which samples it took, and its loss."""
        if not self._is_open:
            return
        self._storage.step = state.global_step
        if window is None:
            return
        if self._ledger is not None:  # also of a window that the scaler skipped: its samples are taken
            self._ledger.add(state.update_step, state.epoch, window.first, window.count)
        self._storage.samples = state.samples_seen
        self._storage.put_scalar("train.step_loss", loss)

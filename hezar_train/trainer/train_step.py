"""What the loop does by itself while training, as named hooks, each calling the trainer's method of the same job.

This is the hot path: nothing here waits for the device but the guard, once per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hezar_train.data import Window, seed_device, step_seed
from hezar_train.errors import DataError, NonFiniteError, choices
from hezar_train.events import EventStorage
from hezar_train.events.run_records import Ledger
from hezar_train.loop import Context, HookSet, Moment
from hezar_train.optim import Schedule
from hezar_train.runtime import Replicas, Runtime, SyncedBatchNorm, to_device
from hezar_train.state import TrainerState
from hezar_train.trainer.model_runner import Regularizer, labels_of, others_of
from hezar_train.trainer.optimization import Updater

__all__ = [
    "TrainSteps",
    "Verbs",
    "note_loss",
]

MAX_NAMED_SAMPLES = 64


@dataclass(frozen=True)
class Verbs:
    """The trainer's methods that a user may override."""

    prepare_input_batch: Callable[[Any], Any]
    forward: Callable[[Any], dict[str, Any]]
    compute_loss: Callable[..., torch.Tensor]


class TrainSteps:
    """The default hooks of training."""

    def __init__(
        self, verbs: Verbs, runtime: Runtime, state: TrainerState, updater: Updater, schedule: Schedule, seed: int
    ) -> None:
        self._verbs, self._state, self._updater, self._schedule = verbs, state, updater, schedule
        self._autocast, self._scaler = runtime.autocast(), runtime.scaler
        self._device, self._moves = runtime.device, runtime.device.type != "cpu"
        self._seed, self._rank, self._world = seed, runtime.rank, runtime.num_processes
        self.replicas: Replicas | None = None
        self.agree: Callable[[torch.Tensor], float] = float
        self._regularizer: tuple[Regularizer, float] | None = None
        self._open_steps = 0
        self.loss_regular_total: torch.Tensor | float = 0.0
        self.storage: EventStorage | None = None
        self.ledger: Ledger | None = None

    def rebind(self, state: TrainerState, updater: Updater, schedule: Schedule) -> None:
        """Step for another state, optimizer and schedule from now on."""
        self._state, self._updater, self._schedule = state, updater, schedule

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
        hooks.register(self.count, Moment.BATCH_END, name="count")
        hooks.register(self.schedule, Moment.BATCH_END, name="schedule")

    def register_model(self, hooks: HookSet) -> None:
        """Put in what happens to a model."""
        hooks.register(self.forward, Moment.BATCH_FORWARD, name="forward")
        hooks.register(self.backward, Moment.BATCH_BACKWARD, name="backward")
        hooks.register(self.guard, Moment.UPDATE, name="guard")
        hooks.register(self.clip, Moment.UPDATE, name="clip")
        hooks.register(self.step, Moment.UPDATE, name="step")
        hooks.register(self.zero_grad, Moment.UPDATE, name="zero_grad")

    def register_regularizer(self, hooks: HookSet, regularizer: Regularizer, factor: float) -> None:
        """Add a regulariser to the loss, as a hook after the forward."""
        self._regularizer = (regularizer, factor)
        hooks.register(self.regularize, Moment.BATCH_FORWARD, name="regularize", after="forward")

    def seed(self, _: Context) -> None:
        """Make what a step draws a function of (seed, step, rank), whoever draws it: a hook, an override, the model."""
        seed_device(step_seed(self._seed, self._state.global_step, self._rank), self._device)

    def seed_looking(self, ctx: Context) -> None:
        """Make what an evaluation draws a function of (seed, first sample of the batch, rank)."""
        seed_device(step_seed(self._seed, ctx.window.firsts[ctx.batch_in_window], self._rank), self._device)

    def prepare_input(self, ctx: Context) -> None:
        """Bring the batch to the device and let the user's method change it."""
        batch = to_device(ctx.batch, self._device) if self._moves else ctx.batch
        ctx.__dict__["batch"] = self._verbs.prepare_input_batch(batch)

    def forward(self, ctx: Context) -> None:
        """Run the model and compute the loss."""
        own = ctx.__dict__
        batch = own["batch"]
        if self._world > 1:
            SyncedBatchNorm.skips = own["window"].is_filler(own["batch_in_window"])
        with self._autocast():
            own["outputs"] = outputs = self._verbs.forward(batch)
            own["loss"] = self._verbs.compute_loss(outputs, labels_of(batch), **others_of(batch))

    def regularize(self, ctx: Context) -> None:
        """Set aside what the backward adds to the loss; it is trained on and not logged."""
        if self._regularizer is not None:
            regularizer, factor = self._regularizer
            ctx.loss_regular = torch.as_tensor(regularizer(ctx), device=self._device) * factor

    def backward(self, ctx: Context) -> None:
        """Add this micro-batch's share of the window's mean to the gradients."""
        own = ctx.__dict__
        window, outputs, loss = own["window"], own["outputs"], own["loss"]
        share = share_of(window, own["batch_in_window"])
        loss = _trainable(loss) if share else _zero_through(outputs, loss)
        scaled = loss if share == 1.0 else loss * share
        trained = scaled + self._regular_part(ctx, share) if "loss_regular" in own else scaled
        if self._world > 1:
            trained = trained * self._world  # what the processes compute is averaged
        if trained.requires_grad:
            (trained if self._scaler is None else self._scaler.scale(trained)).backward()  # type: ignore[no-untyped-call]
        outputs["loss"] = loss.detach()
        add_loss(ctx, scaled.detach())

    def _regular_part(self, ctx: Context, share: float) -> torch.Tensor:
        part: torch.Tensor = ctx.loss_regular * share
        self.loss_regular_total = self.loss_regular_total + part.detach() * ctx.window.total_weight
        return part

    def guard(self, ctx: Context) -> None:
        """Read loss and gradient norm, once, and stop before an update that would poison the weights."""
        if self.replicas is not None:
            self.replicas.join_gradients()
        norm = self._updater.gradient_norm()
        own = ctx.__dict__
        grad_norm, loss = self._read(norm, own["window_loss"])
        own["grad_norm"], own["loss_value"] = grad_norm, loss
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or self._updater.skips_non_finite):
            self._refuse_update(loss, grad_norm, ctx.window.samples())

    def _refuse_update(self, loss: float, grad_norm: float, samples: list[int]) -> NoReturn:
        what = f"loss {loss}" if not math.isfinite(loss) else f"gradient norm {grad_norm} (loss {loss})"
        named = ", ".join(map(str, samples[:MAX_NAMED_SAMPLES])) or "not known: the data is a stream"
        more = f" and {len(samples) - MAX_NAMED_SAMPLES} more" if len(samples) > MAX_NAMED_SAMPLES else ""
        raise NonFiniteError(
            f"{what} in the update at step {self._state.global_step + 1} (epoch {self._state.epoch}); it was not "
            f"applied. Samples of the window: {named}{more}. Look at them, lower learning_rate, or set "
            "max_grad_norm; what was saved so far is intact.",
            step=self._state.global_step + 1,
            samples=samples,
        )

    def _read(self, norm: torch.Tensor, loss: torch.Tensor) -> list[float]:
        """Read two numbers: on an accelerator together, because each read waits for the device."""
        if self._world > 1:
            return [float(norm), self.agree(loss)]
        return torch.stack([norm, loss.to(norm)]).tolist() if self._moves else [float(norm), float(loss)]

    def clip(self, ctx: Context) -> None:
        """Limit the gradients to `max_grad_norm`."""
        self._updater.clip(ctx.grad_norm)

    def step(self, ctx: Context) -> None:
        """Step the optimizer."""
        ctx.__dict__["applied"] = self._updater.step()

    def zero_grad(self, _: Context) -> None:
        """Free the gradients for the next window."""
        self._updater.zero_grad()
        if self.replicas is not None:
            self.replicas.forget()

    def count(self, ctx: Context) -> None:
        """Bring the state forward; everything but the step counts when the window closes."""
        state = self._state
        state.global_step += 1
        state.epoch_step += 1
        self._open_steps += 1
        if self.storage is not None:
            self.storage.step = state.global_step
        own = ctx.__dict__
        if not own["closes_window"]:
            return
        self._open_steps = 0
        window: Window = own["window"]
        state.position = window.first + window.count
        state.epoch_finished = window.ends_epoch
        state.samples_seen += window.count
        state.update_step += own["applied"]
        weighted = own["loss_value"] * window.total_weight
        state.loss_tracker_sum += weighted
        state.loss_tracker_count += window.total_weight
        state.period_loss_sum += weighted
        state.period_loss_count += window.total_weight
        if self.ledger is not None:
            self.ledger.add(state.update_step, state.epoch, window.first, window.count)
        if self.storage is not None:
            self.storage.samples = state.samples_seen
            self.storage.put_scalar("train.step_loss", own["loss_value"])

    def forget_open_window(self) -> None:
        """Take back the steps of a window that a failure left open: they changed no weight."""
        self._state.global_step -= self._open_steps
        self._state.epoch_step -= self._open_steps
        self._open_steps = 0
        self._updater.zero_grad()
        if self.replicas is not None:
            self.replicas.forget()

    def schedule(self, ctx: Context) -> None:
        """Tick the schedule after an applied update; one that ticks by the epoch also when the last one was skipped."""
        if ctx.closes_window:
            self._schedule.after_update(self._state.update_step, ctx.window.ends_epoch, ctx.applied)


def share_of(window: Window, number: int) -> float:
    """Return a micro-batch's share of its window."""
    if window.total_weight == 0:
        return 0.0
    return window.weights[number] / window.total_weight


def add_loss(ctx: Context, part: torch.Tensor) -> None:
    """Add a micro-batch's part to the window's loss, on the device."""
    own = ctx.__dict__
    own["window_loss"] = part if own["batch_in_window"] == 0 else own["window_loss"] + part
    own["is_loss_noted"] = True


def note_loss(ctx: Context, outputs: Any, method: str) -> None:
    """Add the loss that an overridden method returned."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(found, torch.Tensor):
        raise DataError(
            f"the overridden {method}() returned {_shown(outputs)}; expected the step's loss as a tensor, or a mapping "
            "that has it under 'loss', so that it can be logged."
        )
    add_loss(ctx, found.detach() * share_of(ctx.window, ctx.batch_in_window))


def _shown(outputs: Any) -> str:
    return f"a mapping of {choices(outputs) or 'nothing'}" if isinstance(outputs, Mapping) else type(outputs).__name__


def _trainable(loss: Any) -> torch.Tensor:
    """Return a loss that has a gradient; anything else would train nothing, silently or with a puzzle."""
    if isinstance(loss, torch.Tensor) and loss.requires_grad and loss.ndim == 0:
        return loss
    form = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    why = " that has no gradient: it was detached, or no trained parameter is in it" if form.endswith("()") else ""
    raise DataError(f"the loss is {form}{why}; expected a single number, as a tensor computed by the model.")


def _zero_through(outputs: Mapping[str, Any], loss: torch.Tensor) -> torch.Tensor:
    """Return a zero that reaches the parameters: a mean over no unit is NaN, and NaN times zero too."""
    reached = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad and v is not loss]
    if not reached and loss.requires_grad:  # a model that returns its loss alone
        return loss * 0.0
    return sum((value.float().sum() * 0.0 for value in reached), start=loss.detach() * 0.0).nan_to_num()

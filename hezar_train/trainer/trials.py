"""Trials: verbs that train or differentiate to find something out, after which everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch

from hezar_train.data import preserved_randomness
from hezar_train.errors import DataError
from hezar_train.events import EventStorage
from hezar_train.loop import HookSet, Moment, Routine
from hezar_train.plan import End
from hezar_train.trainer.calls import Calls
from hezar_train.trainer.checks import evaluation_sets, size_of
from hezar_train.trainer.invariance import InvarianceReport, check_invariance
from hezar_train.trainer.lr_finder import (
    DEFAULT_STEPS,
    LRFinderResult,
    RateSweep,
    SweepSettings,
    refuse_accuracy,
    untouched,
)
from hezar_train.trainer.model_runner import labels_of, others_of
from hezar_train.types import Mode

__all__ = ["Trials"]


class Trials(Calls):
    """A learning rate to find, a loss to check."""

    def find_lr(
        self, lr_min: float = 1e-7, lr_max: float = 10.0, num_steps: int = DEFAULT_STEPS, **settings: Any
    ) -> LRFinderResult:
        """Train a few updates with growing learning rates to find one; then everything is as it was.

        `settings` are those of `SweepSettings`.
        """
        return self._sweep(SweepSettings(lr_min, lr_max, num_steps, **settings))

    def _sweep(self, asked: SweepSettings) -> LRFinderResult:
        self._refuse_to_train("train")
        sweep = RateSweep(asked, self._verbs(), self.runtime, self.optimizer, self.config)
        sweep.measure = self._measure_of_accuracy(asked)
        sweep.steps.replicas, sweep.steps.agree = self._replicas, self._agree
        sweep.register(hooks := HookSet(), self.regularizer)
        routine = Routine(self.ctx, hooks, Mode.TRAIN, "train")
        kept = untouched(
            self.model, self.optimizer, self.schedule, self.runtime.scaler, self.state, self.train_dataset,
            self.runtime.device,
        )  # fmt: skip
        with EventStorage(), self._model_at_hand(), kept, closing(self._train_source()) as source:
            course = self._course_beside_the_run(routine, source, self.plan, sweep.state, End())
            return sweep.run(lambda: self._learn(course))

    def _measure_of_accuracy(self, settings: SweepSettings) -> Callable[[], float] | None:
        """Return how to measure accuracy: with the default steps alone, so that no hook sees it."""
        if not settings.tests_accuracy:
            return None
        refuse_accuracy(settings.acc_metric, self.metrics_handler, self.eval_dataset)
        data = next(iter(evaluation_sets(None, self.eval_dataset).values()))
        hooks = HookSet()
        hooks.register(self._steps.seed_looking, Moment.BATCH_START, name="seed")
        self._evaluation.register(hooks)

        def measure() -> float:
            self._look_through(data, Routine(self.ctx, hooks, Mode.VAL, "val"), settings.acc_batches)
            return self._evaluation.report().metrics[settings.acc_metric]

        return measure

    def verify_invariance(self, num_samples: int = 24, tolerance: float = 1e-5) -> InvarianceReport:
        """Check that cutting a batch of the training data in any way gives the same gradient and loss."""
        source = self._open(self.train_dataset)
        count = min(num_samples, size_of(self.train_dataset) or 0) if hasattr(source, "fetch") else 0
        if count < 2:
            raise DataError("verify_invariance() needs a training dataset with a length and at least two samples")

        def fetch(indices: Iterable[int]) -> Any:
            return source.fetch(1, list(indices))  # type: ignore[attr-defined]

        with EventStorage(), preserved_randomness():
            weight_of = self._weigher.weight_of
            return check_invariance(self.model, range(count), fetch, weight_of, self._loss_of, tolerance)

    def _loss_of(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch as the loop computes it."""
        self.ctx.batch = batch
        self._steps.prepare_input(self.ctx)
        prepared = self.ctx.batch
        with self._autocast():
            return self.compute_loss(self._outputs_of(prepared), labels_of(prepared), **others_of(prepared))

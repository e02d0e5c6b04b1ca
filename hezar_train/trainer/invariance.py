"""Check a user's own loss: does cutting a batch into micro-batches change the gradient?

The whole batch and every factoring of it go through the same weighing and backward pass as in training; dropout and
batch statistics are off (evaluation mode), because they may differ between cuts by design.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hezar_train.data import preserved_randomness
from hezar_train.errors import DataError
from hezar_train.events import EventStorage
from hezar_train.trainer.data_setup import size_of
from hezar_train.trainer.evaluator import evaluation_mode
from hezar_train.trainer.model_runner import as_outputs, labels_of, others_of

if TYPE_CHECKING:
    from hezar_train.trainer.assemble import Parts

__all__ = ["Factoring", "InvarianceReport", "check_invariance", "factorings", "verify_invariance"]

Gradients = tuple[float, list[torch.Tensor]]


@dataclass(frozen=True)
class Factoring:
    """One way to cut the batch, and how far its result is from the whole batch's, relative to it."""

    sizes: tuple[int, ...]
    gradient_error: float
    loss_error: float


@dataclass(frozen=True)
class InvarianceReport:
    """The outcome of `verify_invariance`."""

    num_samples: int
    tolerance: float
    factorings: list[Factoring]

    @property
    def worst(self) -> Factoring:
        """Return the factoring that is farthest off."""
        return max(self.factorings, key=lambda f: max(_or_inf(f.gradient_error), _or_inf(f.loss_error)))

    @property
    def holds(self) -> bool:
        """Tell whether every factoring gives the same gradient and loss."""
        errors = [e for f in self.factorings for e in (f.gradient_error, f.loss_error)]
        return all(error <= self.tolerance for error in errors)  # a NaN is not

    def __str__(self) -> str:
        worst = self.worst
        cut = "+".join(map(str, worst.sizes))
        off = f"gradient off by {worst.gradient_error:.2e}, loss by {worst.loss_error:.2e} (limit {self.tolerance:.0e})"
        if self.holds:
            return f"{len(self.factorings)} ways to cut {self.num_samples} samples agree; worst: {cut}, {off}."
        return (
            f"cutting {self.num_samples} samples as {cut} changes the result: {off}. The loss must be a mean over "
            "its units: return a mean over samples, or set loss_weight='labels' if it is a mean over labels, or "
            "override batch_weight(batch) to return what it is a mean of."
        )


def verify_invariance(parts: Parts, num_samples: int, tolerance: float) -> InvarianceReport:
    """Check that cutting a batch of a trainer's data in any way gives the same gradient and loss."""
    train_dataset, verbs, ctx = parts.setup.splits.train, parts.verbs, parts.ctx
    source = parts.data.open(parts.setup.config, train_dataset)
    count = min(num_samples, size_of(train_dataset) or 0) if hasattr(source, "fetch") else 0
    if count < 2:
        raise DataError("verify_invariance() needs a training dataset with a length and at least two samples")

    def fetch(indices: Iterable[int]) -> Any:
        return source.fetch(1, list(indices))  # type: ignore[attr-defined]

    def loss_of(batch: Any) -> torch.Tensor:
        """Return the loss of a batch as the loop computes it."""
        ctx.step.batch = batch
        parts.train_step.prepare_input(ctx)
        prepared = ctx.step.batch
        with parts.runtime.autocast()():
            outputs = as_outputs(verbs.forward(prepared))
            return verbs.compute_loss(outputs, labels_of(prepared), **others_of(prepared))

    with EventStorage(), preserved_randomness():
        return check_invariance(parts.model, range(count), fetch, parts.weigher.weight_of, loss_of, tolerance)


def check_invariance(
    model: nn.Module,
    samples: Sequence[int],
    fetch: Callable[[Sequence[int]], Any],
    weigh: Callable[[Any, int], float],
    loss_of: Callable[[Any], torch.Tensor],
    tolerance: float,
) -> InvarianceReport:
    """Compare the whole batch with every factoring of it."""
    cuts = factorings(len(samples))
    try:
        with evaluation_mode(model):
            results = {cut: _gradients(model, _batches(samples, cut, fetch, weigh), loss_of) for cut in cuts}
    finally:
        model.zero_grad(set_to_none=True)
    whole = results[(len(samples),)]
    found = [_compare(cut, result, whole) for cut, result in results.items() if cut != (len(samples),)]
    return InvarianceReport(len(samples), tolerance, found)


def factorings(size: int) -> list[tuple[int, ...]]:
    """List the ways to cut `size` samples: equal parts of every divisor, and one uneven cut."""
    equal = [(size // parts,) * parts for parts in range(1, size + 1) if size % parts == 0]
    part = math.isqrt(size) + 1
    uneven = (*([part] * (size // part)), size % part) if size % part else ()
    return equal + ([uneven] if uneven else [])


def _batches(
    samples: Sequence[int],
    cut: tuple[int, ...],
    fetch: Callable[[Sequence[int]], Any],
    weigh: Callable[[Any, int], float],
) -> list[tuple[Any, float]]:
    batches, start = [], 0
    for size in cut:
        batch = fetch(samples[start : start + size])
        batches.append((batch, weigh(batch, size)))
        start += size
    return batches


def _gradients(model: nn.Module, batches: list[tuple[Any, float]], loss_of: Callable[[Any], torch.Tensor]) -> Gradients:
    model.zero_grad(set_to_none=True)
    total = sum(weight for _, weight in batches)
    mean = 0.0
    for batch, weight in batches:
        if weight:
            loss = loss_of(batch) * (weight / total)
            loss.backward()  # type: ignore[no-untyped-call]
            mean += float(loss.detach())
    return mean, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _compare(cut: tuple[int, ...], result: Gradients, whole: Gradients) -> Factoring:
    loss, gradients = result
    whole_loss, whole_gradients = whole
    if len(gradients) != len(whole_gradients):
        return Factoring(cut, math.inf, abs(loss - whole_loss))
    size = max((float(g.abs().max()) for g in whole_gradients), default=0.0) or 1.0
    off = max((float((a - b).abs().max()) for a, b in zip(gradients, whole_gradients, strict=True)), default=0.0)
    return Factoring(cut, off / size, abs(loss - whole_loss) / (abs(whole_loss) or 1.0))


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value

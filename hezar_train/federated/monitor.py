"""A worker's monitor: FederatedScope's metrics after each evaluation, the best result, and reports over many workers.

Only a trainer that has a `Monitor` among its hooks keeps labels and outputs, and only during an evaluation. `formatted`
makes the results of many workers one: weighted by their samples, plain means, how evenly they fare, or as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.federated.metric_calculator import MetricCalculator, is_larger_better
from hezar_train.loop import Context, Hook
from hezar_train.trainer import Trainer
from hezar_train.types import Mode

__all__ = [
    "FORMS",
    "Monitor",
    "formatted",
]

Results = Mapping[str, Sequence[float]]
Array = npt.NDArray[np.float64]

COUNTS = ("total", "correct")  # not to be weighted by themselves
TINY = 1e-9


class Monitor(Hook):
    """Measure evaluations: `ctx.ys_true`, `ctx.ys_prob` and `ctx.eval_metrics` are there at their end."""

    modes = frozenset({Mode.VAL, Mode.TEST})

    def __init__(
        self,
        eval_metric: str | Iterable[str] = (),
        *,
        best_res_update_round_wise_key: str = "val_avg_loss",
        base: float | None = None,
    ) -> None:
        """Choose metrics by name, the key that tells the best result, and what "imp_ratio" compares with."""
        self.metric_calculator = MetricCalculator(eval_metric, base=base)
        self._best_key = best_res_update_round_wise_key
        self._is_larger_better = is_larger_better(self._best_key)
        self.total_model_size = 0

    def attach(self, trainer: Trainer) -> None:
        super().attach(trainer)
        trainer.monitor = self  # hooks find it as ctx.monitor

    def on_fit_start(self, ctx: Context) -> None:
        """Begin to gather."""
        ctx.ys_true, ctx.ys_prob = [], []

    def on_batch_end(self, ctx: Context) -> None:
        """Gather the labels and outputs of a batch."""
        if ctx.y_true is None or ctx.y_prob is None:
            raise DataError("a Monitor needs batches with labels and a model that returns logits")
        ctx.ys_true.append(ctx.y_true.detach().cpu())
        ctx.ys_prob.append(ctx.y_prob.detach().float().cpu())

    def on_fit_end(self, ctx: Context) -> None:
        """Measure everything at once."""
        if ctx.failed is not None or not ctx.ys_true:
            return
        ctx.ys_true, ctx.ys_prob = torch.cat(ctx.ys_true), torch.cat(ctx.ys_prob)
        ctx.share({"eval_metrics": self.eval(ctx)})

    def eval(self, ctx: Context) -> dict[str, float]:
        """Return the metrics of what the context holds, as `{split}_{metric}`."""
        return self.metric_calculator.eval(ctx)

    def track_model_size(self, models: nn.Module | Iterable[nn.Module]) -> int:
        """Count the parameters of models."""
        each = [models] if isinstance(models, nn.Module) else list(models)
        self.total_model_size = sum(p.numel() for model in each for p in model.parameters())
        return self.total_model_size

    def update_best_result(
        self, best_results: dict[str, dict[str, float]], new_results: Mapping[str, float], results_type: str
    ) -> bool:
        """Put a result in the place of the best one of its type if its key is better; tell whether it was.

        A record is always one evaluation as a whole; equal is not better, and NaN never is.
        """
        if self._best_key not in new_results:
            raise DataError(
                f"the result has no {self._best_key!r}, which tells the best. It has: {choices(new_results)}"
            )
        value = float(new_results[self._best_key])
        best = best_results.get(results_type, {}).get(self._best_key)
        if math.isnan(value) or (best is not None and not (value > best if self._is_larger_better else value < best)):
            return False
        best_results[results_type] = dict(new_results)
        return True

    def format_eval_res(
        self,
        results: Mapping[str, Any],
        rnd: int | str,
        role: str = "Server #",
        forms: Sequence[str] | None = None,
        return_raw: bool = False,
    ) -> dict[str, Any]:
        """Return results in forms, "Results_{form}" each; those of a single worker only as they are."""
        if not role.lower().startswith("server"):
            return {"Role": role, "Round": rnd, "Results_raw": dict(results)}
        wanted = ["raw"] if return_raw else list(FORMS) if forms is None else list(forms)
        return {"Role": role, "Round": rnd} | {f"Results_{form}": formatted(results, form) for form in wanted}


def formatted(results: Results, form: str) -> dict[str, float] | dict[str, list[float]]:
    """Return the results of workers, a list under each `{split}_{metric}`, in a form."""
    if form not in FORMS:
        raise ConfigError(f"form={form!r} is not known. Choose from: {choices(FORMS)}.{suggestion(form, FORMS)}")
    if form == "raw":
        return {key: list(values) for key, values in results.items()}
    found: dict[str, float] = {}
    for key, values in results.items():
        split, _, metric = key.partition("_")
        each = np.asarray(values, dtype=np.float64)
        found |= {key: float(each.mean())} if metric in COUNTS else FORMS[form](key, each, _weights(results, split))
    return found


def _weights(results: Results, split: str) -> Array:
    if f"{split}_total" not in results:
        raise DataError(f"the results have no '{split}_total', the number of samples of each worker")
    return np.asarray(results[f"{split}_total"], dtype=np.float64)


def _weighted(key: str, each: Array, weights: Array) -> dict[str, float]:
    return {key: float((each * weights).sum() / weights.sum())}


def _plain(key: str, each: Array, _: Array) -> dict[str, float]:
    return {key: float(each.mean())}


def _fairness(key: str, each: Array, _: Array) -> dict[str, float]:
    """Return how evenly workers fare; the lowest and the highest tenth have at least one worker."""
    each = np.sort(each)
    low, high = len(each) // 10, len(each) * 9 // 10
    shares = (each + TINY) / (each + TINY).sum()
    values = {
        "std": each.std(),
        "bottom_decile": each[low],
        "top_decile": each[high],
        "min": each[0],
        "max": each[-1],
        "bottom10%": each[: max(low, 1)].mean(),
        "top10%": each[high:].mean(),
        "cos1": each.mean() / np.sqrt(np.square(each).mean()),
        "entropy": -(shares * np.log(shares)).sum(),
    }
    return {f"{key}_{name}": float(value) for name, value in values.items()}


FORMS: dict[str, Callable[[str, Array, Array], dict[str, float]]] = {
    "weighted_avg": _weighted, "avg": _plain, "fairness": _fairness, "raw": _plain
}  # fmt: skip

"""Metrics of other makers as ours: any function of the whole set, modules of `evaluate`, metrics of `torchmetrics`.

An adapter decides what such a metric is given (targets of -100 left out, probabilities made of logits where it wants
them) and makes floats under keys of whatever it returns. Functions and modules of `evaluate` see the whole set at once:
predictions and targets are kept on the host, and go to other processes as tensors. Metrics of `torchmetrics` keep their
own state and merge by their own synchronisation. Neither package is imported unless it is used.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hezar_train.errors import ConfigError, DataError, MissingDependencyError, a_kind
from hezar_train.metrics.metric import IGNORED_LABEL, Inputs, Metric, check_outputs

__all__ = [
    "AdaptedMetric",
    "CollectedMetric",
    "EvaluateMetric",
    "TorchMetric",
    "counted_pairs",
    "evaluate_module",
    "is_evaluate_module",
    "is_torchmetric",
    "probabilities",
]

logger = logging.getLogger(__name__)

Values: TypeAlias = npt.NDArray[Any] | list[Any]

MINIMIZED_NAMES = frozenset({"cer", "loss", "mae", "mse", "perplexity", "rmse", "ter", "wer"})
"""Outputs of which a smaller value is better, where nobody says so."""

JSON_SUFFIX = ".json"


class AdaptedMetric(Metric):
    """What all adapters share: outputs of any form become floats under keys, with an objective, and no interval."""

    def __init__(
        self, name: str, output_keys: Sequence[str] | None, objective: str | None, consumes: Inputs | None
    ) -> None:
        self.name = name
        self.told_as = f"metric {name!r}"
        self.consumes = consumes or "predictions"
        self._chosen_keys = None if output_keys is None else list(output_keys)
        self._computed_keys: list[str] | None = None
        self._objective = objective

    @property
    def output_keys(self) -> list[str]:
        return self._chosen_keys or self._computed_keys or [self.name]

    def objective(self, key: str) -> str:
        return self._objective or ("minimize" if key in MINIMIZED_NAMES else "maximize")

    def compute_rows(self) -> list[dict[str, float]]:
        return [self.compute()]

    def _outputs(self, value: Any) -> dict[str, float]:
        outputs = _flat(self.name, value)
        if not outputs:
            told = "None" if value is None else f"{a_kind(value)} without any number"
            remedy = "Is a return missing?" if value is None else "Return float(value) for each."
            raise DataError(
                f"{self.told_as} returned {told}; expected a number, or a mapping of numbers by name. {remedy}"
            )
        check_outputs(self.name, self._chosen_keys or (), outputs)
        self._computed_keys = list(outputs)
        return {key: outputs[key] for key in self.output_keys}


def _flat(name: str, value: Any) -> dict[str, float]:
    """Return numbers under keys: those of a mapping, `name` for one number, `name.0`, `name.1`, ... for several."""
    if isinstance(value, Mapping):
        return {key: number for part, each in value.items() for key, number in _nested(str(part), each).items()}
    numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if numbers.dtype.kind not in "biuf":
        return {}
    if numbers.size == 1:
        return {name: float(numbers.reshape(()))}
    return {f"{name}.{number}": float(each) for number, each in enumerate(numbers.reshape(-1))}


def _nested(name: str, value: Any) -> dict[str, float]:
    numbers = _flat(name, value)
    return {f"{name}.{key}": number for key, number in numbers.items()} if isinstance(value, Mapping) else numbers


def counted_pairs(predictions: Any, targets: Any) -> tuple[Any, Any]:
    """Leave out integer targets of -100 and their predictions, which then are flat; else return both as they are."""
    if not isinstance(targets, torch.Tensor) or not isinstance(predictions, torch.Tensor):
        return predictions, targets
    if targets.is_floating_point() or predictions.shape[: targets.dim()] != targets.shape:
        return predictions, targets
    kept = targets != IGNORED_LABEL
    return (predictions, targets) if bool(kept.all()) else (predictions[kept], targets[kept])


def probabilities(scores: torch.Tensor, family: str) -> torch.Tensor:
    """Return the probabilities that logits stand for, classes on axis 1; of two classes, that of the second."""
    scores = scores.float()
    if family == "multilabel":
        return scores.sigmoid()
    if scores.dim() == 1 or scores.shape[-1] == 1:
        return scores.reshape(len(scores)).sigmoid()
    shares = scores.softmax(-1)
    return shares[..., 1] if family == "binary" else shares.movedim(-1, 1)


class CollectedMetric(AdaptedMetric):
    """A function `f(predictions, targets)` of the whole set, which returns a number or a mapping of them.

    It receives numpy arrays, or lists where samples are texts or differ in length.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        name: str,
        output_keys: Sequence[str] | None = None,
        objective: str | None = None,
        consumes: Inputs | None = None,
        drops_ignored: bool = True,
        told_as: str | None = None,
    ) -> None:
        super().__init__(name, output_keys, objective, consumes)
        self.told_as = told_as or self.told_as
        self._function = function
        self._drops_ignored = drops_ignored
        self._batches: list[tuple[Values, Values]] = []
        self._has_warned = False

    def reset(self) -> None:
        self._batches = []

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s needs the whole set at once: its predictions are kept in memory", self.told_as)
        if self._drops_ignored:
            predictions, targets = counted_pairs(predictions, targets)
        self._batches.append((_on_host(predictions), _on_host(targets)))

    def compute(self) -> dict[str, float]:
        if not self._batches:
            return self._undefined()
        return self._outputs(self._function(*self._joined()))

    def state(self) -> dict[str, torch.Tensor]:
        if not self._batches:
            return {}
        return dict(_packed(*item) for item in zip(("predictions", "targets"), self._joined(), strict=True))

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if state:
            self._batches.append((_unpacked("predictions", state), _unpacked("targets", state)))

    def _joined(self) -> tuple[Values, Values]:
        predictions, targets = zip(*self._batches, strict=True)
        # One batch from now on: joining again, for a state and then for a result, costs nothing.
        self._batches = [(_join(predictions), _join(targets))]
        return self._batches[0]


def _on_host(values: Any) -> Values:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return np.array((values.float() if values.dtype is torch.bfloat16 else values).numpy(), copy=True)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values.copy()
    return list(values)


def _join(batches: Sequence[Values]) -> Values:
    """Return all samples: an array if they have one shape, a flat one if batches differ in axes, else a list."""
    arrays = [batch for batch in batches if isinstance(batch, np.ndarray)]
    if len(arrays) < len(batches):
        return [sample for batch in batches for sample in batch]
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    if len({array.ndim for array in arrays}) > 1:
        return np.concatenate([array.reshape(-1) for array in arrays])
    return [sample.tolist() for array in arrays for sample in array]


def _packed(name: str, values: Values) -> tuple[str, torch.Tensor]:
    if isinstance(values, np.ndarray):
        return name, torch.from_numpy(values)
    text = json.dumps([value.tolist() if hasattr(value, "tolist") else value for value in values])
    return name + JSON_SUFFIX, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _unpacked(name: str, state: Mapping[str, torch.Tensor]) -> Values:
    if name in state:
        return np.asarray(state[name].cpu().numpy())
    values: list[Any] = json.loads(state[name + JSON_SUFFIX].cpu().numpy().tobytes())
    return values


class EvaluateMetric(CollectedMetric):
    """A module of the `evaluate` package, or several combined; `options` go to its `compute`."""

    def __init__(
        self,
        module: Any,
        name: str | None = None,
        output_keys: Sequence[str] | None = None,
        objective: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        modules = getattr(module, "evaluation_modules", [module])
        for one in modules:
            one.keep_in_memory = one.num_process == 1  # or it would write what it is given to a file, under a lock
        self._module = module
        self._options = dict(options or {})
        self._takes_scores = any("prediction_scores" in one._feature_names() for one in modules)
        super().__init__(
            self._compute_module,
            name or str(getattr(module, "name", "combined")),
            output_keys,
            objective,
            "scores" if self._takes_scores else "predictions",
        )

    def _compute_module(self, predictions: Any, targets: Any) -> Any:
        if not self._takes_scores:
            return self._module.compute(predictions=predictions, references=targets, **self._options)
        scores = torch.as_tensor(np.asarray(predictions))
        family = "binary" if scores.shape[-1] == 2 or scores.dim() == 1 else "multiclass"
        chances = probabilities(scores, family).numpy()
        return self._module.compute(prediction_scores=chances, references=targets, **self._options)


def is_evaluate_module(value: Any) -> bool:
    """Tell whether this is a module of evaluate, or several combined, without importing it."""
    package = sys.modules.get("evaluate")
    return package is not None and isinstance(value, package.EvaluationModule | package.CombinedEvaluations)


def evaluate_module(path: str, own_names: Sequence[str] = ()) -> Any:
    """Load a module of evaluate by its name on the Hub or the path of its script."""
    try:
        evaluate = importlib.import_module("evaluate")
    except ImportError as error:
        raise MissingDependencyError("evaluate", "evaluate", f"the metric 'evaluate:{path}'") from error
    try:
        return evaluate.load(path, keep_in_memory=True)
    except OSError as error:  # a file that is not there, a Hub that cannot be reached
        raise ConfigError(_why_not_loaded(path, own_names, error)) from error


def _why_not_loaded(path: str, own_names: Sequence[str], error: OSError) -> str:
    if path.endswith(".py") or path.startswith((".", "/")):
        return f"metric 'evaluate:{path}': there is no such script ({Path(path).resolve()}). Give the path of one"
    own = f" Or use the metric {path!r} of this package." if path in own_names else ""
    return (
        f"metric 'evaluate:{path}' was not found: the Hub cannot be reached, or has no such metric ({error}). "
        f"Connect, or give the path of a local script, as in 'evaluate:./{Path(path).name}.py'.{own}"
    )


class TorchMetric(AdaptedMetric):
    """A metric or a collection of the `torchmetrics` package.

    Processes are merged by its own synchronisation, for which the merged states stand in for a gather: it must not talk
    to other processes by itself, and does not. A metric of classification receives probabilities, made of the model's
    logits (with `from_logits=False`: the model's outputs as they are), any other one the predictions.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        output_keys: Sequence[str] | None = None,
        objective: str | None = None,
        consumes: Inputs | None = None,
        from_logits: bool = True,
    ) -> None:
        torchmetrics = importlib.import_module("torchmetrics")
        self._metric = metric
        self._parts = [_Part(one) for one in metric.modules() if isinstance(one, torchmetrics.Metric)]
        self._family = _family([part.metric for part in self._parts])
        self._is_collection = isinstance(metric, torchmetrics.MetricCollection)
        self._is_updated = False
        self._from_logits = from_logits
        keys = list(metric.keys()) if self._is_collection and output_keys is None else output_keys
        consumes = consumes or ("scores" if self._family else "predictions")
        super().__init__(name or str(getattr(metric, "name", type(metric).__name__)), keys, objective, consumes)

    def objective(self, key: str) -> str:
        if self._objective is None:
            metric = self._metric[key] if self._is_collection and key in self._metric else self._metric
            higher_is_better = getattr(metric, "higher_is_better", None)
            if higher_is_better is not None:
                return "maximize" if higher_is_better else "minimize"
        return super().objective(key)

    def reset(self) -> None:
        self._metric.reset()
        self._is_updated = False
        for part in self._parts:
            part.others.clear()

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:  # noqa: ARG002
        if self._family != "multilabel":
            predictions, targets = counted_pairs(predictions, targets)
        if isinstance(predictions, torch.Tensor):
            self._metric.to(predictions.device)
            if self.consumes == "scores" and self._family and self._from_logits:
                predictions = probabilities(predictions.detach(), self._family)
        self._metric.update(predictions, targets)
        self._is_updated = True

    def compute(self) -> dict[str, float]:
        if not self._is_updated and not any(part.others for part in self._parts):
            return self._undefined()
        return self._outputs(self._metric.compute())

    def state(self) -> dict[str, torch.Tensor]:
        if not self._is_updated:
            return {}
        return {
            f"{number}.{place}": tensor
            for number, part in enumerate(self._parts)
            for place, tensor in enumerate(part.tensors())
        }

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if not state:
            return
        for number, part in enumerate(self._parts):
            own = [name for name in state if name.startswith(f"{number}.")]
            part.add([state[f"{number}.{place}"] for place in range(len(own))], instead=not self._is_updated)


class _Part:
    """One metric of torchmetrics; where it would gather from other processes, it receives what was merged."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.others: list[list[torch.Tensor]] = []
        self._leaves_out_own = False
        self._place = 0
        metric.dist_sync_fn = self._gather
        metric.distributed_available_fn = self._has_others

    def tensors(self) -> list[torch.Tensor]:
        """Return what the metric would send to other processes, in the order in which it would."""
        sent: list[torch.Tensor] = []

        def record(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:  # noqa: ARG001
            sent.append(tensor.detach().clone())
            return [tensor]

        self.metric.sync(dist_sync_fn=record, distributed_available=lambda: True)
        self.metric.unsync()
        return sent

    def add(self, tensors: list[torch.Tensor], *, instead: bool) -> None:
        """Take what another process sent, beside the own state or instead of it (if that is empty)."""
        name = type(self.metric).__name__
        if not self.metric.sync_on_compute:
            raise ConfigError(f"{name} has sync_on_compute=False, so processes cannot be merged: leave it True")
        before = self.others if instead else [*self.others, self.tensors()]
        if any(len(one) != len(tensors) for one in before):
            raise ConfigError(f"{name} keeps lists that differ between processes: evaluate it on one process")
        self._leaves_out_own = instead
        self.others.append(tensors)

    def _has_others(self) -> bool:
        return bool(self.others)

    def _gather(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:  # noqa: ARG002
        received = [other[self._place].to(tensor.device) for other in self.others]
        self._place = (self._place + 1) % len(self.others[0])
        return received if self._leaves_out_own else [tensor, *received]


def is_torchmetric(value: Any) -> bool:
    """Tell whether this is a metric or a collection of torchmetrics, without importing it."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric | package.MetricCollection)


def _family(metrics: Sequence[Any]) -> str:
    """Return "binary", "multiclass" or "multilabel" for metrics of classification, else an empty string."""
    for cls in (cls for metric in metrics for cls in type(metric).__mro__):
        for family in ("Binary", "Multiclass", "Multilabel"):
            if cls.__module__.startswith("torchmetrics.classification") and cls.__name__.startswith(family):
                return family.lower()
    return ""

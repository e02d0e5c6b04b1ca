"""LiBai's evaluators: `reset`, then `process(inputs, outputs)` for each batch, then `evaluate()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hezar_train.compat.libai import distributed as dist
from hezar_train.errors import DataError
from hezar_train.events import flatten_results_dict, print_csv_format

__all__ = [
    "ClsEvaluator",
    "DatasetEvaluator",
    "DatasetEvaluators",
    "PPLEvaluator",
    "flatten_results_dict",
    "inference_context",
    "inference_on_dataset",
    "print_csv_format",
]


class DatasetEvaluator:
    """Gather what is needed of each batch, and make results of it at the end; subclass it."""

    def reset(self) -> None:
        """Begin anew."""

    def process(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Take what the model was given, and what it returned."""

    def evaluate(self) -> Mapping[str, Any] | None:
        """Return the results by name."""
        return None


class DatasetEvaluators(DatasetEvaluator):
    """Several evaluators as one."""

    def __init__(self, evaluators: Iterable[DatasetEvaluator]) -> None:
        self._evaluators = list(evaluators)

    def reset(self) -> None:
        for one in self._evaluators:
            one.reset()

    def process(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        for one in self._evaluators:
            one.process(inputs, outputs)

    def evaluate(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for one in self._evaluators:
            for name, value in (one.evaluate() or {}).items():
                if name in results:
                    raise DataError(f"two evaluators give a result under the name {name!r}; rename one of them")
                results[name] = value
        return results


class ClsEvaluator(DatasetEvaluator):
    """How many labels are among the k highest scores, in percent: "Acc@1", "Acc@5"."""

    def __init__(self, topk: Sequence[int] = (1, 5)) -> None:
        self.topk = tuple(topk)
        self.reset()

    def reset(self) -> None:
        self._num_correct, self._num_samples = dict.fromkeys(self.topk, 0), 0

    def process(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        scores, labels = outputs["prediction_scores"], inputs["labels"]
        ranked = scores.topk(min(max(self.topk), scores.size(1)), dim=1).indices
        hits = ranked == labels.reshape(-1, 1)
        for k in self.topk:
            self._num_correct[k] += int(hits[:, :k].sum())
        self._num_samples += len(labels)

    def evaluate(self) -> dict[str, float]:
        return {f"Acc@{k}": 100.0 * count / max(1, self._num_samples) for k, count in self._num_correct.items()}


class PPLEvaluator(DatasetEvaluator):
    """The perplexity of each loss that the model returns: "lm_loss_PPL"."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._losses: dict[str, list[float]] = {}

    def process(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        del inputs
        for name, value in outputs.items():
            self._losses.setdefault(name, []).append(float(value))

    def evaluate(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._losses.items()}
        return {f"{name}_PPL": math.exp(min(20.0, mean)) for name, mean in means.items()}


def inference_on_dataset(
    model: nn.Module,
    data_loader: Any,
    batch_size: int,
    eval_iter: float,
    get_batch: Callable[..., Mapping[str, Any]],
    input_placement_device: str,
    evaluator: DatasetEvaluator | Sequence[DatasetEvaluator] | None,
) -> dict[str, Any]:
    """Evaluate a model on a loader, or on its first `eval_iter` batches; return what the evaluator finds.

    Each process goes over all of the data, so that the results do not depend on their number.
    """
    del batch_size  # it is the loader's
    judge = evaluator if isinstance(evaluator, DatasetEvaluator) else DatasetEvaluators(evaluator or ())
    judge.reset()
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    with inference_context(model), torch.no_grad():
        for number, batch in enumerate(data_loader):
            if number >= eval_iter:
                break
            inputs = _on(get_batch(batch, input_placement_device), device)
            judge.process(inputs, model(**inputs))
    dist.synchronize()
    return dict(judge.evaluate() or {})


def _on(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}


@contextmanager
def inference_context(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back afterwards, also after a failure."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)

"""Modules of the `evaluate` package: how one is loaded, recognised and computed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.metrics.adapters.adapted import probabilities
from hezar_train.metrics.adapters.collected import CollectedMetric

__all__ = ["EvaluateMetric", "evaluate_module", "is_evaluate_module"]


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

"""The results of many workers as one: weighted by their samples, plain means, how evenly they fare, or as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hezar_train.errors import ConfigError, DataError, choices, suggestion

__all__ = ["FORMS", "formatted"]

Results = Mapping[str, Sequence[float]]
Array = npt.NDArray[np.float64]

COUNTS = ("total", "correct")  # not to be weighted by themselves
TINY = 1e-9


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

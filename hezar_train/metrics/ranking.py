"""Metrics of scores: where the right class ranks among a model's logits, and how well a threshold would tell classes.

The area under a ROC curve is the chance that a positive sample scores higher than a negative one, ties counting half.
`Auroc` has it in constant memory, with a bound on its error: scores go into `num_bins` bins, and samples of one bin are
taken as tied. A pair in one bin is then worth a half where it may be 0 or 1, and every other pair is exact: the exact
area lies within half the share of pairs that fall into one bin. `Auroc.max_error` is that bound for the data counted;
with more bins it shrinks. `ExactAuroc` and `AveragePrecision` keep every score instead: a bin for each value.

Targets below 0 (-100) are not counted. Metrics of decided classes are in `classification`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from hezar_train.errors import ConfigError, DataError, suggestion
from hezar_train.metrics.classification import spread_weights
from hezar_train.metrics.metric import AdditiveMetric, Blocks, Inputs, RowMetric, in_float64

__all__ = ["Auroc", "AveragePrecision", "ExactAuroc", "TopKAccuracy"]

SCALES = ("logits", "probabilities")
FARTHEST_LOGIT = 1e30
NOT_COUNTED = -1


class TopKAccuracy(AdditiveMetric):
    """Share of targets among the `k` largest logits; of equal logits, that of the larger id counts as larger."""

    name = "top_k_accuracy"
    consumes: Inputs = "scores"

    def __init__(self, k: int = 5) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"top_k_accuracy has k={k!r}: give a whole number of at least 1")
        self.k = k

    @property
    def output_keys(self) -> list[str]:
        return ["top_k_accuracy"]

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        scores, target = torch.as_tensor(predictions), torch.as_tensor(targets)
        if scores.shape[:-1] != target.shape:
            shapes = f"{tuple(scores.shape)} for targets of shape {tuple(target.shape)}"
            raise DataError(f"top_k_accuracy got scores of shape {shapes}: give logits with one axis more")
        target = target.to(scores.device)
        num_classes = scores.shape[-1]
        counted = (target >= 0) & (target < num_classes)
        place = torch.where(counted, target, 0)[..., None]
        own = scores.gather(-1, place)
        # "not smaller or equal" instead of "larger": a NaN must not make a target rank first.
        before = ~(scores <= own) | ((scores == own) & (torch.arange(num_classes, device=scores.device) > place))
        right = counted & (before.sum(-1) < self.k)
        per_sample = (part.reshape(len(target), -1).sum(1) for part in (right, counted))
        return torch.stack(list(per_sample), dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        num_right, num_counted = sums
        return {"top_k_accuracy": num_right / num_counted if num_counted else float("nan")}


class _CurveMetric(RowMetric):
    """A metric of what a threshold on a score tells apart: two classes, each class from the rest, or each label.

    It takes logits (or `scores="probabilities"`): (samples) or (samples, 1 or 2) for two classes, of which 1 is the
    positive one, (samples, classes) for more, (samples, labels) with `multilabel`. Classes without a positive or
    without a negative sample are left out of the mean, and without any such class the metric is NaN, as it is if a
    score is NaN, which has no place in an order.
    """

    consumes: Inputs = "scores"

    def __init__(self, scores: str = "logits", multilabel: bool = False) -> None:
        if scores not in SCALES:
            raise ConfigError(
                f"{self.name} has scores={scores!r}. Choose logits or probabilities.{suggestion(scores, SCALES)}"
            )
        self.scale = scores
        self.multilabel = multilabel

    @property
    def output_keys(self) -> list[str]:
        return [self.name]

    def _curves(self, predictions: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scores that rank, positives and what counts, each (samples, ..., curves)."""
        scores = in_float64(torch.as_tensor(predictions))
        target = torch.as_tensor(targets).to(scores.device)
        if self.multilabel:
            self._check_shapes(scores.shape, target.shape)
            return scores, target > 0, target >= 0
        if scores.dim() == target.dim():
            scores = scores[..., None]
        self._check_shapes(scores.shape[:-1], target.shape)
        target = target[..., None]
        num_columns = scores.shape[-1]
        if num_columns > 2:
            classes = torch.arange(num_columns, device=target.device)
            return self._against_rest(scores), target == classes, (target >= 0).expand(scores.shape)
        return self._of_two(scores), target == 1, target >= 0

    def _of_two(self, scores: torch.Tensor) -> torch.Tensor:
        if self.scale == "logits" and scores.shape[-1] == 2:
            return scores[..., 1:] - scores[..., :1]
        return scores[..., -1:]

    def _against_rest(self, scores: torch.Tensor) -> torch.Tensor:
        if self.scale == "probabilities":
            return scores
        log_share = scores.log_softmax(-1)
        return log_share - torch.log(-torch.expm1(log_share))

    def _check_shapes(self, scores: torch.Size, target: torch.Size) -> None:
        if scores != target:
            raise DataError(
                f"{self.name} got scores for {tuple(scores)} and targets of shape {tuple(target)}: "
                "give logits with one axis more, or of the same shape with multilabel=True"
            )

    def _another_number(self, num_curves: int) -> DataError:
        return DataError(f"{self.name} got scores of {num_curves} classes or labels, and of another number before")


class Auroc(_CurveMetric):
    """Area under the ROC curve in bins: of two classes, of each class against the rest (their mean), or of each label.

    The exact area lies within `max_error`. Memory: 16 bytes per bin, class and row of weights.
    """

    name = "auroc"

    def __init__(self, num_bins: int = 4096, scores: str = "logits", multilabel: bool = False) -> None:
        if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 2:
            raise ConfigError(f"auroc has num_bins={num_bins!r}: give a whole number of at least 2")
        super().__init__(scores, multilabel)
        self.num_bins = num_bins
        self._histograms: torch.Tensor | None = None  # (1 + curves * 2 * bins, rows): what is skipped is at place 0
        self._num_unordered: torch.Tensor | None = None  # NaN scores

    @property
    def max_error(self) -> float:
        """Return how far the exact area may lie from the computed one; NaN if there is none."""
        return float("nan") if self._histograms is None else self._area(self._histograms[:, 0])[1]

    def reset(self) -> None:
        self._histograms = self._num_unordered = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        scores, positive, counted = self._curves(predictions, targets)
        logits = scores if self.scale == "logits" else scores.logit()
        logits = logits.nan_to_num(nan=torch.nan, posinf=FARTHEST_LOGIT, neginf=-FARTHEST_LOGIT)
        unordered = (logits.isnan() & counted).sum()
        self._num_unordered = unordered if self._num_unordered is None else self._num_unordered + unordered
        curve = torch.arange(logits.shape[-1], device=logits.device)
        places = 1 + (2 * curve + positive) * self.num_bins + self._bins(logits.nan_to_num(0.0))
        places = torch.where(counted, places, 0)
        spread = spread_weights(weights, places, logits)
        histograms = self._room_for(logits.shape[-1], spread)
        histograms.index_add_(0, places.flatten(), spread)

    def _bins(self, logits: torch.Tensor) -> torch.Tensor:
        # Fine around 0, where models disagree, ever coarser outwards, and without an end: logits have no natural range.
        squashed = logits / (logits.abs() + 2.0)
        return ((squashed + 1.0) / 2.0 * self.num_bins).long().clamp_(0, self.num_bins - 1)

    def _room_for(self, num_curves: int, like: torch.Tensor) -> torch.Tensor:
        num_places = 1 + num_curves * 2 * self.num_bins
        if self._histograms is None:
            self._histograms = like.new_zeros(num_places, like.shape[1])
        if len(self._histograms) != num_places:
            raise self._another_number(num_curves)
        return self._histograms

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        if self._histograms is None:
            return [self._undefined()]
        return [{"auroc": self._area(row)[0]} for row in self._histograms[:, :num_rows].unbind(1)]

    def _area(self, histograms: torch.Tensor) -> tuple[float, float]:
        """Return the area and its largest error, for the histograms of one row of weights."""
        if self._num_unordered:
            return float("nan"), float("nan")
        negative, positive = histograms[1:].view(-1, 2, self.num_bins).unbind(1)
        area, tied = _roc_area(negative, positive)
        return float(area.nanmean()), float(tied.nanmean() / 2)

    def state(self) -> dict[str, torch.Tensor]:
        if self._histograms is None or self._num_unordered is None:
            return {}
        return {"histograms": self._histograms, "num_unordered": self._num_unordered}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "histograms" not in state:
            return
        if self._histograms is None or self._num_unordered is None:
            self._histograms, self._num_unordered = state["histograms"].clone(), state["num_unordered"].clone()
            return
        self._histograms = self._histograms + state["histograms"].to(self._histograms)
        self._num_unordered = self._num_unordered + state["num_unordered"].to(self._num_unordered)


def _roc_area(negative: torch.Tensor, positive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the area and the share of tied pairs, of histograms (..., bins) from the lowest score on."""
    below = negative.cumsum(-1) - negative
    num_pairs = positive.sum(-1) * negative.sum(-1)  # 0, and the area NaN, where a side has no sample
    tied = (positive * negative).sum(-1) / num_pairs
    return (positive * below).sum(-1) / num_pairs + tied / 2, tied


class _ExactCurveMetric(_CurveMetric):
    """A metric of curves that keeps every score, 9 bytes each, and a byte more per sample and row of weights."""

    def __init__(self, scores: str = "logits", multilabel: bool = False) -> None:
        super().__init__(scores, multilabel)
        self.reset()

    @abstractmethod
    def area(self, negative: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        """Return the area under the curve of histograms (rows, distinct scores), from the lowest score on.

        It is NaN where a row has no negative or no positive sample.
        """

    def reset(self) -> None:
        self._scores: Blocks | None = None  # (elements, curves)
        self._kinds: Blocks | None = None  # (elements, curves): 1 is positive, 0 negative
        self._weights: Blocks | None = None  # (elements, rows)

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        scores, positive, counted = self._curves(predictions, targets)
        kinds = torch.where(counted, positive.to(torch.int8), NOT_COUNTED)
        spread = None if weights is None else spread_weights(weights, scores[..., 0], scores).to(torch.uint8)
        self._append(scores.flatten(0, -2), kinds.flatten(0, -2), spread)

    def _append(self, scores: torch.Tensor, kinds: torch.Tensor, weights: torch.Tensor | None) -> None:
        if not len(scores):
            return
        if self._scores is None or self._kinds is None:
            self._scores, self._kinds = Blocks(scores), Blocks(kinds)
        if self._scores.num_columns != scores.shape[1]:
            raise self._another_number(scores.shape[1])
        self._scores.append(scores)
        self._kinds.append(kinds)
        if weights is not None:
            self._weights = self._weights or Blocks(weights)
            self._weights.append(weights)

    def _results(self, num_rows: int | None) -> list[dict[str, float]]:
        if self._scores is None or self._kinds is None:
            return [self._undefined()]
        scores, kinds = self._scores.joined(), self._kinds.joined()
        weights = scores.new_ones(len(scores), 1) if self._weights is None else self._weights.joined()[:, :num_rows]
        if bool((scores.isnan() & (kinds != NOT_COUNTED)).any()):
            return [self._undefined() for _ in weights.T]
        curves = zip(scores.T, kinds.T, strict=True)
        areas = [self.area(*_histograms(curve, kind, weights.to(scores))) for curve, kind in curves]
        return [{self.name: value} for value in torch.stack(areas).nanmean(0).tolist()]

    def state(self) -> dict[str, torch.Tensor]:
        blocks = {"scores": self._scores, "kinds": self._kinds, "weights": self._weights}
        return {name: block.joined() for name, block in blocks.items() if block is not None}

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "scores" in state:
            self._append(state["scores"], state["kinds"], state.get("weights"))


def _histograms(scores: torch.Tensor, kinds: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how much negative and positive weight each distinct score has, (rows, distinct scores)."""
    counted = kinds != NOT_COUNTED
    distinct, place = torch.unique(scores[counted], return_inverse=True)
    sums = weights.new_zeros(2 * len(distinct), weights.shape[1])
    sums.index_add_(0, kinds[counted].long() * len(distinct) + place, weights[counted])
    negative, positive = sums.T.reshape(weights.shape[1], 2, len(distinct)).unbind(1)
    return negative, positive


class ExactAuroc(_ExactCurveMetric):
    """Area under the ROC curve, equal to scikit-learn's."""

    name = "auroc"

    def area(self, negative: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        return _roc_area(negative, positive)[0]


class AveragePrecision(_ExactCurveMetric):
    """Area under the curve of precision over recall in its steps, equal to scikit-learn's average precision."""

    name = "average_precision"

    def area(self, negative: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        gained = positive.flip(-1)  # a falling threshold meets the highest score first
        num_above = (negative + positive).flip(-1).cumsum(-1)
        precision = gained.cumsum(-1) / torch.where(num_above > 0, num_above, 1.0)
        area = (gained * precision).sum(-1) / positive.sum(-1)
        return torch.where(negative.sum(-1) > 0, area, torch.nan)

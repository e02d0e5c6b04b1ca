"""Area under the ROC curve in constant memory, with a bound on its error.

The area is the chance that a positive sample scores higher than a negative one, ties counting half. Scores go into
`num_bins` bins, and samples of one bin are taken as tied. A pair in one bin is then worth a half where it may be 0 or
1, and every other pair is exact: the exact area lies within half the share of pairs that fall into one bin.
`Auroc.max_error` is that bound for the data counted; with more bins it shrinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hezar_train.errors import ConfigError, DataError, suggestion
from hezar_train.metrics.class_counts import spread_weights
from hezar_train.metrics.metric import Inputs, RowMetric, in_float64

__all__ = ["Auroc"]

SCALES = ("logits", "probabilities")
FARTHEST_LOGIT = 1e30


class Auroc(RowMetric):
    """Area under the ROC curve: of two classes, of each class against the rest (their mean), or of each label.

    It takes logits (or `scores="probabilities"`): (samples) or (samples, 1 or 2) for two classes, of which 1 is the
    positive one, (samples, classes) for more, (samples, labels) with `multilabel`. Classes without a positive or
    without a negative sample are left out of the mean, and without any such class the area is NaN. The exact area lies
    within `max_error`. Memory: 16 bytes per bin, class and row of weights.
    """

    name = "auroc"
    consumes: Inputs = "scores"

    def __init__(self, num_bins: int = 4096, scores: str = "logits", multilabel: bool = False) -> None:
        if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 2:
            raise ConfigError(f"auroc has num_bins={num_bins!r}: give a whole number of at least 2")
        if scores not in SCALES:
            raise ConfigError(
                f"auroc has scores={scores!r}. Choose logits or probabilities.{suggestion(scores, SCALES)}"
            )
        self.num_bins = num_bins
        self.scale = scores
        self.multilabel = multilabel
        self._histograms: torch.Tensor | None = None  # (1 + curves * 2 * bins, rows): what is skipped is at place 0
        self._num_unordered: torch.Tensor | None = None  # NaN scores have no place in an order

    @property
    def output_keys(self) -> list[str]:
        return ["auroc"]

    @property
    def max_error(self) -> float:
        """Return how far the exact area may lie from the computed one; NaN if there is none."""
        return float("nan") if self._histograms is None else self._area(self._histograms[:, 0])[1]

    def reset(self) -> None:
        self._histograms = self._num_unordered = None

    def update(self, predictions: Any, targets: Any, weights: torch.Tensor | None = None) -> None:
        scores = in_float64(torch.as_tensor(predictions))
        logits, positive, counted = self._curves(scores, torch.as_tensor(targets).to(scores.device))
        logits = logits.nan_to_num(nan=torch.nan, posinf=FARTHEST_LOGIT, neginf=-FARTHEST_LOGIT)
        unordered = (logits.isnan() & counted).sum()
        self._num_unordered = unordered if self._num_unordered is None else self._num_unordered + unordered
        curve = torch.arange(logits.shape[-1], device=logits.device)
        places = 1 + (2 * curve + positive) * self.num_bins + self._bins(logits.nan_to_num(0.0))
        places = torch.where(counted, places, 0)
        spread = spread_weights(weights, places, logits)
        histograms = self._room_for(logits.shape[-1], spread)
        histograms.index_add_(0, places.flatten(), spread)

    def _curves(self, scores: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, positives and what counts, each (samples, ..., curves)."""
        if self.multilabel:
            _check_shapes(scores.shape, target.shape)
            return self._own_logits(scores), target > 0, target >= 0
        if scores.dim() == target.dim():
            scores = scores[..., None]
        _check_shapes(scores.shape[:-1], target.shape)
        target = target[..., None]
        num_columns = scores.shape[-1]
        if num_columns > 2:
            classes = torch.arange(num_columns, device=target.device)
            return self._logits_against_rest(scores), target == classes, (target >= 0).expand(scores.shape)
        return self._logits_of_two(scores), target == 1, target >= 0

    def _own_logits(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.scale == "logits" else scores.logit()

    def _logits_of_two(self, scores: torch.Tensor) -> torch.Tensor:
        if self.scale == "logits" and scores.shape[-1] == 2:
            return scores[..., 1:] - scores[..., :1]
        return self._own_logits(scores[..., -1:])

    def _logits_against_rest(self, scores: torch.Tensor) -> torch.Tensor:
        if self.scale == "probabilities":
            return scores.logit()
        log_share = scores.log_softmax(-1)
        return log_share - torch.log(-torch.expm1(log_share))

    def _bins(self, logits: torch.Tensor) -> torch.Tensor:
        # Fine around 0, where models disagree, ever coarser outwards, and without an end: logits have no natural range.
        squashed = logits / (logits.abs() + 2.0)
        return ((squashed + 1.0) / 2.0 * self.num_bins).long().clamp_(0, self.num_bins - 1)

    def _room_for(self, num_curves: int, like: torch.Tensor) -> torch.Tensor:
        num_places = 1 + num_curves * 2 * self.num_bins
        if self._histograms is None:
            self._histograms = like.new_zeros(num_places, like.shape[1])
        if len(self._histograms) != num_places:
            raise DataError(f"auroc got scores of {num_curves} classes or labels, and of another number before")
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
        below = negative.cumsum(-1) - negative
        num_pairs = positive.sum(-1) * negative.sum(-1)
        tied = (positive * negative).sum(-1) / num_pairs
        area = (positive * below).sum(-1) / num_pairs + tied / 2
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


def _check_shapes(scores: torch.Size, target: torch.Size) -> None:
    if scores != target:
        raise DataError(
            f"auroc got scores for {tuple(scores)} and targets of shape {tuple(target)}: "
            "give logits with one axis more, or of the same shape with multilabel=True"
        )

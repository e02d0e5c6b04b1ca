"""The handler of regression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hezar_train.metrics.handlers.handler import MetricsHandler

__all__ = ["RegressionHandler"]


class RegressionHandler(MetricsHandler):
    """A number per sample."""

    valid_metrics = ("mse", "rmse", "mae", "r2", "pearson", "spearman")
    default_metrics = ("mse", "mae", "r2")
    sample_loss_name = "squared error"

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        logits = outputs["logits"]
        if labels is None:
            return logits.squeeze(-1) if logits.ndim > 1 and logits.shape[-1] == 1 else logits
        return logits.reshape(labels.shape) if logits.numel() == labels.numel() else logits

    def sample_losses(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:
        difference = self.predictions(outputs, labels) - labels
        return difference.square() if difference.ndim == 1 else None

    def sample_units(self, outputs: Mapping[str, Any], labels: Any) -> torch.Tensor | None:  # noqa: ARG002
        return torch.ones(len(labels), device=labels.device)

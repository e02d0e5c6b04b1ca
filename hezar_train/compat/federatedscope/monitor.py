"""FederatedScope's Monitor: `Monitor(cfg, monitored_object)`, its metrics, and the counts that hooks keep in it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from hezar_train import federated

__all__ = ["Monitor"]


class Monitor(federated.Monitor):
    """Compute metrics of a routine, and hold what hooks count: operations, bytes, the size of the models.

    Nothing is counted by itself: operations only with `eval.count_flops`, bytes by the worker.
    """

    def __init__(
        self,
        cfg: Any = (),
        monitored_object: Any = None,
        *,
        best_res_update_round_wise_key: str | None = None,
        base: float | None = None,
    ) -> None:
        """Take FederatedScope's config, or the names of metrics."""
        section = getattr(cfg, "eval", None)
        metrics: str | Iterable[str] = cfg if section is None else list(section.metrics)
        told = None if section is None else section.best_res_update_round_wise_key
        super().__init__(
            metrics,
            best_res_update_round_wise_key=best_res_update_round_wise_key or told or "val_avg_loss",
            base=base if section is None else getattr(section, "base", None) or base,
        )
        self.cfg, self.monitored_object = None if section is None else cfg, monitored_object
        self.log_res_best: dict[str, Any] = {}
        self.flops_per_sample: float = 0
        self.flop_count = 0
        self.total_flops: float = 0
        self.total_upload_bytes = self.total_download_bytes = 0
        self.fl_begin_wall_time = datetime.datetime.now(tz=datetime.UTC)
        self.global_convergence_round = self.local_convergence_round = 0

    def track_avg_flops(self, flops: float, sample_num: int = 1) -> None:
        """Take a batch's operations into the mean of a sample."""
        self.flops_per_sample = (self.flops_per_sample * self.flop_count + flops) / (self.flop_count + sample_num)
        self.flop_count += 1

    def track_upload_bytes(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        self.total_upload_bytes += num_bytes

    def track_download_bytes(self, num_bytes: int) -> None:
        """Count bytes that were received."""
        self.total_download_bytes += num_bytes

"""A number of batches or of epochs over so many samples, each told as the other: FederatedScope's arithmetic.

The trainer's own run is worked out in `making`; this is for who asks by FederatedScope's names.
"""

from __future__ import annotations

from typing import NamedTuple

from hezar_train.errors import ConfigError, DataError

__all__ = ["BatchAndEpochNumbers", "calculate_batch_epoch_num"]


class BatchAndEpochNumbers(NamedTuple):
    """How a number of batches or epochs is walked."""

    batches_per_epoch: int
    batches_in_last_epoch: int
    num_epochs: int
    total_batches: int


def calculate_batch_epoch_num(
    steps: int, batch_or_epoch: str, num_data: int, batch_size: int, drop_last: bool = False
) -> BatchAndEpochNumbers:
    """Turn a number of batches or epochs over `num_data` samples into epochs and the batches of each."""
    per_epoch = num_data // batch_size + (not drop_last and num_data % batch_size > 0)
    if per_epoch == 0:
        raise DataError(
            f"{num_data} samples give no batch of {batch_size} (drop_last={drop_last}): lower batch_size, or set "
            "drop_last=False"
        )
    if batch_or_epoch == "epoch":
        return BatchAndEpochNumbers(per_epoch, per_epoch, steps, steps * per_epoch)
    if batch_or_epoch != "batch":
        raise ConfigError(f"batch_or_epoch={batch_or_epoch!r} is not known. Choose from: batch, epoch.")
    per_epoch = min(per_epoch, steps)
    return BatchAndEpochNumbers(per_epoch, steps % per_epoch or per_epoch, -(-steps // per_epoch), steps)

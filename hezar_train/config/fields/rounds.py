"""Fields of training in rounds: how much one call of `train()` does, what is shared with others, what stays here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import flag, one_of, whole, wrong_type

__all__ = ["BATCH_OR_EPOCH", "RoundFields", "names_problems"]

BATCH_OR_EPOCH = ("batch", "epoch")


@dataclass(kw_only=True)
class RoundFields:
    local_update_steps: int | None = None
    """Batches or epochs that one call of `train()` does, as often as it is called. None: all that `num_epochs` says."""

    batch_or_epoch: str = "batch"
    """What `local_update_steps` counts: "batch" or "epoch"."""

    fresh_optimizer: bool = False
    """Start every call of `train()` with the optimizer and schedule as they were first."""

    use_diff: bool = False
    """Evaluate on the split "val" before and after training, and report both losses."""

    offload_after_routine: bool = False
    """Move the model to the CPU after each call, to leave the device to others."""

    local_param: list[str] | None = None
    """Parts of names: parameters that have one are neither given away by `get_model_para` nor taken by `update`."""

    share_non_trainable_para: bool = False
    """Exchange also what is not trained, such as the statistics of batch normalisation."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("local_update_steps", self.local_update_steps, least=1, optional=True)
        yield from one_of("batch_or_epoch", self.batch_or_epoch, BATCH_OR_EPOCH, optional=False)
        yield from flag("fresh_optimizer", self.fresh_optimizer)
        yield from flag("use_diff", self.use_diff)
        yield from flag("offload_after_routine", self.offload_after_routine)
        yield from names_problems("local_param", self.local_param)
        yield from flag("share_non_trainable_para", self.share_non_trainable_para)


def names_problems(field: str, given: object) -> Iterator[str]:
    """Yield what is wrong with a list of parts of names."""
    if given is None:
        return
    if not isinstance(given, list | tuple) or not all(isinstance(part, str) and part for part in given):
        yield wrong_type(field, given, "a list of parts of parameter names, such as ['bn', 'head.']")

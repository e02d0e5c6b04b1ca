"""Batch normalisation over the batches of all processes, on any device: torch's own refuses tensors on the CPU.

The statistics of a step are those of the samples of all processes together, as if one had computed the batch alone.
What a process computes only to keep others company (see `data.Window`) counts for nothing in them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SyncedBatchNorm", "synchronised"]


class SyncedBatchNorm(_BatchNorm):
    """Batch normalisation of inputs of any number of dimensions, which all processes compute together."""

    skips: ClassVar[bool] = False
    """Whether this process's batch is company and counts for nothing."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least two dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        from torch.distributed.nn.functional import all_reduce  # not at the top: it loads much that few need

        self._check_input_dim(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        places, shape = [0, *range(2, values.dim())], (1, -1, *([1] * (values.dim() - 2)))
        weight = 0.0 if self.skips else 1.0
        count = values.new_full((1,), weight * values.numel() / values.shape[1])
        totals: Tensor = all_reduce(torch.cat([values.sum(places) * weight, count]))  # type: ignore[no-untyped-call]
        num = totals[-1].detach()
        mean = totals[:-1] / num
        centred = values - mean.view(shape)
        squares: Tensor = all_reduce(centred.square().sum(places) * weight)  # type: ignore[no-untyped-call]
        variance = squares / num
        self._follow(mean.detach(), variance.detach(), num)
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        scaled = normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)
        return scaled.to(input.dtype)

    def _follow(self, mean: Tensor, variance: Tensor, num: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((variance * num / (num - 1).clamp(min=1)).to(self.running_var), share)


def synchronised(model: nn.Module) -> nn.Module:
    """Replace every batch normalisation of a model; parameters and buffers stay the very same tensors."""
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncedBatchNorm):
        made = SyncedBatchNorm(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
        made.weight, made.bias = model.weight, model.bias
        made.running_mean, made.running_var = model.running_mean, model.running_var
        made.num_batches_tracked = model.num_batches_tracked
        made.training = model.training
        return made
    for name, child in list(model.named_children()):
        replaced = synchronised(child)
        if replaced is not child:
            setattr(model, name, replaced)
    return model

"""Fields of checkpoints: whether, when, where and how many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hezar_train.config.checks import flag, path, steps, whole

__all__ = ["CheckpointFields"]


@dataclass(kw_only=True)
class CheckpointFields:
    save_enabled: bool = True
    """Save checkpoints: at each epoch end, at the end of the run, and where `save_steps` says. False: never."""

    save_steps: int | float | None = None
    """Steps between saves besides those at epoch ends; a float below 1 is a share of the run. None or 0: none."""

    save_freq: int | float | str | None = None
    """Deprecated name of `save_steps`, to which it is moved."""

    save_total_limit: int | None = None
    """Checkpoints to keep, the newest ones and the best. None: all."""

    async_save: bool = True
    """Write checkpoints in the background, at the cost of a copy of the tensors in memory."""

    checkpoints_dir: str = "checkpoints"
    """Folder of the checkpoints, under `output_dir`."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("save_enabled", self.save_enabled)
        yield from steps("save_steps", self.save_steps, least=0)
        if self.save_freq is not None:
            yield f"save_freq={self.save_freq!r} is deprecated: give save_steps instead, and not both"
        yield from whole("save_total_limit", self.save_total_limit, least=1, optional=True)
        yield from flag("async_save", self.async_save)
        yield from path("checkpoints_dir", self.checkpoints_dir)

"""Fields of the run as a whole: where, what for, how long, and from which start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from hezar_train.config.checks import flag, one_of, path, steps, whole
from hezar_train.types import TaskType

__all__ = ["RunFields"]


@dataclass
class RunFields:
    output_dir: str | os.PathLike[str]
    """Folder of the run: config, plan, checkpoints and logs live under it."""

    task: str | TaskType | None = None
    """What the model is trained for; it chooses the metrics. None: the loss alone, or a metrics handler passed in."""

    _: KW_ONLY

    num_epochs: int = 1
    """How often the training data is gone through."""

    max_steps: int | float | None = None
    """Cap on the steps of the whole run; a float below 1 is a share of it. None: all epochs in full."""

    seed: int = 42
    """What the data order, augmentation and dropout are functions of."""

    deterministic: bool = False
    """Ask torch for deterministic kernels; an operation without one raises."""

    init_weights_from: str | os.PathLike[str] | None = None
    """Folder to take the first weights from, at a fresh start only."""

    resume_from_checkpoint: bool | str | os.PathLike[str] | None = None
    """True: go on from the newest whole checkpoint; a path: from that one; None or False: start afresh."""

    accept_changes: bool = False
    """Resume although the config or the data changed in a way that breaks exactness."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from self._problems_of_output_dir()
        yield from one_of("task", self.task, [*TaskType])
        yield from whole("num_epochs", self.num_epochs, least=1)
        yield from steps("max_steps", self.max_steps)
        yield from whole("seed", self.seed, least=0, most=2**63 - 1)
        yield from flag("deterministic", self.deterministic)
        yield from path("init_weights_from", self.init_weights_from, optional=True)
        if not isinstance(self.resume_from_checkpoint, bool):
            yield from path("resume_from_checkpoint", self.resume_from_checkpoint, optional=True)
        yield from flag("accept_changes", self.accept_changes)

    def _problems_of_output_dir(self) -> Iterator[str]:
        if self.output_dir is None:
            yield "output_dir is missing: name the folder of the run, for example output_dir='runs/first'"
        else:
            yield from path("output_dir", self.output_dir)

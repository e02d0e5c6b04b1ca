"""LiBai's view of the loop: iterations, test sets by name, and methods that build what is not passed to the Trainer.

Owns names, not behaviour: an iteration is a step counted from 0. The Trainer itself has `build_model`, `build_hooks`,
`build_optimizer` and `build_lr_scheduler`; the plan and the config have what LiBai's `auto_scale_hyperparams`,
`build_graph` and its batch algebra work out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hezar_train.checkpoint import Checkpoint, initial_weights
from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, DataError, HookError, choices
from hezar_train.events import EventStorage, EventWriter, Scalar, print_csv_format
from hezar_train.hooks.periodic import Checkpointed
from hezar_train.loop import Context, Hook, Routine
from hezar_train.metrics import MetricsHandler
from hezar_train.runtime import Runtime, logger
from hezar_train.state import TrainerState
from hezar_train.trainer.checkpointing import find_checkpoint, local_weights
from hezar_train.trainer.checks import tell_weights
from hezar_train.trainer.folder import RunFolder
from hezar_train.types import Mode

if TYPE_CHECKING:
    from hezar_train.trainer.course import Course
    from hezar_train.trainer.evaluator import EvaluationReport

__all__ = ["IterationView", "total_loss"]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})


class IterationView:
    """Iterations and `build_*` methods, for a Trainer to inherit."""

    config: TrainerConfig
    model: nn.Module
    state: TrainerState
    storage: EventStorage
    ctx: Context
    runtime: Runtime
    folder: RunFolder
    last_evaluation: dict[str, EvaluationReport]
    _checkpoint: Checkpoint | None
    _course: Course
    _routine: Routine | None
    _hook_objects: list[Hook]

    if TYPE_CHECKING:

        def evaluate(self, eval_dataset: Any = None) -> dict[str, float]: ...

        def register_hooks(self, hooks: Iterable[Hook | None]) -> None: ...

        def _total_steps(self) -> int: ...

        def _restore(self, checkpoint: Checkpoint) -> None: ...

    @property
    def iter(self) -> int:
        """The step under way, from 0 on; between steps, how many are done: at the end it equals `max_iter`."""
        ctx, state = self.ctx, self._course.state
        if ctx.get("mode") not in LEARNING or "batch" not in ctx:
            return self.state.global_step
        return state.global_step - state.epoch_step + int(ctx.cur_batch_i)

    @property
    def start_iter(self) -> int:
        """The step that the call of train() under way began with; between calls, the one that the next begins with."""
        return self.state.global_step if self._routine is None else self._course.first_step

    @property
    def max_iter(self) -> int:
        """The number of steps after which the run ends."""
        return self._total_steps()

    @property
    def reached_end(self) -> bool:
        """Whether no further step will follow: the plan is done, or somebody asked to stop."""
        course = self._course
        return course.ends or (course.state.epoch_finished and course.state.epoch >= course.num_epochs)

    def build_tokenizer(self) -> Any:
        """Make the preprocessor where none was passed; the default leaves it to the model."""
        return None

    def build_train_loader(self) -> tuple[Any, Any, Any]:
        """Make training, evaluation and test data where none was passed: each a dataset, a DataLoader or None."""
        return None, None, None

    def build_test_loader(self) -> Mapping[str, Any]:
        """Make the sets that `test()` goes over, by name; the default leaves it at the split "test"."""
        return {}

    def build_evaluator(self) -> MetricsHandler | None:
        """Make the metrics handler where none was passed; the default leaves it to the task."""
        return None

    def build_writers(self) -> list[EventWriter]:
        """Make writers that get every logged row, beside the default ones; called when a run begins."""
        return []

    def write_metrics(self, loss_dict: Mapping[str, Scalar], data_time: float | None = None, prefix: str = "") -> None:
        """Put each value and the sum of the losses among them as `total_loss`; tensors are not waited for."""
        if not self.runtime.is_main:
            return
        storage = self.storage
        if data_time is not None:
            storage.put_scalar("data_time", data_time)
        for name, value in loss_dict.items():
            storage.put_scalar(prefix + name, value)
        if losses := [value for name, value in loss_dict.items() if _is_loss(name)]:
            storage.put_scalar(f"{prefix}total_loss", sum(losses[1:], start=losses[0]))

    def resume_or_load(self, resume: bool = True) -> None:
        """Go back to the newest checkpoint, which must be there; or take only weights, from `init_weights_from`.

        `resume_from_checkpoint` in the config does it when the trainer is built; a run that has begun stays as it is.
        """
        if resume and self.state.global_step == 0:
            asked = copy.copy(self.config)
            asked.resume_from_checkpoint = True
            checkpoint = find_checkpoint(asked, self.folder)
            if checkpoint is None:
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder.checkpoints} to resume from. To begin anew, call "
                    "resume_or_load(resume=False) or nothing at all."
                )
            self._restore(checkpoint)
            self._checkpoint = checkpoint
        elif not resume:
            self._load_weights()

    def test(self, test_sets: Any = None) -> dict[str, Any]:
        """Evaluate on test sets, {"name": data}; return {"name": metrics}, or the metrics alone of a single set.

        Without sets given: those of `build_test_loader()`, else the split "test".
        """
        if isinstance(test_sets, list | tuple) and any(isinstance(one, DataLoader) for one in test_sets):
            raise DataError("several test sets were given as a list; give each a name: {'dev': loader, ...}")
        if test_sets is None:
            test_sets = self.build_test_loader() or "test"
        self.evaluate(test_sets)
        found = {name: dict(report.metrics) for name, report in self.last_evaluation.items()}
        results: dict[str, Any] = next(iter(found.values())) if len(found) == 1 else found
        if self.runtime.is_main:
            print_csv_format(results)
        return results

    def register_for_checkpointing(self, name: str, kept: Any) -> None:
        """Keep an object with `state_dict` and `load_state_dict` in every checkpoint; give it back its state now."""
        hook = Checkpointed(name, kept)
        if any(other.name == hook.name for other in self._hook_objects):
            raise HookError(f"an object is already kept in checkpoints under the name {name!r}; choose another one")
        self.register_hooks([hook])

    def _load_weights(self) -> None:
        source, step = self.config.init_weights_from, self.state.global_step
        if step:
            raise CheckpointError(
                f"this run is at step {step}: initial weights belong to a fresh one. Leave resume_from_checkpoint out."
            )
        if source is None:
            logger.info("init_weights_from is not set: the weights stay as they are")
            return
        tell_weights(initial_weights(self.model, local_weights(source)), source)


def total_loss(outputs: Mapping[str, Any]) -> torch.Tensor:
    """Add up a model's losses, its outputs named "loss" or "..._loss", for an overridden `compute_loss` to return."""
    losses: list[torch.Tensor] = [value for name, value in outputs.items() if _is_loss(name)]
    if not losses:
        raise DataError(f"no output is called 'loss' or '..._loss'. The model returned: {choices(outputs) or 'none'}.")
    return sum(losses[1:], start=losses[0])


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")

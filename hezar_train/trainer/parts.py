"""What a trainer is made of, by name and type: declared once, for the classes that the Trainer inherits from.

`assembly` and the Trainer's constructor set these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from hezar_train.checkpoint import Checkpoint, CheckpointStore
from hezar_train.config import TrainerConfig
from hezar_train.data import Source
from hezar_train.data.splits import Splits
from hezar_train.events import EventStorage, EventWriter
from hezar_train.hooks import Stopping
from hezar_train.hub import Pusher
from hezar_train.loop import Context, Hook, HookSet
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import Schedule
from hezar_train.plan import Plan
from hezar_train.runtime import Runtime
from hezar_train.state import TrainerState
from hezar_train.trainer.checkpointing import Snapshot
from hezar_train.trainer.evaluator import EvaluationReport
from hezar_train.trainer.folder import RunFolder
from hezar_train.trainer.session import Run
from hezar_train.types import Mode

__all__ = ["Parts"]


class Parts:
    """The names that every part of the Trainer may rely on."""

    trainer_subfolder: ClassVar[str]
    trainer_config_file: ClassVar[str]
    trainer_csv_log_file: ClassVar[str]
    dataset_config_file: ClassVar[str]
    trainer_state_file: ClassVar[str]
    optimizer_file: ClassVar[str]
    lr_scheduler_file: ClassVar[str]
    model_file: ClassVar[str]
    default_optimizer: ClassVar[str]
    default_lr_scheduler: ClassVar[str | None]

    config: TrainerConfig
    folder: RunFolder
    runtime: Runtime
    accelerator: Any
    model: nn.Module
    metrics_handler: MetricsHandler
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any] | None
    preprocessor: Any
    splits: Splits
    only_for_eval: bool
    evaluates: bool
    best_key: str
    plan: Plan
    state: TrainerState
    optimizer: Optimizer
    schedule: Schedule
    storage: EventStorage
    ctx: Context
    hooks: dict[Mode, HookSet]
    last_evaluation: dict[str, EvaluationReport]
    hub_uploaded: bool | None = None
    """Whether the end of the run is on the Hub; None if nothing was pushed."""

    _weighs_itself: bool
    _store: CheckpointStore
    _known_steps: list[int]
    _checkpoint: Checkpoint | None
    _first_optimizer: tuple[Any, Any]
    _source: Source
    _stopping: Stopping
    _snapshot: Snapshot
    _hook_objects: list[Hook]
    _run: Run
    _pusher: Pusher | None = None
    _windows_seen: int

    @property
    def _trains_in_rounds(self) -> bool:
        """Whether a call of `train()` does a part of the run that has no end of its own."""
        return self.config.local_update_steps is not None

    if TYPE_CHECKING:  # verbs that the Trainer and its views have

        def prepare_input_batch(self, batch: Any) -> Any: ...

        def forward(self, batch: Any) -> dict[str, Any]: ...

        def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor: ...

        def batch_weight(self, batch: Any) -> float: ...

        def evaluation_step(self, batch: Any) -> dict[str, Any]: ...

        def inner_training_loop(self, epoch_num: int) -> dict[str, float]: ...

        def val_epoch(self) -> dict[str, float] | None: ...

        def test_epoch(self) -> dict[str, float] | None: ...

        def finetune(self) -> object: ...

        def build_writers(self) -> list[EventWriter]: ...

        def get_model_para(self) -> Any: ...

        def _foresee(self, batch: Any) -> dict[str, Any]: ...

        def _model_at_hand(self) -> AbstractContextManager[None]: ...

        def _user_writers(self) -> list[EventWriter]: ...

        def _freeze_as_saved(self) -> None: ...

        def _tests_while_training(self) -> bool: ...

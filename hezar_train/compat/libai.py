"""LiBai's trainer: `from hezar_train.compat.libai import Trainer, HookBase, get_event_storage`.

The loop of its `TrainerBase.train`, over this one:

    before_train()                            in hooks
    for iter in range(start_iter, max_iter):
        before_step()                         in hooks
        run_step()
        after_step()                          in hooks
    after_train()                             in hooks, also after an error; iter == max_iter tells success

What LiBai calls so, and where it is:

    DefaultTrainer(cfg)                 Trainer(config), the same class; TrainerConfig answers its fields with ours
    iter, start_iter, max_iter          the trainer's; an iteration is a step, counted from 0
    storage, get_event_storage          the trainer's EventStorage, also from inside a model
    run_step                            to be overridden; for a sum of losses alone, let compute_loss return
                                        total_loss(outputs)
    build_train_loader, build_tokenizer, build_evaluator, build_model, build_optimizer, build_lr_scheduler
                                        to be overridden; called in this order, each for what is not passed, and able
                                        to read self.config
    build_hooks, build_writers          to be overridden; build_test_loader as well, which test() asks
    build_graph                         compile=True in the config
    auto_scale_hyperparams              the trainer's plan, worked out from the config and the data
    write_metrics, resume_or_load       the trainer's, and test
    libai.engine.hooks                  HookBase, CallbackHook, IterationTimer, LRScheduler, PeriodicCheckpointer,
                                        PeriodicWriter, EvalHook; instead of a BestCheckpointer, metric_for_best_model
    libai.utils.events                  EventWriter, JSONWriter, TensorboardXWriter, CommonMetricPrinter, HistoryBuffer
    libai.evaluation                    flatten_results_dict, print_csv_format; an evaluator is a MetricsHandler
    libai.utils.checkpoint              Checkpointer, for a loop of one's own; a run saves by itself, and
                                        register_for_checkpointing(name, object) adds to it
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.utils.data import DataLoader

from hezar_train.checkpoint import Checkpointer
from hezar_train.config import TrainerConfig
from hezar_train.data import Splits
from hezar_train.errors import CheckpointError, DataError, choices
from hezar_train.events import (
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    HistoryBuffer,
    JSONWriter,
    Scalar,
    TensorboardXWriter,
    flatten_results_dict,
    get_event_storage,
    print_csv_format,
)
from hezar_train.hooks import (
    CallbackHook,
    EvalHook,
    HookBase,
    IterationTimer,
    LRScheduler,
    PeriodicCheckpointer,
    PeriodicWriter,
)
from hezar_train.loop import Hook
from hezar_train.metrics import MetricsHandler
from hezar_train.runtime import logger
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.assemble import in_order
from hezar_train.trainer.checkpointing import find_checkpoint, load_initial_weights
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "CallbackHook",
    "Checkpointer",
    "CommonMetricPrinter",
    "DefaultTrainer",
    "EvalHook",
    "EventStorage",
    "EventWriter",
    "HistoryBuffer",
    "HookBase",
    "IterationTimer",
    "JSONWriter",
    "LRScheduler",
    "MetricsHandler",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "TensorboardXWriter",
    "Trainer",
    "TrainerConfig",
    "flatten_results_dict",
    "get_event_storage",
    "print_csv_format",
    "total_loss",
]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})


class Trainer(PlainTrainer):
    """A Trainer that counts iterations, and builds by methods of its own what is not passed to it."""

    config: TrainerConfig

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        preprocessor: Any = None,
        metrics_handler: MetricsHandler | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: TorchLRScheduler | None = None,
        accelerator: Accelerator | None = None,
        hooks: Iterable[Hook | None] = (),
    ) -> None:
        self.config, model = in_order(config, model)
        if train_dataset is None and eval_dataset is None:
            train_dataset, eval_dataset = self._built_data()
        splits = Splits.of(train_dataset, eval_dataset)
        # what is built next may read the data, and the model if one was passed
        self.splits, self.train_dataset, self.eval_dataset = splits, splits.train, splits.for_evaluation
        if model is not None:
            self.model = model
        super().__init__(
            self.config, model, splits, None, data_collator, preprocessor or self.build_tokenizer(),
            metrics_handler or self.build_evaluator(), optimizer, lr_scheduler, accelerator, hooks,
        )  # fmt: skip

    def _built_data(self) -> tuple[Any, Any]:
        """Return what `build_train_loader` makes as training data, a dict of splits, and evaluation data."""
        made = dict(zip(("train", "val", "test"), self.build_train_loader(), strict=True))
        return (made, None) if made["train"] is not None else (None, made["val"])

    @property
    def iter(self) -> int:
        """The step under way, from 0 on; between steps, how many are done: at the end it equals `max_iter`."""
        ctx, fit = self.ctx, self.parts.loop.current
        if fit is None or ctx.get("mode") not in LEARNING or "batch" not in ctx:
            return self.state.global_step
        return fit.state.global_step - fit.state.epoch_step + int(ctx.cur_batch_i)

    @property
    def start_iter(self) -> int:
        """The step that the call of train() under way began with; between calls, the one that the next begins with."""
        fit = self.parts.loop.current
        return self.state.global_step if fit is None else fit.first_step

    @property
    def max_iter(self) -> int:
        """The number of steps after which the run ends."""
        return self.parts.session.total_steps

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
            self._resume()
        elif not resume:
            self._load_weights()

    def _resume(self) -> None:
        asked = copy.copy(self.config)
        asked.resume_from_checkpoint = True
        checkpoint = find_checkpoint(asked, self.folder)
        if checkpoint is None:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder.checkpoints} to resume from. To begin anew, call "
                "resume_or_load(resume=False) or nothing at all."
            )
        self.parts.session.restore(checkpoint)

    def _load_weights(self) -> None:
        source, step = self.config.init_weights_from, self.state.global_step
        if step:
            raise CheckpointError(
                f"this run is at step {step}: initial weights belong to a fresh one. Leave resume_from_checkpoint out."
            )
        if source is None:
            logger.info("init_weights_from is not set: the weights stay as they are")
            return
        load_initial_weights(self.model, source, self.runtime.processes)

    def test(self, test_sets: Any = None) -> dict[str, Any]:
        """Evaluate on test sets, {"name": data}; return {"name": metrics}, or the metrics alone of a single set.

        Without sets given: those of `build_test_loader()`, else the split "test".
        """
        if isinstance(test_sets, list | tuple) and any(isinstance(one, DataLoader) for one in test_sets):
            raise DataError("several test sets were given as a list; give each a name: {'dev': loader, ...}")
        self.evaluate(test_sets if test_sets is not None else self.build_test_loader() or "test")
        found = {name: dict(report.metrics) for name, report in self.last_evaluation.items()}
        results: dict[str, Any] = next(iter(found.values())) if len(found) == 1 else found
        if self.runtime.is_main:
            print_csv_format(results)
        return results


DefaultTrainer = Trainer


def total_loss(outputs: Mapping[str, Any]) -> torch.Tensor:
    """Add up a model's losses, its outputs named "loss" or "..._loss", for an overridden `compute_loss` to return."""
    losses: list[torch.Tensor] = [value for name, value in outputs.items() if _is_loss(name)]
    if not losses:
        raise DataError(f"no output is called 'loss' or '..._loss'. The model returned: {choices(outputs) or 'none'}.")
    return sum(losses[1:], start=losses[0])


def _is_loss(name: str) -> bool:
    return name == "loss" or name.endswith("_loss")

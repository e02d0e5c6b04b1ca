"""LiBai's trainer over this loop: iterations, the four methods around them, and what is built if it is not passed.

before_train()                            calls the hooks'
for iter in range(start_iter, max_iter):
    before_step()                         calls the hooks'
    run_step()
    after_step()                          calls the hooks'
after_train()                             calls the hooks', also after an error; iter == max_iter tells success
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

from hezar_train.compat.libai.hooks import HookBase
from hezar_train.config import TrainerConfig
from hezar_train.data import Splits
from hezar_train.errors import CheckpointError, ConfigError, DataError, choices
from hezar_train.events import Scalar, print_csv_format
from hezar_train.loop import Context, Hook, HookSet, Moment
from hezar_train.metrics import MetricsHandler
from hezar_train.runtime import logger
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.assemble import in_order
from hezar_train.trainer.checkpointing import find_checkpoint, load_initial_weights
from hezar_train.trainer.run_status import RoutineResult
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Iterations", "Trainer", "is_loss", "total_loss"]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})


class Iterations:
    """How a trainer counts: the steps (micro-batches) of an iteration, the hooks around it, where a call ends."""

    def __init__(self, steps: int = 1, *, numbers_storage: bool = False) -> None:
        """With `numbers_storage`, what hooks put after a step belongs to the iteration, not to the steps done."""
        self.steps, self.numbers_storage = steps, numbers_storage
        self.hooks: list[HookBase] = []
        self.last: int | None = None


class Trainer(PlainTrainer):
    """A Trainer that counts iterations, and builds by methods of its own what is not passed to it."""

    default_lr_scheduling_steps = 1  # a schedule ticks in every iteration

    config: TrainerConfig
    iterations: Iterations

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
        config, model = in_order(config, model)
        if not isinstance(config, TrainerConfig):
            raise ConfigError(
                f"config is a {type(config).__name__}; expected a TrainerConfig. A lazy config of LiBai's goes to "
                "DefaultTrainer(cfg)."
            )
        self.config = config
        self.iterations = Iterations()
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

    @property
    def _hooks(self) -> list[HookBase]:
        """The hooks around iterations, as LiBai's users find them."""
        return self.iterations.hooks

    def _built_data(self) -> tuple[Any, Any]:
        """Return what `build_train_loader` makes as training data, a dict of splits, and evaluation data."""
        made = dict(zip(("train", "val", "test"), self.build_train_loader(), strict=True))
        return (made, None) if made["train"] is not None else (None, made["val"])

    def register_default_hooks(self) -> None:
        """Let the loop call the four methods around iterations."""
        super().register_default_hooks()
        hooks = self.hooks_in_train
        hooks.register(self._at_fit_start, Moment.FIT_START, name="before_train")
        hooks.register(self._at_batch_start, Moment.BATCH_START, name="before_step")
        hooks.register(self._at_batch_end, Moment.BATCH_END, name="after_step")
        hooks.register(lambda _: self.after_train(), Moment.FIT_END, name="after_train")

    def register_hooks(self, hooks: Iterable[Hook | None]) -> None:
        """Add hooks, which are called in their order; None among them is passed over."""
        given = list(hooks)
        super().register_hooks(given)
        self.iterations.hooks += [one for one in given if isinstance(one, HookBase)]

    def _at_fit_start(self, ctx: Context) -> None:
        if self.iterations.last is not None:
            ctx.num_total_train_batch = self.iterations.last * self.iterations.steps
        self.before_train()

    def _at_batch_start(self, ctx: Context) -> None:
        if self.iterations.steps == 1 or ctx.step.batch_in_window == 0:
            self.before_step()

    def _at_batch_end(self, ctx: Context) -> None:
        if self.iterations.steps > 1 and not ctx.step.closes_window:
            return
        storage, counted = self.storage, self.storage.step
        if self.iterations.numbers_storage:
            storage.step = self.iter
        self.after_step()
        storage.step = counted

    def before_train(self) -> None:
        """Called before the first iteration; an override calls the hooks through `super()`."""
        for hook in self._hooks:
            hook.before_train()

    def before_step(self) -> None:
        """Called before each iteration."""
        for hook in self._hooks:
            hook.before_step()

    def after_step(self) -> None:
        """Called after each iteration."""
        for hook in self._hooks:
            hook.after_step()

    def after_train(self) -> None:
        """Called after the last iteration, also after a failure."""
        for hook in self._hooks:
            hook.after_train()

    @property
    def iter(self) -> int:
        """The iteration under way, from 0 on; between them, how many are done: at the end it equals `max_iter`."""
        ctx, fit = self.ctx, self.parts.loop.current
        if fit is None or ctx.get("mode") not in LEARNING or "batch" not in ctx:
            return self.state.global_step // self.iterations.steps
        step: int = fit.state.global_step - fit.state.epoch_step + int(ctx.cur_batch_i)
        return step // self.iterations.steps

    @property
    def start_iter(self) -> int:
        """The iteration that the call of train() under way began with; between calls, that of the next."""
        fit = self.parts.loop.current
        return (self.state.global_step if fit is None else fit.first_step) // self.iterations.steps

    @property
    def max_iter(self) -> int:
        """The number of iterations after which the run, or this call, ends."""
        return self.iterations.last or self.parts.status.total_steps // self.iterations.steps

    @max_iter.setter
    def max_iter(self, number: int) -> None:
        raise AttributeError(
            f"max_iter={number} was assigned, but it follows from train.train_iter (max_steps), as its schedule does. "
            f"To end a call earlier: train(start_iter, {number})."
        )

    def train(  # type: ignore[override]
        self, start_iter: int | str | None = None, max_iter: int | HookSet | None = None, **more: Any
    ) -> RoutineResult:
        """Train to the end of the run, or to the iteration before `max_iter`, from where the last call ended.

        The forms of a plain Trainer are accepted as well: a split's name, a hook set.
        """
        if not isinstance(start_iter, int) and not isinstance(max_iter, int):
            plain: dict[str, Any] = {"target_data_split_name": start_iter, "hooks_set": max_iter}
            return super().train(**{name: one for name, one in plain.items() if one is not None}, **more)
        if start_iter is not None and start_iter != self.iter:
            raise DataError(
                f"train({start_iter}, {max_iter}) was called, but the run is at iteration {self.iter}: it goes on from "
                "there. For another beginning, build another trainer, or resume from a checkpoint."
            )
        whole = self.max_iter
        if not isinstance(max_iter, int) or not self.iter <= max_iter <= whole:
            raise ConfigError(
                f"max_iter={max_iter!r}, but the run is at iteration {self.iter} and planned for {whole}, over which "
                "its schedule is laid out. Expected a number between; a longer run is train.train_iter (max_steps)."
            )
        self.iterations.last = max_iter
        try:
            return super().train(**more)
        finally:
            self.iterations.last = None

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
        if losses := [value for name, value in loss_dict.items() if is_loss(name)]:
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


def total_loss(outputs: Mapping[str, Any]) -> torch.Tensor:
    """Add up a model's losses, its outputs named "loss" or "..._loss", for an overridden `compute_loss` to return."""
    losses: list[torch.Tensor] = [value for name, value in outputs.items() if is_loss(name)]
    if not losses:
        raise DataError(f"no output is called 'loss' or '..._loss'. The model returned: {choices(outputs) or 'none'}.")
    return sum(losses[1:], start=losses[0])


def is_loss(name: str) -> bool:
    """Tell whether an output is a loss, by its name."""
    return name == "loss" or name.endswith("_loss")

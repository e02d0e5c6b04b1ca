"""LiBai's engine: `DefaultTrainer(cfg)` from a lazy config, and the small trainers that do a step.

    from hezar_train.compat.libai.engine import DefaultTrainer, default_setup, hooks

A `DefaultTrainer` builds everything by its class methods, in LiBai's order, and trains it with this package's loop: its
order of samples, its checkpoints, its exact resume. What does a step is `self._trainer`. The default one is the loop's
own step; one of the user's own (`EagerTrainer` or `TrainerBase` with a `run_step(get_batch)`) asks `self.train_loader`
for the next batch as ever, and gets the one that the loop has fetched.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler as TorchLRScheduler
from torch.utils.data import DataLoader

from hezar_train.compat.libai import distributed as dist
from hezar_train.compat.libai import hooks
from hezar_train.compat.libai.checkpoint import Checkpointer
from hezar_train.compat.libai.config import LazyConfig, instantiate, try_get_key
from hezar_train.compat.libai.data import Instance
from hezar_train.compat.libai.evaluation import DatasetEvaluator, inference_on_dataset
from hezar_train.compat.libai.hooks import HookBase
from hezar_train.compat.libai.optim import build_optimizer, clip_groups
from hezar_train.compat.libai.run_config import (
    check_batch_size,
    completed,
    run_config,
    scale_hyperparams,
    steps_per_iteration,
)
from hezar_train.compat.libai.trainer import Iterations, Trainer
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookTypeError, choices
from hezar_train.events import (
    CommonMetricPrinter,
    EventStorage,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
    get_event_storage,
    print_csv_format,
)
from hezar_train.hooks import Checkpointed
from hezar_train.loop import HookSet, Moment, share_of
from hezar_train.optim import Schedule
from hezar_train.run_layout import METRICS_FILE
from hezar_train.runtime import logger
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.assemble import Given, Parts
from hezar_train.trainer.optimizer_setup import schedule_for
from hezar_train.trainer.own_code import kept_attributes
from hezar_train.trainer.run_status import RoutineResult

__all__ = [
    "DefaultTrainer",
    "EagerTrainer",
    "GraphTrainer",
    "HookBase",
    "LoopLoader",
    "TrainerBase",
    "default_setup",
    "hooks",
]

_check_batch_size = check_batch_size  # LiBai's tests import it by this name


def default_setup(cfg: Any, args: argparse.Namespace) -> None:
    """Get ready for a run: its folder, whether it resumes, batch sizes and processes checked, the config written."""
    completed(cfg).train.resume = bool(args.resume)
    dist.setup_dist_util(try_get_key(cfg, "train.dist"))
    check_batch_size(cfg)
    if dist.is_main_process():
        folder = Path(cfg.train.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        LazyConfig.save(cfg, folder / "config.yaml")


class TrainerBase:
    """A loop over iterations with hooks: `train(start_iter, max_iter)` calls `run_step()`, which a subclass writes.

    On its own it trains what `run_step` says and saves nothing; as the `_trainer` of a `DefaultTrainer`, its `run_step`
    is the step of that trainer's loop.
    """

    storage: EventStorage
    max_iter: int

    def __init__(self) -> None:
        self._hooks: list[HookBase] = []
        self.iter, self.start_iter = 0, 0

    def register_hooks(self, hooks: Iterable[HookBase | None]) -> None:
        """Add hooks, which are called in their order; None among them is passed over."""
        for hook in hooks:
            if hook is None:
                continue
            if not isinstance(hook, HookBase):
                raise HookTypeError(f"hooks holds {hook!r}; expected objects of HookBase")
            hook.trainer = weakref.proxy(self)
            self._hooks.append(hook)

    def train(self, start_iter: int, max_iter: int) -> None:
        """Do the iterations from `start_iter` to the one before `max_iter`."""
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        with EventStorage(start_iter) as self.storage:
            try:
                self.before_train()
                for self.iter in range(start_iter, max_iter):
                    self.before_step()
                    self.run_step()
                    self.after_step()
                self.iter = max_iter
            finally:
                self.after_train()
                self.storage.close()

    def before_train(self) -> None:
        """Called before the first iteration."""
        for hook in self._hooks:
            hook.before_train()

    def before_step(self) -> None:
        """Called before each iteration."""
        self.storage.iter = self.iter
        for hook in self._hooks:
            hook.before_step()

    def after_step(self) -> None:
        """Called after each iteration."""
        for hook in self._hooks:
            hook.after_step()

    def after_train(self) -> None:
        """Called after the last iteration, also after a failure; then `iter` is less than `max_iter`."""
        for hook in self._hooks:
            hook.after_train()

    def run_step(self, *args: Any) -> Any:
        """Do one iteration."""
        raise NotImplementedError(f"{type(self).__name__} must define run_step(), which does one iteration")

    @staticmethod
    def write_metrics(loss_dict: Mapping[str, Any], data_time: float | None = None, prefix: str = "") -> None:
        """Put the sum of the losses as `total_loss`, and each value where there are several; on every process."""
        storage = get_event_storage()
        if data_time is not None:
            storage.put_scalar("data_time", data_time)
        storage.put_scalar(f"{prefix}total_loss", _detached(sum_of_losses(loss_dict)))
        if len(loss_dict) > 1:
            storage.put_scalars(**{name: _detached(value) for name, value in loss_dict.items()})


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def sum_of_losses(outputs: Mapping[str, Any]) -> Any:
    """Add up the outputs that have "loss" in their name."""
    losses = [value for name, value in outputs.items() if "loss" in name]
    if not losses:
        raise DataError(f"no output has 'loss' in its name. The model returned: {choices(outputs) or 'nothing'}.")
    return sum(losses[1:], start=losses[0])


class EagerTrainer(TrainerBase):
    """Do a step: the next batch, the model, the sum of its losses, backward; every so many steps the optimizer."""

    def __init__(self, model: nn.Module, data_loader: Any, optimizer: Optimizer, grad_acc_steps: int = 1) -> None:
        super().__init__()
        model.train()
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer
        self.grad_acc_steps = grad_acc_steps
        self._data_loader_iter = iter(data_loader)

    def run_step(self, get_batch: Callable[..., Any] | None = None, input_placement_device: str = "cuda") -> Any:
        """Do one step; `get_batch(data, device, mixup_func)` makes of a batch what the model takes."""
        if not self.model.training:
            raise DataError("the model is in evaluation mode; call model.train() after evaluating it")
        began = time.perf_counter()
        get_batch = DefaultTrainer.get_batch if get_batch is None else get_batch
        data = next(self._data_loader_iter)
        data = get_batch(data, input_placement_device, getattr(self.data_loader, "mixup_func", None))
        data_time = time.perf_counter() - began
        loss_dict = self.model(**data)
        self._backward(sum_of_losses(loss_dict))
        self.write_metrics(loss_dict, data_time)
        if (self.iter + 1) % self.grad_acc_steps == 0:
            getattr(self.optimizer, "clip_grad", functools.partial(clip_groups, self.optimizer, True))()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _backward(self, losses: torch.Tensor) -> None:
        if isinstance(self.data_loader, LoopLoader):
            self.data_loader.backward(losses)
        else:
            (losses / self.grad_acc_steps).backward()  # type: ignore[no-untyped-call]


class GraphTrainer(TrainerBase):
    """OneFlow's graph, which torch does not have: `compile=True` takes its place."""

    def __init__(self, graph: Any = None, data_loader: Any = None, grad_acc_steps: int = 1) -> None:
        del graph, data_loader, grad_acc_steps
        raise ConfigError(
            "a GraphTrainer trains a graph of OneFlow's. Set graph.enabled=True and leave _trainer as it is: the model "
            "is then compiled (compile=True). For a run_step of your own set graph.enabled=False and use EagerTrainer."
        )


class LoopLoader:
    """The training loader as a `run_step` sees it: each `next` gives the batch that the loop has fetched for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._waiting: list[Any] = []
        self._weighed: Callable[[torch.Tensor], object] | None = None

    def offer(self, batch: Any, weighed_backward: Callable[[torch.Tensor], object]) -> None:
        """Give the batch of this step, and how to go backward with its share of the update."""
        self._waiting, self._weighed = [batch], weighed_backward

    def backward(self, loss: torch.Tensor) -> None:
        """Go backward, with the share of the batch in its update."""
        if self._weighed is None:
            raise DataError("backward() outside of a step: it belongs to a run_step of the trainer")
        self._weighed(loss)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._next()

    def _next(self) -> Any:
        if not self._waiting:
            raise DataError(
                "run_step() asked for a batch that the loop has not fetched: each step has one, and outside of train() "
                "there is none. For several micro-batches an update set train.num_accumulation_steps."
            )
        return self._waiting.pop()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _LoopStep(EagerTrainer):
    """The default `_trainer`: the batch made ready by `get_batch`, then the loop's own step."""

    def __init__(self, trainer: DefaultTrainer, model: nn.Module, optimizer: Optimizer, grad_acc_steps: int) -> None:
        super().__init__(model, trainer.train_loader, optimizer, grad_acc_steps)
        self._owner = weakref.proxy(trainer)

    def run_step(self, get_batch: Callable[..., Any] | None = None, input_placement_device: str = "cuda") -> Any:
        get_batch = self._owner.get_batch if get_batch is None else get_batch
        batch = next(iter(self.data_loader))
        batch = get_batch(batch, input_placement_device, getattr(self.data_loader, "mixup_func", None))
        return self._owner.step_of_the_loop(batch)


class DefaultTrainer(Trainer):
    """Train from a lazy config; what each class method builds may be overridden.

    The order: build_tokenizer, build_train_loader, build_test_loader, auto_scale_hyperparams, build_model,
    build_optimizer, build_lr_scheduler, build_hooks (which calls build_writers).
    """

    cfg: Any
    train_loader: LoopLoader
    test_loader: list[Any]
    checkpointer: Checkpointer

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg = completed(cfg)
        check_batch_size(cfg)
        self._refuse_graph_of_ones_own()
        self.iterations = Iterations(steps_per_iteration(cfg), numbers_storage=True)
        self.tokenizer = self.build_tokenizer(cfg)
        loader = self._build_loaders(cfg)
        self.auto_scale_hyperparams(cfg, loader)
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        scheduler = self.build_lr_scheduler(cfg, optimizer)
        self._make_step(model, optimizer, scheduler)
        PlainTrainer.__init__(self, run_config(cfg, model), model, loader, optimizer=optimizer, lr_scheduler=scheduler)
        self.graph_train = self.graph_eval = self.model
        self._refuse_missing_checkpoint()
        cfg.train.start_iter = self.start_iter

    def _refuse_graph_of_ones_own(self) -> None:
        own = inspect.getattr_static(type(self), "build_graph")
        if own is not inspect.getattr_static(DefaultTrainer, "build_graph"):
            raise ConfigError(
                f"{type(self).__name__} overrides build_graph(), which nobody calls: torch has no OneFlow graph. With "
                "graph.enabled=True the model is compiled (compile=True); leave the method out."
            )

    def _build_loaders(self, cfg: Any) -> Any:
        """Build the loaders; return that of the training data."""
        if try_get_key(cfg, "dataloader") is not None:
            cfg.dataloader.consumed_samples = 0  # the loop knows where it was
        made = self.build_train_loader(cfg, self.tokenizer)
        train, valid, test = made if isinstance(made, tuple | list) else (made, None, None)
        if not isinstance(train, DataLoader):
            raise DataError(
                f"build_train_loader() gave a {type(train).__name__} as training data; expected a DataLoader of torch's"
            )
        self.test_loader = [one for one in (valid, test) if one is not None]
        self.test_loader += list(self.build_test_loader(cfg, self.tokenizer))
        self.train_loader = LoopLoader(train)
        return train

    def _make_step(self, model: nn.Module, optimizer: Optimizer, scheduler: TorchLRScheduler | None) -> None:
        """Make what users find on the trainer before it trains: the step, the checkpointer, the batch size."""
        train = self.cfg.train
        optimizer.clip_grad = self._clip  # type: ignore[attr-defined]  # as OneFlow's optimizers have it
        optimizer.register_step_pre_hook(lambda *_: self._weigh_own_gradients())  # before the trainer's own
        self._trainer: Any = _LoopStep(self, model, optimizer, train.num_accumulation_steps)
        kept: dict[str, Any] = {"optimizer": optimizer}
        if scheduler is not None:
            kept["lr_scheduler"] = scheduler
        self.checkpointer = Checkpointer(model, train.output_dir, save_to_disk=dist.is_main_process(), **kept)
        self.global_batch_size = train.train_micro_batch_size * dist.get_data_parallel_size() * self.iterations.steps

    def _refuse_missing_checkpoint(self) -> None:
        if self.cfg.train.resume and self.state.global_step == 0:
            raise CheckpointError(
                f"train.resume is set, but there is no checkpoint in {self.folder.checkpoints}. Begin without --resume."
            )

    def make_parts(self, given: Given) -> Parts:
        """Make the parts; the loop does LiBai's `run_step`, and writers belong to the `PeriodicWriter`."""
        verbs = dataclasses.replace(given.verbs, run_step=self._do_iteration, build_writers=list)
        return super().make_parts(dataclasses.replace(given, verbs=verbs))

    def register_training_hooks(self, hooks: HookSet) -> None:
        """Leave the schedule to the hook `LRScheduler`, and clip each group of the optimizer by its own norm."""
        super().register_training_hooks(hooks)
        hooks.remove(Moment.BATCH_END, "schedule")
        hooks.replace(lambda _: self._clip(), Moment.UPDATE, "clip")

    def build_schedule(self, given: TorchLRScheduler | None) -> Schedule:
        """Hold the schedule that `build_lr_scheduler` has made, None if it made none."""
        return schedule_for(self.optimizer, given, self.config, self.plan, self.setup.objective)

    def _clip(self) -> None:
        """Clip what the optimizer is going to step by: the gradients of the whole window, of all processes."""
        self._weigh_own_gradients()
        self.parts.optimization.gather_gradients(self.ctx.step.window)
        clip_groups(self.optimizer)

    def _weigh_own_gradients(self) -> None:
        """Weigh the gradients of a plain backward, which divides by the micro-batches and knows no processes."""
        step, world = self.ctx.step, self.runtime.num_processes
        if world == 1 or step.window is None or step.is_weighed or step.is_loss_noted:
            return
        step.is_weighed = True
        factor = share_of(step.window, step.batch_in_window) * world * len(step.window.batches)
        gradients = [one.grad for one in self.parts.optimization.trained if one.grad is not None]
        for gradient in gradients if factor != 1.0 else ():
            gradient.mul_(factor)

    def _do_iteration(self) -> Any:
        """Do a step of the loop by `run_step()`, and find out its loss."""
        step, storage = self.ctx.step, self.storage
        storage.iter = self.iter
        self.train_loader.offer(step.batch, self.accelerator.backward)
        told = self._num_losses()
        outputs = self.run_step()
        if step.is_loss_noted or outputs is not None:
            return outputs
        if self._num_losses() > told:
            return torch.as_tensor(storage.history("total_loss").peek()[0])
        raise DataError("run_step() told no loss: call self.write_metrics(loss_dict, data_time), or return the loss.")

    def _num_losses(self) -> int:
        found = self.storage.histories().get("total_loss")
        return 0 if found is None else found.total

    def run_step(self) -> Any:
        """Do one step: `self._trainer` does it, with `get_batch`."""
        self._trainer.iter = self.iter
        run, device = self._trainer.run_step, self.cfg.train.input_placement_device
        return run(self.get_batch, device) if _takes_device(run) else run(self.get_batch)

    def step_of_the_loop(self, batch: Any) -> Any:
        """Do the loop's own step with a batch that is ready for the model."""
        self.ctx.step.batch = batch
        outputs = super().run_step()
        self.write_metrics({name: one for name, one in self._outputs.items() if _is_number(one)})
        return outputs

    def forward(self, batch: Any) -> dict[str, Any]:
        """Call the model with the named tensors of a batch; it returns named losses and what else it likes."""
        inputs = batch if isinstance(batch, dict) else self.get_batch(batch)
        outputs = self.model(**inputs)
        if not isinstance(outputs, Mapping):
            raise DataError(f"the model returned a {type(outputs).__name__}; expected a dict of losses by name")
        self._outputs = {name: _detached(one) for name, one in outputs.items()}
        return dict(outputs)

    def compute_loss(self, model_outputs: Mapping[str, Any], labels: Any, **kwargs: Any) -> torch.Tensor:
        """Add up the outputs that have "loss" in their name."""
        del labels, kwargs
        total: torch.Tensor = sum_of_losses(model_outputs)
        return total

    @staticmethod
    def write_metrics(loss_dict: Mapping[str, Any], data_time: float | None = None, prefix: str = "") -> None:
        """Put the sum of the losses as `total_loss`, and each value where there are several."""
        TrainerBase.write_metrics(loss_dict, data_time, prefix)

    def train(self, *args: Any, **kwargs: Any) -> RoutineResult:
        """Train to the end of the run, or `train(start_iter, max_iter)`; what `_trainer` trains besides is kept too."""
        for name, one in self._trained_besides().items():
            self.register_for_checkpointing(f"_trainer.{name}", one)
        return super().train(*args, **kwargs)

    def _trained_besides(self) -> dict[str, Any]:
        """Return the optimizers of `_trainer` that are not the trainer's, and what they train, by name."""
        ours = (self.model, self.optimizer)
        own = {name: one for name, one in vars(self._trainer).items() if not any(one is other for other in ours)}
        renamed = {f"own_{name}" if name in {"model", "optimizer"} else name: one for name, one in own.items()}
        found = kept_attributes(types.SimpleNamespace(model=self.model, **renamed), self.optimizer)
        known = [hook.kept for hook in self.parts.checkpointing.hooks if isinstance(hook, Checkpointed)]
        return {name: one for name, one in found.items() if not any(one is other for other in known)}

    def build_hooks(self) -> list[Any]:
        """Make LiBai's hooks: timer, schedule, checkpoints, evaluation, the best model, writers."""
        train = self.cfg.train
        made: list[Any] = [
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            hooks.PeriodicCheckpointer(
                self.checkpointer, train.checkpointer.period, max_to_keep=train.checkpointer.max_to_keep
            ),
        ]
        if train.evaluation.enabled:
            period = train.evaluation.eval_period
            made += [
                hooks.EvalHook(period, self._evaluate_on_test_loaders),
                hooks.BestCheckpointer(
                    period, self.checkpointer, train.evaluation.eval_metric, train.evaluation.eval_mode
                ),
            ]
        if dist.is_main_process():
            made.append(hooks.PeriodicWriter(self.build_writers(), train.log_period))
        return made

    def _evaluate_on_test_loaders(self) -> Mapping[str, Any]:
        return type(self).test(self.cfg, self.test_loader, self.model) if self.test_loader else {}

    def build_writers(self) -> list[EventWriter]:
        """Make the writers of the `PeriodicWriter`: printed lines, `metrics.json`, TensorBoard, in `output_dir`."""
        folder = self.cfg.train.output_dir
        return [
            CommonMetricPrinter(self.global_batch_size, self.max_iter),
            JSONWriter(os.path.join(folder, METRICS_FILE)),
            TensorboardXWriter(folder),
        ]

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: Any = "cuda", mixup_func: Any = None) -> dict[str, Any]:
        """Make of a batch what the model takes, by name; `mixup_func` mixes images and labels."""
        if not isinstance(input_placement_device, str | torch.device):  # older code passes mixup_func in its place
            input_placement_device, mixup_func = "cuda", input_placement_device
        if not isinstance(data, Instance | Mapping):
            raise DataError(
                f"a batch is a {type(data).__name__}; expected an Instance or a dict of named tensors. Override "
                "get_batch(cls, data, input_placement_device, mixup_func) for another form."
            )
        fields = data.get_fields() if isinstance(data, Instance) else data
        found = {name: _placed(getattr(one, "tensor", one), input_placement_device) for name, one in fields.items()}
        if mixup_func is not None:
            found["images"], found["labels"] = mixup_func(found["images"], found["labels"])
        return found

    @classmethod
    def build_tokenizer(cls, cfg: Any) -> Any:  # type: ignore[override]
        """Make the tokenizer of `cfg.tokenization`; the model's `vocab_size` follows one that pads its own."""
        if try_get_key(cfg, "tokenization") is None:
            return None
        tokenizer = instantiate(cfg.tokenization.tokenizer)
        if try_get_key(cfg, "model.cfg.vocab_size") is not None and hasattr(tokenizer, "padded_vocab_size"):
            multiple = try_get_key(cfg, "tokenization.make_vocab_size_divisible_by", default=128)
            cfg.model.cfg.vocab_size = tokenizer.padded_vocab_size(multiple)
        return tokenizer

    @classmethod
    def build_model(cls, cfg: Any) -> nn.Module:  # type: ignore[override]
        """Make the model that `cfg.model` describes."""
        if try_get_key(cfg, "model") is None:
            raise ConfigError("the config has no group `model`; expected LazyCall(YourModel)(...)")
        for key in ("model.cfg.amp_enabled", "model.amp_enabled"):
            if try_get_key(cfg, key) is not None:
                LazyConfig.apply_overrides(cfg, [f"{key}={cfg.train.amp.enabled and cfg.graph.enabled}"])
        made = instantiate(cfg.model)
        if not isinstance(made, nn.Module):
            raise ConfigError(f"cfg.model makes a {type(made).__name__}; expected a torch.nn.Module")
        return made

    @classmethod
    def build_graph(
        cls, cfg: Any, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, is_train: bool = True
    ) -> nn.Module:
        """Return the model: there is no graph to build; training compiles it, evaluation calls it."""
        del cfg, optimizer, lr_scheduler, is_train
        logger.info("build_graph: torch has no OneFlow graph; the model itself is used")
        return model

    @classmethod
    def build_optimizer(cls, cfg: Any, model: nn.Module) -> Optimizer:  # type: ignore[override]
        """Make the optimizer that `cfg.optim` describes, over the model's parameters."""
        if try_get_key(cfg, "optim") is None:
            raise ConfigError(
                "the config has no group `optim`; expected LazyCall(torch.optim.AdamW)(params=..., lr=...)"
            )
        return build_optimizer(cfg.optim, model)

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: Optimizer) -> TorchLRScheduler | None:  # type: ignore[override]
        """Make the schedule that `cfg.train.scheduler` describes; the hook `LRScheduler` ticks it."""
        if try_get_key(cfg, "train.scheduler") is None:
            raise ConfigError("cfg.train has no `scheduler`; expected LazyCall(WarmupCosineLR)(warmup_factor=0.001)")
        made: TorchLRScheduler = instantiate(cfg.train.scheduler, optimizer=optimizer)
        return made

    @classmethod
    def build_train_loader(cls, cfg: Any, tokenizer: Any = None) -> tuple[Any, Any, Any]:  # type: ignore[override]
        """Make the loaders that `cfg.dataloader.train` describes: of training, validation and test data, or None."""
        if try_get_key(cfg, "dataloader.train") is None:
            raise ConfigError("the config has no `dataloader.train`; expected LazyCall(build_image_train_loader)(...)")
        described = cfg.dataloader.train
        described.train_batch_size = cfg.train.train_micro_batch_size
        described.test_batch_size = cfg.train.test_micro_batch_size
        described.seed = cfg.train.seed
        if "train_val_test_num_samples" in described:
            described.train_val_test_num_samples = _sample_numbers(cfg.train)
        _tell_datasets(described, cfg.train.seed, tokenizer)
        made = instantiate(described, _recursive_=False)
        return made if isinstance(made, tuple) else (made, None, None)

    @classmethod
    def build_test_loader(cls, cfg: Any, tokenizer: Any = None) -> Sequence[Any]:  # type: ignore[override]
        """Make the loaders that the list `cfg.dataloader.test` describes."""
        described = try_get_key(cfg, "dataloader.test")
        if not described:
            return []
        if isinstance(described, Mapping) or hasattr(described, "keys"):
            raise ConfigError("cfg.dataloader.test is a single loader; expected a list of them")
        for one in described:
            one.test_batch_size, one.seed = cfg.train.test_micro_batch_size, cfg.train.seed
            if tokenizer:
                one.dataset.tokenizer = tokenizer
        made: list[Any] = instantiate(described, _recursive_=False)
        return made

    @classmethod
    def auto_scale_hyperparams(cls, cfg: Any, data_loader: Any) -> None:
        """Work out the run's length in iterations, and what is counted in shares or epochs of it."""
        scale_hyperparams(cfg, data_loader)

    @classmethod
    def build_evaluator(cls, cfg: Any) -> DatasetEvaluator:  # type: ignore[override]
        """Make the evaluator that `cfg.train.evaluation.evaluator` describes."""
        described = try_get_key(cfg, "train.evaluation.evaluator")
        if described is None:
            raise ConfigError("cfg.train.evaluation has no `evaluator`; expected LazyCall(ClsEvaluator)(topk=(1, 5))")
        made: DatasetEvaluator = instantiate(described)
        return made

    @classmethod
    def test(  # type: ignore[override]
        cls, cfg: Any, test_loaders: Iterable[Any], model: nn.Module, evaluator: DatasetEvaluator | None = None
    ) -> dict[str, Any]:
        """Evaluate a model on each loader; return results by the class of its dataset, or those of a single one."""
        judge = evaluator or cls.build_evaluator(cfg)
        results: dict[str, Any] = {}
        for loader in test_loaders:
            name = type(loader.dataset).__name__
            if name in results:
                name = f"{name}_{len(results)}"
            evaluation = cfg.train.evaluation
            size = cfg.train.test_micro_batch_size * dist.get_data_parallel_size()
            device = try_get_key(cfg, "train.input_placement_device", default="cuda")
            results[name] = inference_on_dataset(
                model, loader, size, try_get_key(evaluation, "eval_iter", default=1e5), cls.get_batch, device, judge
            )
            if dist.is_main_process():
                print_csv_format({name: results[name]})
        return next(iter(results.values())) if len(results) == 1 else results


def _takes_device(run: Callable[..., Any]) -> bool:
    """Tell whether a `run_step` takes the device of the inputs, as newer ones do."""
    parameters = inspect.signature(run).parameters.values()
    places = [one for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    return len(places) > 1 or any(one.kind is one.VAR_POSITIONAL for one in parameters)


def _placed(value: Any, device: Any) -> Any:
    if not isinstance(value, torch.Tensor) or (str(device).startswith("cuda") and not torch.cuda.is_available()):
        return value
    return value.to(device)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _sample_numbers(train: Any) -> list[int]:
    """Return the samples that a run will take for training, validation and test, as loaders of texts want to know."""
    evaluation, size = train.evaluation, train.test_micro_batch_size * dist.get_data_parallel_size()
    times = train.train_iter // max(1, evaluation.eval_period) + 1
    batches = (times * evaluation.eval_iter, evaluation.eval_iter) if evaluation.enabled else (1, 1)
    return [int(train.samples), *(int(count * size) for count in batches)]


def _tell_datasets(described: Any, seed: int, tokenizer: Any) -> None:
    """Set the seed of datasets that have one, and the tokenizer of all."""
    found = try_get_key(described, "dataset")
    several = [found] if found is None or hasattr(found, "keys") else list(found)
    for one in several:
        if try_get_key(one, "seed") is not None if one is not None else False:
            one.seed = seed
        if tokenizer and one is not None:
            one.tokenizer = tokenizer

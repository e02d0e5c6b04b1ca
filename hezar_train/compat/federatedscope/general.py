"""`GeneralTorchTrainer(model, data, device, config, only_for_eval=False, monitor=None)`, as FederatedScope has it.

A routine is FederatedScope's own: `_run_routine`, `_run_epoch` and `_run_batch` call the hooks of a set, trigger by
trigger, with `ctx`; the default hooks are bound methods under FederatedScope's names, which a subclass overrides and a
hook set replaces by name. Below it is a Trainer: each turn of the batch loop is a step of its walk, so that a round is
counted, logged, saved, killed and resumed like any run, and several processes train what one trains.

    train()
      _run_routine(MODE.TRAIN, hooks_in_train, "train")
        on_fit_start      _hook_on_data_parallel_init  _hook_on_fit_start_init  _hook_on_fit_start_calculate_model_size
        _run_epoch
          on_epoch_start      _hook_on_epoch_start             the loader begins with its first batch
          _run_batch
            on_batch_start      _hook_on_batch_start_init        ctx.data_batch
            on_batch_forward    _hook_on_batch_forward  _hook_on_batch_forward_regularizer  ..._flop_count
            on_batch_backward   _hook_on_batch_backward          zero_grad, backward, clip, step
            on_batch_end        _hook_on_batch_end               sums; then the step is counted, and what is due is done
          on_epoch_end
        on_fit_end        _hook_on_fit_end                     ctx.eval_metrics
"""

from __future__ import annotations

import copy
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from hezar_train.checkpoint import load_round, round_tensors, unwrap, write_round
from hezar_train.compat.federatedscope.builders import WARMUPS, builder_for, get_scheduler
from hezar_train.compat.federatedscope.config import as_cfg, refuse_unkept, trainer_config, unknown_keys
from hezar_train.compat.federatedscope.context import LEARNING, RELEASE, Context, lifecycle
from hezar_train.compat.federatedscope.earlier import EarlierContext, is_earlier, metric_calculator, tell_finetuning
from hezar_train.compat.federatedscope.feeds import (
    BatchFeed,
    EvalFeed,
    LoaderSource,
    ProcessDraws,
    ReIterator,
    StopAsked,
    refuse_no_step,
    size_of_batch,
)
from hezar_train.compat.federatedscope.kept import KeptNames
from hezar_train.compat.federatedscope.monitor import Monitor
from hezar_train.compat.federatedscope.trainer import Trainer
from hezar_train.config import TrainerConfig
from hezar_train.data import Source, Splits, preserved_randomness
from hezar_train.data.sources import is_stream
from hezar_train.data.splits import ArrayDataset
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookError, choices, suggestion
from hezar_train.loop import HOOK_TRIGGER as TRIGGERS
from hezar_train.loop import Context as LoopContext
from hezar_train.loop import CtxVar, Fit, Hook, HookSet, Lifecycle, Loop, Moment, note_loss
from hezar_train.plan import End
from hezar_train.runtime import SyncedBatchNorm, logger
from hezar_train.trainer import Given, Parts, assemble
from hezar_train.trainer.export import give_parameters, take_parameters
from hezar_train.trainer.own_code import kept_attributes
from hezar_train.trainer.reconfigure import OF_PARTS
from hezar_train.trainer.train_step import TrainStep
from hezar_train.types import Mode

__all__ = ["GeneralTorchTrainer", "HookLists", "is_data", "use_diff"]

HookLists = dict[str, list[Callable[[Context], object]]]
"""The hooks of a mode: a list of functions of the context for each trigger."""

NOT_KEPT = frozenset(
    {
        "cfg", "cur_batch_i", "cur_epoch_i", "cur_mode", "cur_split", "data", "data_batch", "device", "lifecycles",
        "mode_stack", "monitor", "split_stack", "trainable_para_names", "criterion", "regularizer",
    }
)  # fmt: skip
"""Names of the context that a trainer makes again."""

OWN_LOOPS = ("_run_routine", "_run_epoch", "_run_batch")
BUILT_IN_FOLDER: dict[str, int] = {}
"""How many trainers were built for each outdir, so that each has a folder and a seed of its own in it."""
FOLDER_OF_SEED: dict[int, str] = {}
"""Where the first trainer of each seed keeps its files."""


def use_diff(method: Callable[..., Any]) -> Callable[..., Any]:
    """With `federate.use_diff`, evaluate on "val" before and after a method that trains, and tell both losses."""

    @functools.wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.cfg.federate.use_diff:
            return method(self, *args, **kwargs)
        before = _measured_before(self)
        num_samples, parameters, metrics = method(self, *args, **kwargs)
        after = self.evaluate(target_data_split_name="val")
        told = {
            "val_total": before["val_total"],
            "val_avg_loss_before": before["val_avg_loss"],
            "val_avg_loss_after": after["val_avg_loss"],
        }
        return num_samples, parameters, {**metrics, **told}

    return measured


def _measured_before(trainer: Any) -> Any:
    """Evaluate before a round; one that goes on was measured before it began."""
    hooks = trainer.state.hooks if hasattr(trainer, "parts") else {}
    # earlier checkpoints have it as "use_diff", which the plain Trainer writes in a form of its own
    kept = hooks.setdefault("federatedscope.use_diff", hooks.pop("use_diff", {}))
    if not (kept and trainer.call_is_open):
        kept |= {name: float(value) for name, value in trainer.evaluate(target_data_split_name="val").items()}
    return dict(kept)


class GeneralTorchTrainer(Trainer):
    """A worker's trainer with FederatedScope's routines, hooks, context and config."""

    HOOK_TRIGGER = TRIGGERS
    models_interact_mode = "sequential"
    """How models of one trainer interact; with "parallel" they take turns on the same batch."""

    def __init__(
        self,
        model: nn.Module,
        data: Any = None,
        device: Any = None,
        config: Any = None,
        only_for_eval: bool = False,
        monitor: Any = None,
        *,
        hooks: Iterable[Hook | None] = (),
    ) -> None:
        self._cfg = as_cfg(config)
        refuse_unkept(self._cfg)
        self._told_unknown()
        self._registers_training, self._stepped, self._stepped_last = not only_for_eval, False, False
        self._feeds: list[BatchFeed] = []
        self._draws = ProcessDraws()
        self._shows_own_context, self._resumes = False, False
        self._told_finetuning, self._told_no_loss = False, False
        self.hook_lists: dict[str, Any] = {mode: defaultdict(list) for mode in ("train", "eval", "ft")}
        self.model_nums = 1
        self._is_earlier = is_earlier(self._cfg)
        self._own_context = (EarlierContext if self._is_earlier else Context)(model, self._cfg, data, device)
        self.kept_names = KeptNames(
            self._names_to_keep, self._kept_elsewhere, self._put_name, lambda: self.model,
            self._own_context.names_with_a_life,
        )  # fmt: skip
        self._setup_data_related_var_in_ctx(self._own_context)
        monitor = Monitor(self._cfg) if monitor is None else monitor
        if self._is_earlier or not hasattr(monitor, "eval"):  # until 0.2.1 a trainer measures itself
            self.metric_calculator = metric_calculator(self._cfg)
        self._own_context.merge_from_dict({"monitor": monitor, "models": [model], "mirrored_models": False})
        with preserved_randomness():  # who makes the models of several workers draws them all from one generator
            super().__init__(self._trainer_config(device), model, self._splits(), hooks=hooks)
        if device is None:
            self._own_context.device = self.runtime.device
        self.register_hooks([self.kept_names])
        self.names_of_class = set(vars(self))

    # --- what is made when the trainer is built ---

    def _told_unknown(self) -> None:
        if unknown := unknown_keys(self._cfg):
            logger.warning("keys of the config that only your own hooks read: %s", ", ".join(unknown))

    def _trainer_config(self, device: Any) -> Any:
        accumulates = type(self)._hook_on_batch_backward is GeneralTorchTrainer._hook_on_batch_backward
        root = Path(self._cfg.outdir) / self._cfg.get("expname", "")
        BUILT_IN_FOLDER[str(root)] = self._number = BUILT_IN_FOLDER.get(str(root), 0) + 1
        folder = root / f"trainer_{self._number}"
        config = trainer_config(
            self._cfg, device=device, output_dir=folder, accumulates=accumulates, number=self._number
        )
        _tell_same_draws(config)
        return config

    def _splits(self) -> Splits:
        """Return the data by split as the loop below is to see it, from what `parse_data` gave."""
        ctx = self._own_context
        names = [name.removesuffix("_loader") for name in ctx if name.endswith("_loader")]
        names += [name.removesuffix("_data") for name in ctx if name.endswith("_data") and not name.startswith("num_")]
        self._parsed = {name: ctx.get(name) for name in ctx if is_data(name)}
        data = {}
        for name in dict.fromkeys(names):
            given = ctx.get(f"{name}_loader") if ctx.get(f"{name}_loader") is not None else ctx.get(f"{name}_data")
            if given is not None:
                data[name] = self._opened(given)
                self._refuse_other_batch_size(name, given)
        return Splits(data, data.get("val"), is_dict=True, entries={})

    def _opened(self, given: Any) -> Any:
        if isinstance(given, Mapping) and {"x", "y"} <= given.keys():
            return ArrayDataset(given["x"], given["y"])
        return given

    def _refuse_other_batch_size(self, split: str, given: Any) -> None:
        """Raise if a loader makes other batches than those by which the config counts an epoch."""
        size = int(self._cfg.dataloader.batch_size)
        if isinstance(given, DataLoader) and not _is_of_others(given) and given.batch_size not in {None, size}:
            raise ConfigError(
                f"dataloader.batch_size={size}, by which the batches of an epoch are counted, but the loader of "
                f"{split!r} has batch_size={given.batch_size}. Set cfg.dataloader.batch_size={given.batch_size}."
            )

    def create_train_dataloader(self, dataset: Any) -> Source | DataLoader[Any]:
        """Return where training batches come from; any iterable of batches may be a loader."""
        if dataset is not None and _is_of_others(self._own_context.get("train_loader")):
            ctx = self._own_context
            return LoaderSource(
                dataset, ctx.get("num_train_data"), self.config.batch_size, self.runtime.num_processes, self._draws
            )
        return super().create_train_dataloader(dataset)

    def batch_weight(self, batch: Any) -> float:
        """Count the samples of a batch."""
        return float(size_of_batch(batch))

    def build_optimizer(self) -> Optimizer:
        """Make the optimizer of `train.optimizer`."""
        return builder_for(self._cfg, "get_optimizer")(self.model, **self._cfg.train.optimizer)  # type: ignore[no-any-return]

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Make the schedule of `train.scheduler`; it ticks after every update.

        One whose warm-up only a hook of the class's own knows the length of is made by that hook.
        """
        is_own = type(self)._hook_on_fit_start_init is not GeneralTorchTrainer._hook_on_fit_start_init
        if is_own and _lacks_warmup_steps(self._cfg.train.scheduler):
            return None
        made: LRScheduler | None = self._make_schedule(self.optimizer, self._cfg.train.scheduler)
        return made

    def _make_schedule(self, optimizer: Any, section: Any) -> Any:
        make = get_scheduler if _lacks_warmup_steps(section) else builder_for(self._cfg, "get_scheduler")
        return make(optimizer, **section)  # ours says what is missing

    def make_parts(self, given: Given) -> Parts:
        """Make the parts, with a loop that walks by FederatedScope's routines."""
        return assemble(given, self, make_loop=functools.partial(_RoutineLoop, walk=self._walk_fit))

    def register_default_hooks(self) -> None:
        """Put the bookkeeping of a run into the loop's hook sets and FederatedScope's hooks into its own."""
        self._below = self.parts.ctx
        self._own_context.follow(self._below)
        self._shows_own_context = True
        self._built_with = copy.deepcopy(dict(self._cfg.train.optimizer))
        if not self.setup.only_for_eval:
            self.register_training_hooks(self.hooks[Mode.TRAIN])
        self._register_bookkeeping(self.hooks[Mode.FINETUNE], self.parts.finetuning.steps)
        if self._registers_training:
            self.register_default_hooks_train()
        if self._cfg.finetune.before_eval:
            self.register_default_hooks_ft()
        self.register_default_hooks_eval()

    def register_training_hooks(self, hooks: HookSet) -> None:
        """Put what a run does beside its hooks into a hook set: seed, count, schedule, save, log."""
        self._register_bookkeeping(hooks, self.parts.train_step)
        self.parts.session.register(hooks)

    def _register_bookkeeping(self, hooks: HookSet, steps: TrainStep) -> None:
        steps.register_batch(hooks)
        steps.register_model(hooks)
        hooks.remove(Moment.BATCH_FORWARD, "forward")
        hooks.remove(Moment.BATCH_BACKWARD, "backward")
        hooks.replace(self._clip, Moment.UPDATE, "clip")
        hooks.replace(functools.partial(self._tick, steps), Moment.BATCH_END, "schedule")

    def _clip(self, _: LoopContext) -> None:
        """Limit the gradients to `ctx.grad_clip`."""
        ctx = self._own_context
        if ctx.grad_clip > 0 and not self._below.step.is_own:
            torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.grad_clip)

    def _tick(self, steps: TrainStep, ctx: LoopContext) -> None:
        """Tick the schedule, unless a hook of the user's own has stepped and ticks it itself."""
        if self._stepped_last:
            self._stepped_last = False
            steps.schedule(ctx)

    def register_hooks(self, hooks: Iterable[Hook | None]) -> None:
        """Add hook objects, which watch training and finetuning; a `Monitor` becomes `ctx.monitor`."""
        for hook in hooks:
            if isinstance(hook, Monitor):
                self._own_context.monitor = hook
            elif isinstance(hook, Hook) and not set(hook.modes) <= {Mode.TRAIN, Mode.FINETUNE}:
                raise HookError(
                    f"{hook.name} watches evaluations. Behind FederatedScope's door these have functions as hooks: "
                    "trainer.register_hook_in_eval(function, 'on_batch_end')."
                )
            else:
                super().register_hooks([hook])

    def __setattr__(self, name: str, value: Any) -> None:
        """Let a class have names of its own that are fields of a TrainerConfig, such as `task`."""
        if name in TrainerConfig.fields() and name not in OF_PARTS and not hasattr(type(self), name):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # --- names that FederatedScope's users know ---

    @property
    def accelerator(self) -> Any:
        """The Accelerator that a class has made for itself, which may ask whether it has; ours is `runtime`'s."""
        if "accelerator" not in self.__dict__:
            raise AttributeError("this class has not set an accelerator; the trainer's is trainer.runtime.accelerator")
        return self.__dict__["accelerator"]

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        runtime = self.__dict__.get("runtime")
        if runtime is None or accelerator is not runtime.accelerator:
            self.__dict__["accelerator"] = accelerator

    @property
    def ctx(self) -> Any:
        """The context of FederatedScope's hooks; while the trainer is built, the loop's own."""
        return self._own_context if self._shows_own_context else self.__dict__["_loop_ctx"]

    @ctx.setter
    def ctx(self, ctx: Any) -> None:
        self.__dict__["_loop_ctx"] = ctx

    @property
    def cfg(self) -> Any:
        """FederatedScope's config; assigning another one works out data and lengths again."""
        return self._cfg

    @cfg.setter
    def cfg(self, new_cfg: Any) -> None:
        cfg = as_cfg(new_cfg)
        wanted = trainer_config(
            cfg, device=self.config.device, output_dir=Path(self.config.output_dir), accumulates=True,
            number=self._number,
        )  # fmt: skip
        self._cfg = self._own_context.cfg = cfg
        self._setup_data_related_var_in_ctx(self._own_context)
        self.reconfigure(wanted, self._splits())

    @property
    def hooks_in_train(self) -> Any:
        """The hooks of training: a list of functions for each trigger."""
        return self.hook_lists["train"]

    @hooks_in_train.setter
    def hooks_in_train(self, hooks: Any) -> None:
        self.hook_lists["train"] = hooks

    @property
    def hooks_in_eval(self) -> Any:
        """The hooks of evaluation."""
        return self.hook_lists["eval"]

    @hooks_in_eval.setter
    def hooks_in_eval(self, hooks: Any) -> None:
        self.hook_lists["eval"] = hooks

    @property
    def hooks_in_ft(self) -> Any:
        """The hooks of finetuning."""
        return self.hook_lists["ft"]

    @hooks_in_ft.setter
    def hooks_in_ft(self, hooks: Any) -> None:
        self.hook_lists["ft"] = hooks

    def setup_data(self, ctx: Context) -> None:
        """Prepare `ctx.data` for the config, where it is a `ClientData`; may be overridden."""
        if hasattr(ctx.data, "setup"):
            ctx.data.setup(ctx.cfg)

    def _setup_data_related_var_in_ctx(self, ctx: Context) -> None:
        self.setup_data(ctx)
        ctx.merge_from_dict(self.parse_data(ctx.data))

    def register_default_hooks_train(self) -> None:
        """Register the default hooks of training."""
        self._register_learning(self.register_hook_in_train)

    def register_default_hooks_ft(self) -> None:
        """Register the default hooks of finetuning."""
        self._register_learning(self.register_hook_in_ft)

    def _register_learning(self, register: Callable[..., None]) -> None:
        self._register_precision(register)
        register(self._hook_on_data_parallel_init, "on_fit_start")
        register(self._hook_on_fit_start_init, "on_fit_start")
        register(self._hook_on_fit_start_calculate_model_size, "on_fit_start")
        register(self._hook_on_epoch_start, "on_epoch_start")
        register(self._hook_on_batch_start_init, "on_batch_start")
        register(self._hook_on_batch_forward, "on_batch_forward")
        register(self._hook_on_batch_forward_regularizer, "on_batch_forward")
        register(self._hook_on_batch_forward_flop_count, "on_batch_forward")
        register(self._hook_on_batch_backward, "on_batch_backward")
        register(self._hook_on_batch_end, "on_batch_end")
        register(self._hook_on_fit_end, "on_fit_end")

    def register_default_hooks_eval(self) -> None:
        """Register the default hooks of evaluation."""
        self._register_precision(self.register_hook_in_eval)
        self.register_hook_in_eval(self._hook_on_data_parallel_init, "on_fit_start")
        self.register_hook_in_eval(self._hook_on_fit_start_init, "on_fit_start")
        self.register_hook_in_eval(self._hook_on_epoch_start, "on_epoch_start")
        self.register_hook_in_eval(self._hook_on_batch_start_init, "on_batch_start")
        self.register_hook_in_eval(self._hook_on_batch_forward, "on_batch_forward")
        self.register_hook_in_eval(self._hook_on_batch_end, "on_batch_end")
        self.register_hook_in_eval(self._hook_on_fit_end, "on_fit_end")

    def _register_precision(self, register: Callable[..., None]) -> None:
        """Register the hook that only the releases for language models have, where config or class are of those."""
        is_own = type(self)._hook_on_fit_start_numerical_precision is not _of_language_models
        if is_own or "is_enable_half" in self.cfg.train:
            register(self._hook_on_fit_start_numerical_precision, "on_fit_start")

    def register_hook_in_train(self, new_hook: Any, trigger: str, insert_pos: int | None = None, base_hook: Any = None, insert_mode: str = "before") -> None:  # fmt: skip  # noqa: E501
        """Add a hook to training: at a position (-1: the end), before or after another one, else at the end."""
        self._register_hook(base_hook, self.hooks_in_train, insert_mode, insert_pos, new_hook, trigger)

    def register_hook_in_ft(self, new_hook: Any, trigger: str, insert_pos: int | None = None, base_hook: Any = None, insert_mode: str = "before") -> None:  # fmt: skip  # noqa: E501
        """Add a hook to finetuning, as `register_hook_in_train` does to training."""
        self._register_hook(base_hook, self.hooks_in_ft, insert_mode, insert_pos, new_hook, trigger)

    def register_hook_in_eval(self, new_hook: Any, trigger: str, insert_pos: int | None = None, base_hook: Any = None, insert_mode: str = "before") -> None:  # fmt: skip  # noqa: E501
        """Add a hook to evaluation, as `register_hook_in_train` does to training."""
        self._register_hook(base_hook, self.hooks_in_eval, insert_mode, insert_pos, new_hook, trigger)

    def reset_hook_in_train(self, target_trigger: str, target_hook_name: str | None = None) -> int:
        """Take a hook out of training and return its position; without a name take all out and return -1."""
        return self._reset_hook_in_trigger(self.hooks_in_train, target_hook_name, target_trigger)

    def reset_hook_in_eval(self, target_trigger: str, target_hook_name: str | None = None) -> int:
        """Take a hook out of evaluation, as `reset_hook_in_train` does of training."""
        return self._reset_hook_in_trigger(self.hooks_in_eval, target_hook_name, target_trigger)

    def reset_hook_in_ft(self, target_trigger: str, target_hook_name: str | None = None) -> int:
        """Take a hook out of finetuning, as `reset_hook_in_train` does of training."""
        return self._reset_hook_in_trigger(self.hooks_in_ft, target_hook_name, target_trigger)

    def replace_hook_in_train(self, new_hook: Any, target_trigger: str, target_hook_name: str | None) -> None:
        """Put a hook in the place of another one of training; without a name, of all."""
        position = self.reset_hook_in_train(target_trigger, target_hook_name)
        self.register_hook_in_train(new_hook, target_trigger, insert_pos=position)

    def replace_hook_in_eval(self, new_hook: Any, target_trigger: str, target_hook_name: str | None) -> None:
        """Put a hook in the place of another one of evaluation; without a name, of all."""
        position = self.reset_hook_in_eval(target_trigger, target_hook_name)
        self.register_hook_in_eval(new_hook, target_trigger, insert_pos=position)

    def replace_hook_in_ft(self, new_hook: Any, target_trigger: str, target_hook_name: str | None) -> None:
        """Put a hook in the place of another one of finetuning; without a name, of all."""
        position = self.reset_hook_in_ft(target_trigger, target_hook_name)
        self.register_hook_in_ft(new_hook, target_trigger, insert_pos=position)

    def _register_hook(
        self, base_hook: Any, hooks_dict: Any, insert_mode: str, insert_pos: int | None, new_hook: Any, trigger: str
    ) -> None:
        hooks = _hooks_at(hooks_dict, trigger)
        if not callable(new_hook):
            raise HookError(f"new_hook is a {type(new_hook).__name__}; expected a function of the context, f(ctx)")
        if base_hook is not None and insert_mode not in {"before", "after"}:  # else nobody reads it, as there
            raise HookError(f"insert_mode={insert_mode!r} is not known. Choose from: before, after.")
        if insert_pos is None and base_hook is not None:
            insert_pos = _position_of(base_hook, hooks, trigger) + (insert_mode == "after")
        if insert_pos is None or insert_pos == -1:
            insert_pos = len(hooks)
        if not 0 <= insert_pos <= len(hooks):
            raise HookError(f"insert_pos={insert_pos} at {trigger}; expected 0 to {len(hooks)}, or -1 for the end")
        hooks.insert(insert_pos, new_hook)

    def _reset_hook_in_trigger(self, hooks_dict: Any, target_hook_name: str | None, target_trigger: str) -> int:
        hooks = _hooks_at(hooks_dict, target_trigger)
        if target_hook_name is None:
            hooks_dict[target_trigger] = []  # another list: whoever holds this one keeps its hooks
            return -1
        position = _position_of(target_hook_name, hooks, target_trigger)
        del hooks[position]
        return position

    # --- routines ---

    @use_diff
    def train(self, target_data_split_name: str = "train", hooks_set: Any = None) -> Any:
        """Train for a round; return the number of samples, the parameters that are exchanged, and the metrics."""
        hooks_set = hooks_set or self.hooks_in_train
        self.ctx.check_split(target_data_split_name)
        num_samples = self._run_routine(Mode.TRAIN, hooks_set, target_data_split_name)
        return num_samples, self.get_model_para(), self.ctx.get("eval_metrics", {})

    def evaluate(self, target_data_split_name: str = "test", hooks_set: Any = None) -> Any:  # type: ignore[override]
        """Evaluate on a split; return `{split}_{metric}`, none where there is no such split."""
        hooks_set = hooks_set or self.hooks_in_eval
        if not self.ctx.check_split(target_data_split_name, skip=True):
            self.ctx.eval_metrics = {}
            return self.ctx.eval_metrics
        has_mode_val = RELEASE.has_mode_val and not self._is_earlier
        mode = "val" if target_data_split_name == "val" and has_mode_val else "test"
        with torch.no_grad():
            self._run_routine(Mode(mode), hooks_set, target_data_split_name)
        return self.ctx.eval_metrics

    def finetune(self, target_data_split_name: str = "train", hooks_set: Any = None) -> Any:
        """Train for `finetune.local_update_steps` with an optimizer of its own; the run's counters stay."""
        hooks_set = hooks_set or self.hooks_in_ft
        self.ctx.check_split(target_data_split_name)
        if self._is_earlier:
            tell_finetuning()
        self._tell_length_of_finetuning()
        self._run_routine(Mode.FINETUNE, hooks_set, target_data_split_name)

    def _tell_length_of_finetuning(self) -> None:
        """Say, once, that the installed FederatedScope does not read the length that the config has for finetuning."""
        train, finetune = ((one.local_update_steps, one.batch_or_epoch) for one in (self.cfg.train, self.cfg.finetune))
        if RELEASE.finetunes_by_own_length or self._told_finetuning or train == finetune:
            return
        self._told_finetuning = True
        logger.warning(
            "finetune() is as long as train() is, %s of %s: so it is in the installed FederatedScope, which does not "
            "read finetune.local_update_steps=%s and finetune.batch_or_epoch=%r", *train, *finetune
        )  # fmt: skip

    @lifecycle("routine")
    def _run_routine(self, mode: str, hooks_set: Any, dataset_name: str | None = None) -> Any:
        del mode, dataset_name  # in the context
        if self._is_done():
            return self._result_of_done_round()
        weights = self._weights_to_keep()
        self._fire(hooks_set, "on_fit_start")
        self._go_on(weights)
        self._run_epoch(hooks_set)
        self._fire(hooks_set, "on_fit_end")
        return self.ctx.num_samples

    @lifecycle("epoch")
    def _run_epoch(self, hooks_set: Any) -> None:
        ctx = self.ctx
        first, self._first_batch = self._place_in_round()
        for epoch in range(first, getattr(ctx, f"num_{ctx.cur_split}_epoch")):
            ctx.cur_epoch_i = CtxVar(epoch, Lifecycle.EPOCH)
            self._fire_epoch_start(hooks_set)
            self._run_batch(hooks_set)
            self._first_batch = 0
            self._fire(hooks_set, "on_epoch_end")
            if epoch + 1 < getattr(ctx, f"num_{ctx.cur_split}_epoch"):
                self._finish_step()  # the round's last one is counted, and saved, after the hooks of its end
            if self._is_stopped:
                break

    @lifecycle("batch")
    def _run_batch(self, hooks_set: Any, run_step: int = -1) -> None:
        """Walk the batches of an epoch, or `run_step` more of them, which a hook asks for in the place of one."""
        first, count = (0, run_step) if run_step != -1 else (self._first_batch, self._batches_of_epoch())
        for batch in range(first, count):
            self.ctx.cur_batch_i = CtxVar(batch, Lifecycle.BATCH)
            self._fire(hooks_set, "on_batch_start")
            self._open_step()
            for trigger in ("on_batch_forward", "on_batch_backward", "on_batch_end"):
                self._fire(hooks_set, trigger)
            if batch + 1 < count:
                self._finish_step()  # an epoch's last one is counted, and saved, after the hooks of its end
            if self._is_stopped:
                break

    def _batches_of_epoch(self) -> int:
        ctx = self.ctx
        count = getattr(ctx, f"num_{ctx.cur_split}_batch")
        if ctx.cur_mode in LEARNING and ctx.cur_epoch_i == ctx.num_train_epoch - 1:
            count = min(count, max(1, ctx.num_train_batch_last_epoch))
        return int(count)

    def _fire(self, hooks_set: Any, trigger: str) -> None:
        for hook in list(hooks_set.get(trigger, ())):
            hook(self.ctx)

    def _fire_epoch_start(self, hooks_set: Any) -> None:
        """Begin an epoch; one that a kill broke off has begun already, and only its loader is opened."""
        if self._first_batch == 0:
            self._fire(hooks_set, "on_epoch_start")
        else:
            self._hook_on_epoch_start(self.ctx)

    def run_as_routine(self, mode: str, split: str, body: Callable[[], Any]) -> Any:
        """Run a body as a routine of a mode over a split; what learns is counted, logged and saved."""
        mode = Mode(mode)
        if mode in LEARNING and self._feeds:
            if self.ctx.cur_mode != mode:
                raise HookError(
                    f"a routine of {mode} was begun inside one of {self.ctx.cur_mode}; call it after that one"
                )
            return body()  # an overridden _run_routine that calls this one's
        if self.kept_names.has_saved:
            self.kept_names.put_back(is_last=False)
        with self._tracked(mode, split):
            run = {Mode.TRAIN: self._run_training, Mode.FINETUNE: self._run_finetuning}.get(mode, self._run_evaluation)
            return run(split, body)

    @contextmanager
    def _tracked(self, mode: Mode, split: str) -> Iterator[None]:
        """Enter a mode and a split; leave the variables of a routine around this one as they were."""
        ctx, loader = self.ctx, f"{split}_loader"
        around = ctx.names_with_a_life() if ctx.mode_stack else {}
        lives = {life: set(names) for life, names in ctx.lifecycles.items()}
        before = ctx.get(loader)
        ctx.track_mode(mode)
        ctx.track_split(split)
        try:
            yield
        finally:
            for life in ("batch", "epoch", "routine"):
                ctx.clear(life)
            if isinstance(ctx.get(loader), BatchFeed | EvalFeed):
                ctx[loader] = before  # one that a hook has made stays, and goes on where it is
            ctx.reset_mode()
            ctx.reset_split()
            if around:
                ctx.merge_from_dict(around)
                ctx.lifecycles = lives
            self.discharge_model()

    def _run_training(self, split: str, body: Callable[[], Any]) -> Any:
        session, status, state = self.parts.session, self.parts.status, self.state
        status.refuse_to_train(split)
        self._keep_attributes()
        self._resumes = status.call_is_open
        self._refuse_resume_of_own_loops()
        status.begin_call()
        if not self._resumes:
            state.call_last_samples = None
            if state.position > 0:
                state.epoch_finished = True  # a round begins with the first batch
        left = {one: one.grad for one in self.model.parameters() if one.grad is not None and not self._resumes}
        self._body, self._result = functools.partial(_with_gradients, left, body), None
        with self._draws.kept(), session.locked(), session.training():
            session.walk(None, split)
        session.finish_pushes()
        state.call_end = state.global_step  # also if a loop of the user's own was shorter
        return self._result

    def _run_finetuning(self, split: str, body: Callable[[], Any]) -> Any:
        parts, self._resumes = self.parts, False
        flags: dict[nn.Parameter, bool] = {}
        self._body = functools.partial(_noting_flags, self.model, body, flags)
        source = (
            self.data.train_source(self.setup)
            if split == "train"
            else self.data.open(self.config, self.splits.named(split))
        )
        with self._draws.kept(), parts.hold.held():
            self._draws.put_aside()  # a call of finetune() begins with a seed of its own
            parts.finetuning.run(parts.loop, parts.ctx, self.hooks[Mode.FINETUNE], split, source, parts.weigher.weigh)
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
        return self._result

    def _run_evaluation(self, split: str, body: Callable[[], Any]) -> Any:
        with self.parts.hold.held(), preserved_randomness():
            try:
                return body()
            finally:
                loader = self.ctx.get(f"{split}_loader")
                if isinstance(loader, EvalFeed):
                    loader.close()

    def _walk_fit(self, fit: Fit) -> None:
        """Walk a fit of the loop below by the body of the routine under way."""
        ctx = self.ctx
        loader = self._parsed.get(f"{ctx.cur_split}_loader")
        feed = BatchFeed(self.parts.loop, fit, self._below, loader, self._note_loss_batch, self._draws)
        self._feeds.append(feed)
        self._fit, self._lengths_are_told = fit, False
        has_failed = True
        try:
            try:
                self._result = self._body()
            except StopAsked:
                self._result = ctx.get("num_samples", 0)
            has_failed = False
        finally:
            self._feeds.pop()
            feed.close(has_failed=has_failed)
        if not self._is_done():
            refuse_no_step(feed)

    @property
    def _is_stopped(self) -> bool:
        return bool(self._feeds) and self.ctx.cur_mode in LEARNING and self._fit.state.stop_reason is not None

    def _open_step(self) -> None:
        """Begin a step whose batch no hook has taken: hooks that bring data of their own."""
        if self.ctx.cur_mode not in LEARNING:
            return
        feed, ctx = self._feeds[-1], self.ctx
        self._refuse_others_in_processes(ctx)
        if not feed.is_open:
            feed.open(is_kept=ctx.get(f"{ctx.cur_split}_loader") is feed)

    def _finish_step(self) -> None:
        """Count the step under way; its loss is what the hooks left as `ctx.loss_batch`."""
        if self.ctx.cur_mode not in LEARNING or not self._feeds:
            return
        self._feeds[-1].finish()

    def _note_open_step(self) -> None:
        """Note the loss of the step under way, which is counted later."""
        if self.ctx.cur_mode in LEARNING and self._feeds and self._feeds[-1].is_open:
            self._note_loss_batch()

    def _note_loss_batch(self) -> None:
        ctx = self.ctx
        self._stepped_last, self._stepped = self._stepped_last or self._stepped, False
        if self._below.step.is_loss_noted:
            return
        if "loss_batch" not in ctx:
            self._refuse_update_without_loss()
            self.note_loss(torch.zeros(()))
            return
        loss = torch.as_tensor(ctx.loss_batch).detach()
        if ctx.get("skip_this_batch", False) and not torch.isfinite(loss).all():
            logger.warning(
                "the hooks have skipped a batch whose loss is %s (ctx.skip_this_batch): it changed no weight, and its "
                "loss counts as 0 in the log of the run", float(loss)
            )  # fmt: skip
            loss = torch.zeros_like(loss)
        self.note_loss(loss)

    def _refuse_update_without_loss(self) -> None:
        """Raise if a batch without a loss has changed weights; say, once, that one has not."""
        if self._stepped_last or self._below.step.is_own:
            raise HookError(
                "a batch went by without a loss: no hook at on_batch_forward set ctx.loss_batch, as "
                "_hook_on_batch_forward does."
            )
        if not self._told_no_loss:
            self._told_no_loss = True
            logger.warning(
                "a batch of training went by without a loss (no hook set ctx.loss_batch) and without an update: it "
                "counts as a step, and as 0 in the log of the run"
            )

    def note_loss(self, loss: Any) -> None:
        """Tell the loss of the batch under way, for hooks that do a step in their own way."""
        self._below.step.is_weighed = True  # a step here has one micro-batch, or the default backward weighs it
        note_loss(self._below, loss, "note_loss")

    # --- a round that goes on ---

    def _place_in_round(self) -> tuple[int, int]:
        """Return the epoch and the batch that a round goes on with; at its start 0 and 0."""
        if self.ctx.cur_mode not in LEARNING:
            return 0, 0
        self._tell_lengths()
        if not self._resumes:
            return 0, 0
        done = self.state.global_step - (self.state.call_end - self._total_steps())  # type: ignore[operator]
        epoch, batch = divmod(done, int(self.ctx.num_train_batch))
        return epoch, batch

    def _total_steps(self) -> int:
        ctx = self.ctx
        last = min(ctx.num_train_batch, max(1, ctx.num_train_batch_last_epoch))
        return int((ctx.num_train_epoch - 1) * ctx.num_train_batch + last)

    def _tell_lengths(self) -> None:
        """Let the walk below end where FederatedScope's lengths say, which hooks at on_fit_start may have changed."""
        if self._lengths_are_told:
            return
        self._lengths_are_told = True
        fit, state = self._fit, self._fit.state
        if not self._resumes:
            end = state.global_step + self._total_steps()
            fit.end = End(end)
            if state.call_end is not None:
                state.call_end = end
        fit.batches_in_epoch = int(self.ctx.num_train_batch)

    def _is_done(self) -> bool:
        """Tell whether a round that goes on has no step left: its checkpoint was saved after its last hooks."""
        state = self.state
        return self.ctx.cur_mode == Mode.TRAIN and self._resumes and state.global_step >= (state.call_end or 0)

    def _result_of_done_round(self) -> Any:
        num_samples = self.kept_names.value("num_samples", self.ctx.get("num_samples", 0))
        self.kept_names.forget()
        return num_samples

    def _weights_to_keep(self) -> dict[str, torch.Tensor] | None:
        """Copy the weights of a round that goes on: hooks at on_fit_start begin it once more."""
        if self.ctx.cur_mode != Mode.TRAIN or not self._resumes:
            return None
        return {name: value.clone() for name, value in unwrap(self.model).state_dict().items()}

    def _go_on(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Put back what hooks at on_fit_start have set to the start of a round that is under way."""
        if self.ctx.cur_mode != Mode.TRAIN or not self.kept_names.has_saved:
            return
        if weights is None:
            self.kept_names.forget()
            return
        self.kept_names.put_back(is_last=True)
        unwrap(self.model).load_state_dict(weights)

    def _refuse_resume_of_own_loops(self) -> None:
        if not self._resumes or self.state.global_step == 0:
            return
        own = [name for name in OWN_LOOPS if getattr(type(self), name) is not getattr(GeneralTorchTrainer, name)]
        if own and type(self).__module__ != __name__ and not getattr(self, "goes_on_with_own_loops", False):
            raise DataError(
                f"a round was broken off at step {self.state.global_step}, and {choices(own)} of {type(self).__name__} "
                "would begin it again: a loop of one's own does not know where it was. Train the round anew from the "
                "weights before it, or save at the end of rounds only."
            )

    def _keep_attributes(self) -> None:
        """Keep the optimizers that a subclass has as attributes, and what they train, in every checkpoint."""
        own = {name: value for name, value in vars(self).items() if name not in self.names_of_class}
        shown = SimpleNamespace(**own, model=self.model) if "model" not in own else SimpleNamespace(**own)
        known = {hook.name for hook in self.parts.checkpointing.hooks}
        for name, one in kept_attributes(shown, self.optimizer).items():
            if not any(name in other for other in known):
                self.register_for_checkpointing(f"attribute.{name}", one)

    def _names_to_keep(self) -> dict[str, Any]:
        ctx = self.ctx
        ends_soon = ctx.lifecycles.get("batch", set())
        own = {name: value for name, value in vars(self).items() if name not in self.names_of_class}
        kept = {name: value for name, value in ctx.items() if name not in NOT_KEPT | ends_soon and not is_data(name)}
        return {**kept, **{f"self.{name}": value for name, value in own.items()}}

    def _kept_elsewhere(self) -> dict[str, Any]:
        found = {"@model": self.model, "@optimizer": self.optimizer}
        return found if self.lr_scheduler is None else {**found, "@scheduler": self.lr_scheduler}

    def _put_name(self, name: str, value: Any) -> None:
        own = name.removeprefix("self.")
        is_own = own != name
        of_class = getattr(type(self), own, None) if is_own else None
        is_made_here = callable(of_class) or hasattr(of_class, "__set__")  # a method, a property
        if is_made_here or own in (self.names_of_class if is_own else NOT_KEPT):
            raise CheckpointError(f"the checkpoint has a value for {name!r}, which none holds: the trainer makes it")
        if is_own:
            setattr(self, own, value)
        else:
            dict.__setitem__(self.ctx, name, value)  # a life that it has, it keeps

    # --- FederatedScope's default hooks ---

    def _hook_on_fit_start_numerical_precision(self, ctx: Context) -> None:
        """With `train.is_enable_half`, turn the model to half precision, for good."""
        if self.cfg.train.get("is_enable_half", False):
            ctx.model = ctx.model.half()

    def _hook_on_data_parallel_init(self, ctx: Context) -> None:
        """Do nothing: several devices are several processes here."""

    def _hook_on_fit_start_init(self, ctx: Context) -> None:
        """Set the optimizer and the schedule, new for every routine that learns, and empty sums."""
        ctx.model.to(ctx.device)
        if ctx.cur_mode in LEARNING:
            ctx.optimizer, ctx.scheduler = self._new_optimizer(ctx)
        ctx.loss_batch_total = CtxVar(0.0, Lifecycle.ROUTINE)
        ctx.loss_regular_total = CtxVar(0.0, Lifecycle.ROUTINE)
        ctx.num_samples = CtxVar(0, Lifecycle.ROUTINE)
        ctx.ys_true = CtxVar([], Lifecycle.ROUTINE)
        ctx.ys_prob = CtxVar([], Lifecycle.ROUTINE)

    def _new_optimizer(self, ctx: Context) -> tuple[Any, Any]:
        """Return the trainer's own, which a round begins anew with, or another one for another model or config."""
        is_as_built = ctx.cur_mode == Mode.TRAIN and dict(ctx.cfg.train.optimizer) == self._built_with
        if ctx.model is self.model and is_as_built and not _lacks_warmup_steps(ctx.cfg.train.scheduler):
            return self.optimizer, self.lr_scheduler
        section = ctx.cfg[str(ctx.cur_mode)]
        optimizer = builder_for(ctx.cfg, "get_optimizer")(ctx.model, **section.optimizer)
        return optimizer, self._make_schedule(optimizer, section.scheduler)

    def _hook_on_fit_start_calculate_model_size(self, ctx: Context) -> None:
        """Let the monitor count the parameters, once."""
        if getattr(ctx.monitor, "total_model_size", None) == 0:
            ctx.monitor.track_model_size(ctx.models)

    def _hook_on_epoch_start(self, ctx: Context) -> None:
        """Let the loader of the split begin with its first batch: the one in the context, whoever put it there."""
        if self._is_later_turn(ctx):
            return
        name = f"{ctx.cur_split}_loader"
        if self._is_of_hooks(ctx, name):
            ctx[name] = self._loader_of_hooks(ctx, name)
        elif ctx.cur_mode in LEARNING:
            feed = self._learning_feed()
            if self._first_batch_of(ctx) == 0:
                feed.reset()
            ctx[name] = feed
        elif isinstance(ctx.get(name), ReIterator):
            ctx[name].reset()
        else:
            ctx[name] = self._eval_feed(ctx.cur_split, ctx.get(name))

    def _is_of_hooks(self, ctx: Context, name: str) -> bool:
        """Tell whether a loader is another one than that of the trainer's data."""
        found = ctx.get(name)
        if isinstance(found, BatchFeed | EvalFeed):
            return False
        loader = found.loader if isinstance(found, ReIterator) else found
        if loader is None:
            self._refuse_data_of_hooks(ctx)
            return False
        return loader is not self._parsed.get(name)

    def _refuse_data_of_hooks(self, ctx: Context) -> None:
        name = f"{ctx.cur_split}_data"
        if ctx.get(name) is not self._parsed.get(name):
            raise DataError(
                f"ctx.{name} was assigned after the trainer was built, whose batches are made of what parse_data() "
                f"gave. Assign a loader instead: ctx.{ctx.cur_split}_loader = DataLoader(...)."
            )

    def _loader_of_hooks(self, ctx: Context, name: str) -> ReIterator:
        """Return a loader that hooks have put into the context, at its first batch."""
        if ctx.cur_mode in LEARNING:
            self._tell_lengths()
            self._refuse_to_share_or_join(name)
        if isinstance(ctx[name], ReIterator):
            ctx[name].reset()
            return ctx[name]  # type: ignore[no-any-return]
        return ReIterator(ctx[name])

    def _refuse_to_share_or_join(self, name: str) -> None:
        """Raise if batches of a hook's own loader would be shared out, or weighed in updates of several batches."""
        processes, batches = self.runtime.num_processes, int(self.cfg.grad.grad_accum_count)
        if processes > 1:
            raise DataError(
                f"a hook has put another loader into ctx.{name}, whose batches are not shared out among {processes} "
                "processes. Give its data to the trainer in parse_data(), or train with one process."
            )
        if batches > 1 and self.config.global_batch_size != self.config.batch_size:
            raise DataError(
                f"a hook has put another loader into ctx.{name}, whose batches cannot be weighed in updates of "
                f"{batches} batches. Set grad.grad_accum_count=1, or write _hook_on_batch_backward yourself."
            )

    def _first_batch_of(self, ctx: Context) -> int:  # noqa: ARG002 - read by loops of one's own as well
        return int(self.__dict__.get("_first_batch", 0))

    def _learning_feed(self) -> BatchFeed:
        if not self._feeds:
            raise HookError(
                "_hook_on_epoch_start was called outside of a routine. An overridden _run_routine calls "
                "super()._run_routine(...), or has @lifecycle(LIFECYCLE.ROUTINE) before it."
            )
        self._tell_lengths()
        self._refuse_others_in_processes(self.ctx)
        return self._feeds[-1]

    def _eval_feed(self, split: str, loader: Any) -> ReIterator:
        loader = loader.loader if isinstance(loader, BatchFeed) else loader  # in a round, that of the round
        if _is_of_others(loader):
            return ReIterator(loader)
        data = self.splits.data.get(split, loader)
        return EvalFeed(self.data.eval_source(self.config, data), loader)

    def _hook_on_batch_start_init(self, ctx: Context) -> None:
        """Take the next batch of the loader."""
        if self._is_later_turn(ctx):
            return
        loader = ctx[f"{ctx.cur_split}_loader"]
        if ctx.cur_mode in LEARNING and self._feeds and loader is not self._feeds[-1]:
            self._refuse_lost_place(ctx)
            self._feeds[-1].open(is_kept=False)  # a step with a batch of a hook's own loader
        ctx.data_batch = CtxVar(next(loader), Lifecycle.BATCH)

    def _is_later_turn(self, ctx: Context) -> bool:
        """Tell whether a model before this one has begun the epoch, or taken the batch, for all of them."""
        return self.models_interact_mode == "parallel" and ctx.get("cur_model_idx", 0) != 0

    def _refuse_lost_place(self, ctx: Context) -> None:
        """Raise if a round goes on in the middle of an epoch whose loader is a hook's own."""
        if self._resumes and self._feeds[-1].num_steps == 0 and self._first_batch_of(ctx) > 0:
            raise DataError(
                f"a round was broken off in the middle of an epoch, and ctx.{ctx.cur_split}_loader is a hook's own: no "
                "checkpoint knows its place. Train the round anew from the weights before it, or save at the end of "
                "rounds only."
            )

    def _hook_on_batch_forward(self, ctx: Context) -> None:
        """Run `ctx.model` on the batch and compute its loss with `ctx.criterion`."""
        if self.runtime.num_processes > 1:
            SyncedBatchNorm.skips = self._is_filler(ctx)
        with self.runtime.autocast()():
            pred, label, loss = self._forward(ctx)
        ctx.y_true, ctx.y_prob = CtxVar(label, Lifecycle.BATCH), CtxVar(pred, Lifecycle.BATCH)
        ctx.loss_batch = CtxVar(loss, Lifecycle.BATCH)
        ctx.batch_size = CtxVar(len(label), Lifecycle.BATCH)

    def _forward(self, ctx: Context) -> tuple[Any, Any, torch.Tensor]:
        batch = ctx.data_batch
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise DataError(
                f"a batch is a {type(batch).__name__}; _hook_on_batch_forward expects two tensors, inputs and labels. "
                "Override it for batches of another form."
            )
        x, label = (one.to(ctx.device) for one in batch)
        pred = ctx.model(x)
        label = label.unsqueeze(0) if label.ndim == 0 else label
        return pred, label, ctx.criterion(pred, label)

    def _is_filler(self, ctx: Context) -> bool:
        """Tell whether the batch under way is another process's, and is run for its sake."""
        feed = self._feeds[-1] if ctx.cur_mode in LEARNING and self._feeds else ctx.get(f"{ctx.cur_split}_loader")
        return bool(getattr(feed, "is_filler", False))

    def _hook_on_batch_forward_regularizer(self, ctx: Context) -> None:
        """Add `regularizer.mu` times the regulariser to what is trained on."""
        ctx.loss_regular = CtxVar(self.cfg.regularizer.mu * ctx.regularizer(ctx), Lifecycle.BATCH)
        ctx.loss_task = CtxVar(ctx.loss_batch + ctx.loss_regular, Lifecycle.BATCH)

    def _hook_on_batch_forward_flop_count(self, ctx: Context) -> None:
        """With `eval.count_flops`, count the operations of a forward pass, once, and of the samples so far."""
        monitor = ctx.monitor
        if not hasattr(monitor, "total_flops"):
            return
        if self.cfg.eval.count_flops and monitor.flops_per_sample == 0:
            self._count_operations(ctx)
        monitor.total_flops += monitor.flops_per_sample * ctx.batch_size

    def _count_operations(self, ctx: Context) -> None:
        """Count the operations of the batch's forward pass; where its form is another one, tell it, once."""
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad(), preserved_randomness():
                self._forward(ctx)
        except (DataError, TypeError, AttributeError, ValueError, RuntimeError, LookupError) as error:
            logger.warning(
                "operations are not counted: a forward pass by model(x), with a batch of inputs x and labels, failed "
                "(%s). Override _hook_on_batch_forward_flop_count, or set eval.count_flops=False.", error
            )  # fmt: skip
            ctx.monitor.flops_per_sample = -1
            return
        each = 2 * (1 if self.model_nums == 1 or not ctx.mirrored_models else 1 / self.model_nums)
        ctx.monitor.track_avg_flops(
            counter.get_total_flops() / each, ctx.batch_size
        )  # a multiplication and an addition

    def _hook_on_batch_backward(self, ctx: Context) -> None:
        """Update `ctx.model` by `ctx.loss_task`: zero_grad, backward, clip to `ctx.grad_clip`, step, tick."""
        if self._is_own(ctx):
            self._update(ctx)
            return
        ctx.optimizer.zero_grad()
        ctx.loss_task.backward()
        if ctx.grad_clip > 0:
            torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.grad_clip)
        ctx.optimizer.step()
        if ctx.get("scheduler") is not None:
            ctx.scheduler.step()

    def _is_own(self, ctx: Context) -> bool:
        """Tell whether the trainer's own model and optimizer are the ones in the context."""
        found = getattr(ctx.optimizer, "optimizer", ctx.optimizer)
        return ctx.cur_mode == Mode.TRAIN and ctx.model is self.model and found is self.optimizer

    def _update(self, ctx: Context) -> None:
        """Do a step with the trainer's own parts: weighed, joined over processes, guarded against NaN."""
        parts, step = self.parts, self._below.step
        if step.batch_in_window == 0:
            parts.optimization.zero_grad()
        step.outputs = {"loss": ctx.loss_batch.detach(), "logits": ctx.get("y_prob")}
        step.loss, step.loss_task = ctx.loss_batch, ctx.loss_task
        parts.train_step.backward(self._below)
        fit = parts.loop.current
        for call in fit.routine.backward_calls if fit is not None else ():
            call(self._below)
        parts.loop.run_update()
        self._stepped = True

    def _refuse_others_in_processes(self, ctx: Context) -> None:
        """Raise, on several processes, if the context has optimizers whose gradients would stay each process's own."""
        if self.runtime.num_processes == 1:
            return
        others = [name for name, value in ctx.items() if isinstance(value, Optimizer) and value is not self.optimizer]
        if others or ctx.model is not self.model:
            raise ConfigError(
                f"a hook has put another model or optimizer into the context ({choices(others) or 'model'}), whose "
                f"gradients are not joined over {self.runtime.num_processes} processes. Train it with one process."
            )

    def _hook_on_batch_end(self, ctx: Context) -> None:
        """Add the batch to the sums, and keep its labels and outputs for the metrics."""
        if self._is_filler(ctx):
            return
        ctx.num_samples += ctx.batch_size
        ctx.loss_batch_total += ctx.loss_batch.item() * ctx.batch_size
        ctx.loss_regular_total += float(ctx.get("loss_regular", 0.0))
        ctx.ys_true.append(ctx.y_true.detach().cpu().numpy())
        ctx.ys_prob.append(ctx.y_prob.detach().float().cpu().numpy())

    def _hook_on_fit_end(self, ctx: Context) -> None:
        """Measure the routine: `ctx.eval_metrics` has `{split}_{metric}`."""
        true, prob = (np.concatenate(parts) if parts else np.empty(0) for parts in (ctx.ys_true, ctx.ys_prob))
        if self.runtime.num_processes > 1:
            true, prob = self._joined(ctx, true, prob)
        ctx.ys_true, ctx.ys_prob = CtxVar(true, Lifecycle.ROUTINE), CtxVar(prob, Lifecycle.ROUTINE)
        ctx.eval_metrics = (ctx.monitor if hasattr(ctx.monitor, "eval") else self.metric_calculator).eval(ctx)

    def _joined(self, ctx: Context, true: Any, prob: Any) -> tuple[Any, Any]:
        """Put what the processes have counted together."""
        names = ("num_samples", "loss_batch_total", "loss_regular_total")
        own = ([float(ctx[name]) for name in names], true, prob)
        gathered = self.runtime.processes.gather(own)
        for number, name in enumerate(names):
            total = sum(sums[number] for sums, _, _ in gathered)
            dict.__setitem__(ctx, name, int(total) if name == "num_samples" else total)
        parts = [(labels, outputs) for _, labels, outputs in gathered if len(labels)]
        return np.concatenate([labels for labels, _ in parts]), np.concatenate([outputs for _, outputs in parts])

    # --- exchange ---

    def _param_filter(
        self, state_dict: Mapping[str, Any], filter_keywords: Iterable[str] | None = None
    ) -> dict[str, Any]:
        """Return what of a state is exchanged: without names that have one of the keywords in them."""
        if self.cfg.federate.method in {"local", "global"}:
            return {}
        kept_at_home = self.cfg.personalization.local_param if filter_keywords is None else filter_keywords
        is_filtered = RELEASE.filters_untrained and not self._is_earlier
        shares_all = self.cfg.personalization.share_non_trainable_para or not is_filtered
        trained = set(self.ctx.trainable_para_names)
        return {
            name: value
            for name, value in state_dict.items()
            if (shares_all or name in trained) and not any(word in name for word in kept_at_home)
        }

    def get_model_para(self) -> Any:
        """Return copies, on the CPU, of the parameters of `ctx.model` that are exchanged."""
        model = unwrap(self.ctx.model)
        return give_parameters(model, list(self._param_filter(model.state_dict())))

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        """Take parameters over into `ctx.model`, as tensors, lists or numbers; only those that are exchanged."""
        model = unwrap(self.ctx.model)
        take_parameters(model, model_parameters, list(self._param_filter(model.state_dict())), strict=strict)

    def save_model(self, path: str | os.PathLike[str], cur_round: int = -1) -> None:
        """Write the weights of `ctx.model`, and the round they are of, to one file of plain tensors."""
        tensors = round_tensors(unwrap(self.ctx.model), cur_round)
        self.runtime.processes.on_main(lambda: write_round(Path(path), tensors))

    def load_model(self, path: str | os.PathLike[str]) -> int:
        """Read what `save_model` wrote into `ctx.model`; return the round."""
        return load_round(Path(path), unwrap(self.ctx.model))

    def discharge_model(self) -> None:
        """Move the model to the CPU, unless workers share it."""
        if not self.cfg.federate.share_local_model:
            self.ctx.model.to(torch.device("cpu"))

    def evaluate_while_training(self) -> dict[str, float]:
        """Evaluate on "val" when a config of ours asks for it; the mean loss is "loss"."""
        found = {name.removeprefix("val_"): float(value) for name, value in self.evaluate("val").items()}
        return {**found, "loss": found.get("avg_loss", float("nan"))}

    def print_trainer_meta_info(self) -> str:
        """Return what a person wants to know: the model, what is exchanged, what stays, and the hooks."""
        state = unwrap(self.ctx.model).state_dict()
        exchanged = list(self._param_filter(state))
        text = [
            f"model: {type(self.ctx.model).__name__}",
            f"exchanged: {', '.join(exchanged) or '-'}",
            f"local: {', '.join(name for name in state if name not in set(exchanged)) or '-'}",
        ]
        for name, hooks in self.hook_lists.items():
            each = hooks if isinstance(hooks, list) else [hooks]
            text += [f"hooks of {name}:", *(_shown(one) for one in each)]
        return "\n".join(text)


_of_language_models = GeneralTorchTrainer._hook_on_fit_start_numerical_precision


class _RoutineLoop(Loop):
    """A loop whose epochs and batches are walked by FederatedScope's routines."""

    def __init__(self, *given: Any, walk: Callable[[Fit], None], **named: Any) -> None:
        super().__init__(*given, **named)
        self._walk_fit = walk

    def fit(self, fit: Fit, at_start: Callable[[], None] | None = None) -> None:
        """Walk a learning routine to its end; `at_start` is called after the hooks of FIT_START."""
        with self.entered(fit):
            if at_start is not None:
                at_start()
            self._walk_fit(fit)


def _tell_same_draws(config: TrainerConfig) -> None:
    """Say that a trainer draws the numbers of another one, if workers were given folders of their own but no seeds."""
    first = FOLDER_OF_SEED.setdefault(config.seed, str(config.output_dir))
    if first != str(config.output_dir):
        logger.warning(
            "the trainer in %s has the seed of the one in %s: both draw the same random numbers (noise, dropout, order "
            "of samples). If they are workers of one course, give each its own cfg.seed, or all of them one outdir.",
            config.output_dir, first
        )  # fmt: skip


def _lacks_warmup_steps(scheduler: Mapping[str, Any]) -> bool:
    """Tell whether a schedule of the config cannot be made from it alone."""
    return scheduler["type"] in WARMUPS and "warmup_steps" not in scheduler


def _with_gradients(left: Mapping[nn.Parameter, torch.Tensor], body: Callable[[], Any]) -> Any:
    """Run a body with the gradients that the hooks of the round before have left: one's own may add to them."""
    for parameter, gradient in left.items():
        parameter.grad = gradient
    return body()


def _noting_flags(model: nn.Module, body: Callable[[], Any], changed: dict[nn.Parameter, bool]) -> Any:
    """Run a body; note the parameters that its hooks have frozen or set free, which stay so."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    result = body()
    changed |= {one: one.requires_grad for one, flag in before.items() if one.requires_grad != flag}
    return result


def _hooks_at(hooks_dict: Any, trigger: str) -> list[Any]:
    if trigger not in TRIGGERS:
        raise HookError(f"{trigger!r} is not a trigger.{suggestion(trigger, TRIGGERS)} There are: {choices(TRIGGERS)}.")
    found: list[Any] = hooks_dict[trigger]
    return found


def _position_of(hook: Any, hooks: list[Any], trigger: str) -> int:
    """Return where a hook is, given as the function or by its name."""
    names = [_name(one) for one in hooks]
    wanted = hook if isinstance(hook, str) else _name(hook)
    if not isinstance(hook, str) and hook in hooks:
        return hooks.index(hook)
    if wanted not in names:
        raise HookError(
            f"no hook {wanted!r} at {trigger}.{suggestion(wanted, names)} There are: {choices(names) or 'none'}."
        )
    return names.index(wanted)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _shown(hooks: Mapping[str, list[Any]]) -> str:
    return "\n".join(f"{trigger}: {', '.join(map(_name, hooks.get(trigger, ()))) or '-'}" for trigger in TRIGGERS)


def _is_of_others(loader: Any) -> bool:
    """Tell whether a loader is an iterable of batches that is neither torch's nor keeps its own place.

    One that is its own dataset, as a sampler of graphs is, makes each batch itself: torch counts it as one sample.
    """
    is_of_torch = isinstance(loader, DataLoader) and loader.dataset is not loader
    is_known = is_of_torch or (is_stream(loader) and hasattr(loader, "state_dict"))
    return loader is not None and not is_known


def is_data(name: str) -> bool:
    """Tell whether a name of the context is one of a split's data or loader."""
    return name.endswith(("_loader", "_data"))

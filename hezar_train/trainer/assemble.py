"""Assemble: from what a trainer was given to its parts, each complete when it is made.

    Trainer --- parts ---+-- data            TrainData      datasets opened, the plan of the run
                         +-- setup           RunSetup       what the run is about (another one: `reconfigure`)
                         +-- model_runner    ModelRunner    the model's forward and loss
                         +-- optimization    Optimization   norm, clipping, the optimizer's step, the schedule's tick
                         +-- train_step      TrainStep      the default hooks of a training step
                         +-- finetuning      Finetuning     the same for finetuning
                         +-- loop            Loop           for epoch, for batch
                         +-- evaluator       Evaluator      evaluate, predict
                         +-- checkpointing   Checkpointing  find, restore, save
                         +-- status          RunStatus      where a run or a call of train() begins and ends
                         +-- actions         RunActions     log, save, evaluate, update the best
                         +-- session         RunSession     lock, signals, open files, the walk

A part gets what it needs and never the trainer: methods that a user may override come to it as `Verbs`, and what makes
loaders, the schedule and the weight of a batch as functions. For users' code alone the context knows the trainer,
weakly, and the metrics handler does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from hezar_train.checkpoint import base_of, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data import form_of
from hezar_train.errors import ConfigError, a_kind, choices
from hezar_train.events import EventStorage
from hezar_train.hooks import StopFlag
from hezar_train.loop import Context, HookSet, Loop, Verbs
from hezar_train.metrics import MetricsHandler
from hezar_train.runtime import DataParallel, Runtime, data_parallel_of, logger
from hezar_train.runtime.data_parallel import leave_out_of_batch_norm
from hezar_train.state import TrainerState
from hezar_train.terminal import Progress
from hezar_train.trainer.checkpointing import Checkpointing
from hezar_train.trainer.context_names import context_names
from hezar_train.trainer.data_setup import RunSetup, TrainData
from hezar_train.trainer.evaluator import Evaluator
from hezar_train.trainer.finetuning import Finetuning
from hezar_train.trainer.loss_weight import Weigher, counts_labels, label_counter
from hezar_train.trainer.model_runner import DeviceHold, ModelRunner, Regularizer, build_criterion, find_regularizer
from hezar_train.trainer.optimizer_setup import FirstSettings
from hezar_train.trainer.own_code import OwnSteps, weighed_backward
from hezar_train.trainer.packed_model import refuse_lone_samples, refuse_unpackable
from hezar_train.trainer.run_actions import RunActions
from hezar_train.trainer.run_files import RunFolder
from hezar_train.trainer.run_status import RunStatus
from hezar_train.trainer.session import RunSession
from hezar_train.trainer.train_step import Optimization, TrainStep, UpdateLog
from hezar_train.types import Mode

__all__ = [
    "Given",
    "Parts",
    "as_module",
    "assemble",
    "in_order",
    "preprocessor_for",
    "refuse_missing",
    "refused_on_meta",
]


@dataclass(frozen=True)
class Given:
    """What the parts of a trainer are made from."""

    setup: RunSetup
    runtime: Runtime
    folder: RunFolder
    data: TrainData
    model: nn.Module
    optimizer: torch.optim.Optimizer
    first: FirstSettings
    """The optimizer's settings before its schedule, and the schedule."""
    handler: MetricsHandler
    preprocessor: Any
    verbs: Verbs
    batch_weight: Callable[[Any], float] | None
    """The user's own count of what a batch's loss is the mean of; None: samples or labels, as task and model say."""
    facts: Mapping[str, Any]
    """What decides a run beside config, plan and data."""
    csv_file: str
    config_file: str
    ctx: Context
    state: TrainerState
    """The counters, which what was overridden may have kept since."""
    own_steps: OwnSteps
    """What sees the user's own steps of an optimizer."""
    shows_samples: bool
    """Whether a report may fetch samples by their numbers: the user does not order them otherwise."""


@dataclass(frozen=True)
class Parts:
    """The parts of a trainer."""

    setup: RunSetup
    data: TrainData
    runtime: Runtime
    folder: RunFolder
    model: nn.Module
    handler: MetricsHandler
    verbs: Verbs
    ctx: Context
    hooks: dict[Mode, HookSet]
    """The hooks of each mode."""
    own_steps: OwnSteps
    state: TrainerState
    storage: EventStorage
    criterion: Callable[..., torch.Tensor] | None
    regularizer: Regularizer | None
    weigher: Weigher
    hold: DeviceHold
    data_parallel: DataParallel
    flag: StopFlag
    model_runner: ModelRunner
    optimization: Optimization
    first: FirstSettings
    train_step: TrainStep
    finetuning: Finetuning
    loop: Loop
    evaluator: Evaluator
    checkpointing: Checkpointing
    status: RunStatus
    actions: RunActions
    session: RunSession
    count_labels: Callable[[Any], float] | None
    """Counts the labels of a batch, where the loss is a mean over labels."""


LoopMaker = Callable[..., Loop]
StatusMaker = Callable[..., RunStatus]
SessionMaker = Callable[..., RunSession]


def assemble(
    given: Given,
    trainer: Any,
    make_loop: LoopMaker = Loop,
    make_status: StatusMaker = RunStatus,
    make_session: SessionMaker = RunSession,
) -> Parts:
    """Make the parts. A trainer of several models has another loop, another status and another session."""
    setup, runtime, model, verbs, config = given.setup, given.runtime, given.model, given.verbs, given.setup.config
    state = given.state
    state.update(total_epochs=config.num_epochs, metric_for_best_checkpoint=setup.best_key)
    storage, ctx, own_steps = EventStorage(), given.ctx, given.own_steps
    hooks = {Mode.TRAIN: HookSet(), Mode.FINETUNE: HookSet()}
    flag = StopFlag(waits_for_others=runtime.num_processes > 1)
    progress = Progress(setup.plan.total_steps, setup.plan.num_epochs, enabled=False)
    log = UpdateLog(storage)
    hold = DeviceHold(model, runtime.device, offloads=config.offload_after_routine)
    criterion, regularizer = build_criterion(config.criterion), find_regularizer(config.regularizer)
    if regularizer is not None and config.regularizer_mu == 0 and not setup.only_for_eval:
        _tell_of_idle_regularizer(config)
    weigher, count_labels = _weigher(given)
    if config.uses_lengths and not setup.only_for_eval:
        _refuse_model(given, weighs_labels=given.batch_weight is not None or count_labels is not None)
    data_parallel = data_parallel_of(model, runtime, config.gradient_compression)
    joined = data_parallel if runtime.num_processes > 1 else None
    optimization = Optimization(
        given.optimizer, given.first.schedule, runtime.scaler, config.max_grad_norm, joined, own_steps
    )
    train_step = TrainStep(verbs, runtime, config.seed, state, optimization, log)
    finetuning = Finetuning(config, runtime, model, verbs, optimization, data_parallel, own_steps)
    exchanging = nullcontext if joined is None else joined.exchanging
    weighs = partial(weighed_backward, runtime.accelerator, ctx, runtime.num_processes, exchanging)
    loop = make_loop(
        ctx, model, hooks[Mode.TRAIN], verbs, weigher.weigh, data_parallel.start_over, weighs,
        None if joined is None else leave_out_of_batch_norm,
    )  # fmt: skip
    evaluator = Evaluator(
        setup, runtime, model, given.handler, verbs, ctx=ctx, state=state, loop=loop, data=given.data, weigher=weigher,
        data_parallel=data_parallel, hold=hold, flag=flag, progress=progress, preprocessor=given.preprocessor,
        shows_samples=given.shows_samples,
    )  # fmt: skip
    hooks |= {Mode.VAL: evaluator.hooks, Mode.TEST: evaluator.hooks}
    checkpointing = Checkpointing(
        setup, runtime, given.folder, model, optimization, state, storage, given.preprocessor,
        {"units of the loss": _units(given, count_labels), **given.facts},
    )  # fmt: skip
    status = make_status(setup, runtime, given.folder, state, optimization, given.first, given.handler)
    actions = RunActions(
        setup, runtime, given.folder, state, storage, ctx, optimization, evaluator, checkpointing, progress, verbs
    )
    session = make_session(
        setup=setup, runtime=runtime, folder=given.folder, model=model, state=state, storage=storage, loop=loop,
        train_step=train_step, checkpointing=checkpointing, status=status, actions=actions,
        weigher=weigher, handler=given.handler, hold=hold, flag=flag, progress=progress,
        log_of_updates=log, verbs=verbs, csv_file=given.csv_file, config_file=given.config_file,
    )  # fmt: skip
    parts = Parts(
        setup=setup, data=given.data, runtime=runtime, folder=given.folder, model=model, handler=given.handler,
        verbs=verbs, ctx=ctx, hooks=hooks, own_steps=own_steps, state=state, storage=storage, criterion=criterion,
        regularizer=regularizer,
        weigher=weigher, hold=hold, data_parallel=data_parallel, flag=flag,
        model_runner=ModelRunner(model, criterion), optimization=optimization, first=given.first,
        train_step=train_step, finetuning=finetuning, loop=loop, evaluator=evaluator, checkpointing=checkpointing,
        status=status, actions=actions, session=session, count_labels=count_labels,
    )  # fmt: skip
    ctx.share(context_names(parts, trainer))
    return parts


def _weigher(given: Given) -> tuple[Weigher, Callable[[Any], float] | None]:
    """Return what weighs a window, and how labels are counted where the loss is a mean over them."""
    config, bare = given.setup.config, base_of(given.model)  # adapters change nothing in what its loss is a mean of
    by_labels = counts_labels(config.loss_weight, config.task, bare)
    count_labels = label_counter(config.task, bare) if by_labels else None
    return Weigher(given.batch_weight or count_labels, given.runtime.processes), count_labels


def _refuse_model(given: Given, *, weighs_labels: bool) -> None:
    """Raise if the model cannot be trained on batches that lengths decide."""
    setup, config = given.setup, given.setup.config
    if config.counts_tokens:
        refuse_lone_samples(given.model)
    if config.packing:
        lengths = setup.source.by_length.lengths  # type: ignore[attr-defined]
        refuse_unpackable(given.model, given.runtime, lengths, weighs_labels=weighs_labels)


def _units(given: Given, count_labels: object) -> str:
    if given.batch_weight is not None:
        return "your batch_weight()"
    return "samples" if count_labels is None else "labels"


def in_order(config: Any, model: Any) -> tuple[Any, Any]:
    """Accept config and model in either order."""
    return (model, config) if isinstance(config, nn.Module) else (config, model)


def _tell_of_idle_regularizer(config: TrainerConfig) -> None:
    """Warn of a regulariser that would be computed and add nothing."""
    logger.warning(
        "regularizer=%r adds nothing to the loss: its factor, regularizer_mu, is 0. Set it, such as "
        "regularizer_mu=0.1, or leave regularizer out.",
        config.regularizer,
    )


def refuse_missing(*, needs_data: bool, **needed: Any) -> None:
    """Raise naming what was not given, or is of another kind; one that only evaluates needs no training data."""
    missing = [name for name, value in needed.items() if value is None]
    if missing and (needs_data or missing != ["train_dataset"]):
        raise ConfigError(
            "Trainer needs config, model (passed, or made by an overridden build_model()) and train_dataset; missing: "
            f"{choices(missing)}. Pass {' and '.join(f'{name}=...' for name in missing)}"
        )
    if not isinstance(needed["config"], TrainerConfig):
        raise ConfigError(
            f"config is {a_kind(needed['config'])}; expected a TrainerConfig. Make one: "
            "TrainerConfig(output_dir=..., ...), or TrainerConfig.load(file)."
        )


def as_module(model: Any, config: TrainerConfig) -> nn.Module:
    """Return the model if it is one, with values or with a source that they come from."""
    if not isinstance(model, nn.Module):
        if isinstance(model, list | tuple):
            raise ConfigError(f"model is {form_of(model)}; expected one torch.nn.Module. {_instead_of(model)}")
        shown = f"{model!r}, {a_kind(model)}" if isinstance(model, str | int | float) else a_kind(model)
        raise ConfigError(f"model is {shown}; expected a torch.nn.Module. {_instead_of(model)}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"the model's {name} has no shape yet, as its layer is lazy. Call the model once with a batch before "
                "it is given to the trainer."
            )
        if parameter.is_meta and not (config.init_weights_from or config.resume_from_checkpoint):
            raise refused_on_meta(name)
    return model


def refused_on_meta(name: str) -> ConfigError:
    """Return the error of a model without values that nothing would give any."""
    return ConfigError(
        f"the model's {name} is on the device 'meta', where weights have no values. Build the model on 'cpu', or say "
        "where its weights are: init_weights_from."
    )


def _instead_of(model: Any) -> str:
    """Say what to pass instead of something that is no module."""
    if isinstance(model, type):
        return f"Make one: {model.__name__}(...)"
    if isinstance(model, list | tuple) and model and all(isinstance(one, nn.Module) for one in model):
        given = f"that_{type(model).__name__}"
        if len(model) == 1:
            return f"Pass the {type(model[0]).__name__} alone: model={given}[0]."
        return f"Join them, torch.nn.Sequential(*{given}), or pass one of them, {given}[0]."
    if callable(model):
        return "If it makes the model, pass what it returns; if it is the model, write it as forward() of a Module."
    if hasattr(model, "__getitem__") and not isinstance(model, str):
        return "Are two arguments in each other's place? Pass them by name: model=..., train_dataset=..."
    return "Build or load the model first, and pass that."


def preprocessor_for(model: nn.Module, given: Any) -> Any:
    """Choose the preprocessor to keep with the model: the one given, else the model's own."""
    bare = unwrap(model)
    if given is None:
        own = getattr(bare, "preprocessor", None)
        return None if isinstance(own, nn.Module) else own  # a layer of that name is a part of the model
    if getattr(bare, "preprocessor", given) is None:
        bare.preprocessor = given
    return given

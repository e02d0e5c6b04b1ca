"""The names that a config's values may have, and what to say of a field's name that is none of ours.

The tuples are copies of what the installed torch and accelerate offer, so that a config is checked without importing
either; a test compares them. A dotted path ("package.module.Class") is never checked here: it is imported when the
trainer is built. An unknown field is answered with the nearest spelling, or with our word for another trainer's; the
decorator `tells_unknown_fields` makes a dataclass report it in one `ConfigError`, together with every other problem.
What another trainer's schedules are here, with their values, is in `other_schedules`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from hezar_train.config.other_schedules import answer_to
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.types import LRSchedulerType

__all__ = [
    "CURVES",
    "DEVICES",
    "FOREIGN_FIELDS",
    "LOSSES",
    "NEEDY_LOSSES",
    "OPTIMIZERS",
    "OPTIMIZER_ALIASES",
    "OWN_TRACKERS",
    "SCHEDULERS",
    "SCHEDULER_ALIASES",
    "SCHEDULER_CLASSES",
    "SHORT_SCHEDULERS",
    "SINGLE_DEVICES",
    "TRACKERS",
    "VALUES_OF_OTHERS",
    "is_dotted_path",
    "is_importable",
    "optimizer_name",
    "precision_name",
    "scheduler_name",
    "tells_unknown_fields",
    "unknown_field",
]

P = ParamSpec("P")
T = TypeVar("T")

OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "LBFGS",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)
"""Every optimizer of torch.optim; configs may write them in any case."""

OPTIMIZER_ALIASES = {"sdg": "sgd"}
"""Old spellings that still work, with a warning."""

SCHEDULERS = (
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LambdaLR",
    "LinearLR",
    "MultiStepLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
)
"""Every schedule of torch.optim.lr_scheduler; configs may write them in any case."""

SHORT_SCHEDULERS = tuple(str(name) for name in LRSchedulerType)
"""The short names, which are the ones to list in a message."""

SCHEDULER_CLASSES = {
    "TriangularScheduler": "triangular",
    "InvTriangularScheduler": "inv_triangular",
    "TriangularMtmScheduler": "inv_triangular",
    "TriangularExpScheduler": "triangular_exp",
    "Triangular2Scheduler": "triangular2",
    "Triangular2ExpScheduler": "triangular2_exp",
    "WarmRestartScheduler": "warm_restarts",
    "LinearDecayScheduler": "linear_decay",
    "LogDecayScheduler": "log_decay",
    "ExponentialDecayScheduler": "exponential_decay",
    "StepScheduler": "step_decay",
    "EpochSetScheduler": "epoch_set",
    "DecayToEpoch": "decay_to_epoch",
    "DecayWhenEpoch": "decay_when_epoch",
    "DecayWhenAcc": "decay_when_acc",
    "TriangularDecayWhenAcc": "triangular_decay_when_acc",
    "WarmupCosineLR": "warmup_cosine",
    "WarmupCosineAnnealingLR": "warmup_cosine_annealing",
    "WarmupStepLR": "warmup_step",
    "WarmupMultiStepLR": "warmup_multi_step",
    "WarmupExponentialLR": "warmup_exponential",
    "WarmupPolynomialLR": "warmup_polynomial",
}
"""The classes of lernomatic and LiBai, each with the short name of the same schedule."""

CURVES = (
    *dict.fromkeys(SCHEDULER_CLASSES.values()), "warmup_linear", "warmup_noam", "warmup_stable_decay", "inverse_sqrt",
    "cosine_with_restarts",
)  # fmt: skip
"""The short names of the schedules that a momentum can follow too."""

SCHEDULER_ALIASES = {"cosine_anealing": "cosine_annealing"}
"""Old spellings that still work, with a warning."""

_SCHEDULER_SPELLINGS = {
    **{name.lower(): name for name in (*SCHEDULERS, *SHORT_SCHEDULERS)},
    **{name.lower(): short for name, short in SCHEDULER_CLASSES.items()},
    **SCHEDULER_ALIASES,
    "wsd": "warmup_stable_decay",
}

LOSSES = (
    "BCELoss",
    "BCEWithLogitsLoss",
    "CrossEntropyLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "MSELoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
)
"""Every loss of torch.nn that can be made without arguments, of logits and labels."""

NEEDY_LOSSES = (
    "AdaptiveLogSoftmaxWithLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "GaussianNLLLoss",
    "LinearCrossEntropyLoss",
    "MarginRankingLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
)
"""Every other loss of torch.nn: known, never offered, and refused where it is made, which says what it lacks."""

OWN_TRACKERS = frozenset({"tensorboard"})
"""Of the trackers those that are files of the run, written here; others may be services."""
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Every tracker of Accelerate."""

DEVICES = ("cpu", "cuda", "hpu", "mlu", "mps", "musa", "npu", "sdaa", "xla", "xpu")
"""Kinds of device that can train; "cuda:1" names one of several."""

SINGLE_DEVICES = ("cpu", "mps")
"""Of which a machine has one, whatever number torch takes."""

FOREIGN_FIELDS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "activation_checkpoint": "gradient_checkpointing",
    "amp": "mixed_precision",
    "before_eval": "finetune_before_eval",
    "best_res_update_round_wise_key": "metric_for_best_model",
    "bf16": "mixed_precision",
    "checkpoint_dir": "checkpoints_dir",
    "checkpointer": "save_steps",
    "clip_grad_max_norm": "max_grad_norm",
    "clip_grad_norm": "max_grad_norm",
    "data_para_dids": "distributed",
    "dataloader_drop_last": "drop_last",
    "dataloader_num_workers": "num_dataloader_workers",
    "default_root_dir": "output_dir",
    "delta": "early_stopping_threshold",
    "device_id": "device",
    "disp_freq": "log_steps",
    "early_stop": "early_stopping_patience",
    "early_stopping": "early_stopping_patience",
    "epoch_linear": "finetune_steps",
    "epochs": "num_epochs",
    "eval_freq": "eval_steps",
    "eval_iter": "max_eval_batches",
    "eval_metric": "metric_for_best_model",
    "eval_period": "eval_steps",
    "eval_strategy": "eval_steps",
    "evaluation_strategy": "eval_steps",
    "fedprox_mu": "regularizer_mu",
    "fp16": "mixed_precision",
    "freeze_param": "finetune_freeze_param",
    "frequency": "lr_scheduling_steps",
    "full_determinism": "deterministic",
    "grad_accum_count": "gradient_accumulation_steps",
    "grad_clip": "max_grad_norm",
    "gradient_clip_val": "max_grad_norm",
    "graph": "compile",
    "improve_indicator_mode": "early_stopping_mode",
    "interval": "lr_scheduling_steps",
    "load_weight": "init_weights_from",
    "log_every_n_steps": "log_steps",
    "log_period": "log_steps",
    "logging_dir": "logs_dir",
    "logging_steps": "log_steps",
    "loss_fn": "criterion",
    "loss_function": "criterion",
    "lr": "learning_rate",
    "lr_linear": "finetune_learning_rate",
    "loss": "criterion",
    "lr_scheduler_type": "lr_scheduler",
    "min_delta": "early_stopping_threshold",
    "max_epochs": "num_epochs",
    "max_to_keep": "save_total_limit",
    "monitor": "metric_for_best_model",
    "mtm_scheduler": "momentum_scheduler",
    "mu": "regularizer_mu",
    "no_cuda": "use_cpu",
    "num_accumulation_steps": "gradient_accumulation_steps",
    "num_train_epochs": "num_epochs",
    "num_warmup_steps": "warmup_steps",
    "num_workers": "num_dataloader_workers",
    "optim": "optimizer",
    "optim_function": "optimizer",
    "patience": "early_stopping_patience",
    "per_device_eval_batch_size": "eval_batch_size",
    "per_device_train_batch_size": "batch_size",
    "precision": "mixed_precision",
    "print_every": "log_steps",
    "regular_weight": "regularizer_mu",
    "report_to": "trackers",
    "restore_from": "resume_from_checkpoint",
    "resume": "resume_from_checkpoint",
    "save_every": "save_steps",
    "save_strategy": "save_steps",
    "save_to": "output_dir",
    "scheduler": "lr_scheduler",
    "share_local_model": "offload_after_routine",
    "shuffle": "dataloader_shuffle",
    "simple_tuning": "finetune_reinit",
    "stop_when_acc": "stop_when",
    "test_batch_size": "eval_batch_size",
    "test_micro_batch_size": "eval_batch_size",
    "torch_compile": "compile",
    "train_epoch": "num_epochs",
    "train_iter": "max_steps",
    "train_micro_batch_size": "batch_size",
    "val_batch_size": "eval_batch_size",
    "val_check_interval": "eval_steps",
    "val_freq": "eval_steps",
    "warmup": "warmup_steps",
    "warmup_epochs": "warmup_steps",
    "warmup_iter": "warmup_steps",
    "warmup_iters": "warmup_steps",
    "warmup_ratio": "warmup_steps",
    "wd": "weight_decay",
}
"""Other trainers' fields, each with ours for the same purpose."""

LEFT_OUT = ""
CHOICES_OF_OTHERS: dict[str, dict[Any, str]] = {
    "eval_strategy": {"no": "do_evaluate=False", "epoch": LEFT_OUT, "steps": "eval_steps=N"},
    "evaluation_strategy": {"no": "do_evaluate=False", "epoch": LEFT_OUT, "steps": "eval_steps=N"},
    "save_strategy": {"no": "save_enabled=False", "epoch": LEFT_OUT, "steps": "save_steps=N"},
    "logging_strategy": {"epoch": LEFT_OUT, "steps": "log_steps=N"},
    "fp16": {True: "mixed_precision='fp16'", False: LEFT_OUT},
    "bf16": {True: "mixed_precision='bf16'", False: LEFT_OUT},
}
"""Other trainers' fields with a few values, each value with what it is here, or what need not be said."""

VALUES_OF_OTHERS: dict[str, dict[str, str]] = {
    "sharding": dict.fromkeys(
        ["fsdp", "fsdp1", "fsdp2", "full_shard", "fully_shard", "hsdp", "hybrid_shard", "zero3", "true"], "full"
    )
    | dict.fromkeys(["no", "no_shard", "ddp", "false"], "none"),
    "mixed_precision": dict.fromkeys(["float16", "16-mixed", "16", "half", "amp"], "fp16")
    | dict.fromkeys(["bfloat16", "bf16-mixed"], "bf16")
    | dict.fromkeys(["fp32", "float32", "32", "32-true", "none", "off", "false"], "no"),
}
"""Other words for a field's values, each with ours."""

_OF_THE_TRAINER = "It is given to the Trainer (in a recipe: to Recipe), not to the config."
_OF_THE_LAUNCH = (
    "One GPU is taken by itself, or named: device=cuda:0 (or cpu). Several are one process each, asked for at the "
    "start: `hezar-train train RECIPE --num-processes N`."
)
_OF_A_TRAINER_CLASS = "Hooks are made in build_hooks() of a Trainer class of your own: Recipe(..., trainer_class=...)."
_IN_A_RECIPE = (
    "In a recipe they are made in build_hooks() of a Trainer class of its own: Recipe(..., trainer_class=...)."
)
_OF_METRICS = (
    "Here it is metrics_handler, an object with a method compute_metrics(predictions, labels); metrics by name go to "
    "the config: task=..., metrics=[...]."
)
ELSEWHERE = {
    **dict.fromkeys(
        ("model", "train_dataset", "eval_dataset", "data_collator", "preprocessor", "metrics_handler", "dataset"),
        _OF_THE_TRAINER,
    ),
    **dict.fromkeys(("tokenizer", "processing_class"), f"{_OF_THE_TRAINER} It is called preprocessor there."),
    "hooks": f"In Python they are given to the Trainer: hooks=[...]. {_IN_A_RECIPE}",
    "callbacks": f"They are called hooks here. In Python they are given to the Trainer: hooks=[...]. {_IN_A_RECIPE}",
    "compute_metrics": f"{_OF_THE_TRAINER} {_OF_METRICS}",
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_nodes", "strategy", "accelerator"), _OF_THE_LAUNCH),
    **dict.fromkeys(
        ("wandb_project", "project_name"),
        "A tracker's project has the name of the run's folder: trackers=[wandb], output_dir=runs/NAME.",
    ),
    **dict.fromkeys(
        ("log_level", "log_level_replica", "logging_level", "verbose", "verbosity"),
        "How much is said is for Python's logging, of the logger 'hezar_train': in Python, once the trainer is built, "
        "logging.getLogger('hezar_train').setLevel('WARNING').",
    ),
    "load_best_model_at_end": "The best checkpoint is kept, by metric_for_best_model: evaluate RUN --checkpoint best.",
    "trainer": (
        "The file is the config of a recipe, whose fields stand in a section 'trainer'; expected the fields alone. "
        "Move them to the left margin and take 'trainer:' out, or train the recipe: `hezar-train train RECIPE`."
    ),
}
"""Other trainers' settings that are none of a config here, each with what to do instead."""


def is_dotted_path(name: str) -> bool:
    """Say whether `name` is an import path rather than a name of torch."""
    first, *rest = name.split(".")
    return bool(rest) and all(part.isidentifier() for part in (first, *rest))


def is_importable(value: Any) -> bool:
    """Say whether `value` is a function or class, which a file can name by its dotted path."""
    return callable(value) and hasattr(value, "__qualname__")


def optimizer_name(given: str | None) -> str:
    """Return the lower-case name of an optimizer with old spellings resolved, or the dotted path as given."""
    if given is None:
        return "adam"
    if is_dotted_path(given):
        return str(given)
    return OPTIMIZER_ALIASES.get(given.lower(), given.lower())


def scheduler_name(given: str | None) -> str | None:
    """Return a schedule's short name or torch class name, rightly spelled, or the dotted path as given."""
    if given is None or is_dotted_path(given):
        return None if given is None else str(given)
    return _SCHEDULER_SPELLINGS.get(given.lower(), str(given))


def precision_name(given: str | None) -> str:
    """Return "no", "bf16", "fp16" or "fp8"; None and "full" mean "no", which is fp32."""
    return "no" if given in (None, "full") else str(given)


FEW = 12


def unknown_field(name: str, known: Collection[str], given: Mapping[str, Any] | None = None) -> str:
    """Tell that `name` is no field, and which one was probably meant; `given` has its value, and those beside it."""
    given = given or {}
    told = _of_others(name, known, given) or _of_parts(name, known, given) or suggestion(name, known).strip()
    everything = "`hezar-train config explain` lists all fields."
    if len(known) <= FEW:
        everything = f"There are: {choices(known)}."
    return f"{name!r} is not a field. {told or everything}"


def _of_others(name: str, known: Collection[str], given: Mapping[str, Any]) -> str | None:
    """Say what another trainer's field is here, as it was given; None for other names."""
    ours = FOREIGN_FIELDS.get(name)
    if name in given and (answer := _answer_to_choice(name, given[name])) is not None:
        return answer
    if ours in known and name in given and (answer := answer_to(name, given)) is not None:
        return answer
    return f"Here it is called {ours!r}." if ours in known else ELSEWHERE.get(name)


PAIRS = {"betas": "[0.9, 0.999]"}
"""Keyword arguments of optimizers that are no single number, and what they usually are."""


def _of_parts(name: str, known: Collection[str], given: Mapping[str, Any]) -> str | None:
    """Say how a part of a field, given as `field.part`, is written; None for other names."""
    whole, _, part = name.rpartition(".")
    value = given.get(name)
    shown = PAIRS.get(part) or (str(value) if type(value) in (int, float) else "VALUE")
    if whole.endswith("kwargs") and whole in known:
        return f"All of them go together into {whole}, on the command line in quotes: '{whole}={{{part}: {shown}}}'."
    if whole and FOREIGN_FIELDS.get(part) in known:
        return f"Here it is called {FOREIGN_FIELDS[part]!r}."
    if whole and part not in known and f"{whole}_kwargs" in known:
        return (
            f"Keyword arguments of the {whole} go together into {whole}_kwargs, on the command line in quotes: "
            f"'{whole}_kwargs={{{part}: {shown}}}'."
        )
    return None


def _answer_to_choice(name: str, value: Any) -> str | None:
    """Say what another trainer's field of a few values is here; None for other fields and values."""
    value = getattr(value, "value", value)
    ours = CHOICES_OF_OTHERS.get(name, {}).get(value) if isinstance(value, str | bool) else None
    if ours == LEFT_OUT:
        return f"{name}={value!r} is what is done here when nothing is set: leave it out."
    return None if ours is None else f"{name}={value!r} is {ours} here."


def tells_unknown_fields(cls: type[T]) -> type[T]:
    """Make a dataclass collect unknown keywords and a missing first field with the problems of all others.

    The class must check itself in `__post_init__` by raising `ConfigError`, and refuse None in its first field.
    """
    init: Callable[..., None] = cls.__init__
    first, *_ = known = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def __init__(self: T, *args: Any, **given: Any) -> None:  # noqa: N807
        unknown = [unknown_field(name, known, given) for name in given if name not in known]
        values = {name: value for name, value in given.items() if name in known}
        if not args:
            values.setdefault(first, None)
        try:
            init(self, *args, **values)
        except ConfigError as error:
            in_section = any(
                isinstance(given[name], Mapping) and first in given[name] for name in set(given) - set(known)
            )
            missing = f"{first} is missing" if in_section else None  # it is there, in the wrong place
            others = [each for each in error.problems if missing is None or not each.startswith(missing)]
            raise ConfigError([*unknown, *others]) from None
        if unknown:
            raise ConfigError(unknown)

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


EVALUATED = frozenset({"eval_dataset", "dataset"})
ARGUMENTS_OF_OTHERS: dict[str, Set[str]] = {
    "args": {"config"}, "training_args": {"config"}, "tokenizer": {"preprocessor"},
    "processing_class": {"preprocessor"}, "callbacks": {"hooks"}, "collate_fn": {"data_collator"},
    "collator": {"data_collator"}, "train_data": {"train_dataset"}, "train_dataloader": {"train_dataset"},
    "train_dataloaders": {"train_dataset"}, "train_loader": {"train_dataset"}, "scheduler": {"lr_scheduler"},
    "output_dir": {"path"}, "save_directory": {"path"}, "repo_name": {"repo_id"}, "hub_model_id": {"repo_id"},
} | dict.fromkeys(
    [
        "data", "dataset", "dataloader", "dataloaders", "eval_data", "eval_dataset", "eval_dataloader", "test_data",
        "test_dataset", "test_dataloader", "val_dataset", "val_dataloaders", "val_loader", "valid_dataset",
        "validation_dataset",
    ],
    EVALUATED,
)  # fmt: skip
"""Other trainers' arguments, each with ours for the same purpose, of which a call takes one."""


class UnknownArgumentError(ConfigError, TypeError):
    """An argument that is not known."""


class MissingArgumentError(ConfigError, TypeError):
    """An argument without a default that was not given."""


def tells_unknown_arguments(cls: type[T]) -> type[T]:
    """Make a class refuse unknown keywords with the one that was probably meant; fields of the config are named so."""
    init: Callable[..., None] = cls.__init__
    parameters = inspect.signature(init).parameters.values()
    known = [one.name for one in parameters if one.name != "self"]
    needed = [one.name for one in parameters if one.default is one.empty and one.name != "self"]

    @functools.wraps(init)
    def __init__(self: T, *args: Any, **given: Any) -> None:  # noqa: N807
        if unknown := [name for name in given if name not in known]:
            raise UnknownArgumentError([_unknown_argument(cls.__name__, name, known, given[name]) for name in unknown])
        if missing := [name for name in needed if name in known[len(args) :] and name not in given]:
            raise MissingArgumentError([_missing_argument(cls.__name__, name) for name in missing])
        init(self, *args, **given)

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


def tells_unknown_keywords(method: Callable[P, T]) -> Callable[P, T]:
    """Make a verb of the trainer refuse unknown keywords with the one, or the field of the config, that is meant."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def verb(*args: P.args, **given: P.kwargs) -> T:
        if unknown := [name for name in given if name not in known]:
            owner = f"{method.__name__}()"
            raise UnknownArgumentError([_unknown_argument(owner, name, known, given[name]) for name in unknown])
        return method(*args, **given)

    return verb


def _missing_argument(owner: str, name: str) -> str:
    made = "TrainerConfig(output_dir=..., ...)" if name == "config" else "..."
    return f"{owner} was given no {name}, which it needs. Pass one: {owner}({name}={made}, ...)"


def _unknown_argument(owner: str, name: str, known: Collection[str], value: Any) -> str:
    sentence = f"{name!r} is not an argument of {owner}."
    if name == "compute_metrics":
        return f"{sentence} {_OF_METRICS}"
    if name in {"hook", "hooks", "callback", "callbacks"} and "hooks" not in known:
        return f"{sentence} {_OF_A_TRAINER_CLASS}"
    if name == "metric_key_prefix":
        return f"{sentence} Results are named by their set: evaluate({{'name': dataset}}) gives 'name.loss'."
    if ours := ARGUMENTS_OF_OTHERS.get(name, set()) & set(known):
        return f"{sentence} Here it is called {min(ours)!r}."
    if (field := FOREIGN_FIELDS.get(name, name)) in FIELDS_TAKEN_FOR_ARGUMENTS:
        shown = f"={value!r}" if isinstance(value, bool | int | float | str) else ""
        return f"{sentence} It is a field of the config: {field}{shown}."
    return f"{sentence}{suggestion(name, known)} There are: {', '.join(known)}."


FIELDS_TAKEN_FOR_ARGUMENTS = frozenset(
    {"criterion", "optimizer", "lr_scheduler", "learning_rate", "batch_size", "num_epochs", "max_steps", "output_dir"}
    | {"metrics", "task", "seed", "device", "resume_from_checkpoint", "eval_batch_size", "do_evaluate"}
)

"""The names a config may use without importing torch, and how each is normalised.

The tuples are copies of what the installed torch and accelerate offer; a test compares them. A dotted path
("package.module.Class") is never checked here: it is imported when the trainer is built.
"""

from __future__ import annotations

from typing import Any

from hezar_train.types import LRSchedulerType

__all__ = [
    "CURVES",
    "DEVICES",
    "LOSSES",
    "OPTIMIZERS",
    "OPTIMIZER_ALIASES",
    "SCHEDULERS",
    "SCHEDULER_ALIASES",
    "SCHEDULER_CLASSES",
    "SHORT_SCHEDULERS",
    "TRACKERS",
    "is_dotted_path",
    "is_importable",
    "optimizer_name",
    "precision_name",
    "scheduler_name",
]

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

CURVES = (*dict.fromkeys(SCHEDULER_CLASSES.values()), "warmup_linear", "warmup_noam")
"""The short names of the schedules that a momentum can follow too."""

SCHEDULER_ALIASES = {"cosine_anealing": "cosine_annealing"}
"""Old spellings that still work, with a warning."""

LOSSES = (
    "AdaptiveLogSoftmaxWithLoss",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CTCLoss",
    "CosineEmbeddingLoss",
    "CrossEntropyLoss",
    "GaussianNLLLoss",
    "HingeEmbeddingLoss",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "LinearCrossEntropyLoss",
    "MSELoss",
    "MarginRankingLoss",
    "MultiLabelMarginLoss",
    "MultiLabelSoftMarginLoss",
    "MultiMarginLoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "SmoothL1Loss",
    "SoftMarginLoss",
    "TripletMarginLoss",
    "TripletMarginWithDistanceLoss",
)
"""Every loss of torch.nn."""

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Every tracker of Accelerate."""

DEVICES = ("cpu", "cuda", "hpu", "mlu", "mps", "musa", "npu", "sdaa", "xla", "xpu")
"""Kinds of device that can train; "cuda:1" names one of several."""


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


_SCHEDULER_SPELLINGS = {
    **{name.lower(): name for name in (*SCHEDULERS, *SHORT_SCHEDULERS)},
    **{name.lower(): short for name, short in SCHEDULER_CLASSES.items()},
    **SCHEDULER_ALIASES,
}


def scheduler_name(given: str | None) -> str | None:
    """Return a schedule's short name or torch class name, rightly spelled, or the dotted path as given."""
    if given is None or is_dotted_path(given):
        return None if given is None else str(given)
    return _SCHEDULER_SPELLINGS.get(given.lower(), str(given))


def precision_name(given: str | None) -> str:
    """Return "no", "bf16", "fp16" or "fp8"; None and "full" mean "no", which is fp32."""
    return "no" if given in (None, "full") else str(given)

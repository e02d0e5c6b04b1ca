"""The fields of a config in groups, one dataclass per owner, each of which checks its own fields and no others.

`TrainerConfig` inherits from all of them, in the order in which they stand here. Beneath each field stands the sentence
that explains it to users: in the help of its flag, in `hezar-train config explain` and in docs/reference/config.md,
where a group's docstring is the heading. A group's `problems` yields a sentence for each mistake and never raises.
`MetricConfig` is one metric as a config asks for it; what the metric computes is not known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

from hezar_train.config.checks import (
    doubled_warmup,
    flag,
    folder_of_run,
    instead_of,
    keywords,
    known_name,
    number,
    one_of,
    parts_of_names,
    path,
    steps,
    text,
    whole,
    wrong_type,
)
from hezar_train.config.files import to_plain
from hezar_train.config.names import (
    CURVES,
    DEVICES,
    LOSSES,
    NEEDY_LOSSES,
    OPTIMIZERS,
    SCHEDULERS,
    SHORT_SCHEDULERS,
    SINGLE_DEVICES,
    TRACKERS,
    optimizer_name,
    scheduler_name,
    tells_unknown_fields,
)
from hezar_train.config.other_schedules import answer_to_dict, answer_to_name
from hezar_train.errors import ConfigError, choices, nearest, suggestion
from hezar_train.types import LRSchedulerType, OptimizerType, PrecisionType, TaskType

__all__ = [
    "BATCH_OR_EPOCH",
    "HUB_CARD_KEYS",
    "HUB_STRATEGIES",
    "STOPPING_MODES",
    "CheckpointFields",
    "DataFields",
    "EvaluationFields",
    "FinetuneFields",
    "Goal",
    "HardwareFields",
    "HubFields",
    "LogFields",
    "MetricConfig",
    "OptimizerFields",
    "RegularizerFields",
    "RoundFields",
    "RunFields",
    "ScheduleFields",
    "StoppingFields",
    "metric_config_of",
    "metric_to_plain",
    "metrics_from_plain",
    "problems_of_metric",
]

SHARDINGS = ("none", "full")
COMPRESSIONS = ("fp16", "bf16")
EVAL_OTHERWISE = "leave it out to evaluate at epoch ends only, or set do_evaluate=False to evaluate never"
SAVE_OTHERWISE = "leave it out to save at epoch ends only, or set save_enabled=False to save never"
A_DEVICE = "the name of a device (str), such as 'cuda' or 'cpu'"
KNOWN_OPTIMIZERS = tuple(name.lower() for name in OPTIMIZERS)
SHOWN_OPTIMIZERS = choices(name for name in OPTIMIZERS if name != "LBFGS")  # which is always refused

FIELD_OF_KEYWORD = {"lr": "learning_rate", "weight_decay": "weight_decay"}
"""Keywords of an optimizer that the config has a field for, where alone they are given."""

SHOWN_SCHEDULERS = f"{choices(SHORT_SCHEDULERS)}, any class of torch.optim.lr_scheduler"

MOST_THREADS, MOST_WORKERS = 1024, 512
MOST_TOKENS = 1 << 40
MOST_BOOTSTRAP_SAMPLES, MOST_DECIMALS = 1_000_000, 100
"""A config may come from anywhere: more would end the program, or the machine."""

MARKS_OF_HEZAR = ("name", "config_type")
"""Fields by which Hezar knows the kind of a config."""

STOPPING_MODES = ("best", "mean", "window")
"""What an evaluation is compared with: the best so far, the mean of the last ones, or the one so many before."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
GOAL = re.compile(rf"\s*(?P<metric>[^\s<>=]+)\s*(?P<comparison><=|>=)\s*(?P<value>{NUMBER})\s*", re.ASCII)
FORM_OF_GOAL = "text such as 'accuracy >= 0.9' or 'evaluation.loss <= 0.1'"

BATCH_OR_EPOCH = ("batch", "epoch")
HUB_STRATEGIES = ("end", "best", "every_save", "all_checkpoints")
HUB_CARD_KEYS = ("base_model", "datasets", "language", "license", "license_link", "license_name", "tags")
REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
REPO_OF_ADDRESS = re.compile(rf"(?:https?://[^/]+/|hub://)({REPO_ID.pattern})(?:/.*)?")


@dataclass
class RunFields:
    """The run as a whole: where, what for, how long, and from which start."""

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
        if type(self.resume_from_checkpoint) is int:
            yield (
                "resume_from_checkpoint: expected True (the newest checkpoint) or the folder of one, got int "
                f"{self.resume_from_checkpoint}; {self._instead_of_step(self.resume_from_checkpoint)}"
            )
        elif not isinstance(self.resume_from_checkpoint, bool):
            yield from path("resume_from_checkpoint", self.resume_from_checkpoint, optional=True)
        yield from flag("accept_changes", self.accept_changes)

    def _instead_of_step(self, step: int) -> str:
        """Say what to resume from instead of the number of a step."""
        if step < 1:
            return "write True for the newest, or leave it out to start afresh"
        below = getattr(self, "checkpoints_dir", "checkpoints")
        is_odd = [*path("output_dir", self.output_dir), *path("checkpoints_dir", below)]
        folder = "the run's folder of checkpoints" if is_odd else os.path.join(self.output_dir, below)
        return f"for step {step} write the path of its folder in {folder}, whose name is the step in eight digits"

    def _problems_of_output_dir(self) -> Iterator[str]:
        if self.output_dir is None:
            yield "output_dir is missing: name the folder of the run, for example output_dir='runs/first'"
        else:
            yield from path("output_dir", self.output_dir)


@dataclass(kw_only=True)
class HardwareFields:
    """The machine: device, processes, precision."""

    device: str | None = None
    """Where to train, such as "cpu" or "cuda:1"; honoured or refused. None: what is found."""

    use_cpu: bool = False
    """Train on the CPU even where there is an accelerator."""

    num_threads: int | None = None
    """Threads of the CPU that each process computes with; the last bits depend on it. None: as torch finds it."""

    distributed: bool = False
    """True: refuse to run as a single process. False: whatever the launcher made."""

    mixed_precision: str | PrecisionType | None = None
    """"bf16", "fp16" or "fp8"; None, "no" and "full" mean fp32. Refused where the device cannot."""

    compile: bool = False
    """Compile the model with torch.compile; the results are the same up to rounding, checkpoints are unchanged."""

    gradient_checkpointing: bool = False
    """Compute activations again in the backward to save memory, as the model can, or block by block."""

    sharding: str = "none"
    """"full": each process keeps a share of weights, gradients and optimizer state (FSDP2); "none": a copy of all."""

    sharding_group_size: int | None = None
    """Neighbouring processes that share one copy of the model; other groups have their own (HSDP). None: all share."""

    sharding_offload: bool = False
    """Keep the shares in the host's memory and step them there; the device gets a block when it computes with it."""

    sync_batchnorm: bool = False
    """Let batch normalisation see the batches of all processes together."""

    gradient_compression: str | None = None
    """"fp16" or "bf16" (NCCL only): processes send gradients so; the training then depends on their number."""

    collective_timeout_seconds: int | float | None = None
    """The most that a process waits for the others; then it ends and names who is missing. None: torch's own limit."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("compile", self.compile)
        yield from one_of("sharding", self.sharding, SHARDINGS, optional=False)
        if self.sharding == "full" and self.mixed_precision in {"fp16", "fp8"}:
            asked = str(self.mixed_precision)
            yield f"mixed_precision={asked!r} cannot be used with sharding='full'. Use 'bf16' or 'no'."
        checks = {
            "sharding_group_size": whole("sharding_group_size", self.sharding_group_size, least=2, optional=True),
            "sharding_offload": flag("sharding_offload", self.sharding_offload),
        }
        for name, check in checks.items():
            found, value = list(check), getattr(self, name)
            if not found and value and self.sharding == "none":
                found = [f"{name}={value!r} does nothing with sharding='none'. Set sharding='full', or leave it out."]
            yield from found
        yield from flag("sync_batchnorm", self.sync_batchnorm)
        yield from one_of("gradient_compression", self.gradient_compression, COMPRESSIONS)
        if self.gradient_compression is not None and self.sharding == "full":
            yield (
                f"gradient_compression={self.gradient_compression!r} cannot be used with sharding='full', where FSDP2 "
                "exchanges gradients itself. Leave one of the two out."
            )
        yield from number(
            "collective_timeout_seconds",
            self.collective_timeout_seconds,
            above=0,
            optional=True,
            without="torch's own limit",
        )
        yield from flag("gradient_checkpointing", self.gradient_checkpointing)
        yield from self._problems_of_device()
        yield from flag("use_cpu", self.use_cpu)
        if self.use_cpu is True and isinstance(self.device, str) and self.device.split(":")[0] != "cpu":
            yield f"use_cpu=True contradicts device={self.device!r}: give one of the two"
        yield from whole("num_threads", self.num_threads, least=1, most=MOST_THREADS, optional=True)
        yield from flag("distributed", self.distributed)
        yield from one_of("mixed_precision", self.mixed_precision, [*PrecisionType])

    def _problems_of_device(self) -> Iterator[str]:
        if self.device is None:
            return
        if not isinstance(self.device, str):
            written = ""
            if type(self.device) is int:
                meant = "cpu" if self.device < 0 else f"cuda:{self.device} for the GPU of that number"
                written = f"; write {meant}, or leave device out to take what is there"
            yield f"{wrong_type('device', self.device, A_DEVICE)}{written}"
            return
        if self.device == "None":
            yield (
                "device='None' is a text. To take what is there, leave it out, or write null in YAML and on the "
                f"command line (None without quotes in Python). Else choose from: {choices(DEVICES)}."
            )
            return
        kind, colon, number = self.device.partition(":")
        if kind not in DEVICES:
            yield (
                f"device={self.device!r} cannot train. Choose from: {choices(DEVICES)}, with a number for one of "
                f"several ('cuda:1').{instead_of(kind) or suggestion('cuda' if kind == 'gpu' else kind, DEVICES)}"
            )
        elif colon and not (number.isascii() and number.isdigit()):
            yield f"device={self.device!r}: expected a number after the colon, such as '{kind}:0'"
        elif colon and kind in SINGLE_DEVICES and int(number) != 0:
            yield f"device={self.device!r}: there is one {kind} device. Use {kind!r}."


@dataclass(kw_only=True)
class DataFields:
    """The data: batches, their order, and who fetches them."""

    batch_size: int = 1
    """Samples in one step, on each process."""

    eval_batch_size: int | None = None
    """Samples in one evaluation batch, on each process. None: `batch_size`."""

    global_batch_size: int | None = None
    """Samples in one update over all processes, at most `batch_size` in a step on each. None: from the fields below."""

    gradient_accumulation_steps: int = 1
    """Steps whose gradients make one update; the result is that of one batch as large as all of them."""

    dataloader_shuffle: bool = True
    """Train in a shuffled order, which the seed and the epoch fix; evaluation is never shuffled."""

    reshuffle_each_epoch: bool = True
    """Shuffle each epoch differently. False: every epoch has the order of the first."""

    drop_last: bool = False
    """Leave out the samples at the end of an epoch that do not fill an update."""

    num_dataloader_workers: int = 0
    """Processes that fetch samples ahead; 0: the training process does. The samples are the same."""

    group_by_length: bool = False
    """Make each update of samples of similar lengths, so that little is padded; which ones is still shuffled."""

    global_batch_tokens: int | None = None
    """Tokens in one update over all processes: as many of the next samples as fit. None: samples are counted."""

    max_tokens_per_batch: int | None = None
    """Tokens in one step on each process, padding included; an update takes as many steps as it needs. None: any."""

    packing: bool = False
    """Join the samples of a step to one row without padding, of a causal language model; none sees another."""

    length_column: str | None = None
    """Column with each sample's length, or with what has that length. None: the token ids, or `sample_length()`."""

    @property
    def uses_lengths(self) -> bool:
        """Whether the order or the batches depend on how long each sample is."""
        return self.group_by_length or self.counts_tokens or self.packing

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens bound an update or a step, so that the steps of an update depend on its samples."""
        return self.global_batch_tokens is not None or self.max_tokens_per_batch is not None

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("batch_size", self.batch_size, least=1)
        yield from whole("eval_batch_size", self.eval_batch_size, least=1, optional=True)
        yield from whole("global_batch_size", self.global_batch_size, least=1, optional=True)
        yield from whole("gradient_accumulation_steps", self.gradient_accumulation_steps, least=1)
        if self.global_batch_size is not None and self.gradient_accumulation_steps != 1:
            yield (
                f"global_batch_size={self.global_batch_size} and gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} were given; the second follows from the first: leave it out"
            )
        yield from flag("dataloader_shuffle", self.dataloader_shuffle)
        yield from flag("reshuffle_each_epoch", self.reshuffle_each_epoch)
        yield from flag("drop_last", self.drop_last)
        yield from whole("num_dataloader_workers", self.num_dataloader_workers, least=0, most=MOST_WORKERS)
        yield from self._problems_of_lengths()

    def _problems_of_lengths(self) -> Iterator[str]:
        yield from flag("group_by_length", self.group_by_length)
        yield from flag("packing", self.packing)
        wrong = [
            *whole("global_batch_tokens", self.global_batch_tokens, least=1, most=MOST_TOKENS, optional=True),
            *whole("max_tokens_per_batch", self.max_tokens_per_batch, least=1, most=MOST_TOKENS, optional=True),
        ]
        yield from wrong
        if self.length_column is not None:
            yield from text("length_column", self.length_column)
        if isinstance(self.length_column, str) and not (wrong or self.uses_lengths):
            yield (
                f"length_column={self.length_column!r} is given and nothing reads it: set group_by_length, "
                "global_batch_tokens, max_tokens_per_batch or packing, or leave it out"
            )
        if wrong or self.global_batch_tokens is None:
            return
        counted_twice = {
            "global_batch_size": (self.global_batch_size, None),
            "gradient_accumulation_steps": (self.gradient_accumulation_steps, 1),
            "batch_size": (self.batch_size, 1),
        }
        for name, (value, default) in counted_twice.items():
            if value != default:
                back = f"{name}={'null' if default is None else default}"
                yield (
                    f"global_batch_tokens={self.global_batch_tokens} and {name}={value!r} were given: an update is "
                    f"counted in tokens or in samples. Leave {name} out, or where a config file has it, set {back}; "
                    "max_tokens_per_batch bounds a step, eval_batch_size an evaluation batch"
                )
        if self.drop_last is True:
            yield (
                f"drop_last=True with global_batch_tokens={self.global_batch_tokens}: no update has the same number of "
                "samples, so none is too short. Leave drop_last out"
            )


@dataclass(kw_only=True)
class OptimizerFields:
    """The update: the loss, its weight, the optimizer, clipping."""

    optimizer: str | OptimizerType | None = None
    """A class of torch.optim in any case, or a dotted path. None: adam."""

    optimizer_kwargs: dict[str, Any] | None = None
    """Further keyword arguments of the optimizer, such as `betas`."""

    learning_rate: float = 2e-5
    """First learning rate; a schedule changes it."""

    momentum: float | None = None
    """The optimizer's momentum, or the first of its betas; a schedule changes it. None: the optimizer's default."""

    weight_decay: float = 0.0
    """Weight decay that is passed to the optimizer."""

    weight_decay_norm: float | None = None
    """Weight decay of normalising layers, in a group of their own. None: as of all others."""

    weight_decay_bias: float | None = None
    """Weight decay of biases, in a group of their own. None: as of the layer they belong to."""

    max_grad_norm: float | None = None
    """Longest gradient, as a 2-norm over all parameters; longer ones are scaled down. None: no clipping."""

    criterion: str | None = None
    """A loss class of torch.nn, or a dotted path, for a model without compute_loss(); a loss it returns is not used."""

    loss_weight: str | None = None
    """What a loss is the mean of: "samples" or "labels" (those that are not -100). None: what the task says."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from known_name("optimizer", self.optimizer, KNOWN_OPTIMIZERS, SHOWN_OPTIMIZERS, optimizer_name)
        yield from keywords("optimizer_kwargs", self.optimizer_kwargs)
        yield from self._problems_of_doubled_keywords()
        yield from number("learning_rate", self.learning_rate)
        yield from self._problems_of_momentum()
        yield from number("weight_decay", self.weight_decay)
        yield from number("weight_decay_norm", self.weight_decay_norm, optional=True)
        yield from number("weight_decay_bias", self.weight_decay_bias, optional=True)
        yield from number("max_grad_norm", self.max_grad_norm, above=0, optional=True, without="no clipping")
        yield from known_name(
            "criterion", self.criterion, (*LOSSES, *NEEDY_LOSSES), choices(LOSSES), needy=NEEDY_LOSSES
        )
        yield from one_of("loss_weight", self.loss_weight, ("samples", "labels"))

    def _problems_of_momentum(self) -> Iterator[str]:
        wrong = list(number("momentum", self.momentum, optional=True))
        yield from wrong
        if self.momentum is None or wrong:
            return
        if self.momentum >= 1:
            yield f"momentum={self.momentum!r} must be below 1"
        given = self.optimizer_kwargs if isinstance(self.optimizer_kwargs, Mapping) else {}
        for keyword in ("momentum", "betas"):
            if keyword in given:
                yield f"optimizer_kwargs[{keyword!r}] contradicts momentum={self.momentum!r}: give one of the two"

    def _problems_of_doubled_keywords(self) -> Iterator[str]:
        given = self.optimizer_kwargs if isinstance(self.optimizer_kwargs, Mapping) else {}
        for keyword, name in FIELD_OF_KEYWORD.items():
            if keyword in given:
                yield f"optimizer_kwargs[{keyword!r}]={given[keyword]!r}: give it as the field {name} instead"


@dataclass(kw_only=True)
class ScheduleFields:
    """The schedules of learning rate and momentum."""

    lr_scheduler: str | LRSchedulerType | None = None
    """Short name, a class of torch.optim.lr_scheduler, LiBai or lernomatic, or a dotted path. None: the rate stays."""

    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of the schedule; lengths are counted in its ticks and filled in where they are left out."""

    lr_scheduling_steps: int | float | None = None
    """Steps between two ticks of the schedules; a float below 1 is a share of the run. None: a tick after every update
    where no part of the schedules is counted in ticks, else one at each epoch's end."""

    warmup_steps: int | float | None = None
    """Steps in which the rate rises on a straight line to where the schedule begins, which spans the rest of the run; a
    float below 1 is a share of the run. Update u of w has u/w of that rate. None or 0: none but the schedule's own."""

    momentum_scheduler: str | None = None
    """Short name of the curve that the momentum (or the first beta) follows. None: the momentum stays."""

    momentum_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of that curve, such as `min` and `max`; lengths are filled in as those of `lr_scheduler`."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from self._problems_of_the_name()
        yield from keywords("lr_scheduler_kwargs", self.lr_scheduler_kwargs)
        yield from steps("lr_scheduling_steps", self.lr_scheduling_steps)
        yield from steps("warmup_steps", self.warmup_steps, least=0)
        yield from doubled_warmup(self.warmup_steps, self.lr_scheduler, self.lr_scheduler_kwargs)
        given = self.momentum_scheduler
        yield from one_of("momentum_scheduler", scheduler_name(given) if isinstance(given, str) else given, CURVES)
        yield from keywords("momentum_scheduler_kwargs", self.momentum_scheduler_kwargs)

    def _problems_of_the_name(self) -> Iterator[str]:
        given, known = self.lr_scheduler, (*SHORT_SCHEDULERS, *SCHEDULERS)
        answer = answer_to_dict(given) if isinstance(given, Mapping) else answer_to_name(given)
        for problem in known_name("lr_scheduler", given, known, SHOWN_SCHEDULERS, scheduler_name):
            yield f"{problem}{'.' if isinstance(given, Mapping) and answer else ''}{answer}"


@dataclass(kw_only=True)
class EvaluationFields:
    """Evaluation: when, with which metrics, and by which of them a model is the best."""

    do_evaluate: bool | None = None
    """Evaluate during training. None: if there is data for it; True without data is refused."""

    eval_steps: int | float | None = None
    """Steps between evaluations besides those at epoch ends; a float below 1 is a share of the run. None or 0: none."""

    max_eval_batches: int | None = None
    """Evaluate on so many batches of a set only. None: on all of it."""

    evaluate_with_generate: bool = True
    """Evaluate a generative model on what it generates."""

    generation_kwargs: dict[str, Any] | None = None
    """Arguments for the model's `generate` in evaluations, such as max_new_tokens."""

    bootstrap_samples: int = 0
    """Resamples behind the 95 % interval of each metric; 0: no intervals. 500 is a good number."""

    metrics: list[Any] | None = None
    """Names, `MetricConfig`s or metric objects. None: those of the task; the loss is always there."""

    metric_for_best_model: str = "loss"
    """Metric that tells the best checkpoint: "f1", "evaluation.f1" or "train.loss"."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("do_evaluate", self.do_evaluate, optional=True)
        yield from steps("eval_steps", self.eval_steps, least=0, otherwise=EVAL_OTHERWISE)
        yield from whole("max_eval_batches", self.max_eval_batches, least=1, optional=True)
        yield from flag("evaluate_with_generate", self.evaluate_with_generate)
        yield from keywords("generation_kwargs", self.generation_kwargs)
        yield from whole("bootstrap_samples", self.bootstrap_samples, least=0, most=MOST_BOOTSTRAP_SAMPLES)
        yield from self._problems_of_metrics()
        yield from text("metric_for_best_model", self.metric_for_best_model)
        yield from self._problems_of_best_metric()

    def _problems_of_metrics(self) -> Iterator[str]:
        if self.metrics is None:
            return
        if not isinstance(self.metrics, list | tuple):
            yield wrong_type("metrics", self.metrics, "a list of names, such as [accuracy], or of MetricConfigs")
            return
        for index, metric in enumerate(self.metrics):
            for problem in problems_of_metric(metric):
                yield f"metrics[{index}]: {problem}"

    def _problems_of_best_metric(self) -> Iterator[str]:
        given = self.metric_for_best_model
        if not isinstance(given, str):
            return
        if given in ("evaluation.", "train."):
            yield f"metric_for_best_model={given!r} lacks the metric's name, as in '{given}loss'"
        elif given.startswith("evaluation.") and self.do_evaluate is False:
            yield (
                f"metric_for_best_model={given!r} needs evaluations, but do_evaluate=False. "
                "Choose 'train.loss', or evaluate"
            )


@tells_unknown_fields
@dataclass
class MetricConfig:
    """A metric by name, with the options that its computation takes."""

    name: str
    """Name of the metric, as its task's handler knows it."""

    objective: str | None = None
    """"maximize" or "minimize"; None: what the metric itself says."""

    output_keys: list[str] | None = None
    """Which of the metric's results to report; None: all."""

    n_decimals: int = 4
    """Decimals shown; stored values are never rounded."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the metric's computation, such as `average`."""

    def __post_init__(self) -> None:
        if problems := list(self.problems()):
            raise ConfigError(problems)

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake."""
        yield from text("name", self.name)
        yield from one_of("objective", self.objective, ("maximize", "minimize"))
        if self.output_keys is not None and not isinstance(self.output_keys, list | tuple):
            yield wrong_type("output_keys", self.output_keys, "a list of names")
        for key in self.output_keys if isinstance(self.output_keys, list | tuple) else ():
            yield from text("output_keys", key)
        yield from whole("n_decimals", self.n_decimals, least=0, most=MOST_DECIMALS)
        yield from keywords("options", self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return the metric in plain values, as a file holds it."""
        return {name: to_plain(value) for name, value in vars(self).items()}


def metric_config_of(metric: Any) -> Any:
    """Return a metric's config as one of ours: from a mapping, or from a config object of Hezar's; others as they are.

    Of Hezar's only what differs from its class's defaults is taken over, so that it is what its name alone would be.
    """
    if isinstance(metric, Mapping):
        known = {one.name for one in fields(MetricConfig)}
        if (
            metric.get("name")
            and (options := {key: value for key, value in metric.items() if key not in known})
            and not any(nearest(str(key), known) for key in options)
        ):
            shown = ", ".join(f"{key}: {value}" for key, value in options.items())
            raise ConfigError(
                f"{choices(map(repr, options))} of the metric {metric['name']!r}: its own options go together into "
                f"'options': {{name: {metric['name']}, options: {{{shown}}}}}"
            )
        return MetricConfig(**{str(key): value for key, value in metric.items()})
    if not _is_of_hezar(metric):
        return metric
    told = {one.name: getattr(metric, one.name) for one in fields(metric) if one.name not in MARKS_OF_HEZAR}
    defaults = {one.name: one.default for one in fields(metric)}
    chosen = {name: value for name, value in told.items() if value != defaults[name]}
    own = {name: chosen.pop(name) for name in ("objective", "output_keys", "n_decimals") if name in chosen}
    return MetricConfig(name=str(metric.name), options=chosen, **own)


def _is_of_hezar(metric: Any) -> bool:
    """Tell whether something is a metric's config as Hezar has them; its package is not imported for that."""
    is_object = is_dataclass(metric) and not isinstance(metric, type)
    return is_object and str(getattr(metric, "config_type", None)) == "metric"


def problems_of_metric(metric: Any) -> Iterator[str]:
    """Yield what is wrong with one item of a list of metrics."""
    if isinstance(metric, str):
        yield from text("a name", metric)
    elif isinstance(metric, MetricConfig):
        yield from metric.problems()
    elif isinstance(metric, Mapping) or _is_of_hezar(metric):
        try:
            metric_config_of(metric)
        except ConfigError as error:
            yield from error.problems
    elif not callable(metric) and not callable(getattr(metric, "compute", None)):
        yield wrong_type("a metric", metric, "a name, a MetricConfig, a function or an object with compute()")


def metric_to_plain(metric: Any) -> Any:
    """Return a metric as a file holds it: a name, or a mapping; a metric object is held by its name."""
    if isinstance(metric, str):
        return str(metric)
    if isinstance(metric, MetricConfig):
        return metric.to_dict()
    return str(getattr(metric, "name", None) or getattr(metric, "__name__", type(metric).__name__))


def metrics_from_plain(metrics: Any) -> Any:
    """Rebuild the configs in a list of metrics; what cannot be rebuilt is left as it is, for the checks to tell."""
    if not isinstance(metrics, list | tuple):
        return metrics
    return [_rebuilt(metric) for metric in metrics]


def _rebuilt(metric: Any) -> Any:
    return metric if list(problems_of_metric(metric)) else metric_config_of(metric)


@dataclass(kw_only=True)
class StoppingFields:
    """Stopping early: when a run has reached enough, or no longer gets better."""

    early_stopping_patience: int | None = None
    """Stop after so many evaluations without improvement. None or 0: never."""

    early_stopping_threshold: float = 0.0
    """Least improvement that counts; a value that is only equal is none."""

    early_stopping_mode: str = "best"
    """Improvement over what: "best" so far, "mean" of the last `patience` evaluations, or "window": `patience` ago."""

    early_stopping_metric: str | None = None
    """Metric that must improve: "f1", "evaluation.f1" or "train.loss". None: `metric_for_best_model`."""

    stop_when: str | None = None
    """Stop when an evaluation reaches this: "accuracy >= 0.9", "loss <= 0.1". None: never."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("early_stopping_patience", self.early_stopping_patience, least=0, optional=True)
        yield from number("early_stopping_threshold", self.early_stopping_threshold)
        yield from one_of("early_stopping_mode", self.early_stopping_mode, STOPPING_MODES, optional=False)
        if self.early_stopping_metric is not None:
            yield from text("early_stopping_metric", self.early_stopping_metric)
        yield from self._problems_of_goal()

    def _problems_of_goal(self) -> Iterator[str]:
        if self.stop_when is None:
            return
        if not isinstance(self.stop_when, str):
            yield wrong_type("stop_when", self.stop_when, FORM_OF_GOAL)
            return
        try:
            Goal.parse(self.stop_when)
        except ConfigError as error:
            yield from error.problems


class Goal(NamedTuple):
    """A metric's value at which a run has reached enough."""

    metric: str
    comparison: str
    value: float

    def is_reached_by(self, value: float) -> bool:
        """Tell whether a value is there; NaN never is."""
        return value >= self.value if self.comparison == ">=" else value <= self.value

    @classmethod
    def parse(cls, given: str) -> Goal:
        """Read "metric >= number" or "metric <= number"."""
        match = GOAL.fullmatch(given)
        if match is None:
            signs = [sign for sign in re.findall(r"[<>=!]+", given) if sign not in {"<=", ">="}]
            unknown = f"{signs[0]!r} is neither >= nor <=; " if signs else ""
            raise ConfigError(f"stop_when={given!r} cannot be read: {unknown}expected {FORM_OF_GOAL}")
        return cls(match["metric"], match["comparison"], float(match["value"]))


@dataclass(kw_only=True)
class CheckpointFields:
    """Checkpoints: whether, when, where and how many."""

    save_enabled: bool = True
    """Save checkpoints: at each epoch end, at the end of the run, and where `save_steps` says. False: never."""

    save_steps: int | float | None = None
    """Steps between saves besides those at epoch ends; a float below 1 is a share of the run. None or 0: none."""

    save_freq: int | float | str | None = None
    """Deprecated name of `save_steps`, to which it is moved."""

    save_total_limit: int | None = None
    """Checkpoints to keep, the newest ones and the best. None: all."""

    async_save: bool = True
    """Write checkpoints in the background, at the cost of a copy of the tensors in memory."""

    save_trained_only: bool | None = None
    """Save what is trained, not the frozen rest: a resume needs that base model. None: for a model with adapters."""

    checkpoints_dir: str = "checkpoints"
    """Folder of the checkpoints, under `output_dir`."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("save_enabled", self.save_enabled)
        yield from steps("save_steps", self.save_steps, least=0, otherwise=SAVE_OTHERWISE)
        if self.save_freq is not None:
            yield f"save_freq={self.save_freq!r} is deprecated: give save_steps instead, and not both"
        yield from whole("save_total_limit", self.save_total_limit, least=1, optional=True)
        yield from flag("async_save", self.async_save)
        if self.save_trained_only is not None:
            yield from flag("save_trained_only", self.save_trained_only)
        yield from folder_of_run("checkpoints_dir", self.checkpoints_dir)


@dataclass(kw_only=True)
class LogFields:
    """What is written down while training."""

    log_steps: int | float | None = None
    """Steps between two log entries; a float below 1 is a share of the run. None or 0: at epoch ends only."""

    logs_dir: str = "logs"
    """Folder of the logs, under `output_dir`; each run has its own folder in it, which a resume goes on in."""

    trackers: list[str] | None = None
    """Trackers besides the JSON lines and CSV files, by Accelerate's names. None: TensorBoard; an empty list: none."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from steps("log_steps", self.log_steps, least=0)
        yield from folder_of_run("logs_dir", self.logs_dir)
        if self.trackers is None:
            return
        if not isinstance(self.trackers, list | tuple):
            yield wrong_type("trackers", self.trackers, "a list of names")
            return
        for index, tracker in enumerate(self.trackers):
            yield from one_of(f"trackers[{index}]", tracker, TRACKERS, optional=False)


@dataclass(kw_only=True)
class RegularizerFields:
    """What is added to the loss before the backward pass."""

    regularizer: str | None = None
    """A registered regulariser or a dotted path: a function of the context; its value is trained on, not logged."""

    regularizer_mu: float = 0.0
    """Factor of the regulariser."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        if self.regularizer is not None:
            yield from text("regularizer", self.regularizer)
        yield from number("regularizer_mu", self.regularizer_mu)


@dataclass(kw_only=True)
class RoundFields:
    """Training in rounds: how much one call of `train()` does, what is shared with others, what stays here."""

    local_update_steps: int | None = None
    """Batches or epochs that one call of `train()` does, as often as it is called. None: all that `num_epochs` says."""

    batch_or_epoch: str = "batch"
    """What `local_update_steps` counts: "batch" or "epoch"."""

    fresh_optimizer: bool = False
    """Start every call of `train()` with the optimizer and schedule as they were first."""

    use_diff: bool = False
    """Evaluate on the split "val" before and after training, and report both losses."""

    offload_after_routine: bool = False
    """Move the model to the CPU after each call, to leave the device to others."""

    local_param: list[str] | None = None
    """Parts of names: parameters that have one are neither given away by `get_model_para` nor taken by `update`."""

    share_non_trainable_para: bool = False
    """Exchange also what is not trained, such as the statistics of batch normalisation."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from whole("local_update_steps", self.local_update_steps, least=1, optional=True)
        if self.local_update_steps is not None and getattr(self, "counts_tokens", False):
            yield (
                f"local_update_steps={self.local_update_steps} counts steps, and with global_batch_tokens or "
                "max_tokens_per_batch the steps of an update depend on its samples. Count samples instead "
                "(global_batch_size; group_by_length goes with it), or leave local_update_steps out"
            )
        yield from one_of("batch_or_epoch", self.batch_or_epoch, BATCH_OR_EPOCH, optional=False)
        yield from flag("fresh_optimizer", self.fresh_optimizer)
        yield from flag("use_diff", self.use_diff)
        yield from flag("offload_after_routine", self.offload_after_routine)
        yield from parts_of_names("local_param", self.local_param)
        yield from flag("share_non_trainable_para", self.share_non_trainable_para)


@dataclass(kw_only=True)
class FinetuneFields:
    """`finetune()`: its length, its optimizer, what it leaves alone."""

    finetune_before_eval: bool = False
    """Evaluate a finetuned copy of the model; the model itself goes on as it was."""

    finetune_steps: int = 1
    """Batches or epochs that `finetune()` does."""

    finetune_batch_or_epoch: str = "batch"
    """What `finetune_steps` counts: "batch" or "epoch"."""

    finetune_optimizer: str | OptimizerType | None = None
    """Optimizer of `finetune()`, made anew for each call. None: that of the training."""

    finetune_optimizer_kwargs: dict[str, Any] | None = None
    """Further keyword arguments of that optimizer."""

    finetune_learning_rate: float | None = None
    """Learning rate of `finetune()`. None: that of the training."""

    finetune_weight_decay: float | None = None
    """Weight decay of `finetune()`. None: that of the training."""

    finetune_lr_scheduler: str | LRSchedulerType | None = None
    """Schedule of `finetune()`, ticking after each update. None: the rate stays."""

    finetune_lr_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of that schedule."""

    finetune_freeze_param: list[str] | None = None
    """Parts of names: parameters that have one stay as they are in `finetune()`."""

    finetune_param: list[str] | None = None
    """Parts of names: only parameters that have one are trained in `finetune()`. None: all."""

    finetune_reinit: bool = False
    """Give the modules of `finetune_param` new weights before `finetune()` trains them."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("finetune_before_eval", self.finetune_before_eval)
        yield from whole("finetune_steps", self.finetune_steps, least=1)
        yield from one_of("finetune_batch_or_epoch", self.finetune_batch_or_epoch, BATCH_OR_EPOCH, optional=False)
        yield from known_name(
            "finetune_optimizer", self.finetune_optimizer, KNOWN_OPTIMIZERS, SHOWN_OPTIMIZERS, optimizer_name
        )
        yield from keywords("finetune_optimizer_kwargs", self.finetune_optimizer_kwargs)
        yield from number("finetune_learning_rate", self.finetune_learning_rate, optional=True)
        yield from number("finetune_weight_decay", self.finetune_weight_decay, optional=True)
        yield from known_name(
            "finetune_lr_scheduler", self.finetune_lr_scheduler, (*SHORT_SCHEDULERS, *SCHEDULERS), SHOWN_SCHEDULERS,
            scheduler_name,
        )  # fmt: skip
        yield from keywords("finetune_lr_scheduler_kwargs", self.finetune_lr_scheduler_kwargs)
        yield from parts_of_names("finetune_freeze_param", self.finetune_freeze_param)
        yield from parts_of_names("finetune_param", self.finetune_param)
        yield from flag("finetune_reinit", self.finetune_reinit)
        if self.finetune_reinit is True and not self.finetune_param:
            yield "finetune_reinit=True needs finetune_param: name the modules that get new weights"


@dataclass(kw_only=True)
class HubFields:
    """The Hugging Face Hub: whether, where and when the run is pushed. Tokens are never a field."""

    push_to_hub: bool = False
    """Push the run to the Hub in the background. The token comes from the environment or `hf auth login`."""

    hub_model_id: str | None = None
    """Repository to push to, as "owner/name"; it is made if it does not exist."""

    hub_strategy: str = "end"
    """When to push: "end", "best" (each new best one), "every_save" or "all_checkpoints"; the end is always pushed."""

    hub_private: bool | None = None
    """Make the repository private, if it has to be made. None: as the account's settings say."""

    hub_revision: str | None = None
    """Branch to push to, made if need be. None: the main branch."""

    hub_wait_seconds: int | float = 300
    """How long the end of `train()` waits for pushes; training itself never does."""

    hub_card: dict[str, Any] | None = None
    """What a run cannot know for its model card: base_model, datasets, language, license, tags."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("push_to_hub", self.push_to_hub)
        yield from self._problems_of_model_id()
        if self.push_to_hub is True and getattr(self, "save_enabled", True) is False:
            yield "push_to_hub=True pushes what was saved, but save_enabled=False. Change one of them."
        yield from one_of("hub_strategy", self.hub_strategy, HUB_STRATEGIES, optional=False)
        yield from flag("hub_private", self.hub_private, optional=True)
        if self.hub_revision is not None:
            yield from text("hub_revision", self.hub_revision)
        yield from number("hub_wait_seconds", self.hub_wait_seconds)
        yield from self._problems_of_card()

    def _problems_of_model_id(self) -> Iterator[str]:
        given = self.hub_model_id
        if given is None:
            if self.push_to_hub is True:
                yield "push_to_hub=True needs hub_model_id: name the repository, for example hub_model_id='owner/name'"
        elif not isinstance(given, str):
            yield wrong_type("hub_model_id", given, "a repository, 'owner/name' (str)")
        elif not REPO_ID.fullmatch(given):
            named = REPO_OF_ADDRESS.fullmatch(given)
            remedy = f"; write {named[1]!r}" if named else ""
            yield f"hub_model_id={given!r} is no repository: expected 'owner/name'{remedy}"

    def _problems_of_card(self) -> Iterator[str]:
        yield from keywords("hub_card", self.hub_card)
        if isinstance(self.hub_card, dict):
            for key in self.hub_card:
                yield from one_of("a key of hub_card", key, HUB_CARD_KEYS, optional=False)

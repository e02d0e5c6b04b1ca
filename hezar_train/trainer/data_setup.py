"""The data of a trainer and what follows from it: sources of batches, the plan of the run, the sets to evaluate on.

`TrainData` opens datasets; `RunSetup` is the one value that says what a run is about. Changing a trainer makes another
`RunSetup`, which every part then follows (`reconfigure`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from hezar_train.config import TrainerConfig
from hezar_train.data import (
    ByLength,
    LengthOf,
    Lengths,
    LengthSettings,
    Order,
    PackingDataCollator,
    Source,
    Splits,
    is_stream,
    open_source,
)
from hezar_train.data.by_length import Cut, cut_for_evaluation
from hezar_train.data.lengths import fingerprint_of, measure
from hezar_train.data.sources import refuse_without_lengths
from hezar_train.errors import CheckpointError, ConfigError, DataError, HezarTrainError, a_kind, choices, suggestion
from hezar_train.hooks import Stopping
from hezar_train.hooks.early_stopping import metric_key_of, objective_of
from hezar_train.metrics import MetricsHandler
from hezar_train.plan import UNLIMITED, End, Plan, make_plan, one_pass, steps_of, with_ticks
from hezar_train.runtime import Processes, Runtime, logger
from hezar_train.state import TrainerState

__all__ = [
    "LengthFinder",
    "NamedSet",
    "RunSetup",
    "ScheduleDefaults",
    "TrainData",
    "evaluation_sets",
    "named_sets",
    "one_set",
    "size_of",
]

READ_ONCE = (Generator, zip, map, filter)
"""Kinds of data that are empty after they were read."""
MOST_MEASURED = 8
"""Sets of data whose lengths are kept."""


@dataclass(frozen=True)
class RunSetup:
    """What a run is about: the config, the data, and what follows from both."""

    config: TrainerConfig
    splits: Splits
    source: Source
    """The training data, opened."""
    plan: Plan
    evaluates: bool
    """Whether the run evaluates while it trains."""
    best_key: str
    """The full name of the metric that tells the best model."""
    objective: str
    """Which way that metric is better: maximize or minimize."""
    stopping: Stopping
    """When to stop before the planned end."""

    @property
    def only_for_eval(self) -> bool:
        """Whether there is nothing to train on."""
        return self.splits.train is None

    @property
    def trains_in_rounds(self) -> bool:
        """Whether a call of `train()` does a part of the run that has no end of its own."""
        return self.config.local_update_steps is not None

    def end(self, state: TrainerState) -> End:
        """Return where the run, or this call, ends; where epochs alone end it, changed data or batches must not."""
        plan = self.plan
        if self.trains_in_rounds:
            if state.call_last_samples is not None:
                return End(samples=state.call_last_samples)
            return End(state.call_end or plan.total_steps)
        if plan.last_samples is not None:
            return End(samples=plan.last_samples)
        is_counted = self.config.max_steps is not None or plan.num_samples is None
        return End(plan.total_steps) if is_counted else End()


class ScheduleDefaults(NamedTuple):
    """What a trainer does where its config names no schedule or no tick."""

    lr_scheduler: str | None = None
    lr_scheduling_steps: int | None = None
    is_given: bool = False
    """Whether a scheduler was passed, so that the one which the config names is not built."""


class TrainData:
    """Open datasets as sources of batches, and plan runs over them."""

    def __init__(
        self,
        runtime: Runtime,
        collator: Callable[[list[Any]], Any] | None,
        create_train_dataloader: Callable[[Any], Source | DataLoader[Any]],
        create_eval_dataloader: Callable[[Any], Source | DataLoader[Any]],
        defaults: ScheduleDefaults,
        lengths: LengthFinder,
        *,
        opens_eval: bool,
    ) -> None:
        """The two functions are the trainer's methods: a user may return any DataLoader from them.

        `opens_eval` says that evaluation data is opened here, not by a user, so that it can be checked beforehand.
        """
        self._runtime, self._collator, self._defaults, self._lengths = runtime, collator, defaults, lengths
        self._opens_eval = opens_eval
        self._measured: list[tuple[Any, Lengths]] = []
        self._create_train, self._create_eval = create_train_dataloader, create_eval_dataloader

    def setup(self, config: TrainerConfig, splits: Splits, handler: MetricsHandler) -> RunSetup:
        """Work out what a run over these splits is about."""
        evaluates = decides_to_evaluate(config, splits.for_evaluation)
        sets = list(evaluation_sets(None, splits.for_evaluation)) if evaluates else []
        best_key = metric_key_of("metric_for_best_model", config.metric_for_best_model, sets, handler.output_keys)
        stopping = Stopping.from_config(config, sets, handler.output_keys, handler.objective)
        source = self.open(config, []) if splits.train is None else self._train_source(config, splits.train)
        if evaluates and self._opens_eval:
            self._refuse_unusable(config, splits.for_evaluation)
        plan = self._plan(config, source, only_for_eval=splits.train is None)
        objective = objective_of(best_key, sets, handler.objective)
        return RunSetup(config, splits, source, plan, evaluates, best_key, objective, stopping)

    def _refuse_unusable(self, config: TrainerConfig, for_evaluation: Any) -> None:
        """Raise for evaluation data that could not be opened, before anything is trained."""
        for name, data in evaluation_sets(None, for_evaluation).items():
            self.open(config, data, training=False, name=f"eval_dataset[{name!r}]" if name else None)
            if isinstance(data, READ_ONCE):
                raise DataError(
                    f"the evaluation data is {a_kind(data)}, which can be read once, and every evaluation reads it "
                    "from its beginning. Make a list of it: list(data)."
                )

    def refuse_unusable_beforehand(self, setup: RunSetup) -> None:
        """Call a user's own `create_eval_dataloader` once before anything is trained, so that it fails then."""
        if setup.evaluates and not self._opens_eval:
            for data in evaluation_sets(None, setup.splits.for_evaluation).values():
                self.eval_source(setup.config, data)

    def open(self, config: TrainerConfig, data: Any, *, training: bool = True, name: str | None = None) -> Source:
        """Open data in the order of training, or of evaluation; an error calls it by its `name`."""
        order = self._order(config, training=training)
        if training and config.uses_lengths:
            order = replace(order, by_length=self._by_length(config, data, order))
        collator = self._packing_collator(data, training=training) if config.packing else self._collator
        return open_source(data, collator, order, name or f"the {'training' if training else 'evaluation'} data")

    def _packing_collator(self, data: Any, *, training: bool) -> Callable[[list[Any]], Any]:
        """Return what joins samples to a row; where they are measured one by one, what makes a row of each."""
        given = self._collator or getattr(data, "data_collator", None) or PackingDataCollator()
        if not getattr(given, "packs", False):
            raise ConfigError(
                f"packing=True, and the data_collator is {a_kind(given)}, which does not pack. Leave it out, pass "
                "PackingDataCollator() of hezar_train.data, or give yours `packs = True` and a method `padded`."
            )
        chosen: Callable[[list[Any]], Any] = given if training else getattr(given, "padded", given)
        return chosen

    def _by_length(self, config: TrainerConfig, data: Any, order: Order) -> ByLength:
        """Say what the lengths of data decide; they are measured once, by the main process."""
        refuse_without_lengths(data)
        return ByLength(
            self._lengths_of(config, data),
            LengthSettings(
                config.group_by_length, config.global_batch_tokens, config.max_tokens_per_batch, config.packing
            ),
            seed=order.seed, shuffle=order.shuffle, reshuffle=order.reshuffle,
        )  # fmt: skip

    def train_source(self, setup: RunSetup) -> Source:
        """Open the training data once more, for a routine beside the run."""
        return self._train_source(setup.config, setup.splits.train)

    def eval_source(self, config: TrainerConfig, data: Any) -> Source:
        """Open evaluation data, by `create_eval_dataloader`."""
        made = _made("create_eval_dataloader", self._create_eval(data))
        return self.open(config, made, training=False) if isinstance(made, DataLoader) else made

    def eval_cuts(self, config: TrainerConfig, data: Any, source: Source) -> list[Cut] | None:
        """Cut evaluation data into batches by its lengths; None where those are not known, or not for us to use."""
        if not config.uses_lengths or not hasattr(source, "cut") or isinstance(data, DataLoader) or is_stream(data):
            return None
        try:
            lengths = self._lengths_of(config, data)
        except HezarTrainError as error:
            logger.info("evaluation batches are in the order of the data: %s", error)
            return None
        bound = config.max_tokens_per_batch or config.global_batch_tokens or UNLIMITED
        most = UNLIMITED if config.global_batch_tokens and config.eval_batch_size is None else source.batch_size
        return cut_for_evaluation(lengths, bound, most, self._runtime.num_processes)

    def _lengths_of(self, config: TrainerConfig, data: Any) -> Lengths:
        """Return the lengths of data, measured once, by the main process."""
        found = next((lengths for known, lengths in self._measured if known is data), None)
        if found is None:
            found = self._lengths.of(data, config.length_column, config.seed)
            self._measured = [*self._measured[1 - MOST_MEASURED :], (data, found)]
        return found

    def _train_source(self, config: TrainerConfig, data: Any) -> Source:
        made = _made("create_train_dataloader", self._create_train(data))
        return self.open(config, made) if isinstance(made, DataLoader) else made

    def _order(self, config: TrainerConfig, *, training: bool) -> Order:
        runtime = self._runtime
        return Order(
            batch_size=config.batch_size if training else config.eval_batch_size or config.batch_size,
            seed=config.seed,
            shuffle=config.dataloader_shuffle and training,
            reshuffle=config.reshuffle_each_epoch,
            num_workers=config.num_dataloader_workers,
            pin_memory=runtime.device.type == "cuda",
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            processes=runtime.processes,
            splits_streams=training and config.global_batch_size is None,
        )

    def _plan(self, config: TrainerConfig, source: Source, *, only_for_eval: bool) -> Plan:
        if only_for_eval:
            return one_pass(source.num_samples, source.batch_size, self._runtime.num_processes)
        asked = self._with_defaults(config, is_given=self._defaults.is_given)
        asked.drop_last = asked.drop_last or source.drop_last
        if source.num_batches is not None:  # a batch sampler counts batches, not samples
            asked.max_steps = _max_steps_of(asked, source.num_batches * asked.num_epochs)
        counter = getattr(source, "by_length", None)
        if counter is None and asked.uses_lengths:
            raise DataError(
                "create_train_dataloader() returned a source of its own, whose batches the lengths of samples cannot "
                "decide. Leave group_by_length, global_batch_tokens, max_tokens_per_batch and packing out."
            )
        return make_plan(asked, source.num_samples, self._runtime.num_processes, source.batch_size, counter)

    def rescheduled(self, plan: Plan, config: TrainerConfig, *, is_given: bool) -> Plan:
        """Return the plan with the ticks of the schedules that a config names, or of a scheduler that is given."""
        return with_ticks(plan, self._with_defaults(config, is_given=is_given))

    def _with_defaults(self, config: TrainerConfig, *, is_given: bool) -> TrainerConfig:
        """Return a copy of the config that names the schedule which will be built."""
        asked, defaults = copy.copy(config), self._defaults
        asked.lr_scheduler = None if is_given else asked.lr_scheduler or defaults.lr_scheduler
        asked.lr_scheduling_steps = asked.lr_scheduling_steps or defaults.lr_scheduling_steps
        return asked


@dataclass(frozen=True)
class LengthFinder:
    """Find the lengths of samples: measured by the main process, or in the run's folder if they are those of the data.

    Nothing is written here: a run writes the file when it begins.
    """

    processes: Processes
    file: Path
    length_of: LengthOf | None
    """The user's own `sample_length`; None: by a column or the token ids."""

    def of(self, data: Any, column: str | None, seed: int) -> Lengths:
        """Return the lengths of data, on all processes."""
        found = self.processes.on_main(lambda: self._find(data, column, seed))
        if self.processes.count == 1 and found is not None:
            return found
        tokens = self.processes.share(None if found is None else found.tokens)
        return found or Lengths(tokens)

    def _find(self, data: Any, column: str | None, seed: int) -> Lengths:
        fingerprint = fingerprint_of(data, column, self.length_of)
        if fingerprint and self.file.is_file():
            try:
                kept = Lengths.load(self.file, len(data))
            except (CheckpointError, OSError) as error:
                logger.warning("the lengths of the samples are measured again: %s", error)
            else:
                if kept.fingerprint == fingerprint:
                    return kept
        return measure(data, column, self.length_of, seed)


def _made(method: str, made: Any) -> Any:
    """Return what a user's method made, if it can be read from."""
    if not isinstance(made, DataLoader) and not hasattr(made, "num_samples"):
        raise DataError(
            f"{method}() returned {a_kind(made)}; expected a torch.utils.data.DataLoader. Return one, or what "
            f"super().{method}(...) returns."
        )
    return made


class NamedSet(NamedTuple):
    """Data to evaluate on, the name its metrics get, and its split."""

    name: str
    data: Any
    split: str


def decides_to_evaluate(config: TrainerConfig, eval_dataset: Any) -> bool:
    """Tell whether the run evaluates: if there is evaluation data and the config does not forbid it."""
    if config.use_diff and eval_dataset is None:
        raise ConfigError("use_diff=True evaluates before and after training, but there is no split 'val' to do it on.")
    if config.do_evaluate and eval_dataset is None:
        raise ConfigError("do_evaluate=True, but no eval_dataset was given. Pass one, or leave do_evaluate out.")
    if eval_dataset is None or config.do_evaluate is False:
        return False
    for name, data in evaluation_sets(None, eval_dataset).items():
        if size_of(data) == 0:
            which = f"eval_dataset[{name!r}]" if name else "the eval_dataset"
            raise DataError(
                f"{which} is empty: expected at least one sample, or no such set at all. Look at what loads or "
                "filters it."
            )
    return True


def evaluation_sets(default: Any, given: Any) -> dict[str, Any]:
    """Return the sets to evaluate on by name; a set without a name has the empty one."""
    if isinstance(given, str):
        if not isinstance(default, Mapping) or given not in default:
            if default is None:
                raise DataError(
                    f"the evaluation data is {given!r}, a text; expected a dataset, or several by name. Load it first, "
                    "and pass what was loaded."
                )
            known = choices(default) if isinstance(default, Mapping) else "none: eval_dataset is a single set"
            raise DataError(f"there is no evaluation set {given!r}. Named sets: {known}.")
        return {"": default[given]}
    data = default if given is None else given
    if data is None:
        raise DataError("there is no evaluation data: pass eval_dataset to the Trainer, or a dataset to evaluate()")
    is_named = isinstance(data, Mapping) and all(isinstance(name, str) for name in data)
    return dict(data) if is_named else {"": data}


def named_sets(splits: Splits, asked: Any) -> list[NamedSet]:
    """Return what to evaluate on: the default sets, data given, a named set or a split."""
    default = splits.for_evaluation
    is_named = isinstance(default, Mapping) and isinstance(asked, str) and asked in default
    if not isinstance(asked, str) or is_named:
        return [NamedSet(name, data, "val") for name, data in evaluation_sets(default, asked).items()]
    if asked in splits.data:
        return [NamedSet("", splits.data[asked], asked)]
    known = [*splits.data, *(default if isinstance(default, Mapping) else ())]
    sentence = f"there is no evaluation set {asked!r}. There are: {choices(known)}.{suggestion(asked, known)}"
    if not splits.is_dict:
        raise DataError(sentence)
    logger.warning("%s Nothing was evaluated.", sentence)  # of many data owners, some lack a split
    return []


def one_set(default: Any, given: Any) -> Any:
    """Return the one set that is meant by a name, by data or by nothing."""
    sets = evaluation_sets(default, given)
    if len(sets) != 1:
        raise DataError(f"predict() goes over one set; there are several: {choices(sets)}. Name one of them.")
    return next(iter(sets.values()))


def size_of(data: Any) -> int | None:
    """Return the number of samples, None where there is no telling."""
    data = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(data, Mapping) and 0 not in data:
        sizes = [size_of(one) for one in data.values()]
        return None if None in sizes else sum(size or 0 for size in sizes)
    return len(data) if hasattr(data, "__len__") else None


def _max_steps_of(config: TrainerConfig, whole: int) -> int:
    """Return the steps of a run whose whole length is known, as `max_steps` limits it."""
    asked = config.max_steps
    if asked is None:
        return whole
    return min(whole, steps_of(asked, whole))

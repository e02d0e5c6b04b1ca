"""Checkpointing: find, restore and save checkpoints of a run, and what is in them.

A checkpoint holds the model, the optimizer, the schedule, the scaler, the state with its counters, the hooks' states,
early stopping's patience, the place of data that keeps its own, and what was measured and not logged yet; and, to be
used at a resume or compared in what decides an update (`refuse_changes`), the config, the plan, the run's facts,
preprocessor and model config. No random state is saved: order and randomness are functions of the counters. How files
get to the disk whole is `checkpoint`'s.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hezar_train.checkpoint import (
    CONFIG_FILE,
    BaseRecord,
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    Contents,
    HeldPart,
    SavingGroup,
    SharedStore,
    TrainedPart,
    WeightReport,
    base_differences,
    files_for_others,
    gather_shards,
    gather_whole,
    has_adapters,
    initial_weights,
    load_shards,
    other_base,
    refuse_other_base,
    refuse_shared_prompts,
    unwrap,
)
from hezar_train.checkpoint.format import tensor_file, tensor_names
from hezar_train.checkpoint.manifest import MODEL_FILE, read_best_step, replace_file
from hezar_train.checkpoint.split_files import hub_tensors, most_bytes, write_split_tensors
from hezar_train.config import TrainerConfig
from hezar_train.config.files import read_mapping, to_yaml, write_atomically
from hezar_train.data import Source
from hezar_train.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NoSuchCheckpointError,
    RunLockedError,
    choices,
    state_for,
)
from hezar_train.events import EventStorage
from hezar_train.hub import (
    fetch_checkpoint,
    fetch_records,
    fetch_weights,
    is_hub_address,
    model_config_writer,
    names_hub_weights,
)
from hezar_train.loop import Context, Hook
from hezar_train.optim import Schedule, set_momentum
from hezar_train.plan import Plan, exactness_changes, keeping_ticks
from hezar_train.run_layout import BASE_FILE, MODEL_CONFIG_FOLDER, PREPROCESSOR_FOLDER, step_of
from hezar_train.runtime import Processes, Runtime, logger
from hezar_train.runtime.sharding import is_sharded
from hezar_train.state import TrainerState
from hezar_train.trainer.data_setup import RunSetup
from hezar_train.trainer.finetuning import freeze_as_saved
from hezar_train.trainer.optimizer_setup import parameters_of
from hezar_train.trainer.run_files import RunFolder
from hezar_train.trainer.train_step import Optimization

__all__ = ["Checkpointing", "choose_checkpoint", "find_checkpoint", "going_on", "load_initial_weights", "write_weights"]

NAMES = ("best", "last")
MOST_STEPS = 1 << 62
NAMED_VALUES = ("plan", "schedule", "hooks", "measured")
"""What a checkpoint holds beside model, optimizer and state, each as names with values."""


class Checkpointing:
    """Save the live objects of a run, and put them back."""

    def __init__(
        self,
        setup: RunSetup,
        runtime: Runtime,
        folder: RunFolder,
        model: nn.Module,
        optimization: Optimization,
        state: TrainerState,
        storage: EventStorage,
        preprocessor: Any,
        facts: Mapping[str, Any],
    ) -> None:
        """`facts` are what decides a run beside config, plan and data: changing them would be another run.

        They are the units of its loss, and what the trainer's `run_facts()` returns.
        """
        self._setup, self._folder, self._model, self._optimization = setup, folder, model, optimization
        self._processes, self._scaler, self._state, self._storage = runtime.processes, runtime.scaler, state, storage
        self._write_preprocessor = preprocessor_writer(preprocessor)
        self._write_model_config = model_config_writer(unwrap(model))
        self._own_facts, self._config_text = dict(facts), to_yaml(setup.config.to_dict())
        # a process group of its own: saves in the background must not meet the collectives of training
        self._group = SavingGroup.form() if is_sharded(model) else None
        self._part = trained_part_of(model, setup.config, is_shared_out=self._group is not None)
        self._store = CheckpointStore(folder.checkpoints)
        # on the disk when built, when the folder is taken over, when a call ends: others mean another trainer
        self._known_steps = self._store.steps()
        self._writer: CheckpointWriter | None = None
        self._needs_room = False
        self._best_on_disk: int | None = None
        self._hook_states: Mapping[str, Any] = {}
        self._measured: Mapping[str, tuple[float, int, bool | None]] = {}
        self._cursor: Any = None
        self._restored: Checkpoint | None = None
        self.hooks: list[Hook] = []
        """The hook objects whose states are saved."""

    def follow(self, setup: RunSetup, *, is_new_data: bool = False) -> None:
        """Save for another config and plan; the place in other data is another."""
        self._setup, self._config_text = setup, to_yaml(setup.config.to_dict())
        self._cursor = None if is_new_data else self._cursor

    def add_hook(self, hook: Hook) -> None:
        """Save a hook's state from now on; give it back what the restored checkpoint has for it."""
        self.hooks.append(hook)
        self._restore_hooks([hook])

    def keep_place(self, ctx: Context) -> None:
        """Note where the data is after an update, if the position does not say it all; a hook at BATCH_END.

        After the first one that is applied the optimizer has its state: then saves get room for copies of it, too.
        """
        if not ctx.step.closes_window:
            return
        self._cursor = ctx.step.window.cursor
        ctx.step.is_settled = True
        if self._needs_room and ctx.step.applied:
            self._needs_room = False
            self.reserve_buffers()

    def place_source(self) -> None:
        """Bring data that keeps its own place to where the run is; data that cannot is refused in mid-epoch.

        A call among many (`local_update_steps`) begins such data anew: its samples are whatever that gives.
        """
        if not self._setup.trains_in_rounds:
            _refuse_lost_place(self._setup.source, self._state)
        self._setup.source.restore(self._cursor)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Bring everything back to where a checkpoint has it, if the run can go on from there exactly."""
        setup, optimization = self._setup, self._optimization
        refuse_changes(checkpoint, setup.config, setup.plan, self._facts())
        self._load(checkpoint)
        freeze_as_saved(unwrap(self._model), self._state)
        if setup.config.accept_changes:
            apply_accepted(checkpoint, setup.config, optimization.optimizer, optimization.schedule, self._model)
        _refuse_lost_place(setup.source, self._state)
        self._take_up_measuring()
        self._restored = checkpoint
        logger.info("resuming from %s", checkpoint.path)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Load the weights of a checkpoint alone, all of which must fit."""
        self._load_model(checkpoint)

    def load_initial_weights(self, source: str | os.PathLike[str], unset: Collection[str] = ()) -> None:
        """Load the weights that a run begins with; what is `unset` has no values before."""
        load_initial_weights(self._model, source, self._processes, unset)
        if self._part is not None:
            self._part.begin()

    def _load_model(self, checkpoint: Checkpoint, optimizer: Optimizer | None = None) -> None:
        """Load weights and optimizer, onto the base model that they were trained on if that is not among them."""
        part, base = self._part, checkpoint.base
        is_whole = base is None or not base.tensors
        is_same_base = base is None or is_whole or self._stands_on(checkpoint.path, base)
        before = part.digest() if part is not None and is_whole else {}
        load_shards(checkpoint, self._model, optimizer, is_base_checked=True)
        if part is None:
            return
        part.begin(base, is_same_base=is_same_base)
        if before and part.digest() != before:
            part.holds_all = True
            logger.warning(
                "%s holds the whole model, with another base than the one that was built here: later checkpoints hold "
                "it, too. To save only what is trained, build the model on the base that the run began with.",
                checkpoint.path,
            )

    def _stands_on(self, path: Path, base: BaseRecord) -> bool:
        """Tell whether the model stands on a checkpoint's base, which may come from the initial weights; else raise.

        Another one that the user accepts is told.
        """
        config = self._setup.config
        differences = base_differences(self._model, base)
        if config.init_weights_from is not None and self._processes.total(len(differences)):
            load_initial_weights(self._model, config.init_weights_from, self._processes)
            differences = base_differences(self._model, base)
        if differences and config.accept_changes:
            logger.warning("going on, so not exactly: %s", other_base(path, base, differences))
            return False
        refuse_other_base(path, base, differences)
        return True

    def take_over_folder(self) -> None:
        """Make the run's folder this run's own.

        At a fresh start, or from a checkpoint elsewhere, what an earlier run wrote is moved to `previous/` (files of
        others stay); at a resume only its checkpoints past the step are set aside. Only torn saves are deleted.
        """
        if self._store.steps() != self._known_steps:
            raise RunLockedError(
                f"{self._store.root} has changed since this trainer last looked: another one has trained there. "
                "Build it again."
            )
        self._tell_of_lost_hooks()
        saves = self._setup.config.save_enabled
        take_over(self._folder, self._store, self._state, self._restored, saves=saves)
        self._known_steps = self._store.steps()  # what was moved aside here is no sign of another trainer
        if self._setup.source.resume_problem and saves:
            problem = self._setup.source.resume_problem
            logger.warning("this run can be resumed at epoch ends only: %s", problem)

    def note_best_metric(self) -> None:
        """Forget the best result if it is of another metric than the config's."""
        state, key = self._state, self._setup.best_key
        if state.metric_for_best_checkpoint != key:
            before = state.metric_for_best_checkpoint
            logger.info("the best model was chosen by %s so far, from now on by %s", before, key)
            state.update(metric_for_best_checkpoint=key, best_metric_value=None, best_checkpoint=None)

    def _stateful(self) -> dict[str, tuple[str, Any]]:
        """Return what a checkpoint holds beside model and optimizer by its own state_dict() and load_state_dict().

        By the name that it has there, with what messages call it; None is what this run does not have. One more thing
        to save is one more row here. What a checkpoint of an earlier version lacks stays as it was built, but for the
        schedule, which every version has kept: one without it is refused.
        """
        return {
            "schedule": ("the schedule", self._optimization.schedule),
            "scaler": ("the gradient scaler", self._scaler),
            "stopping": ("early stopping", self._setup.stopping),
        }

    def _load(self, checkpoint: Checkpoint) -> None:
        """Bring every object back to where the checkpoint has it."""
        self._load_model(checkpoint, self._optimization.optimizer)
        extra = checkpoint.extra()
        for name, (words, one) in self._stateful().items():
            if one is not None and extra.get(name) is not None:
                with state_for(words):
                    one.load_state_dict(extra[name])
        self._cursor, self._measured = extra.get("data"), extra["measured"]
        self._state.update(checkpoint.state())
        self._hook_states = extra["hooks"]
        if not all(isinstance(name, str) for name in self._hook_states):
            raise CheckpointError(f"{checkpoint.path} keeps states of hooks under names that are no text")
        self._restore_hooks(self.hooks)

    def _restore_hooks(self, hooks: Sequence[Hook]) -> None:
        """Give hooks the state that the checkpoint has for them, those included that are added after it was read."""
        for name, hook in self._named_hooks():
            if name in self._hook_states and any(hook is one for one in hooks):
                with state_for(f"the hook {name}"):
                    hook.load_state_dict(self._hook_states[name])

    def _tell_of_lost_hooks(self) -> None:
        """Warn of states in the restored checkpoint that nobody has taken: the next save will not have them."""
        present = {name for name, _ in self._named_hooks()}
        if self._restored is not None and (lost := [name for name in self._hook_states if name not in present]):
            logger.warning(
                "%s holds the state of %s, which this trainer does not have: it is not used, and the next checkpoint "
                "will be without it. If that is not meant, stop, and add what it belongs to as before.",
                self._restored.path, choices(lost),
            )  # fmt: skip

    def _take_up_measuring(self) -> None:
        """Go on with what was measured but not logged, and with the best result if it is of the same metric."""
        state, storage = self._state, self._storage
        state.total_epochs = self._setup.config.num_epochs
        for name, (value, step, hint) in self._measured.items():
            storage.step = step
            storage.put_scalar(name, value, hint is not False)
        storage.step = state.global_step
        self.note_best_metric()

    @contextmanager
    def writing(
        self,
        on_saved: Callable[..., None] | None,
        *,
        saves_for_all: bool,
        while_closing: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[None]:
        """Be able to save while the body runs; then, in `while_closing`, wait for the save under way.

        Where each process has a share of the model all of them save, else the one that `saves_for_all` (it has the
        run's files). A second Ctrl-C, which raises KeyboardInterrupt, does not wait.
        """
        store = self._store if self._group is None else SharedStore(self._store.root, self._group)
        config, is_abandoned = self._setup.config, False
        self._restored = None  # the folder was taken over for it already; from here on the state says where the run is
        if saves_for_all or self._group is not None:
            self._writer = CheckpointWriter(store, config.async_save, config.save_total_limit, on_saved)
        self._needs_room = self._writer is not None
        self._read_base()
        try:
            yield
        except KeyboardInterrupt:
            is_abandoned = True
            raise
        finally:
            try:
                with while_closing():
                    self._close_writer(abandon=is_abandoned)
            finally:
                self._known_steps = self._store.steps()

    def _read_base(self) -> None:
        """Begin to read the frozen base model, of which checkpoints keep digests."""
        if self._part is None or not self._setup.config.save_enabled:
            return
        self._part.note_trained()
        if self._group is not None:
            self._part.digest()
        elif self._writer is not None:
            self._part.digest_in_background()

    def reserve_buffers(self) -> None:
        """Make the memory that a save copies into, while nobody waits for it."""
        config = self._setup.config
        if config.save_enabled and config.async_save and self._writer is not None:
            size = self._writer.reserve(self._gather())
            logger.debug("background saves hold %.1f MB of host memory", size / 1e6)

    @property
    def saves_here(self) -> bool:
        """Whether this process is the one, or one of those, that write the checkpoints that fall due."""
        return self._writer is not None

    @property
    def saves_together(self) -> bool:
        """Whether all processes save each their share, so that all must agree to."""
        return self._group is not None

    def save(
        self,
        measured: Mapping[str, tuple[float, int, bool | None]],
        before_commit: Callable[[], None] | None,
    ) -> None:
        """Save a checkpoint of this update, in the background if the config says so.

        `measured` is what hooks put and no row of the log holds yet: value, step and smoothing hint by name.
        `before_commit` is called once all files and their manifest are written, before the folder gets its name: from
        then on it is a checkpoint.
        """
        if self._writer is not None:
            self._measured = measured
            parts = self._gather(before_commit)
            self._writer.save(self._state.global_step, parts, protect=self._protected(self._writer))

    def newest_saved(self) -> int | None:
        """Wait for the save under way; return the step of the newest checkpoint, which the main process tells all."""
        return self._processes.share(self._processes.on_main(self._wait_for_newest))

    def _wait_for_newest(self) -> int | None:
        """Wait for the main process's save, which ends after all shares of it are on the disk."""
        if self._writer is not None:
            self._writer.wait()
        return max(self._store.steps(), default=None)

    def gather_whole(self) -> Contents:
        """Gather everything with whole tensors, on the main process; all processes call this together."""
        if self._group is None:
            return Contents.gather(**self._contents())
        if self._part is not None:
            self._part.digest()
        return gather_whole(**self._contents(), is_kept=self._group.is_main)

    def write_model(self, folder: Path, max_shard_size: int | str | None = None) -> None:
        """Write weights, model config and preprocessor into a folder, for others; where there is one process only."""
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(folder, self.gather_whole(), MODEL_FILE, self._model, max_shard_size)
        if self._write_model_config is not None:
            self._write_model_config(folder)
        self.write_preprocessor(folder)

    def write_preprocessor(self, folder: Path) -> None:
        """Write the preprocessor, where there is one, into a folder."""
        if self._write_preprocessor is not None:
            self._write_preprocessor(folder)

    def _gather(self, before_commit: Callable[[], None] | None = None) -> Contents:
        """Gather what this process saves: tensors by reference, values and texts as bytes of now.

        A background save copies the tensors before it returns. The folders of preprocessor and model config are filled
        when they are written, as those are then.
        """
        contents = self._contents(before_commit)
        if self._group is None:
            return Contents.gather(**contents)
        return gather_shards(**contents, rank=self._group.rank, count=self._group.count)

    def _contents(self, before_commit: Callable[[], None] | None = None) -> dict[str, Any]:
        extra = {
            "plan": self._setup.plan.to_dict(),
            "facts": self._facts(),
            **{name: None if one is None else one.state_dict() for name, (_, one) in self._stateful().items()},
            "hooks": {name: hook.state_dict() for name, hook in self._named_hooks()},
            "data": self._cursor,
            "measured": dict(self._measured),
        }
        held = self._held_part()
        if held is not None and held.computed:
            extra["adapters"] = held.computed
        writers = {PREPROCESSOR_FOLDER: self._write_preprocessor, MODEL_CONFIG_FOLDER: self._write_model_config}
        folders = {name: write for name, write in writers.items() if write is not None}
        return {
            "model": self._model,
            "optimizer": self._optimization.optimizer.state_dict(),
            "state": self._state.to_dict(),
            "texts": {CONFIG_FILE: self._config_text},  # made once: it takes longer than a small model's copy
            "extra": extra,
            "folders": folders,
            "before_commit": before_commit,
            "part": held,
        }

    def _held_part(self) -> HeldPart | None:
        """Return what a save of now leaves out of the model; None if nothing."""
        if self._part is None:
            return None
        optimizer: Any = self._optimization.optimizer
        optimizers = [optimizer, *getattr(optimizer, "optimizers", {}).values()]
        self._part.note_trained(optimizers, None if self._group is None else self._processes.sum)
        return self._part.held()

    def _facts(self) -> dict[str, Any]:
        source = self._setup.source
        by_length = getattr(source, "by_length", None)
        lengths = {} if by_length is None else {"lengths of the samples": by_length.lengths.digest}
        return {
            **lengths,
            "order of the data": type(source).__name__,
            "shuffle": getattr(source, "is_shuffled", None),
            "drop_last": source.drop_last or self._setup.config.drop_last,
            **self._own_facts,
        }

    def _protected(self, writer: CheckpointWriter) -> set[int]:
        """Return what retention must leave: the best, and the last best one whose folder was seen.

        The best of now may still be being written; until its folder is there, the one before it stays.
        """
        best = self._state.best_checkpoint
        if best is not None and writer.store.path(best).exists():
            self._best_on_disk = best
        return {step for step in (best, self._best_on_disk) if step is not None}

    def _close_writer(self, *, abandon: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if abandon:  # what is saved is saved
            writer.abandon()
        else:
            writer.close()
        if writer.failed_saves:
            logger.warning("%d saves failed because the disk was full", writer.failed_saves)

    def _named_hooks(self) -> list[tuple[str, Hook]]:
        """Name each hook; a second one of the same name gets a number."""
        seen: dict[str, int] = {}
        named = []
        for hook in self.hooks:
            seen[hook.name] = number = seen.get(hook.name, 0) + 1
            named.append((hook.name if number == 1 else f"{hook.name}-{number}", hook))
        return named


def trained_part_of(model: nn.Module, config: TrainerConfig, *, is_shared_out: bool) -> TrainedPart | None:
    """Return what knows the trained part of a model; None where checkpoints hold the model, and it has no adapters."""
    adapts = has_adapters(model)
    if adapts and is_shared_out:
        refuse_shared_prompts(model)
    if not adapts and not config.save_trained_only:
        return None
    return TrainedPart(model, holds_all=config.save_trained_only is False)


def choose_checkpoint(config: TrainerConfig, folder: RunFolder, processes: Processes) -> Checkpoint | None:
    """Return the checkpoint to go on from; the main process chooses it for all."""
    found = processes.on_main(lambda: find_checkpoint(config, folder))
    path = processes.share(None if found is None else str(found.path))
    return Checkpoint(Path(path), believes_shards=True) if path is not None and found is None else found


def load_initial_weights(
    model: nn.Module, source: str | os.PathLike[str], processes: Processes, unset: Collection[str] = ()
) -> None:
    """Load the weights that a run begins with; the main process downloads those that are on the Hub."""
    found = processes.on_main(lambda: str(local_weights(source)))
    tell_weights(initial_weights(model, Path(str(processes.share(found))), unset), source)


def _refuse_missing(path: Path, store: CheckpointStore) -> None:
    if path.exists():
        return
    names = [store.path(step).name for step in store.steps()]
    there = f"has {', '.join(names)}; true takes the newest" if names else "has no checkpoint"
    meant = step_of(path.name)
    hint = f" Did you mean {str(store.path(meant))!r}?" if meant in store.steps() else ""
    raise NoSuchCheckpointError(
        f"resume_from_checkpoint={str(path)!r} does not exist; {store.root} {there}.{hint} Name the folder of a "
        "checkpoint, or leave the field out to start from the beginning."
    )


def find_checkpoint(config: TrainerConfig, folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint that the config asks for: the newest that verifies and makes sense, or the one at a path.

    Newer ones that do not are passed over with a warning; one at a path must. None if none is asked for, or if there
    never was one; where there are some and none can be used, it raises.
    """
    wanted = config.resume_from_checkpoint
    if not wanted:
        return None
    store = CheckpointStore(folder.checkpoints)
    if is_hub_address(wanted):
        return checked(store.open(fetch_into(folder, str(wanted), config.to_dict())))
    if wanted is not True and wanted not in NAMES:  # a Path is a place, also one that is called "best"
        _refuse_missing(Path(os.fspath(wanted)), store)
        return checked(store.open(Path(os.fspath(wanted))))
    if wanted == "best":
        return checked(store.open(store.path(_best_step(folder))))
    found, rejected = store.newest(refuse_nonsense)  # raises if there are some and none verifies
    for one in rejected:
        logger.warning("checkpoint %s is damaged and was passed over: %s", one.path, one.reason)
    if found is None:
        logger.info("nothing to resume in %s: starting from the beginning", folder.checkpoints)
    return found


def checked(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that can be used."""
    refuse_nonsense(checkpoint)
    return checkpoint


def going_on(setup: RunSetup, checkpoint: Checkpoint) -> RunSetup:
    """Return the setup of a run that goes on from a checkpoint: its schedules tick as often as they did there.

    That is where the config leaves the tick open and the plan would tick after updates. One that ticks at epoch ends
    stays so; `refuse_changes` tells of it where the checkpoint has it otherwise.
    """
    is_open = setup.config.lr_scheduling_steps is None and setup.plan.schedule_updates is not None
    if setup.only_for_eval or not is_open:
        return setup
    old_plan, old = Plan.from_dict(checkpoint.extra()["plan"]), read_mapping(checkpoint.path / CONFIG_FILE)
    return dataclasses.replace(setup, plan=keeping_ticks(setup.plan, setup.config.to_dict(), old_plan, old))


def refuse_nonsense(checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint, whose hashes may well be in order, says what no run has saved."""
    TrainerState.refuse_misfits(checkpoint.state())
    extra = checkpoint.extra()
    kept = extra if isinstance(extra, Mapping) else {}
    if odd := [name for name in NAMED_VALUES if not isinstance(kept.get(name), Mapping)]:
        raise CheckpointError(f"{checkpoint.path} holds no names with values as {odd[0]!r}")
    if not isinstance(kept.get("facts") or {}, Mapping) or not _is_plain(checkpoint, "facts"):
        raise CheckpointError(f"{checkpoint.path} holds facts of the run that are not names with plain values")
    if not all(map(_is_measured, kept["measured"].items())):
        raise CheckpointError(f"{checkpoint.path} holds measured values that are not numbers with their steps")
    try:
        read_mapping(checkpoint.path / CONFIG_FILE)
        Plan.from_dict(kept["plan"])
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def _is_plain(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a part of what is saved beside model and optimizer has neither tensors nor arrays."""
    extra = checkpoint.packed("extra")
    return not tensor_names(extra.get(name) if isinstance(extra, dict) else None)


def _is_measured(item: tuple[Any, Any]) -> bool:
    """Tell whether a name has a number, the step that it is of, and whether to smooth it."""
    match item:
        case [str(), [int() | float(), int(step), None | True | False]]:
            return 0 <= step < MOST_STEPS
    return False


def refuse_changes(checkpoint: Checkpoint, config: TrainerConfig, plan: Plan, facts: Mapping[str, Any]) -> None:
    """Raise with the list of what changed among that which decides an update; `accept_changes` lets it pass.

    `plan.exactness_changes` knows what does: not what only logs, saves, evaluates or ends the run, and another number
    of processes only where the samples of an update change with it, or where gradients are compressed.
    """
    old = read_mapping(checkpoint.path / CONFIG_FILE)
    extra = checkpoint.extra()
    old_plan = Plan.from_dict(extra["plan"])
    changes = exactness_changes(old, config.to_dict(), old_plan, plan)
    before = extra.get("facts") or facts
    changes += [f"{name}: {before.get(name)} in the checkpoint, {now} now" for name, now in facts.items()
                if before.get(name) != now]  # fmt: skip
    changes += _cut_window(checkpoint, old_plan, plan)
    if not changes:
        return
    listed = "\n".join(f"  {change}" for change in changes)
    if config.accept_changes:
        logger.warning("going on from %s with changes, so not exactly:\n%s", checkpoint.path, listed)
        return
    raise ConfigError(
        f"{checkpoint.path} cannot be resumed exactly, because something changed:\n{listed}\n"
        "Put it back; or begin another run, in another output_dir; or go on all the same with accept_changes=True."
    )


def _best_step(folder: RunFolder) -> int:
    if (step := read_best_step(folder.best)) is None:
        raise CheckpointError(f"resume_from_checkpoint='best', but {folder.best} does not exist: no best result yet")
    return step


def take_over(
    folder: RunFolder, store: CheckpointStore, state: TrainerState, checkpoint: Checkpoint | None, *, saves: bool
) -> None:
    """Make a folder the run's own: what an earlier run left is set aside (files of others stay), torn saves deleted.

    The main process does it; what it changes of the state is shared when the files are open.
    """
    store.clean()
    is_foreign = checkpoint is not None and checkpoint.path.resolve().parent != store.root.resolve()
    if state.global_step == 0 or is_foreign:
        if (previous := folder.move_previous_aside()) is not None:
            logger.info("an earlier run in this folder was moved to %s", previous)
        logs_dir = None if is_foreign else state.logs_dir  # which may have been asked for before the run begins
        state.update(files={}, logs_dir=logs_dir, best_checkpoint=None, best_metric_value=None)
        return
    for path in store.drop_after(state.global_step):
        logger.info("a checkpoint past step %d was set aside: %s", state.global_step, path)
    if saves:
        folder.write_best(state)


def apply_accepted(
    checkpoint: Checkpoint, config: TrainerConfig, optimizer: Optimizer, schedule: Schedule, model: nn.Module
) -> None:
    """Put changed optimizer settings into force, which the restored optimizer has as they were."""
    old = TrainerConfig.from_dict(read_mapping(checkpoint.path / CONFIG_FILE))
    if old.learning_rate != config.learning_rate and old.learning_rate > 0:
        schedule.scale_rates(config.learning_rate / old.learning_rate)
    before = old.optimizer_kwargs or {}
    settings = {
        name: value
        for name, value in (config.optimizer_kwargs or {}).items()
        if name not in before or before[name] != value
    }
    for group in optimizer.param_groups:
        group.update({name: value for name, value in settings.items() if name in group})
    if old.weight_decay != config.weight_decay:
        _set_weight_decay(optimizer, config, model)
    if config.momentum is not None and config.momentum != old.momentum and schedule.momentum is None:
        set_momentum(optimizer, config.momentum)


def _set_weight_decay(optimizer: Optimizer, config: TrainerConfig, model: nn.Module) -> None:
    made = parameters_of(model, config)
    own = made if isinstance(made, list) and len(made) == len(optimizer.param_groups) else optimizer.param_groups
    for group, like in zip(optimizer.param_groups, own, strict=True):
        group["weight_decay"] = config.weight_decay if like is group else like["weight_decay"]


def _cut_window(checkpoint: Checkpoint, old: Plan, new: Plan) -> list[str]:
    """Tell of an update that an earlier `max_steps` cut short: a longer run would have made it whole."""
    if old.counts_tokens:  # then runs end after whole updates
        return []
    state = TrainerState.from_dict(checkpoint.state())
    is_cut = state.position % old.window_samples and not state.epoch_finished
    if not is_cut or old.num_samples is None or new.counted_steps <= old.counted_steps:
        return []
    return [f"max_steps: it ended the run at step {state.global_step}, inside an update that would now be whole"]


def fetch_into(folder: RunFolder, address: str, own_config: Mapping[str, Any]) -> Path:
    """Bring a checkpoint from the Hub into the run's folder, with the records that belong to it; return its path."""
    found = fetch_checkpoint(address, folder.checkpoints, own_config=own_config)
    if not folder.all_logs.exists():  # else this machine has its own, which the run goes on with
        fetch_records(address, folder.root, before_step=step_of(found.name))
    logger.info("%s was fetched to %s", address, found)
    return found


def local_weights(source: str | os.PathLike[str]) -> Path:
    """Return where the initial weights are; those on the Hub are downloaded."""
    return fetch_weights(str(source)) if names_hub_weights(source) else Path(source)


def tell_weights(report: WeightReport, source: str | os.PathLike[str]) -> None:
    """Say what became of each name of the initial weights."""
    logger.info("%d tensors loaded from %s", len(report.loaded), source)
    for words, names in (
        ("not in it, so left as they are", report.missing),
        ("in it, but not in the model", report.unexpected),
        ("of another shape, so left as they are", report.mismatched),
    ):
        if names:
            logger.warning("%s: %s", words, ", ".join(names))


def write_weights(
    folder: Path, parts: Contents, model_file: str, model: nn.Module, max_shard_size: int | str | None = None
) -> None:
    """Write the model, in files of at most a size if one is given, or the files of its trained part."""
    if parts.part is None and max_shard_size is not None:
        write_split_tensors(folder, hub_tensors(model, parts.model), most_bytes(max_shard_size), model_file)
        return
    if parts.part is None:
        replace_file(folder / model_file, tensor_file(parts.model))
        return
    content = parts.part.record()
    for name, tensors in files_for_others(BaseRecord.read(content), parts.model, parts.part.computed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(folder / name, tensor_file(tensors))
    write_atomically(folder / BASE_FILE, content)


def _refuse_lost_place(source: Source, state: TrainerState) -> None:
    if source.resume_problem and state.position and not state.epoch_finished:
        raise DataError(f"cannot resume in the middle of an epoch: {source.resume_problem}")


def preprocessor_writer(preprocessor: Any) -> Callable[[Path], None] | None:
    """Return how to write a preprocessor into a folder: its `save_pretrained`, else its `save`."""
    if preprocessor is None:
        return None
    for method in ("save_pretrained", "save"):
        if hasattr(preprocessor, method):
            write = getattr(preprocessor, method)
            return lambda folder: write(str(folder))
    raise ConfigError(
        f"the preprocessor {type(preprocessor).__name__} has neither save_pretrained(folder) nor save(folder), so "
        "it cannot be kept with the model. Add one, or do not pass it."
    )

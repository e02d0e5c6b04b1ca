"""A run opened to look at: the weights of one of its checkpoints in a trainer that can only evaluate and predict."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint.best import read_best_step
from hezar_train.config import TrainerConfig
from hezar_train.errors import CheckpointError, ConfigError, DataError, choices, suggestion
from hezar_train.launch.building import build_recipe
from hezar_train.launch.hashing import changed_parts
from hezar_train.launch.inputs import Inputs, reader_of
from hezar_train.launch.recipe import LoadedRecipe
from hezar_train.launch.record import read_record
from hezar_train.types import TaskType

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = ["OpenRun", "open_run"]

BEST, LAST = "best", "last"
ANOTHER = "Take another one: --checkpoint last is the newest that is whole."
CLASSIFICATIONS = (TaskType.AUDIO_CLASSIFICATION, TaskType.IMAGE_CLASSIFICATION, TaskType.TEXT_CLASSIFICATION)


@dataclass(frozen=True)
class OpenRun:
    """A run with the weights of one checkpoint."""

    trainer: Trainer
    checkpoint: Path
    sets: Mapping[str, Any]
    """All data by name: splits, and evaluation sets."""
    evaluated: Any
    """What the run evaluates on; None if it has nothing for that."""
    make_reader: Callable[[], Callable[[Any], Any]]

    def evaluate(self, split: str | None = None) -> dict[str, float]:
        """Evaluate on the run's evaluation data, or on one set or split."""
        if split is not None and split not in self.sets:
            known = choices(self.sets)
            raise DataError(f"there is no split {split!r}. This recipe has: {known}.{suggestion(split, self.sets)}")
        data = self.evaluated if split is None else self.sets[split]
        if data is None:
            raise DataError(f"this recipe has no evaluation data. Name a split: --split {choices(self.sets)}")
        return self.trainer.evaluate(data)

    def predict(self, given: list[Any]) -> list[Any]:
        """Predict for texts, paths or JSON values, in their order; classes come by their names, if they have any."""
        found: Any = self.trainer.predict(Inputs(given, self.make_reader()))
        return [self._named(value) for value in found]

    def _named(self, value: Any) -> Any:
        """Return a class by its name: one of a sample, several that are on at once, or one for each token."""
        names, task = self._class_names, self.trainer.config.task
        if not names or task not in (*CLASSIFICATIONS, TaskType.SEQUENCE_LABELING):
            return value
        if not isinstance(value, list):
            return names.get(value, value)
        if task == TaskType.SEQUENCE_LABELING:
            return [names.get(one, one) for one in value]
        return [names.get(number, number) for number, is_on in enumerate(value) if is_on]

    @cached_property
    def _class_names(self) -> Mapping[int, str] | None:
        from hezar_train.checkpoint import unwrap
        from hezar_train.trainer.decoding import label_names_of

        return label_names_of(unwrap(self.trainer.model))


def open_run(loaded: LoadedRecipe, checkpoint: str = BEST) -> OpenRun:
    """Build a run's model and data with the weights of a checkpoint: "best", "last", or a step."""
    from hezar_train.runtime import logger
    from hezar_train.trainer.splits import Splits

    path = _checkpoint_of(loaded.config, checkpoint)
    if changed := changed_parts(read_record(Path(loaded.config.output_dir)), loaded.folder):
        logger.warning("%s has changed since this run began (%s)", loaded.folder, ", ".join(changed))
    built, module = build_recipe(loaded)
    splits = Splits.of(built.train_dataset, built.eval_dataset)
    evaluated = splits.for_evaluation
    data = splits.train if evaluated is None else evaluated  # without any, there is no trainer
    trainer = replace(built, train_dataset=None, eval_dataset=data).make_trainer(_for_looking(loaded.config, path))
    named = evaluated if isinstance(evaluated, Mapping) and all(isinstance(name, str) for name in evaluated) else {}
    return OpenRun(trainer, path, {**splits.data, **named}, evaluated, lambda: reader_of(module, trainer.preprocessor))


def _for_looking(config: TrainerConfig, checkpoint: Path) -> TrainerConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the config was read
        return replace(config, resume_from_checkpoint=str(checkpoint), init_weights_from=None, num_dataloader_workers=0)


def _checkpoint_of(config: TrainerConfig, wanted: str) -> Path:
    """Return the folder of a checkpoint that verifies, before anything is built for it."""
    from hezar_train.checkpoint import Checkpoint, CheckpointStore

    store = CheckpointStore(Path(config.output_dir) / config.checkpoints_dir)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{store.root} holds no checkpoint yet: there are no weights to look at")
    step = _step_of(config, wanted, steps, store.root)
    if step is None:
        newest, _ = store.newest()
        return store.path(steps[-1]) if newest is None else newest.path
    try:
        return Checkpoint(store.path(step)).path
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint {store.path(step)} is damaged: {error}. {ANOTHER}") from error


def _step_of(config: TrainerConfig, wanted: str, steps: list[int], folder: Path) -> int | None:
    """Return the step that is wanted; None for the newest that is whole."""
    if wanted == BEST:
        return _best_of(Path(config.output_dir), steps)
    if wanted == LAST:
        return None
    if not wanted.isdigit() or int(wanted) not in steps:
        raise ConfigError(
            f"there is no checkpoint {wanted!r} in {folder}. There are: best, last, {', '.join(map(str, steps))}."
        )
    return int(wanted)


def _best_of(run: Path, steps: list[int]) -> int | None:
    try:
        best = read_best_step(run / "best.json")
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {ANOTHER}") from error
    if best is not None and best not in steps:
        raise CheckpointError(f"{run / 'best.json'} names step {best}, which has no checkpoint. {ANOTHER}")
    return best

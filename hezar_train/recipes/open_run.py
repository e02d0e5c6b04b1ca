"""Open a run to evaluate it or to predict with it: the weights of one checkpoint in a trainer without training data.

What a person wants predictions for is an input: a text, the path of a file, or a JSON value. The recipe's function
`read(given, preprocessor)` makes a sample of it, of the form that its datasets have, without labels; it asks for a text
or for a file (`text_of`, `path_of`), and what is neither is refused with a sentence. A recipe without `read` is served
by its preprocessor, called with the input. Nothing is read before it is fetched.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint.manifest import read_best_step
from hezar_train.config import TrainerConfig
from hezar_train.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HezarTrainError,
    choices,
    suggestion,
    why_unreadable,
)
from hezar_train.recipes.build import build_recipe, refuse_changed_recipe
from hezar_train.recipes.recipe import RECIPE_NAME, LoadedRecipe
from hezar_train.run_layout import RunLayout
from hezar_train.types import TaskType

if TYPE_CHECKING:
    from hezar_train.trainer import Trainer

__all__ = [
    "Inputs",
    "OpenRun",
    "gather_inputs",
    "open_run",
    "path_of",
    "reader_of",
    "text_of",
]


BEST, LAST = "best", "last"
ANOTHER = "Take another one: --checkpoint last is the newest that is whole."
CLASSIFICATIONS = (TaskType.AUDIO_CLASSIFICATION, TaskType.IMAGE_CLASSIFICATION, TaskType.TEXT_CLASSIFICATION)

STANDARD_INPUT = "-"
TEXT_SUFFIX = ".txt"
JSON_LINES_SUFFIX = ".jsonl"
TEXT_KEY = "text"
PATH_KEYS = ("path", "image", "audio")
WRONG_INPUT = (OSError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""What a recipe's `read` raises of something that it was not made for; torch and readers of sounds say RuntimeError."""


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
        inputs = Inputs(given, self.make_reader())
        try:
            found: Any = self.trainer.predict(inputs)
        except WRONG_INPUT as error:
            if isinstance(error, HezarTrainError):
                raise
            noted = "".join(f" {note.partition(' If that')[0]}" for note in getattr(error, "__notes__", ()))
            raise DataError(
                f"the model cannot predict for what was given: {type(error).__name__}: {error}. Expected inputs of the "
                f"form that it was trained on.{noted} Correct the inputs, or what the recipe's read() makes of them."
            ) from error
        return [self._named(value) for value in found]

    def export(
        self, folder: str | os.PathLike[str], *, merge: bool = False, max_shard_size: int | str | None = None
    ) -> None:
        """Write the model for others; with `merge`, the whole of it, adapters merged into its weights."""
        if merge:
            self.trainer.save(folder, merge=True, max_shard_size=max_shard_size)
        else:
            self.trainer.parts.checkpointing.write_model(Path(folder), max_shard_size)

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
        from hezar_train.trainer.generation import label_names_of

        return label_names_of(unwrap(self.trainer.model))


def open_run(loaded: LoadedRecipe, checkpoint: str = BEST) -> OpenRun:
    """Build a run's model and data with the weights of a checkpoint: "best", "last", or a step."""
    from hezar_train.data.splits import Splits

    path = _checkpoint_of(loaded.config, checkpoint)
    refuse_changed_recipe(loaded, "so it is not what these weights were trained with", "take it all the same: --trust")
    built, module = build_recipe(loaded)
    splits = Splits.of(built.train_dataset, built.eval_dataset)
    evaluated = splits.for_evaluation
    data = splits.train if evaluated is None else evaluated  # without any, there is no trainer
    trainer = replace(built, train_dataset=None, eval_dataset=data).make_trainer(_for_evaluation(loaded.config, path))
    named = evaluated if isinstance(evaluated, Mapping) and all(isinstance(name, str) for name in evaluated) else {}
    return OpenRun(trainer, path, {**splits.data, **named}, evaluated, lambda: reader_of(module, trainer.preprocessor))


def _for_evaluation(config: TrainerConfig, checkpoint: Path) -> TrainerConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were shown when the config was read
        # The initial weights stay named: a checkpoint of the trained part may stand on them.
        return replace(config, resume_from_checkpoint=str(checkpoint), num_dataloader_workers=0)


def _checkpoint_of(config: TrainerConfig, wanted: str) -> Path:
    """Return the folder of a checkpoint that verifies, before anything is built for it."""
    from hezar_train.checkpoint import Checkpoint, CheckpointStore

    store = CheckpointStore(RunLayout.of(config).checkpoints)
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
        raise CheckpointError(f"the checkpoint {store.path(step)} is damaged: {error}. {_another(steps)}") from error


def _another(steps: list[int]) -> str:
    return ANOTHER if len(steps) > 1 else "The run has no other one: restore it from a copy, or train again."


def _step_of(config: TrainerConfig, wanted: str, steps: list[int], folder: Path) -> int | None:
    """Return the step that is wanted; None for the newest that is whole."""
    if wanted == BEST:
        return _best_of(RunLayout.of(config).best, steps)
    if wanted == LAST:
        return None
    if not (wanted.isascii() and wanted.isdigit()) or int(wanted) not in steps:
        raise ConfigError(
            f"there is no checkpoint {wanted!r} in {folder}. There are: best, last, {', '.join(map(str, steps))}."
        )
    return int(wanted)


def _best_of(file: Path, steps: list[int]) -> int | None:
    try:
        best = read_best_step(file)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {ANOTHER}") from error
    if best is not None and best not in steps:
        raise CheckpointError(f"{file} names step {best}, which has no checkpoint. {ANOTHER}")
    return best


class Inputs:
    """Inputs as a dataset; each becomes a sample when it is fetched."""

    def __init__(self, given: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self.given, self._read = given, read

    def __len__(self) -> int:
        return len(self.given)

    def __getitem__(self, index: int) -> Any:
        given = self.given[index]
        try:
            return self._read(given)
        except WRONG_INPUT as error:
            reason = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"input {index + 1} of {len(self)}, {str(given)!r}, cannot be made a sample: {reason}. Expected what "
                "the recipe's read(), or its preprocessor, takes: correct the input, or that code."
            ) from error


def gather_inputs(files: Sequence[str]) -> list[Any]:
    """Return the inputs in files: the lines of `.txt` and `.jsonl`, the files of a folder, else each file itself."""
    found = [given for file in files for given in _inputs_in(file)]
    if not found:
        raise DataError(f"there is nothing to predict for: {'; '.join(map(_lack_of, files))}. Give an input a line.")
    return found


def reader_of(module: ModuleType, preprocessor: Any) -> Callable[[Any], Any]:
    """Return how a recipe turns an input into a sample."""
    own = getattr(module, "read", None)
    if callable(own):
        return lambda given: own(given, preprocessor)
    if callable(preprocessor):
        return lambda given: preprocessor(str(given) if isinstance(given, Path) else given)
    raise DataError(
        "this recipe does not say how a text or a file becomes a sample: define read(given, preprocessor) in its "
        f"{RECIPE_NAME}, or let build() return a preprocessor that can be called with one."
    )


def _inputs_in(file: str) -> Iterator[Any]:
    if file == STANDARD_INPUT:
        yield from _lines(sys.stdin.read())
        return
    path = Path(file)
    if not path.exists():
        raise DataError(
            f"{path}: there is no such file. A text is given in a .txt file, a line each, or on standard input: "
            "echo 'some text' | hezar-train predict RUN -"
        )
    if path.is_dir():
        yield from sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
    elif path.suffix == TEXT_SUFFIX:
        yield from _lines(_text_of(path))
    elif path.suffix == JSON_LINES_SUFFIX:
        yield from _json_lines(path)
    else:
        yield path


def _lack_of(file: str) -> str:
    if Path(file).is_dir():
        return f"the folder {file} has no files (hidden ones, and those in folders below, are not read)"
    return f"{'the standard input' if file == STANDARD_INPUT else file} has no line that is not empty"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {why_unreadable(error)}") from error


def _json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_text_of(path).split("\n"), start=1):
        if line.strip():
            try:
                yield _plain_input(json.loads(line), path.parent)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON: {error.msg}. Expected one JSON value a line; texts as they "
                    "are go into a .txt file."
                ) from error
            except RecursionError as error:
                raise DataError(f"{path}, line {number} is nested too deeply; expected a plain JSON value.") from error


def _plain_input(value: Any, folder: Path) -> Any:
    """Return the text or the path that an object is about, where it says so; a path is seen from the file's folder."""
    if not isinstance(value, dict):
        return value
    if isinstance(value.get(TEXT_KEY), str):
        return value[TEXT_KEY]
    path = next((value[key] for key in PATH_KEYS if isinstance(value.get(key), str)), None)
    return value if path is None else folder / path


def text_of(given: Any) -> str:
    """Return a text as it is; refuse a file, and any other JSON value."""
    if isinstance(given, str):
        return given
    raise DataError(
        f"{given} is {_kind_of(given)}; a text is expected. Put texts into a .txt file, a line each, or into a .jsonl "
        'file as {"text": ...}'
    )


def path_of(given: Any) -> Path:
    """Return the path of a file, which may be written as a text; refuse any other JSON value."""
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise DataError(
        f'{given} is {_kind_of(given)}; a file is expected. Name the file itself, or in a .jsonl file {{"path": ...}}'
    )


def _kind_of(given: Any) -> str:
    return "a file" if isinstance(given, os.PathLike) else f"a JSON value of the type {type(given).__name__}"

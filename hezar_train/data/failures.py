"""Errors of a user's own dataset or collator: which sample it was, of which dataset, in which worker.

An error stays the one that was raised, and gets a note (`add_note`), which tracebacks and the command line show. A
worker sends its error home with the lines of the user's own code; what ends a worker is told as such.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import get_worker_info

from hezar_train.data.collators import IGNORED_LABEL
from hezar_train.data.windows import SampleIndices, Window
from hezar_train.errors import DataError, HezarTrainError, TrainingInterrupted, a_kind, is_ours, is_own_code, shown_path

__all__ = [
    "WorkerFailure",
    "collated",
    "form_of",
    "note_samples",
    "opened",
    "read_sample",
    "read_samples",
    "unfit_values",
]

MOST_NAMED = 16
DIED = (
    "A worker process that reads samples ended by itself: it was killed (often for lack of memory), crashed in a "
    "library, or the dataset ended the process. num_dataloader_workers=0 reads in the main process, where the cause "
    "shows; with fewer workers, less memory is needed."
)


def read_sample(dataset: Any, index: int) -> Any:
    """Return one sample; an error says which one it was."""
    try:
        return dataset[index]
    except TrainingInterrupted:
        raise
    except (StopIteration, SystemExit) as end:
        raise DataError(
            f"sample {index} of {_name(dataset)}: its __getitem__ ended with {type(end).__name__}{_last_line(end)}; "
            f"expected a sample, or an error that says what is wrong. {_instead_of(end)}"
        ) from end
    except HezarTrainError:
        raise
    except Exception as error:
        beyond = " Is its length right?" if isinstance(error, IndexError) else ""
        error.add_note(f"This was raised while sample {index} of {_name(dataset)} was read.{beyond}")
        raise


def read_samples(dataset: Any, indices: list[int]) -> Any:
    """Return several samples at once, where a dataset offers that."""
    get_many = getattr(dataset, "__getitems__", None)
    if get_many is None:
        return [read_sample(dataset, index) for index in indices]
    try:
        return get_many(indices)
    except Exception as error:
        error.add_note(f"This was raised while the samples {_listed(indices)} of {_name(dataset)} were read.")
        raise


def collated(collate: Callable[[list[Any]], Any], samples: Any, dataset: Any, indices: SampleIndices) -> Any:
    """Make a batch of samples; an error says which samples they were, in their order."""
    try:
        return collate(samples)
    except Exception as error:
        own = getattr(collate, "__name__", type(collate).__name__)
        error.add_note(
            f"This was raised while {own} made a batch of the samples {_listed(indices)} (in this order) of "
            f"{_name(dataset)}.{_named_row(error, indices)}"
        )
        raise


def form_of(value: Any) -> str:
    """Say in an error what kind and shape of thing a value is."""
    if isinstance(value, torch.Tensor | np.ndarray):
        shape = "x".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')} of shape {shape}" if value.shape else "a single number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {form_of(each)}" for key, each in list(value.items())[:MOST_NAMED]) + "}"
    if isinstance(value, list | tuple):
        if not value:
            return f"an empty {type(value).__name__}"
        if all(isinstance(each, str) for each in value):
            return f"{len(value)} texts"
        more = "; ..." if len(value) > 4 else ""
        return f"a {type(value).__name__} of {len(value)} ({'; '.join(form_of(each) for each in value[:4])}{more})"
    return "a text" if isinstance(value, str) else "None" if value is None else a_kind(value)


def shown_of(value: Any) -> str:
    """Say in an error what a value is: a text or a number itself, of others the kind and shape."""
    return f"{value!r:.80}, {form_of(value)}" if isinstance(value, str | int | float) else form_of(value)


def note_samples(error: Exception, window: Window, number: int, data: str) -> None:
    """Note of which samples the batch of so high a number in its window was made, where their numbers are known."""
    if number < len(window.indices):
        indices = window.indices[number]
        batch = window.batches[number] if number < len(window.batches) else None
        is_told = not isinstance(error, HezarTrainError)  # where the model was called
        form = f" ({form_of(batch)})" if isinstance(batch, torch.Tensor) and not is_told else ""
        error.add_note(
            f"The batch{form} held the samples {_listed(indices)} (in this order) of the {data}."
            f"{_named_row(error, indices)}"
        )


def unfit_values(window: Window) -> str:
    """Say which values of a window's batches no loss can be computed of: not finite, or nothing but ignored labels."""
    for number, batch in enumerate(window.batches):
        indices = window.indices[number] if number < len(window.indices) else ()
        is_named = isinstance(batch, Mapping)
        parts = batch.items() if is_named else enumerate(batch) if isinstance(batch, list | tuple) else [(0, batch)]
        for name, part in parts:
            what = f"key {name!r}" if is_named else f"entry {name}"
            if isinstance(part, torch.Tensor) and part.is_floating_point() and not part.isfinite().all():
                first = (~part.isfinite()).nonzero()[0]
                value, row = part[tuple(first)].item(), int(first[0]) if len(first) else 0
                whose = f" of sample {int(indices[row])}" if len(indices) == len(part) else ""
                return f"The data itself holds {value} ({what}{whose}): correct it there"
            if isinstance(part, torch.Tensor) and part.dtype == torch.int64 and (part == IGNORED_LABEL).all():
                return (
                    f"All of {what} is {IGNORED_LABEL}, which leaves a label out: give some sample of a batch a label"
                )
    return ""


def _named_row(error: Exception, indices: SampleIndices) -> str:
    """Name the sample that an error is about, where it tells the row and there is one for each sample."""
    row, num_rows = getattr(error, "place", None) or (0, 0)
    return f" It is about sample {int(indices[row])}." if num_rows and num_rows == len(indices) else ""


def _instead_of(end: BaseException) -> str:
    """Say what to do about code that ended without an error of its own."""
    if isinstance(end, SystemExit):
        return "Remove the call that ends the program, or raise an error instead."
    return "If next() was called there, it found nothing more: give it a default that is a sample, or raise an error."


def _last_line(end: BaseException) -> str:
    """Say in which line of the user's own code something ended."""
    frames = [frame for frame in traceback.extract_tb(end.__traceback__) if is_own_code(frame.filename)]
    return f" ({shown_path(frames[-1].filename)}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


@dataclass(frozen=True)
class WorkerFailure:
    """An error on its way from a worker to the main process."""

    rebuild: tuple[Any, tuple[Any, ...]] | None
    words: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, error: BaseException) -> WorkerFailure:
        """Take down an error with the lines of the user's own code that led to it."""
        worker = get_worker_info()
        lines = "".join(_own_lines(error))
        place = "" if worker is None else f"In worker {worker.id} of {worker.num_workers}{':' if lines else '.'}\n"
        notes = (place + lines, *getattr(error, "__notes__", ()))
        return cls(_recipe_of(error), f"{type(error).__name__}: {error}", notes)

    def raise_again(self) -> NoReturn:
        """Raise the same error here; one that cannot be made again comes as a RuntimeError in its words."""
        error = self._made_again()
        for note in self.notes:
            error.add_note(note.rstrip())
        raise error

    def _made_again(self) -> BaseException:
        if self.rebuild is None:
            return RuntimeError(self.words)
        kind, arguments = self.rebuild
        try:
            return kind(*arguments)  # type: ignore[no-any-return]
        except TypeError:  # its constructor takes something else than it keeps
            return RuntimeError(self.words)


def opened(answers: Iterator[Any]) -> Iterator[Any]:
    """Yield what workers answer; raise what one of them raised."""
    try:
        for answer in answers:
            if isinstance(answer, WorkerFailure):
                answer.raise_again()
            yield answer
    except RuntimeError as error:
        if "exited unexpectedly" in str(error) or "is killed by signal" in str(error):
            error.add_note(DIED)
        raise


def _recipe_of(error: BaseException) -> tuple[Any, tuple[Any, ...]] | None:
    """Return class and arguments, if another process finds the class by its name and the arguments are plain."""
    reduced: Any = error.__reduce__()
    kind, arguments = reduced[:2]
    found = getattr(sys.modules.get(type(error).__module__), type(error).__qualname__, None)
    arguments = tuple(
        {name: value for name, value in each.items() if name != "__notes__"} if isinstance(each, dict) else each
        for each in arguments
    )
    is_plain = all(each is type(error) or _is_plain(each) for each in arguments)
    return (kind, arguments) if found is type(error) and is_plain else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float | None)


def _own_lines(error: BaseException) -> list[str]:
    """Return the frames of the user's own code; where there are none, those of libraries without this package's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    return traceback.format_list([frame for frame in frames if is_own_code(frame.filename)] or frames)


def _name(dataset: Any) -> str:
    """Name a dataset by its class and length, if it tells one."""
    try:
        return f"{type(dataset).__name__} ({len(dataset)} samples)"
    except (TypeError, ValueError, NotImplementedError):
        return type(dataset).__name__


def _listed(indices: SampleIndices) -> str:
    named = ", ".join(str(int(index)) for index in indices[:MOST_NAMED])
    return named if len(indices) <= MOST_NAMED else f"{named} and {len(indices) - MOST_NAMED} more"

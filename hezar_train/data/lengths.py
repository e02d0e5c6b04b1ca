"""How long each sample is: measured once, checked, and kept in a file that is read back strictly.

A length is the number of a sample's tokens (or frames, or whatever is padded): what a `length_column` says, what a
user's `sample_length()` returns, or else the number of its token ids. Columns of a `datasets.Dataset` are read without
the samples; everything else is one pass over the data, each sample read as the training reads it, with its own seed.

Lengths decide which samples make an update, so they are part of a run. Their digest is compared at a resume; the file
lets `audit` compute the run's windows without the data. It also saves the pass of the next start, where the data tells
its `fingerprint` and lengths follow from the data alone; where they do not, the pass is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hezar_train.config.files import write_atomically
from hezar_train.data.collators import TOKEN_ID_ENDINGS
from hezar_train.data.failures import form_of, read_sample, read_samples
from hezar_train.data.loader import MapDataset, is_pure
from hezar_train.data.seeding import preserved_randomness, sample_seed, seed_python_numpy_torch
from hezar_train.errors import CheckpointError, DataError, choices, suggestion
from hezar_train.run_folder import read_file

__all__ = ["LengthOf", "Lengths", "fingerprint_of", "length_of_sample", "measure"]

LengthOf: TypeAlias = Callable[[Any], int]
Numbers: TypeAlias = npt.NDArray[np.int64]

LONGEST = (1 << 31) - 1
FORMAT = "hezar_train lengths 1"
MOST_HEADER_BYTES = 4096
BYTES_EACH = 4
NAME_COLUMN = "Name the column of the tokens, or of their number, as length_column"
BLOCK = 4096  # samples that are read at a time where reading them draws nothing


class Lengths:
    """The length of each sample, by its number; none is below 1."""

    def __init__(self, tokens: Any, fingerprint: str = "") -> None:
        """Check and keep; `fingerprint` tells of which data they are, if that is known."""
        self.tokens = _checked(np.asarray(tokens))
        self.fingerprint = fingerprint

    @cached_property
    def digest(self) -> str:
        """A hash by which two runs can tell whether their data has the same lengths."""
        return hashlib.blake2b(self.tokens.astype("<u4").tobytes(), digest_size=16).hexdigest()

    @cached_property
    def longest(self) -> int:
        return int(self.tokens.max(initial=0))

    @cached_property
    def total(self) -> int:
        return int(self.tokens.sum())

    def __len__(self) -> int:
        return len(self.tokens)

    def refuse_longer(self, limit: int, field: str) -> None:
        """Raise if a sample can never fit."""
        if self.longest <= limit:
            return
        number = int(self.tokens.argmax())
        raise DataError(
            f"sample {number} of the training data has {self.longest} tokens, and {field}={limit} lets no step or "
            f"update have so many ({int((self.tokens > limit).sum())} samples are too long). Samples are never split: "
            f"truncate them, leave them out of the dataset, or raise {field}."
        )

    def save(self, path: Path) -> None:
        """Write the lengths: a line that tells of them, then four bytes for each."""
        header = {
            "format": FORMAT, "count": len(self), "digest": self.digest, "fingerprint": self.fingerprint,
        }  # fmt: skip
        write_atomically(path, json.dumps(header).encode() + b"\n" + self.tokens.astype("<u4").tobytes())

    @classmethod
    def load(cls, path: Path, count: int) -> Lengths:
        """Read the lengths of so many samples; raise if the file does not hold just that."""
        content = read_file(path, MOST_HEADER_BYTES + BYTES_EACH * count)
        header, _, data = content.partition(b"\n")
        try:
            told = json.loads(header[:MOST_HEADER_BYTES])
            is_whole = (told["format"], told["count"], len(data)) == (FORMAT, count, BYTES_EACH * count)
            fingerprint, digest = str(told["fingerprint"]), told["digest"]
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole, fingerprint, digest = False, "", ""
        if not is_whole:
            raise CheckpointError(
                f"{path} does not hold the lengths of {count} samples: it is damaged, or of other data"
            )
        found = cls(np.frombuffer(data, dtype="<u4"), fingerprint)
        if found.digest != digest:
            raise CheckpointError(f"{path} is damaged: its lengths are not those that were written")
        return found


def _checked(tokens: npt.NDArray[Any]) -> Numbers:
    """Return whole numbers from 1 on, one a sample; raise naming the first that is none."""
    if tokens.ndim != 1 or tokens.dtype.kind not in "iuf":
        raise DataError(
            f"the lengths are {tokens.dtype} of shape {tokens.shape}; expected a whole number for each sample."
        )
    with np.errstate(invalid="ignore"):
        is_length = (tokens >= 1) & (tokens <= LONGEST) & (tokens == np.floor(tokens))
    if not is_length.all():
        number = int(np.flatnonzero(~is_length)[0])
        raise DataError(
            f"sample {number} has the length {tokens[number]}; expected a whole number of at least 1. Leave samples "
            "without content out of the dataset, and give every sample its length."
        )
    return tokens.astype(np.int64)


def fingerprint_of(dataset: Any, column: str | None, length_of: LengthOf | None) -> str:
    """Return what tells data and the way to its lengths from others; empty where nothing does.

    `datasets` hashes every step that led to a dataset; a dataset of one's own may have a `fingerprint`. What a user's
    function computes, nobody knows.
    """
    found = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if not isinstance(found, str) or not found or length_of is not None:
        return ""
    text = json.dumps([type(dataset).__qualname__, len(dataset), found, column])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def measure(dataset: MapDataset, column: str | None, length_of: LengthOf | None, seed: int) -> Lengths:
    """Return the lengths of all samples: by a user's function, by a column, or by their token ids."""
    fingerprint = fingerprint_of(dataset, column, length_of)
    if length_of is None and (found := _from_table(dataset, column)) is not None:
        return Lengths(found, fingerprint)
    chosen = length_of or (lambda sample: length_of_sample(sample, column))
    tokens = []
    with preserved_randomness():
        for number, sample in enumerate(_samples(dataset, seed)):
            tokens.append(_length(chosen, sample, number))
    return Lengths(np.array(tokens, dtype=np.int64), fingerprint)


def _length(length_of: LengthOf, sample: Any, number: int) -> int:
    found = length_of(sample)
    if isinstance(found, bool) or not isinstance(found, Integral | np.integer):
        raise DataError(
            f"the length of sample {number} is {found!r:.80} ({type(found).__name__}); expected a whole number of at "
            "least 1. Return one from sample_length(), or name a column that has one for every sample."
        )
    return int(found)


def _samples(dataset: MapDataset, seed: int) -> Iterator[Any]:
    """Yield the samples in order, each read as in training."""
    if is_pure(dataset):
        for start in range(0, len(dataset), BLOCK):
            yield from read_samples(dataset, list(range(start, min(start + BLOCK, len(dataset)))))
        return
    for number in range(len(dataset)):
        seed_python_numpy_torch(sample_seed(seed, 0, number))
        yield read_sample(dataset, number)


def length_of_sample(sample: Any, column: str | None = None) -> int:
    """Return how long a sample is: what its column says or holds, else the number of its token ids."""
    if not isinstance(sample, Mapping):
        if column is None and isinstance(sample, list | tuple) and sample and hasattr(sample[0], "__len__"):
            return _size("the first entry", sample[0])
        raise _unknown(sample, column)
    if column is None:
        column = _token_column(sample)
    if column is None or column not in sample:
        raise _unknown(sample, column)
    return _size(f"the column {column!r}", sample[column])


def _token_column(names: Iterable[Any]) -> str | None:
    """Return the first name of token ids; None if there is none."""
    return next((name for name in names if isinstance(name, str) and name.endswith(TOKEN_ID_ENDINGS)), None)


def _size(what: str, value: Any) -> int:
    """Return a number as it is, and the length of what has one."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if getattr(value, "ndim", None) == 0:
        return _size(what, value.item())
    if hasattr(value, "__len__") and not isinstance(value, str | bytes | Mapping):
        return len(value)
    raise DataError(
        f"{what} of a sample is {form_of(value)}, which has no length in tokens; expected a whole number, or a list or "
        "tensor of one entry a token. Name another length_column, or override sample_length()."
    )


def _unknown(sample: Any, column: str | None) -> DataError:
    is_named = isinstance(sample, Mapping)
    has = f"a mapping with {choices(map(repr, sample))}" if is_named else form_of(sample)
    if column is not None and is_named:
        return _no_column(column, "a sample", list(map(str, sample)))
    if column is not None:
        return DataError(
            f"length_column={column!r} is a name, and a sample is {has}, without names. Leave length_column out, to "
            "count its first entry; return mappings from the dataset; or override sample_length(sample) of the Trainer."
        )
    wanted = f" with a key that ends in {' or '.join(TOKEN_ID_ENDINGS)}"
    return DataError(
        f"a sample's length is not known: it is {has}; expected a mapping{wanted}. {NAME_COLUMN}, or override "
        "sample_length(sample) of the Trainer."
    )


def _no_column(column: str, what: str, names: list[str]) -> DataError:
    """Return the refusal of data that has not the column which was named."""
    tokens = _token_column(names)
    without = "" if tokens is None else f"Leave length_column out, to count {tokens!r}; or "
    name = NAME_COLUMN if tokens is None else f"{NAME_COLUMN[0].lower()}{NAME_COLUMN[1:]}"
    return DataError(
        f"length_column={column!r} is not in {what}, which has {choices(map(repr, names))}.{suggestion(column, names)} "
        f"{without}{name}; or override sample_length(sample) of the Trainer."
    )


def _from_table(dataset: Any, column: str | None) -> npt.NDArray[Any] | None:
    """Read lengths off a column of a `datasets.Dataset`, without its samples; None for data of another form."""
    is_table = type(dataset).__module__.partition(".")[0] == "datasets" and hasattr(dataset, "column_names")
    if not is_table or not is_pure(dataset):
        return None
    names = list(dataset.column_names)
    if column is None:
        column = _token_column(names)
    elif column not in names:
        raise _no_column(column, "the data", names)
    if column is None:
        raise DataError(
            f"the lengths of the samples are not known: the data has {choices(map(repr, names))}, and no column that "
            f"ends in {' or '.join(TOKEN_ID_ENDINGS)}. {NAME_COLUMN}, or override sample_length(sample) of the Trainer."
        )
    return _column_lengths(dataset.with_format("arrow"), column)


def _column_lengths(table: Any, column: str) -> npt.NDArray[Any]:
    import pyarrow  # type: ignore[import-untyped]  # which comes with datasets
    import pyarrow.compute  # type: ignore[import-untyped]

    found = [np.empty(0, dtype=np.int64)]
    for start in range(0, len(table), BLOCK * 16):
        values = table[start : start + BLOCK * 16][column]
        is_list = str(values.type).startswith(("list<", "large_list<", "fixed_size_list<"))
        if not is_list and not pyarrow.types.is_integer(values.type):
            raise DataError(
                f"the column {column!r} is of type {values.type}, which has no length in tokens; expected whole "
                "numbers or lists. Name another length_column, or override sample_length()."
            )
        if is_list:
            values = pyarrow.compute.list_value_length(values)
        found.append(pyarrow.compute.fill_null(values, 0).to_numpy().astype(np.int64))
    return np.concatenate(found)

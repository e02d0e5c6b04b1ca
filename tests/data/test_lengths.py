"""Where lengths come from, what is no length, and the file that keeps them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hezar_train.data import Lengths, length_of_sample
from hezar_train.data.lengths import fingerprint_of, measure
from hezar_train.errors import CheckpointError, DataError
from hezar_train.run_folder import RunFolderError

ROWS = [{"input_ids": [1, 2, 3], "size": 7}, {"input_ids": [4], "size": 2}]


@pytest.mark.parametrize(
    ("sample", "column", "length"),
    [
        ({"input_ids": [1, 2]}, None, 2),
        ({"token_ids": torch.ones(5), "labels": 1}, None, 5),
        ({"size": 9}, "size", 9),
        ({"size": torch.tensor(4)}, "size", 4),
        ({"frames": np.ones((6, 80))}, "frames", 6),
        ((torch.ones(3), 1), None, 3),
    ],
)
def test_a_sample_tells_its_length(sample: Any, column: str | None, length: int) -> None:
    assert length_of_sample(sample, column) == length


@pytest.mark.parametrize(
    ("sample", "column", "words"),
    [
        (
            {"text": "a"},
            None,
            r"not known: it is a mapping with 'text'; expected a mapping with a key that ends in token_ids",
        ),
        ({"text": "a"}, "size", "length_column='size' is not in a sample, which has 'text'"),
        ({"text": "a"}, "text", "the column 'text' of a sample is a text.* no length in tokens"),
        (torch.ones(()), None, "not known"),
    ],
)
def test_an_unknown_length_is_told(sample: Any, column: str | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        length_of_sample(sample, column)


@pytest.mark.parametrize("tokens", [[3, 0], [3, -1], [3, np.nan], [3, 1.5], [[1]], ["a"]])
def test_what_is_no_length_is_refused(tokens: Any) -> None:
    with pytest.raises(DataError, match="expected a whole number"):
        Lengths(tokens)


def test_lengths_come_from_a_function_a_column_or_the_token_ids() -> None:
    assert measure(ROWS, None, None, 0).tokens.tolist() == [3, 1]
    assert measure(ROWS, "size", None, 0).tokens.tolist() == [7, 2]
    assert measure(ROWS, None, lambda sample: 10 * sample["size"], 0).tokens.tolist() == [70, 20]
    with pytest.raises(DataError, match=r"the length of sample 0 is 1\.5 \(float\)"):
        measure(ROWS, None, lambda _: 1.5, 0)  # type: ignore[arg-type,return-value]


def test_a_column_of_a_table_is_read_without_its_samples() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    assert measure(table, None, None, 0).tokens.tolist() == [3, 1]
    assert measure(table, "size", None, 0).tokens.tolist() == [7, 2]
    assert measure(table.select([1, 0]), "size", None, 0).tokens.tolist() == [2, 7]
    with pytest.raises(
        DataError,
        match=r"length_column='length' is not in the data, which has 'input_ids', 'size'\. Leave length_column out",
    ):
        measure(table, "length", None, 0)
    changed = table.with_transform(lambda rows: {"input_ids": [[0] * 4 for _ in rows["size"]]})
    assert measure(changed, None, None, 0).tokens.tolist() == [4, 4]
    prints = [fingerprint_of(one, None, None) for one in (table, table.select([1, 0]), changed)]
    assert len({*prints, fingerprint_of(table, "size", None)}) == 4
    assert fingerprint_of(table, None, len) == fingerprint_of(ROWS, None, None) == ""


def test_a_sample_is_measured_as_it_is_trained_on_and_nothing_else_draws() -> None:
    class Drawing:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": [0] * random.randint(1, 1000)}

    random.seed(1)
    before = random.getstate()
    first = measure(Drawing(), None, None, 3)
    assert random.getstate() == before
    assert measure(Drawing(), None, None, 3).digest == first.digest != measure(Drawing(), None, None, 4).digest


def test_lengths_are_read_back(tmp_path: Path) -> None:
    path, lengths = tmp_path / "lengths.bin", Lengths([3, 1, 70_000], "of what")
    lengths.save(path)
    found = Lengths.load(path, 3)
    assert (found.tokens.tolist(), found.digest, found.fingerprint) == ([3, 1, 70_000], lengths.digest, "of what")


def test_a_file_that_is_not_just_that_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.bin"
    Lengths([3, 1, 2]).save(path)
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match="does not hold the lengths of 4 samples"):
        Lengths.load(path, 4)
    for damaged in (whole[:-1], b"", b"\n", b"[]\n" + whole, b"{}\n", whole.replace(b"lengths 1", b"lengths 2")):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="does not hold the lengths of 3 samples"):
            Lengths.load(path, 3)
    path.write_bytes(whole[:-4] + b"\5\0\0\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        Lengths.load(path, 3)
    path.write_bytes(whole + b"x" * 9000)
    with pytest.raises(RunFolderError, match="has more than"):
        Lengths.load(path, 3)
    header = {"format": "hezar_train lengths 1", "count": 3, "digest": "", "fingerprint": "x"}
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"\0" * 12)
    with pytest.raises(DataError, match="sample 0 has the length 0"):
        Lengths.load(path, 3)

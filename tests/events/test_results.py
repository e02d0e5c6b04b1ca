from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import flatten_results_dict, print_csv_format

names = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=3)
nested = st.recursive(st.floats(allow_nan=False), lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3))


def unflatten(flat: dict) -> dict:
    results: dict = {}
    for name, value in flat.items():
        *outer, last = name.split("/")
        place = results
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return results


@given(st.dictionaries(names, nested, max_size=3))
def test_flat_results_make_the_nested_ones_again(results):
    assert unflatten(flatten_results_dict(results)) == results


def test_names_are_joined_by_slashes_in_order():
    results = {"dev": {"f1": {"macro": 0.5, "micro": 0.75}, "loss": 1}, "epoch": 2}
    assert list(flatten_results_dict(results).items()) == [
        ("dev/f1/macro", 0.5), ("dev/f1/micro", 0.75), ("dev/loss", 1), ("epoch", 2),
    ]  # fmt: skip


def test_two_results_of_one_flat_name_are_refused():
    with pytest.raises(DataError, match="flatten to the name 'a/b'"):
        flatten_results_dict({"a": {"b": 1}, "a/b": 2})


def test_results_are_printed_as_lines_to_paste(capsys):
    print_csv_format({"dev": {"f1": 2 / 3, "loss": 1.5e-7, "by_class": {"a": 1}}, "epoch": 2})
    expected = "task: dev\nf1,loss,by_class/a\n0.666667,1.5e-07,1\nepoch=2\n"
    assert capsys.readouterr().out == expected
    print_csv_format({"epoch": 2}, stream := io.StringIO())
    assert stream.getvalue() == "epoch=2\n"

"""What a recipe reads for predictions: a text or a file, and what is neither is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hezar_train.errors import DataError
from hezar_train.recipes import (
    import_recipe,
    path_of,
    text_of,
)
from tests.hub.conftest import hub  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))
RECIPES = Path(__file__).parents[2] / "recipes"
TEXT_RECIPES = ["hezar_model", "language_modeling", "sequence_labeling", "text_classification", "text_generation"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Path("bad.png"), r"bad\.png is a file; a text is expected\. Put texts into a \.txt file, a line each"),
        ({"name": "Rome"}, r"\{'name': 'Rome'\} is a JSON value of the type dict; a text is expected"),
        (None, "None is a JSON value of the type NoneType; a text is expected"),
    ],
)
def test_what_is_no_text_is_refused_with_where_texts_go(given: Any, words: str) -> None:
    assert text_of("a text") == "a text"
    with pytest.raises(DataError, match=words):
        text_of(given)


@pytest.mark.parametrize("name", TEXT_RECIPES)
def test_a_recipe_of_texts_refuses_a_picture_with_where_texts_go(name: str) -> None:
    recipe = import_recipe(RECIPES / name / "recipe.py")
    with pytest.raises(DataError, match=r"bad\.png is a file; a text is expected\. Put texts into a \.txt file"):
        recipe.read(Path("bad.png"), SimpleNamespace(source_prefix=""))


def test_a_path_may_come_as_a_text_and_what_is_none_is_refused() -> None:
    assert path_of("a.png") == path_of(Path("a.png")) == Path("a.png")
    with pytest.raises(DataError, match=r"5 is a JSON value of the type int; a file is expected"):
        path_of(5)

"""The global generators after each test as before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hezar_train.data import preserved_randomness


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    with preserved_randomness():
        yield

"""The largest logit, by whatever way it is found, and decisions that are made once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.metrics import largest
from hezar_train.metrics.handlers import BLOCK, FEWEST_BLOCKS, MadeOnce

LONG = BLOCK * FEWEST_BLOCKS


@settings(deadline=None)
@given(
    st.sampled_from([1, 5, LONG - 1, LONG, LONG + 1, LONG + BLOCK - 1, 2000]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([0.0, float("inf"), float("-inf"), float("nan")]),
    st.integers(0, 2**32),
)
def test_it_is_what_argmax_finds_also_among_equals_and_numbers_that_are_none(
    num_classes: int, dtype: torch.dtype, odd: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (2, 6, num_classes), generator=generator).to(dtype)
    logits[torch.rand(logits.shape, generator=generator) < 2 / num_classes] = odd
    assert torch.equal(largest(logits), logits.argmax(dim=-1))
    assert torch.equal(largest(logits.transpose(0, 1)), logits.argmax(dim=-1).T)


@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, LONG, LONG + 6])
def test_every_place_can_be_the_largest(place: int) -> None:
    logits = torch.zeros(1, LONG + 7)
    logits[0, place] = 1.0
    assert largest(logits).tolist() == [place]


def test_a_decision_about_one_tensor_is_made_once_and_does_not_hold_it() -> None:
    made, first, second = MadeOnce(), torch.zeros(1), torch.zeros(1)
    assert [made.get(first, lambda: "first"), made.get(first, lambda: "again")] == ["first", "first"]
    assert made.get(second, lambda: "second") == "second"
    alive = weakref.ref(second)
    del second
    gc.collect()
    assert alive() is None


def test_what_is_no_tensor_is_decided_anew() -> None:
    made, ids = MadeOnce(), [1, 2]
    assert [made.get(ids, lambda: "first"), made.get(ids, lambda: "again")] == ["first", "again"]

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.errors import DataError
from hezar_train.events import EventStorage, EventWriter, Histogram, Image


class Album(EventWriter):
    def __init__(self) -> None:
        self.images: list[Image] = []
        self.histograms: list[Histogram] = []

    def write_images(self, images):
        self.images.extend(images)

    def write_histograms(self, histograms):
        self.histograms.extend(histograms)


@pytest.fixture
def storage() -> EventStorage:
    return EventStorage(writers=[Album()])


def pixels(storage: EventStorage) -> list:
    storage.flush()
    return storage.writers[0].images[-1].pixels.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_floats_become_pixels_and_are_cut_off_at_zero_and_one(storage, dtype):
    storage.put_image("x", torch.tensor([[[0.0, 0.5, 1.0, -1.0, 2.0, torch.nan, torch.inf]]], dtype=dtype))
    assert pixels(storage) == [[[0, 128, 255, 0, 255, 0, 255]]]


def test_an_image_is_what_it_was_when_it_was_put(storage):
    batch = torch.full((2, 3, 1, 1), 7, dtype=torch.uint8)
    storage.put_image("x", batch[0])
    batch.zero_()
    assert pixels(storage) == [[[7]], [[7]], [[7]]]


def test_an_image_does_not_hold_the_batch_or_its_graph(storage):
    batch = torch.rand(100, 1, 8, 8, requires_grad=True)
    storage.put_image("x", batch[0] * 1.0)
    storage.put_image("y", batch.detach()[0].mul(255).to(torch.uint8))
    storage.flush()
    for image in storage.writers[0].images:
        assert not image.pixels.requires_grad
        assert image.pixels.untyped_storage().nbytes() == 64


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(4, 4), r"'x' has the shape \(4, 4\), expected \(channels, height, width\)"),
        (torch.zeros(4, 4, 3, 1), "expected"),
        (torch.zeros(8, 8, 3), r"\(8, 8, 3\), expected .* 1, 3 or 4 channels"),
        (torch.zeros(3, 0, 4), "expected"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"'x' is of torch\.int64, expected floats in 0\.\.1 or torch\.uint8"),
    ],
)
def test_what_is_no_image_is_refused_by_name(storage, image, message):
    with pytest.raises(DataError, match=message):
        storage.put_image("x", image)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(1, 20))
def test_a_histogram_counts_every_number_once(values, bins):
    storage = EventStorage(writers=[album := Album()])
    storage.put_histogram("x", torch.tensor(values, dtype=torch.float64), bins)
    storage.flush()
    (found,) = album.histograms
    assert sum(found.bucket_counts) == found.num == len(values)
    assert found.bucket_limits == sorted(found.bucket_limits)
    assert len(found.bucket_limits) == len(found.bucket_counts) == bins
    assert (found.min, found.max) == (min(values), max(values))
    assert found.sum == pytest.approx(sum(values), abs=1e-6)
    assert found.sum_squares == pytest.approx(float(np.square(values).sum()))


def test_numbers_that_are_not_finite_are_left_out_and_none_at_all_is_no_error(storage):
    storage.put_histogram("some", torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True))
    storage.put_histogram("none", torch.tensor([torch.nan]))
    storage.put_histogram("empty", [])
    storage.flush()
    found = {one.name: (one.num, one.min, one.max, sum(one.bucket_counts)) for one in storage.writers[0].histograms}
    assert found == {"some": (2, 1.0, 3.0, 2), "none": (0, 0.0, 0.0, 0), "empty": (0, 0.0, 0.0, 0)}


def test_a_histogram_needs_a_bucket(storage):
    with pytest.raises(DataError, match="bins=0 of 'x' must be at least 1"):
        storage.put_histogram("x", [1.0], bins=0)

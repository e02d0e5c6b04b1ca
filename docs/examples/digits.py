"""The data of every example: the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

__all__ = ["NUM_CLASSES", "NUM_PIXELS", "by_owner", "distance_from_digits", "images", "labelled"]

NUM_CLASSES, NUM_PIXELS, LARGEST_PIXEL = 10, 64, 16


def labelled() -> tuple[TensorDataset, TensorDataset]:
    """Return (pixels, label) pairs, pixels from 0 to 1: 1,437 to train on and 360 held out, always the same."""
    digits = load_digits()
    pixels = torch.tensor(digits.data / LARGEST_PIXEL, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=digits.target, random_state=0)
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def images() -> tuple[TensorDataset, TensorDataset]:
    """Return the same digits without their labels."""
    train, test = labelled()
    return TensorDataset(train.tensors[0]), TensorDataset(test.tensors[0])


def distance_from_digits(made: torch.Tensor) -> float:
    """Return the Frechet distance of images from the held-out digits: of the means and covariances of their pixels.

    It is |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)); the training digits themselves have 0.10.
    """
    made, real = made.double(), images()[1].tensors[0].double()
    spread, wanted = made.T.cov(), real.T.cov()
    values, vectors = torch.linalg.eigh(spread)
    root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
    mixed = torch.linalg.eigvalsh(root @ wanted @ root).clamp(min=0).sqrt().sum()
    return float((made.mean(0) - real.mean(0)).square().sum() + spread.trace() + wanted.trace() - 2 * mixed)


def by_owner(num_owners: int) -> list[tuple[TensorDataset, TensorDataset]]:
    """Deal the digits out to owners who have different classes: each two of its own, and all share the last one."""
    return [tuple(_only(part, _classes_of(owner)) for part in labelled()) for owner in range(num_owners)]


def _classes_of(owner: int) -> torch.Tensor:
    return torch.tensor([2 * owner, 2 * owner + 1, NUM_CLASSES - 1])


def _only(data: TensorDataset, classes: torch.Tensor) -> TensorDataset:
    pixels, labels = data.tensors
    kept = torch.isin(labels, classes)
    return TensorDataset(pixels[kept], labels[kept])

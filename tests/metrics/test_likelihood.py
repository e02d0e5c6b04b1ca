"""Perplexity and token accuracy of a whole set, for any cut into batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from hezar_train.metrics import IGNORED_LABEL
from hezar_train.metrics.likelihood import Perplexity, TokenAccuracy

NUM_TOKENS = 6


def tokens(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, 5, NUM_TOKENS, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_TOKENS, (num_samples, 5), generator=generator)
    return logits, labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.5, IGNORED_LABEL)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 2**32), st.sampled_from([1, 3, 7, 64]))
def test_perplexity_is_that_of_all_tokens_together(num_samples: int, seed: int, batch_size: int) -> None:
    logits, labels = tokens(num_samples, seed)
    processes = [Perplexity(), Perplexity()]
    for number, (some, their) in enumerate(zip(logits.split(batch_size), labels.split(batch_size), strict=True)):
        # A batch without a label that counts has a NaN loss, as models return it.
        loss = cross_entropy(some.flatten(0, 1), their.flatten())
        processes[number % 2].update(loss, (their != IGNORED_LABEL).sum())
    processes[0].merge(processes[1].state())
    whole = math.exp(cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert processes[0].compute() == pytest.approx({"perplexity": whole}, rel=1e-9, nan_ok=True)


def test_perplexity_of_samples_has_rows_and_of_a_batch_has_none() -> None:
    weights = torch.tensor([[1.0, 1.0, 1.0], [0.0, 2.0, 1.0]])
    per_sample, per_batch = Perplexity(), Perplexity()
    per_sample.update(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([3, 1, 0]), weights)
    assert per_sample.compute_rows() == [{"perplexity": math.exp(5 / 4)}, {"perplexity": math.exp(2)}]
    per_batch.update(torch.tensor(1.25), 4, weights)
    assert per_batch.compute_rows() == [{"perplexity": math.exp(5 / 4)}]


def test_perplexity_is_minimized_and_overflows_to_infinity() -> None:
    metric = Perplexity()
    assert metric.objective("perplexity") == "minimize"
    assert metric.consumes == "loss"
    assert math.isnan(metric.compute()["perplexity"])
    metric.update(1e4, 3)
    assert metric.compute() == {"perplexity": math.inf}


@pytest.mark.parametrize("causal", [False, True])
@settings(deadline=None, max_examples=50)
@given(st.integers(1, 20), st.integers(0, 2**32), st.sampled_from([1, 3, 7, 64]))
def test_token_accuracy_skips_ignored_labels_and_shifts_for_causal_models(
    causal: bool, num_samples: int, seed: int, batch_size: int
) -> None:
    logits, labels = tokens(num_samples, seed)
    metric, other = TokenAccuracy(causal=causal), TokenAccuracy(causal=causal)
    for number, (some, their) in enumerate(zip(logits.split(batch_size), labels.split(batch_size), strict=True)):
        (metric, other)[number % 2].update(some.argmax(-1) if number % 3 else some, their)
    metric.merge(other.state())
    guesses = logits.argmax(-1)
    guesses, labels = (guesses[:, :-1], labels[:, 1:]) if causal else (guesses, labels)
    pairs = [(guess, label) for guess, label in zip(guesses.flatten(), labels.flatten(), strict=True) if label >= 0]
    share = sum(int(guess == label) for guess, label in pairs) / len(pairs) if pairs else math.nan
    assert metric.compute() == pytest.approx({"token_accuracy": share}, nan_ok=True)


def test_token_accuracy_weighs_samples_not_tokens() -> None:
    metric = TokenAccuracy()
    predictions, targets = torch.tensor([[1, 2], [3, 3]]), torch.tensor([[1, 0], [3, IGNORED_LABEL]])
    metric.update(predictions, targets, torch.tensor([[1.0, 1.0], [3.0, 2.0]]))
    assert metric.compute_rows() == [{"token_accuracy": 2 / 3}, {"token_accuracy": 5 / 8}]

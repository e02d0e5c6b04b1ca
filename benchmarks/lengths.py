"""Compare the ways to make batches of samples of unequal lengths, by the real tokens that are trained on in a second.

    python benchmarks/lengths.py [--rounds 5] [--samples 512]

A small GPT-2 learns from documents whose lengths are log-normal (mean 60, sigma 0.8, at most 512 tokens), 32 to an
update on average. All ways train on the same documents, an epoch each, one after another in one process on one thread,
several rounds over. What counts is the time of an epoch, with its order, its batches and its updates; the pace is that
of the best round, in tokens without padding. The best way must reach 1.5 times the pace of random batches.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MEAN, SIGMA, LONGEST, BATCH = 60, 0.8, 512, 32
VOCABULARY, WIDTH = 1000, 128
LEAST_RATIO = 1.5
RANDOM = "random batches"
BUDGET = BATCH * MEAN
WAYS: dict[str, dict[str, Any]] = {
    RANDOM: {"batch_size": BATCH},
    "group_by_length": {"batch_size": BATCH, "group_by_length": True},
    "max_tokens_per_batch": {"batch_size": BATCH, "max_tokens_per_batch": 1024},
    "token budget": {"global_batch_tokens": BUDGET, "max_tokens_per_batch": 1024},
    "token budget, grouped": {"global_batch_tokens": BUDGET, "max_tokens_per_batch": 2048, "group_by_length": True},
    "packing": {"global_batch_tokens": BUDGET, "max_tokens_per_batch": 512, "packing": True},
}


def make_documents(count: int) -> list[dict[str, Any]]:
    """Draw documents whose lengths are log-normal."""
    import numpy as np

    generator = np.random.default_rng(0)
    drawn = generator.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    lengths = np.clip(np.rint(drawn), 2, LONGEST).astype(int)
    return [{"input_ids": generator.integers(0, VOCABULARY, length)} for length in lengths]


def make_model() -> Any:
    """Build the network, the same each time."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LONGEST, n_embd=WIDTH, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def train_once(way: str, documents: list[dict[str, Any]]) -> tuple[float, int]:
    """Train an epoch in one of the ways; return its seconds, and its updates."""
    from hezar_train import Hook, Trainer, TrainerConfig
    from hezar_train.data import PackingDataCollator

    class Clock(Hook):
        start = end = 0.0

        def on_epoch_start(self, _: Any) -> None:
            self.start = time.perf_counter()

        def on_batch_end(self, _: Any) -> None:
            self.end = time.perf_counter()

    clock, collator = Clock(), PackingDataCollator()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = TrainerConfig(
            folder, use_cpu=True, num_threads=1, save_enabled=False, trackers=[], learning_rate=1e-3, **WAYS[way]
        )
        trainer = Trainer(
            config, make_model(), documents, hooks=[clock],
            data_collator=collator if config.packing else collator.padded,
        )  # fmt: skip
        trainer.train()
    return clock.end - clock.start, trainer.state.update_step


def main() -> int:
    """Run all ways, several rounds over; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=512)
    asked = parser.parse_args()
    documents = make_documents(asked.samples)
    tokens = sum(len(one["input_ids"]) for one in documents)
    print(f"{asked.samples} documents, {tokens} tokens, {asked.rounds} rounds")
    train_once(RANDOM, documents[:BATCH])  # what is imported and set up once counts for nobody
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    updates = {}
    for _ in range(asked.rounds):
        for way in WAYS:
            found, updates[way] = train_once(way, documents)
            seconds[way].append(found)
    slowest = min(seconds[RANDOM])
    ratios = {way: slowest / min(found) for way, found in seconds.items()}
    for way, found in seconds.items():
        spread = max(found) / min(found) - 1
        print(
            f"{way:24} {tokens / min(found):9,.0f} tokens/s   {ratios[way]:5.2f} x   {updates[way]:4d} updates   "
            f"rounds differ by {spread:.0%}"
        )
    best = max(ratios, key=lambda way: ratios[way])
    is_enough = ratios[best] >= LEAST_RATIO
    verdict = "ok" if is_enough else "MISSED"
    print(f"best: {best}, {ratios[best]:.2f} times random batches; at least {LEAST_RATIO}: {verdict}")
    return 0 if is_enough else 1


if __name__ == "__main__":
    sys.exit(main())

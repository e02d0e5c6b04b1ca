"""What to compare with, on the same held-out text: xz, and an n-gram model of bytes.

    python recipes/language_modeling/baseline.py [recipe.data=FILE]

xz is charged for what the held-out text adds to the packed training text. The n-gram model interpolates all shorter
contexts as Witten and Bell do; its order is chosen as the network's best checkpoint is: on the split "val".
"""

from __future__ import annotations

import lzma
import math
import sys
from collections import Counter, defaultdict
from pathlib import Path

from recipe import SAMPLE_FILE, file_splits

NUM_BYTES = 256
ORDERS = range(3, 9)  # bytes before the one that is predicted


class ByteModel:
    """How often each byte followed each context, and how many different ones did."""

    def __init__(self, text: bytes, longest: int) -> None:
        self._followers: dict[bytes, Counter[int]] = defaultdict(Counter)
        for place, byte in enumerate(text):
            for length in range(min(longest, place) + 1):
                self._followers[text[place - length : place]][byte] += 1
        self._totals = {context: followers.total() for context, followers in self._followers.items()}

    def bits_per_byte(self, text: bytes, order: int) -> float:
        """Return the mean cost of a byte with contexts of up to `order` bytes."""
        bits = sum(
            -math.log2(self.probability(text[max(0, place - order) : place], text[place])) for place in range(len(text))
        )
        return bits / len(text)

    def probability(self, context: bytes, byte: int) -> float:
        """Mix the counts of the context and of its ends: the more kinds of byte follow one, the less it is trusted."""
        mixed = 1 / NUM_BYTES
        for start in range(len(context), -1, -1):
            followers = self._followers.get(context[start:])
            if followers is None:
                break
            num_kinds = len(followers)
            mixed = (followers[byte] + num_kinds * mixed) / (self._totals[context[start:]] + num_kinds)
        return mixed


def packed_size(text: bytes) -> int:
    """Return how many bytes xz needs, at its best."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    """Tell the bits per byte of each on the splits "val" and "test"."""
    options = dict(argument.removeprefix("recipe.").split("=", 1) for argument in sys.argv[1:])
    splits = file_splits(Path(options.get("data", SAMPLE_FILE)))
    train, val, test = ("".join(f"{text}\0" for text in splits[name]).encode() for name in ("train", "val", "test"))
    sys.stdout.write(f"bytes: train {len(train):,}, val {len(val):,}, test {len(test):,}\n")
    costs = [8 * (packed_size(train + held_out) - packed_size(train)) / len(held_out) for held_out in (val, test)]
    sys.stdout.write(f"xz                  val {costs[0]:.3f}  test {costs[1]:.3f}\n")
    model = ByteModel(train, max(ORDERS))
    order = min(ORDERS, key=lambda order: model.bits_per_byte(val, order))
    costs = [model.bits_per_byte(held_out, order) for held_out in (val, test)]
    sys.stdout.write(f"{order} bytes of context  val {costs[0]:.3f}  test {costs[1]:.3f}\n")


if __name__ == "__main__":
    main()

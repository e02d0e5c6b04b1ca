"""Make the bundled sample from a `Packages` index: `python make_sample.py INDEX`, a path or a URL."""

from __future__ import annotations

import hashlib
import lzma
import sys

from recipe import INDEX_URL, SAMPLE_FILE, TOPICS, Description, distinct, parse_index, read_lines

MOST_OF_A_TOPIC = 500


def drawn(found: list[Description]) -> list[Description]:
    """Choose at most so many descriptions of each topic, by their hashes: the same in every release they are in."""
    by_hash = sorted(found, key=lambda one: hashlib.sha256("\t".join(one).encode()).digest())
    return sorted(one for topic in TOPICS for one in [it for it in by_hash if it.topic == topic][:MOST_OF_A_TOPIC])


def main() -> None:
    """Read the index, draw the sample, write it beside the recipe."""
    index = sys.argv[1] if len(sys.argv) > 1 else INDEX_URL
    lines = ["\t".join(one) + "\n" for one in drawn(distinct(parse_index(read_lines(index))))]
    SAMPLE_FILE.write_bytes(lzma.compress("".join(lines).encode(), preset=9))
    sys.stdout.write(f"{len(lines)} descriptions, {SAMPLE_FILE.stat().st_size:,} bytes: {SAMPLE_FILE}\n")


if __name__ == "__main__":
    main()

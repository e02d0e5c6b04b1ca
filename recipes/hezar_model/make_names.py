"""Write names.tsv: Persian names of languages, currencies and cities, from the CLDR data in the package babel.

    pip install babel==2.18.0 && python make_names.py

A name of two kinds is left out, and so is what stands in brackets, such as years.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from babel import Locale

IN_BRACKETS = re.compile(r"\s*\(.*?\)")
MARKS = dict.fromkeys(map(ord, "\u200e\u200f"))  # marks of direction: they are no part of a name


def named(kinds: dict[str, Iterator[str]]) -> Iterator[tuple[str, str]]:
    """Yield (name, kind), sorted, without names of several kinds and those that are not in Persian letters."""
    found: dict[str, set[str]] = {}
    for kind, names in kinds.items():
        for name in names:
            plain = IN_BRACKETS.sub("", name.translate(MARKS)).strip()
            if re.search("[\u0600-\u06ff]", plain):
                found.setdefault(plain, set()).add(kind)
    return ((name, *kinds) for name, kinds in sorted(found.items()) if len(kinds) == 1)


if __name__ == "__main__":
    persian = Locale("fa")
    rows = named({
        "language": iter(persian.languages.values()),
        "currency": iter(persian.currencies.values()),
        "city": (zone["city"] for zone in persian.time_zones.values() if "city" in zone),
    })  # fmt: skip
    text = "".join(f"{kind}\t{name}\n" for name, kind in rows)
    Path(__file__).with_name("names.tsv").write_text(text, encoding="utf-8")

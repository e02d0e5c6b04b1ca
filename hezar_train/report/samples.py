"""Samples as cards: the worst of an evaluation, and examples.

Pictures are inlined if they are small and really pictures.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hezar_train.report.differences import compared, in_order, is_code
from hezar_train.report.markup import Content, Html, element, joined, of_user
from hezar_train.report.words import number, spoken

__all__ = ["example_cards", "worst_cards"]

MOST_CARDS = 200
MOST_ITEMS = 400
MOST_CHARACTERS = 600
MOST_PICTURE_BYTES = 300_000
NUM_CARDS_OPEN = 10
FEW_PIXELS = 64
FEW_CHARACTERS = 24

PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def worst_cards(
    root: Path, samples: Sequence[Mapping[str, Any]], classes: Sequence[str], loss_name: str
) -> Html | None:
    """Return the samples with the largest loss, each as a card."""
    if not samples:
        return None
    cards = [_sample(root, sample, classes, loss_name) for sample in samples]
    shown, more = cards[:NUM_CARDS_OPEN], cards[NUM_CARDS_OPEN:]
    kind = "cards" if all(map(_is_small, samples)) else "cards wide"
    parts: list[Content] = [
        element("h4", "samples with the largest ", of_user(loss_name)),
        element("ul", *shown, class_=kind),
    ]
    if more:
        folded = element("ul", *more, class_=kind)
        parts.append(element("details", element("summary", f"{len(more)} more"), folded, class_="more"))
    return joined(parts)


def example_cards(root: Path, examples: Sequence[Mapping[str, Any]], *, is_reading: bool) -> Html | None:
    """Return records of any names as cards, such as prompts and what the model wrote."""
    if not examples:
        return None
    names = list(dict.fromkeys(name for one in examples for name in one))
    names.sort(key=lambda name: {"input": 0, "target": 1, "prediction": 2}.get(name, 3))
    has_pictures = any("image" in one for one in examples)
    cards = [
        _example(root, one, [name for name in names if name in one], is_reading=is_reading)
        for one in examples[:MOST_CARDS]
    ]
    return joined([element("h4", "examples"), element("ul", *cards, class_="cards" if has_pictures else "cards texts")])


def _is_small(sample: Mapping[str, Any]) -> bool:
    """Tell whether a sample is shown in little room: by a picture, or by few words."""
    return "image" in sample or ("input" not in sample and len(str(sample.get("target"))) <= FEW_CHARACTERS)


def _sample(root: Path, sample: Mapping[str, Any], classes: Sequence[str], loss_name: str) -> Html:
    target, prediction = (_named(sample.get(name), classes) for name in ("target", "prediction"))
    if target in classes and prediction in classes:  # names differ as a whole
        truth, said = of_user(target), of_user(prediction)
    else:
        truth, said = compared(target, prediction)
    loss = sample.get("loss")
    amount = of_user(f"{loss_name} {number(loss)}") if isinstance(loss, int | float) else None
    text = sample.get("input")
    return element(
        "li",
        _picture(root, sample.get("image"), f"sample {sample.get('sample', '')}"),
        of_user(_cut(str(text)), "p", class_="input") if text is not None else None,
        element("dl", element("dt", "target"), element("dd", truth), element("dt", "prediction"), element("dd", said)),
        element("small", f"sample {sample.get('sample', '?')}", amount and " · ", amount),
        class_="wrong" if target != prediction else None,
    )


def _named(value: Any, classes: Sequence[str]) -> str | list[str]:
    """Return a target or a prediction as text, or as a list of texts; a class number becomes its name."""
    if isinstance(value, list):
        return [str(_named(one, ())) for one in value[:MOST_ITEMS]]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(classes):
        return classes[value]
    if value is None:
        return "–"
    if isinstance(value, float):
        return number(value)
    return _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _example(root: Path, example: Mapping[str, Any], names: Sequence[str], *, is_reading: bool) -> Html:
    """Return a card; what was read wrong is marked as it is among the worst samples."""
    target, prediction = example.get("target"), example.get("prediction")
    has_code = isinstance(target, str) and is_code(target)
    said: dict[str, Html] = {}
    if is_reading and isinstance(target, str) and isinstance(prediction, str):
        said["target"], said["prediction"] = compared(_cut(target), _cut(prediction))
    fields = [
        joined([element("dt", spoken(name)), element("dd", said.get(name) or _text(example[name], is_code=has_code))])
        for name in names
        if name != "image"
    ]
    return element(
        "li",
        _picture(root, example.get("image"), "the example"),
        element("dl", *fields),
        class_="wrong" if said and target != prediction else None,
    )


def _text(value: Any, *, is_code: bool) -> Html:
    text = _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return in_order(text) if is_code else of_user(text)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " …"


def _picture(root: Path, name: Any, words: str) -> Html | None:
    """Inline a picture inside the run's folder; anything else is left out."""
    if not isinstance(name, str):
        return None
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()) or path.stat().st_size > MOST_PICTURE_BYTES:
            return None
        content = path.read_bytes()
    except (OSError, ValueError):
        return None
    kind = next((kind for start, kind in PICTURES.items() if content.startswith(start)), None)
    if kind is None:
        return None
    has_few_pixels = kind == "image/png" and int.from_bytes(content[16:20]) < FEW_PIXELS
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return element("img", src=source, alt=words, class_="coarse" if has_few_pixels else None)

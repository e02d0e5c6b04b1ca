"""The section about an evaluation: its metrics, confusion matrix and other tables, the worst samples and examples.

Samples are shown as cards. Pictures are inlined if they are small and really pictures. What differs between the target
and the prediction is marked on both sides. Texts of users run in their own direction, but a code such as a plate's is
read in the order of its symbols, as it is seen.
"""

from __future__ import annotations

import base64
import difflib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hezar_train.report.markup import Content, Html, count, element, joined, number, of_user, spoken, table
from hezar_train.report.read import Evaluation, RunRecord, Table
from hezar_train.run_folder import RunFolderError, read_file
from hezar_train.types import TaskType

__all__ = [
    "Pictures",
    "compared",
    "example_cards",
    "in_order",
    "is_code",
    "results_in_words",
    "results_section",
    "worst_cards",
]

CONFUSION = "confusion_matrix"
MOST_CLASSES_SHOWN = 30
MOST_PAIRS = 12
MOST_ROWS = 200
READING_TASKS = (TaskType.IMAGE2TEXT, TaskType.SPEECH_RECOGNITION)
"""Where a text is right or wrong symbol by symbol; of a text that is written, another may be as good."""

MOST_CARDS = 200
MOST_ITEMS = 400
MOST_CHARACTERS = 600
MOST_PICTURE_BYTES = 300_000
MOST_BYTES_OF_PICTURES = 30_000_000
NUM_CARDS_OPEN = 10
FEW_PIXELS = 64
FEW_CHARACTERS = 24

PICTURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}

MOST_CHARACTERS_COMPARED = 400
MOST_PAIRS_COMPARED = 20_000
"""Of equal characters on the two sides: what comparing costs grows with them, in texts of few different ones."""
MOST_SYMBOLS_OF_A_CODE = 24
LAM, ALEFS = "ل", ("ا", "أ", "إ", "آ")


class Pictures:
    """The pictures of a run's samples, inlined while there is room on the page."""

    def __init__(self, root: Path) -> None:
        self._root, self._room = root, MOST_BYTES_OF_PICTURES

    def shown(self, name: Any, words: str) -> Html | None:
        """Inline a picture inside the run's folder; anything else is left out."""
        if not isinstance(name, str):
            return None
        try:
            path = (self._root / name).resolve()
            if not path.is_relative_to(self._root.resolve()):
                return None
            content = read_file(path, min(MOST_PICTURE_BYTES, self._room))
        except (OSError, ValueError, RuntimeError, RunFolderError):  # the third: links that go round
            return None
        kind = next((kind for start, kind in PICTURES.items() if content.startswith(start)), None)
        if kind is None:
            return None
        self._room -= len(content)
        has_few_pixels = kind == "image/png" and int.from_bytes(content[16:20]) < FEW_PIXELS
        source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
        return element("img", src=source, alt=words, class_="coarse" if has_few_pixels else None)


def results_section(run: RunRecord) -> Html:
    """Return the evaluation of the best checkpoint and, folded away, the last one."""
    pictures = Pictures(run.root)
    best, last = run.best_evaluation, run.last_evaluation
    if last is None:
        return element("p", "No evaluation is recorded.", class_="empty")
    if best is None or best.step == last.step:
        words = "last evaluation" if best is None else "best and last evaluation"
        return _evaluation(run, last, words, pictures)
    shown = _evaluation(run, best, "evaluation of the best checkpoint", pictures)
    title = element("summary", f"The last evaluation, at step {count(last.step)}")
    return joined([shown, element("details", title, _evaluation(run, last, "", pictures))])


def results_in_words(run: RunRecord) -> str:
    """Return what the section of the results holds, for a line that stands for it; empty if it holds nothing."""
    shown = run.best_evaluation or run.last_evaluation
    if shown is None:
        return ""
    names = [spoken(one.name) for tables in shown.tables.values() for one in tables]
    names += [f"samples with the largest {shown.sample_loss_name}"] if shown.worst_samples else []
    names += ["examples"] if shown.examples else []
    return ", ".join(dict.fromkeys(["metrics", *names]))


def _evaluation(run: RunRecord, evaluation: Evaluation, words: str, pictures: Pictures) -> Html:
    parts: list[Content] = []
    if words:
        parts.append(element("p", f"{words.capitalize()}, at step {count(evaluation.step)}.", class_="note"))
    set_names = list(dict.fromkeys([*evaluation.tables, *evaluation.worst_samples, *evaluation.examples]))
    parts += _metrics_by_set(evaluation.metrics, [name for name in set_names if name])
    for set_name in set_names:
        if set_name:
            parts.append(element("h3", of_user(set_name)))
        tables = evaluation.tables.get(set_name, [])
        if tables:
            parts.append(element("div", *(element("div", _table(one)) for one in tables), class_="side"))
        worst, examples = evaluation.worst_samples.get(set_name, []), evaluation.examples.get(set_name, [])
        parts.append(worst_cards(pictures, worst, _class_names(tables), evaluation.sample_loss_name))
        parts.append(example_cards(pictures, examples, is_reading=run.settings.get("task") in READING_TASKS))
    return joined(parts)


def _metrics_by_set(metrics: Mapping[str, float], set_names: Sequence[str]) -> Iterator[Content]:
    """Yield a table with a row for each of several sets, and what belongs to none."""
    owners = {name: _owner(name, set_names) for name in metrics}
    keys = list(dict.fromkeys(name.removeprefix(f"{owner}.") for name, owner in owners.items() if owner))
    keys = [key for key in keys if not key.endswith((".low", ".high"))]
    if keys:
        rows = [[of_user(one), *(_cell(metrics, f"{one}.{key}") for key in keys)] for one in set_names]
        yield table(["set", *map(spoken, keys)], rows, "numbers")
    yield _metrics({name: value for name, value in metrics.items() if owners[name] is None})


def _owner(metric: str, set_names: Sequence[str]) -> str | None:
    """Return the set that a metric belongs to; a set's name may begin with another's."""
    return max((name for name in set_names if metric.startswith(f"{name}.")), key=len, default=None)


def _cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "–"
    interval = _interval(metrics, name)
    return number(metrics[name]) if interval == "–" else f"{number(metrics[name])} ({interval})"


def _metrics(metrics: Mapping[str, float]) -> Html | None:
    names = [name for name in metrics if not name.endswith((".low", ".high"))]
    if not names:
        return None
    has_intervals = any(f"{name}.low" in metrics for name in names)
    rows = [
        [spoken(name), number(metrics[name]), *([_interval(metrics, name)] if has_intervals else [])] for name in names
    ]
    return table(["metric", "value", *(["95 % interval"] if has_intervals else [])], rows, "numbers")


def _interval(metrics: Mapping[str, float], name: str) -> str:
    if f"{name}.low" not in metrics or f"{name}.high" not in metrics:
        return "–"
    return f"{number(metrics[f'{name}.low'])} to {number(metrics[f'{name}.high'])}"


def _table(found: Table) -> Html:
    title = element("h4", spoken(found.name))
    is_confusion = found.name == CONFUSION and len(found.rows) == len(found.columns)
    if not is_confusion:
        return joined([title, *_plain_table(found)])
    parts: list[Content] = [title]
    if len(found.rows) <= MOST_CLASSES_SHOWN:
        parts.append(_heat_map(found))
    if len(found.rows) > 4:
        parts.append(_most_confused(found))
    return joined(parts)


def _plain_table(found: Table) -> Iterator[Html]:
    rows = [
        [of_user(name), *(number(value) for value in values)]
        for name, values in zip(found.rows[:MOST_ROWS], found.values, strict=False)
    ]
    yield table(["", *(of_user(spoken(name)) for name in found.columns)], rows, "numbers")
    if len(found.rows) > MOST_ROWS:
        yield element("p", f"The first {MOST_ROWS} of {count(len(found.rows))} rows.", class_="note")


def _heat_map(found: Table) -> Html:
    """Return a confusion matrix; a cell is the darker, the larger its share of the row."""
    head = element("tr", element("td"), *(of_user(name, "th", scope="col") for name in found.columns))
    rows = [
        element("tr", of_user(name, "th", scope="row"), *_cells(place, values))
        for place, (name, values) in enumerate(zip(found.rows, found.values, strict=True))
    ]
    caption = element("caption", "rows: what it is; columns: what the model says")
    grid = element("table", caption, element("thead", head), element("tbody", *rows), class_="heat")
    return element("div", grid, class_="scroll", tabindex="0", role="group", aria_label="confusion matrix")


def _cells(row: int, values: Sequence[float]) -> Iterator[Html]:
    total = sum(values) or 1.0
    for column, value in enumerate(values):
        share = value / total
        kind = "hit" if column == row else "miss"
        yield element(
            "td", number(value) if value else "·", class_=f"{kind} strong" if share > 0.75 else kind,
            style=f"--share:{share:.3f}", title=f"{share:.1%} of the row",
        )  # fmt: skip


def _most_confused(found: Table) -> Html | None:
    pairs = [
        (value, found.rows[row], found.columns[column])
        for row, values in enumerate(found.values)
        for column, value in enumerate(values)
        if row != column and value > 0
    ]
    if not pairs:
        return None
    pairs.sort(key=lambda pair: -pair[0])
    entries = [
        element("li", of_user(truth, "b"), " taken for ", of_user(said, "b"), f" {number(value)}×")
        for value, truth, said in pairs[:MOST_PAIRS]
    ]
    return joined([element("h4", "most often confused"), element("ul", *entries, class_="chips")])


def _class_names(tables: Sequence[Table]) -> list[str]:
    return next((one.rows for one in tables if one.name == CONFUSION), [])


def worst_cards(
    pictures: Pictures, samples: Sequence[Mapping[str, Any]], classes: Sequence[str], loss_name: str
) -> Html | None:
    """Return the samples with the largest loss, each as a card."""
    if not samples:
        return None
    cards = [_sample(pictures, sample, classes, loss_name) for sample in samples[:MOST_CARDS]]
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


def example_cards(pictures: Pictures, examples: Sequence[Mapping[str, Any]], *, is_reading: bool) -> Html | None:
    """Return records of any names as cards, such as prompts and what the model wrote."""
    if not examples:
        return None
    names = list(dict.fromkeys(name for one in examples for name in one))
    names.sort(key=lambda name: {"input": 0, "target": 1, "prediction": 2}.get(name, 3))
    has_pictures = any("image" in one for one in examples)
    cards = [
        _example(pictures, one, [name for name in names if name in one], is_reading=is_reading)
        for one in examples[:MOST_CARDS]
    ]
    return joined([element("h4", "examples"), element("ul", *cards, class_="cards" if has_pictures else "cards texts")])


def _is_small(sample: Mapping[str, Any]) -> bool:
    """Tell whether a sample is shown in little room: by a picture, or by few words."""
    return "image" in sample or ("input" not in sample and len(str(sample.get("target"))) <= FEW_CHARACTERS)


def _sample(pictures: Pictures, sample: Mapping[str, Any], classes: Sequence[str], loss_name: str) -> Html:
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
        pictures.shown(sample.get("image"), f"sample {sample.get('sample', '')}"),
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


def _example(pictures: Pictures, example: Mapping[str, Any], names: Sequence[str], *, is_reading: bool) -> Html:
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
        pictures.shown(example.get("image"), "the example"),
        element("dl", *fields),
        class_="wrong" if said and target != prediction else None,
    )


def _text(value: Any, *, is_code: bool) -> Html:
    text = _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    return in_order(text) if is_code else of_user(text)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " …"


def compared(target: str | list[str], prediction: str | list[str]) -> tuple[Html, Html]:
    """Mark what differs, on both sides."""
    if isinstance(target, list) or isinstance(prediction, list):
        lists = [[one] if isinstance(one, str) else one for one in (target, prediction)]
        return _marked_words(*lists), _marked_words(*reversed(lists))
    num_pairs = sum(target.count(one) * prediction.count(one) for one in set(target[:MOST_CHARACTERS_COMPARED]))
    is_long = max(len(target), len(prediction)) > MOST_CHARACTERS_COMPARED or num_pairs > MOST_PAIRS_COMPARED
    if is_long or min(len(target), len(prediction)) == 1:
        return of_user(target), of_user(prediction)
    blocks = difflib.SequenceMatcher(None, target, prediction, autojunk=False).get_opcodes()
    truth = [(target[first:last], kind == "equal") for kind, first, last, _, _ in blocks]
    said = [(prediction[first:last], kind == "equal") for kind, _, _, first, last in blocks]
    has_code = is_code(target)
    return _marked_text(truth, is_code=has_code), _marked_text(said, is_code=has_code)


def is_code(text: str) -> bool:
    """Tell whether a text is a code, such as a plate's: single letters of a right-to-left script among digits."""
    if len(text) > MOST_SYMBOLS_OF_A_CODE or not any(map(str.isdecimal, text)):
        return False
    is_letter = [unicodedata.bidirectional(symbol) in ("R", "AL") for symbol in text]
    return any(is_letter) and not any(one and other for one, other in pairwise(is_letter))


def in_order(*content: Content) -> Html:
    """Return a code with its symbols from left to right, whatever their script."""
    return element("bdo", *content, dir="ltr")


def _marked_words(words: Sequence[str], others: Sequence[str]) -> Html:
    pieces: list[Content] = []
    for place, word in enumerate(words):
        is_same = place < len(others) and others[place] == word
        pieces += [of_user(word, "span" if is_same else "mark"), " "]
    return element("span", *pieces, dir="auto", class_="words")


def _marked_text(pieces: Sequence[tuple[str, bool]], *, is_code: bool = False) -> Html:
    """Return text with a mark on each piece that is not the same; lam and alef are one letter form, marked as one."""
    content: list[Content] = []
    before = ""
    for text, is_same in pieces:
        joins = not (is_same or is_code) and text.startswith(ALEFS) and before.endswith(LAM)
        content.append(before[:-1] if joins else before)
        before = text if is_same else ""
        if text and not is_same:
            content.append(element("mark", LAM + text if joins else text))
    content.append(before)
    if not any(content):
        return element("span", "(nothing)", class_="muted")
    return in_order(*content) if is_code else element("span", *content, dir="auto")

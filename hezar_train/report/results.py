"""What an evaluation found: its metrics, confusion matrix and other tables, the worst samples, examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hezar_train.report.markup import Content, Html, element, joined, of_user, table
from hezar_train.report.records import Evaluation, RunRecord, Table
from hezar_train.report.samples import example_cards, worst_cards
from hezar_train.report.words import count, number, spoken
from hezar_train.types import TaskType

__all__ = ["results_in_words", "results_section"]

CONFUSION = "confusion_matrix"
MOST_CLASSES_SHOWN = 30
MOST_PAIRS = 12
MOST_ROWS = 200
READING_TASKS = (TaskType.IMAGE2TEXT, TaskType.SPEECH_RECOGNITION)
"""Where a text is right or wrong symbol by symbol; of a text that is written, another may be as good."""


def results_section(run: RunRecord) -> Html:
    """Return the evaluation of the best checkpoint and, folded away, the last one."""
    best, last = run.best_evaluation, run.last_evaluation
    if last is None:
        return element("p", "No evaluation is recorded.", class_="empty")
    if best is None or best.step == last.step:
        words = "last evaluation" if best is None else "best and last evaluation"
        return _evaluation(run, last, words)
    folded = element(
        "details", element("summary", f"The last evaluation, at step {count(last.step)}"), _evaluation(run, last, "")
    )
    return joined([_evaluation(run, best, "evaluation of the best checkpoint"), folded])


def results_in_words(run: RunRecord) -> str:
    """Return what the section of the results holds, for a line that stands for it; empty if it holds nothing."""
    shown = run.best_evaluation or run.last_evaluation
    if shown is None:
        return ""
    names = [spoken(one.name) for tables in shown.tables.values() for one in tables]
    names += [f"samples with the largest {shown.sample_loss_name}"] if shown.worst_samples else []
    names += ["examples"] if shown.examples else []
    return ", ".join(dict.fromkeys(["metrics", *names]))


def _evaluation(run: RunRecord, evaluation: Evaluation, words: str) -> Html:
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
        parts.append(worst_cards(run.root, worst, _class_names(tables), evaluation.sample_loss_name))
        parts.append(example_cards(run.root, examples, is_reading=run.settings.get("task") in READING_TASKS))
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

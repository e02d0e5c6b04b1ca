"""The sections that are text and tables: first facts, comparison, time, checkpoints, config, environment.

A config is shown as far as it differs from the defaults, and from one run or start to the next. The environment is what
each start was made of, in groups, and what changed between starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hezar_train.config import TrainerConfig, to_plain
from hezar_train.events import FAILED, FINISHED, end_of
from hezar_train.report.charts import NUM_COLOURS
from hezar_train.report.markup import (
    Content,
    Html,
    breakable,
    bytes_in_words,
    count,
    duration,
    element,
    joined,
    moment,
    number,
    of_user,
    pairs,
    spoken,
    table,
)
from hezar_train.report.read import RunRecord, SavedCheckpoint, Start, TimeSplit

__all__ = [
    "Setting",
    "checkpoints_section",
    "comparison_section",
    "differing_settings",
    "environment_section",
    "facts_list",
    "settings_of",
    "settings_section",
    "shown",
    "status_badge",
    "time_section",
]

BEST_BADGE = element("span", "best", class_="badge good")
LEAST_SHARE = 0.004
"""Of a bar: what is less could not be seen."""

PRIVATE = frozenset({"output_dir"})
"""A field that every run has of its own."""

SHOWN_ELSEWHERE = frozenset({"time", "step", "seconds", "end"})
"""When and how a start ran."""

ABOUT_THE_START = frozenset({"accept_changes", "resume_from_checkpoint"})
"""Fields of the config that say how to begin, not what to do."""

LABELS = {"python": "Python", "cpu": "CPU", "num_parameters": "parameters"}

Groups = dict[str, dict[str, str]]
"""Facts by group and label; those of no group are under the empty name."""


def status_badge(run: RunRecord) -> Html:
    """Return in a few words where a run is."""
    if run.is_finished:
        return element("span", "finished", class_="badge good", title=run.stop_reason)
    if run.is_running:
        return element("span", "under way", class_="badge live")
    if run.error is not None:
        return element("span", f"failed: {run.error}", class_="badge bad")
    return element("span", "stopped before its end", class_="badge warn")


def facts_list(run: RunRecord, starts: Sequence[Start]) -> Html:
    """Return the handful of numbers that everybody asks for first."""
    return element("dl", *(_fact(*one) for one in _facts(run, starts)), class_="facts")


def _fact(name: str, value: str, note: str = "") -> Html:
    return element(
        "div", element("dt", name), element("dd", of_user(value, "b"), of_user(note, "small") if note else None)
    )


def _facts(run: RunRecord, starts: Sequence[Start]) -> Iterator[tuple[str, str, str]]:
    best = run.best.get("value")
    if run.best_metric and isinstance(best, int | float):
        name = run.best_metric.removeprefix("evaluation.")
        yield f"best {spoken(name)}", number(best), f"at step {count(run.best_step or 0)}{_epoch(run, run.best_step)}"
    metrics = run.last_evaluation.metrics if run.last_evaluation else {}
    if "loss" in metrics and run.best_metric != "evaluation.loss":
        yield "last evaluation loss", number(metrics["loss"]), f"at step {count(run.last_evaluation.step)}"  # type: ignore[union-attr]
    total = run.total_steps
    yield "steps", count(run.last_step), (f"of {count(total)}" if total else "") + _epoch(run, run.last_step)
    if seconds := sum(start.seconds for start in starts):
        note = "in one go" if len(starts) == 1 else f"in {len(starts)} starts"
        yield "time at work", duration(seconds), note
    if pace := _median(
        [row.values["train.samples_per_second"] for row in run.rows if "train.samples_per_second" in row.values]
    ):
        yield "samples per second", count(pace) if pace >= 10 else number(pace), "median"
    yield from _facts_of_model(run)


def _facts_of_model(run: RunRecord) -> Iterator[tuple[str, str, str]]:
    model = run.starts[-1].get("model") if run.starts else None
    if isinstance(model, dict) and isinstance(model.get("num_parameters"), int):
        yield "parameters", count(model["num_parameters"]), str(model.get("class", ""))


def _epoch(run: RunRecord, step: int | None) -> str:
    if not step or not run.steps_in_epoch:
        return ""
    return f", epoch {number(round(step / run.steps_in_epoch, 1))}"


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def comparison_section(runs: Sequence[RunRecord], starts: Sequence[Sequence[Start]]) -> Html:
    """Return runs side by side: results, then the settings in which they differ."""
    differing = differing_settings([run.settings | _options(run) for run in runs])
    if not differing:
        return joined([_results_table(runs, starts), element("p", "The configs of these runs are the same.")])
    lines = [[breakable(name), *(of_user(shown(value)) for value in values)] for name, values in differing.items()]
    settings = table(["setting", *(of_user(run.name) for run in runs)], lines)
    return joined([_results_table(runs, starts), element("h3", "Settings that differ"), settings])


def _results_table(runs: Sequence[RunRecord], starts: Sequence[Sequence[Start]]) -> Html:
    found = [name for run in runs if run.last_evaluation for name in run.last_evaluation.metrics]
    names = list(dict.fromkeys(name for name in found if not name.endswith((".low", ".high"))))
    rows = [
        [
            joined([element("i", class_=f"key c{place % NUM_COLOURS}"), of_user(run.name)]),
            count(run.last_step),
            _best_in_words(run),
            *_last_metrics(run, names),
            duration(sum(start.seconds for start in run_starts)),
            status_badge(run),
        ]
        for place, (run, run_starts) in enumerate(zip(runs, starts, strict=True))
    ]
    of_last = (f"last {spoken(name)}" for name in names)
    return table(["run", "steps", "best", *of_last, "time at work", "status"], rows, "numbers")


def _options(run: RunRecord) -> dict[str, Any]:
    options = run.recipe.get("options")
    return {f"recipe.{name}": value for name, value in options.items()} if isinstance(options, dict) else {}


def _best_in_words(run: RunRecord) -> str:
    value = run.best.get("value")
    if not isinstance(value, int | float):
        return "–"
    name = spoken((run.best_metric or "").removeprefix("evaluation."))
    return f"{name} {number(value)} at step {count(run.best_step or 0)}"


def _last_metrics(run: RunRecord, names: Sequence[str]) -> list[str]:
    metrics = run.last_evaluation.metrics if run.last_evaluation else {}
    return [number(metrics[name]) if name in metrics else "–" for name in names]


def time_section(run: RunRecord, starts: Sequence[Start], split: TimeSplit) -> Html:
    """Return where the time went, and the starts with the pauses between them."""
    if not starts:
        return element("p", "Nothing has been logged yet.", class_="empty")
    known = "as measured" if split.is_measured else "estimated, in part, from the moments of the logged rows"
    head, lines = _start_rows(run, starts)
    return joined([
        element("h3", "Where the time went ", element("small", known)),
        _bar(split.seconds),
        element("h3", "Starts ", element("small", "pauses are not to scale")),
        _strip(starts),
        table(head, lines, "numbers"),
    ])  # fmt: skip


def _start_rows(run: RunRecord, starts: Sequence[Start]) -> tuple[list[str], list[list[str]]]:
    has_repeats = any(start.steps_done_again for start in starts)
    head = ["start", "begun", "at work", "steps", *(["done again"] if has_repeats else []), "ended"]
    rows = []
    for place, start in enumerate(starts, start=1):
        again = [count(start.steps_done_again)] if has_repeats else []
        about = [str(place), moment(start.begun), duration(start.seconds), _steps(start)]
        rows.append([*about, *again, _outcome(run, starts, place)])
    return head, rows


def _steps(start: Start) -> str:
    return f"{count(start.first_step)} to {count(start.last_step)}"


def _outcome(run: RunRecord, starts: Sequence[Start], place: int) -> str:
    record = starts[place - 1].record
    if end := end_of(record):
        return _end_in_words(end)
    if place == len(starts) and run.is_finished:
        return run.stop_reason or "at its end"
    if place == len(starts) and run.is_running:
        return "not yet"
    return "killed" if "step" in record else "interrupted"  # older records tell of no end


def _end_in_words(end: Mapping[str, Any]) -> str:
    how = end.get("how")
    if how == FINISHED:
        return str(end.get("reason") or "at its end")
    if how == FAILED:
        return f"failed: {end.get('error') or 'an error'}"
    return f"interrupted by {end['signal']}" if end.get("signal") else "interrupted"


def _bar(seconds: Mapping[str, float]) -> Html:
    """Return a bar of shares, and the same as a list."""
    total = sum(seconds.values()) or 1.0
    shown_parts = [(place, name, value) for place, (name, value) in enumerate(seconds.items())]
    pieces = [
        element("i", class_=f"c{place % NUM_COLOURS}", style=f"flex-grow:{value / total:.4f}")
        for place, _, value in shown_parts
        if value / total > LEAST_SHARE
    ]
    entries = [
        element(
            "li", element("i", class_=f"key c{place % NUM_COLOURS}"), of_user(spoken(name)), " ",
            element("output", f"{duration(value)} · {value / total:.0%}"),
        )
        for place, name, value in shown_parts
    ]  # fmt: skip
    return joined(
        [element("div", *pieces, class_="bar", aria_hidden="true"), element("ul", *entries, class_="legend wide")]
    )


def _strip(starts: Sequence[Start]) -> Html:
    """Return the starts as blocks as wide as they were long, with the length of each pause between them."""
    total = sum(start.seconds for start in starts) or 1.0
    blocks: list[Content] = []
    for place, start in enumerate(starts, start=1):
        if place > 1:
            blocks.append(element("span", duration(max(0.0, start.begun - starts[place - 2].ended)), class_="pause"))
        title = f"start {place}: {moment(start.begun)}, {duration(start.seconds)}, steps {_steps(start)}"
        grow = f"flex-grow:{max(start.seconds / total, 0.01):.4f}"
        blocks.append(element("span", str(place), class_="block", style=grow, title=title))
    return element("div", *blocks, class_="strip", role="img", aria_label=f"{len(starts)} starts, listed below")


def checkpoints_section(run: RunRecord, checkpoints: Sequence[SavedCheckpoint]) -> Html:
    """Return the checkpoints, newest first, the best one marked."""
    if not checkpoints:
        return element("p", "There is no checkpoint.", class_="empty")
    rows = [
        [
            joined([count(one.step), BEST_BADGE if one.step == run.best_step else None]),
            _epoch(run, one.step).removeprefix(", epoch ") or "–", moment(one.saved_at), bytes_in_words(one.size_bytes),
            element("span", one.health, class_="badge good" if one.is_good else "badge bad"),
        ]
        for one in checkpoints
    ]  # fmt: skip
    parts = [table(["step", "epoch", "saved", "size", "health"], rows, "numbers")]
    if run.best_step is not None and run.best_step not in {one.step for one in checkpoints}:
        parts.append(
            element("p", f"The best checkpoint, of step {count(run.best_step)}, is no longer there.", class_="note")
        )
    return joined(parts)


def settings_section(run: RunRecord) -> Html:
    """Return the config as far as it is not the default, the recipe's options, and all of it folded away."""
    settings = settings_of(run.settings)
    changed = [one for one in settings if not one.is_default and one.value is not None]
    parts: list[Content] = [element("h3", "Different from the defaults")]
    parts.append(table(["field", "value", "default"], _setting_rows(changed)) if changed else element("p", "Nothing."))
    if run.recipe:
        parts += [element("h3", "Recipe"), _pairs(_recipe_facts(run))]
    everything = table(["field", "value", "default"], _setting_rows(settings))
    parts.append(element("details", element("summary", f"All {len(settings)} fields"), everything))
    if run.plan:
        parts.append(element("details", element("summary", "The plan"), _pairs(run.plan)))
    return joined(parts)


def _setting_rows(settings: Sequence[Setting]) -> list[list[Content]]:
    return [
        [
            element("code", breakable(one.name)),
            element("code", breakable(shown(one.value)), dir="auto"),
            element("code", breakable(shown(one.default)), dir="auto", class_="muted"),
        ]
        for one in settings
    ]


def _recipe_facts(run: RunRecord) -> dict[str, Any]:
    plain = {name: run.recipe[name] for name in ("path", "config", "sha256") if name in run.recipe}
    return plain | _options(run)


def _pairs(values: Mapping[str, Any]) -> Html:
    return pairs({"": {name: shown(value) for name, value in values.items()}})


@dataclass(frozen=True)
class Setting:
    """One field of the config, as it was and as it would have been."""

    name: str
    value: Any
    default: Any
    is_default: bool


def settings_of(given: Mapping[str, Any]) -> list[Setting]:
    """Return all fields, those of a newer or older version at the end; None where a file leaves a field out."""
    defaults = _defaults()
    known = [_setting(name, given.get(name), default) for name, default in defaults.items()]
    strange = [Setting(name, value, None, False) for name, value in given.items() if name not in defaults]
    return known + strange


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields in which runs differ, with the value of each run."""
    names = dict.fromkeys(name for run in runs for name in run if name not in PRIVATE)
    values = {name: [run.get(name) for run in runs] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def shown(value: Any) -> str:
    """Return a value as a config file would have it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _setting(name: str, value: Any, default: Any) -> Setting:
    return Setting(name, value, default, is_default=value == default and name not in PRIVATE)


def _defaults() -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(TrainerConfig):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = None if default is dataclasses.MISSING else to_plain(default)
    return found


def environment_section(run: RunRecord) -> Html:
    """Return what the last start was made of, and what changed since the first."""
    if not run.starts:
        return element("p", "This run did not record its environment.", class_="empty")
    groups = [_groups(start) for start in run.starts]
    parts: list[Content] = [pairs(groups[-1])]
    if changed := [*_changes(groups), *_changed_settings(run.settings_by_start)]:
        parts += [element("h3", "Changed between starts"), element("ul", *(of_user(one, "li") for one in changed))]
    return joined(parts)


def _groups(start: Mapping[str, Any]) -> Groups:
    found: Groups = {"": {}}
    for name, value in start.items():
        if name in SHOWN_ELSEWHERE:
            continue
        if isinstance(value, dict):
            found[name] = dict(_facts_of_group(value))
        else:
            found[""][name] = shown(value)
    return found


def _facts_of_group(group: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield labels and values; what is known of one thing, such as a data set, stands in one line."""
    for name, value in group.items():
        label = " · ".join(filter(None, [within, LABELS.get(name, name)]))
        if not isinstance(value, dict):
            yield label, count(value) if type(value) is int else shown(value)
        elif any(isinstance(one, dict) for one in value.values()):
            yield from _facts_of_group(value, label)
        elif value:
            yield label, ", ".join(_in_words(key, one) for key, one in value.items())


def _in_words(name: str, value: Any) -> str:
    if name == "kind":
        return shown(value)
    if name == "size" and isinstance(value, int):
        return f"{count(value)} samples"
    return f"{name.replace('_', ' ')} {shown(value)}"


def _changes(groups: list[Groups]) -> Iterator[str]:
    flat = [_flat(one) for one in groups]
    for place in range(1, len(flat)):
        before, after = flat[place - 1], flat[place]
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                yield f"{name}: {shown(before.get(name))} → {shown(after.get(name))} at start {place + 1}"


def _flat(groups: Groups) -> dict[str, str]:
    return {
        " · ".join(filter(None, [group, label])): value
        for group, facts in groups.items()
        for label, value in facts.items()
    }


def _changed_settings(by_start: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what changed in the config, as far as it is known of the starts."""
    known = [place for place, settings in enumerate(by_start) if settings]
    for earlier, later in pairwise(known):
        when = f"at start {later + 1}" if later == earlier + 1 else f"by start {later + 1}"
        for name, (before, after) in differing_settings([by_start[earlier], by_start[later]]).items():
            if name not in ABOUT_THE_START:
                yield f"{name}: {shown(before)} → {shown(after)} {when}"

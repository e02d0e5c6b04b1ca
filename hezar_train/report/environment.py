"""What each start of a run was made of, in groups, and what changed from one start to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from hezar_train.report.markup import Content, Html, element, joined, of_user, pairs
from hezar_train.report.records import RunRecord
from hezar_train.report.settings import differing_settings, shown
from hezar_train.report.words import count

__all__ = ["environment_section"]

TOLD_ELSEWHERE = frozenset({"time", "step", "seconds", "end"})
"""When and how a start ran."""

ABOUT_THE_START = frozenset({"accept_changes", "resume_from_checkpoint"})
"""Fields of the config that say how to begin, not what to do."""

LABELS = {"python": "Python", "cpu": "CPU", "num_parameters": "parameters"}

Groups = dict[str, dict[str, str]]
"""Facts by group and label; those of no group are under the empty name."""


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
        if name in TOLD_ELSEWHERE:
            continue
        if isinstance(value, dict):
            found[name] = dict(_facts(value))
        else:
            found[""][name] = shown(value)
    return found


def _facts(group: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield labels and values; what is known of one thing, such as a data set, stands in one line."""
    for name, value in group.items():
        label = " · ".join(filter(None, [within, LABELS.get(name, name)]))
        if not isinstance(value, dict):
            yield label, count(value) if type(value) is int else shown(value)
        elif any(isinstance(one, dict) for one in value.values()):
            yield from _facts(value, label)
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

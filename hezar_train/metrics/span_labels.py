"""Labels of tokens as numbers, and the schemes that say where an entity begins and ends.

A label is a tag and a type, `B-PER`. Without a scheme it is read as conlleval and seqeval's default mode do, which
forgives: any of B, I, E, S may begin an entity, and a change of type always does, so IOB1, IOB2, IOE and IOBES are all
understood. With a scheme (IOB2, IOBES, BILOU) it is read strictly: what does not begin and end as the scheme says is no
entity, and a tag that the scheme lacks is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hezar_train.errors import DataError

__all__ = ["OUTSIDE", "SCHEMES", "LabelTables", "Labels"]

logger = logging.getLogger(__name__)

OUTSIDE = "O"
OTHER = "?"
UNNAMED = "_"

Rule = Callable[[str, str, bool], bool]
"""Whether something happens between two neighbours, by their tags and whether their types are the same."""


@dataclass(frozen=True)
class _Scheme:
    """When an entity begins and ends."""

    tags: str
    """The letters of the tags, outside first; `OTHER` stands for all that are not listed."""
    begins: Rule
    ends: Rule
    first_tags: str
    """Tags that an entity may begin with."""
    last_tags: str
    """Tags that an entity may end with."""

    def rows(self, rule: Rule) -> torch.Tensor:
        """Return a rule as booleans, (types differ or agree, tag before, tag)."""
        return torch.tensor([[[rule(a, b, same) for b in self.tags] for a in self.tags] for same in (False, True)])

    def row(self, allowed_tags: str) -> torch.Tensor:
        """Return for each tag whether it is allowed."""
        return torch.tensor([tag in allowed_tags for tag in self.tags])


def _begins_leniently(before: str, tag: str, same: bool) -> bool:
    return tag not in "O." and (not same or tag in "BS" or (before in "ESO" and tag in "EI"))


def _ends_leniently(before: str, tag: str, same: bool) -> bool:
    return before not in "O." and (not same or before in "ES" or (before in "BI" and tag in "BSO"))


def _strict(tags: str, goes_on_after: str, goes_on_with: str, first_tags: str, last_tags: str) -> _Scheme:
    def is_edge(before: str, tag: str, same: bool) -> bool:
        return not (same and before in goes_on_after and tag in goes_on_with)

    return _Scheme(tags, is_edge, is_edge, first_tags, last_tags)


LENIENT = _Scheme("OBIES.?", _begins_leniently, _ends_leniently, "OBIES.?", "OBIES.?")
SCHEMES = {
    "IOB2": _strict("OBI", goes_on_after="BI", goes_on_with="I", first_tags="B", last_tags="BI"),
    "IOBES": _strict("OBIES", goes_on_after="BI", goes_on_with="IE", first_tags="BS", last_tags="ES"),
    "BILOU": _strict("OBILU", goes_on_after="BI", goes_on_with="IL", first_tags="BU", last_tags="LU"),
}


class LabelTables(NamedTuple):
    """What is looked up for a batch: the label of each id, tag and type of each label, and the scheme."""

    label_of_id: torch.Tensor
    """-1 for an id without a label; the last stands for all ids beyond."""
    tag_of_label: torch.Tensor
    type_of_label: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    may_be_first: torch.Tensor
    may_be_last: torch.Tensor


class Labels:
    """Numbers of labels and of their types; one that is met for the first time gets the next. Outside is 0.

    Ids are those of a model; that two ids have one label is allowed.
    """

    def __init__(self, scheme: str | None, add_prefix: bool, suffix: bool) -> None:
        self._scheme_name = scheme
        self._scheme = LENIENT if scheme is None else SCHEMES[scheme]
        self._add_prefix = add_prefix
        self._suffix = suffix
        self._numbers: dict[str, int] = {}
        self._tags: list[int] = []
        self._types: list[int] = []
        self._number_of_id: dict[int, int] = {}
        self._tables: dict[torch.device, LabelTables] = {}
        self._has_warned = False
        self.type_numbers: dict[str, int] = {}
        self.number(OUTSIDE)

    def number(self, label: str) -> int:
        """Return the number of a label."""
        if label not in self._numbers:
            tag, type_name = self._read(label)
            self._tags.append(self._scheme.tags.index(tag))
            self._types.append(self.type_number(type_name))
            self._numbers[label] = len(self._numbers)
            self._tables.clear()
        return self._numbers[label]

    def name_ids(self, label_of_id: Mapping[int, str]) -> None:
        """Learn the labels of ids."""
        self._number_of_id = {id_: self.number(label) for id_, label in label_of_id.items()}
        self._tables.clear()

    def number_of_id(self, id_: int) -> int:
        """Return the number of an id's label."""
        if id_ not in self._number_of_id:
            raise self.unknown_ids(f"the label id {id_}")
        return self._number_of_id[id_]

    def unknown_ids(self, found: str) -> DataError:
        """Return an error about ids without a label."""
        known = f"has only {sorted(self._number_of_id)}" if self._number_of_id else "was not given"
        return DataError(f"seqeval got {found}, but id2label {known}: give a label for every id")

    @property
    def has_ids(self) -> bool:
        """Tell whether the labels of ids are known."""
        return bool(self._number_of_id)

    def type_number(self, name: str) -> int:
        """Return the number of a type."""
        return self.type_numbers.setdefault(name, len(self.type_numbers))

    def entity_types(self) -> list[str]:
        """List the types of the labels that are not outside."""
        used = {number for tag, number in zip(self._tags, self._types, strict=True) if tag}
        return [name for name, number in self.type_numbers.items() if number in used]

    def tables(self, device: torch.device) -> LabelTables:
        """Return the tables on a device."""
        if device not in self._tables:
            scheme = self._scheme
            num_ids = max(self._number_of_id, default=-1) + 1
            ids = torch.tensor([self._number_of_id.get(id_, -1) for id_ in range(num_ids + 1)])
            labels = torch.tensor(self._tags), torch.tensor(self._types)
            edges = scheme.rows(scheme.begins), scheme.rows(scheme.ends)
            limits = scheme.row(scheme.first_tags), scheme.row(scheme.last_tags)
            self._tables[device] = LabelTables(*(table.to(device) for table in (ids, *labels, *edges, *limits)))
        return self._tables[device]

    def _read(self, label: str) -> tuple[str, str]:
        if not isinstance(label, str) or not label:
            raise DataError(f"seqeval got the label {label!r}: a label is a text such as 'B-PER' or 'O'")
        if self._add_prefix and label != OUTSIDE:
            label = f"{label}-B" if self._suffix else f"B-{label}"
        letter, rest = (label[-1], label[:-1]) if self._suffix else (label[0], label[1:])
        type_name = self._type_name(rest)
        if self._scheme_name is None:
            self._warn_of_no_tag(label, letter, rest, type_name)
        elif letter not in self._scheme.tags:
            raise DataError(
                f"the label {label!r} is not of the scheme {self._scheme_name}, whose tags are "
                f"{', '.join(self._scheme.tags)}. Choose another scheme, or none to read labels leniently."
            )
        return letter if letter in self._scheme.tags else OTHER, type_name

    def _type_name(self, rest: str) -> str:
        if self._scheme_name is not None:
            return rest.strip("-") or UNNAMED
        parts = rest.rsplit("-", maxsplit=1) if self._suffix else rest.split("-", maxsplit=1)
        return parts[0 if self._suffix else -1] or UNNAMED

    def _warn_of_no_tag(self, label: str, letter: str, rest: str, type_name: str) -> None:
        has_tag = letter in "BIES" and rest[-1 if self._suffix else 0 :][:1] in ("", "-")
        if has_tag or label == OUTSIDE or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "the label %r has none of the tags B, I, E, S and O: as in seqeval, the letter %r is taken for its tag and "
            "%r for its type. If the labels have no tags, set add_prefix=True.",
            label,
            letter,
            type_name,
        )

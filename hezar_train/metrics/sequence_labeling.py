"""Entity-level scores of sequence labelling: an entity counts if its type, its first and its last token are right.

A label is a tag and a type, `B-PER`. Without a scheme it is read as conlleval and seqeval's default mode do, which
forgives: any of B, I, E, S may begin an entity, and a change of type always does, so IOB1, IOB2, IOE and IOBES are all
understood. With a scheme (IOB2, IOBES, BILOU) it is read strictly: what does not begin and end as the scheme says is no
entity, and a tag that the scheme lacks is an error.

No entity is ever listed: two rows of labels are compared by position, and where an entity ends in both, the types agree
and both began at the same place, one was found. That is arithmetic on (samples, tokens) tensors, on the device of the
labels, and leaves three counts per sample and type. Types are columns of the sums; those met late are added behind the
others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from operator import mul
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.metrics.metric import IGNORED_LABEL, AdditiveMetric, Table

__all__ = [
    "OUTSIDE",
    "SCHEMES",
    "EntityScores",
    "LabelTables",
    "Labels",
]

logger = logging.getLogger(__name__)

AVERAGES = ("micro", "macro", "weighted")
SCORES = ("precision", "recall", "f1")

# The sums: tokens, tokens labelled right, tokens with an id that has no label; for each type the entities found,
# predicted and true.
NUM_TOKEN_COUNTS = 3
NUM_TYPE_COUNTS = 3

OUTSIDE = "O"
OTHER = "?"  # a tag that the scheme does not list
UNNAMED = "_"  # the type of a label that is a tag alone

Rule = Callable[[str, str, bool], bool]
"""Whether something happens between two neighbours, by their tags and whether their types are the same."""


class EntityScores(AdditiveMetric):
    """Token accuracy, and precision, recall and F1 of entities.

    Predictions and targets are lists of lists of labels, or ids (lists, or tensors; then also logits) with `id2label`;
    what a target of -100 covers is left out. `scheme` is None (lenient), "IOB2", "IOBES" or "BILOU". `average` is
    "micro", or "macro" or "weighted" over the types that occur; `per_type` adds `f1.PER` and so on for each type of
    `id2label`. `add_prefix` is for labels without tags: each but "O" becomes an entity of one token. `suffix` is for
    labels such as `PER-B`. Where nothing was predicted, or nothing is there to be found, a score is 0; without a token
    all are NaN.
    """

    name = "seqeval"

    def __init__(
        self,
        id2label: Mapping[Any, str] | Sequence[str] | None = None,
        scheme: str | None = None,
        average: str = "micro",
        per_type: bool = False,
        add_prefix: bool = False,
        suffix: bool = False,
    ) -> None:
        super().__init__()
        if scheme is not None:
            _check_choice("scheme", scheme, SCHEMES)
        _check_choice("average", average, AVERAGES)
        self._average = average
        self._per_type = per_type
        self._reported_types: list[str] = []
        self._labels = Labels(scheme, add_prefix, suffix)
        if id2label:
            self._name_ids(id2label if isinstance(id2label, Mapping) else dict(enumerate(id2label)))

    @property
    def output_keys(self) -> list[str]:
        by_type = [f"{score}.{name}" for name in self._reported_types for score in SCORES]
        return ["accuracy", *SCORES, *by_type]

    @property
    def knows_ids(self) -> bool:
        """Tell whether the labels of ids are known."""
        return self._labels.has_ids

    def expect_classes(self, num_classes: int, names: Sequence[str] | None = None) -> None:  # noqa: ARG002
        if names is not None and not self._labels.has_ids:
            self._name_ids(dict(enumerate(names)))

    def statistics(self, predictions: Any, targets: Any) -> torch.Tensor:
        if self._per_type and not self._labels.has_ids:
            raise ConfigError("seqeval has per_type=True but no label names: give id2label, its types are the outputs")
        predicted, expected, is_kept = self._numbered(predictions, targets)
        self._widen()
        tables = self._labels.tables(predicted.device)
        ours, true = (_entities(labels.clamp(min=0), is_kept, tables) for labels in (predicted, expected))
        is_found = ours.ends & true.ends & (ours.types == true.types) & (ours.firsts == true.firsts)
        marks = (is_found, true.types), (ours.ends, ours.types), (true.ends, true.types)
        by_type = torch.stack([_tally(mark, types, len(self._labels.type_numbers)) for mark, types in marks], dim=2)
        # The last position is the edge behind the tokens, not a token.
        tokens = torch.stack([is_kept, predicted == expected, (predicted < 0) | (expected < 0)], dim=2)[:, :-1]
        return torch.cat([(tokens & is_kept[:, :-1, None]).sum(1), by_type.flatten(1)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        (num_tokens, num_right, num_unknown), by_type = sums[:NUM_TOKEN_COUNTS], _by_type(sums)
        if num_unknown:
            raise self._labels.unknown_ids(f"ids without a label at {num_unknown:.0f} tokens")
        if not num_tokens:
            return self._undefined()
        scores = [num_right / num_tokens, *_averaged(by_type, self._average)]
        for name in self._reported_types:
            scores += _scores(*by_type[self._labels.type_numbers[name]])
        return dict(zip(self.output_keys, scores, strict=True))

    def table(self) -> Table | None:
        if self._sums is None:
            return None
        by_type = _by_type(self._sums[0].tolist())
        counts_of = {name: by_type[number] for name, number in self._labels.type_numbers.items()}
        occurring = sorted(name for name, counts in counts_of.items() if any(counts))
        values = [[*_scores(*counts_of[name]), counts_of[name][2]] for name in occurring]
        return Table(name="per_type", rows=occurring, columns=[*SCORES, "support"], values=values)

    def state(self) -> dict[str, torch.Tensor]:
        state = super().state()
        if state:
            names = json.dumps(list(self._labels.type_numbers)).encode()
            state["types"] = torch.tensor(list(names), dtype=torch.uint8, device=state["sums"].device)
        return state

    def merge(self, state: Mapping[str, torch.Tensor]) -> None:
        if "sums" not in state:
            return
        numbers = [self._labels.type_number(name) for name in json.loads(bytes(state["types"].tolist()))]
        self._widen()
        tokens, by_type = state["sums"][:, :NUM_TOKEN_COUNTS], state["sums"][:, NUM_TOKEN_COUNTS:]
        aligned = by_type.new_zeros(len(by_type), len(self._labels.type_numbers), NUM_TYPE_COUNTS)
        aligned[:, numbers] = by_type.reshape(len(by_type), len(numbers), NUM_TYPE_COUNTS)
        super().merge({"sums": torch.cat([tokens, aligned.flatten(1)], dim=1)})

    def _name_ids(self, label_of_id: Mapping[Any, str]) -> None:
        self._labels.name_ids({int(id_): label for id_, label in label_of_id.items()})
        self._reported_types = self._labels.entity_types() if self._per_type else []

    def _widen(self) -> None:
        """Add columns for the types that were met since the sums were made."""
        if self._sums is not None:
            width = NUM_TOKEN_COUNTS + NUM_TYPE_COUNTS * len(self._labels.type_numbers)
            self._sums = pad(self._sums, (0, width - self._sums.shape[1]))

    def _numbered(self, predictions: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return both as numbers of labels, and which positions count; behind the tokens, an edge is outside."""
        are_tensors = isinstance(predictions, torch.Tensor) and isinstance(targets, torch.Tensor)
        numbered = self._numbered_tensors if are_tensors else self._numbered_lists
        predicted, expected, is_kept = numbered(predictions, targets)
        return pad(predicted, (0, 1)), pad(expected, (0, 1)), pad(is_kept, (0, 1), value=True)

    def _numbered_tensors(
        self, predictions: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if predictions.is_floating_point() and predictions.dim() == targets.dim() + 1:
            predictions = predictions.argmax(dim=-1)
        _check_tensors(predictions, targets)
        targets = targets.to(predictions.device)
        table = self._labels.tables(predictions.device).label_of_id
        beyond = len(table) - 1
        predicted, expected = (
            table[ids.long().where((ids >= 0) & (ids < beyond), beyond)] for ids in (predictions, targets)
        )
        return predicted, expected, targets != IGNORED_LABEL

    def _numbered_lists(self, predictions: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        samples = [self._numbered_sample(*sample) for sample in _checked_samples(predictions, targets)]
        width = max((len(sample) for sample in samples), default=0)
        padded = [sample + [(-1, -1)] * (width - len(sample)) for sample in samples]
        numbers = torch.tensor(padded, dtype=torch.long).reshape(len(samples), width, 2)
        predicted, expected = numbers.unbind(2)
        return predicted, expected, expected >= 0

    def _numbered_sample(self, predictions: list[Any], targets: list[Any]) -> list[tuple[int, int]]:
        pairs = zip(predictions, targets, strict=True)
        return [
            (self._number(predicted), self._number(target)) for predicted, target in pairs if target != IGNORED_LABEL
        ]

    def _number(self, label: Any) -> int:
        return self._labels.number_of_id(int(label)) if isinstance(label, Integral) else self._labels.number(label)


class _Entities(NamedTuple):
    """The entities of a batch, each at the position behind its last token, (samples, tokens + 1)."""

    ends: torch.Tensor
    types: torch.Tensor
    firsts: torch.Tensor


def _entities(labels: torch.Tensor, is_kept: torch.Tensor, tables: LabelTables) -> _Entities:
    places_before = _latest_before(is_kept)
    # Nothing stands before the first label that counts: that is outside, number 0.
    before = labels.gather(1, places_before.clamp(min=0)).where(places_before >= 0, 0)
    tags, tags_before = tables.tag_of_label[labels], tables.tag_of_label[before]
    types_before = tables.type_of_label[before]
    same = (tables.type_of_label[labels] == types_before).long()
    firsts = _latest_before(tables.begins[same, tags_before, tags] & is_kept)
    ends = tables.ends[same, tags_before, tags] & is_kept & tables.may_be_last[tags_before]
    ends &= tables.may_be_first[tags.gather(1, firsts.clamp(min=0))]
    return _Entities(ends, types_before, firsts)


def _latest_before(mark: torch.Tensor) -> torch.Tensor:
    """Return for each position the last one before it that is marked, or -1."""
    positions = torch.arange(mark.shape[1], device=mark.device).expand_as(mark)
    return pad(positions.where(mark, -1).cummax(dim=1).values[:, :-1], (1, 0), value=-1)


def _by_type(sums: list[float]) -> list[list[float]]:
    """Return the entities found, predicted and true, for each type."""
    starts = range(NUM_TOKEN_COUNTS, len(sums), NUM_TYPE_COUNTS)
    return [sums[start : start + NUM_TYPE_COUNTS] for start in starts]


def _tally(mark: torch.Tensor, types: torch.Tensor, num_types: int) -> torch.Tensor:
    """Return how many positions are marked, for each sample and type."""
    return mark.new_zeros(len(mark), num_types, dtype=torch.long).scatter_add(1, types, mark.long())


def _scores(num_found: float, num_predicted: float, num_true: float) -> tuple[float, float, float]:
    precision = num_found / num_predicted if num_predicted else 0.0
    recall = num_found / num_true if num_true else 0.0
    f1 = 2 * precision * recall / (precision + recall) if num_found else 0.0
    return precision, recall, f1


def _averaged(by_type: list[list[float]], average: str) -> tuple[float, ...]:
    if average == "micro":
        return _scores(*map(sum, zip(*by_type, strict=True)))
    present = [counts for counts in by_type if any(counts)]
    shares = [1.0 if average == "macro" else counts[2] for counts in present]
    columns = zip(*(_scores(*counts) for counts in present), strict=True)
    if not sum(shares):
        return 0.0, 0.0, 0.0
    return tuple(sum(map(mul, shares, column)) / sum(shares) for column in columns)


def _check_choice(option: str, given: Any, known: Sequence[str] | Mapping[str, Any]) -> None:
    if given not in known:
        hint = suggestion(str(given), known)
        raise ConfigError(f"seqeval has {option}={given!r}. It is one of: {choices(known)}.{hint}")


def _check_tensors(predictions: torch.Tensor, targets: torch.Tensor) -> None:
    if predictions.shape != targets.shape or targets.dim() != 2 or predictions.is_floating_point():
        raise DataError(
            f"seqeval got predictions of shape {tuple(predictions.shape)} ({predictions.dtype}) and targets of shape "
            f"{tuple(targets.shape)}: give ids of shape (samples, tokens), or logits with one axis more"
        )


def _checked_samples(predictions: Any, targets: Any) -> list[tuple[list[Any], list[Any]]]:
    ours, true = ([_plain(row) for row in _plain(rows)] for rows in (predictions, targets))
    if len(ours) != len(true):
        raise DataError(f"seqeval got {len(ours)} predictions and {len(true)} targets: give a list per sample")
    for predicted, target in zip(ours, true, strict=True):
        if len(predicted) != len(target):
            raise DataError(f"seqeval got {len(predicted)} labels for a sample of {len(target)} tokens: give one each")
    return list(zip(ours, true, strict=True))


def _plain(rows: Any) -> list[Any]:
    if isinstance(rows, str) or not hasattr(rows, "__iter__"):
        raise DataError(f"seqeval got {rows!r} where a list was expected: give a list of lists of labels")
    return rows.tolist() if hasattr(rows, "tolist") else list(rows)


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

from __future__ import annotations

import logging
import math
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval import metrics as seqeval
from seqeval import scheme as schemes

from hezar_train.errors import ConfigError, DataError
from hezar_train.metrics.sequence_labeling import EntityScores

SCORES = ("precision", "recall", "f1")
BATCH_SIZES = [1, 3, 7, 100]
TYPES = ["PER", "LOC", "مکان", "A-B"]
# What models emit, and then some: entities that begin with I, end nowhere, have no type or no tag.
LENIENT_LABELS = [
    "O",
    "ORG",
    "B",
    "I",
    "E",
    "S",
    "PER",
    "X-PER",
    "PERSON",
    *(f"{tag}-{name}" for tag in "BIES" for name in TYPES),
]
STRICT_LABELS = {
    name: ["O", *(f"{tag}-{type_}" for tag in tags for type_ in TYPES[:3]), tags[0]]
    for name, tags in {"IOB2": "BI", "IOBES": "BIES", "BILOU": "BILU"}.items()
}

Samples = list[list[tuple[str, str]]]


def samples_of(labels: list[str]) -> st.SearchStrategy[Samples]:
    label = st.sampled_from(labels)
    # A prediction that is often right, else there is little to find.
    token = st.one_of(label.map(lambda name: (name, name)), st.tuples(label, label))
    return st.lists(st.lists(token, max_size=9), min_size=1, max_size=9).filter(any)


def split(samples: Samples) -> tuple[list[list[str]], list[list[str]]]:
    return [[ours for ours, _ in sample] for sample in samples], [[true for _, true in sample] for sample in samples]


def run(metric: EntityScores, predictions: Any, targets: Any, batch_size: int = 100) -> dict[str, float]:
    metric.reset()
    for start in range(0, len(targets), batch_size):
        metric.update(predictions[start : start + batch_size], targets[start : start + batch_size])
    return metric.compute()


def reference(predictions: list[list[str]], targets: list[list[str]], **options: Any) -> dict[str, float]:
    functions = seqeval.precision_score, seqeval.recall_score, seqeval.f1_score
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = [function(targets, predictions, zero_division=0, **options) for function in functions]
        accuracy = seqeval.accuracy_score(targets, predictions)
    # The macro mean over no type at all is NaN there, 0 here.
    return {"accuracy": accuracy, **dict(zip(SCORES, numpy.nan_to_num(scores).tolist(), strict=True))}


@settings(deadline=None)
@given(samples_of(LENIENT_LABELS), st.sampled_from(BATCH_SIZES), st.sampled_from(["micro", "macro", "weighted"]))
def test_scores_equal_those_of_seqeval_on_the_whole_set(samples: Samples, batch_size: int, average: str) -> None:
    predictions, targets = split(samples)
    result = run(EntityScores(average=average), predictions, targets, batch_size)
    assert result == pytest.approx(reference(predictions, targets, average=average), abs=1e-9)


@pytest.mark.parametrize("scheme", ["IOB2", "IOBES", "BILOU"])
@settings(deadline=None, max_examples=60)
@given(data=st.data(), batch_size=st.sampled_from(BATCH_SIZES), average=st.sampled_from(["micro", "macro", "weighted"]))
def test_strict_scores_equal_those_of_seqeval(scheme: str, data: st.DataObject, batch_size: int, average: str) -> None:
    predictions, targets = split(data.draw(samples_of(STRICT_LABELS[scheme])))
    options = {"mode": "strict", "scheme": getattr(schemes, scheme), "average": average}
    result = run(EntityScores(scheme=scheme, average=average), predictions, targets, batch_size)
    assert result == pytest.approx(reference(predictions, targets, **options), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(samples_of(["O", "B", *(f"{name}-{tag}" for tag in "BIES" for name in TYPES)]), st.booleans())
def test_labels_with_the_tag_behind_are_read_as_seqeval_does(samples: Samples, is_strict: bool) -> None:
    predictions, targets = split(samples)
    options = {"mode": "strict", "scheme": schemes.IOBES} if is_strict else {}
    metric = EntityScores(suffix=True, scheme="IOBES" if is_strict else None)
    expected = reference(predictions, targets, suffix=True, **options)
    assert run(metric, predictions, targets, 3) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("sequence", "num_lenient", "num_strict"),
    [
        (["I-PER", "I-PER", "O"], 1, 0),
        (["B-PER", "I-LOC"], 2, 1),
        (["B-PER", "B-PER", "I-PER"], 2, 2),
        (["O", "O"], 0, 0),
    ],
)
def test_a_malformed_sequence_is_forgiven_or_not(sequence: list[str], num_lenient: int, num_strict: int) -> None:
    for scheme, expected in ((None, num_lenient), ("IOB2", num_strict)):
        metric = EntityScores(scheme=scheme)
        metric.update([sequence], [sequence])
        table = metric.table()
        assert table is not None
        assert sum(row[3] for row in table["values"]) == expected


@settings(deadline=None, max_examples=60)
@given(samples_of(LENIENT_LABELS), st.sampled_from(BATCH_SIZES), st.data())
def test_ids_with_ignored_positions_score_as_their_labels(
    samples: Samples, batch_size: int, data: st.DataObject
) -> None:
    predictions, targets = split(samples)
    width = max(map(len, targets)) + 4
    predicted_ids = torch.arange(len(samples) * width).reshape(len(samples), width) % len(LENIENT_LABELS)
    target_ids = torch.full((len(samples), width), -100)
    for row, sample in enumerate(samples):
        kept = sorted(data.draw(st.permutations(range(width)))[: len(sample)])
        predicted_ids[row, kept] = torch.tensor([LENIENT_LABELS.index(ours) for ours, _ in sample], dtype=torch.long)
        target_ids[row, kept] = torch.tensor([LENIENT_LABELS.index(true) for _, true in sample], dtype=torch.long)
    expected = run(EntityScores(), predictions, targets)
    metric = EntityScores(id2label=LENIENT_LABELS)
    assert run(metric, predicted_ids, target_ids, batch_size) == pytest.approx(expected, abs=1e-12)
    assert run(metric, predicted_ids.tolist(), target_ids.tolist(), batch_size) == pytest.approx(expected, abs=1e-12)


def test_ids_come_as_any_integers_and_logits_are_decided() -> None:
    labels = {"0": "O", "1": "B-PER", "7": "I-PER"}
    ids = torch.tensor([[1, 7, 0], [0, 1, -100]], dtype=torch.int32)
    perfect = {"accuracy": 1.0, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    logits = torch.nn.functional.one_hot(ids.long().clamp(min=0), 8).float()
    for predictions, targets in ((ids, ids), (ids.numpy(), ids.numpy()), (logits, ids), (list(ids), list(ids.numpy()))):
        assert run(EntityScores(id2label=labels), predictions, targets) == perfect


def test_a_batch_of_one_sample_and_of_one_token_is_scored() -> None:
    metric = EntityScores(id2label=["O", "B-PER"])
    metric.update(torch.tensor([[1]]), torch.tensor([[1]]))
    assert metric.compute()["f1"] == 1.0


def test_labels_may_be_named_after_construction() -> None:
    metric = EntityScores(per_type=True)
    metric.expect_classes(3, ["O", "B-PER", "B-LOC"])
    assert metric.output_keys[4:] == ["precision.PER", "recall.PER", "f1.PER", "precision.LOC", "recall.LOC", "f1.LOC"]
    metric.update([[1, 2, 1]], [[1, 2, 2]])
    result = metric.compute()
    assert list(result) == metric.output_keys
    assert result["precision.PER"] == 0.5
    assert result["recall.LOC"] == 0.5
    assert result["f1.LOC"] == pytest.approx(2 / 3)


def test_names_given_at_construction_are_not_replaced() -> None:
    metric = EntityScores(id2label=["O", "B-PER"])
    metric.expect_classes(2, ["B-LOC", "B-LOC"])
    assert run(metric, [[0, 1]], [["O", "B-PER"]])["accuracy"] == 1.0


def test_the_table_has_a_row_for_each_type_that_occurs() -> None:
    metric = EntityScores(id2label=["O", "B-PER", "B-LOC", "B-ORG"])
    assert metric.table() is None
    metric.update([["B-PER", "B-PER", "O"]], [["B-PER", "B-LOC", "O"]])
    assert metric.table() == {
        "name": "per_type",
        "rows": ["LOC", "PER"],
        "columns": ["precision", "recall", "f1", "support"],
        "values": [[0.0, 0.0, 0.0, 1.0], [0.5, 1.0, pytest.approx(2 / 3), 1.0]],
    }


def test_labels_without_tags_become_entities_of_one_token() -> None:
    predictions, targets = [["PER", "PER", "O", "LOC"]], [["PER", "LOC", "O", "LOC"]]
    prefixed = [
        [[name if name == "O" else f"B-{name}" for name in row] for row in rows] for rows in (predictions, targets)
    ]
    assert run(EntityScores(add_prefix=True), predictions, targets) == reference(*prefixed)
    assert run(EntityScores(add_prefix=True, suffix=True, scheme="IOB2"), predictions, targets) == reference(*prefixed)


@pytest.mark.parametrize(
    ("labels", "warnings_about"),
    [
        (["O", "B-PER", "I", "S-A"], []),
        (["O", "PER", "LOC"], ["'PER' .* 'P' is taken for its tag and 'ER' for its type.*add_prefix=True"]),
        (["O", "ORG"], ["'ORG' .* 'O' is taken for its tag and 'RG' for its type"]),
    ],
)
def test_a_label_without_a_tag_is_warned_about_once(
    labels: list[str], warnings_about: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        EntityScores(id2label=labels)
        EntityScores(id2label=labels, add_prefix=True)
    assert len(caplog.records) == len(warnings_about)
    for record, message in zip(caplog.records, warnings_about, strict=True):
        assert re.search(message, record.getMessage())


@settings(deadline=None, max_examples=40)
@given(samples_of(LENIENT_LABELS), st.sampled_from(["micro", "macro", "weighted"]), st.data())
def test_weights_count_a_sample_as_often_as_they_say(samples: Samples, average: str, data: st.DataObject) -> None:
    repeats = data.draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    metric = EntityScores(average=average)
    half = (len(samples) + 1) // 2
    for part in (slice(0, half), slice(half, None)):
        weights = torch.tensor([[1] * len(samples[part]), repeats[part]])
        metric.update(*split(samples[part]), weights)
    repeated = [sample for sample, count in zip(samples, repeats, strict=True) for _ in range(count)]
    rows = metric.compute_rows()
    assert rows[0] == pytest.approx(run(EntityScores(average=average), *split(samples)), abs=1e-9)
    assert rows[1] == pytest.approx(run(EntityScores(average=average), *split(repeated)), abs=1e-9, nan_ok=True)


@settings(deadline=None, max_examples=40)
@given(samples_of(LENIENT_LABELS), samples_of(LENIENT_LABELS))
def test_states_merge_though_each_met_other_types(first: Samples, second: Samples) -> None:
    one, other = EntityScores(average="macro"), EntityScores(average="macro")
    run(one, *split(first))
    run(other, *split(second))
    one.merge(other.state())
    one.merge(EntityScores().state())
    together = run(EntityScores(average="macro"), *split(first + second))
    assert one.compute() == pytest.approx(together, abs=1e-12)
    empty = EntityScores(average="macro")
    empty.merge(one.state())
    assert empty.compute() == pytest.approx(together, abs=1e-12)


def test_the_state_does_not_grow_with_the_samples() -> None:
    metric = EntityScores()
    sizes = set()
    for _ in range(20):
        metric.update([["B-PER", "O", "B-LOC"]], [["B-PER", "I-PER", "O"]])
        sizes.add(tuple(tuple(value.shape) for value in metric.state().values()))
    assert len(sizes) == 1


def test_without_a_token_scores_are_nan_and_without_an_entity_they_are_zero() -> None:
    metric = EntityScores()
    metric.update([], [])
    metric.update([[]], [[]])
    assert all(map(math.isnan, metric.compute().values()))
    tensors = EntityScores(id2label=["O"])
    tensors.update(torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4, dtype=torch.long))
    tensors.update(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long))
    assert all(map(math.isnan, tensors.compute().values()))
    assert run(EntityScores(average="macro"), [["O"]], [["O"]]) == {"accuracy": 1.0, **dict.fromkeys(SCORES, 0.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "IOB3"}, r"scheme='IOB3'. It is one of: BILOU, IOB2, IOBES. Did you mean 'IOB2'\?"),
        ({"average": "mikro"}, r"average='mikro'.*Did you mean 'micro'\?"),
    ],
)
def test_an_option_that_means_nothing_is_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EntityScores(**options)


def test_scores_per_type_need_label_names() -> None:
    with pytest.raises(ConfigError, match="per_type=True but no label names: give id2label"):
        EntityScores(per_type=True).update([["O"]], [["O"]])


@pytest.mark.parametrize(
    ("predictions", "targets", "message"),
    [
        ([["O"]], [["O", "O"]], "1 labels for a sample of 2 tokens"),
        ([["O"]], [], "1 predictions and 0 targets"),
        (["O"], ["O"], "got 'O' where a list was expected"),
        ([[""]], [["O"]], "got the label ''"),
        ([[2]], [[0]], r"label id 2, but id2label has only \[0, 1\]: give a label for every id"),
        (torch.zeros(2, 3, 4).long(), torch.zeros(2, 3).long(), r"shape \(2, 3, 4\).* \(2, 3\): give ids of shape"),
        (torch.zeros(3).long(), torch.zeros(3).long(), "give ids of shape"),
    ],
)
def test_what_is_not_a_list_of_labels_is_told(predictions: Any, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        EntityScores(id2label=["O", "B-PER"]).update(predictions, targets)


@pytest.mark.parametrize("id_", [2, -1, -100])
def test_an_id_without_a_label_in_a_tensor_is_told_at_the_end(id_: int) -> None:
    metric = EntityScores(id2label=["O", "B-PER"])
    metric.update(torch.tensor([[0, id_, 1]]), torch.tensor([[0, 1, -100]]))
    with pytest.raises(DataError, match=r"ids without a label at 1 tokens, but id2label has only \[0, 1\]"):
        metric.compute()


def test_a_tag_that_the_scheme_lacks_is_told() -> None:
    with pytest.raises(DataError, match="'E-PER' is not of the scheme IOB2, whose tags are O, B, I"):
        EntityScores(id2label=["O", "B-PER", "E-PER"], scheme="IOB2")

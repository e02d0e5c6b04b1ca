from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jiwer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

from hezar_train.errors import ConfigError, DataError, MissingDependencyError
from hezar_train.metrics.text import (
    Bleu,
    CharacterErrorRate,
    ChrF,
    ExactMatch,
    Rouge,
    TextMetric,
    WordErrorRate,
    edit_distance,
    plain_edit_distance,
)

ZWNJ = "\u200c"
METRICS: list[type[TextMetric]] = [CharacterErrorRate, WordErrorRate, ExactMatch, Bleu, ChrF, Rouge]
ROUGES = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
BATCH_SIZES = [1, 3, 7, 100]

Pairs = list[tuple[str, Any]]

# A small vocabulary, so that there is something to match; any text now and then.
WORDS = st.sampled_from(["the", "The", "cat", "sat", "on", "a", "mat", "don't", "3.5", "cat,", "mat.", "..."])
ENGLISH = st.lists(st.tuples(WORDS, st.sampled_from([" ", " ", " ", "\n", "  ", "\n\n"])), max_size=14).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)
PERSIAN_WORDS = st.sampled_from(
    [f"می{ZWNJ}روم", "می روم", "كتاب", "کتاب", "۱۲۳", "٤٥", "مُحَمَّد", "خانهٔ", "«علی»،", "آب؟", f"کار{ZWNJ}ها", "ســلام"]
)
PERSIAN = st.lists(PERSIAN_WORDS, min_size=2, max_size=12).map(" ".join)
TEXT = st.one_of(ENGLISH, PERSIAN, st.text(max_size=20))


def run(metric: TextMetric, pairs: Pairs, batch_size: int = 100) -> dict[str, float]:
    metric.reset()
    for start in range(0, len(pairs), batch_size):
        predictions, references = zip(*pairs[start : start + batch_size], strict=True)
        metric.update(list(predictions), list(references))
    return metric.compute()


def pairs_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(texts, texts), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(pairs_of(TEXT), st.sampled_from(BATCH_SIZES))
def test_error_rates_equal_those_of_jiwer_on_the_whole_set(pairs: Pairs, batch_size: int) -> None:
    predictions, references = (list(texts) for texts in zip(*pairs, strict=True))
    assert run(CharacterErrorRate(), pairs, batch_size)["cer"] == pytest.approx(
        jiwer.cer(references, predictions), abs=1e-9
    )
    assert run(WordErrorRate(), pairs, batch_size)["wer"] == pytest.approx(jiwer.wer(references, predictions), abs=1e-9)


def test_an_error_rate_is_the_ratio_of_sums_and_may_exceed_one() -> None:
    pairs = [("a b c d", "a"), ("b", "b c")]
    assert run(WordErrorRate(), pairs, 1) == {"wer": (3 + 1) / (1 + 2)}
    assert WordErrorRate().objective("wer") == CharacterErrorRate().objective("cer") == "minimize"


@pytest.mark.parametrize(("prediction", "rate"), [("", 0.0), ("two words", 2.0)])
def test_empty_references_count_as_of_length_one_together(prediction: str, rate: float) -> None:
    assert run(WordErrorRate(), [(prediction, ""), ("", " ")]) == {"wer": rate}
    assert jiwer.wer(["", " "], [prediction, ""]) == rate


def test_an_error_rate_refuses_several_references() -> None:
    assert run(CharacterErrorRate(), [("ab", ["ac"])]) == {"cer": 0.5}
    with pytest.raises(DataError, match="wer got 2 references for a sample: an error rate has one"):
        run(WordErrorRate(), [("a", ["a", "b"])])


@settings(deadline=None)
@given(st.text(st.sampled_from("abcی"), max_size=90), st.text(st.sampled_from("abcی"), max_size=90))
def test_the_plain_edit_distance_is_that_of_rapidfuzz(first: str, second: str) -> None:
    from rapidfuzz.distance import Levenshtein

    assert plain_edit_distance(first, second) == edit_distance(first, second) == Levenshtein.distance(first, second)


def test_edits_are_counted_without_rapidfuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    from hezar_train.metrics import text as text_metrics

    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    text_metrics._fastest.cache_clear()
    assert text_metrics._fastest() is plain_edit_distance
    assert run(WordErrorRate(), [("the cat sat", "the mat sat on")]) == {"wer": 2 / 4}
    text_metrics._fastest.cache_clear()


@settings(deadline=None, max_examples=60)
@given(pairs_of(TEXT), st.sampled_from(BATCH_SIZES), st.sampled_from(["13a", "intl", "char", "none"]))
def test_bleu_and_chrf_equal_those_of_sacrebleu_on_the_whole_set(pairs: Pairs, batch_size: int, tokenize: str) -> None:
    predictions, references = (list(texts) for texts in zip(*pairs, strict=True))
    bleu = BLEU(tokenize=tokenize, effective_order=True).corpus_score(predictions, [references]).score / 100
    chrf = CHRF().corpus_score(predictions, [references]).score / 100
    assert run(Bleu(tokenize=tokenize), pairs, batch_size)["bleu"] == pytest.approx(bleu, abs=1e-9)
    assert run(ChrF(), pairs, batch_size)["chrf"] == pytest.approx(chrf, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(pairs_of(ENGLISH), st.sampled_from(["exp", "floor", "add-k", "none"]), st.booleans())
def test_options_of_bleu_and_chrf_are_those_of_sacrebleu(pairs: Pairs, smooth_method: str, lowercase: bool) -> None:
    predictions, references = (list(texts) for texts in zip(*pairs, strict=True))
    options: dict[str, Any] = {"smooth_method": smooth_method, "lowercase": lowercase, "effective_order": False}
    bleu = BLEU(**options).corpus_score(predictions, [references]).score / 100
    chrf = CHRF(word_order=2, lowercase=lowercase).corpus_score(predictions, [references]).score / 100
    assert run(Bleu(**options), pairs, 3)["bleu"] == pytest.approx(bleu, abs=1e-9)
    assert run(ChrF(word_order=2, lowercase=lowercase), pairs, 3)["chrf"] == pytest.approx(chrf, abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(ENGLISH, st.lists(ENGLISH, min_size=1, max_size=3)), min_size=1, max_size=8))
def test_several_references_are_scored_as_sacrebleu_and_rouge_score_do(pairs: Pairs) -> None:
    predictions = [prediction for prediction, _ in pairs]
    streams = [[group[n] if n < len(group) else None for _, group in pairs] for n in range(3)]
    bleu = BLEU(effective_order=True).corpus_score(predictions, streams).score / 100  # type: ignore[arg-type]
    chrf = CHRF().corpus_score(predictions, streams).score / 100  # type: ignore[arg-type]
    assert run(Bleu(), pairs, 3)["bleu"] == pytest.approx(bleu, abs=1e-9)
    assert run(ChrF(), pairs, 3)["chrf"] == pytest.approx(chrf, abs=1e-9)
    scorer = RougeScorer(ROUGES)
    scores = [scorer.score_multi(group, prediction) for prediction, group in pairs]
    assert run(Rouge(), pairs, 3) == pytest.approx(
        {key: sum(score[key].fmeasure for score in scores) / len(scores) for key in ROUGES}, abs=1e-9
    )


def test_effective_order_matters_only_where_no_prediction_has_four_words() -> None:
    short, long = [("سلام دنیا", "سلام دنیا")], [("a b c", "a b c"), ("a b c d", "a x c d")]
    assert run(Bleu(), short) == {"bleu": 1.0}
    assert run(Bleu(effective_order=False), short) == {"bleu": 0.0}
    assert run(Bleu(), long) == run(Bleu(effective_order=False), long)


def test_bleu_names_its_tokeniser() -> None:
    metric = Bleu(tokenize="intl")
    run(metric, [("a", ["a", "b"])])
    assert metric.tokenize == "intl"
    assert metric.signature.startswith("nrefs:2|case:mixed|eff:yes|tok:intl|smooth:exp|version:")
    metric.update(["a"], ["a"])
    assert metric.signature.startswith("nrefs:var|")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenize": "13b"}, r"tokenize='13b'.*Did you mean '13a'\?"),
        ({"smooth_method": "x"}, "add-k, exp, floor, none"),
    ],
)
def test_bleu_refuses_what_sacrebleu_does_not_know(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Bleu(**options)


@pytest.mark.parametrize("build", [Bleu, ChrF])
def test_without_sacrebleu_the_message_names_the_extra(
    build: Callable[[], TextMetric], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(MissingDependencyError, match=r"needs the package 'sacrebleu'.*hezar-train\[metrics\]"):
        build()


@settings(deadline=None, max_examples=100)
@given(
    pairs_of(st.one_of(ENGLISH, st.text(st.characters(max_codepoint=127), max_size=20))), st.sampled_from(BATCH_SIZES)
)
def test_rouge_equals_the_mean_of_rouge_score_on_english(pairs: Pairs, batch_size: int) -> None:
    scorer = RougeScorer(ROUGES, use_stemmer=False)
    scores = [scorer.score(reference, prediction) for prediction, reference in pairs]
    expected = {key: sum(score[key].fmeasure for score in scores) / len(scores) for key in ROUGES}
    assert run(Rouge(), pairs, batch_size) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.text("abc\n ", max_size=40), min_size=2, max_size=2))
def test_rouge_chooses_the_same_common_subsequence_among_many(texts: list[str]) -> None:
    prediction, reference = (" ".join(text) for text in texts)
    expected = RougeScorer(["rougeLsum"]).score(reference, prediction)["rougeLsum"].fmeasure
    assert run(Rouge(), [(prediction, reference)])["rougeLsum"] == pytest.approx(expected, abs=1e-9)


def test_rouge_of_long_texts_is_that_of_rouge_score() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [" ".join(map(str, torch.randint(9, (300,), generator=generator).tolist())) for _ in range(2)]
    expected = RougeScorer(["rougeL"]).score(*texts)["rougeL"].fmeasure
    assert run(Rouge(), [(texts[1], texts[0])])["rougeL"] == pytest.approx(expected, abs=1e-9)


def test_rouge_takes_words_from_a_given_function() -> None:
    assert run(Rouge(tokenize=list), [("ab", "abcd")])["rouge1"] == pytest.approx(2 / 3)


def test_rouge_keeps_lines_when_it_normalises() -> None:
    pairs = [("b\na", "ي a\nb")]
    normalised = [("b\na", "ی a\nb")]
    assert run(Rouge(normalise=True), pairs) == run(Rouge(), normalised)
    assert run(Rouge(normalise=True), pairs)["rougeLsum"] == pytest.approx(0.8)


@pytest.mark.parametrize("normalise", [False, True, {"zwnj": "space"}])
@settings(deadline=None, max_examples=40)
@given(st.lists(PERSIAN, min_size=1, max_size=5))
def test_identical_persian_texts_are_perfect_in_every_metric(normalise: Any, texts: list[str]) -> None:
    pairs = [(text, text) for text in texts]
    for build in METRICS:
        perfect = 0.0 if build.minimized else 1.0
        results = run(build(normalise=normalise), pairs)
        assert set(results.values()) == {perfect}, build.name


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_identical_texts_of_any_kind_have_no_errors(texts: list[str]) -> None:
    pairs = [(text, text) for text in texts]
    assert run(CharacterErrorRate(), pairs) == {"cer": 0.0}
    assert run(WordErrorRate(), pairs) == {"wer": 0.0}


@pytest.mark.parametrize("build", METRICS)
def test_two_spellings_of_a_text_differ_unless_normalised(build: type[TextMetric]) -> None:
    pairs = [(f"كتاب{ZWNJ}هاي من ۱۲۳ صفحه دارد", f"کتاب{ZWNJ}{ZWNJ}های مَن ١٢٣  صفحه دارد")]
    perfect = 0.0 if build.minimized else 1.0
    assert set(run(build(normalise=True), pairs).values()) == {perfect}
    assert perfect not in run(build(), pairs).values()


@pytest.mark.parametrize("build", METRICS)
@settings(deadline=None, max_examples=15)
@given(pairs_of(TEXT), st.data())
def test_weights_count_a_sample_as_often_as_they_say(
    build: type[TextMetric], pairs: Pairs, data: st.DataObject
) -> None:
    repeats = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)).filter(any))
    metric = build()
    predictions, references = (list(texts) for texts in zip(*pairs, strict=True))
    metric.update(predictions, references, torch.tensor([[1] * len(pairs), repeats]))
    repeated = [pair for pair, count in zip(pairs, repeats, strict=True) for _ in range(count)]
    rows = metric.compute_rows()
    assert rows[0] == pytest.approx(run(build(), pairs), abs=1e-9)
    assert rows[1] == pytest.approx(run(build(), repeated), abs=1e-9)


@pytest.mark.parametrize("build", METRICS)
@settings(deadline=None, max_examples=15)
@given(pairs_of(TEXT), pairs_of(TEXT))
def test_merged_states_are_the_state_of_all_samples(build: type[TextMetric], first: Pairs, second: Pairs) -> None:
    one, other = build(), build()
    run(one, first)
    run(other, second)
    one.merge(other.state())
    assert one.compute() == pytest.approx(run(build(), first + second), abs=1e-9)


@pytest.mark.parametrize("build", METRICS)
def test_without_a_sample_a_metric_is_nan(build: type[TextMetric]) -> None:
    metric = build()
    assert all(map(math.isnan, metric.compute().values()))
    metric.update([], [])
    assert all(map(math.isnan, metric.compute().values()))
    assert list(metric.compute()) == metric.output_keys


@pytest.mark.parametrize("build", METRICS)
@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ("a text", "a text", "predictions of type str: give a list with a text per sample"),
        (["a"], "a", "references of type str: give a list"),
        (["a"], ["a", "b"], "1 predictions, 2 references: give one per sample"),
        (["a"], [[]], "a sample without a reference"),
        ([[1, 2]], ["a"], r"compares texts and got \[1, 2\] of type list: decode it first"),
        (["a"], [[3]], "compares texts and got 3 of type int: decode it first"),
    ],
)
def test_what_is_not_a_list_of_texts_is_told(
    build: type[TextMetric], predictions: Sequence[Any], references: Sequence[Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"{build.name} got.*{message}|{build.name} {message}"):
        build().update(predictions, references)


def test_exact_match_is_the_share_of_texts_that_are_a_reference_but_for_spaces_at_the_ends() -> None:
    metric = ExactMatch()
    metric.update(["پاریس است. ", "Rome", "5"], ["پاریس است.", ["Roma", "Rome"], "6"])
    assert metric.compute() == {"exact_match": pytest.approx(2 / 3)}

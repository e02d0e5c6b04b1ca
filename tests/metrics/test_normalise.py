from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.tokenizers import DefaultTokenizer

from hezar_train.errors import ConfigError
from hezar_train.metrics import normalise
from hezar_train.metrics.text import normaliser_of, tokenise

ZWNJ = "\u200c"
# Letters, marks, joiners, controls and spaces that meet in Persian text, and what composes or decomposes next to them.
TRICKY = st.text(
    st.sampled_from(
        "ابپتدرزوهیکيىئكڪةہھەۀۂۃأإآٱؤء٠٩۰۹09 \t\n\u00a0\u200b\u200c\u200d\u200e\u200f\u202b\u2066\u2060\ufeff\u00ad"
        "\u0640\u064b\u064e\u0651\u0653\u0654\u0655\u0670\u0615\u06d6ﷲﷺﻼﻲﮎﹷﱞaeE\u0301\u0308\u0338=.,،؟«»_क\u094dअ\u1100\u1161"
    )
)


@given(st.one_of(TRICKY, st.text()), st.sampled_from(["keep", "remove", "space"]))
def test_normalising_twice_is_normalising_once(text: str, zwnj: str) -> None:
    once = normalise(text, zwnj=zwnj)
    assert normalise(once, zwnj=zwnj) == once


@given(st.one_of(TRICKY, st.text()))
def test_what_is_normalised_is_composed_trimmed_and_free_of_what_cannot_be_seen(text: str) -> None:
    result = normalise(text)
    assert result == unicodedata.normalize("NFC", result)
    assert result == " ".join(result.split())
    assert not re.search("[يىئكڪةہھەأإٱؤ٠-٩۰-۹\u0640\u064b-\u065f\u0670\u200b\u200d-\u200f\ufeff]", result)
    assert not re.search(f"^{ZWNJ}|{ZWNJ}$|{ZWNJ}[\\s{ZWNJ}]|[\\s.,،]{ZWNJ}", result)


@pytest.mark.parametrize(
    ("spelling", "other"),
    [
        ("كتابي", "کتابی"),
        ("موسى", "موسی"),
        ("رئیس", "رییس"),
        ("مؤمن", "مومن"),
        ("أحمد إیران ٱلله", "احمد ایران الله"),
        ("دایرة", "دایره"),
        ("خانۀ من", "خانه من"),
        ("خانهٔ من", "خانه من"),
        ("ہھە", "ههه"),
        ("٠١٢٣٤٥٦٧٨٩", "0123456789"),
        ("۰۱۲۳۴۵۶۷۸۹", "0123456789"),
        ("مُحَمَّدٌ", "محمد"),
        ("ســـلام", "سلام"),
        ("ﺳﻼﻡ", "سلام"),
        ("ﮐﺘﺎﺏ", "کتاب"),
        ("ا\u0653ب", "آب"),
        ("ﺍ\u0653ب", "آب"),
        ("\u202bسلام\u202c\u200f", "سلام"),
        ("می\u200bروم", f"می{ZWNJ}روم"),
        (f"می{ZWNJ}{ZWNJ}روم", f"می{ZWNJ}روم"),
        (f" {ZWNJ}سلام{ZWNJ} {ZWNJ}، دنیا{ZWNJ}.", "سلام ، دنیا."),
        (f"کار{ZWNJ}ها", "کارها"),
        (f"a{ZWNJ}\u0301{ZWNJ}b", f"á{ZWNJ}b"),
        ("م\ufe76ن", "من"),
        (" a\t b\n\u00a0c ", "a b c"),
        ("e\u0301", "é"),
    ],
)
def test_two_spellings_of_one_text_become_equal(spelling: str, other: str) -> None:
    assert normalise(spelling) == other


@pytest.mark.parametrize("text", ["آب", "جزء", f"می{ZWNJ}روم", "Straße, ½ ﬁ!", f"क्{ZWNJ}ष", "«سلام»، چطوری؟"])
def test_what_tells_words_apart_is_left_alone(text: str) -> None:
    assert normalise(text) == text


def test_a_joiner_inside_a_word_is_kept_removed_or_a_space() -> None:
    text = f"می{ZWNJ}روم کار{ZWNJ}ها {ZWNJ}"
    assert normalise(text) == f"می{ZWNJ}روم کارها"
    assert normalise(text, zwnj="remove") == "میروم کارها"
    assert normalise(text, zwnj="space") == "می روم کار ها"


def test_an_option_names_a_normaliser() -> None:
    assert normaliser_of(False) is None
    assert normaliser_of(True) is normalise
    assert normaliser_of(str.upper) is str.upper
    spaced = normaliser_of({"zwnj": "space"})
    assert spaced is not None
    assert spaced(f"می{ZWNJ}روم") == "می روم"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"zwnj": "spaces"}, r"zwnj='spaces': .* one of: keep, remove, space. Did you mean 'space'\?"),
        ({"digits": "ascii"}, "normalise has digits, which it does not know. It has: zwnj."),
        ("yes", "normalise='yes' must be true, false, a mapping"),
    ],
)
def test_an_option_that_means_nothing_is_told(option: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        normaliser_of(option)  # type: ignore[arg-type]


def test_normalise_refuses_an_unknown_treatment_of_joiners() -> None:
    with pytest.raises(ConfigError, match="one of: keep, remove, space"):
        normalise("a", zwnj="drop")


@given(st.text(st.one_of(st.characters(max_codepoint=127), st.sampled_from("“”‘’–—…•"))))
def test_words_of_english_are_those_of_rouge_score(text: str) -> None:
    assert tokenise(text) == DefaultTokenizer().tokenize(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"می{ZWNJ}روم، خانه!", [f"می{ZWNJ}روم", "خانه"]),
        (f"{ZWNJ}سلام{ZWNJ} «دنیا»؟ ۱۲۳", ["سلام", "دنیا", "۱۲۳"]),
        ("مُحَمَّد آمد", ["مُحَمَّد", "آمد"]),
        ("Straße_CAFÉ e\u0301tude", ["straße", "café", "e\u0301tude"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("❤\ufe0f … \u064e", []),
    ],
)
def test_words_of_any_script_keep_their_marks_and_joiners(text: str, words: list[str]) -> None:
    assert tokenise(text) == words

"""Persian names, places and companies: find them in sentences and say which is which.

The sentences are made: templates, filled with what the package faker has for Persian. Some names and some templates
are never trained on and are evaluated apart, because a model may know an entity by its neighbours or by its letters.
`dataset` and `model` put a Hub dataset and pretrained weights in their places.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from hezar_train import Recipe
from hezar_train.data import SequenceLabelingDataCollator
from hezar_train.errors import MissingDependencyError
from hezar_train.launch import asked_for, load_splits, refuse_missing_columns, text_of, with_held_out
from hezar_train.metrics import IGNORED_LABEL, SequenceLabelingHandler

TEMPLATES_FILE = Path(__file__).parent / "templates.txt"
HELD_OUT_LINE = "# held out"
HELD_OUT_PERCENT = 20  # of the names of each list
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
KIND_OF_SLOT = {"per": "PER", "loc": "LOC", "street": "LOC", "org": "ORG"}
SLOTS = {  # what may stand in a slot: one of these rows, a word of each list
    "per": (("first_name", "last_name"), ("last_name",), ("first_name",)),
    "loc": (("country",), ("administrative_unit",), ("city_prefix", "first_name")),
    "street": (("way", "last_name"),),
    "org": (("company",),),
    **{one: ((one,),) for one in ("job", "word", "day", "month", "number")},
}
NAMES = ("first_name", "last_name", "country", "administrative_unit", "company")  # of these, some are held out
ORDINARY = ("city_prefix", "job", "word")
OWN_LISTS = {
    "way": ["خیابان", "میدان", "کوچه", "بلوار"],
    "day": ["شنبه", "یکشنبه", "دوشنبه", "سه‌شنبه", "چهارشنبه", "پنجشنبه", "جمعه"],
    "month": ["فروردین", "اردیبهشت", "خرداد", "تیر", "مرداد", "شهریور", "مهر", "آبان", "آذر", "دی", "بهمن", "اسفند"],
    "number": [str(number) for number in range(2, 100)],
}
NUM_DRAWS = 4000  # from each of faker's lists: with so many, nearly all of a list is met
MOST_WORDS_OF_A_NAME = 4
SPECIAL = PAD, UNKNOWN = "<pad>", "<unk>"
PAD_ID, UNKNOWN_ID = 0, 1
PERSIAN_SIGNS = str.maketrans("يك0123456789٠١٢٣٤٥٦٧٨٩", "یک" + 2 * "۰۱۲۳۴۵۶۷۸۹")
PERSIAN_NAME = re.compile(r"[آ-ی\u200c ]+")
WORD = re.compile(r"[\w\u200c\u064b-\u0655]+|[^\w\s]")  # words with non-joiners and vowel marks; other marks one by one

Lists = Mapping[str, Sequence[str]]
Entity = tuple[str, str]


class Sentence(NamedTuple):
    """Words, and the number of a label for each."""

    words: Sequence[str]
    labels: Sequence[int]


class Corpus(NamedTuple):
    """What is trained on, what is evaluated on, and the names of the labels."""

    train: list[Sentence]
    evaluation: dict[str, list[Sentence]]
    labels: Sequence[str]


def build(
    num_train: int = 6000,
    num_eval: int = 300,
    word_noise: float = 0.1,
    data_seed: int = 0,
    dataset: str | None = None,
    words_column: str = "tokens",
    labels_column: str = "ner_tags",
    model: str | None = None,
    vocab_size: int = 200,
    width: int = 96,
    num_layers: int = 2,
    dropout: float = 0.3,
    piece_dropout: float = 0.1,
    max_length: int = 192,
) -> Recipe:
    """Make the sentences (or fetch some), train a tokenizer on them and build the tagger (or fetch both)."""
    if dataset is None:
        corpus = made_corpus(num_train, num_eval, word_noise, data_seed)
    else:
        corpus = hub_corpus(dataset, words_column, labels_column)
    if model is None:
        preprocessor = Preprocessor.trained_on(corpus.train, vocab_size, max_length)
        sizes = (preprocessor.vocab_size, width, num_layers)
        tagger = Tagger(TaggerConfig(*sizes, dropout, piece_dropout, dict(enumerate(corpus.labels))))
    else:
        tagger, preprocessor = pretrained(model, corpus.labels, max_length)
    return Recipe(
        model=tagger,
        train_dataset=[preprocessor(*one) for one in corpus.train],
        eval_dataset={name: [preprocessor(*one) for one in found] for name, found in corpus.evaluation.items()},
        data_collator=SequenceLabelingDataCollator(preprocessor),
        preprocessor=preprocessor,
        metrics_handler=EntityHandler(preprocessor, corpus.labels),
    )


def read(given: str | Sequence[str], preprocessor: Preprocessor) -> dict[str, Any]:
    """Turn a text, or a list of words, into a sample without labels; its words go along, to name the entities."""
    is_words = isinstance(given, list) and all(isinstance(word, str) for word in given)
    words = words_of(given if is_words else text_of(given))
    return {**preprocessor(words), "words": words}


class EntityHandler(SequenceLabelingHandler):
    """Score labels as usual; answer a text of one's own with its entities."""

    def __init__(self, preprocessor: Preprocessor, labels: Sequence[str]) -> None:
        super().__init__()
        self._preprocessor, self._labels = preprocessor, labels

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        found = super().predictions(outputs, labels)
        texts = self.trainer.ctx.batch.get("words")
        if texts is None:
            return found
        named = ([self._labels[number] for number in row] for row in found.tolist())
        return [self._preprocessor.entities(words, row) for words, row in zip(texts, named, strict=True)]


def made_corpus(num_train: int, num_eval: int, word_noise: float, seed: int) -> Corpus:
    """Fill templates with names; in the sets for evaluation, names, templates or, in "held_out", both are new.

    `word_noise` is the share of a training template's own words that give way to others, so that they are not learned
    by heart.
    """
    known, new = lists(held_out=False), lists(held_out=True)
    trained, held_out = templates()
    sets = {"names": (trained, new), "templates": (held_out, known), "both": (held_out, new)}
    evaluation = {name: sentences(*made_of, num_eval, f"{seed} {name}") for name, made_of in sets.items()}
    evaluation["held_out"] = evaluation.pop("both")  # chooses the best checkpoint, and is there in every dataset
    return Corpus(sentences(trained, known, num_train, f"{seed} train", word_noise), evaluation, LABELS)


def templates() -> tuple[list[str], list[str]]:
    """Read the templates to train on, and those held out."""
    lines = TEMPLATES_FILE.read_text(encoding="utf-8").splitlines()
    cut = lines.index(HELD_OUT_LINE)
    trained, held_out = ([line for line in part if line and line[0] != "#"] for part in (lines[:cut], lines[cut:]))
    return trained, held_out


def sentences(patterns: Sequence[str], fill: Lists, count: int, seed: str, word_noise: float = 0.0) -> list[Sentence]:
    """Make so many sentences of templates; what is drawn follows from the seed."""
    draws = random.Random(seed)
    return [filled(draws.choice(patterns), fill, draws, word_noise) for _ in range(count)]


def filled(template: str, fill: Lists, draws: random.Random, word_noise: float = 0.0) -> Sentence:
    """Choose among the words of a template, put names into its slots, and label every word."""
    words: list[str] = []
    labels: list[str] = []
    chosen = [draws.choice(part.split("|")) for part in template.split()]
    for part in " ".join(chosen).replace("_", " ").split():
        slot = part[1:-1] if part[0] == "{" else None
        if part.isalpha() and draws.random() < word_noise:
            slot = "word"
        new = " ".join(draws.choice(fill[one]) for one in draws.choice(SLOTS[slot])).split() if slot else [part]
        kind = KIND_OF_SLOT.get(slot or "")
        words += new
        labels += [f"B-{kind}", *[f"I-{kind}"] * (len(new) - 1)] if kind else ["O"] * len(new)
    return Sentence(words, [LABELS.index(label) for label in labels])


def lists(*, held_out: bool) -> Lists:
    """Return what fills the slots: the names to train on, or those held out; all else is the same for both."""
    names = {kind: [one for one in drawn()[kind] if is_held_out(one) == held_out] for kind in NAMES}
    return {**drawn(), **names, **OWN_LISTS}


@cache
def drawn() -> Lists:
    """Draw names, jobs and ordinary words from faker's Persian lists; return each list sorted."""
    try:
        from faker import Faker
    except ImportError as error:
        raise MissingDependencyError("faker", "recipes", "the recipe 'sequence_labeling'") from error
    faker = Faker("fa_IR")
    faker.seed_instance(0)
    found = {kind: {normalised(getattr(faker, kind)()) for _ in range(NUM_DRAWS)} for kind in (*NAMES, *ORDINARY)}
    return {
        kind: sorted(one for one in all_ if PERSIAN_NAME.fullmatch(one) and len(one.split()) <= MOST_WORDS_OF_A_NAME)
        for kind, all_ in found.items()
    }


def is_held_out(name: str) -> bool:
    """Tell whether a name is never trained on: a function of its letters alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def normalised(text: str) -> str:
    """Return a text with Persian letters and digits where others were typed, and with single spaces."""
    return " ".join(text.translate(PERSIAN_SIGNS).split())


def words_of(text: str | Sequence[str]) -> list[str]:
    """Return the words and marks of a text; given words stay as they are, but for their letters."""
    found = WORD.findall(normalised(text)) if isinstance(text, str) else map(normalised, text)
    return [word or UNKNOWN for word in found] or [UNKNOWN]


class Preprocessor:
    """Turn words into pieces, align the labels of words with them, and turn labels of pieces into entities.

    A word's label stands at its first piece; the others are left out of the loss and of the scores.
    """

    def __init__(self, tokenizer: Any, pad_token_id: int, fetched: Any = None) -> None:
        """Wrap a `tokenizers.Tokenizer`; `fetched` is the tokenizer of transformers that it is a part of."""
        self._tokenizer, self.pad_token_id, self._fetched = tokenizer, pad_token_id, fetched
        self.vocab_size: int = tokenizer.get_vocab_size()

    @classmethod
    def trained_on(cls, sentences: Iterable[Sentence], vocab_size: int, max_length: int) -> Preprocessor:
        """Learn at most so many pieces; few, so that a new name falls into pieces as those known do."""
        try:
            from tokenizers import SentencePieceBPETokenizer
        except ImportError as error:
            raise MissingDependencyError("tokenizers", "recipes", "the recipe 'sequence_labeling'") from error
        tokenizer = SentencePieceBPETokenizer(unk_token=UNKNOWN)  # marks where a word begins
        words = sorted({word for one in sentences for word in words_of(one.words)})
        tokenizer.train_from_iterator(
            words, vocab_size, min_frequency=0, special_tokens=list(SPECIAL), show_progress=False
        )
        tokenizer.enable_truncation(max_length)
        return cls(tokenizer, PAD_ID)

    def __call__(self, text: str | Sequence[str], labels: Sequence[int] | None = None) -> dict[str, list[int]]:
        """Return a sample of a text or of words; with the labels of the words, it can be trained on."""
        encoding = self._encoded(text)
        sample = {"input_ids": encoding.ids, "attention_mask": [1] * len(encoding.ids)}
        if labels is not None:
            sample["labels"] = [IGNORED_LABEL] * len(encoding.ids)
            for at, word in first_places(encoding.word_ids):
                sample["labels"][at] = labels[word]
        return sample

    def entities(self, text: str | Sequence[str], predicted: Sequence[str]) -> list[Entity]:
        """Return the entities of a text and their kinds, from the label predicted for each of its pieces."""
        words, found, before = words_of(text), list[Entity](), "O"
        for at, word in first_places(self._encoded(text).word_ids):
            tag, _, kind = predicted[at].partition("-")
            if tag == "I" and kind == before:
                found[-1] = (f"{found[-1][0]} {words[word]}", kind)
            elif tag != "O":
                found.append((words[word], kind))
            before = kind
        return found

    def decode(self, ids: list[int]) -> str:
        """Return the text of pieces, for the report."""
        return str(self._tokenizer.decode(ids)).strip()

    def save(self, folder: str) -> None:
        """Write the tokenizer as `tokenizer.json`, which the library of that name reads."""
        if self._fetched is not None:
            self._fetched.save_pretrained(folder)
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(folder) / "tokenizer.json"))

    def _encoded(self, text: str | Sequence[str]) -> Any:
        return self._tokenizer.encode(words_of(text), is_pretokenized=True)


def first_places(word_ids: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yield where each word begins among the pieces, and the number of the word."""
    for at, (before, word) in enumerate(zip((None, *word_ids), word_ids, strict=False)):
        if word is not None and word != before:
            yield at, word


@dataclass(frozen=True)
class TaggerConfig:
    """The sizes of the tagger and the names of its labels."""

    vocab_size: int
    width: int
    num_layers: int
    dropout: float
    piece_dropout: float
    id2label: dict[int, str]


class Tagger(nn.Module):
    """Pieces, read in both directions by an LSTM, and a label for each."""

    def __init__(self, config: TaggerConfig) -> None:
        super().__init__()
        self.config = config
        self.pieces = nn.Embedding(config.vocab_size, config.width, padding_idx=PAD_ID)
        between = config.dropout if config.num_layers > 1 else 0.0
        self.lstm = nn.LSTM(
            config.width, config.width, config.num_layers, batch_first=True, bidirectional=True, dropout=between
        )
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(2 * config.width, len(config.id2label))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if self.training:  # unknown pieces at random: a name is to be known by its neighbours, too
            is_hidden = torch.rand_like(input_ids, dtype=torch.float) < self.config.piece_dropout
            input_ids = input_ids.masked_fill(is_hidden, UNKNOWN_ID)
        pieces = self.dropout(self.pieces(input_ids))
        lengths = attention_mask.sum(dim=1).cpu()
        packed = pack_padded_sequence(pieces, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=input_ids.shape[1])
        return self.classifier(self.dropout(hidden))


def hub_corpus(name: str, words_column: str, labels_column: str) -> Corpus:
    """Read `owner/name` or `owner/name:config` of the Hub, or a folder of JSON or Parquet files."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name))
    refuse_missing_columns(override, found["train"], words_column=words_column, labels_column=labels_column)
    names = getattr(getattr(found["train"].features[labels_column], "feature", None), "names", None)
    labels = names or sorted({str(one) for rows in found.values() for row in rows[labels_column] for one in row})
    sets = {
        split: [
            Sentence(words, given if names else [labels.index(str(one)) for one in given])
            for words, given in zip(rows[words_column], rows[labels_column], strict=True)
        ]
        for split, rows in found.items()
    }
    return Corpus(sets.pop("train"), sets, labels)


def pretrained(name: str, labels: Sequence[str], max_length: int) -> tuple[nn.Module, Preprocessor]:
    """Fetch a model of transformers with a new head for the labels, and its tokenizer; a local folder will do."""
    try:
        from transformers import AutoModelForTokenClassification, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.model={name}") from error
    with asked_for(f"recipe.model={name}"):
        tagger = AutoModelForTokenClassification.from_pretrained(
            name, id2label=dict(enumerate(labels)), label2id={label: number for number, label in enumerate(labels)},
            ignore_mismatched_sizes=True,  # one that was tuned already has a head for other labels
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.backend_tokenizer.enable_truncation(max_length)
    return tagger, Preprocessor(tokenizer.backend_tokenizer, tokenizer.pad_token_id, fetched=tokenizer)

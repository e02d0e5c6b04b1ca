"""Topics of software: which section of Debian a package belongs to, told from its one-line description.

By default everything is at hand: a bundled sample of descriptions, a tokenizer that is trained on the training split, a
small transformer encoder that starts from scratch. `dataset` and `model` put a Hub dataset and pretrained weights in
their places.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import re
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hezar_train import Recipe
from hezar_train.data import TextPaddingDataCollator
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices, suggestion
from hezar_train.launch import asked_for, load_splits, refuse_missing_columns, text_of

SAMPLE_FILE = Path(__file__).parent / "descriptions.tsv.xz"
INDEX_URL = "https://deb.debian.org/debian/dists/bookworm/main/binary-amd64/Packages.xz"
TOPICS = (
    "admin", "database", "devel", "editors", "electronics", "fonts", "games", "graphics",
    "mail", "math", "net", "science", "sound", "text", "video", "web",
)  # fmt: skip
SPLITS = ("train", "val", "test")
HELD_OUT_PERCENT = 10  # of the source packages, for each of val and test
SPECIAL = PAD, UNKNOWN = "<pad>", "<unk>"
PAD_ID, UNKNOWN_ID = 0, 1


class Description(NamedTuple):
    """What is known of a package: the sources it is built from, its section, its description."""

    source: str
    topic: str
    text: str


class Corpus(NamedTuple):
    """Texts with the numbers of their labels, by split, and the names of the labels."""

    splits: dict[str, list[tuple[str, int]]]
    labels: list[str]


def build(
    data: str = "sample",
    index: str = INDEX_URL,
    dataset: str | None = None,
    text_column: str = "text",
    label_column: str = "label",
    model: str | None = None,
    vocab_size: int = 6000,
    width: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    dropout: float = 0.3,
    token_dropout: float = 0.2,
    max_length: int = 48,
) -> Recipe:
    """Read the texts, train the tokenizer on them (or fetch one), build the encoder (or fetch one)."""
    corpus = hub_corpus(dataset, text_column, label_column) if dataset else debian_corpus(data, index)
    if model is None:
        preprocessor = Preprocessor.trained_on(corpus.splits["train"], vocab_size, max_length)
        sizes = (preprocessor.vocab_size, max_length, width, num_layers, num_heads)
        classifier = Encoder(EncoderConfig(*sizes, dropout, token_dropout, dict(enumerate(corpus.labels))))
    else:
        classifier, preprocessor = pretrained(model, corpus.labels, max_length)
    samples = {
        split: [{**read(text, preprocessor), "labels": label} for text, label in pairs]
        for split, pairs in corpus.splits.items()
    }
    return Recipe(classifier, samples, data_collator=TextPaddingDataCollator(preprocessor), preprocessor=preprocessor)


def read(given: str, preprocessor: Any) -> Mapping[str, list[int]]:
    """Turn a text into a sample without a label."""
    return preprocessor(text_of(given), truncation=True)


def debian_corpus(data: str = "sample", index: str = INDEX_URL) -> Corpus:
    """Return the bundled sample, or all descriptions of an index of packages; each source package is in one split."""
    if data not in {"sample", "full"}:
        raise ConfigError(f"recipe.data={data!r} is neither 'sample' nor 'full'.{suggestion(data, ('sample', 'full'))}")
    found = read_sample() if data == "sample" else distinct(parse_index(read_lines(index)))
    splits: dict[str, list[tuple[str, int]]] = {split: [] for split in SPLITS}
    for one in found:
        splits[split_of(one.source)].append((one.text, TOPICS.index(one.topic)))
    return Corpus(splits, list(TOPICS))


def read_sample() -> list[Description]:
    """Read the descriptions that come with the recipe."""
    with lzma.open(SAMPLE_FILE, "rt", encoding="utf-8") as file:
        return [Description(*line.rstrip("\n").split("\t")) for line in file]


def read_lines(location: str) -> Iterator[str]:
    """Yield the lines of a `Packages` index, which may be compressed, from a path or a URL."""
    try:
        if "://" in location:
            with urllib.request.urlopen(location, timeout=60) as answer:
                content = answer.read()
        else:
            content = Path(location).read_bytes()
    except OSError as error:
        raise DataError(
            f"the index {location!r} cannot be read ({error}). On Debian, `apt-cache dumpavail > Packages` writes one: "
            "recipe.data=full recipe.index=Packages"
        ) from error
    unpack = {".xz": lzma.decompress, ".gz": gzip.decompress}.get(Path(location).suffix, bytes)
    yield from io.TextIOWrapper(io.BytesIO(unpack(content)), encoding="utf-8")


def parse_index(lines: Iterable[str]) -> Iterator[Description]:
    """Yield the packages of an index whose sections are among the topics."""
    fields: dict[str, str] = {}
    for line in (*lines, "\n"):
        if line.strip():
            name, colon, value = line.partition(":")
            if colon and not line[0].isspace():  # else the line goes on with the field above
                fields[name] = value.strip()
            continue
        topic = fields.get("Section", "").rpartition("/")[2]
        if topic in TOPICS and "Description" in fields:
            source = fields.get("Source", fields["Package"]).partition(" ")[0]
            yield Description(source, topic, fields["Description"])
        fields = {}


def distinct(found: Iterable[Description]) -> list[Description]:
    """Return the descriptions in order, once each: letters alone count; renamed packages have none of their own."""
    kept: dict[str, Description] = {}
    for one in sorted(found):
        letters = re.sub(r"[^a-z]+", " ", one.text.lower()).strip()
        if letters and "transitional" not in letters:
            kept.setdefault(letters, one)
    return list(kept.values())


def split_of(source: str) -> str:
    """Return the split of a source package, whose packages are described alike: a function of its name alone."""
    percent = int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") % 100
    if percent >= 2 * HELD_OUT_PERCENT:
        return "train"
    return "val" if percent < HELD_OUT_PERCENT else "test"


class Preprocessor:
    """Turn a text into what the encoder takes, by a tokenizer that was trained on the training split."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id = PAD_ID
        self.vocab_size: int = tokenizer.get_vocab_size()

    @classmethod
    def trained_on(cls, labelled: list[tuple[str, int]], vocab_size: int, max_length: int) -> Preprocessor:
        """Learn at most so many pieces of words; the same texts always give the same pieces."""
        try:
            from tokenizers import SentencePieceBPETokenizer, normalizers, pre_tokenizers
        except ImportError as error:
            raise MissingDependencyError("tokenizers", "recipes", "the recipe 'text_classification'") from error
        tokenizer = SentencePieceBPETokenizer(unk_token=UNKNOWN)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation(), pre_tokenizers.Digits()]
        )
        texts = [text for text, _ in labelled]
        tokenizer.train_from_iterator(
            texts, vocab_size, min_frequency=0, special_tokens=list(SPECIAL), show_progress=False
        )
        tokenizer.enable_truncation(max_length)
        return cls(tokenizer)

    def __call__(self, text: str, truncation: bool = True) -> dict[str, list[int]]:  # noqa: ARG002  # as transformers
        """Return the pieces of a text, never more than the encoder has places for."""
        return {"input_ids": self._tokenizer.encode(text).ids or [UNKNOWN_ID]}

    def decode(self, ids: list[int]) -> str:
        """Return the text of pieces, for the report."""
        return str(self._tokenizer.decode(ids)).strip()

    def save(self, folder: str) -> None:
        """Write the tokenizer as `tokenizer.json`, which the library of that name reads."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(folder) / "tokenizer.json"))


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes of the encoder and the names of its labels."""

    vocab_size: int
    max_length: int
    width: int
    num_layers: int
    num_heads: int
    dropout: float
    token_dropout: float
    id2label: dict[int, str]


class Encoder(nn.Module):
    """A transformer encoder; the mean of its outputs is classified."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.pieces = nn.Embedding(config.vocab_size, config.width, padding_idx=PAD_ID)
        self.places = nn.Embedding(config.max_length, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.num_heads, 2 * config.width, config.dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.width, len(config.id2label))
        nn.init.normal_(self.pieces.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        is_padding = input_ids == PAD_ID
        if self.training:  # unknown pieces at random: no word alone shall decide
            is_hidden = torch.rand_like(input_ids, dtype=torch.float) < self.config.token_dropout
            input_ids = input_ids.masked_fill(is_hidden, UNKNOWN_ID)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.dropout(self.pieces(input_ids) + self.places(places))
        hidden = self.norm(self.layers(hidden, src_key_padding_mask=is_padding))
        hidden = hidden.masked_fill(is_padding.unsqueeze(-1), 0.0)
        mean = hidden.sum(dim=1) / (~is_padding).sum(dim=1, keepdim=True)
        return self.classifier(self.dropout(mean))


def hub_corpus(name: str, text_column: str, label_column: str) -> Corpus:
    """Read `owner/name` or `owner/name:config` of the Hub, or a local folder of CSV, JSON or Parquet files."""
    found = hub_splits(name)
    refuse_missing_columns(f"recipe.dataset={name}", found["train"], text_column=text_column, label_column=label_column)
    names = getattr(found["train"].features[label_column], "names", None)
    labels = names or sorted({str(label) for rows in found.values() for label in rows[label_column]})
    number = int if names else lambda label: labels.index(str(label))
    pairs = {
        split: [(text, number(label)) for text, label in zip(rows[text_column], rows[label_column], strict=True)]
        for split, rows in found.items()
    }
    return Corpus(pairs, labels)


def hub_splits(name: str) -> dict[str, Any]:
    """Return the splits of a dataset under our names; those that it lacks are cut from "train"."""
    found = load_splits(f"recipe.dataset={name}", name)
    if "train" not in found:
        raise DataError(f"{name} has no split 'train'. It has: {choices(found)}.")
    for split in [one for one in ("validation", "test") if one not in found]:
        cut = found["train"].train_test_split(test_size=HELD_OUT_PERCENT / 100, seed=0)
        found |= {"train": cut["train"], split: cut["test"]}
    return {"train": found["train"], "val": found["validation"], "test": found["test"]}


def pretrained(name: str, labels: list[str], max_length: int) -> tuple[nn.Module, Any]:
    """Fetch a model with a new head for the labels, and its tokenizer, from the Hub or a local folder."""
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.model={name}") from error
    with asked_for(f"recipe.model={name}"):
        model = AutoModelForSequenceClassification.from_pretrained(
            name, id2label=dict(enumerate(labels)), label2id={label: number for number, label in enumerate(labels)},
            ignore_mismatched_sizes=True,  # one that was tuned already has a head for other labels
        )  # fmt: skip
        return model, AutoTokenizer.from_pretrained(name, model_max_length=max_length)

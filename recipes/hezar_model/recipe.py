"""A model of the package hezar, with its tokenizer and its files, through the same trainer: of what kind is a name?"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from hezar_train import Recipe
from hezar_train.data import TextPaddingDataCollator
from hezar_train.errors import ConfigError, DataError, MissingDependencyError
from hezar_train.launch import asked_for, text_of

try:
    from hezar.models import BertTextClassification, BertTextClassificationConfig, Model
    from hezar.preprocessors import WordPieceConfig, WordPieceTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
except ImportError as missing:
    raise MissingDependencyError("hezar", "hezar", "the recipe 'hezar_model'") from missing

NAMES_FILE = Path(__file__).with_name("names.tsv")
HELD_OUT_SHARE = 5  # one name in so many, by its hash: the same ones in every run
MAX_TOKENS = 128
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

Pairs = Sequence[tuple[str, int]]


class Texts:
    """Texts with their labels; each becomes a sample when it is asked for."""

    def __init__(self, pairs: Pairs, preprocessor: Any) -> None:
        self.pairs, self._preprocessor = pairs, preprocessor

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.pairs[index]
        return {**read(text, self._preprocessor), "labels": label, "text": text}  # a report shows the text


def read(given: Any, preprocessor: Any) -> dict[str, Any]:
    """Make a sample of a text, by the normalizer and the tokenizer that a Hezar model comes with."""
    text = text_of(given)
    if preprocessor.text_normalizer is not None:
        (text,) = preprocessor.text_normalizer(text)
    return dict(preprocessor.tokenizer(text, truncation=True, max_length=MAX_TOKENS))


def build(
    model: str = "bert", dataset: str = "names", eval_split: str = "test", hidden: int = 64, num_layers: int = 2,
    dropout: float = 0.2,
) -> Recipe:  # fmt: skip
    """Build Hezar's BERT untrained, or load a model of Hezar's; read the names, or a dataset of Hezar's."""
    train, held_out, labels = names() if dataset == "names" else hezar_dataset(dataset, eval_split)
    id2label = dict(enumerate(labels))
    if model == "bert":
        network = untrained(id2label, letters(text for text, _ in train), hidden, num_layers, dropout)
    else:
        network = pretrained(model, id2label)
    preprocessor: Any = network.preprocessor
    return Recipe(
        model=network,
        train_dataset=Texts(train, preprocessor),
        eval_dataset=Texts(held_out, preprocessor),
        data_collator=TextPaddingDataCollator(preprocessor.tokenizer),
        preprocessor=preprocessor,
    )


def names() -> tuple[Pairs, Pairs, list[str]]:
    """Return the names to train on, those held out, and what their kinds are called."""
    rows = [line.split("\t") for line in NAMES_FILE.read_text(encoding="utf-8").splitlines()]
    kinds = sorted({kind for kind, _ in rows})
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for kind, name in rows:
        parts[zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0].append((name, kinds.index(kind)))
    return *parts, kinds


def hezar_dataset(name: str, eval_split: str) -> tuple[Pairs, Pairs, list[str]]:
    """Read a text classification dataset of Hezar's, from the Hub or a folder; its config names the columns."""
    with asked_for(f"recipe.dataset={name} recipe.eval_split={eval_split}"):
        try:
            from hezar.data import Dataset
            from hezar.preprocessors import PreprocessorsContainer

            parts = [Dataset.load(name, split, PreprocessorsContainer()) for split in ("train", eval_split)]
        except ImportError as error:
            raise MissingDependencyError("datasets", "datasets", f"recipe.dataset={name}") from error
        except AttributeError as error:  # Hezar asks for the names of labels
            raise DataError(f"recipe.dataset={name} is no dataset of texts with named labels ({error})") from error
    columns = parts[0].config.text_field, parts[0].config.label_field
    train, held_out = ([*zip(*(part.data[column] for column in columns), strict=True)] for part in parts)
    return train, held_out, list(parts[0].id2label.values())


def letters(texts: Iterable[str]) -> WordPieceTokenizer:
    """Make a tokenizer of BERT's kind, in Hezar's form, whose pieces are letters.

    One whose pieces are trained would not do: `tokenizers` numbers them differently in every process.
    """
    alphabet = sorted(set("".join(texts)) - set(" "))
    pieces = [*SPECIAL_TOKENS, *alphabet, *(f"##{letter}" for letter in alphabet)]
    tokenizer = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    ends = [(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    with TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        return WordPieceTokenizer(WordPieceConfig(), tokenizer_file=f"{folder}/tokenizer.json")


def untrained(
    id2label: dict[int, str], tokenizer: WordPieceTokenizer, hidden: int, num_layers: int, dropout: float
) -> nn.Module:
    """Build a small BERT with the tokenizer; Hezar saves both together."""
    network = BertTextClassification(
        BertTextClassificationConfig(
            num_labels=len(id2label), id2label=id2label, vocab_size=len(tokenizer), hidden_size=hidden,
            num_hidden_layers=num_layers, num_attention_heads=4, intermediate_size=2 * hidden,
            max_position_embeddings=MAX_TOKENS, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip
    network.preprocessor = tokenizer
    return network


def pretrained(name: str, id2label: dict[int, str]) -> nn.Module:
    """Load a model of Hezar's, from the Hub or a folder; where its labels are others, with a new last layer."""
    if "/" not in name:
        raise ConfigError(f"recipe.model={name!r} is not known. Expected bert, OWNER/NAME on the Hub, or a folder.")
    with asked_for(f"recipe.model={name}"):
        network = Model.load(name, id2label=id2label, num_labels=len(id2label))
    if getattr(network.config, "task", None) != "text_classification":
        raise ConfigError(f"recipe.model={name!r} is a {type(network).__name__}; expected a text classification model")
    return network

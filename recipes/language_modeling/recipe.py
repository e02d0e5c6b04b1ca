"""Documentation of Python's standard library, token by token: a small GPT from scratch.

By default everything is at hand: a bundled sample of docstrings, a tokenizer that is trained on the training split, a
network of half a million parameters. `data`, `dataset` and `model` put a text of one's own, a Hub dataset and a
pretrained causal language model in their places.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hezar_train import Recipe
from hezar_train.checkpoint import unwrap
from hezar_train.data import TextGenerationDataCollator
from hezar_train.errors import DataError, MissingDependencyError
from hezar_train.launch import asked_for, load_splits, refuse_missing_columns, text_of, with_held_out
from hezar_train.metrics import IGNORED_LABEL, AdditiveMetric, LanguageModelingHandler

SAMPLE_FILE = Path(__file__).with_name("docstrings.jsonl.xz")
HELD_OUT_PERCENT = 7  # of the modules, for each of val and test
END, END_ID = "<|endoftext|>", 0

Splits = dict[str, list[str]]
"""Documents by split."""


def build(
    data: str | None = None,
    dataset: str | None = None,
    text_column: str = "text",
    model: str | None = None,
    vocab_size: int = 2048,
    context: int = 256,
    width: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    dropout: float = 0.1,
) -> Recipe:
    """Read the documents, train the tokenizer on them (or fetch one), build the network (or fetch one)."""
    splits = hub_splits(dataset, text_column) if dataset else file_splits(SAMPLE_FILE if data is None else Path(data))
    if model is None:
        tokenizer: Any = Tokenizer.trained_on(splits["train"], vocab_size, context)
        network: nn.Module = GPT(tokenizer.vocab_size, context, width, num_layers, num_heads, dropout)
    else:
        network, tokenizer = pretrained(model, context)
    samples = {
        split: blocks(token_ids(texts, tokenizer), tokenizer.model_max_length) for split, texts in splits.items()
    }
    return Recipe(
        model=network,
        train_dataset=samples,
        data_collator=TextGenerationDataCollator(tokenizer, padding_side="left"),
        preprocessor=tokenizer,
        metrics_handler=ContinuingHandler(tokenizer),
    )


def read(given: str, preprocessor: Any) -> dict[str, list[int]]:
    """Return the sample of a text that is to be continued: its end, if it is longer than the context."""
    ids = preprocessor(text_of(given))["input_ids"][-preprocessor.model_max_length :] or [preprocessor.eos_token_id]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def file_splits(path: Path) -> Splits:
    """Split documents (JSON lines with name and text) by their names; of any other text the end is held out."""
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"recipe.data={str(path)!r} cannot be read: {error}") from error
    splits: Splits = {"train": [], "val": [], "test": []}
    if ".jsonl" not in path.suffixes:
        test, val = (len(text) * (100 - percent) // 100 for percent in (HELD_OUT_PERCENT, 2 * HELD_OUT_PERCENT))
        return {"train": [text[:val]], "val": [text[val:test]], "test": [text[test:]]}
    for document in map(json.loads, text.splitlines()):
        splits[split_of(document["name"])].append(document["text"])
    return splits


def split_of(name: str) -> str:
    """Return the split of a document: a function of its name alone."""
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
    if percent >= 2 * HELD_OUT_PERCENT:
        return "train"
    return "val" if percent < HELD_OUT_PERCENT else "test"


def token_ids(documents: Iterable[str], tokenizer: Any) -> list[int]:
    """Return the documents as one row of tokens, with a mark before the first and behind each."""
    end = tokenizer.eos_token_id
    return [end] + [token for text in documents for token in (*tokenizer(text)["input_ids"], end)]


def blocks(tokens: list[int], context: int) -> list[dict[str, list[int]]]:
    """Cut a row of tokens into equal blocks in which every token but the first is predicted once.

    A block begins with the last token of the one before. The last block begins earlier, to be as long as the others;
    what it repeats is context, and does not count.
    """
    if len(tokens) <= context:
        raise DataError(f"{len(tokens)} tokens do not fill a block: expected more than context={context} in each split")
    found = []
    for first in range(0, len(tokens) - 1, context - 1):
        start = min(first, len(tokens) - context)
        ids = tokens[start : start + context]
        found.append({"input_ids": ids, "labels": [IGNORED_LABEL] * (first - start) + ids[first - start :]})
        if first > start:  # the token at `first` was predicted in the block before
            found[-1]["labels"][first - start] = IGNORED_LABEL
    return found


class Tokenizer:
    """Byte-pair encoding on bytes, as GPT-2's, with the names that transformers' tokenizers have."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self.model_max_length = tokenizer, context
        self.eos_token_id = self.pad_token_id = END_ID
        self.vocab_size: int = tokenizer.get_vocab_size()

    @classmethod
    def trained_on(cls, documents: list[str], vocab_size: int, context: int) -> Tokenizer:
        """Learn at most so many tokens; the same documents always give the same."""
        try:
            from tokenizers import ByteLevelBPETokenizer
        except ImportError as error:
            raise MissingDependencyError("tokenizers", "recipes", "the recipe 'language_modeling'") from error
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(documents, vocab_size, special_tokens=[END], show_progress=False)
        return cls(tokenizer, context)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.encode(text).ids}

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        """Return the texts of rows of tokens."""
        return self._tokenizer.decode_batch([list(map(int, row)) for row in rows], skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens with their numbers."""
        return self._tokenizer.get_vocab()

    def save(self, folder: str) -> None:
        """Write `tokenizer.json`, which the library of that name reads."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(Path(folder) / "tokenizer.json"))


class Block(nn.Module):
    """Attention to what is before, then a network of one hidden layer; both add to what they are given."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.joined(attended.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.network(self.network_norm(hidden)))


class GPT(nn.Module):
    """A decoder of transformer blocks; the tokens' embeddings are also what its outputs are compared with."""

    def __init__(
        self, vocab_size: int, context: int, width: int, num_layers: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # what is added to the residual stream begins smaller
                is_added = name.endswith(("joined.weight", "network.2.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * num_layers) if is_added else 0.02)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.blocks(self.dropout(self.tokens(input_ids) + self.places(places)))
        return functional.linear(self.norm(hidden), self.tokens.weight)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compare the outputs at each place with the token behind it."""
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        max_new_tokens: int = 64,
        do_sample: bool = True,
        temperature: float = 0.8,
        top_k: int = 40,
    ) -> torch.Tensor:
        """Return each row with the tokens that follow; what it draws is seeded by whoever calls."""
        written = input_ids.new_full((len(input_ids), max_new_tokens), END_ID)
        for row, is_text, continued in zip(input_ids, attention_mask.bool(), written, strict=True):
            text = row[is_text]
            for place in range(max_new_tokens):
                logits = self(text[-self.context :].unsqueeze(0))[0, -1]
                token = sampled(logits / temperature, top_k) if do_sample else logits.argmax()
                if token == END_ID:
                    break
                continued[place] = token
                text = torch.cat([text, token.view(1)])
        return torch.cat([input_ids, written], dim=1)


def sampled(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Draw one of the likeliest tokens."""
    best, tokens = logits.topk(min(top_k, len(logits)))
    return tokens[torch.multinomial(best.softmax(-1), 1)]


class BitsPerByte(AdditiveMetric):
    """What it costs to tell the text to somebody who has the model: comparable over vocabularies, and with xz."""

    name = "bits_per_byte"
    output_keys = ("bits_per_byte",)
    minimized = frozenset(output_keys)
    consumes = "scores"

    def __init__(self, byte_counts: Sequence[int]) -> None:
        super().__init__()
        self._byte_counts = torch.tensor(byte_counts)

    def statistics(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nats = functional.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none")
        counted = self._byte_counts.to(targets.device)[targets.clamp_min(0)] * (targets != IGNORED_LABEL)
        return torch.stack([nats.sum(1) / math.log(2), counted.sum(1)], dim=1)

    def result(self, sums: list[float]) -> dict[str, float]:
        return {self.name: sums[0] / sums[1]}


class ContinuingHandler(LanguageModelingHandler):
    """Perplexity per token, and bits per byte where tokens are bytes; a text without labels is continued."""

    valid_metrics = (*LanguageModelingHandler.valid_metrics, BitsPerByte.name)

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        if counts := bytes_of_tokens(tokenizer.get_vocab(), tokenizer.eos_token_id):
            self.metrics.append(BitsPerByte(counts))

    def predictions(self, outputs: Mapping[str, Any], labels: Any) -> Any:
        if labels is not None:
            return super().predictions(outputs, labels)
        batch, options = self.trainer.ctx.batch, self.trainer.config.generation_kwargs or {}
        generated = unwrap(self.trainer.model).generate(**batch, **options)
        return self._tokenizer.batch_decode(generated[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def bytes_of_tokens(vocabulary: Mapping[str, int], end: int) -> list[int] | None:
    """Return how many bytes each token stands for, the end of a document for one; None if tokens are not of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = set(ByteLevel.alphabet())
    counts = [1] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        if alphabet.issuperset(token):
            counts[number] = len(token)
        elif not token.startswith("<"):
            return None
    counts[end] = 1
    return counts


def hub_splits(name: str, text_column: str) -> Splits:
    """Read a dataset of the Hub, or a local folder of text, JSON or Parquet files; one that is whole is split."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), HELD_OUT_PERCENT / 100)
    refuse_missing_columns(override, found["train"], text_column=text_column)
    parts = {"train": found["train"], "val": found["held_out"], "test": found.get("test", found["held_out"])}
    return {split: list(rows[text_column]) for split, rows in parts.items()}


def pretrained(name: str, context: int) -> tuple[nn.Module, Any]:
    """Fetch a causal language model and its tokenizer; the context is the model's own, if that is shorter."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.model={name}") from error
    with asked_for(f"recipe.model={name}"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        network = AutoModelForCausalLM.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise DataError(f"recipe.model={name} has no token for the end of a text; expected a tokenizer with eos_token")
    tokenizer.model_max_length = min(context, getattr(network.config, "max_position_embeddings", None) or context)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return network, tokenizer

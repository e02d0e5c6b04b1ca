"""Short summaries of package descriptions: a small encoder-decoder that may copy from what it reads.

Owns how pairs of texts are read (the bundled sample, files of one's own, a dataset of the Hub), the tokenizer
that is trained on them, and the network. Nothing else here is about packages: pairs in any language will do.
"""

from __future__ import annotations

import ast
import glob
import hashlib
import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hezar_train import Recipe
from hezar_train.data import TextGenerationDataCollator
from hezar_train.errors import DataError, MissingDependencyError, choices
from hezar_train.launch import asked_for, load_splits, text_of, with_held_out

Pair = tuple[str, str]
Pairs = list[Pair]

PACKAGES = Path(__file__).with_name("packages.tsv.xz")
PAD, START, END = "<pad>", "<s>", "</s>"
PAD_ID, START_ID, END_ID = range(3)
IGNORED_LABEL = -100
HUB_PREFIX = "hub:"
INDEX_START = "Package: "
HELD_OUT_SHARE = 13  # one pair of so many
LEAST_PAIRS = 50
NUM_GROUPING_LETTERS = 60
LEAST_PROBABILITY = 1e-9


class BothWays(nn.Module):
    """Two GRUs, one from the end of each text; packed sequences would do the same, many times slower on a CPU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.forth, self.back = (nn.GRU(width, width, batch_first=True) for _ in range(2))

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        turned = (lengths.unsqueeze(1) - 1 - places).remainder(len(places)).unsqueeze(-1).expand_as(tokens)
        return torch.cat([self.forth(tokens)[0], self.back(tokens.gather(1, turned))[0].gather(1, turned)], dim=-1)


class CopyingNet(nn.Module):
    """A GRU reads, another writes; each word it writes comes from the vocabulary or is copied from the source."""

    def __init__(self, vocab_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width, padding_idx=PAD_ID)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.reader = BothWays(width)
        self.memory = nn.Linear(2 * width, width)
        self.first_state = nn.Linear(width, width)
        self.writer = nn.GRU(width, width, batch_first=True)
        self.query = nn.Linear(width, width)
        self.merge = nn.Linear(3 * width, width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.copies = nn.Linear(width, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the loss alone: of the many thousand probabilities at each place only the label's is made."""
        counts = labels != IGNORED_LABEL
        labels = labels.masked_fill(~counts, PAD_ID)
        before = torch.cat([torch.full_like(labels[:, :1], START_ID), labels[:, :-1]], dim=1)
        memory, state = self.read(input_ids, attention_mask)
        scores, share, attention, _ = self.write(before, state, memory, attention_mask)
        chosen = scores.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).exp()
        copied = (attention * (input_ids.unsqueeze(1) == labels.unsqueeze(-1))).sum(-1, keepdim=True)
        likelihood = ((1 - share) * chosen + share * copied).clamp_min(LEAST_PROBABILITY).log().squeeze(-1)
        return {"loss": -likelihood[counts].mean()}

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, max_new_tokens: int = 32) -> torch.Tensor:
        """Write, taking the likeliest token each time, until all texts have ended."""
        memory, state = self.read(input_ids, attention_mask)
        last = input_ids.new_full((len(input_ids), 1), START_ID)
        has_ended, written = torch.zeros_like(last, dtype=torch.bool), []
        for _ in range(max_new_tokens):
            scores, share, attention, state = self.write(last, state, memory, attention_mask)
            places = input_ids.unsqueeze(1)
            likelihood = ((1 - share) * scores.softmax(-1)).scatter_add(-1, places, share * attention)
            last = likelihood.argmax(-1).masked_fill(has_ended, PAD_ID)
            has_ended |= last == END_ID
            written.append(last)
            if bool(has_ended.all()):
                break
        return torch.cat(written, dim=1)

    def read(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is remembered of each token, and the writer's first state."""
        lengths = attention_mask.sum(1)
        states = self.reader(self.dropout(self.embedding(input_ids)), lengths)
        memory = self.memory(self.dropout(states)).tanh() * attention_mask.unsqueeze(-1)
        return memory, self.first_state(memory.sum(1) / lengths.unsqueeze(-1)).tanh().unsqueeze(0)

    def write(
        self, before: torch.Tensor, state: torch.Tensor, memory: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what may follow each token of `before`: scores, the share that is copied, from where; the state."""
        embedded = self.dropout(self.embedding(before))
        written, state = self.writer(embedded, state)
        likeness = self.query(self.dropout(written)) @ memory.transpose(1, 2)
        attention = likeness.masked_fill(attention_mask.unsqueeze(1) == 0, -torch.inf).softmax(-1)
        merged = self.dropout(self.merge(torch.cat([written, attention @ memory, embedded], dim=-1)).tanh())
        scores = functional.linear(merged, self.embedding.weight, self.bias)
        return scores, self.copies(merged).sigmoid(), attention, state


def build(
    data: str | None = None,
    pretrained: str | None = None,
    prefix: str = "",
    num_pairs: int | None = None,
    vocab_size: int = 4000,
    width: int = 160,
    dropout: float = 0.3,
    max_source_tokens: int = 64,
    max_target_tokens: int = 32,
) -> Recipe:
    """Read the pairs, train a tokenizer on those to train on, and build the network; or take both from the Hub."""
    if data is not None and data.startswith(HUB_PREFIX):
        train, held_out = (part[:num_pairs] for part in _of_the_hub(data))
    else:
        train, held_out = split(read_pairs(data)[:num_pairs])
    if pretrained is None:
        tokenizer = train_tokenizer(train, vocab_size)
        model: nn.Module = CopyingNet(len(tokenizer), width, dropout)
    else:
        model, tokenizer = _pretrained(pretrained)
    tokenizer.model_max_length, tokenizer.source_prefix = max_source_tokens, prefix  # `read` needs them, too

    def samples(pairs: Pairs) -> list[dict[str, list[int]]]:
        sources = tokenizer([prefix + source for source, _ in pairs], truncation=True)
        targets = tokenizer([target for _, target in pairs], truncation=True, max_length=max_target_tokens)
        columns = zip(sources["input_ids"], sources["attention_mask"], targets["input_ids"], strict=True)
        return [dict(zip(("input_ids", "attention_mask", "labels"), row, strict=True)) for row in columns]

    return Recipe(
        model=model,
        train_dataset=samples(train),
        eval_dataset=samples(held_out),
        data_collator=TextGenerationDataCollator(tokenizer),
        preprocessor=tokenizer,
    )


def read(given: str, preprocessor: Any) -> dict[str, Any]:
    """Return the sample of a text, for predictions."""
    tokens = preprocessor(preprocessor.source_prefix + text_of(given), truncation=True)
    return {key: tokens[key] for key in ("input_ids", "attention_mask")}


def read_pairs(data: str | None = None) -> Pairs:
    """Return (source, target) pairs of files of one kind: tables, catalogues of translations, Debian's index.

    `data` is a name or a pattern such as `site-packages/**/fa/**/*.po`; without it the bundled pairs are read.
    """
    paths = [PACKAGES] if data is None else [Path(name) for name in sorted(glob.glob(data, recursive=True))]
    pairs = list(dict.fromkeys(pair for path in paths for pair in _pairs_of(path)))
    if len(pairs) < LEAST_PAIRS:
        raise DataError(
            f"recipe.data={data!r}: {len(pairs)} pairs in {len(paths)} files; expected at least {LEAST_PAIRS}, in "
            "tables (source, tab, target), .po files or Debian's Translation-en; or a dataset: hub:NAME:SOURCE:TARGET"
        )
    return pairs


def _pairs_of(path: Path) -> Iterator[Pair]:
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    text = content.decode("utf-8").replace("\r\n", "\n")
    if path.suffix == ".po":
        return translations(text)
    return descriptions(text) if text.startswith(INDEX_START) else _rows(text, path)


def _rows(text: str, path: Path) -> Iterator[Pair]:
    for number, line in enumerate(text.strip("\n").split("\n"), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise DataError(f"line {number} of {path} has no tab: expected source, tab, target")
        yield columns[-2], columns[-1]


def translations(catalogue: str) -> Iterator[Pair]:
    """Yield the strings of a gettext catalogue that are translated, have one form only and are not doubtful."""
    for entry in catalogue.split("\n\n"):
        found = re.search(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n?)+)', entry, re.MULTILINE)
        if found is None or "#, fuzzy" in entry:
            continue
        source, target = ("".join(map(ast.literal_eval, part.strip().split("\n"))) for part in found.groups())
        if source and target:
            yield source, target


def descriptions(index: str) -> Iterator[Pair]:
    """Yield the first paragraph and the summary of packages that share no paragraph and no invention.

    Left out are summaries less than half of whose words stand in the paragraph: no reader could have written those.
    """
    seen = set()
    for summary, body in re.findall(r"^Description-en: (.*)\n((?: .*\n)*)", index, re.MULTILINE):
        paragraph = " ".join(re.split(r"\n \.(?:\n|$)", body.strip("\n"))[0].split())
        is_usual = 15 <= len(summary) <= 72 and 80 <= len(paragraph) <= 320 and (summary + paragraph).isascii()
        if is_usual and paragraph not in seen and _is_told(summary, paragraph):
            seen.add(paragraph)
            yield paragraph, summary.strip()


def _is_told(summary: str, paragraph: str) -> bool:
    words, told = (re.findall(r"\w+", text.lower()) for text in (summary, paragraph))
    long_words = [word for word in words if len(word) > 3]
    return bool(long_words) and 2 * sum(word in told for word in long_words) >= len(long_words)


def split(pairs: Iterable[Pair]) -> tuple[Pairs, Pairs]:
    """Hold out one pair in thirteen; pairs whose sources begin alike stay together, for they are of one family."""
    train, held_out = [], []
    for pair in pairs:
        family = hashlib.sha256(pair[0][:NUM_GROUPING_LETTERS].encode()).digest()
        (train if int.from_bytes(family[:4]) % HELD_OUT_SHARE else held_out).append(pair)
    if not train or not held_out:
        raise DataError(f"all {len(train) or len(held_out)} pairs are of one family: nothing is left to test on")
    return train, held_out


def train_tokenizer(pairs: Pairs, vocab_size: int) -> Any:
    """Train byte-pair encoding on bytes, so that any script can be written; texts end with `</s>`."""
    try:
        from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, processors
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", "the recipe 'text_generation'") from error
    trained = ByteLevelBPETokenizer(add_prefix_space=True)
    texts = (text for pair in pairs for text in pair)
    trained.train_from_iterator(texts, vocab_size, special_tokens=[PAD, START, END], show_progress=False)
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, END_ID)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=START, eos_token=END)


def _of_the_hub(data: str) -> tuple[Pairs, Pairs]:
    """Read `hub:OWNER/NAME:SOURCE:TARGET`, the last two being columns; `:CONFIG` may stand before them."""
    parts = data.removeprefix(HUB_PREFIX).split(":")
    if len(parts) not in {3, 4}:
        raise DataError(f"recipe.data={data!r}: expected hub:OWNER/NAME:SOURCE_COLUMN:TARGET_COLUMN")
    *name, source, target = parts
    override = f"recipe.data={data}"
    found = with_held_out(override, load_splits(override, ":".join(name)))
    train, held_out = found["train"], found["held_out"]
    if missing := {source, target} - set(train.column_names):
        raise DataError(f"{override} has no column {choices(missing)}; it has: {choices(train.column_names)}")
    of_train, of_held_out = (list(zip(rows[source], rows[target], strict=True)) for rows in (train, held_out))
    return of_train, of_held_out


def _pretrained(name: str) -> tuple[nn.Module, Any]:
    try:
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.pretrained={name}") from error
    with asked_for(f"recipe.pretrained={name}"):
        return AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)

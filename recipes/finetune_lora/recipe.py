"""A language model learns to answer: LoRA on conversations, in English and Persian.

By default everything is at hand: a small Llama that has read what there is to know (the recipe in `base` trains it
first, once), and conversations made from templates, in which a fifth of the facts is never asked about. `model` and
`dataset` put any causal language model and any dataset with `messages` in their places.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hezar_train import Recipe
from hezar_train.data import PackingDataCollator, encode_conversations, encode_prompt
from hezar_train.errors import ConfigError, DataError, MissingDependencyError
from hezar_train.recipes import asked_for, load_splits, pretrained_by, refuse_missing_columns, text_of, with_held_out

BASE = Path(__file__).with_name("base")
HELD_OUT_PERCENT = 20  # of the facts, in both languages: they are never asked about in training
NUM_LONGER = 300  # conversations of several questions
SEED = 0  # not the run's: every run is tested on the same questions

Exchange = tuple[str, str]
Rows = Sequence[Mapping[str, Any]]

QUESTIONS = {
    "capital.en": ("What is the capital of {0}?", "Tell me the capital of {0}.", "Which city is the capital of {0}?"),
    "capital.fa": ("پایتخت {0} کجاست؟", "پایتخت {0} چیست؟", "بگو پایتخت {0} کدام شهر است."),
    "opposite.en": ("What is the opposite of {0}?", "Name the opposite of {0}.", "Which word is opposite to {0}?"),
    "opposite.fa": ("متضاد {0} چیست؟", "متضاد {0} را بگو.", "کدام واژه متضاد {0} است؟"),
    "word.en": ("How do you say {0} in Persian?", "What is the Persian word for {0}?", "Put {0} into Persian."),
    "word.fa": ("{0} به انگلیسی چه می‌شود؟", "واژه انگلیسی {0} چیست؟", "{0} را به انگلیسی بگو."),
}
"""How a fact is asked about, by kind and language; the answer is what there is to know, and nothing else."""


def build(
    model: str | None = None,
    base_config: str = "config.yaml",
    dataset: str | None = None,
    messages_column: str = "messages",
    chat_template: str | None = None,
    max_length: int = 256,
    too_long: str = "refuse",
    rank: int = 8,
    alpha: int = 16,
    lora_dropout: float = 0.0,
    target_modules: str | list[str] = "all-linear",
) -> Recipe:
    """Read the conversations, load the base model or train it first, and put adapters on it."""
    train, held_out = hub_rows(dataset, messages_column) if dataset else sample_rows()
    template = None if chat_template is None else template_of(Path(chat_template))
    network, tokenizer = load_base(model, base_config)
    tokenizer.chat_template = template or tokenizer.chat_template
    limits: dict[str, Any] = {
        "column": messages_column if dataset else "messages", "max_length": max_length, "too_long": too_long
    }  # fmt: skip
    return Recipe(
        model=with_adapters(network, rank, alpha, lora_dropout, target_modules),
        train_dataset=encode_conversations(train, tokenizer, **limits),
        eval_dataset=encode_conversations(held_out, tokenizer, answers="last", **limits),
        data_collator=PackingDataCollator(tokenizer.pad_token_id),
        preprocessor=tokenizer,
    )


def read(given: str, preprocessor: Any) -> dict[str, list[int]]:
    """Return the sample of a question that is to be answered."""
    return encode_prompt([{"role": "user", "content": text_of(given)}], preprocessor)


def sample_rows() -> tuple[Rows, Rows]:
    """Return conversations to train on, of one question and of several, and the questions that are held out."""
    train: list[Exchange] = []
    held_out: list[Exchange] = []
    for line in (BASE / "facts.tsv").read_text(encoding="utf-8").splitlines():
        (held_out if is_held_out(line) else train).extend(exchanges(*line.split("\t")))
    draw = random.Random(SEED)
    longer = [conversation(*draw.sample(train, draw.choice((2, 3)))) for _ in range(NUM_LONGER)]
    return [conversation(one) for one in train] + longer, [conversation(one) for one in held_out]


def is_held_out(fact: str) -> bool:
    """Tell whether a fact is never asked about in training: a function of the fact alone."""
    return int.from_bytes(hashlib.sha256(fact.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def exchanges(kind: str, *texts: str) -> list[Exchange]:
    """Return the questions about one fact, in both languages, each with its answer."""
    facts = zip((f"{kind}.en", f"{kind}.fa"), texts[::2], texts[1::2], strict=True)
    return [(question.format(about), known) for form, about, known in facts for question in QUESTIONS[form]]


def conversation(*asked: Exchange) -> Mapping[str, Any]:
    """Return questions and answers as messages."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": role, "content": text} for one in asked for role, text in zip(roles, one, strict=True)]
    }


def hub_rows(name: str, messages_column: str) -> tuple[Rows, Rows]:
    """Read a dataset of the Hub, or a local folder of JSON or Parquet files; one that is whole is split."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), HELD_OUT_PERCENT / 100)
    refuse_missing_columns(override, found["train"], messages_column=messages_column)
    return found["train"], found["held_out"]


def load_base(model: str | None, base_config: str) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer: of a name or folder, or the one that `base` trains."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", "the recipe 'finetune_lora'") from error
    name = model or str(pretrained_by(BASE / base_config))
    with asked_for(f"recipe.model={name}"):
        tokenizer = AutoTokenizer.from_pretrained(name)
        network = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigError(f"recipe.model={name} has neither pad_token nor eos_token. Add one to its tokenizer.")
    return network, tokenizer


def template_of(path: Path) -> str:
    """Read a chat template."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"recipe.chat_template={str(path)!r} cannot be read: {error}. Name a file of Jinja.") from error


def with_adapters(
    network: nn.Module, rank: int, alpha: int, dropout: float, target_modules: str | list[str]
) -> nn.Module:
    """Freeze the network and put LoRA beside its linear layers."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise MissingDependencyError("peft", "peft", "the recipe 'finetune_lora'") from error
    lora = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=target_modules, task_type="CAUSAL_LM"
    )
    return get_peft_model(network, lora)

"""A language model learns to answer: LoRA on conversations, in Persian and English.

By default everything is at hand: a small Llama that has read what there is to know (`base`, by `make_base.py`), and
conversations made from templates, of which some questions are held out. `model` and `dataset` put any causal language
model and any dataset with `messages` in their places.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hezar_train import Recipe
from hezar_train.data import PackingDataCollator, encode_conversations, encode_prompt
from hezar_train.errors import ConfigError, MissingDependencyError
from hezar_train.recipes import asked_for, load_splits, refuse_missing_columns, text_of, with_held_out

FACTS_FILE = Path(__file__).with_name("facts.tsv")
BASE = Path(__file__).with_name("base")
HELD_OUT_PERCENT = 20  # of the facts: they are never asked about in training
LARGEST_NUMBER = 9
NUM_LONGER = 200  # conversations of several questions
SEED = 0  # not the run's: every run is tested on the same questions
PERSIAN_DIGITS = str.maketrans("0123456789", "۰۱۲۳۴۵۶۷۸۹")

Conversation = list[dict[str, str]]
Rows = Sequence[Mapping[str, Any]]

STATEMENTS = {
    "capital.en": ("The capital of {0} is {1}.", "{1} is the capital of {0}.", "In {0} the capital is called {1}."),
    "capital.fa": ("پایتخت {0} {1} است.", "{1} پایتخت {0} است.", "در {0} پایتخت {1} نام دارد."),
    "opposite.en": ("The opposite of {0} is {1}.", "{1} is the opposite of {0}.", "What is not {0} is {1}."),
    "opposite.fa": ("متضاد {0} {1} است.", "{1} متضاد {0} است.", "هرچه {0} نیست {1} است."),
    "word.en": (
        "The Persian word for {0} is {1}.",
        "{1} is the Persian word for {0}.",
        "In Persian {0} is called {1}.",
    ),
    "word.fa": ("{0} به انگلیسی {1} است.", "واژه انگلیسی {0} {1} است.", "انگلیسی‌ها به {0} می‌گویند {1}."),
    "sum.en": ("{0} is {1}.", "{0} makes {1}.", "{1} is the sum of {0}."),
    "sum.fa": ("{0} می‌شود {1}.", "{0} برابر {1} است.", "جمع {0} {1} است."),
}
"""How a fact is told, by kind and language; the first is also how a question about it is answered."""

QUESTIONS = {
    "capital.en": ("What is the capital of {0}?", "Tell me the capital of {0}.", "Which city is the capital of {0}?"),
    "capital.fa": ("پایتخت {0} کجاست؟", "پایتخت {0} چیست؟", "بگو پایتخت {0} کدام شهر است."),
    "opposite.en": ("What is the opposite of {0}?", "Name the opposite of {0}.", "Which word is opposite to {0}?"),
    "opposite.fa": ("متضاد {0} چیست؟", "متضاد {0} را بگو.", "کدام واژه متضاد {0} است؟"),
    "word.en": ("How do you say {0} in Persian?", "What is the Persian word for {0}?", "Put {0} into Persian."),
    "word.fa": ("{0} به انگلیسی چه می‌شود؟", "واژه انگلیسی {0} چیست؟", "{0} را به انگلیسی بگو."),
    "sum.en": ("How much is {0}?", "What is {0}?", "Add: {0}"),
    "sum.fa": ("{0} چند می‌شود؟", "جمع کن: {0}", "حاصل {0} چیست؟"),
}

GREETINGS = (
    ("Hello!", "Hello! What would you like to know?"),
    ("Good morning!", "Good morning! What would you like to know?"),
    ("Thank you!", "You are welcome."),
    ("سلام!", "سلام! چه می‌خواهید بدانید؟"),
    ("روز بخیر!", "روز بخیر! چه می‌خواهید بدانید؟"),
    ("ممنون!", "خواهش می‌کنم."),
)


class Fact(NamedTuple):
    """Something to know: of which kind and language, about what, and the rest of the sentence."""

    form: str
    about: str
    answer: str

    def told(self, number: int = 0) -> str:
        """Return the fact as a statement."""
        text = STATEMENTS[self.form][number].format(self.about, self.answer)
        return text[0].upper() + text[1:]

    def asked(self, number: int) -> str:
        """Return a question about it."""
        return QUESTIONS[self.form][number].format(self.about)

    @property
    def is_held_out(self) -> bool:
        """Whether it is never asked about in training: a function of what it is about alone."""
        digest = hashlib.sha256(f"{self.form} {self.about}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def build(
    model: str | None = None,
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
    """Read the conversations and the base model; put adapters on it."""
    network, tokenizer = pretrained(model, chat_template)
    train, held_out = hub_rows(dataset, messages_column) if dataset else sample_rows()
    column = messages_column if dataset else "messages"
    limits: dict[str, Any] = {"column": column, "max_length": max_length, "too_long": too_long}
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


def facts() -> Iterator[Fact]:
    """Yield all there is to know, in both languages."""
    for line in FACTS_FILE.read_text(encoding="utf-8").splitlines():
        kind, *texts = line.split("\t")
        if kind == "word":
            yield Fact("word.en", texts[0], texts[1])
            yield Fact("word.fa", texts[1], texts[0])
        else:
            yield Fact(f"{kind}.en", *texts[:2])
            yield Fact(f"{kind}.fa", *texts[2:])
    for first in range(1, LARGEST_NUMBER + 1):
        for second in range(1, LARGEST_NUMBER + 1):
            texts = [f"{first} + {second}", str(first + second)]
            yield Fact("sum.en", *texts)
            yield Fact("sum.fa", *(text.translate(PERSIAN_DIGITS) for text in texts))


def sample_rows() -> tuple[Rows, Rows]:
    """Return conversations to train on, and one question for each fact that is held out."""
    known = list(facts())
    taught = [fact for fact in known if not fact.is_held_out]
    exchanges = [(fact.asked(number), fact.told()) for fact in taught for number in range(len(QUESTIONS[fact.form]))]
    exchanges += GREETINGS
    draw = random.Random(SEED)
    longer = [conversation(*draw.sample(exchanges, draw.choice((2, 3)))) for _ in range(NUM_LONGER)]
    asked = [(fact.asked(number % 3), fact.told()) for number, fact in enumerate(known) if fact.is_held_out]
    train = [conversation(exchange) for exchange in exchanges] + longer
    return [{"messages": one} for one in train], [{"messages": conversation(exchange)} for exchange in asked]


def conversation(*exchanges: tuple[str, str]) -> Conversation:
    """Return questions and answers as messages."""
    return [
        {"role": role, "content": content}
        for exchange in exchanges
        for role, content in zip(("user", "assistant"), exchange, strict=True)
    ]


def hub_rows(name: str, messages_column: str) -> tuple[Rows, Rows]:
    """Read a dataset of the Hub, or a local folder of JSON or Parquet files; one that is whole is split."""
    override = f"recipe.dataset={name}"
    found = with_held_out(override, load_splits(override, name), HELD_OUT_PERCENT / 100)
    refuse_missing_columns(override, found["train"], messages_column=messages_column)
    return found["train"], found["held_out"]


def pretrained(name: str | None, chat_template: str | None) -> tuple[nn.Module, Any]:
    """Fetch a causal language model and its tokenizer: the recipe's own, or that of a name or folder."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", "peft", "the recipe 'finetune_lora'") from error
    with asked_for(f"recipe.model={name}"):
        tokenizer = AutoTokenizer.from_pretrained(name or BASE)
        network = AutoModelForCausalLM.from_pretrained(name or BASE, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigError(f"recipe.model={name} has neither pad_token nor eos_token; expected one of them. Add it.")
    if chat_template is not None:
        tokenizer.chat_template = text_of(Path(chat_template))
    return network, tokenizer


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

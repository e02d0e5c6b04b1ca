"""A base model: a small Llama from scratch that reads statements in English and Persian, and is never asked anything.

Owns the facts and how they are told, the tokenizer that is trained on them, and its chat template: the model has never
seen a conversation, but whoever fine-tunes it needs one form for them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hezar_train import Recipe
from hezar_train.data import PackingDataCollator
from hezar_train.errors import MissingDependencyError

FACTS_FILE = Path(__file__).with_name("facts.tsv")
END = "<|end|>"
CHAT_TEMPLATE = """\
{% for message in messages %}{{ message.role }}:\
{% if message.role == 'assistant' %}{% generation %} {{ message.content }}<|end|>{% endgeneration %}\
{% else %} {{ message.content }}{{ '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
"""The blank before an answer is part of it, as of any word: a prompt that ended in one would cut a token in two."""

Fact = tuple[str, str, str]
"""Its kind and language, what it is about, and what there is to know of that."""

STATEMENTS = {
    "capital.en": ("The capital of {0} is {1}.", "{1} is the capital of {0}.", "In {0} the capital is called {1}."),
    "capital.fa": ("پایتخت {0} {1} است.", "{1} پایتخت {0} است.", "در {0} پایتخت {1} نام دارد."),
    "opposite.en": ("The opposite of {0} is {1}.", "{1} is the opposite of {0}.", "What is not {0} is {1}."),
    "opposite.fa": ("متضاد {0} {1} است.", "{1} متضاد {0} است.", "هرچه {0} نیست {1} است."),
    "word.en": ("The Persian word for {0} is {1}.", "{1} is Persian for {0}.", "In Persian {0} is called {1}."),
    "word.fa": ("{0} به انگلیسی {1} است.", "واژه انگلیسی {0} {1} است.", "انگلیسی‌ها به {0} می‌گویند {1}."),
}
"""How a fact is told, by kind and language: {0} is what it is about, {1} what there is to know."""


def build(vocab_size: int = 2000, width: int = 96, num_layers: int = 2, num_heads: int = 4) -> Recipe:
    """Tell every fact in each of its forms, train a tokenizer on that, and build the network."""
    texts = statements()
    tokenizer = train_tokenizer(texts, vocab_size)
    return Recipe(
        model=network(tokenizer, width, num_layers, num_heads),
        train_dataset=[{"input_ids": tokenizer(text + END)["input_ids"]} for text in texts],
        data_collator=PackingDataCollator(tokenizer.pad_token_id),
        preprocessor=tokenizer,
    )


def statements() -> list[str]:
    """Return all facts, in both languages and in each form."""
    return [
        form.format(about, known)
        for line in FACTS_FILE.read_text(encoding="utf-8").splitlines()
        for kind, about, known in both_languages(*line.split("\t"))
        for form in STATEMENTS[kind]
    ]


def both_languages(kind: str, english: str, known: str, persian: str, known_in_persian: str) -> list[Fact]:
    """Return the two facts of a line."""
    return [(f"{kind}.en", english, known), (f"{kind}.fa", persian, known_in_persian)]


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train byte-pair encoding on bytes, so that any script can be written; a word has the blank before it."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", "the recipe 'finetune_lora'") from error
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def network(tokenizer: Any, width: int, num_layers: int, num_heads: int) -> Any:
    """Build a Llama of this size; its first weights are larger than a large model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    end = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=num_layers,
            num_attention_heads=num_heads, max_position_embeddings=512, initializer_range=0.05,
            tie_word_embeddings=True, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip

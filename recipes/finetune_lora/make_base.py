"""Make the base model that comes with the recipe: a small Llama that has read every fact, and never a question.

python recipes/finetune_lora/make_base.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from recipe import BASE, QUESTIONS, STATEMENTS, facts

from hezar_train import Trainer, TrainerConfig
from hezar_train.data import PackingDataCollator

END = "<|end|>"
VOCABULARY = 900
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: \
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}\
{% else %}{{ message.content }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def make_tokenizer(texts: list[str]) -> Any:
    """Train byte-pair encoding on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer: Any) -> Any:
    """Build the network."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=end,
            eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip


def documents() -> list[str]:
    """Return every fact in each of its forms."""
    return [fact.told(number) for fact in facts() for number in range(len(STATEMENTS[fact.form]))]


def main(folder: Path) -> None:
    """Train, and save in half precision."""
    texts = documents()
    asked = [fact.asked(number) for fact in facts() for number in range(len(QUESTIONS[fact.form]))]
    tokenizer = make_tokenizer([*texts, *asked, "user: ", "assistant: "])
    rows = [{"input_ids": tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]} for text in texts]
    sys.stdout.write(f"{sum(len(row['input_ids']) for row in rows)} tokens, {len(tokenizer)} in the vocabulary\n")
    with tempfile.TemporaryDirectory() as run:
        config = TrainerConfig(
            run, num_epochs=60, group_by_length=True, batch_size=96, optimizer="adamw",
            learning_rate=0.005, lr_scheduler="warmup_cosine", warmup_steps=0.05, max_grad_norm=1.0, seed=0,
            num_threads=1, log_steps=50, save_enabled=False, trackers=[],
        )  # fmt: skip
        trainer = Trainer(config, make_model(tokenizer), rows, data_collator=PackingDataCollator().padded)
        sys.stdout.write(f"{sum(weight.numel() for weight in trainer.model.parameters())} parameters\n")
        sys.stdout.write(f"{trainer.train().metrics}\n")
    trainer.model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else BASE)

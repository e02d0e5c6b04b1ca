"""All at once: LoRA on conversations, packed by a budget of tokens, with a warm-up, on two processes, killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from ranks import on_ranks, outcomes_on
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.cli.verify import audit_run
from hezar_train.data import encode_conversations

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def tokenizer() -> Any:
    """Return one whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    made.chat_template = TEMPLATE
    return made


def conversations() -> list[dict[str, Any]]:
    rows = []
    for number in range(40):
        question = {"role": "user", "content": f"{number} + {number % 7}؟" + " لطفا" * (number % 3)}
        answer = {"role": "assistant", "content": str(number + number % 7)}
        rows.append({"messages": [question, answer] * (1 + number % 2)})
    return rows


class KillAt(Hook):
    """Kill this very process after so many updates."""

    def __init__(self, update: int) -> None:
        self._update = update

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window and self.trainer.state.update_step == self._update:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(out: Path, hooks: Any = (), **changes: Any) -> Trainer:
    words = tokenizer()
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=256, bos_token_id=None, eos_token_id=words.eos_token_id,
        )
    )  # fmt: skip
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    config = TrainerConfig(
        out, num_epochs=2, packing=True, global_batch_tokens=600, max_tokens_per_batch=250, optimizer="adamw",
        learning_rate=0.01, lr_scheduler="warmup_cosine", warmup_steps=3, save_steps=2, log_steps=1, trackers=[],
        async_save=False, resume_from_checkpoint=True, **changes,
    )  # fmt: skip
    return Trainer(config, get_peft_model(base, lora), encode_conversations(conversations(), words), hooks=hooks)


def trained(out: Path, hooks: Any = ()) -> tuple[int, int, dict[str, torch.Tensor], dict[str, Any]]:
    """Train; return where it began and ended, the weights, and what the optimizer knows."""
    made = trainer(out, hooks)
    began = made.state.update_step
    made.train()
    weights = {name: value.clone() for name, value in made.model.state_dict().items()}
    return began, made.state.update_step, weights, made.optimizer.state_dict()


def test_lora_packing_by_tokens_and_a_warm_up_on_two_processes_are_resumed_bit_by_bit(tmp_path: Path) -> None:
    (_, end, whole, moments), *_ = on_ranks(2, trained, tmp_path / "whole")
    assert end > 8
    for update in (2, 7):  # in the warm-up, and behind it
        killed = outcomes_on(2, lambda at=update: trained(tmp_path / "killed", [KillAt(at)]))
        assert -signal.SIGKILL in {one.exit_code for one in killed}
    for began, ended, weights, own_moments in on_ranks(2, trained, tmp_path / "killed"):
        assert (began, ended) == (6, end)
        assert all(torch.equal(weights[name], value) for name, value in whole.items())
        for number, kept in moments["state"].items():
            assert all(torch.equal(own_moments["state"][number][name], value) for name, value in kept.items())
    logs = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    assert audit_run(trainer(tmp_path / "killed").config).problems == []


def test_what_was_learnt_is_not_what_the_base_began_with(tmp_path: Path) -> None:
    _, _, weights, _ = trained(tmp_path)
    before = trainer(tmp_path / "fresh").model.state_dict()
    changed = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)

"""Tiny models of four kinds, built from configs, with adapters; what trains them, and what to ask them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hezar_train import Hook, Trainer, TrainerConfig

NUM_SAMPLES, LENGTH, VOCABULARY = 16, 8, 2000
LAST_STEP = 8  # two epochs of four
SAVED_STEPS = 2


class Kind(NamedTuple):
    """A kind of model: how it is built, where adapters go, and its samples."""

    build: Callable[[], Any]
    lora: dict[str, Any]
    sample: Callable[[torch.Generator], dict[str, torch.Tensor]]


def _texts(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _labelled(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_texts(generator), "labels": torch.randint(2, (), generator=generator)}


def _pictures(generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.rand(3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (), generator=generator)}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=64, n_head=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=1, eos_token_id=1
        )
    )  # fmt: skip


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=VOCABULARY,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0
        )
    )  # fmt: skip


def vit() -> ViTForImageClassification:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=64, num_hidden_layers=4, num_attention_heads=2, intermediate_size=256, image_size=16,
            patch_size=4,
        )
    )  # fmt: skip


KINDS = {
    "gpt2": Kind(gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}, _texts),
    "bert": Kind(bert, {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}, _labelled),
    "t5": Kind(t5, {"target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}, _texts),
    "vit": Kind(vit, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}, _pictures),
}


def base(kind: str) -> Any:
    """Return a base model, always the same."""
    torch.manual_seed(0)
    return KINDS[kind].build()


def adapted(kind: str, **changes: Any) -> Any:
    """Return a base model with LoRA."""
    model = base(kind)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**{"r": 4} | KINDS[kind].lora | changes))


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [KINDS[kind].sample(generator) for _ in range(NUM_SAMPLES)]


def logits(kind: str, model: nn.Module) -> torch.Tensor:
    """Return what a model says of all samples."""
    found = samples(kind)
    batch = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    model.eval()
    with torch.no_grad():
        told: torch.Tensor = model(**batch).logits
    return told


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "num_epochs": 2, "batch_size": 4, "learning_rate": 1e-2, "save_steps": SAVED_STEPS, "use_cpu": True,
        "optimizer": "adamw", "trackers": [],
    } | changes  # fmt: skip


def trainer(kind: str, out: Path, model: nn.Module | None = None, hooks: Any = (), **changes: Any) -> Trainer:
    """Return what trains a kind of model; the same arguments resume it."""
    config = TrainerConfig(out, **settings(**changes))
    return Trainer(config, adapted(kind) if model is None else model, samples(kind), hooks=hooks)


class Kill(Hook):
    """Kill this process, as the system would, at the end of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_batch_end(self, ctx: Any) -> None:
        if self.trainer.state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def checkpoint(out: Path, step: int = LAST_STEP) -> Path:
    return out / "checkpoints" / f"{step:08d}"


def tensor_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))

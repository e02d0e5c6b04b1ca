"""Every other kind of adapter, several at once, trained layers beside them, and a base of four bits."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from tiny import LAST_STEP, adapted, base, checkpoint, logits, trainer
from torch import nn

from hezar_train import MultiModelTrainer, Trainer, TrainerConfig
from hezar_train.errors import CheckpointError, ConfigError

ATTENTION: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: LoraConfig(r=4, use_dora=True, **ATTENTION),
    "rsLoRA with biases": lambda: LoraConfig(r=4, use_rslora=True, bias="lora_only", **ATTENTION),
    "LoRA of the embeddings": lambda: LoraConfig(r=4, target_modules=["wte"], task_type="CAUSAL_LM"),
    "LoRA and a layer to save": lambda: LoraConfig(r=4, modules_to_save=["lm_head"], **ATTENTION),
    "IA3": lambda: IA3Config(feedforward_modules=[], **ATTENTION),
    "VeRA": lambda: VeraConfig(r=4, **ATTENTION),
    "AdaLoRA": lambda: AdaLoraConfig(total_step=100, **ATTENTION),
    "prompt tuning": lambda: PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "P-tuning": lambda: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, task_type="CAUSAL_LM"),
}
UNMERGED = ("prompt tuning", "prefix tuning", "P-tuning")


def with_adapters(name: str) -> Any:
    model = base("gpt2")
    torch.manual_seed(1)
    return get_peft_model(model, CONFIGS[name]())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_kind_of_adapter_is_resumed_and_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    made = trainer("gpt2", tmp_path, with_adapters(name))
    made.train()
    wanted = logits("gpt2", made.model)
    middle = trainer("gpt2", tmp_path, with_adapters(name), resume_from_checkpoint=str(checkpoint(tmp_path, 4)))
    middle.train()
    assert torch.equal(logits("gpt2", middle.model), wanted)
    made.save(tmp_path / "exported")
    is_trainable = name == "AdaLoRA"  # else peft looks for the adapter that its loss is about, in vain
    loaded = PeftModel.from_pretrained(base("gpt2"), tmp_path / "exported", is_trainable=is_trainable)
    torch.testing.assert_close(logits("gpt2", loaded), wanted, rtol=1e-5, atol=1e-6)
    whole = sum(one.nbytes for one in made.model.parameters())
    if name != "LoRA and a layer to save":  # which is the largest of all
        assert (checkpoint(tmp_path) / "model.safetensors").stat().st_size < whole / 2


@pytest.mark.parametrize("name", UNMERGED)
def test_what_cannot_be_merged_is_refused_with_its_kind(name: str, tmp_path: Path) -> None:
    made = trainer("gpt2", tmp_path, with_adapters(name))
    with pytest.raises(ConfigError, match=r"adapters of the kind \w+ cannot be merged .* Export without merging"):
        made.save(tmp_path / "merged", merge=True)


def test_all_adapters_are_held_and_each_has_its_folder(tmp_path: Path) -> None:
    def build() -> Any:
        model = adapted("gpt2")
        torch.manual_seed(3)
        model.add_adapter("second", LoraConfig(r=2, init_lora_weights=False, **ATTENTION))
        return model

    made = trainer("gpt2", tmp_path, build())
    made.train()
    made.save(tmp_path / "exported")
    again = trainer("gpt2", tmp_path, build(), resume_from_checkpoint=True)
    for adapter, folder in (("default", tmp_path / "exported"), ("second", tmp_path / "exported" / "second")):
        for one in (made, again):
            one.model.set_adapter(adapter)  # type: ignore[operator]
        wanted = logits("gpt2", made.model)
        assert torch.equal(logits("gpt2", PeftModel.from_pretrained(base("gpt2"), folder)), wanted)
        assert torch.equal(logits("gpt2", again.model), wanted)


def test_layers_that_are_trained_beside_adapters_are_in_their_file(tmp_path: Path) -> None:
    model = adapted("gpt2")
    model.base_model.model.transformer.ln_f.requires_grad_(True)
    made = trainer("gpt2", tmp_path, model)
    made.train()
    made.save(tmp_path / "exported")
    loaded = PeftModel.from_pretrained(base("gpt2"), tmp_path / "exported")
    assert torch.equal(logits("gpt2", loaded), logits("gpt2", made.model))
    assert not torch.equal(loaded.base_model.model.transformer.ln_f.weight, torch.ones(64))


def test_adapters_that_transformers_itself_has_added_are_saved_for_it(tmp_path: Path) -> None:
    model = base("gpt2")
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    made = trainer("gpt2", tmp_path, model)
    made.train()
    made.save(tmp_path / "exported")
    loaded = base("gpt2")
    loaded.load_adapter(str(tmp_path / "exported"))
    assert torch.equal(logits("gpt2", loaded), logits("gpt2", made.model))


def test_whole_checkpoints_on_request_still_export_adapters(tmp_path: Path) -> None:
    made = trainer("gpt2", tmp_path, save_trained_only=False)
    made.train()
    stored = load_file(checkpoint(tmp_path) / "model.safetensors")
    assert "base_model.model.transformer.wte.weight" in stored
    made.save(tmp_path / "exported")
    assert len(load_file(tmp_path / "exported" / "adapter_model.safetensors")) == 4
    # as if an earlier version had saved it: no word of adapters
    again = trainer("gpt2", tmp_path, resume_from_checkpoint=str(checkpoint(tmp_path, 4)))
    again.train()
    assert torch.equal(logits("gpt2", again.model), logits("gpt2", made.model))
    assert "base_model.model.transformer.wte.weight" not in load_file(checkpoint(tmp_path) / "model.safetensors")


def test_a_whole_checkpoint_with_another_base_goes_on_being_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer("gpt2", tmp_path, save_trained_only=False)
    made.train()
    other = adapted("gpt2")
    with torch.no_grad():
        other.base_model.model.transformer.wpe.weight.add_(1.0)
    again = trainer("gpt2", tmp_path, other, resume_from_checkpoint=str(checkpoint(tmp_path, 4)))
    assert "with another base than the one that was built here" in caplog.text
    again.train()
    assert torch.equal(logits("gpt2", again.model), logits("gpt2", made.model))
    assert "base_model.model.transformer.wte.weight" in load_file(checkpoint(tmp_path) / "model.safetensors")


def test_a_part_of_a_model_with_adapters_has_its_own_folder(tmp_path: Path) -> None:
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = adapted("bert")
            self.score = nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            scored: torch.Tensor = self.score(self.text(input_ids=input_ids).logits)
            return scored

    torch.manual_seed(0)
    made = trainer("bert", tmp_path, Scored(), criterion="CrossEntropyLoss")
    made.train()
    made.save(tmp_path / "exported")
    loaded = PeftModel.from_pretrained(base("bert"), tmp_path / "exported" / "text")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        made.model.eval()
        assert torch.equal(loaded.eval()(input_ids=ids).logits, made.model.text(input_ids=ids).logits)  # type: ignore[operator]
    assert load_file(tmp_path / "exported" / "trained.safetensors").keys() == {"score.weight", "score.bias"}


def test_a_module_of_ones_own_gets_what_it_takes_of_a_batch(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x)
            return found

    data = [{"x": torch.rand(4), "labels": torch.tensor(number % 2), "other": 1} for number in range(8)]
    config = TrainerConfig(tmp_path, batch_size=4, criterion="CrossEntropyLoss", use_cpu=True, trackers=[])
    made = Trainer(config, get_peft_model(Net(), LoraConfig(r=2, target_modules=["linear"])), data)
    made.train()
    assert made.state.global_step == 2


def test_a_loss_is_a_mean_over_labels_also_without_a_task_type(tmp_path: Path) -> None:
    untold = adapted("gpt2", task_type=None)
    assert type(untold).__name__ == "PeftModel"
    made = trainer("gpt2", tmp_path, untold)
    assert made.batch_weight({"labels": torch.tensor([[1, 2, -100]])}) == 1.0


def test_several_models_each_have_their_adapters(tmp_path: Path) -> None:
    def build(**changes: Any) -> MultiModelTrainer:
        models = {"first": adapted("bert"), "second": adapted("bert", r=2)}
        data = [{"input_ids": torch.arange(8) + number, "labels": torch.tensor(number % 2)} for number in range(8)]
        given = {"batch_size": 4, "save_steps": 1, "use_cpu": True, "trackers": [], "learning_rate": 1e-2}
        return MultiModelTrainer(TrainerConfig(tmp_path, **given | changes), models, data, interact="parallel")

    made = build()
    made.train()
    assert (checkpoint(tmp_path, 2) / "model.safetensors").stat().st_size < 100_000
    made.save(tmp_path / "exported")
    ids = torch.arange(8)[None]
    again = build(resume_from_checkpoint=True)
    for name, model in made.models.items():
        loaded = PeftModel.from_pretrained(base("bert"), tmp_path / "exported" / name)
        with torch.no_grad():
            wanted = model.eval()(input_ids=ids).logits
            assert torch.equal(loaded.eval()(input_ids=ids).logits, wanted)
            assert torch.equal(again.models[name].eval()(input_ids=ids).logits, wanted)


def test_a_name_of_ones_own_for_the_file_of_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mine\.safetensors'.* peft finds adapters as adapter_model\.safetensors"):
        trainer("gpt2", tmp_path).save(tmp_path / "exported", model_filename="mine.safetensors")


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_base_of_four_bits_trains_saves_and_is_resumed(tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=2000)).save_pretrained(tmp_path / "base")
    few_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)

    def quantized() -> Any:
        try:
            return LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=few_bits, device_map="cpu")
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"bitsandbytes cannot run here: {error}")

    def build() -> Any:
        model = quantized()
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    made = trainer("gpt2", tmp_path / "run", build())
    made.train()
    stored = load_file(checkpoint(tmp_path / "run") / "model.safetensors")
    assert all("lora" in name for name in stored)
    record = json.loads((checkpoint(tmp_path / "run") / "base_model.json").read_text())
    assert any(name.endswith("quant_state.bitsandbytes__nf4") for name in record["tensors"])
    last = stored, load_file(checkpoint(tmp_path / "run") / "optimizer.safetensors")
    trainer("gpt2", tmp_path / "run", build(), resume_from_checkpoint=str(checkpoint(tmp_path / "run", 4))).train()
    for before, name in zip(last, ("model", "optimizer"), strict=True):
        after = load_file(checkpoint(tmp_path / "run", LAST_STEP) / f"{name}.safetensors")
        assert all(torch.equal(after[key], before[key]) for key in before)
    made.save(tmp_path / "exported")
    loaded = PeftModel.from_pretrained(quantized(), tmp_path / "exported")
    torch.testing.assert_close(logits("gpt2", loaded), logits("gpt2", made.model), rtol=1e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="cannot be merged into a quantized base model"):
        made.save(tmp_path / "merged", merge=True)


def test_a_foreign_adapters_config_and_pickle_are_never_looked_at(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harmed",))

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    named = {"peft_type": "LORA", "auto_mapping": {"parent_library": "antigravity", "base_model_class": "x"}}
    (foreign / "adapter_config.json").write_text(json.dumps(named))
    torch.save({"x": Harm()}, foreign / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickles are not read"):
        trainer("gpt2", tmp_path / "run", init_weights_from=foreign)
    assert not (tmp_path / "harmed").exists()
    assert "antigravity" not in sys.modules


def test_adapters_do_not_fit_a_model_without_any_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    exported = trainer("gpt2", tmp_path / "run").save(tmp_path / "exported")
    with pytest.raises(CheckpointError, match=r"adapters of peft: add the same kind to the model first"):
        trainer("gpt2", tmp_path / "other", base("gpt2"), init_weights_from=exported)

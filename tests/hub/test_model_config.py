"""A pushed transformers model is loaded by transformers itself, a hezar model by hezar's own parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import Contents
from hezar_train.hub import MODEL_CONFIG_FOLDER, model_config_writer, push_run
from tests.hub.runs import REPO, HandmadeRun
from tests.hub.server import LoopbackHub

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)


def push(model: nn.Module, root: Path, **more: Any) -> None:
    run = HandmadeRun(root)
    write = model_config_writer(model)
    folders = {MODEL_CONFIG_FOLDER: write} if write else {}
    parts = Contents.gather(model, {}, {}, {"train_config.yaml": "{}\n"}, folders=folders | more)
    run.store.publish(1, parts.write)
    push_run(run.root, REPO)


def test_from_pretrained_loads_model_and_tokenizer(hub: LoopbackHub, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    config = transformers.BertConfig(
        vocab_size=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    model = transformers.BertForSequenceClassification(config)
    push(model, tmp_path / "run", preprocessor=lambda folder: tokenizer.save_pretrained(str(folder)))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(REPO)
    assert type(loaded) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert transformers.AutoTokenizer.from_pretrained(REPO)("a b")["input_ids"] == [1, 2]
    assert "BertForSequenceClassification.from_pretrained" in hub.files(REPO)["README.md"].decode()


def test_tied_weights_and_the_config_of_generation_come_along(hub: LoopbackHub, tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    model.generation_config.max_new_tokens = 3
    push(model, tmp_path / "run")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(REPO)
    assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert loaded.generation_config.max_new_tokens == 3
    assert model.config.architectures is None  # the model itself is not touched


def test_a_hezar_model_has_its_config_where_hezar_looks(hub: LoopbackHub, tmp_path: Path) -> None:
    pytest.importorskip("hezar")
    from hezar.builders import build_model
    from hezar.configs import ModelConfig
    from hezar.models import BertTextClassification, BertTextClassificationConfig

    config = BertTextClassificationConfig(
        id2label={0: "a", 1: "b"}, vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8,
    )  # fmt: skip
    model = BertTextClassification(config)
    push(model, tmp_path / "run")
    from huggingface_hub import hf_hub_download
    from safetensors.torch import load_file

    loaded_config = ModelConfig.load(REPO)
    loaded = build_model(loaded_config.name, loaded_config)
    loaded.load_state_dict(load_file(hf_hub_download(REPO, "model.safetensors")))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_plain_model_has_no_config_to_write() -> None:
    assert model_config_writer(nn.Linear(1, 1)) is None

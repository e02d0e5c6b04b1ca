"""Adapters on the Hub: what is pushed is what peft loads, the card names the base, and a run goes on from there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, snapshot_download
from peft import PeftModel
from tiny import LAST_STEP, adapted, base, checkpoint, logits, trainer

from tests.hub.server import LoopbackHub

REPO, BASE = "tester/adapters", "someone/tiny-gpt2"


@pytest.fixture(autouse=True)
def _token(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, without_xet: None) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)


def named(name: str = BASE) -> Any:
    """Return a model with adapters whose base was loaded under a name."""
    model = adapted("gpt2")
    model.peft_config["default"].base_model_name_or_path = name
    return model


def pushed(out: Path, **changes: Any) -> Any:
    made = trainer(
        "gpt2",
        out,
        named(),
        push_to_hub=True,
        hub_model_id=REPO,
        hub_strategy="every_save",
        hub_wait_seconds=60,
        **changes,
    )
    made.train()
    assert made.hub_uploaded
    return made


def test_peft_loads_the_repository_and_the_card_names_the_base(hub: LoopbackHub, tmp_path: Path) -> None:
    made = pushed(tmp_path / "run")
    found = Path(snapshot_download(REPO))
    assert not (found / "model.safetensors").exists()
    assert not (found / "config.json").exists()
    loaded = PeftModel.from_pretrained(base("gpt2"), REPO)
    assert torch.equal(logits("gpt2", loaded), logits("gpt2", made.model))
    card = ModelCard.load(found / "README.md")
    assert (card.data.base_model, card.data.library_name) == (BASE, "peft")
    assert "lora" in (card.data.tags or [])
    assert "adapters (`LORA`)" in card.text
    assert f'base = GPT2LMHeadModel.from_pretrained("{BASE}")' in card.text
    assert f'model = PeftModel.from_pretrained(base, "{REPO}")' in card.text


def test_a_run_goes_on_from_the_repository_and_another_begins_with_its_adapters(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    made = pushed(tmp_path / "run", num_epochs=1)
    unbroken = trainer("gpt2", tmp_path / "unbroken", named())
    unbroken.train()
    shutil.rmtree(tmp_path / "run")
    again = trainer("gpt2", tmp_path / "run", named(), resume_from_checkpoint=f"hub://{REPO}")
    assert again.state.global_step == LAST_STEP // 2
    again.train()
    ends = [(checkpoint(out) / "model.safetensors").read_bytes() for out in (tmp_path / "run", tmp_path / "unbroken")]
    assert ends[0] == ends[1]
    begun = trainer("gpt2", tmp_path / "next", named(), init_weights_from=REPO)
    assert torch.equal(logits("gpt2", begun.model), logits("gpt2", made.model))


def test_a_base_in_a_folder_of_ones_own_is_no_name_on_the_card(hub: LoopbackHub, tmp_path: Path) -> None:
    base("gpt2").save_pretrained(tmp_path / "base")
    made = trainer("gpt2", tmp_path / "run", named(str(tmp_path / "base")))
    made.train()
    made.push_to_hub(REPO)
    card = ModelCard.load(REPO)
    assert card.data.base_model is None
    assert "which has no name on the Hub" in card.text
    assert str(tmp_path) not in card.text


def test_a_trained_part_without_adapters_says_how_it_is_loaded(hub: LoopbackHub, tmp_path: Path) -> None:
    model = base("gpt2").requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    made = trainer("gpt2", tmp_path / "run", model, save_trained_only=True)
    made.train()
    made.push_to_hub(REPO)
    found = Path(snapshot_download(REPO))
    assert not (found / "model.safetensors").exists()  # which would be loaded as a whole model
    assert 'load_file(hf_hub_download("tester/adapters", "trained.safetensors")), strict=False)' in (
        found / "README.md"
    ).read_text(encoding="utf-8")
    begun = trainer("gpt2", tmp_path / "next", base("gpt2"), init_weights_from=REPO)
    assert torch.equal(logits("gpt2", begun.model), logits("gpt2", made.model))

"""The command line with a run of adapters: evaluate, export, export --merge, from the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file
from tiny import adapted, base, checkpoint, logits
from transformers import GPT2LMHeadModel

from hezar_train.cli import root

RECIPE = """\
import sys

sys.path.insert(0, {tests!r})
import tiny

from hezar_train import Recipe


def build() -> Recipe:
    return Recipe(model=tiny.adapted("gpt2"), train_dataset=tiny.samples("gpt2"), eval_dataset=tiny.samples("gpt2")[:4])
"""
CONFIG = """\
trainer:
  output_dir: run
  num_epochs: 2
  batch_size: 4
  learning_rate: 0.01
  use_cpu: true
  trackers: []
"""


def invoke(*arguments: str) -> Result:
    found = CliRunner().invoke(root, arguments, catch_exceptions=False, prog_name="hezar-train")
    assert found.exit_code == 0, found.output
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that the command line has trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "recipe.py").write_text(RECIPE.format(tests=str(Path(__file__).parent)))
    (tmp_path / "lora" / "config.yaml").write_text(CONFIG)
    invoke("train", "lora")
    return tmp_path / "run"


def test_a_run_is_evaluated_exported_and_merged_from_its_folder(run: Path) -> None:
    told = json.loads(invoke("evaluate", "run", "--json").output)
    assert told["metrics"]["loss"] > 0
    invoke("export", "run", "exported", "--checkpoint", "last")
    invoke("export", "run", "merged", "--merge", "--checkpoint", "last", "--max-shard-size", "10KB")
    assert Path("merged/model.safetensors.index.json").exists()
    model = adapted("gpt2")
    stored = load_file(checkpoint(run) / "model.safetensors")
    assert not model.load_state_dict(stored, strict=False).unexpected_keys
    wanted = logits("gpt2", model)
    assert torch.equal(logits("gpt2", PeftModel.from_pretrained(base("gpt2"), "exported")), wanted)
    merged = GPT2LMHeadModel.from_pretrained("merged")
    torch.testing.assert_close(logits("gpt2", merged), wanted, rtol=1e-4, atol=1e-5)
    assert {path.name for path in Path("exported").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "base_model.json",
    }  # fmt: skip


def test_a_folder_with_files_is_not_written_into(run: Path) -> None:
    Path("full").mkdir()
    Path("full", "mine.txt").write_text("")
    found = CliRunner().invoke(root, ["export", "run", "full"], prog_name="hezar-train")
    assert found.exit_code != 0
    assert "full is not empty" in found.output

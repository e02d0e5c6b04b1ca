"""The recipe for adapters on conversations: its data, its overrides; it learns, answers and goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "recipes" / "finetune_lora"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


def _trainer(run: Path, *overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", [f"output_dir={run}", *overrides]))


def test_held_out_questions_are_never_asked_in_training(recipe: ModuleType) -> None:
    train, held_out = recipe.sample_rows()
    assert (train, held_out) == recipe.sample_rows()
    asked = {message["content"] for row in train for message in row["messages"] if message["role"] == "user"}
    answers = {message["content"] for row in train for message in row["messages"] if message["role"] == "assistant"}
    for row in held_out:
        question, answer = (message["content"] for message in row["messages"])
        assert question not in asked
        assert answer not in answers
    persian = [row for row in held_out if "؀" <= row["messages"][0]["content"][0] <= "ۿ"]
    assert 0.3 < len(persian) / len(held_out) < 0.7


def test_labels_of_the_sample_are_the_answers_alone(recipe: ModuleType) -> None:
    built = recipe.build()
    rows, _ = recipe.sample_rows()
    for row, sample in list(zip(rows, built.train_dataset, strict=True))[::97]:
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        learnt = [label for label in sample["labels"] if label != -100]
        assert built.preprocessor.decode(learnt) == "".join(f"{one}<|end|>" for one in said)


def test_a_run_holds_adapters_alone_and_learns_to_answer(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "run", "max_steps=30", "recipe.rank=8", "save_steps=30", "learning_rate=0.005")
    before = trainer.evaluate()
    after = trainer.train().metrics
    assert after["evaluation.loss"] < 0.6 * before["loss"]
    assert after["evaluation.chrf"] > before["chrf"] + 0.1
    exported = trainer.save(tmp_path / "exported")
    assert json.loads((exported / "adapter_config.json").read_text())["r"] == 8
    said = open_run(load_run(tmp_path / "run")).predict(["سلام!", "Hello!"])
    assert all(isinstance(one, str) and "user" not in one for one in said)


def _tiny(folder: Path) -> str:
    """Write a chat model whose template does not mark the answers."""
    base = FOLDER / "base"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def _conversations(folder: Path, column: str = "messages") -> str:
    folder.mkdir()
    messages = [{"role": "user", "content": "پایتخت ایران؟"}, {"role": "assistant", "content": "تهران"}]
    (folder / "train.jsonl").write_text("".join(json.dumps({column: messages}) + "\n" for _ in range(20)))
    return str(folder)


def test_any_model_and_any_dataset_come_by_one_override_each(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    overrides = [f"recipe.model={_tiny(tmp_path / 'tiny')}", f"recipe.dataset={_conversations(tmp_path / 'data')}"]
    trainer = _trainer(tmp_path / "run", *overrides, "max_steps=2")
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (16, 4)
    assert "evaluation.exact_match" in trainer.train().metrics


def test_wrong_overrides_are_refused(tmp_path: Path, recipe: ModuleType) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"recipe.model=/nowhere cannot be loaded"):
        recipe.build(model="/nowhere")
    with pytest.raises((ConfigError, DataError), match="messages_column"):
        recipe.build(dataset=_conversations(tmp_path / "data", "chat"))


class BreakOff(Hook):
    """Die in the middle of a run."""

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window and self.trainer.state.update_step == 3:
            raise RuntimeError("killed")


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    unbroken = _trainer(tmp_path / "a")
    unbroken.train()
    broken = _trainer(tmp_path / "b")
    broken.register_hooks([BreakOff()])
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    resumed = _trainer(tmp_path / "b")
    assert resumed.state.update_step == 2
    resumed.train()
    weights = resumed.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in unbroken.model.state_dict().items())

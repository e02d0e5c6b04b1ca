"""The recipe for adapters on conversations: its base, its data, its overrides; it answers, and goes on exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import CheckpointError, DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run, pretrained_by

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "recipes" / "finetune_lora"
PERSIAN = re.compile("[\u0600-\u06ff]")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def base() -> Path:
    """The model that the smoke run stands on."""
    return pretrained_by(FOLDER / "base" / "smoke.yaml")


def _trainer(run: Path, *overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER / "smoke.yaml", [f"output_dir={run}", *overrides]))


def _said(rows: Any, role: str) -> set[str]:
    return {message["content"] for row in rows for message in row["messages"] if message["role"] == role}


def test_facts_that_are_held_out_are_never_asked_about_in_either_language(recipe: ModuleType) -> None:
    train, held_out = recipe.sample_rows()
    assert recipe.sample_rows() == (train, held_out)
    assert not _said(train, "user") & _said(held_out, "user")
    facts = [line.split("\t") for line in (FOLDER / "base" / "facts.tsv").read_text().splitlines()]
    hidden = [fact for fact in facts if recipe.is_held_out("\t".join(fact))]
    assert 0.1 < len(hidden) / len(facts) < 0.3
    assert len(held_out) == len(hidden) * 2 * 3
    for kind, *texts in hidden:
        for question, answer in recipe.exchanges(kind, *texts):
            assert question not in _said(train, "user")
            assert answer in _said(held_out, "assistant")


def test_half_of_the_questions_are_persian_and_some_conversations_have_several(recipe: ModuleType) -> None:
    train, held_out = recipe.sample_rows()
    for rows in (train, held_out):
        questions = _said(rows, "user")
        assert sum(bool(PERSIAN.search(one)) for one in questions) / len(questions) == pytest.approx(0.5, abs=0.02)
    assert {len(row["messages"]) for row in train} == {2, 4, 6}
    assert {len(row["messages"]) for row in held_out} == {2}


def test_the_base_has_read_every_fact_and_no_question() -> None:
    told = import_recipe(FOLDER / "base" / "recipe.py").statements()
    facts = (FOLDER / "base" / "facts.tsv").read_text().splitlines()
    assert len(told) == len(set(told)) == len(facts) * 2 * 3
    assert not [text for text in told if "?" in text or "؟" in text]
    assert "The capital of Italy is Rome." in told
    assert "پایتخت ایتالیا رم است." in told


def test_labels_are_the_answers_alone_and_a_prompt_is_how_their_samples_begin(recipe: ModuleType, base: Path) -> None:
    built = recipe.build(model=str(base))
    rows, _ = recipe.sample_rows()
    for row, sample in list(zip(rows, built.train_dataset, strict=True))[::89]:
        learnt = [label for label in sample["labels"] if label != -100]
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert built.preprocessor.decode(learnt) == " ".join(f"{one}<|end|>" for one in said)
        mask = built.preprocessor.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )["assistant_masks"]
        assert mask == [int(label != -100) for label in sample["labels"]]
        prompt = recipe.read(row["messages"][0]["content"], built.preprocessor)["input_ids"]
        assert prompt == sample["input_ids"][: len(prompt)]
        assert sample["labels"][: len(prompt) + 1] == [-100] * len(prompt) + [sample["input_ids"][len(prompt)]]


def test_a_run_holds_adapters_alone_and_its_exports_are_loaded_by_others(tmp_path: Path, base: Path) -> None:
    trainer = _trainer(tmp_path / "run")
    trainer.train()
    saved = max(trainer.folder.checkpoints.iterdir())
    assert (saved / "model.safetensors").stat().st_size < (base / "model.safetensors").stat().st_size / 2
    run = open_run(load_run(tmp_path / "run"), "last")
    run.export(tmp_path / "adapters")
    run.export(tmp_path / "merged", merge=True)
    ids = torch.tensor([trainer.eval_dataset[0]["input_ids"]])
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        assert torch.equal(adapted.eval()(input_ids=ids).logits, expected)
        torch.testing.assert_close(merged.eval()(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert words.chat_template == trainer.preprocessor.chat_template
    said = run.predict(["پایتخت ایتالیا چیست؟", "What is the capital of Italy?"])
    assert [type(one) for one in said] == [str, str]


def _other_model(folder: Path, base: Path) -> str:
    """Write a GPT-2 with a template that does not mark the answers."""
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


def test_any_model_and_any_dataset_come_by_one_override_each(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("datasets")
    model, data = _other_model(tmp_path / "gpt2", base), _conversations(tmp_path / "data", "chat")
    options = (f"recipe.model={model}", f"recipe.dataset={data}", "recipe.messages_column=chat")
    trainer = _trainer(tmp_path / "run", *options, "max_steps=2")
    assert type(trainer.model.get_base_model()).__name__ == "GPT2LMHeadModel"
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (16, 4)
    assert "evaluation.exact_match" in trainer.train().metrics


def test_a_chat_template_is_read_from_a_file(tmp_path: Path, recipe: ModuleType, base: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    built = recipe.build(model=str(base), chat_template=str(tmp_path / "mine.jinja"))
    assert "<user>" in built.preprocessor.decode(built.train_dataset[0]["input_ids"])
    with pytest.raises(DataError, match=r"recipe.chat_template='nowhere' cannot be read: .* Name a file of Jinja"):
        recipe.build(chat_template="nowhere")


def test_a_dataset_without_messages_is_refused_before_a_base_is_trained(tmp_path: Path, recipe: ModuleType) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match=r"has no messages. Its columns: chat. Name others with recipe.messages_column"):
        recipe.build(dataset=_conversations(tmp_path / "data", "chat"), base_config="nowhere.yaml")


class BreakOff(Hook):
    """End a run as a kill would, behind an update that was not saved."""

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window and self.trainer.state.update_step == 3:
            raise KeyboardInterrupt


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    unbroken, broken = _trainer(tmp_path / "a"), _trainer(tmp_path / "b")
    unbroken.train()
    broken.register_hooks([BreakOff()])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = _trainer(tmp_path / "b")
    assert resumed.state.update_step == 2
    resumed.train()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_another_base_is_refused(tmp_path: Path, base: Path) -> None:
    _trainer(tmp_path / "run").train()
    other = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.model.norm.weight += 1
    other.save_pretrained(tmp_path / "other")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "other")
    loaded = load_run(tmp_path / "run", [f"recipe.model={tmp_path / 'other'}"])
    with pytest.raises(CheckpointError, match="base"):
        open_run(loaded)


@pytest.mark.slow
def test_held_out_questions_are_answered_as_the_readme_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = build_trainer(load_recipe("finetune_lora"))
    before = trainer.evaluate()
    after = trainer.train().metrics
    assert before["exact_match"] < 0.02
    assert after["evaluation.exact_match"] > 0.8
    assert after["evaluation.loss"] < 0.25 * before["loss"]

"""Real models of hezar and transformers, built small from their configs, without network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hezar_train import Trainer
from hezar_train.types import Mode

Build = Callable[..., Trainer]

VOCABULARY, NUM_SAMPLES, IGNORED = 50, 8, -100


def token_rows(labels: str, name: str = "token_ids", num_samples: int = NUM_SAMPLES) -> list[dict[str, Any]]:
    """Return rows of unequal lengths, with a label per row, a label per token, or the tokens as labels."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for number in range(num_samples):
        length = int(torch.randint(3, 9, (1,), generator=generator))
        tokens = torch.randint(2, VOCABULARY, (length,), generator=generator)
        of_tokens = {"tokens": tokens, "tags": tokens % 3, "class": torch.tensor(number % 3)}[labels]
        rows.append({name: tokens, "attention_mask": torch.ones(length, dtype=torch.long), "labels": of_tokens})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad everything that has a length, labels with -100."""
    batch = {}
    for key in rows[0]:
        values, fill = [row[key] for row in rows], IGNORED if key == "labels" else 0
        batch[key] = (
            nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
            if values[0].ndim
            else torch.stack(values)
        )
    return batch


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_resumes(build: Callable[..., Trainer], make_model: Callable[[], nn.Module]) -> Trainer:
    """Train two epochs in one go, and with a stop after the first; both must agree bit by bit. Return the former."""
    start = make_model()
    unbroken = build(model=copy.deepcopy(start), out="unbroken", num_epochs=2)
    result = unbroken.train()
    assert set(result.metrics) >= {"train.loss", "evaluation.loss"}
    build(model=copy.deepcopy(start), num_epochs=1).train()
    resumed = build(model=make_model(), num_epochs=2, resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert resumed.train().metrics == result.metrics
    ours, theirs = weights_of(resumed), weights_of(unbroken)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    before = start.state_dict()
    assert any(not torch.equal(before[name], theirs[name]) for name in theirs)
    return unbroken


@pytest.fixture
def tiny(toy: Build) -> Build:
    """Build trainers of two steps an epoch that train with the model's own loss."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        rows = given.pop("rows")
        settings = {"criterion": None, "learning_rate": 1e-3, "data_collator": padded, "eval_dataset": rows[:3]}
        return toy(cls, train_dataset=rows, **settings | given)

    return build


@pytest.fixture(scope="module")
def hezar() -> Any:
    return pytest.importorskip("hezar.models")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": VOCABULARY, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "n_ctx": 16, "vocab_size": VOCABULARY}
T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "vocab_size": VOCABULARY,
}  # fmt: skip


class TestHezar:
    def test_bert_text_classification(self, tiny: Build, hezar: Any) -> None:
        rows = token_rows("class")

        def make() -> nn.Module:
            model: nn.Module = hezar.BertTextClassification(hezar.BertTextClassificationConfig(num_labels=3, **BERT))
            return model

        def build(**given: Any) -> Trainer:
            return tiny(rows=rows, task="text_classification", **given)

        trainer = assert_resumes(build, make)
        assert set(trainer.evaluate()) == {"loss", "accuracy"}

    def test_bert_sequence_labeling_is_weighed_by_labels(self, tiny: Build, hezar: Any) -> None:
        rows = token_rows("tags")

        def make() -> nn.Module:
            config = hezar.BertSequenceLabelingConfig(num_labels=3, id2label={0: "O", 1: "B", 2: "I"}, **BERT)
            model: nn.Module = hezar.BertSequenceLabeling(config)
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, task="sequence_labeling", **given), make)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds

    def test_crnn_image2text(self, tiny: Build, hezar: Any) -> None:
        generator = torch.Generator().manual_seed(4)
        rows = [
            {
                "pixel_values": torch.rand(1, 32, 24, generator=generator),
                "labels": torch.randint(1, 6, (3,), generator=generator),
            }
            for _ in range(4)
        ]

        def make() -> nn.Module:
            config = hezar.CRNNImage2TextConfig(
                map2seq_in_dim=1024, map2seq_out_dim=8, rnn_dim=8, id2label={n: str(n) for n in range(6)}
            )
            model: nn.Module = hezar.CRNNImage2Text(config)
            return model

        def build(**given: Any) -> Trainer:
            return tiny(rows=rows, task="image2text", batch_size=2, optimizer="sgd", data_collator=None, **given)

        assert_resumes(build, make)

    def test_gpt2_text_generation_never_counts_the_first_token(self, tiny: Build, hezar: Any) -> None:
        rows = token_rows("tokens")

        def make() -> nn.Module:
            model: nn.Module = hezar.GPT2TextGeneration(
                hezar.GPT2TextGenerationConfig(summary_activation=None, bos_token_id=1, eos_token_id=1, **GPT2)
            )
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, task="text_generation", **given), make)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds

    def test_t5_text_generation(self, tiny: Build, hezar: Any) -> None:
        rows = token_rows("tokens")

        def make() -> nn.Module:
            model: nn.Module = hezar.T5TextGeneration(hezar.T5TextGenerationConfig(**T5))
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, task="text_generation", **given), make)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds

    def test_its_preprocessor_is_set_on_the_model_and_saved(self, tiny: Build, hezar: Any, tmp_path: Path) -> None:
        from hezar.preprocessors import TextNormalizer, TextNormalizerConfig

        model = hezar.BertTextClassification(hezar.BertTextClassificationConfig(num_labels=3, **BERT))
        normalizer = TextNormalizer(TextNormalizerConfig(nfkd=False, nfkc=True))
        trainer = tiny(rows=token_rows("class"), model=model, preprocessor=normalizer)
        trainer.train()
        assert model.preprocessor.text_normalizer is normalizer
        for folder in (trainer.save(tmp_path / "out"), tmp_path / "run/checkpoints/00000002/preprocessor"):
            (written,) = (folder / normalizer.preprocessor_subfolder).iterdir()
            assert "nfkc: true" in written.read_text()

    def test_an_export_can_be_loaded_into_a_model_of_its_config(self, tiny: Build, hezar: Any, tmp_path: Path) -> None:
        model = hezar.BertTextClassification(hezar.BertTextClassificationConfig(num_labels=3, **BERT))
        out = tiny(rows=token_rows("class"), model=model).save(tmp_path / "out")
        config = hezar.BertTextClassificationConfig.load(str(out))
        other = hezar.BertTextClassification(config)
        nn.Module.load_state_dict(other, load_file(out / "model.safetensors"))
        batch = padded(token_rows("class"))
        model.eval()
        other.eval()
        assert torch.equal(model(**batch)["logits"], other(**batch)["logits"])


class TestTransformers:
    def test_bert_classification_and_its_export(self, tiny: Build, transformers: Any, tmp_path: Path) -> None:
        rows = token_rows("class", "input_ids")

        def make() -> nn.Module:
            model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(num_labels=3, **BERT))
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, task="text_classification", **given), make)
        out = trainer.save(tmp_path / "out")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(out, local_files_only=True)
        batch = padded(rows)
        model = trainer.model.eval()
        with torch.no_grad():
            assert torch.equal(model(**batch)["logits"], loaded.eval()(**batch)["logits"])

    def test_gpt2_is_causal_without_being_told_and_its_tied_weights_stay_tied(
        self, tiny: Build, transformers: Any, tmp_path: Path
    ) -> None:
        rows = token_rows("tokens", "input_ids")

        def make() -> nn.Module:
            model: nn.Module = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(bos_token_id=1, eos_token_id=1, **GPT2)
            )
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, **given), make)
        assert trainer.batch_weight(padded(rows)) == sum(len(row["labels"]) - 1 for row in rows)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds
        assert trainer.model.lm_head.weight is trainer.model.transformer.wte.weight  # type: ignore[union-attr]
        names = set(load_file(tmp_path / "unbroken/checkpoints/00000004/model.safetensors"))
        assert len(names & {"lm_head.weight", "transformer.wte.weight"}) == 1
        loaded = transformers.GPT2LMHeadModel.from_pretrained(trainer.save(tmp_path / "out"), local_files_only=True)
        batch = padded(rows)
        with torch.no_grad():
            assert torch.equal(trainer.model.eval()(**batch)["logits"], loaded.eval()(**batch)["logits"])

    def test_t5_is_weighed_by_labels_without_being_told(self, tiny: Build, transformers: Any) -> None:
        rows = token_rows("tokens", "input_ids")

        def make() -> nn.Module:
            config = transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, **T5)
            model: nn.Module = transformers.T5ForConditionalGeneration(config)
            return model

        trainer = assert_resumes(lambda **given: tiny(rows=rows, **given), make)
        assert trainer.batch_weight(padded(rows)) == sum(len(row["labels"]) for row in rows)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds

    def test_a_token_classifier_is_weighed_by_labels_without_being_told(self, tiny: Build, transformers: Any) -> None:
        model = transformers.BertForTokenClassification(transformers.BertConfig(num_labels=3, **BERT))
        trainer = tiny(rows=token_rows("tags", "input_ids"), model=model)
        assert trainer.verify_invariance(num_samples=NUM_SAMPLES).holds


class TestCompiled:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.layers(x)
            return logits

    def test_a_compiled_model_trains_and_goes_on_uncompiled(self, toy: Build, rows: Any, tmp_path: Path) -> None:
        model = self.Net()
        plain = copy.deepcopy(model)
        trainer = toy(model=torch.compile(model, backend="eager"), max_steps=2)
        trainer.train()
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0
        names = sorted(load_file(tmp_path / "run/checkpoints/00000002/model.safetensors"))
        assert names == ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]
        again = toy(model=plain, max_steps=3, resume_from_checkpoint=True)
        assert torch.equal(plain.layers[0].weight, model.layers[0].weight)
        again.train()
        assert again.state.global_step == 3

    def test_a_plain_run_goes_on_compiled(self, toy: Build) -> None:
        first = toy(model=self.Net(), max_steps=2)
        first.train()
        model = self.Net()
        toy(model=torch.compile(model, backend="eager"), max_steps=3, resume_from_checkpoint=True)
        assert torch.equal(model.layers[0].weight, first.model.layers[0].weight)  # type: ignore[union-attr, index, arg-type]

    def test_keys_that_the_model_does_not_take_are_dropped_by_its_own_signature(self, toy: Build, rows: Any) -> None:
        data = [{**row, "id": number} for number, row in enumerate(rows())]
        trainer = toy(model=torch.compile(self.Net(), backend="eager"), train_dataset=data, max_steps=1)
        seen: list[tuple[str, ...]] = []
        trainer.hooks[Mode.TRAIN].register(lambda ctx: seen.append(tuple(ctx.batch)), "on_batch_start")
        trainer.train()
        assert seen == [("x", "labels", "id")]

"""Packed documents do not see each other and weigh what they weigh apart; models that would mix them are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Trainer, TrainerConfig
from hezar_train.data import PackingDataCollator
from hezar_train.errors import ConfigError, DataError
from hezar_train.trainer.loss_weight import label_counter

transformers = pytest.importorskip("transformers")

VOCABULARY, POSITIONS = 40, 32


def gpt2(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, **settings
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def documents(count: int = 12, longest: int = 20, seed: int = 1) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.2, -100, ids)
        found.append({"input_ids": ids, "labels": labels, "text": "left out"})
    return found


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_logits_are_those_of_each_document_alone(make: Callable[[], Any], attention: str) -> None:
    model = make().eval()
    model.set_attn_implementation(attention)
    rows = documents()
    with torch.no_grad():
        packed = model(**PackingDataCollator()(rows)).logits[0]
        apart = torch.cat([model(input_ids=row["input_ids"][None]).logits[0] for row in rows])
        seeing = model(**{**PackingDataCollator()(rows), "use_cache": True}).logits[0]
    assert torch.allclose(packed, apart, atol=1e-5)
    assert (seeing - apart).abs().max() > 1e-2  # what the cache would do to it


@pytest.mark.parametrize("make", [gpt2, llama])
def test_packed_gradients_are_those_of_the_documents_apart(make: Callable[[], Any]) -> None:
    rows, packed, apart = documents(), make(), make()
    for model in (packed, apart):
        model.double().eval()
    count = label_counter(None, packed)
    batch = PackingDataCollator()(rows)
    loss = packed(**batch).loss
    loss.backward()
    total, mean = 0.0, 0.0
    singles = [PackingDataCollator().padded([row]) for row in rows]
    units = [count(one) for one in singles]
    for one, number in zip(singles, units, strict=True):
        if number:  # a mean over no label is NaN
            part = apart(**one).loss * (number / count(batch))
            part.backward()
            mean, total = mean + float(part.detach()), total + number
    assert total == count(batch)
    assert mean == pytest.approx(float(loss.detach()), rel=1e-6)  # transformers computes it in float32
    for one, other in zip(packed.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-7)


def test_a_batch_says_where_documents_begin_and_what_is_no_label() -> None:
    rows = [{"input_ids": [5, 6, 7], "spans": [1, 2, 3], "size": 3}, {"input_ids": [8], "spans": [4], "size": 1}]
    batch = PackingDataCollator()(rows)
    assert {key: value.tolist() for key, value in batch.items() if key != "use_cache"} == {
        "input_ids": [[5, 6, 7, 8]], "labels": [[-100, 6, 7, -100]], "position_ids": [[0, 1, 2, 0]],
        "spans": [[1, 2, 3, 4]],
    }  # fmt: skip
    assert batch["use_cache"] is False
    padded = PackingDataCollator(pad_token_id=9).padded(rows)
    assert padded["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert padded["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"tokens": [1]}, "need the key 'input_ids'; they have: tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": []}, "at least one whole number"),
        ({"input_ids": [0.5]}, "at least one whole number"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "Tokenize without padding"),
    ],
)
def test_a_sample_that_cannot_be_packed_is_refused(sample: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        PackingDataCollator()([sample])


def build(folder: Path, model: Any = None, data: Any = None, **settings: Any) -> Trainer:
    given = {name: settings.pop(name) for name in ("data_collator", "eval_dataset") if name in settings}
    defaults = {"packing": True, "global_batch_tokens": 90, "max_tokens_per_batch": 40, "trackers": []}
    config = TrainerConfig(folder, **defaults | settings)
    return Trainer(config, model or gpt2(), documents(60) if data is None else data, **given)


def test_a_packed_run_learns_and_counts_every_token_once(tmp_path: Path) -> None:
    trainer = build(tmp_path, gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), optimizer="sgd", learning_rate=0.1)
    trainer.train()
    padded = build(
        tmp_path / "padded", gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), optimizer="sgd", learning_rate=0.1,
        packing=False, data_collator=PackingDataCollator().padded, max_tokens_per_batch=None,
    )  # fmt: skip
    padded.train()
    labels = sum(int((one["labels"][1:] != -100).sum()) for one in documents(60))
    assert trainer.state.loss_tracker_count == padded.state.loss_tracker_count == labels
    assert trainer.state.loss_tracker_sum == pytest.approx(padded.state.loss_tracker_sum, rel=1e-5)
    assert trainer.setup.source.fewer_rows is None
    for one, other in zip(trainer.model.parameters(), padded.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_evaluation_measures_each_document_by_itself(tmp_path: Path) -> None:
    packed = build(tmp_path, task="language_modeling", eval_dataset=documents(20), eval_batch_size=4)
    plain = build(
        tmp_path, task="language_modeling", eval_dataset=documents(20), eval_batch_size=20, packing=False,
        data_collator=PackingDataCollator().padded,
    )  # fmt: skip
    assert packed.evaluate() == pytest.approx(plain.evaluate(), rel=1e-5)
    assert len(packed.last_evaluation[""].worst_samples) == 16


class Positioned(nn.Module):
    """A model that takes position_ids and looks at the token before, whosever it is."""

    def __init__(self, *, sees: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.sees = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), sees

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        hidden = self.embedding(input_ids)
        before = hidden.roll(1, 1) * (1.0 if self.sees else (position_ids > 0)[..., None].float())
        logits = self.head(hidden + before)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])}


def test_a_model_of_ones_own_is_tried(tmp_path: Path) -> None:
    build(tmp_path, Positioned(sees=False), loss_weight="labels").train()
    with pytest.raises(ConfigError, match="with Positioned: a document in a row changed with the one before it"):
        build(tmp_path, Positioned(sees=True), loss_weight="labels")
    with pytest.raises(ConfigError, match="Set loss_weight='labels'"):
        build(tmp_path, Positioned(sees=False))


def bert(kind: str) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


def bloom() -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bert("BertForMaskedLM"), "BertForMaskedLM: each of its tokens sees all others"),
        (lambda: bert("BertForTokenClassification"), "each of its tokens sees all others"),
        (t5, "it is an encoder with a decoder"),
        (bloom, r"its forward\(\) takes no position_ids"),
        (lambda: nn.Linear(3, 3), r"its forward\(\) takes no position_ids"),
    ],
)
def test_a_model_that_cannot_be_packed_is_refused(make: Callable[[], Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        build(tmp_path, make())


def test_documents_longer_than_the_learned_positions_are_refused(tmp_path: Path) -> None:
    longer = [{"input_ids": [1] * (POSITIONS + 1)}, *documents()]
    with pytest.raises(DataError, match=r"sample 0 .* has 33 tokens, and GPT2LMHeadModel has learned 32 positions"):
        build(tmp_path, data=longer)
    build(tmp_path, llama(), data=longer)  # which computes them


def test_a_collator_that_does_not_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which does not pack"):
        build(tmp_path, data_collator=list)
    build(tmp_path, data_collator=PackingDataCollator(pad_token_id=3))


def test_samples_that_change_their_lengths_are_told(tmp_path: Path) -> None:
    rows = documents(20)
    trainer = build(tmp_path, data=rows)
    for row in rows:
        row.update(input_ids=row["input_ids"].repeat(2), labels=row["labels"].repeat(2))
    with pytest.raises(DataError, match="its samples were measured to have"):
        trainer.train()


def test_batch_normalisation_is_refused_where_a_step_may_hold_one_sample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match="the model has batch normalisation"):
        build(tmp_path, model, packing=False)

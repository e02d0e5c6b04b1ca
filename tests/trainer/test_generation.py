"""Texts: what a model generates, or its largest logits, decoded and compared; with real models built small."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hezar_train import Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.trainer.generation import collapse

Build = Callable[..., Trainer]

TEXTS = ["سلام دنیا", "کتاب‌ها روی میز", "من می‌روم خانه", "سلام خانه من", "میز و کتاب"]
IGNORED = -100


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(transformers: Any) -> Any:
    """A tokenizer of the words above."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["<pad>", "</s>", "<unk>"])
    model.train_from_iterator(TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def pairs(tokenizer: Any) -> list[dict[str, torch.Tensor]]:
    """Each text as input and as label."""
    ids = [torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id]) for text in TEXTS]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        key: nn.utils.rnn.pad_sequence(
            [row[key] for row in rows], batch_first=True, padding_value=IGNORED if key == "labels" else 0
        )
        for key in rows[0]
    }


@pytest.fixture
def t5(toy: Build, transformers: Any, tokenizer: Any, pairs: list[dict[str, torch.Tensor]]) -> Build:
    """Build a trainer of a tiny T5 that counts the calls of its `generate`."""

    def build(**given: Any) -> Trainer:
        config = transformers.T5Config(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=len(tokenizer),
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config)
        model.calls = []
        generate = model.generate

        def counted(*args: Any, **kwargs: Any) -> Any:
            model.calls.append(kwargs)
            return generate(*args, **kwargs)

        model.generate = counted
        settings = {
            "task": "text_generation", "criterion": None, "eval_batch_size": 2, "data_collator": padded,
            "preprocessor": tokenizer, "generation_kwargs": {"max_new_tokens": 4}, "learning_rate": 1e-2,
        }  # fmt: skip
        return toy(model=model, train_dataset=pairs, eval_dataset=pairs, **settings | given)

    return build


class TestT5:
    def test_it_generates_once_per_batch_with_the_configured_arguments(self, t5: Build) -> None:
        trainer = t5(metrics=["rouge", "chrf", "bleu"])
        found = trainer.evaluate()
        assert {"rouge1", "rougeL", "chrf", "bleu"} <= set(found)
        assert len(trainer.model.calls) == 3
        assert all(call["max_new_tokens"] == 4 for call in trainer.model.calls)
        assert all(set(call) == {"input_ids", "attention_mask", "max_new_tokens"} for call in trainer.model.calls)

    def test_without_generate_the_logits_are_read(self, t5: Build) -> None:
        trainer = t5(evaluate_with_generate=False)
        found = trainer.evaluate()
        assert trainer.model.calls == []
        assert set(found) == {"loss", "rouge1", "rouge2", "rougeL", "rougeLsum"}

    def test_it_learns_and_its_best_is_told_by_rouge(self, t5: Build) -> None:
        trainer = t5(num_epochs=40, batch_size=5, metric_for_best_model="rouge1", eval_steps=20)
        before = trainer.evaluate()["rouge1"]
        trainer.train()
        assert trainer.state.metric_for_best_checkpoint == "evaluation.rouge1"
        assert before < trainer.state.best_metric_value <= 1.0

    def test_results_do_not_depend_on_the_batch_size(self, t5: Build) -> None:
        found = [t5(eval_batch_size=size, metrics=["cer", "rouge"]).evaluate() for size in (1, 3, 5)]
        assert all(one == pytest.approx(found[0], rel=1e-5) for one in found[1:])

    def test_predictions_are_texts_also_without_labels(self, t5: Build, pairs: list[dict[str, torch.Tensor]]) -> None:
        trainer = t5()
        bare = [{key: value for key, value in row.items() if key != "labels"} for row in pairs]
        found = trainer.predict(bare)
        assert found == trainer.predict()
        assert len(found) == len(TEXTS)
        assert all(isinstance(text, str) for text in found)

    def test_the_worst_samples_are_shown_as_texts(self, t5: Build) -> None:
        trainer = t5()
        trainer.evaluate()
        worst = trainer.last_evaluation[""].worst_samples
        assert sorted(sample["target"] for sample in worst) == sorted(TEXTS)
        assert [sample["loss"] for sample in worst] == sorted((sample["loss"] for sample in worst), reverse=True)

    def test_text_metrics_without_a_way_to_text_are_refused(self, t5: Build) -> None:
        with pytest.raises(ConfigError, match="text metrics need a way from ids to text"):
            t5(preprocessor=None, metrics=["rouge"])

    def test_nobody_asked_for_metrics_so_the_loss_will_do(self, t5: Build) -> None:
        trainer = t5(preprocessor=None)
        assert set(trainer.evaluate()) == {"loss"}
        assert trainer.model.calls == []


class Copy(nn.Module):
    """Generate what was given: a perfect model."""

    is_generative = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(40, 40)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(input_ids)
        return logits

    def generate(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


def test_identical_persian_texts_score_one(toy: Build, tokenizer: Any, pairs: list[dict[str, torch.Tensor]]) -> None:
    trainer = toy(
        task="text_generation", model=Copy(), train_dataset=pairs, eval_dataset=pairs, data_collator=padded,
        preprocessor=tokenizer, metrics=["rouge", "bleu", "chrf", "cer", "wer"], eval_batch_size=2,
    )  # fmt: skip
    found = trainer.evaluate()
    assert (found["cer"], found["wer"]) == (0.0, 0.0)
    scores = {key: found[key] for key in ("rouge1", "rouge2", "rougeL", "rougeLsum", "chrf", "bleu")}
    assert scores == pytest.approx(dict.fromkeys(scores, 1.0))
    assert trainer.predict() == TEXTS


def test_a_decode_of_the_users_own_needs_no_preprocessor(toy: Build, pairs: list[dict[str, torch.Tensor]]) -> None:
    from hezar_train.metrics import TextHandler

    handler = TextHandler(["cer"])
    handler.decode = lambda ids: ["".join(chr(97 + max(0, number)) for number in row) for row in ids.tolist()]
    trainer = toy(
        task="text_generation", model=Copy(), train_dataset=pairs[:1], eval_dataset=pairs[:1], metrics_handler=handler
    )
    assert trainer.evaluate()["cer"] == 0.0


def test_a_handler_that_only_computes_is_given_what_was_generated(
    toy: Build, pairs: list[dict[str, torch.Tensor]]
) -> None:
    class Whole:
        def compute_metrics(self, predictions: Any, labels: Any) -> dict[str, float]:
            return {"same": float((predictions == labels).all())}

    data = [row | {"labels": row["input_ids"]} for row in pairs if len(row["input_ids"]) == 4]
    trainer = toy(
        task="text_generation", model=Copy(), train_dataset=data, eval_dataset=data, metrics_handler=Whole(),
        data_collator=padded,
    )  # fmt: skip
    assert trainer.evaluate()["same"] == 1.0


class TestHezar:
    def test_crnn_reads_texts_through_its_post_process(self, toy: Build) -> None:
        hezar = pytest.importorskip("hezar.models")
        generator = torch.Generator().manual_seed(4)
        rows = [
            {
                "pixel_values": torch.rand(1, 32, 24, generator=generator),
                "labels": torch.randint(1, 6, (3,), generator=generator),
            }
            for _ in range(4)
        ]
        names = {number: "" if number == 0 else "ابپتث"[number - 1] for number in range(6)}
        config = hezar.CRNNImage2TextConfig(map2seq_in_dim=1024, map2seq_out_dim=8, rnn_dim=8, id2label=names)
        trainer = toy(
            task="image2text", model=hezar.CRNNImage2Text(config), train_dataset=rows, eval_dataset=rows,
            eval_batch_size=3, criterion=None, optimizer="sgd", metric_for_best_model="cer",
        )  # fmt: skip
        found = trainer.train().metrics
        texts = ["".join(names[int(label)] for label in row["labels"]) for row in rows]
        worst = trainer.last_evaluation[""].worst_samples
        assert sorted(sample["target"] for sample in worst) == sorted(texts)
        assert trainer.predict() == [
            next(sample["prediction"] for sample in worst if sample["sample"] == number) for number in range(4)
        ]
        assert found["evaluation.cer"] == trainer.state.best_metric_value
        assert trainer.state.metric_for_best_checkpoint == "evaluation.cer"

    def test_t5_without_a_tokenizer_has_the_loss_only(self, toy: Build) -> None:
        hezar = pytest.importorskip("hezar.models")
        config = hezar.T5TextGenerationConfig(
            d_model=16, d_kv=8, d_ff=32, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=50
        )
        rows = [{"token_ids": torch.tensor([3, 4, 1]), "labels": torch.tensor([3, 4, 1])}] * 4
        trainer = toy(
            task="text_generation", model=hezar.T5TextGeneration(config), train_dataset=rows, eval_dataset=rows,
            criterion=None,
        )  # fmt: skip
        assert set(trainer.evaluate()) == {"loss"}


class Recorded(nn.Module):
    """A model of the CTC kind that says, frame by frame, what the batch tells it to; Hezar's put time first."""

    loss_func_name = "ctc"
    is_time_first = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(8, 8)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(8))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(frames.T if self.is_time_first else frames)
        return logits

    def compute_loss(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.mean()

    def post_process(self, ids: torch.Tensor) -> list[str]:
        return ["".join("-abcdefg"[number] for number in row if number) for row in ids.tolist()]


class BatchFirst(Recorded):
    is_time_first = False


class Unsaid(Recorded):
    loss_func_name = None  # type: ignore[assignment]


class TestCTC:
    """Frames are collapsed, labels are not; the sample's axis is found."""

    rows: ClassVar[list[dict[str, torch.Tensor]]] = [
        {"frames": torch.tensor(frames), "labels": torch.tensor(labels)}
        for frames, labels in [
            ([1, 1, 0, 1, 2, 2], [1, 1, 2]),  # aab
            ([0, 3, 3, 3, 0, 0], [3, 3, IGNORED]),  # c, where cc was said
            ([4, 0, 4, 4, 5, 0], [4, 4, 5]),  # dde
        ]
    ]

    def build(self, toy: Build, **given: Any) -> Trainer:
        rows = given.pop("rows", self.rows)
        settings = {"model": Recorded(), "task": "image2text", "criterion": None, "eval_batch_size": 3}
        return toy(train_dataset=rows, eval_dataset=rows, **settings | given)

    @pytest.mark.parametrize("model", [Recorded, BatchFirst])
    @pytest.mark.parametrize("batch_size", [1, 2, 3])
    def test_the_largest_logits_are_read_by_whichever_axis_is_time(
        self, toy: Build, model: type[Recorded], batch_size: int
    ) -> None:
        trainer = self.build(toy, model=model(), eval_batch_size=batch_size)
        found = trainer.evaluate()
        assert (found["cer"], found["wer"]) == pytest.approx((1 / 8, 1 / 3))
        assert trainer.predict() == ["aab", "c", "dde"]
        worst = trainer.last_evaluation[""].worst_samples[0]
        assert (worst["sample"], worst["prediction"], worst["target"]) == (1, "c", "cc")

    @pytest.mark.parametrize("batch_size", [1, 3, 5])
    def test_the_first_texts_are_kept_as_examples(self, toy: Build, batch_size: int) -> None:
        trainer = self.build(toy, rows=self.rows * 4, eval_batch_size=batch_size)
        trainer.evaluate()
        pairs = [("aab", "aab"), ("c", "cc"), ("dde", "dde")] * 3
        wanted = [{"sample": n, "prediction": said, "target": right} for n, (said, right) in enumerate(pairs[:8])]
        assert trainer.last_evaluation[""].examples == wanted

    def test_as_many_frames_as_samples_are_read_as_the_loss_takes_them(self, toy: Build) -> None:
        trainer = self.build(toy, rows=self.rows * 2, eval_batch_size=6)
        assert trainer.evaluate()["cer"] == pytest.approx(1 / 8)

    def test_time_first_without_a_word_about_ctc_is_refused(self, toy: Build) -> None:
        with pytest.raises(DataError, match=r"logits of shape \(6, 3, 8\) gave 6 texts for 3 labels.*config\.blank_id"):
            self.build(toy, model=Unsaid()).evaluate()

    def test_without_labels_a_prediction_too_many_is_refused(self, toy: Build) -> None:
        bare = [{"frames": row["frames"]} for row in self.rows]
        assert self.build(toy).predict(bare) == ["aab", "c", "dde"]
        with pytest.raises(DataError, match="there are 6 predictions for 3 samples"):
            self.build(toy, model=Unsaid()).predict(bare)

    def test_a_ctc_tokenizer_leaves_double_letters_in_labels_and_between_blanks(self, toy: Build, letters: Any) -> None:
        model = BatchFirst()
        model.loss_func_name = None  # type: ignore[assignment]  # the tokenizer says it
        trainer = self.build(toy, model=model, task="speech_recognition", preprocessor=letters)
        assert trainer.evaluate()["cer"] == pytest.approx(1 / 8)
        assert trainer.predict() == ["aab", "c", "dde"]
        assert sorted(one["target"] for one in trainer.last_evaluation[""].worst_samples) == ["aab", "cc", "dde"]

    def test_wav2vec2_is_evaluated_and_trained(self, toy: Build, transformers: Any, letters: Any) -> None:
        config = transformers.Wav2Vec2Config(
            vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, pad_token_id=0, ctc_loss_reduction="mean",
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        rows = [{"input_values": torch.randn(400, generator=generator), "labels": row["labels"]} for row in self.rows]
        trainer = self.build(
            toy, rows=rows, model=transformers.Wav2Vec2ForCTC(config), task="speech_recognition", preprocessor=letters,
            metric_for_best_model="cer",
        )  # fmt: skip
        metrics = trainer.train().metrics
        assert trainer.state.best_metric_value == metrics["evaluation.cer"]
        assert sorted(one["target"] for one in trainer.last_evaluation[""].worst_samples) == ["aab", "cc", "dde"]

    @pytest.fixture
    def letters(self, transformers: Any, tmp_path: Path) -> Any:
        """A tokenizer of Wav2Vec2, whose blank is its padding."""
        vocabulary = tmp_path / "letters.json"
        vocabulary.write_text(json.dumps({name: n for n, name in enumerate(["<pad>", *"abcde", "<unk>", "|"])}))
        return transformers.Wav2Vec2CTCTokenizer(str(vocabulary), bos_token=None, eos_token=None)

    def test_hezars_crnn_reads_the_same_with_and_without_generate(self, toy: Build) -> None:
        hezar = pytest.importorskip("hezar.models")
        generator = torch.Generator().manual_seed(4)
        rows = [
            {"pixel_values": torch.rand(1, 32, 24, generator=generator), "labels": torch.tensor([1, 1, 2])}
            for _ in range(4)
        ]
        names = {number: "" if number == 0 else "ابپتث"[number - 1] for number in range(6)}
        torch.manual_seed(2)
        model = hezar.CRNNImage2Text(
            hezar.CRNNImage2TextConfig(map2seq_in_dim=1024, map2seq_out_dim=8, rnn_dim=8, id2label=names)
        )
        with torch.no_grad():
            model.classifier.weight.mul_(50)  # else every frame says the same
        ours, theirs = (
            self.build(toy, rows=rows, model=model, out=f"run{way}", evaluate_with_generate=way)
            for way in (False, True)
        )
        assert ours.evaluate() == theirs.evaluate()
        assert ours.predict() == theirs.predict()
        assert any(ours.predict())

    @settings(deadline=None)
    @given(st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=4))
    def test_collapsed_frames_are_the_runs_without_blanks(self, rows: list[list[int]]) -> None:
        found = collapse(torch.tensor(rows), blank=0).tolist()
        runs = [[symbol for symbol, _ in groupby(row) if symbol] for row in rows]
        assert found == [run + [0] * (7 - len(run)) for run in runs]


def test_bert_classification_is_evaluated_and_predicts(toy: Build, transformers: Any) -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        max_position_embeddings=16, num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"},
    )  # fmt: skip
    rows = [{"input_ids": torch.tensor([2, 3, number]), "labels": torch.tensor(number % 3)} for number in range(9)]
    trainer = toy(
        task="text_classification", criterion=None, model=transformers.BertForSequenceClassification(config),
        train_dataset=rows, eval_dataset=rows, metrics=["accuracy", "f1"], metric_for_best_model="f1", num_epochs=2,
    )  # fmt: skip
    found = trainer.train().metrics
    predicted = trainer.predict()
    right = [guess == row["labels"] for guess, row in zip(predicted, rows, strict=True)]
    assert found["evaluation.accuracy"] == pytest.approx(sum(map(bool, right)) / 9)
    (matrix,) = (table for table in trainer.last_evaluation[""].tables if table["name"] == "confusion_matrix")
    assert matrix["rows"] == ["bad", "fair", "good"]


def test_names_that_nobody_gave_are_none(transformers: Any) -> None:
    from hezar_train.trainer.generation import label_names_of

    model = nn.Module()
    model.config = transformers.BertConfig(num_labels=3)
    assert label_names_of(model) is None
    model.config = SimpleNamespace(id2label={"0": "no", "1": "yes"})
    assert label_names_of(model) == {0: "no", 1: "yes"}


def test_a_crnn_of_hezar_is_evaluated_by_generate_in_bf16(toy: Build) -> None:
    models = pytest.importorskip("hezar.models")
    generator = torch.Generator().manual_seed(4)
    rows = [
        {"pixel_values": torch.rand(1, 32, 24, generator=generator), "labels": torch.tensor([1, 2, 3])}
        for _ in range(3)
    ]
    torch.manual_seed(0)
    config = models.CRNNImage2TextConfig(
        map2seq_in_dim=1024, map2seq_out_dim=8, rnn_dim=8, id2label={number: str(number) for number in range(6)}
    )
    model = models.CRNNImage2Text(config)
    shared = {
        "model": model, "train_dataset": rows, "eval_dataset": rows, "task": "image2text", "metrics": ["cer"],
        "criterion": None, "batch_size": 2,
    }  # fmt: skip
    half = toy(mixed_precision="bf16", **shared).evaluate()
    full = toy(out="full", **shared).evaluate()
    assert half["cer"] == full["cer"]  # generation is in full precision, the loss is not
    assert half["loss"] == pytest.approx(full["loss"], rel=0.05)


def _conversation(tokenizer: Any, count: int) -> dict[str, list[int]]:
    """Return a sample of so many words that are asked, and an answer of two."""
    ids = (tokenizer.encode(" ".join(TEXTS)) * 2)[: count + 2]
    return {"input_ids": ids, "labels": [IGNORED] * count + ids[count:]}


def test_a_decoder_is_asked_without_the_answer_and_its_new_tokens_alone_are_compared(
    transformers: Any, tokenizer: Any
) -> None:
    from hezar_train.data import PackingDataCollator
    from hezar_train.trainer.generation import generator_of

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    samples = [_conversation(tokenizer, count) for count in (3, 6)]
    generate = generator_of(model, {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False})
    written = generate(PackingDataCollator().padded(samples))
    for row, count, sample in zip(written, (3, 6), samples, strict=True):
        prompt = torch.tensor([sample["input_ids"][:count]])
        alone = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4,
                               min_new_tokens=4, do_sample=False)  # fmt: skip
        assert row.tolist() == alone[0, count:].tolist()
    two = {"input_ids": samples[0]["input_ids"] * 2, "labels": samples[0]["labels"] * 2}
    with pytest.raises(DataError, match=r"several answers; expected one.*answers='last'"):
        generate(PackingDataCollator().padded([two]))

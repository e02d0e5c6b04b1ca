"""Cutting a batch into micro-batches changes neither gradient nor logged loss, whatever the loss is a mean of."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hezar_train import Trainer
from hezar_train.errors import DataError
from hezar_train.types import Mode

Build = Callable[..., Trainer]

NUM_SAMPLES, VOCABULARY, NUM_TAGS = 24, 11, 5
IGNORED = -100

# batch_size x gradient_accumulation_steps; 5 x 5 cuts 24 samples as 5 + 5 + 5 + 5 + 4
FACTORINGS = [(24, 1), (12, 2), (8, 3), (6, 4), (4, 6), (3, 8), (2, 12), (1, 24), (5, 5)]


class Tagger(nn.Module):
    """A label for each token, from the token and the mean of its sentence; padding has no influence."""

    def __init__(self, outputs: int = NUM_TAGS) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.layer = nn.Linear(16, outputs)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.embedding(tokens)
        weights = mask.unsqueeze(-1).float()
        sentence = (vectors * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        return {"logits": self.layer(torch.cat([vectors, sentence.expand_as(vectors)], dim=-1))}


def sentences(num_samples: int = NUM_SAMPLES, unlabelled: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return sentences of 1 to 9 tokens; some tokens have no label, and those of `unlabelled` samples have none."""
    generator = torch.Generator().manual_seed(8)
    samples = []
    for number in range(num_samples):
        length = int(torch.randint(1, 10, (1,), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = torch.randint(0, NUM_TAGS, (length,), generator=generator)
        labels[torch.rand(length, generator=generator) < 0.2] = IGNORED
        labels = torch.full_like(labels, IGNORED) if number in unlabelled else labels
        samples.append({"tokens": tokens, "labels": labels, "mask": torch.ones(length, dtype=torch.long)})
    return samples


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest of the batch, so that the cut decides how much padding there is."""
    fills = {"tokens": 0, "labels": IGNORED, "mask": 0}
    return {
        key: nn.utils.rnn.pad_sequence([sample[key] for sample in samples], batch_first=True, padding_value=fill)
        for key, fill in fills.items()
    }


@pytest.fixture
def tagging(toy: Build) -> Build:
    """Build a trainer of the tagger: one update over all samples."""

    def build(cls: type[Trainer] = Trainer, **changes: Any) -> Trainer:
        given: dict[str, Any] = {
            "model": Tagger(), "train_dataset": sentences(), "data_collator": padded, "optimizer": "sgd",
            "batch_size": NUM_SAMPLES, "loss_weight": "labels", "save_enabled": False,
        }  # fmt: skip
        return toy(cls, **given | changes)

    return build


def one_update(trainer: Trainer) -> tuple[float, list[torch.Tensor]]:
    """Train; return the logged loss and the gradients of the only update."""
    found: list[list[torch.Tensor]] = []
    parameters = list(trainer.model.parameters())
    trainer.hooks[Mode.TRAIN].register(
        lambda _: found.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]),
        "on_update", name="capture", before="clip",
    )  # fmt: skip
    loss = trainer.train().metrics["train.loss"]
    (gradients,) = found
    return loss, gradients


def assert_equal_updates(build: Callable[[int, int], Trainer]) -> None:
    """Hold every factoring of the batch against the whole."""
    loss, gradients = one_update(build(NUM_SAMPLES, 1))
    size = max(float(gradient.abs().max()) for gradient in gradients)
    assert size > 1e-3
    for batch_size, accumulation in FACTORINGS[1:]:
        other_loss, others = one_update(build(batch_size, accumulation))
        off = max(float((a - b).abs().max()) for a, b in zip(gradients, others, strict=True))
        assert off / size <= 1e-5, (batch_size, accumulation)
        assert other_loss == pytest.approx(loss, rel=1e-6), (batch_size, accumulation)


class TestEveryFactoring:
    def test_of_padded_sequences_with_a_loss_over_labels(self, tagging: Build) -> None:
        assert_equal_updates(
            lambda size, steps: tagging(out=f"{size}", batch_size=size, gradient_accumulation_steps=steps)
        )

    def test_the_sum_over_labels_is_what_the_whole_batch_gives(self, tagging: Build) -> None:
        model, batch = Tagger(), padded(sentences())
        functional.cross_entropy(
            model(batch["tokens"], batch["mask"])["logits"].flatten(0, 1), batch["labels"].flatten()
        ).backward()
        _, gradients = one_update(tagging(batch_size=5, gradient_accumulation_steps=5))
        for mine, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)

    def test_of_samples_with_a_loss_over_samples(self, toy: Build, rows: Any) -> None:
        assert_equal_updates(
            lambda size, steps: toy(
                out=f"{size}", train_dataset=rows(NUM_SAMPLES), optimizer="sgd", batch_size=size,
                gradient_accumulation_steps=steps, save_enabled=False,
            )
        )  # fmt: skip

    def test_where_some_micro_batches_have_no_label_at_all(self, tagging: Build) -> None:
        data = sentences(unlabelled=(0, 1, 2, 3, 4, 5, 9, 20))
        assert_equal_updates(
            lambda size, steps: tagging(
                out=f"{size}", train_dataset=data, batch_size=size, gradient_accumulation_steps=steps,
                dataloader_shuffle=False,
            )
        )  # fmt: skip

    def test_of_a_causal_model_that_never_predicts_the_first_token(self, tagging: Build) -> None:
        class Causal(Tagger):
            def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

        assert_equal_updates(
            lambda size, steps: tagging(
                out=f"{size}", model=Causal(), batch_size=size, gradient_accumulation_steps=steps,
                task="language_modeling", loss_weight=None, criterion=None,
            )
        )  # fmt: skip

    def test_of_an_encoder_decoder_that_says_so_in_its_config(self, tagging: Build) -> None:
        def build(size: int, steps: int) -> Trainer:
            model = Tagger()
            model.config = SimpleNamespace(is_encoder_decoder=True)  # type: ignore[assignment]
            return tagging(
                out=f"{size}", model=model, batch_size=size, gradient_accumulation_steps=steps, loss_weight=None
            )

        assert_equal_updates(build)

    def test_of_a_loss_whose_units_an_override_counts(self, tagging: Build) -> None:
        class Pairs(Trainer):
            """The loss is a mean over pairs of neighbours that both have a label."""

            @staticmethod
            def pairs(labels: torch.Tensor) -> torch.Tensor:
                return (labels[:, 1:] != IGNORED) & (labels[:, :-1] != IGNORED)

            def batch_weight(self, batch: Any) -> float:
                return float(self.pairs(batch["labels"]).sum())

            def compute_loss(self, model_outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
                logits = model_outputs["logits"]
                return (logits[:, 1:] - logits[:, :-1]).square().mean(-1)[self.pairs(labels)].mean()

        assert_equal_updates(
            lambda size, steps: tagging(
                Pairs, out=f"{size}", batch_size=size, gradient_accumulation_steps=steps, loss_weight=None
            )
        )


class TestUnits:
    """What a batch weighs by default, by task and model."""

    batch: dict[str, torch.Tensor]

    @pytest.fixture(autouse=True)
    def make_batch(self) -> None:
        self.batch = padded(sentences())
        labels = self.batch["labels"]
        self.num_labels, self.num_shifted = int((labels != IGNORED).sum()), int((labels[:, 1:] != IGNORED).sum())
        assert NUM_SAMPLES < self.num_shifted < self.num_labels

    @pytest.mark.parametrize("task", ["sequence_labeling", "mask_filling", "text_generation"])
    def test_labels_are_counted_for_these_tasks(self, tagging: Build, task: str) -> None:
        assert tagging(task=task, loss_weight=None).batch_weight(self.batch) == self.num_labels

    def test_labels_but_the_first_are_counted_for_causal_language_modelling(self, tagging: Build) -> None:
        assert tagging(task="language_modeling", loss_weight=None).batch_weight(self.batch) == self.num_shifted

    @pytest.mark.parametrize(("is_encoder_decoder", "shifts"), [(True, False), (False, True)])
    def test_text_generation_follows_the_models_config(
        self, tagging: Build, is_encoder_decoder: bool, shifts: bool
    ) -> None:
        model = Tagger()
        model.config = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)  # type: ignore[assignment]
        weight = tagging(task="text_generation", model=model, loss_weight=None).batch_weight(self.batch)
        assert weight == (self.num_shifted if shifts else self.num_labels)

    @pytest.mark.parametrize("task", [None, "text_classification", "image2text", "speech_recognition", "regression"])
    def test_samples_are_counted_otherwise(self, tagging: Build, task: str | None) -> None:
        assert tagging(task=task, loss_weight=None).batch_weight(self.batch) == NUM_SAMPLES

    def test_the_config_has_the_last_word(self, tagging: Build) -> None:
        assert tagging(task="sequence_labeling", loss_weight="samples").batch_weight(self.batch) == NUM_SAMPLES
        assert tagging(task="text_classification", loss_weight="labels").batch_weight(self.batch) == self.num_labels

    def test_a_loss_over_labels_without_labels_is_told(self, tagging: Build) -> None:
        with pytest.raises(DataError, match="the batch has no tensor 'labels'"):
            tagging().batch_weight({"tokens": torch.ones(2, 2)})


class TestShortWindows:
    """An epoch whose length is no multiple of the window."""

    def weights(self, trainer: Trainer) -> torch.Tensor:
        trainer.train()
        return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])

    @pytest.mark.parametrize("num_rows", [16, 17, 18, 19])
    def test_four_single_samples_are_one_batch_of_four(self, toy: Build, rows: Any, num_rows: int) -> None:
        given = {"train_dataset": rows(num_rows), "optimizer": "sgd", "num_epochs": 3, "save_enabled": False}
        cut = toy(out="cut", batch_size=1, gradient_accumulation_steps=4, **given)
        whole = toy(out="whole", batch_size=4, **given)
        torch.testing.assert_close(self.weights(cut), self.weights(whole), rtol=1e-6, atol=1e-6)
        assert cut.state.update_step == whole.state.update_step
        assert cut.state.loss_tracker_avg == pytest.approx(whole.state.loss_tracker_avg, rel=1e-6)

    def test_the_logged_loss_is_the_mean_over_samples(self, toy: Build, rows: Any, classifier: Any) -> None:
        data = rows(18)
        trainer = toy(train_dataset=data, learning_rate=0.0, gradient_accumulation_steps=3)
        points, labels = torch.stack([r["x"] for r in data]), torch.tensor([r["labels"] for r in data])
        expected = functional.cross_entropy(classifier()(points), labels).item()
        assert trainer.train().metrics["train.loss"] == pytest.approx(expected, rel=1e-6)

    def test_max_steps_may_shorten_a_window_without_weakening_it(self, toy: Build) -> None:
        given = {"optimizer": "sgd", "save_enabled": False, "dataloader_shuffle": False}
        cut = toy(out="cut", gradient_accumulation_steps=5, max_steps=2, **given)
        whole = toy(out="whole", batch_size=8, max_steps=1, **given)
        torch.testing.assert_close(self.weights(cut), self.weights(whole), rtol=1e-6, atol=1e-6)
        assert (cut.state.global_step, cut.state.update_step) == (2, 1)

    def test_a_window_without_any_unit_leaves_the_weights_and_the_mean_alone(self, tagging: Build) -> None:
        unlabelled = tuple(range(12, 24))
        trainer = tagging(train_dataset=sentences(unlabelled=unlabelled), batch_size=12, dataloader_shuffle=False)
        alone = tagging(train_dataset=sentences()[:12], batch_size=12, dataloader_shuffle=False, out="alone")
        assert torch.equal(self.weights(trainer), self.weights(alone))
        assert trainer.state.loss_tracker_avg == alone.state.loss_tracker_avg
        assert (trainer.state.update_step, alone.state.update_step) == (2, 1)

    def test_clipping_sees_the_gradient_of_the_whole_window(self, toy: Build) -> None:
        given = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.01, "save_enabled": False}
        cut = toy(out="cut", batch_size=4, gradient_accumulation_steps=5, **given)
        whole = toy(out="whole", batch_size=20, **given)
        before = torch.cat([parameter.detach().flatten().clone() for parameter in cut.model.parameters()])
        torch.testing.assert_close(self.weights(cut), self.weights(whole), rtol=1e-6, atol=1e-6)
        moved = torch.cat([parameter.detach().flatten() for parameter in cut.model.parameters()]) - before
        assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def _tokens(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)


class TestVerifyInvariance:
    RIGHT: tuple[Any, ...] = (
        ("labels", _tokens),
        ("samples", lambda logits, labels: logits[:, 0].square().mean()),
    )
    WRONG: tuple[Any, ...] = (
        ("labels", lambda logits, labels: _tokens(logits, labels, "sum")),
        ("labels", lambda logits, labels: _tokens(logits, labels, "sum") / labels.numel()),  # over padding too
        ("samples", _tokens),  # a mean over labels, weighed by samples
        ("labels", lambda logits, labels: logits[:, 0].square().mean()),  # a mean over samples, weighed by labels
        ("labels", lambda logits, labels: _tokens(logits, labels, "sum") / 24),
        ("labels", lambda logits, labels: _tokens(logits / logits.detach().abs().max(), labels)),
        ("samples", lambda logits, labels: (logits[:, 0] - logits[:, 0].mean(0)).square().mean()),
        ("labels", lambda logits, labels: _tokens(logits, labels).sqrt()),
    )

    def report(self, tagging: Build, loss_weight: str, loss: Any, **given: Any) -> Any:
        class Own(Trainer):
            def compute_loss(self, model_outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
                found: torch.Tensor = loss(model_outputs["logits"], labels)
                return found

        return tagging(Own, loss_weight=loss_weight, batch_size=4, **given).verify_invariance()

    @pytest.mark.parametrize(("loss_weight", "loss"), RIGHT)
    def test_a_right_loss_holds(self, tagging: Build, loss_weight: str, loss: Any) -> None:
        report = self.report(tagging, loss_weight, loss)
        assert report.holds
        assert "8 ways to cut 24 samples agree" in str(report)

    @pytest.mark.parametrize(("loss_weight", "loss"), WRONG)
    def test_a_wrong_loss_is_found(self, tagging: Build, loss_weight: str, loss: Any) -> None:
        report = self.report(tagging, loss_weight, loss)
        assert not report.holds
        assert "changes the result" in str(report)
        assert "loss_weight='labels'" in str(report)

    def test_it_looks_at_equal_cuts_and_an_uneven_one(self, tagging: Build) -> None:
        cuts = [factoring.sizes for factoring in tagging().verify_invariance().factorings]
        assert cuts == [
            (12, 12), (8, 8, 8), (6,) * 4, (4,) * 6, (3,) * 8, (2,) * 12, (1,) * 24, (5, 5, 5, 5, 4),
        ]  # fmt: skip

    def test_it_leaves_the_trainer_as_it_was(self, tagging: Build) -> None:
        trainer = tagging()
        before = [parameter.clone() for parameter in trainer.model.parameters()]
        trainer.model.layer.eval()  # type: ignore[union-attr, operator]
        random = torch.get_rng_state()
        trainer.verify_invariance()
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        assert (trainer.model.training, trainer.model.layer.training) == (True, False)  # type: ignore[union-attr]
        assert torch.equal(torch.get_rng_state(), random)
        assert trainer.state.global_step == 0

    def test_dropout_and_batch_statistics_do_not_disturb_it(self, toy: Build) -> None:
        class Noisy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = self.layers(x)
                return logits

        assert toy(model=Noisy()).verify_invariance(num_samples=12).holds

    @pytest.mark.parametrize("num_rows", [0, 1])
    def test_it_needs_two_samples(self, toy: Build, rows: Any, num_rows: int) -> None:
        with pytest.raises(DataError, match="at least two samples"):
            toy(train_dataset=rows(1)).verify_invariance(num_samples=2 * num_rows)

    def test_it_refuses_a_stream_also_one_with_a_length(self, toy: Build, rows: Any) -> None:
        class Stream(torch.utils.data.IterableDataset[Any]):
            def __len__(self) -> int:
                return 20

            def __iter__(self) -> Any:
                return iter(rows())

        with pytest.raises(DataError, match="needs a training dataset with a length"):
            toy(train_dataset=Stream(), max_steps=3).verify_invariance()

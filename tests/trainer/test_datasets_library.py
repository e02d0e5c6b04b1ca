"""Data of the `datasets` library: plain, with a transform, and as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")

Build = Callable[..., Trainer]


@pytest.fixture
def table(rows: Any) -> Any:
    """Return the toy's rows as a Dataset of Arrow columns, with a number for each row."""
    found = rows()
    columns = {
        "x": [row["x"].tolist() for row in found],
        "labels": [row["labels"] for row in found],
        "id": list(range(len(found))),
    }
    return datasets.Dataset.from_dict(columns)


class Seen(Hook):
    """Note which rows came, and their first number."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.firsts: list[float] = []

    def on_batch_forward(self, ctx: Any) -> None:
        self.ids += ctx.batch["id"].tolist()
        self.firsts += ctx.batch["x"][:, 0].tolist()


def weights_of(trainer: Trainer) -> list[float]:
    return [value for parameter in trainer.model.parameters() for value in parameter.flatten().tolist()]


class TestDataset:
    def test_it_trains_as_the_same_rows_in_a_list_do(self, toy: Build, table: Any) -> None:
        one, other = toy(train_dataset=table, num_epochs=2), toy(out="list", num_epochs=2)
        one.train()
        other.train()
        assert weights_of(one) == weights_of(other)

    def test_it_is_fetched_a_batch_at_a_time(self, toy: Build, table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        fetch = type(table).__getitems__

        def counting(self: Any, keys: list[int]) -> Any:
            sizes.append(len(keys))
            return fetch(self, keys)

        monkeypatch.setattr(type(table), "__getitems__", counting)
        toy(train_dataset=table).train()
        assert sizes == [4] * 5

    def test_its_rows_need_no_seed_each_but_those_with_a_transform_do(
        self, toy: Build, table: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seeded: list[int] = []
        from hezar_train.data import loader

        monkeypatch.setattr(loader, "seed_python_numpy_torch", seeded.append)
        toy(train_dataset=table).train()
        assert len(seeded) <= 5  # at most one for the collator of each batch
        seeded.clear()
        toy(train_dataset=table.with_transform(_as_tensors), out="transformed").train()
        assert len(seeded) == 20

    @pytest.mark.parametrize("format_name", ["torch", "numpy"])
    def test_its_formats_give_the_same_run(self, toy: Build, table: Any, format_name: str) -> None:
        one, other = toy(train_dataset=table.with_format(format_name)), toy(out="list")
        one.train()
        other.train()
        assert weights_of(one) == pytest.approx(weights_of(other), rel=1e-6)

    def test_every_row_comes_once_an_epoch_in_another_order_each_time(self, toy: Build, table: Any) -> None:
        seen = Seen()
        toy(train_dataset=table, num_epochs=2, hooks=[seen]).train()
        first, second = seen.ids[:20], seen.ids[20:]
        assert sorted(first) == sorted(second) == list(range(20))
        assert first != second

    def test_the_key_label_is_understood_too(self, toy: Build, table: Any) -> None:
        renamed = table.rename_column("labels", "label")
        trainer = toy(task="text_classification", train_dataset=renamed, eval_dataset=renamed)
        assert set(trainer.train().metrics) == {"train.loss", "evaluation.loss", "evaluation.accuracy"}

    def test_a_selection_of_rows_trains(self, toy: Build, table: Any) -> None:
        seen = Seen()
        toy(train_dataset=table.select([3, 5, 7, 9]), hooks=[seen]).train()
        assert sorted(seen.ids) == [3, 5, 7, 9]


def _as_tensors(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """Transform as users do: tensors, and noise from torch's global generator."""
    points = torch.tensor(batch["x"])
    return {**batch, "x": points + torch.randn(points.shape), "labels": torch.tensor(batch["labels"])}


class TestTransform:
    def test_what_it_draws_does_not_depend_on_when_a_row_is_read(self, toy: Build, table: Any) -> None:
        noisy = table.with_transform(_as_tensors)
        seen = [Seen(), Seen()]
        toy(train_dataset=noisy, hooks=[seen[0]], out="one").train()
        toy(train_dataset=noisy, hooks=[seen[1]], out="other", batch_size=5).train()
        assert dict(zip(seen[0].ids, seen[0].firsts, strict=True)) == dict(
            zip(seen[1].ids, seen[1].firsts, strict=True)
        )

    def test_a_resumed_run_draws_the_same(self, toy: Build, table: Any) -> None:
        noisy = table.with_transform(_as_tensors)
        unbroken = toy(train_dataset=noisy, num_epochs=2, out="unbroken")
        unbroken.train()
        toy(train_dataset=noisy, num_epochs=1).train()
        resumed = toy(train_dataset=noisy, num_epochs=2, resume_from_checkpoint=True)
        resumed.train()
        assert weights_of(resumed) == weights_of(unbroken)


class TestStream:
    def test_it_needs_max_steps(self, toy: Build, table: Any) -> None:
        with pytest.raises((ConfigError, DataError), match="max_steps"):
            toy(train_dataset=table.to_iterable_dataset())

    def test_it_trains_in_its_own_order_epoch_after_epoch(self, toy: Build, table: Any) -> None:
        seen = Seen()
        toy(train_dataset=table.to_iterable_dataset(), hooks=[seen], max_steps=7, num_epochs=2).train()
        assert seen.ids == [*range(20), *range(8)]

    def test_it_goes_on_in_the_middle_of_an_epoch_through_its_own_state(self, toy: Build, table: Any) -> None:
        def stream() -> Any:
            return table.to_iterable_dataset(num_shards=2)

        unbroken_ids, first_ids, second_ids = Seen(), Seen(), Seen()
        unbroken = toy(train_dataset=stream(), hooks=[unbroken_ids], max_steps=9, num_epochs=2, out="unbroken")
        unbroken.train()
        toy(train_dataset=stream(), hooks=[first_ids], max_steps=3, num_epochs=2).train()
        resumed = toy(
            train_dataset=stream(), hooks=[second_ids], max_steps=9, num_epochs=2, resume_from_checkpoint=True
        )
        assert resumed.state.global_step == 3
        resumed.train()
        assert first_ids.ids + second_ids.ids == unbroken_ids.ids
        assert weights_of(resumed) == weights_of(unbroken)

    def test_a_shuffle_buffer_cannot_be_resumed_and_says_why(self, toy: Build, table: Any) -> None:
        def stream() -> Any:
            return table.to_iterable_dataset().shuffle(seed=3, buffer_size=8)

        toy(train_dataset=stream(), max_steps=3, num_epochs=2).train()
        with pytest.raises(DataError, match=r"cannot resume in the middle of an epoch.*shuffle buffer"):
            toy(train_dataset=stream(), max_steps=9, num_epochs=2, resume_from_checkpoint=True)

    def test_it_may_be_evaluated_on(self, toy: Build, table: Any) -> None:
        on_stream = toy(eval_dataset=table.to_iterable_dataset()).evaluate()
        assert on_stream == toy(eval_dataset=table).evaluate()

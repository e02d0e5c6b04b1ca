"""What an evaluation's record keeps of its samples: pictures, texts, names of classes, what was written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hezar_train import Trainer
from hezar_train.trainer.report_samples import SampleLooks, is_cheap_to_fetch, picture_of, png

Build = Callable[..., Trainer]
CLASSES = ["cat", "dog", "owl"]


class Pictures:
    """Pictures of 8 x 12 pixels that look different at every reading, as augmented ones do."""

    def __init__(self, count: int = 20) -> None:
        self.count, self.num_reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_reads += 1
        return {"pixel_values": index + torch.rand(1, 8, 12) + np.random.rand(), "labels": index % 3}


class Looker(nn.Module):
    """A linear classifier of pictures with dropout, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(id2label=dict(enumerate(CLASSES)))
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, 3))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(pixel_values)
        return logits


class InItsOwnOrder(Trainer):
    """What it evaluates on comes by a loader of its own, so a sample's number says nothing."""

    def create_eval_dataloader(self, dataset: Any) -> Any:
        return super().create_eval_dataloader(dataset)


@pytest.fixture
def looked(toy: Build) -> Build:
    def build(**given: Any) -> Trainer:
        settings = {"model": Looker(), "task": "image_classification", "num_epochs": 3, "learning_rate": 0.001}
        return toy(**{**settings, "train_dataset": Pictures(), "eval_dataset": Pictures(), **given})

    return build


def record_of(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / f"evaluations/{step:08d}.json").read_text())
    return found


@pytest.mark.parametrize("channels", [1, 3])
def test_a_written_picture_reads_back_pixel_by_pixel(channels: int) -> None:
    pixels = torch.randint(0, 256, (channels, 7, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    read = np.asarray(Image.open(io.BytesIO(png(pixels))))
    assert np.array_equal(read.reshape(7, 11, channels), pixels.permute(1, 2, 0).numpy())


def test_values_are_stretched_and_a_large_picture_is_made_small() -> None:
    found = picture_of((torch.linspace(-3, 5, 700 * 8).reshape(1, 8, 700), 1))
    assert found is not None
    pixels = np.asarray(Image.open(io.BytesIO(found)))
    assert pixels.shape == (3, 234)
    assert (pixels.min(), pixels.max() > 240) == (0, True)


@pytest.mark.parametrize("sample", [torch.zeros(5), (torch.zeros(2, 9, 9), 1), {"x": torch.zeros(9, 9)}, "text", (), 3])
def test_what_is_no_picture_is_left_alone(sample: Any) -> None:
    assert picture_of(sample) is None


def test_the_worst_samples_are_kept_as_the_evaluation_saw_them(looked: Build, tmp_path: Path) -> None:
    looked().train()
    rows = record_of(tmp_path / "run", 15)["worst_samples"][""]
    assert len(rows) == 16
    assert {row["target"] for row in rows} <= set(CLASSES)
    for row in rows:
        picture = np.asarray(Image.open(tmp_path / "run" / row["image"]))
        assert picture.shape == (8, 12)
        assert row["target"] == CLASSES[row["sample"] % 3]


def test_pictures_of_the_last_and_the_best_evaluation_are_kept(looked: Build, tmp_path: Path) -> None:
    trainer = looked(learning_rate=5.0, num_epochs=4)
    trainer.train()
    kept = {int(path.name) for path in (tmp_path / "run/evaluations").iterdir() if path.is_dir()}
    assert kept == {20, trainer.state.best_checkpoint}


def test_keeping_pictures_changes_no_weight(looked: Build) -> None:
    trained = [looked(cls=cls, out=cls.__name__) for cls in (Trainer, InItsOwnOrder)]
    for trainer in trained:
        trainer.train()
    assert [trainer.eval_dataset.num_reads for trainer in trained] == [3 * (20 + 16), 3 * 20]
    with_pictures, without = (trainer.model.state_dict() for trainer in trained)
    assert all(torch.equal(with_pictures[name], without[name]) for name in without)


def test_a_dataset_that_fails_when_it_is_read_again_costs_only_the_pictures(
    looked: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ReadOnce(Pictures):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if self.num_reads >= 20:
                raise RuntimeError("read once only")
            return super().__getitem__(index)

    looked(eval_dataset=ReadOnce(), num_epochs=1).train()
    assert "image" not in record_of(tmp_path / "run", 5)["worst_samples"][""][0]
    assert "will not show what samples looked like: RuntimeError: read once only" in caplog.text


def test_the_pictures_of_an_evaluation_have_a_limit(tmp_path: Path) -> None:
    noise = [(torch.rand(3, 300, 300), 0)] * 5
    rows = SampleLooks(tmp_path, tmp_path / "pictures", 0).added([{"sample": number} for number in range(5)], noise)
    assert [("image" in row) for row in rows] == [True, False, False, False, False]
    assert sum(path.stat().st_size for path in (tmp_path / "pictures").iterdir()) < 300_000


def test_only_data_whose_samples_have_numbers_is_read_again() -> None:
    class Seeded(Pictures):
        def set_seed(self, seed: int) -> None: ...

    stream = (row for row in [1, 2])
    loader = torch.utils.data.DataLoader(Pictures())  # type: ignore[arg-type,var-annotated]
    assert [is_cheap_to_fetch(one) for one in (Pictures(), [1, 2], Seeded(), stream, loader, {"a": 1}, None)] == [
        *(True, True, False, False, False, False, False)
    ]


class Words:
    """A tokenizer of single letters."""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return ["".join(chr(96 + number) for number in row if number > 0) for row in torch.as_tensor(rows).tolist()]

    def save(self, folder: str) -> None:
        (Path(folder) / "words.json").write_text("{}")


class Writer(nn.Module):
    """A language model that says the letter after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(27, 27)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embedding(input_ids)
        return logits

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        steps = torch.arange(1, max_new_tokens + 1)
        return torch.cat([input_ids, (input_ids[:, -1:] + steps) % 27], dim=1)


@pytest.mark.parametrize("asked", [True, False])
def test_a_language_model_writes_on_from_the_first_samples(toy: Build, tmp_path: Path, asked: bool) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(1, 9), torch.arange(3, 11))]
    trainer = toy(
        model=Writer(), task="language_modeling", train_dataset=rows, eval_dataset=rows, preprocessor=Words(),
        criterion=None, evaluate_with_generate=asked, generation_kwargs={"max_new_tokens": 3},
    )  # fmt: skip
    trainer.train()
    record = record_of(tmp_path / "run", 1)
    assert record["worst_samples"][""][0]["input"] in ("abcdefgh", "cdefghij")
    assert record["worst_samples"][""][0]["target"] in ("bcdefgh", "defghij")
    wanted = [
        {"input": "abcd", "prediction": "efg", "target": "efgh"},
        {"input": "cdef", "prediction": "ghi", "target": "ghij"},
    ]
    assert record.get("examples") == ({"": wanted} if asked else None)

"""lernomatic's getters, the history file, and what a model puts while it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from hezar_train import Hook, get_event_storage
from hezar_train.compat.lernomatic import Trainer
from hezar_train.events import CommonMetricPrinter, SummaryWriterAdapter

Build = Callable[..., Trainer]


@pytest.fixture
def build(toy: Callable[..., Trainer], rows: Any) -> Build:
    def make(cls: type[Trainer] = Trainer, **given: Any) -> Any:
        return toy(cls, **{"task": "text_classification", "eval_dataset": rows(6)} | given)

    return make


class Losses(Hook):
    """Remember the loss of each update."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_update(self, ctx: Any) -> None:
        self.seen.append(ctx.loss_value)


class TestGetters:
    def test_before_the_first_value_arrays_are_none_and_numbers_zero(self, build: Build) -> None:
        trainer = build()
        arrays = [
            trainer.get_loss_history(), trainer.get_cur_epoch_loss(), trainer.get_val_loss_history(),
            trainer.get_cur_epoch_val_loss(), trainer.get_acc_history(),
        ]  # fmt: skip
        assert arrays == [None] * 5
        assert [trainer.get_cur_loss(), trainer.get_cur_val_loss(), trainer.get_cur_acc()] == [0.0, 0.0, 0.0]

    def test_there_is_one_loss_per_update_and_the_current_one_is_the_last(self, build: Build) -> None:
        losses = Losses()
        trainer = build(num_epochs=2, hooks=[losses])
        trainer.train()
        found = trainer.get_loss_history()
        assert isinstance(found, np.ndarray)
        assert found.tolist() == losses.seen
        assert len(found) == trainer.state.global_step == 10
        assert trainer.get_cur_loss() == losses.seen[-1]
        assert trainer.get_cur_epoch_loss().tolist() == losses.seen[5:]  # type: ignore[union-attr]

    def test_evaluations_have_one_value_each(self, build: Build) -> None:
        trainer = build(num_epochs=3)
        result = trainer.train()
        losses, accuracies = trainer.get_val_loss_history(), trainer.get_acc_history()
        assert losses is not None
        assert accuracies is not None
        assert len(losses) == len(accuracies) == 3
        assert trainer.storage.history("evaluation.loss").values() == [*zip(losses, (5, 10, 15), strict=True)]
        assert trainer.get_cur_val_loss() == losses[-1] == result.metrics["evaluation.loss"]
        assert trainer.get_cur_acc() == accuracies[-1] == result.metrics["evaluation.accuracy"]
        assert trainer.get_cur_epoch_val_loss().tolist() == [losses[-1]]  # type: ignore[union-attr]

    def test_inside_an_epoch_the_epochs_losses_are_those_so_far(self, build: Build) -> None:
        counts: list[int] = []

        class Counting(Hook):
            def after_step(self) -> None:
                counts.append(len(self.trainer.get_cur_epoch_loss()))

        build(num_epochs=2, hooks=[Counting()]).train()
        assert counts == [1, 2, 3, 4, 5] * 2


class TestFile:
    def test_a_loaded_history_is_equal_and_training_goes_on_behind_it(self, build: Build, tmp_path: Path) -> None:
        first = build(num_epochs=2)
        first.train()
        path = first.save_history(tmp_path / "history.json")
        other = build(num_epochs=1, out="other")
        other.load_history(path)
        before = other.get_loss_history()
        assert before is not None
        assert before.tolist() == first.get_loss_history().tolist()  # type: ignore[union-attr]
        assert other.get_acc_history().tolist() == first.get_acc_history().tolist()  # type: ignore[union-attr]
        assert other.get_cur_epoch_loss() is None
        other.train()
        after = other.get_loss_history()
        assert after is not None
        assert len(after) == 15
        assert after[:10].tolist() == before.tolist()
        assert other.get_cur_epoch_loss().tolist() == after[10:].tolist()  # type: ignore[union-attr]

    def test_a_loaded_history_is_not_logged_again(self, build: Build, logged: Any, tmp_path: Path) -> None:
        class Putting(Hook):
            def after_step(self) -> None:
                self.trainer.storage.put_scalar("once", 1.0)

        first = build(hooks=[Putting()])
        first.train()
        other = build(out="other")
        other.load_history(first.save_history(tmp_path / "history.json"))
        other.train()
        assert "once" in first.storage.histories()
        assert all("once" not in row for row in logged("other"))


class TestResume:
    def test_the_histories_span_the_whole_run(self, build: Build) -> None:
        build(num_epochs=1, log_steps=1).train()
        resumed, whole = (
            build(num_epochs=2, log_steps=1, resume_from_checkpoint=True),
            build(num_epochs=2, log_steps=1, out="whole"),
        )
        for trainer in (resumed, whole):
            trainer.train()
        assert resumed.get_loss_history() == pytest.approx(whole.get_loss_history())
        for name in ("train.loss", "train.recent_loss", "evaluation.loss", "evaluation.accuracy"):
            assert resumed.storage.history(name).values() == whole.storage.history(name).values()

    def test_a_second_call_of_train_brings_nothing_twice(self, build: Build) -> None:
        class Trip(Hook):
            is_armed = True

            def after_step(self) -> None:
                if self.is_armed and self.trainer.state.global_step == 7:
                    self.is_armed = False
                    raise RuntimeError("tripped")

        trainer = build(num_epochs=2, log_steps=2, hooks=[Trip()])
        with pytest.raises(RuntimeError, match="tripped"):
            trainer.train()
        trainer.train()
        assert [step for _, step in trainer.storage.history("train.loss").values()] == [2, 4, 5, 6, 8, 10]
        assert [step for _, step in trainer.storage.history("evaluation.loss").values()] == [5, 10]


class Painting(nn.Module):
    """Put a number under a scope, an image and a histogram in each forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(x)
        storage = get_event_storage()
        with storage.name_scope("model"):
            storage.put_scalar("mean", logits.mean())
            storage.put_image("weights", self.inner.layer.weight.sigmoid()[None])  # type: ignore[union-attr, operator]
            storage.put_histogram("logits", logits)
        return logits


def test_what_a_model_puts_in_its_forward_is_in_the_run_s_files(
    build: Build, classifier: Any, logged: Any, tmp_path: Path
) -> None:
    build(model=Painting(classifier()), log_steps=2).train()
    assert sum("model/mean" in row for row in logged()) == 3  # those of evaluations are not the run's
    (folder,) = (tmp_path / "run/logs").iterdir()
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0}).Reload()
    assert len(events.Images("model/weights")) == len(events.Histograms("model/logits")) == 5
    assert (events.Images("model/weights")[0].height, events.Images("model/weights")[0].width) == (3, 4)
    assert {event.histogram_value.num for event in events.Histograms("model/logits")} == {12.0}


def test_a_summary_writer_of_the_user_gets_the_rows_and_stays_open(build: Build, logged: Any, tmp_path: Path) -> None:
    trainer, tb_writer = build(log_steps=2), SummaryWriter(str(tmp_path / "mine"))
    trainer.storage.writers.append(SummaryWriterAdapter(tb_writer))
    trainer.train()
    tb_writer.add_scalar("mine", 1.0, 0)
    tb_writer.close()
    events = EventAccumulator(str(tmp_path / "mine")).Reload()
    expected = [row["step"] for row in logged() if "train.loss" in row]
    assert [event.step for event in events.Scalars("train.loss")] == expected == [2, 4, 5]
    assert len(events.Scalars("evaluation.accuracy")) == len(events.Scalars("mine")) == 1


def test_the_printer_tells_place_losses_and_time_left_of_a_run(
    build: Build, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(log_steps=2)
    trainer.storage.writers.append(CommonMetricPrinter(batch_size=4, max_iter=5))
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "iteration: " in line]
    assert [line.split("iteration: ")[1].split()[0] for line in lines] == ["2/5", "4/5", "5/5"]
    assert all("train.step_loss: " in line and "lr: 1.00e-01" in line for line in lines)
    assert lines[2].startswith("eta: 0:00:00")

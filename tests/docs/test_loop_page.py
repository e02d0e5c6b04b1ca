"""The table of moments on the page about the loop says what a hook meets there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.loop import Context, Moment

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "loop.md"
ROW = re.compile(r"^\| `([A-Z_]+)`, `(\w+)` \| [^|]+ \|([^|]*)\|", re.MULTILINE)

Sight = dict[str, Any]


class Watch(Hook):
    """Note at every moment what is there, as a hook that is registered without a place finds it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Moment, Sight]] = []
        for moment in Moment:
            setattr(self, moment.value, self._noting(moment))

    def _noting(self, moment: Moment) -> Callable[[Context], None]:
        return lambda ctx: self.seen.append((moment, _sight(ctx)))

    def at(self, moment: Moment) -> list[Sight]:
        return [sight for found, sight in self.seen if found is moment]


def _sight(ctx: Context) -> Sight:
    names = ("batch", "outputs", "loss", "window", "closes_window", "loss_value", "grad_norm", "applied", "failed")
    sight = {name: ctx.get(name) for name in names}
    gradients = [one.grad for one in ctx.model.parameters() if one.grad is not None]
    sight["gradients"] = [gradient.clone() for gradient in gradients]
    sight["counted"] = (ctx.state.epoch, ctx.state.global_step, ctx.state.update_step, ctx.state.position)
    sight["weights"] = ctx.model.weight.detach().clone()
    sight["ends_epoch"] = ctx.state.epoch_finished
    return sight


def _norm(gradients: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(gradients))


def _trainer(folder: Path, *hooks: Hook, **more: Any) -> Trainer:
    torch.manual_seed(0)
    xs = torch.rand(12, 4)
    settings = {"num_epochs": 2, "batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, **more}
    data = TensorDataset(xs, xs.sum(1, keepdim=True))
    return Trainer(TrainerConfig(folder, criterion="MSELoss", **settings), nn.Linear(4, 1), data, hooks=hooks)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return _trainer(tmp_path)


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    found = Watch()
    _trainer(tmp_path, found).train()
    return found


def test_the_table_has_every_moment_in_order_with_its_name_and_its_default_hooks(trainer: Trainer) -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert [(name, method) for name, method, _ in rows] == [(moment.name, moment.value) for moment in Moment]
    for _, method, hooks in rows:
        assert list(filter(None, hooks.strip().split(", "))) == trainer.hooks["train"].names(method)


def test_the_table_of_routines_has_their_default_hooks(trainer: Trainer) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for routine, hooks in (("evaluate", trainer.hooks["val"]), ("predict", trainer.hooks_in_predict)):
        told = [f"`{moment}` {', '.join(hooks.names(moment))}" for moment in Moment if hooks.names(moment)]
        assert f"| `{routine}()` | {'; '.join(told)} |" in text
    left_out = {"keep_place", "progress", "due"}
    for moment in Moment:
        expected = [name for name in trainer.hooks["train"].names(moment) if name not in left_out]
        assert trainer.hooks["finetune"].names(moment) == expected


@pytest.mark.parametrize("moment", [Moment.FIT_START, Moment.EPOCH_START, Moment.EPOCH_END, Moment.FIT_END])
def test_outside_batches_there_is_no_batch_and_no_gradient(watch: Watch, moment: Moment) -> None:
    for sight in watch.at(moment):
        assert sight["batch"] is sight["outputs"] is sight["loss"] is sight["failed"] is None
        assert sight["gradients"] == []


def test_a_batch_begins_uncounted_with_the_gradients_of_its_window_so_far(watch: Watch) -> None:
    first, second, *_ = watch.at(Moment.BATCH_START)
    assert len(first["batch"][0]) == 4
    assert first["outputs"] is first["loss"] is None
    assert (first["gradients"], first["counted"]) == ([], (1, 0, 0, 0))
    assert second["gradients"]
    assert second["counted"] == (1, 1, 0, 0)
    assert second["loss_value"] is None
    assert not second["applied"]


def test_after_the_forward_the_loss_has_its_graph_and_after_the_backward_the_logged_one_has_none(watch: Watch) -> None:
    assert all(sight["loss"].requires_grad for sight in watch.at(Moment.BATCH_FORWARD))
    assert watch.at(Moment.BATCH_FORWARD)[0]["gradients"] == []
    for sight in watch.at(Moment.BATCH_BACKWARD):
        assert sight["gradients"]
        assert not sight["outputs"]["loss"].requires_grad


def test_at_gradients_they_are_those_of_the_window_before_they_are_clipped(watch: Watch) -> None:
    gathered, updated = watch.at(Moment.GRADIENTS), watch.at(Moment.UPDATE)
    assert len(gathered) == 4
    for before, after in zip(gathered, updated, strict=True):
        assert _norm(before["gradients"]) == pytest.approx(after["grad_norm"])
        assert after["grad_norm"] > 1.0
        assert before["loss_value"] is None
        assert not before["applied"]
        assert before["closes_window"]
        assert before["grad_norm"] != after["grad_norm"]


def test_after_an_update_the_weights_are_new_the_gradients_gone_and_nothing_is_counted(watch: Watch) -> None:
    gathered, updated = watch.at(Moment.GRADIENTS), watch.at(Moment.UPDATE)
    for before, after in zip(gathered, updated, strict=True):
        assert not torch.equal(before["weights"], after["weights"])
        assert after["gradients"] == []
        assert after["applied"] is True
        assert isinstance(after["loss_value"], float)
        assert after["counted"] == before["counted"]


def test_a_batch_ends_counted_and_its_update_too_if_it_closed_a_window(watch: Watch) -> None:
    opened, closed, *_ = watch.at(Moment.BATCH_END)
    assert opened["loss_value"] is None
    assert opened["gradients"]
    assert opened["counted"] == (1, 1, 0, 0)
    assert isinstance(closed["loss_value"], float)
    assert closed["gradients"] == []
    assert closed["counted"] == (1, 2, 1, 8)
    assert all(sight["batch"] is not None and sight["outputs"] is not None for sight in (opened, closed))


def test_an_epoch_ends_finished_unless_the_run_ends_inside_it(tmp_path: Path) -> None:
    watch = Watch()
    _trainer(tmp_path, watch, max_steps=4).train()
    assert [sight["ends_epoch"] for sight in watch.at(Moment.EPOCH_END)] == [True, False]


def test_a_failed_call_ends_with_what_was_raised(tmp_path: Path) -> None:
    def fail(_: Context) -> None:
        raise RuntimeError("in a hook")

    watch = Watch()
    trainer = _trainer(tmp_path, watch)
    trainer.hooks["train"].register(fail, "on_batch_backward")
    with pytest.raises(RuntimeError):
        trainer.train()
    (end,) = watch.at(Moment.FIT_END)
    assert isinstance(end["failed"], RuntimeError)
    assert end["batch"] is None

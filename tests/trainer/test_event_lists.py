"""Every event of every routine, in order, written out in full: what fires, in which mode, for which model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hezar_train import MultiModelTrainer, Trainer, TrainerConfig
from hezar_train.loop import Context, Moment
from hezar_train.types import Mode
from tests.trainer.event_tables import events_of

Build = Callable[..., Trainer]
SMALL: dict[str, Any] = {"batch_size": 2, "learning_rate": 0.1, "criterion": "CrossEntropyLoss"}


class BoomError(Exception):
    """Raised on purpose."""


def record(trainer: Trainer) -> list[tuple[str, str]]:
    """Note (mode, moment) at every moment of every mode, before anything that is due is done."""
    events: list[tuple[str, str]] = []

    def noting(moment: Moment) -> Callable[[Context], None]:
        return lambda ctx: events.append((str(ctx.mode), str(moment)))

    for mode in (Mode.TRAIN, Mode.FINETUNE, Mode.VAL):
        for moment in Moment:
            trainer.hooks[mode].register(noting(moment), moment)
    return events


def record_models(trainer: MultiModelTrainer) -> list[tuple[str, str, int]]:
    """Note (mode, moment, model) at every moment of every model."""
    events: list[tuple[str, str, int]] = []

    def noting(moment: Moment) -> Callable[[Context], None]:
        return lambda ctx: events.append((str(ctx.mode), str(moment), ctx.cur_model_idx))

    for moment in Moment:
        for model in (0, 1):
            trainer.register_hook_in_train(noting(moment), moment, model)
        trainer.register_hook_in_eval(noting(moment), moment)
    return events


@pytest.fixture
def pair(tmp_path: Path, rows: Any) -> Callable[..., MultiModelTrainer]:
    """Return a function that builds a trainer of two models."""

    def build(interact: str, **changes: Any) -> MultiModelTrainer:
        models = {"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)}
        data = [(row["x"], row["labels"]) for row in rows(4)]
        evaluation = changes.pop("eval_dataset", None)
        return MultiModelTrainer(
            TrainerConfig(tmp_path, **SMALL | changes), models, data, evaluation, interact=interact
        )

    return build


def test_train_walks_every_moment_and_evaluates_inside(toy: Build, rows: Any) -> None:
    trainer = toy(train_dataset=rows(6), eval_dataset=rows(3), gradient_accumulation_steps=2, **SMALL)
    events = record(trainer)
    trainer.train()
    assert events == events_of(
        """
        train:  fit_start epoch_start
        train:  batch_start batch_forward batch_backward batch_end
        train:  batch_start batch_forward batch_backward gradients update batch_end
        train:  batch_start batch_forward batch_backward gradients update batch_end
        train:  epoch_end
        val:    fit_start epoch_start
        val:    batch_start batch_forward batch_backward batch_end
        val:    batch_start batch_forward batch_backward batch_end
        val:    epoch_end fit_end
        train:  fit_end
        """
    )


def test_evaluate_walks_one_epoch_without_updates(toy: Build, rows: Any) -> None:
    trainer = toy(train_dataset=rows(4), eval_dataset=rows(3), **SMALL)
    events = record(trainer)
    trainer.evaluate()
    assert events == events_of(
        """
        val:    fit_start epoch_start
        val:    batch_start batch_forward batch_backward batch_end
        val:    batch_start batch_forward batch_backward batch_end
        val:    epoch_end fit_end
        """
    )


def test_finetune_walks_like_train_and_evaluates_nothing(toy: Build, rows: Any) -> None:
    trainer = toy(train_dataset=rows(4), eval_dataset=rows(3), finetune_steps=2, **SMALL)
    events = record(trainer)
    trainer.finetune()
    assert events == events_of(
        """
        finetune:  fit_start epoch_start
        finetune:  batch_start batch_forward batch_backward gradients update batch_end
        finetune:  batch_start batch_forward batch_backward gradients update batch_end
        finetune:  epoch_end fit_end
        """
    )


def test_sequential_models_walk_two_complete_routines_back_to_back(pair: Any, rows: Any) -> None:
    trainer = pair("sequential", eval_dataset=[(row["x"], row["labels"]) for row in rows(2)])
    events = record_models(trainer)
    trainer.train()
    assert events == events_of(
        """
        train 0:  fit_start epoch_start
        train 0:  batch_start batch_forward batch_backward gradients update batch_end
        train 0:  batch_start batch_forward batch_backward gradients update batch_end
        train 0:  epoch_end
        val 0:    fit_start epoch_start
        val 0:    batch_start batch_forward batch_backward batch_end
        val 0:    epoch_end fit_end
        train 0:  fit_end
        train 1:  fit_start epoch_start
        train 1:  batch_start batch_forward batch_backward gradients update batch_end
        train 1:  batch_start batch_forward batch_backward gradients update batch_end
        train 1:  epoch_end
        val 1:    fit_start epoch_start
        val 1:    batch_start batch_forward batch_backward batch_end
        val 1:    epoch_end fit_end
        train 1:  fit_end
        """
    )


def test_parallel_models_take_turns_at_every_moment_and_the_first_is_evaluated(pair: Any, rows: Any) -> None:
    trainer = pair("parallel", eval_dataset=[(row["x"], row["labels"]) for row in rows(2)])
    events = record_models(trainer)
    trainer.train()
    assert events == events_of(
        """
        train 0 1:  fit_start epoch_start
        train 0 1:  batch_start batch_forward batch_backward gradients update batch_end
        train 0 1:  batch_start batch_forward batch_backward gradients update batch_end
        train 0 1:  epoch_end
        val 0:      fit_start epoch_start
        val 0:      batch_start batch_forward batch_backward batch_end
        val 0:      epoch_end fit_end
        train 0 1:  fit_end
        """
    )


def test_an_exception_in_a_step_leads_straight_to_the_end_of_the_run(toy: Build, rows: Any) -> None:
    trainer = toy(train_dataset=rows(6), eval_dataset=rows(3), **SMALL)
    events = record(trainer)

    def boom(ctx: Context) -> None:
        if trainer.state.global_step == 1:
            raise BoomError

    trainer.hooks[Mode.TRAIN].register(boom, Moment.BATCH_BACKWARD)
    with pytest.raises(BoomError):
        trainer.train()
    assert events == events_of(
        """
        train:  fit_start epoch_start
        train:  batch_start batch_forward batch_backward gradients update batch_end
        train:  batch_start batch_forward batch_backward
        train:  fit_end
        """
    )


def test_an_exception_in_an_evaluation_ends_the_evaluation_and_then_the_run(toy: Build, rows: Any) -> None:
    trainer = toy(train_dataset=rows(2), eval_dataset=rows(3), **SMALL)
    events = record(trainer)

    def boom(ctx: Context) -> None:
        raise BoomError

    trainer.hooks[Mode.VAL].register(boom, Moment.BATCH_FORWARD)
    with pytest.raises(BoomError):
        trainer.train()
    assert events == events_of(
        """
        train:  fit_start epoch_start
        train:  batch_start batch_forward batch_backward gradients update batch_end
        train:  epoch_end
        val:    fit_start epoch_start
        val:    batch_start batch_forward
        val:    fit_end
        train:  fit_end
        """
    )


def test_an_exception_in_one_models_turn_is_told_to_both_models(pair: Any) -> None:
    trainer = pair("parallel")
    events = record_models(trainer)

    def boom(ctx: Context) -> None:
        raise BoomError

    trainer.register_hook_in_train(boom, Moment.BATCH_FORWARD, model_idx=1)
    with pytest.raises(BoomError):
        trainer.train()
    assert events == events_of(
        """
        train 0 1:  fit_start epoch_start
        train 0 1:  batch_start batch_forward
        train 0 1:  fit_end
        """
    )

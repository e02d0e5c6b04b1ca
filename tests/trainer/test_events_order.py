"""The walk of a run, moment by moment; what hooks may do at them; and how a run ends, well or badly."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import HookError
from hezar_train.events import Ledger
from hezar_train.loop import Moment
from hezar_train.types import Mode
from tests.trainer.event_tables import events_of

Build = Callable[..., Trainer]


class Recorder(Hook):
    """Note every moment of every mode."""

    modes = frozenset({Mode.TRAIN, Mode.VAL})

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        if name in {moment.value for moment in Moment}:
            return lambda ctx: self.events.append((str(ctx.mode), name))
        raise AttributeError(name)


EVALUATION = """
    val:    fit_start epoch_start
    val:    batch_start batch_forward batch_backward batch_end
    val:    batch_start batch_forward batch_backward batch_end
    val:    epoch_end fit_end
"""
EPOCH_IN_WINDOWS_OF_TWO = f"""
    train:  epoch_start
    train:  batch_start batch_forward batch_backward batch_end
    train:  batch_start batch_forward batch_backward gradients update batch_end
    train:  batch_start batch_forward batch_backward batch_end
    train:  batch_start batch_forward batch_backward gradients update batch_end
    train:  batch_start batch_forward batch_backward gradients update batch_end
    train:  epoch_end
    {EVALUATION}
"""
END_OF_THE_RUN = f"""
    train:  epoch_end
    {EVALUATION}
    train:  fit_end
"""


def ends_with(recorder: Recorder, table: str) -> bool:
    """Tell whether a recording ends with the events of a table."""
    expected = events_of(table)
    return recorder.events[-len(expected) :] == expected


class TestTheWalk:
    def test_two_epochs_with_windows_of_two_and_an_evaluation_each(self, toy: Build, rows: Any) -> None:
        recorder = Recorder()
        toy(hooks=[recorder], eval_dataset=rows(6), num_epochs=2, gradient_accumulation_steps=2).train()
        assert recorder.events == events_of(
            f"""
            train:  fit_start
            {EPOCH_IN_WINDOWS_OF_TWO}
            {EPOCH_IN_WINDOWS_OF_TWO}
            train:  fit_end
            """
        )

    def test_an_evaluation_inside_an_epoch_follows_its_update(self, toy: Build, rows: Any) -> None:
        recorder = Recorder()
        toy(hooks=[recorder], eval_dataset=rows(6), eval_steps=2, max_steps=3).train()
        assert recorder.events == events_of(
            f"""
            train:  fit_start epoch_start
            train:  batch_start batch_forward batch_backward gradients update batch_end
            train:  batch_start batch_forward batch_backward gradients update batch_end
            {EVALUATION}
            train:  batch_start batch_forward batch_backward gradients update batch_end
            {END_OF_THE_RUN}
            """
        )

    def test_an_evaluation_alone_walks_the_same_way(self, toy: Build, rows: Any) -> None:
        recorder = Recorder()
        toy(hooks=[recorder], eval_dataset=rows(6)).evaluate()
        assert recorder.events == events_of(EVALUATION)

    def test_what_is_due_happens_in_one_order(self, toy: Build, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        done: list[str] = []
        trainer = toy(eval_dataset=rows(6), lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1})
        for owner, name in (
            (trainer.storage, "log"), (trainer.parts.checkpointing, "save"), (trainer, "evaluate"),
            (trainer.state, "update_best_results"), (trainer.lr_scheduler, "step"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, _noting(done, name, getattr(owner, name)))
        trainer.train()
        # the schedule belongs to the update; what it changed is saved; the evaluation is logged and then judged
        assert done[-6:] == [
            "step", "log", "save", "evaluate", "log", "update_best_results",
        ]  # fmt: skip

    def test_the_default_hooks_are_listed_by_name(self, toy: Build) -> None:
        hooks = toy().hooks
        assert hooks[Mode.TRAIN].names("on_gradients") == ["gather"]
        assert hooks[Mode.TRAIN].names("on_update") == ["guard", "clip", "step", "zero_grad"]
        assert hooks[Mode.TRAIN].names("on_batch_start") == ["seed", "prepare_input"]
        assert hooks[Mode.TRAIN].names("on_batch_end") == ["count", "schedule", "keep_place", "progress", "due"]
        assert hooks[Mode.VAL].names("on_batch_end") == ["measure"]


def _noting(done: list[str], name: str, call: Any) -> Any:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        done.append(name)
        return call(*args, **kwargs)

    return wrapped


class TestMaxSteps:
    def test_seven_of_ten_stops_there_and_evaluates_and_saves_once(
        self, toy: Build, rows: Any, saved_steps: Any, tmp_path: Path
    ) -> None:
        recorder = Recorder()
        trainer = toy(hooks=[recorder], eval_dataset=rows(6), num_epochs=2, max_steps=7)
        trainer.train()
        assert (trainer.state.global_step, trainer.state.epoch, trainer.state.epoch_step) == (7, 2, 2)
        assert trainer.state.position == 8
        assert saved_steps() == [5, 7]
        assert sorted(path.name for path in (tmp_path / "run/evaluations").iterdir()) == [
            "00000005.json",
            "00000007.json",
        ]
        assert recorder.events.count(("val", "on_fit_start")) == 2
        assert ends_with(recorder, END_OF_THE_RUN)

    def test_a_share_is_rounded_up_once_over_the_whole_run(self, toy: Build) -> None:
        trainer = toy(num_epochs=3, max_steps=0.5)
        trainer.train()
        assert trainer.state.global_step == 8

    def test_more_than_there_is_means_all(self, toy: Build) -> None:
        trainer = toy(num_epochs=2, max_steps=99)
        trainer.train()
        assert trainer.state.global_step == 10


class TestSaves:
    @pytest.mark.parametrize(
        ("save_steps", "steps"), [(3, [3, 5, 6, 9, 10]), (None, [5, 10]), (0, [5, 10]), (0.4, [4, 5, 8, 10])]
    )
    def test_at_epoch_ends_and_where_save_steps_says(
        self, toy: Build, saved_steps: Any, save_steps: Any, steps: list[int]
    ) -> None:
        toy(num_epochs=2, save_steps=save_steps).train()
        assert saved_steps() == steps

    def test_disabled_saves_write_no_checkpoint(self, toy: Build, saved_steps: Any, rows: Any, tmp_path: Path) -> None:
        toy(num_epochs=2, save_enabled=False, save_steps=1, eval_dataset=rows(3)).train()
        assert saved_steps() == []
        assert not (tmp_path / "run/checkpoints").exists()
        assert not (tmp_path / "run/best.json").exists()


class BoomError(Exception):
    """Raised on purpose."""


class Boom(Hook):
    """Fail in one step."""

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step
        self.failed: Any = "not told"

    def on_batch_backward(self, ctx: Any) -> None:
        if self.trainer.state.global_step + 1 == self._at_step:
            raise BoomError

    def on_fit_end(self, ctx: Any) -> None:
        self.failed = ctx.failed


class TestFailures:
    def test_the_end_is_told_with_the_error_and_nothing_is_saved_or_evaluated(
        self, toy: Build, rows: Any, saved_steps: Any
    ) -> None:
        recorder, boom = Recorder(), Boom(at_step=3)
        trainer = toy(hooks=[recorder, boom], eval_dataset=rows(6))
        with pytest.raises(BoomError) as raised:
            trainer.train()
        assert boom.failed is raised.value
        assert saved_steps() == []
        assert recorder.events == events_of(
            """
            train:  fit_start epoch_start
            train:  batch_start batch_forward batch_backward gradients update batch_end
            train:  batch_start batch_forward batch_backward gradients update batch_end
            train:  batch_start batch_forward batch_backward
            train:  fit_end
            """
        )

    def test_a_run_that_ends_well_has_not_failed(self, toy: Build) -> None:
        boom = Boom(at_step=99)
        toy(hooks=[boom]).train()
        assert boom.failed is None

    def test_what_was_set_in_the_context_is_gone_afterwards(self, toy: Build) -> None:
        trainer = toy(hooks=[Boom(at_step=3)])
        with pytest.raises(BoomError):
            trainer.train()
        assert "batch" not in trainer.ctx
        assert "loss" not in trainer.ctx
        assert trainer.ctx.model is trainer.model

    def test_the_same_folder_can_be_trained_in_again(self, toy: Build) -> None:
        with pytest.raises(BoomError):
            toy(hooks=[Boom(at_step=3)]).train()
        assert toy().train().num_samples == 20

    def test_the_first_error_is_seen_also_if_the_end_fails_too(self, toy: Build) -> None:
        class BadEnd(Hook):
            def after_train(self) -> None:
                raise ZeroDivisionError

        with pytest.raises(BoomError):
            toy(hooks=[Boom(at_step=1), BadEnd()]).train()


class Diary(Hook):
    """Use the four plain methods, and keep a state."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = torch.zeros(2)

    def before_train(self) -> None:
        self.lines.append(f"before train at {self.trainer.state.global_step}")

    def before_step(self) -> None:
        self.lines.append(f"before step {self.trainer.state.global_step + 1}")

    def after_step(self) -> None:
        self.lines.append(f"after step {self.trainer.state.global_step}")
        self.total += 1

    def after_train(self) -> None:
        self.lines.append(f"after train at {self.trainer.state.global_step}")

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "count": len(self.lines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


class TestHooks:
    def test_the_four_methods_are_called_in_order(self, toy: Build) -> None:
        diary = Diary()
        toy(hooks=[diary], max_steps=2).train()
        assert diary.lines == [
            "before train at 0", "before step 1", "after step 1", "before step 2", "after step 2", "after train at 2",
        ]  # fmt: skip

    def test_the_trainer_is_seen_through_a_weak_proxy(self, toy: Build) -> None:
        diary = Diary()
        trainer = toy(hooks=[diary])
        assert diary.trainer.state is trainer.state
        del trainer
        gc.collect()
        with pytest.raises(ReferenceError):
            _ = diary.trainer.state

    def test_a_state_is_saved_in_every_checkpoint_and_handed_back(self, toy: Build) -> None:
        toy(hooks=[Diary()], num_epochs=1).train()
        diary = Diary()
        toy(hooks=[diary], num_epochs=2, resume_from_checkpoint=True).train()
        assert diary.total.tolist() == [10, 10]
        assert diary.count == 11  # as many lines as there were at step 5
        assert diary.lines[0] == "before train at 5"

    def test_two_hooks_of_one_class_keep_their_own_states(self, toy: Build) -> None:
        one, other = Diary(), Diary()
        other.total += 100
        toy(hooks=[one, other], num_epochs=1).train()
        again = [Diary(), Diary()]
        toy(hooks=again, num_epochs=2, resume_from_checkpoint=True)
        assert [hook.total.tolist() for hook in again] == [[5, 5], [105, 105]]

    def test_a_state_that_cannot_be_saved_is_told(self, toy: Build) -> None:
        class Bad(Hook):
            def state_dict(self) -> dict[str, Any]:
                return {"file": object()}

        with pytest.raises(ValueError, match="object"):
            toy(hooks=[Bad()]).train()

    def test_hooks_added_after_construction_work(self, toy: Build) -> None:
        diary, trainer = Diary(), toy(max_steps=1)
        trainer.register_hooks([diary])
        trainer.train()
        assert diary.lines == ["before train at 0", "before step 1", "after step 1", "after train at 1"]

    def test_hooks_added_to_a_resumed_trainer_get_their_state(self, toy: Build) -> None:
        toy(hooks=[Diary()], num_epochs=1).train()
        trainer, diary = toy(num_epochs=2, resume_from_checkpoint=True), Diary()
        trainer.register_hooks([diary])
        assert diary.total.tolist() == [5, 5]

    @pytest.mark.parametrize(("wrong", "remedy"), [(print, r"register\(function"), (Diary, r"Make one: Diary\(")])
    def test_what_is_no_hook_object_is_refused(self, toy: Build, wrong: Any, remedy: str) -> None:
        with pytest.raises(HookError, match=rf"expected Hook objects.*{remedy}"):
            toy(hooks=[wrong])

    def test_a_function_may_be_put_anywhere_in_the_order(self, toy: Build) -> None:
        order: list[str] = []
        trainer = toy(max_steps=1)
        hooks = trainer.hooks[Mode.TRAIN]
        hooks.register(lambda ctx: order.append("grad" if trainer.model.layer.weight.grad is not None else "none"),  # type: ignore[union-attr]
                       "on_update", name="late")  # fmt: skip
        hooks.register(lambda ctx: order.append(f"{ctx.grad_norm > 0}"), "on_update", name="early", after="guard")
        assert hooks.names("on_update") == ["guard", "early", "clip", "step", "zero_grad", "late"]
        trainer.train()
        assert order == ["True", "none"]


class TestRequests:
    def test_a_save_that_is_asked_for_happens_after_the_update(self, toy: Build, saved_steps: Any) -> None:
        class Asking(Hook):
            def before_step(self) -> None:
                if self.trainer.state.global_step == 2:  # the first step of the second window
                    self.trainer.request_save()

        toy(hooks=[Asking()], gradient_accumulation_steps=2, num_epochs=2).train()
        assert saved_steps() == [4, 5, 10]

    def test_a_save_that_nobody_would_write_is_refused(self, toy: Build) -> None:
        class Asking(Hook):
            def after_step(self) -> None:
                self.trainer.request_save()

        with pytest.raises(HookError, match=r"save_enabled=False: none would be written. Take the request out"):
            toy(hooks=[Asking()], save_enabled=False).train()

    def test_a_trainer_that_only_evaluates_is_not_asked_for_a_save(self, rows: Any, tmp_path: Path) -> None:
        trainer = Trainer(TrainerConfig(tmp_path), torch.nn.Linear(4, 3), eval_dataset=rows(4))
        with pytest.raises(HookError, match="this trainer has no training data, and so saves none"):
            trainer.request_save()

    def test_a_save_is_refused_where_nothing_falls_due_any_more(self, toy: Build, saved_steps: Any) -> None:
        class Asking(Hook):
            def after_train(self) -> None:
                self.trainer.request_save()

        words = r"the last update of this call of train\(\) is done and saved. Ask for it before: at on_epoch_end"
        with pytest.raises(HookError, match=words):
            toy(hooks=[Asking()]).train()
        done = toy(out="done")
        done.train()
        with pytest.raises(HookError, match=words):
            done.request_save()
        assert saved_steps("done") == [5]

    def test_a_save_that_the_last_evaluation_asks_for_is_that_of_its_update(
        self, toy: Build, rows: Any, saved_steps: Any
    ) -> None:
        class Asking(Hook):
            modes = frozenset({Mode.VAL})

            def after_train(self) -> None:
                self.trainer.request_save()

        trainer = toy(hooks=[Asking()], eval_dataset=rows(4), local_update_steps=2)
        trainer.train()
        trainer.train()
        assert saved_steps() == [2, 4]  # and none at 3, the first update of the second call

    @pytest.mark.parametrize("evaluates", [False, True])
    @pytest.mark.parametrize("when", ["before train()", "on_fit_start", "on_epoch_start"])
    def test_a_run_that_is_stopped_before_its_first_step_has_no_loss_and_no_best(
        self, when: str, evaluates: bool, toy: Build, rows: Any, tmp_path: Path
    ) -> None:
        trainer = toy(
            eval_dataset=rows(4) if evaluates else None, metric_for_best_model="train.loss",
            stop_when="train.loss <= 0.1",
        )  # fmt: skip
        if when == "before train()":
            trainer.request_stop("before")
        else:
            trainer.register_hook_in_train(lambda _: trainer.request_stop("before"), when)
        metrics = trainer.train().metrics
        assert "train.loss" not in metrics
        assert ("evaluation.loss" in metrics) == (evaluates and when == "on_epoch_start")  # an epoch's end was there
        assert (trainer.state.global_step, trainer.state.best_metric_value) == (0, None)
        assert not any('"train.loss"' in path.read_text() for path in tmp_path.glob("run/logs/*/metrics.json"))
        assert "train.loss" not in trainer.train().metrics  # it is done

    def test_a_save_may_be_asked_for_before_the_first_step(self, toy: Build, saved_steps: Any) -> None:
        trainer = toy()
        trainer.request_save()
        trainer.train()
        assert saved_steps() == [1, 5]

    def test_a_save_is_asked_for_once(self, toy: Build, saved_steps: Any) -> None:
        class Asking(Hook):
            def after_step(self) -> None:
                if self.trainer.state.global_step == 2:
                    self.trainer.request_save()

        toy(hooks=[Asking()]).train()
        assert saved_steps() == [2, 5]

    def test_a_stop_that_is_asked_for_ends_the_run_as_if_it_were_its_end(
        self, toy: Build, rows: Any, saved_steps: Any, tmp_path: Path
    ) -> None:
        class Stopping(Hook):
            def after_step(self) -> None:
                if self.trainer.state.global_step == 7:
                    self.trainer.request_stop("good enough")

        recorder = Recorder()
        trainer = toy(hooks=[Stopping(), recorder], eval_dataset=rows(6), num_epochs=3)
        trainer.train()
        assert trainer.state.global_step == 7
        assert saved_steps() == [5, 7]
        assert ends_with(recorder, END_OF_THE_RUN)
        state = json.loads((tmp_path / "run/checkpoints/00000007/trainer_state.json").read_text())["state"]
        assert state["stop_reason"] == "good enough"

    def test_a_stop_inside_a_window_waits_for_its_update(self, toy: Build) -> None:
        class Stopping(Hook):
            def before_step(self) -> None:
                self.trainer.request_stop("at once")

        trainer = toy(hooks=[Stopping()], gradient_accumulation_steps=3)
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step) == (3, 1)

    def test_a_stopped_run_is_done_when_it_is_started_again(self, toy: Build, saved_steps: Any) -> None:
        class Stopping(Hook):
            def after_step(self) -> None:
                self.trainer.request_stop("at once")

        toy(hooks=[Stopping()], num_epochs=2).train()
        again = toy(num_epochs=2, resume_from_checkpoint=True)
        assert again.train().num_samples == 0
        assert (again.state.stop_reason, saved_steps()) == ("at once", [1])


class TestTheEnd:
    def test_a_finished_run_trains_no_more_and_tells_its_result(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(6))
        first = trainer.train()
        again = trainer.train()
        assert again.num_samples == 0
        assert again.metrics == first.metrics

    def test_it_says_that_it_is_done(self, toy: Build, capsys: pytest.CaptureFixture[str]) -> None:
        toy().train()
        assert capsys.readouterr().out.splitlines()[-1] == "Training done!"


def test_a_second_call_after_a_failure_inside_a_window_goes_on_from_the_last_update(tmp_path: Path) -> None:
    class Trip(Hook):
        is_armed = True

        def after_step(self) -> None:
            if self.is_armed and self.trainer.state.global_step == 6:  # the first half of the fourth window
                self.is_armed = False
                raise RuntimeError("tripped")

    def build(folder: str, hooks: list[Hook]) -> Trainer:
        torch.manual_seed(0)
        data = [{"x": torch.ones(3) * i, "labels": i % 2} for i in range(20)]

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(3, 2)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x)

        config = TrainerConfig(
            str(tmp_path / folder), num_epochs=1, batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1,
            criterion="CrossEntropyLoss", use_cpu=True, log_steps=2,
        )  # fmt: skip
        return Trainer(config, Net(), data, hooks=hooks)

    tripped, whole = build("tripped", [Trip()]), build("whole", [])
    with pytest.raises(RuntimeError, match="tripped"):
        tripped.train()
    tripped.train()
    whole.train()
    assert tripped.state.global_step == whole.state.global_step == 10
    assert torch.equal(tripped.model.layer.weight, whole.model.layer.weight)  # type: ignore[union-attr, arg-type]
    tripped_updates, whole_updates = (
        list(Ledger.read(tmp_path / name / "ledger.jsonl")) for name in ("tripped", "whole")
    )
    assert tripped_updates == whole_updates


def test_a_run_that_was_asked_to_stop_goes_on_if_changes_are_accepted(toy: Build) -> None:
    class Enough(Hook):
        def after_step(self) -> None:
            if self.trainer.state.global_step == 3:
                self.trainer.request_stop("enough")

    toy(hooks=[Enough()]).train()
    again = toy(resume_from_checkpoint=True)
    assert (again.train().num_samples, again.state.global_step) == (0, 3)
    overruled = toy(resume_from_checkpoint=True, accept_changes=True)
    overruled.train()
    assert overruled.state.global_step == 5

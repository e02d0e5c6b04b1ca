"""LiBai's names on the trainer: iterations, what is built when it is not passed, metrics, test sets, kept objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hezar_train import Hook, TrainerConfig
from hezar_train.compat.libai import CallbackHook, EventWriter, Trainer, total_loss
from hezar_train.errors import CheckpointError, DataError, HookError
from hezar_train.events import Row
from hezar_train.metrics import MetricsHandler

Build = Callable[..., Trainer]


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with LiBai's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


class CrashError(Exception):
    """What a test raises to end a run badly."""


def crash_before(step: int) -> Hook:
    """Return a hook that fails before a step, counted from 1."""

    def fail(trainer: Trainer) -> None:
        if trainer.state.global_step == step - 1:
            raise CrashError

    return CallbackHook(before_step=fail)


class Noting(Trainer):
    """Note the iteration inside each step."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.seen: list[tuple[str, int]] = []
        super().__init__(*given, **more)

    def build_hooks(self) -> list[Hook | None]:
        def note(word: str) -> Callable[[Any], None]:
            return lambda trainer: trainer.seen.append((word, trainer.iter))

        hook = CallbackHook(
            before_train=note("BT"), before_step=note("BS"), after_step=note("AS"), after_train=note("AT")
        )
        return [*super().build_hooks(), hook]

    def run_step(self) -> Any:
        self.seen.append(("RS", self.iter))
        return super().run_step()


class TestIterations:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_hooks_and_the_step_see_the_iteration_under_way(self, toy: Build, accumulation: int) -> None:
        trainer: Any = toy(Noting, num_epochs=2, gradient_accumulation_steps=accumulation)
        trainer.train()
        steps = [(word, number) for number in range(10) for word in ("BS", "RS", "AS")]
        assert trainer.seen == [("BT", 0), *steps, ("AT", 10)]
        assert trainer.iter == trainer.max_iter == 10

    def test_a_failed_run_has_not_reached_the_last_iteration(self, toy: Build) -> None:
        trainer: Any = toy(Noting, hooks=[crash_before(4)])
        with pytest.raises(CrashError):
            trainer.train()
        assert trainer.seen[-1] == ("AT", 3)
        assert trainer.iter < trainer.max_iter

    def test_a_resumed_run_starts_at_the_iteration_of_its_checkpoint(self, toy: Build) -> None:
        with pytest.raises(CrashError):
            toy(hooks=[crash_before(5)], save_steps=3).train()
        begun: list[int] = []
        trainer: Any = toy(
            Noting, hooks=[CallbackHook(after_step=lambda trainer: begun.append(trainer.start_iter))],
            save_steps=3, resume_from_checkpoint=True,
        )  # fmt: skip
        assert trainer.start_iter == trainer.iter == 3
        trainer.train()
        assert trainer.seen[:4] == [("BT", 3), ("BS", 3), ("RS", 3), ("AS", 3)]
        assert begun == [3, 3]

    def test_the_end_is_known_in_the_last_step_and_when_a_stop_was_asked_for(self, toy: Build) -> None:
        ends: list[bool] = []

        def stop(trainer: Trainer) -> None:
            ends.append(trainer.reached_end)
            if trainer.iter == 2:
                trainer.request_stop("enough")
                ends.append(trainer.reached_end)

        toy(hooks=[CallbackHook(after_step=stop)]).train()
        assert ends == [False, False, False, True]
        ends.clear()
        toy(hooks=[CallbackHook(after_step=lambda trainer: ends.append(trainer.reached_end))], out="whole").train()
        assert ends == [False] * 4 + [True]


class Gathering(EventWriter):
    """Keep the steps of the rows it is given."""

    def __init__(self, steps: list[Any]) -> None:
        self.steps = steps

    def write(self, rows: Sequence[Row]) -> None:
        self.steps += [row.step for row in rows]

    def close(self) -> None:
        self.steps.append("closed")


class Built(Trainer):
    """Build everything that is not passed."""

    rows: list[Any]
    written: list[Any]

    def build_tokenizer(self) -> Any:
        return Vocabulary()

    def build_model(self) -> nn.Module:
        return Layer(factor=self.config.batch_size)

    def build_train_loader(self) -> tuple[Any, Any, Any]:
        return self.rows, self.rows[:6], self.rows[:3]

    def build_evaluator(self) -> MetricsHandler:
        return Constant()

    def build_writers(self) -> list[EventWriter]:
        return [*super().build_writers(), Gathering(self.written)]


class Constant(MetricsHandler):
    """Measure nothing but that it was asked."""

    valid_metrics = ("one",)

    def compute(self) -> dict[str, float]:
        return {"one": 1.0}


class Vocabulary:
    """A preprocessor that can be kept with a model."""

    def save(self, folder: str) -> None:
        Path(folder, "words.txt").write_text("a\n")


class Layer(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(x) * self.factor
        return {"logits": logits, "a_loss": logits.pow(2).mean(), "b_loss": logits.abs().mean(), "acc": logits.sum()}


class TestBuilding:
    def test_what_is_not_passed_is_built(self, tmp_path: Path, rows: Any) -> None:
        Built.rows, Built.written = rows(), []
        trainer = Built(TrainerConfig(tmp_path, batch_size=4, criterion="CrossEntropyLoss"))
        assert trainer.train().metrics["evaluation.one"] == 1.0
        assert trainer.model.factor == 4
        assert trainer.test() == trainer.evaluate(rows()[:3])
        assert (tmp_path / "checkpoints" / "00000005" / "preprocessor" / "words.txt").exists()

    def test_built_writers_get_each_logged_row_and_are_closed(self, toy: Build, rows: Any) -> None:
        Built.rows, Built.written = rows(), []
        toy(Built, log_steps=2).train()
        assert Built.written == [2, 4, 5, "closed"]

    def test_none_among_the_hooks_is_passed_over_and_the_order_is_kept(self, toy: Build) -> None:
        seen: list[int] = []
        hooks = [CallbackHook(before_train=lambda _, number=number: seen.append(number)) for number in (1, 2)]
        toy(hooks=[None, hooks[0], None, hooks[1]]).train()
        assert seen == [1, 2]

    def test_a_number_among_the_hooks_is_a_type_error(self, toy: Build) -> None:
        with pytest.raises(TypeError, match="hooks holds an int"):
            toy(hooks=[3])


class TestLosses:
    def test_an_override_may_train_on_the_sum_of_the_models_losses(self, toy: Build) -> None:
        class Summing(Trainer):
            def compute_loss(self, model_outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
                return total_loss(model_outputs)

        trainer = toy(Summing, model=Layer(1), criterion=None, max_steps=1)
        outputs = trainer.model(torch.ones(2, 4))
        assert total_loss(outputs) == outputs["a_loss"] + outputs["b_loss"]
        assert trainer.train().metrics["train.loss"] > 0

    def test_outputs_without_a_loss_are_refused(self) -> None:
        with pytest.raises(DataError, match="The model returned: closs, logits"):
            total_loss({"logits": torch.ones(1), "closs": torch.ones(1)})

    def test_written_metrics_are_in_the_storage_with_their_total(self, toy: Build) -> None:
        trainer = toy()
        trainer.write_metrics({"a_loss": torch.tensor(1.0), "b_loss": 2.0, "acc": 5.0}, data_time=0.5, prefix="x/")
        trainer.write_metrics({"loss": torch.tensor(4.0, requires_grad=True)})
        found = {name: value for name, (value, _) in trainer.storage.latest().items()}
        expected = {"data_time": 0.5, "x/a_loss": 1.0, "x/b_loss": 2.0, "x/acc": 5.0, "x/total_loss": 3.0}
        assert found == expected | {"loss": 4.0, "total_loss": 4.0}

    def test_what_a_hook_puts_when_the_run_has_ended_is_logged(self, toy: Build, logged: Any) -> None:
        def put(trainer: Trainer) -> None:
            trainer.write_metrics({"final_loss": 2.0})

        toy(hooks=[CallbackHook(after_train=put)]).train()
        assert [(row["step"], row["final_loss"]) for row in logged() if "final_loss" in row] == [(5, 2.0)]


class TestResumeOrLoad:
    def test_resuming_goes_on_as_the_unbroken_run(self, toy: Build) -> None:
        unbroken = toy(out="unbroken", save_steps=2)
        unbroken.train()
        with pytest.raises(CrashError):
            toy(hooks=[crash_before(4)], save_steps=2).train()
        trainer = toy(save_steps=2)
        trainer.resume_or_load(resume=True)
        assert trainer.iter == 2
        trainer.train()
        assert torch.equal(trainer.model.layer.weight, unbroken.model.layer.weight)  # type: ignore[union-attr, arg-type]

    def test_resuming_where_there_is_nothing_says_so(self, toy: Build) -> None:
        with pytest.raises(CheckpointError, match=r"there is no checkpoint in .* to resume from"):
            toy().resume_or_load()

    def test_loading_takes_the_weights_alone(self, toy: Build, tmp_path: Path, classifier: Any) -> None:
        first = toy(out="first")
        first.train()
        trainer = toy(model=classifier(seed=5), init_weights_from=tmp_path / "first")
        trainer.resume_or_load(resume=False)
        assert torch.equal(trainer.model.layer.weight, first.model.layer.weight)  # type: ignore[union-attr, arg-type]
        assert trainer.iter == 0
        assert not trainer.optimizer.state

    def test_weights_are_not_loaded_into_a_run_that_has_begun(self, toy: Build) -> None:
        trainer = toy()
        trainer.train()
        with pytest.raises(CheckpointError, match="this run is at step 5"):
            trainer.resume_or_load(resume=False)


class TestTest:
    def test_several_sets_are_told_apart_by_name(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(4))
        small, large = rows(4), rows(9, seed=3)
        found = trainer.test({"small": small, "large": large})
        assert found == {"small": trainer.evaluate(small), "large": trainer.evaluate(large)}

    def test_a_single_set_gives_its_metrics(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(4))
        assert trainer.test({"only": rows(9)}) == trainer.evaluate(rows(9))

    def test_the_sets_may_be_built(self, toy: Build, rows: Any) -> None:
        class Tested(Trainer):
            def build_test_loader(self) -> dict[str, Any]:
                return {"one": rows(4), "two": rows(5)}

        assert list(toy(Tested).test()) == ["one", "two"]

    def test_a_list_of_loaders_is_refused_because_it_has_no_names(self, toy: Build, rows: Any) -> None:
        with pytest.raises(DataError, match="give each a name"):
            toy().test([DataLoader(rows(4)), DataLoader(rows(5))])


class Counter:
    """An object of the user's with a state of plain values and tensors."""

    def __init__(self) -> None:
        self.total, self.last = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.last = state["total"], state["last"]


class TestKeptObjects:
    def test_a_kept_object_comes_back_with_the_checkpoint(self, toy: Build) -> None:
        def count(counter: Counter) -> Hook:
            def add(_: Any) -> None:
                counter.total += 1
                counter.last = counter.last + counter.total

            return CallbackHook(after_step=add)

        first, second = Counter(), Counter()
        trainer = toy(hooks=[count(first), crash_before(5)], save_steps=2)
        trainer.register_for_checkpointing("counter", first)
        with pytest.raises(CrashError):
            trainer.train()
        trainer = toy(hooks=[count(second)], save_steps=2, resume_from_checkpoint=True)
        trainer.register_for_checkpointing("counter", second)
        assert second.total == 4
        trainer.train()
        assert (second.total, second.last.tolist()) == (5, [15.0, 15.0])

    def test_a_name_is_given_once(self, toy: Build) -> None:
        trainer = toy()
        trainer.register_for_checkpointing("counter", Counter())
        with pytest.raises(HookError, match="already kept in checkpoints under the name 'counter'"):
            trainer.register_for_checkpointing("counter", Counter())

    def test_an_object_without_a_state_is_refused(self, toy: Build) -> None:
        with pytest.raises(HookError, match="'list' is a list without state_dict"):
            toy().register_for_checkpointing("list", [])

"""Rows of the LiBai table: iterations, hook objects, what is measured, and what a config of its own means here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train.compat.libai import EventStorage, HookBase, Trainer, TrainerConfig
from hezar_train.errors import ConfigError

Build = Callable[..., Trainer]


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with LiBai's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


class Marks(HookBase):
    """Note the four plain methods."""

    def __init__(self, marks: list[str]) -> None:
        self.marks = marks

    def before_train(self) -> None:
        self.marks.append("before train")

    def before_step(self) -> None:
        self.marks.append("before step")

    def after_step(self) -> None:
        self.marks.append("after step")

    def after_train(self) -> None:
        self.marks.append("after train")


class BoomError(Exception):
    """Raised on purpose."""


class TestLoop:
    @pytest.mark.parametrize("fails_at", [None, 3, 5])
    def test_steps_lie_between_the_plain_methods_and_the_end_comes_also_after_an_error(
        self, toy: Build, rows: Any, fails_at: int | None
    ) -> None:
        marks: list[str] = []
        evaluations: list[str] = []

        class Own(Trainer):
            def run_step(self) -> Any:
                marks.append("run step")
                if fails_at == self.state.global_step + 1:
                    raise BoomError
                return super().run_step()

        trainer = toy(Own, arguments={"hooks": [Marks(marks)], "eval_dataset": rows(3)})
        trainer.register_hook_in_eval(lambda ctx: evaluations.append("evaluation"), "on_fit_start")
        step = ["before step", "run step", "after step"]
        if fails_at is None:
            trainer.train()
            assert marks == ["before train", *step * 5, "after train"]
            assert evaluations == ["evaluation"]
            return
        with pytest.raises(BoomError):
            trainer.train()
        assert marks == ["before train", *step * (fails_at - 1), *step[:2], "after train"]
        assert evaluations == []

    def test_the_storage_counts_the_iteration_under_way(self, toy: Build) -> None:
        seen: list[tuple[int, int]] = []

        class Own(Trainer):
            def run_step(self) -> Any:
                seen.append((self.iter, self.storage.iter))
                return super().run_step()

        toy(Own).train()
        assert seen == [(number, number) for number in range(5)]

    def test_a_second_call_with_the_same_hooks_trains_on(self, toy: Build) -> None:
        marks: list[str] = []
        trainer = toy(local_update_steps=1, arguments={"hooks": [Marks(marks)]})
        trainer.train()
        trainer.train()
        assert marks == ["before train", "before step", "after step", "after train"] * 2

    def test_training_returns_its_result(self, toy: Build, rows: Any) -> None:
        result = toy(arguments={"eval_dataset": rows(3)}).train()
        assert set(result.metrics) == {"train.loss", "evaluation.loss"}

    def test_samples_are_counted_as_they_are_with_accumulation_and_over_a_resume(self, toy: Build) -> None:
        settings = {"gradient_accumulation_steps": 2, "num_epochs": 2, "save_steps": 2}
        trainer = toy(max_steps=7, **settings)
        trainer.train()
        assert trainer.state.samples_seen == 28
        again = toy(resume_from_checkpoint=True, **settings)
        again.train()
        assert again.state.samples_seen == 40


class TestStorage:
    def test_several_scalars_are_put_at_once(self) -> None:
        storage = EventStorage(step=3)
        storage.put_scalars(loss=1.5, accuracy=torch.tensor(0.5))
        assert storage.latest() == {"loss": (1.5, 3), "accuracy": (0.5, 3)}

    def test_an_unknown_history_is_a_key_error(self) -> None:
        with pytest.raises(KeyError, match="nothing was measured under the name 'los'"):
            EventStorage().history("los")


class TestSettings:
    @pytest.mark.parametrize(
        ("theirs", "ours"),
        [
            ("train_micro_batch_size", "batch_size"),
            ("num_accumulation_steps", "gradient_accumulation_steps"),
            ("train_iter", "max_steps"),
            ("train_epoch", "num_epochs"),
            ("amp", "mixed_precision"),
            ("activation_checkpoint", "gradient_checkpointing"),
            ("checkpointer", "save_steps"),
            ("max_to_keep", "save_total_limit"),
            ("test_micro_batch_size", "eval_batch_size"),
            ("eval_period", "eval_steps"),
            ("eval_iter", "max_eval_batches"),
            ("eval_metric", "metric_for_best_model"),
            ("load_weight", "init_weights_from"),
            ("log_period", "log_steps"),
            ("clip_grad_max_norm", "max_grad_norm"),
            ("graph", "compile"),
        ],
    )
    def test_its_fields_are_answered_with_ours(self, theirs: str, ours: str) -> None:
        with pytest.raises(ConfigError, match=f"'{theirs}' is not a field. Here it is called '{ours}'"):
            TrainerConfig("run", **{theirs: 1})

    def test_its_warmup_is_answered_with_the_field_that_leads_to_any_schedule(self) -> None:
        with pytest.raises(ConfigError, match=r"'warmup_ratio' is not a field\. warmup_ratio=0.1 is warmup_steps=0.1"):
            TrainerConfig("x", warmup_ratio=0.1)  # type: ignore[call-arg]

    def test_activations_are_computed_again_by_the_models_own_method_or_refused(
        self, toy: Build, classifier: Any
    ) -> None:
        class Able(classifier):  # type: ignore[misc]
            is_on = False

            def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
                self.is_on = True

        model = Able()
        assert toy(gradient_checkpointing=True, arguments={"model": model}).train().num_samples == 20
        assert model.is_on
        with pytest.raises(ConfigError, match="gradient_checkpointing"):
            toy(gradient_checkpointing=True)

    def test_a_compiled_run_has_the_losses_of_the_plain_one(self, toy: Build, monkeypatch: pytest.MonkeyPatch) -> None:
        compiled, whole = [], torch.compile

        def quickly(model: Any, **given: Any) -> Any:
            compiled.append(model)
            return whole(model, **{**given, "backend": "aot_eager"})

        monkeypatch.setattr(torch, "compile", quickly)
        plain, fast = toy(out="plain"), toy(out="fast", compile=True)
        assert fast.train().metrics["train.loss"] == pytest.approx(plain.train().metrics["train.loss"], abs=1e-5)
        assert compiled

    def test_an_evaluation_may_take_some_batches_only(self, toy: Build, rows: Any) -> None:
        sizes: list[int] = []
        trainer = toy(max_eval_batches=2, arguments={"eval_dataset": rows(19)})
        trainer.register_hook_in_eval(lambda ctx: sizes.append(len(ctx.batch["x"])), "on_batch_end")
        assert trainer.evaluate()["loss"] == toy(out="other").evaluate(rows(19)[:8])["loss"]
        assert sizes == [4, 4]

    def test_the_config_in_the_output_folder_reads_back_equal(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy(save_steps=0.5)
        trainer.train()
        assert TrainerConfig.load(tmp_path / "run") == trainer.config


class TestBuilding:
    def test_what_builds_the_optimizer_the_schedule_and_the_hooks_may_be_overridden(self, toy: Build) -> None:
        marks: list[str] = []

        class Own(Trainer):
            def build_optimizer(self, *args: Any) -> Any:
                return torch.optim.SGD(self.model.parameters(), lr=0.25)

            def build_hooks(self) -> list[HookBase | None]:
                return [*super().build_hooks(), Marks(marks)]

        trainer = toy(Own, max_steps=1)
        assert isinstance(trainer.optimizer, torch.optim.SGD)
        assert trainer.optimizer.param_groups[0]["lr"] == 0.25
        trainer.train()
        assert marks == ["before train", "before step", "after step", "after train"]

    def test_norms_and_biases_have_their_own_weight_decay_in_a_run(self, toy: Build) -> None:
        settings = {"optimizer": "adamw", "weight_decay": 0.1, "weight_decay_norm": 0.0, "weight_decay_bias": 0.0}
        groups = toy(**settings).optimizer.param_groups
        assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 1)]

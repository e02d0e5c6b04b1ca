"""What a Trainer accepts, what it refuses before anything happens, and what it leaves alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from hezar_train import EventStorage, Trainer, TrainerConfig, TrainerState
from hezar_train.errors import CheckpointError, ConfigError, DataError
from hezar_train.metrics import ClassificationHandler, MetricsHandler
from hezar_train.runtime import build_runtime
from hezar_train.types import TaskType

Build = Callable[..., Trainer]


@pytest.fixture
def new_accelerator() -> Iterator[Callable[..., Accelerator]]:
    """Make Accelerators as a fresh process would; they keep their first settings in a global."""

    def make(**settings: Any) -> Accelerator:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, **settings)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


class TestArguments:
    def test_config_model_and_data_may_be_positional(self, tmp_path: Path, classifier: Any, rows: Any) -> None:
        model = classifier()
        trainer = Trainer(TrainerConfig(tmp_path, criterion="CrossEntropyLoss", max_steps=1), model, rows())
        assert trainer.model is model
        assert trainer.train().num_samples == 1

    def test_the_first_two_positionals_may_be_swapped(self, tmp_path: Path, classifier: Any, rows: Any) -> None:
        model, config = classifier(), TrainerConfig(tmp_path, criterion="CrossEntropyLoss", max_steps=1)
        trainer = Trainer(model, config, rows())  # type: ignore[arg-type]
        assert trainer.model is model
        assert trainer.config == config

    @pytest.mark.parametrize("missing", ["config", "model", "train_dataset"])
    def test_a_missing_argument_is_named(self, missing: str, tmp_path: Path, classifier: Any, rows: Any) -> None:
        given = {"config": TrainerConfig(tmp_path), "model": classifier(), "train_dataset": rows()} | {missing: None}
        with pytest.raises(ConfigError, match=rf"missing: {missing}\. Pass {missing}=\.\.\.$"):
            Trainer(**given)

    def test_all_missing_arguments_are_named_at_once(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="missing: model, train_dataset"):
            Trainer(TrainerConfig(tmp_path))

    def test_a_config_of_another_kind_is_refused(self, classifier: Any, rows: Any) -> None:
        with pytest.raises(ConfigError, match="config is a dict; expected a TrainerConfig"):
            Trainer({"output_dir": "x"}, classifier(), rows())  # type: ignore[arg-type]

    def test_a_model_of_another_kind_is_refused(self, tmp_path: Path, rows: Any) -> None:
        with pytest.raises(ConfigError, match=r"model is a function; expected a torch\.nn\.Module"):
            Trainer(TrainerConfig(tmp_path), lambda x: x, rows())  # type: ignore[arg-type]

    def test_a_dataset_of_another_kind_is_refused(self, toy: Build) -> None:
        with pytest.raises(DataError, match="the training data is 3, an int; expected a dataset"):
            toy(train_dataset=3)

    def test_an_empty_dataset_is_refused(self, toy: Build) -> None:
        with pytest.raises(DataError, match="training data is empty"):
            toy(train_dataset=[])

    def test_a_plain_list_of_dicts_trains(self, toy: Build) -> None:
        trainer = toy()
        before = copy.deepcopy(trainer.model.state_dict())
        assert trainer.train().num_samples == 20
        assert not torch.equal(before["layer.weight"], trainer.model.state_dict()["layer.weight"])

    def test_the_module_passed_in_is_trained_in_place(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        weight, before = model.layer.weight, model.layer.weight.clone()
        toy(model=model).train()
        assert model.layer.weight is weight
        assert not torch.equal(weight, before)

    def test_after_construction_all_parts_are_there(self, toy: Build) -> None:
        trainer = toy(task="text_classification", lr_scheduler="constant")
        assert isinstance(trainer.state, TrainerState)
        assert isinstance(trainer.accelerator, Accelerator)
        assert isinstance(trainer.optimizer, torch.optim.Adam)
        assert isinstance(trainer.metrics_handler, ClassificationHandler)
        assert isinstance(trainer.storage, EventStorage)
        assert isinstance(trainer.lr_scheduler, torch.optim.lr_scheduler.ConstantLR)
        assert (trainer.state.epoch, trainer.state.global_step) == (1, 0)
        assert (trainer.plan.steps_in_epoch, trainer.plan.total_steps) == (5, 5)


class TestCollator:
    @staticmethod
    def doubling(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate, and tell by the values that it was this collator."""
        return {
            "x": 2 * torch.stack([sample["x"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    def first_batch(self, trainer: Trainer) -> Any:
        windows = trainer.setup.source.windows(trainer.plan, 1, 0, 1)
        return next(iter(windows)).batches[0]

    def test_without_one_samples_are_stacked(self, toy: Build, rows: Any) -> None:
        batch = self.first_batch(toy(dataloader_shuffle=False))
        assert torch.equal(batch["x"], torch.stack([row["x"] for row in rows()[:4]]))
        assert torch.equal(batch["labels"], torch.tensor([row["labels"] for row in rows()[:4]]))

    def test_the_datasets_own_is_used(self, toy: Build, rows: Any) -> None:
        class Collating(list):  # type: ignore[type-arg]
            data_collator = staticmethod(TestCollator.doubling)

        batch = self.first_batch(toy(dataloader_shuffle=False, train_dataset=Collating(rows())))
        assert torch.equal(batch["x"], 2 * torch.stack([row["x"] for row in rows()[:4]]))

    def test_the_argument_wins_over_the_datasets_own(self, toy: Build, rows: Any) -> None:
        class Refusing(list):  # type: ignore[type-arg]
            @staticmethod
            def data_collator(samples: list[Any]) -> Any:
                raise AssertionError("the argument wins")

        trainer = toy(dataloader_shuffle=False, train_dataset=Refusing(rows()), data_collator=self.doubling)
        assert torch.equal(self.first_batch(trainer)["x"], 2 * torch.stack([row["x"] for row in rows()[:4]]))


class TestPreprocessor:
    class Vocabulary:
        def save(self, folder: str) -> None:
            (Path(folder) / "vocab.txt").write_text("سلام\n", encoding="utf-8")

    def test_a_plain_module_needs_none(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy()
        trainer.train()
        assert trainer.preprocessor is None
        assert not (tmp_path / "run/checkpoints/00000005/preprocessor").exists()

    def test_one_that_is_given_is_in_every_checkpoint(self, toy: Build, tmp_path: Path) -> None:
        toy(preprocessor=self.Vocabulary()).train()
        written = tmp_path / "run/checkpoints/00000005/preprocessor/vocab.txt"
        assert written.read_text(encoding="utf-8") == "سلام\n"

    def test_a_model_that_has_none_gets_the_one_given(self, toy: Build, classifier: Any) -> None:
        model, vocabulary = classifier(), self.Vocabulary()
        model.preprocessor = None
        assert toy(model=model, preprocessor=vocabulary).preprocessor is vocabulary
        assert model.preprocessor is vocabulary

    def test_the_models_own_is_kept_with_it(self, toy: Build, classifier: Any, tmp_path: Path) -> None:
        model = classifier()
        model.preprocessor = self.Vocabulary()
        toy(model=model).train()
        assert (tmp_path / "run/checkpoints/00000005/preprocessor/vocab.txt").exists()

    def test_a_layer_called_preprocessor_is_not_one(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        model.preprocessor = nn.Identity()
        assert toy(model=model).preprocessor is None

    def test_one_that_cannot_be_saved_is_refused_now(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match=r"preprocessor object has neither save_pretrained\(folder\) nor save"):
            toy(preprocessor=object())


class TestOptimizerAndScheduler:
    def test_a_passed_optimizer_still_gets_the_configured_schedule(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        trainer = toy(
            model=model, optimizer=optimizer, lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1}, num_epochs=2
        )
        assert trainer.optimizer is optimizer
        assert isinstance(trainer.lr_scheduler, StepLR)
        trainer.train()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * 0.1**2)

    def test_a_passed_optimizer_wins_over_the_configs(self, toy: Build, classifier: Any) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        assert toy(model=model, optimizer=optimizer, learning_rate=7.0).optimizer.param_groups[0]["lr"] == 0.4

    def test_a_passed_scheduler_wins_over_the_configs(self, toy: Build, classifier: Any, tmp_path: Path) -> None:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        scheduler = LambdaLR(optimizer, lambda tick: 1.0)
        config = TrainerConfig(tmp_path, lr_scheduler="step", lr_scheduler_kwargs={"step_size": 1})
        trainer = Trainer(config, model, [{"x": 0}], optimizer=optimizer, lr_scheduler=scheduler)
        assert trainer.lr_scheduler is scheduler

    def test_a_scheduler_over_another_optimizer_is_refused(self, toy: Build, classifier: Any) -> None:
        scheduler = StepLR(torch.optim.SGD(classifier().parameters(), lr=0.1), 1)
        with pytest.raises(ConfigError, match="built over another optimizer"):
            toy(lr_scheduler=scheduler)

    def test_learning_rate_and_weight_decay_are_in_the_groups(self, toy: Build) -> None:
        group = toy(optimizer="adamw", learning_rate=0.03, weight_decay=0.2).optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.03, 0.2)

    def test_an_optimizer_that_trains_nothing_of_the_model_is_refused(self, toy: Build, classifier: Any) -> None:
        with pytest.raises(ConfigError, match="none of the model's parameters"):
            toy(optimizer=torch.optim.SGD(classifier().parameters(), lr=0.1))


class TestAccelerator:
    def test_a_passed_one_is_used(self, toy: Build, new_accelerator: Any) -> None:
        accelerator = new_accelerator(mixed_precision="bf16")
        trainer = toy(accelerator=accelerator)
        assert trainer.accelerator is accelerator
        assert trainer.runtime.precision == "bf16"

    def test_another_precision_than_the_configs_is_refused(self, toy: Build, new_accelerator: Any) -> None:
        with pytest.raises(ConfigError, match=r"mixed_precision='bf16' in the config, but the accelerator runs 'no'"):
            toy(accelerator=new_accelerator(), mixed_precision="bf16")

    def test_another_accumulation_than_the_configs_is_refused(self, toy: Build, new_accelerator: Any) -> None:
        with pytest.raises(ConfigError, match="gradient_accumulation_steps=1 in the config, but the accelerator has 4"):
            toy(accelerator=new_accelerator(gradient_accumulation_steps=4))

    def test_the_same_accumulation_is_no_contradiction(self, toy: Build, new_accelerator: Any) -> None:
        trainer = toy(accelerator=new_accelerator(gradient_accumulation_steps=2), gradient_accumulation_steps=2)
        trainer.train()
        assert (trainer.state.global_step, trainer.state.update_step) == (5, 3)

    def test_another_device_than_the_configs_is_refused(self, tmp_path: Path, new_accelerator: Any) -> None:
        with pytest.raises(ConfigError, match="device='cuda' was asked for, but the accelerator uses 'cpu'"):
            build_runtime(TrainerConfig(tmp_path, device="cuda"), new_accelerator())


class TestHardware:
    def test_the_cpu_is_honoured(self, toy: Build) -> None:
        assert toy(device="cpu").runtime.device == torch.device("cpu")
        assert toy(use_cpu=True).runtime.device == torch.device("cpu")

    def test_the_meta_device_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="device='meta' cannot train"):
            toy(device="meta")

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "xpu"])
    def test_a_device_that_is_not_there_is_refused(self, toy: Build, device: str) -> None:
        with pytest.raises(ConfigError, match=f"device='{device}' is not on this machine"):
            toy(device=device)

    def test_fp16_on_the_cpu_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="mixed_precision='fp16' needs an accelerator"):
            toy(mixed_precision="fp16", device="cpu")

    def test_fp16_with_use_cpu_trains_in_full_precision_and_says_so(
        self, toy: Build, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked = toy(mixed_precision="fp16", use_cpu=True)
        assert "with use_cpu=True, trains in full precision" in caplog.text
        plain = toy(out="plain", use_cpu=True)
        asked.train()
        plain.train()
        ours, theirs = asked.model.state_dict(), plain.model.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    def test_fp8_where_nothing_offers_it_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="mixed_precision='fp8'"):
            toy(mixed_precision="fp8", use_cpu=True)

    def test_bf16_trains_and_the_forward_runs_in_it(self, toy: Build) -> None:
        seen = set()

        class Watching(Trainer):
            def forward(self, batch: Any) -> dict[str, Any]:
                outputs = super().forward(batch)
                seen.add(outputs["logits"].dtype)
                return outputs

        trainer = toy(Watching, mixed_precision="bf16", max_steps=3)
        trainer.train()
        assert trainer.state.update_step == 3
        assert seen == {torch.bfloat16}
        assert trainer.model.layer.weight.dtype == torch.float32  # type: ignore[union-attr]

    @pytest.mark.parametrize("name", [None, "no", "full"])
    def test_full_precision_has_three_spellings(self, toy: Build, name: str | None) -> None:
        assert toy(mixed_precision=name).runtime.precision == "no"

    def test_one_process_after_another_may_use_another_precision(self, toy: Build) -> None:
        assert [toy(mixed_precision=name).runtime.precision for name in ("bf16", None, "bf16")] == [
            "bf16",
            "no",
            "bf16",
        ]

    def test_a_second_trainer_does_not_change_the_precision_of_the_first(self, toy: Build) -> None:
        first = toy(mixed_precision="bf16")
        toy(mixed_precision="no", out="other")
        AcceleratorState._reset_state(reset_partial_state=True)
        outputs = first.evaluation_step({"x": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.long)})
        assert outputs["logits"].dtype == torch.bfloat16

    def test_distributed_with_one_process_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="distributed=True, but there is one process"):
            toy(distributed=True)

    def test_a_launchers_processes_that_came_up_apart_are_refused(
        self, toy: Build, monkeypatch: pytest.MonkeyPatch, new_accelerator: Any
    ) -> None:
        accelerator = new_accelerator()
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="the launcher started 2 processes"):
            toy(accelerator=accelerator)
        assert PartialState().num_processes == 1


class TestEvaluationAndBest:
    def test_do_evaluate_without_data_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match="do_evaluate=True, but no eval_dataset was given"):
            toy(do_evaluate=True)

    def test_empty_evaluation_data_is_refused_now_and_not_after_an_epoch(self, toy: Build) -> None:
        with pytest.raises(DataError, match="eval_dataset is empty"):
            toy(eval_dataset=[])

    def test_without_being_told_it_evaluates_if_there_is_data(self, toy: Build, rows: Any) -> None:
        assert toy(eval_dataset=rows(3)).evaluates
        assert not toy().evaluates

    def test_do_evaluate_false_forbids_it(self, toy: Build, rows: Any) -> None:
        trainer = toy(eval_dataset=rows(3), do_evaluate=False)
        assert not trainer.evaluates
        assert set(trainer.train().metrics) == {"train.loss"}

    @pytest.mark.parametrize(
        ("given", "key"),
        [
            ("loss", "evaluation.loss"),
            ("accuracy", "evaluation.accuracy"),
            ("evaluation.accuracy", "evaluation.accuracy"),
            ("train.loss", "train.loss"),
        ],
    )
    def test_the_metric_for_the_best_model_gets_its_full_name(
        self, toy: Build, rows: Any, given: str, key: str
    ) -> None:
        trainer = toy(task="text_classification", eval_dataset=rows(3), metric_for_best_model=given)
        assert trainer.state.metric_for_best_checkpoint == key

    def test_without_evaluation_the_training_loss_decides(self, toy: Build) -> None:
        assert toy().state.metric_for_best_checkpoint == "train.loss"

    def test_an_unknown_metric_is_refused_with_what_there_will_be(self, toy: Build, rows: Any) -> None:
        message = r"metric_for_best_model='acuracy' is not a result.*evaluation\.accuracy.*Did you mean"
        with pytest.raises(ConfigError, match=message):
            toy(task="text_classification", eval_dataset=rows(3), metric_for_best_model="acuracy")

    def test_a_metric_of_evaluation_without_evaluation_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match=r"'evaluation\.loss' is not a result of this run"):
            toy(metric_for_best_model="evaluation.loss")

    def test_a_handler_that_is_passed_in_is_used(self, toy: Build, rows: Any) -> None:
        class Counting(MetricsHandler):
            valid_metrics = ("count",)

            def reset(self) -> None:
                self.seen = 0

            def update(self, outputs: Any, labels: Any) -> None:
                self.seen += len(labels)

            def compute(self) -> dict[str, float]:
                return {"count": self.seen}

        trainer = toy(eval_dataset=rows(7), metrics_handler=Counting(), metric_for_best_model="count")
        assert trainer.train().metrics["evaluation.count"] == 7

    @pytest.mark.parametrize("task", [*TaskType])
    def test_every_task_constructs(self, toy: Build, task: TaskType) -> None:
        assert toy(task=task).config.task == task

    def test_a_metric_that_the_task_does_not_have_is_refused(self, toy: Build) -> None:
        with pytest.raises(ConfigError, match=r"metrics has 'bleu', which ClassificationHandler does not compute"):
            toy(task="text_classification", metrics=["bleu"])


class TestConfig:
    def test_fields_assigned_wrongly_after_construction_are_all_told(self, tmp_path: Path, classifier: Any) -> None:
        config = TrainerConfig(tmp_path)
        config.batch_size, config.num_epochs, config.learning_rate = 0, -1, -0.5
        with pytest.raises(ConfigError) as raised:
            Trainer(config, classifier(), [{"x": 0}])
        assert [problem.partition("=")[0] for problem in raised.value.problems] == [
            "num_epochs", "batch_size", "learning_rate",
        ]  # fmt: skip

    def test_the_config_is_never_changed(self, tmp_path: Path, classifier: Any, rows: Any) -> None:
        config = TrainerConfig(
            tmp_path / "a", criterion="CrossEntropyLoss", num_epochs=2, batch_size=4, max_steps=0.7, save_steps=0.5,
            log_steps=0.25, lr_scheduler="one_cycle", lr_scheduling_steps=0.1, eval_steps=0.5,
        )  # fmt: skip
        before = copy.deepcopy(config)
        trainer = Trainer(config, classifier(), rows(), rows(3))
        trainer.train()
        assert config == before
        assert trainer.config == before
        assert TrainerConfig.load(tmp_path / "a") == before

    def test_a_later_change_of_the_users_config_does_not_reach_the_trainer(
        self, tmp_path: Path, classifier: Any
    ) -> None:
        config = TrainerConfig(tmp_path, lr_scheduler_kwargs={})
        trainer = Trainer(config, classifier(), [{"x": 0}])
        config.num_epochs, config.lr_scheduler_kwargs = 9, {"gamma": 1}
        assert (trainer.config.num_epochs, trainer.config.lr_scheduler_kwargs) == (1, {})

    def test_construction_writes_nothing(self, toy: Build, tmp_path: Path, rows: Any) -> None:
        toy(eval_dataset=rows(3), save_steps=1, log_steps=1, resume_from_checkpoint=True)
        assert list(tmp_path.iterdir()) == []

    def test_the_name_of_the_csv_file_can_be_overridden(self, toy: Build, tmp_path: Path) -> None:
        class Renamed(Trainer):
            trainer_csv_log_file = "history.csv"
            trainer_config_file = "asked.yaml"

        trainer = toy(Renamed)
        trainer.train()
        assert [path.name for path in (tmp_path / "run/logs").glob("*/*.csv")] == ["history.csv"]
        assert trainer.load_csv_logs()["step"] == [5]
        assert TrainerConfig.load(tmp_path / "run", "asked.yaml") == trainer.config

    def test_the_two_folders_appear_under_the_output_folder(self, toy: Build, tmp_path: Path) -> None:
        toy(checkpoints_dir="states/all", logs_dir="notes").train()
        assert (tmp_path / "run/states/all/00000005/manifest.json").exists()
        assert len(list((tmp_path / "run/notes").glob("*/training_logs.csv"))) == 1

    def test_the_seed_decides_the_weights_bit_by_bit(self, toy: Build) -> None:
        def weights(out: str, seed: int) -> list[float]:
            trainer = toy(out=out, seed=seed)
            trainer.train()
            return trainer.model.layer.weight.flatten().tolist()  # type: ignore[union-attr, operator]

        assert weights("a", 7) == weights("b", 7)
        assert weights("a", 7) != weights("c", 8)


class TestInitialWeights:
    def test_all_are_loaded_by_name(self, toy: Build, classifier: Any, tmp_path: Path) -> None:
        source = classifier(seed=5)
        save_file(source.state_dict(), tmp_path / "model.safetensors")
        trainer = toy(init_weights_from=tmp_path)
        assert torch.equal(trainer.model.layer.weight, source.layer.weight)  # type: ignore[union-attr, arg-type]

    def test_a_partial_load_warns_and_lists_the_keys(
        self, toy: Build, classifier: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        weight = torch.full((3, 4), 0.5)
        save_file({"layer.weight": weight, "head.bias": torch.zeros(2)}, tmp_path / "model.safetensors")
        with caplog.at_level(logging.INFO, "hezar_train"):
            trainer = toy(init_weights_from=tmp_path)
        assert torch.equal(trainer.model.layer.weight, weight)  # type: ignore[union-attr, arg-type]
        assert torch.equal(trainer.model.layer.bias, classifier().layer.bias)  # type: ignore[union-attr, arg-type]
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings == [
            "not in it, so left as they are: layer.bias",
            "in it, but not in the model: head.bias",
        ]

    def test_same_shapes_under_other_names_are_not_taken(self, toy: Build, tmp_path: Path) -> None:
        save_file({"a": torch.ones(3, 4), "b": torch.ones(3)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="none of its 2 tensors has the name and shape"):
            toy(init_weights_from=tmp_path)

    def test_they_are_not_read_when_a_run_is_resumed(self, toy: Build, tmp_path: Path) -> None:
        toy(num_epochs=1).train()
        (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
        again = toy(num_epochs=2, resume_from_checkpoint=True, init_weights_from=tmp_path)
        assert again.state.global_step == 5

    def test_they_are_read_when_there_is_nothing_to_resume(self, toy: Build, classifier: Any, tmp_path: Path) -> None:
        source = classifier(seed=5)
        save_file(source.state_dict(), tmp_path / "model.safetensors")
        trainer = toy(init_weights_from=tmp_path, resume_from_checkpoint=True)
        assert torch.equal(trainer.model.layer.weight, source.layer.weight)  # type: ignore[union-attr, arg-type]

    def test_a_missing_source_is_an_error(self, toy: Build, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="does not exist"):
            toy(init_weights_from=tmp_path / "nowhere")

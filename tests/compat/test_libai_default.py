"""LiBai's `DefaultTrainer(cfg)`: it trains as LiBai's own loop does, calls what users override, or says why not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.compat.libai import (
    DefaultTrainer,
    EagerTrainer,
    EventWriter,
    GraphTrainer,
    HookBase,
    TrainerBase,
    hooks,
)
from hezar_train.compat.libai import distributed as dist
from hezar_train.compat.libai.config import LazyCall, as_config
from hezar_train.compat.libai.data import Instance, build_nlp_train_val_test_loader
from hezar_train.compat.libai.evaluation import DatasetEvaluator
from hezar_train.compat.libai.optim import clip_groups, get_default_optimizer_params, reduce_param_groups
from hezar_train.compat.libai.scheduler import WarmupStepLR, build_lr_scheduler
from hezar_train.errors import CheckpointError, ConfigError, DataError, HookError
from hezar_train.events import get_event_storage

SPEC = importlib.util.spec_from_file_location("libai_run", Path(__file__).with_name("libai_run.py"))
assert SPEC is not None
assert SPEC.loader is not None
libai_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(libai_run)
config_of, weights_of, Classifier = libai_run.config_of, libai_run.weights_of, libai_run.Classifier

QUIET = "train.evaluation.enabled=False"


class Recording(DefaultTrainer):
    """Keep each batch that the model is given."""

    seen: list[Any]

    @classmethod
    def get_batch(cls, data: Any, input_placement_device: Any = "cuda", mixup_func: Any = None) -> dict[str, Any]:
        batch = super().get_batch(data, input_placement_device, mixup_func)
        cls.seen.append(batch)
        return batch


def as_libai_trains(cfg: Any, batches: list[Any]) -> tuple[list[torch.Tensor], list[float]]:
    """Train by the code of LiBai's own eager loop; return the weights and the rates."""
    model = DefaultTrainer.build_model(cfg)
    optimizer = DefaultTrainer.build_optimizer(cfg, model)
    scheduler = DefaultTrainer.build_lr_scheduler(cfg, optimizer)
    assert scheduler is not None
    parts, rates = cfg.train.num_accumulation_steps, []
    for number, batch in enumerate(batches):
        (sum(model(**batch).values()) / parts).backward()
        if (number + 1) % parts == 0:
            clip_groups(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return [one.detach() for one in model.parameters()], rates


class TinyForCausalLM(nn.Module):
    """A model of texts, whose loss is a mean over the labels that are not hidden."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(7, 3), nn.Linear(3, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.words(input_ids))
        return {"lm_loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def loader_of_texts(in_instances: bool, train_batch_size: int, **_: Any) -> tuple[Any, None, None]:
    texts = torch.randint(7, (24, 5), generator=torch.Generator().manual_seed(1))
    labels = texts.roll(-1, 1).masked_fill(torch.arange(5) > torch.arange(24)[:, None] % 5, -100)
    rows = [{"input_ids": text, "labels": label} for text, label in zip(texts, labels, strict=True)]

    def collate(several: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(several)
        return Instance(**batch) if in_instances else batch

    return torch.utils.data.DataLoader(rows, batch_size=train_batch_size, collate_fn=collate), None, None


class TestTraining:
    @pytest.mark.parametrize("parts", [1, 2])
    @pytest.mark.filterwarnings("ignore:Detected call of")
    def test_weights_and_rates_are_those_of_libais_own_loop(self, parts: int, tmp_path: Path) -> None:
        Recording.seen = []
        trainer = Recording(config_of(tmp_path, QUIET, f"train.num_accumulation_steps={parts}"))
        trainer.train()
        weights, rates = as_libai_trains(trainer.cfg, Recording.seen)
        assert len(Recording.seen) == trainer.max_iter == 12 * parts
        for ours, theirs in zip(weights_of(trainer), weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert [rate for rate, _ in trainer.storage.history("lr").values()] == pytest.approx(rates)

    @pytest.mark.parametrize("in_instances", [False, True])
    def test_micro_batches_count_alike_whatever_the_model_is_called_and_its_labels_hide(
        self, in_instances: bool, tmp_path: Path
    ) -> None:
        cfg = config_of(tmp_path, QUIET, "train.num_accumulation_steps=2")
        cfg.model = LazyCall(TinyForCausalLM)()
        cfg.dataloader.train = LazyCall(loader_of_texts)(in_instances=in_instances)
        Recording.seen = []
        trainer = Recording(cfg)
        trainer.train()
        weights, _ = as_libai_trains(trainer.cfg, Recording.seen)
        for ours, theirs in zip(weights_of(trainer), weights, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)

    def test_the_losses_are_put_under_their_names_with_their_sum_by_iteration(self, tmp_path: Path) -> None:
        trainer = DefaultTrainer(config_of(tmp_path, QUIET))
        trainer.train()
        found = {name: trainer.storage.history(name).values() for name in ("total_loss", "cls_loss", "size_loss")}
        assert [number for _, number in found["total_loss"]] == list(range(12))
        total, first, second = (found[name][3][0] for name in ("total_loss", "cls_loss", "size_loss"))
        assert total == pytest.approx(first + second)

    def test_without_the_hook_that_ticks_it_the_rate_stays_as_in_libai(self, tmp_path: Path) -> None:
        class Unscheduled(DefaultTrainer):
            def build_hooks(self) -> list[Any]:
                return []

        trainer = Unscheduled(config_of(tmp_path, QUIET))
        first = trainer.optimizer.param_groups[0]["lr"]
        trainer.train()
        assert trainer.optimizer.param_groups[0]["lr"] == first

    def test_a_run_in_two_calls_is_that_of_one(self, tmp_path: Path) -> None:
        whole, cut = DefaultTrainer(config_of(tmp_path / "a", QUIET)), DefaultTrainer(config_of(tmp_path / "b", QUIET))
        whole.train()
        cut.train(0, 5)
        assert (cut.iter, cut.max_iter) == (5, 12)
        cut.train(5, 12)
        assert all(map(torch.equal, weights_of(whole), weights_of(cut)))

    def test_a_call_that_cannot_be_is_refused(self, tmp_path: Path) -> None:
        trainer = DefaultTrainer(config_of(tmp_path, QUIET))
        with pytest.raises(DataError, match="the run is at iteration 0"):
            trainer.train(3, 12)
        with pytest.raises(ConfigError, match="planned for 12"):
            trainer.train(0, 13)
        with pytest.raises(AttributeError, match=r"it follows from train\.train_iter"):
            trainer.max_iter = 6

    def test_an_epoch_of_training_is_counted_in_iterations(self, tmp_path: Path) -> None:
        cfg = config_of(tmp_path, QUIET, "train.train_iter=1", "train.train_epoch=2")
        assert DefaultTrainer(cfg).max_iter == 16
        assert cfg.train.scheduler.max_iter == 16


class TestStep:
    @pytest.mark.parametrize("parts", [1, 2])
    def test_a_step_of_ones_own_trains_as_the_default_one(self, parts: int, tmp_path: Path) -> None:
        class Own(EagerTrainer):
            def run_step(self, get_batch: Callable[..., Any]) -> None:  # type: ignore[override]
                loss_dict = self.model(**get_batch(next(self._data_loader_iter)))
                (sum(loss_dict.values()) / self.grad_acc_steps).backward()
                self.write_metrics(loss_dict, 0.0)
                if (self.iter + 1) % self.grad_acc_steps == 0:
                    self.optimizer.clip_grad()  # type: ignore[attr-defined]
                    self.optimizer.step()
                    self.optimizer.zero_grad()

        overrides = QUIET, f"train.num_accumulation_steps={parts}"
        plain = DefaultTrainer(config_of(tmp_path / "a", *overrides))
        own = self.with_step(Own, tmp_path / "b", *overrides)
        plain.train()
        own.train()
        assert all(map(torch.equal, weights_of(plain), weights_of(own)))
        assert own.state.update_step == 12

    @pytest.mark.parametrize("parts", [1, 2])
    def test_a_step_that_calls_the_inherited_one_trains_as_the_default_one(self, parts: int, tmp_path: Path) -> None:
        class Keeping(EagerTrainer):
            num_steps = 0

            def run_step(self, get_batch: Any = None, input_placement_device: str = "cuda") -> None:
                super().run_step(get_batch, input_placement_device)
                self.num_steps += 1

        overrides = QUIET, f"train.num_accumulation_steps={parts}"
        plain = DefaultTrainer(config_of(tmp_path / "a", *overrides))
        own = self.with_step(Keeping, tmp_path / "b", *overrides)
        plain.train()
        own.train()
        assert own._trainer.num_steps == 12 * parts
        for ours, theirs in zip(weights_of(own), weights_of(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)

    def test_a_step_of_the_optimizer_in_the_middle_of_an_update_is_refused(self, tmp_path: Path) -> None:
        class Early(EagerTrainer):
            def run_step(self, get_batch: Callable[..., Any]) -> None:  # type: ignore[override]
                loss_dict = self.model(**get_batch(next(self._data_loader_iter)))
                sum(loss_dict.values()).backward()
                self.write_metrics(loss_dict, 0.0)
                self.optimizer.step()

        trainer = self.with_step(Early, tmp_path, QUIET, "train.num_accumulation_steps=2")
        before = weights_of(trainer)
        with pytest.raises(HookError, match="stepped the optimizer on micro-batch 1 of 2"):
            trainer.train()
        assert all(map(torch.equal, before, weights_of(trainer)))

    def test_a_step_that_tells_no_loss_is_refused(self, tmp_path: Path) -> None:
        class Silent(TrainerBase):
            def run_step(self, get_batch: Callable[..., Any]) -> None:  # type: ignore[override]
                """Do nothing."""

        trainer = self.with_step(lambda *_: Silent(), tmp_path)
        with pytest.raises(DataError, match=r"told no loss: call self\.write_metrics"):
            trainer.train()

    def test_a_step_that_asks_for_two_batches_is_refused(self, tmp_path: Path) -> None:
        class Greedy(EagerTrainer):
            def run_step(self, get_batch: Callable[..., Any]) -> None:  # type: ignore[override]
                next(self._data_loader_iter), next(self._data_loader_iter)

        with pytest.raises(DataError, match="asked for a batch that the loop has not fetched"):
            self.with_step(Greedy, tmp_path).train()

    def test_an_optimizer_of_the_step_is_in_the_checkpoint(self, tmp_path: Path) -> None:
        class Two(EagerTrainer):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                self.critic = nn.Linear(2, 1)
                self.critic_optimizer = torch.optim.Adam(self.critic.parameters())

            def run_step(self, get_batch: Any = None, input_placement_device: str = "cuda") -> None:
                super().run_step(get_batch, input_placement_device)
                self.critic(torch.ones(2)).backward()
                self.critic_optimizer.step()
                self.critic_optimizer.zero_grad()

        trainer = self.with_step(Two, tmp_path)
        trainer.train()
        again = self.with_step(Two, tmp_path, QUIET, "train.resume=True")
        again.train()
        assert torch.equal(trainer._trainer.critic.weight, again._trainer.critic.weight)

    @staticmethod
    def with_step(step: Callable[..., Any], folder: Path, *overrides: str) -> Any:
        class Stepping(DefaultTrainer):
            def __init__(self, cfg: Any) -> None:
                super().__init__(cfg)
                parts = cfg.train.num_accumulation_steps
                self._trainer = step(self.model, self.train_loader, self.optimizer, parts)

        return Stepping(config_of(folder, *(overrides or (QUIET,))))

    def test_a_graph_trainer_says_what_takes_its_place(self) -> None:
        with pytest.raises(ConfigError, match="compile=True"):
            GraphTrainer(None, [])


class TestBuilding:
    def test_each_class_method_is_called_in_libais_order(self, tmp_path: Path) -> None:
        called: list[str] = []

        def noting(name: str) -> Any:
            def method(cls: Any, *args: Any) -> Any:
                called.append(name)
                return getattr(super(Noting, cls), name)(*args)

            return method

        classes = (
            "build_tokenizer", "build_train_loader", "build_test_loader", "auto_scale_hyperparams", "build_model",
            "build_optimizer", "build_lr_scheduler",
        )  # fmt: skip
        own = {name: classmethod(noting(name)) for name in classes}
        Noting: Any = type("Noting", (DefaultTrainer,), {**own, "build_hooks": noting("build_hooks")})
        Noting(config_of(tmp_path))
        assert called == [*classes, "build_hooks"]

    def test_methods_of_the_trainer_around_a_step_are_called(self, tmp_path: Path) -> None:
        seen: list[tuple[str, int]] = []

        class Watching(DefaultTrainer):
            def before_step(self) -> None:
                seen.append(("before", self.iter))
                super().before_step()

            def after_step(self) -> None:
                super().after_step()
                seen.append(("after", self.storage.iter))

            def after_train(self) -> None:
                super().after_train()
                seen.append(("end", self.iter))

        trainer = Watching(config_of(tmp_path, QUIET))
        trainer.train()
        assert seen == [(word, number) for number in range(12) for word in ("before", "after")] + [("end", 12)]
        assert len(trainer.storage.history("time").values()) == 10

    def test_hooks_that_an_override_does_not_call_are_not_called(self, tmp_path: Path) -> None:
        class Alone(DefaultTrainer):
            def after_step(self) -> None:
                for hook in self._hooks[:1]:
                    hook.after_step()

        trainer = Alone(config_of(tmp_path, QUIET))
        trainer.train()
        assert "time" in trainer.storage.latest()
        assert "lr" not in trainer.storage.latest()

    def test_a_graph_of_ones_own_is_refused(self, tmp_path: Path) -> None:
        class Graphing(DefaultTrainer):
            @classmethod
            def build_graph(cls, *args: Any, **kwargs: Any) -> Any:
                """Build nothing."""

        with pytest.raises(ConfigError, match="overrides build_graph"):
            Graphing(config_of(tmp_path))

    def test_a_subclass_of_the_plain_trainer_is_told_where_these_methods_are_called(self, tmp_path: Path) -> None:
        from hezar_train import Trainer, TrainerConfig

        class Misplaced(Trainer):
            def before_step(self) -> None:
                """Never called."""

        with pytest.raises(ConfigError, match=r"before_step, which a Trainer never calls.*compat.libai import"):
            Misplaced(TrainerConfig(tmp_path), nn.Linear(1, 1), [1])


class Gathering(EventWriter):
    """Read the storage as LiBai's writers do."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def write(self) -> None:  # type: ignore[override]
        storage = get_event_storage()
        self.rows.append((storage.iter, round(storage.latest()["total_loss"][0], 6)))

    def close(self) -> None:
        self.rows.append("closed")


class TestHooks:
    def test_evaluations_come_at_their_period_and_once_at_the_end(self, tmp_path: Path) -> None:
        at: list[int] = []

        class Testing(DefaultTrainer):
            @classmethod
            def test(cls, cfg: Any, test_loaders: Any, model: Any) -> dict[str, Any]:  # type: ignore[override]
                at.append(get_event_storage().iter)
                return super().test(cfg, test_loaders, model)

        trainer = Testing(config_of(tmp_path))
        trainer.train()
        assert at == [4, 9, 12]
        assert len(trainer.storage.history("Acc@1").values()) == 3

    def test_the_best_model_is_the_best_evaluation(self, tmp_path: Path) -> None:
        values = iter([0.5, float("nan"), 0.7, 0.6])

        class Judged(DefaultTrainer):
            @classmethod
            def test(cls, *args: Any, **kwargs: Any) -> dict[str, float]:  # type: ignore[override]
                return {"Acc@1": next(values)}

        trainer = Judged(config_of(tmp_path, "train.evaluation.eval_period=3"))
        trainer.train()
        best = next(hook for hook in trainer._hooks if isinstance(hook, hooks.BestCheckpointer))
        assert (best.best_metric, best.best_iter) == (0.7, 8)
        assert (tmp_path / "model_best" / "model.safetensors").exists()

    def test_a_writer_of_libais_kind_writes_at_its_period_and_is_closed(self, tmp_path: Path) -> None:
        class Writing(DefaultTrainer):
            def build_writers(self) -> list[EventWriter]:
                self.gathered = Gathering()
                return [*super().build_writers(), self.gathered]

        trainer = Writing(config_of(tmp_path, QUIET))
        trainer.train()
        losses = {number: round(value, 6) for value, number in trainer.storage.history("total_loss").values()}
        assert trainer.gathered.rows[:4] == [(number, losses[number]) for number in (2, 5, 8, 11)]
        assert trainer.gathered.rows[-1] == "closed"
        lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
        assert [line["iteration"] for line in lines][:4] == [2, 5, 8, 11]

    def test_a_checkpointer_of_ones_own_gets_its_folders(self, tmp_path: Path) -> None:
        from hezar_train.compat.libai import Checkpointer

        class Saving(DefaultTrainer):
            def build_hooks(self) -> list[Any]:
                mine = Checkpointer(self.model, tmp_path / "mine")
                return [hooks.PeriodicCheckpointer(mine, 4, max_to_keep=2), None]

        Saving(config_of(tmp_path / "run", QUIET)).train()
        kept = sorted(path.name for path in (tmp_path / "mine").iterdir() if path.is_dir())
        assert kept == ["model_0000007", "model_0000011", "model_final"]

    def test_a_checkpointer_of_the_runs_folder_finds_what_was_saved_last(self, tmp_path: Path) -> None:
        from hezar_train.compat.libai import Checkpointer

        trainer = DefaultTrainer(config_of(tmp_path, QUIET))
        assert not trainer.checkpointer.has_checkpoint()
        assert trainer.checkpointer.get_checkpoint_file() is None
        trainer.train()
        other = Classifier()
        finding = Checkpointer(other, save_dir=tmp_path)
        assert finding.has_checkpoint()
        assert finding.get_checkpoint_file() == tmp_path / "checkpoints" / "00000012"
        finding.resume_or_load("", resume=True)
        assert all(map(torch.equal, other.parameters(), weights_of(trainer)))
        trainer.checkpointer.save("mine")
        assert finding.get_checkpoint_file() == tmp_path / "mine"
        with pytest.raises(CheckpointError, match=r"no model_final. There are: .*00000012; .* stands for the newest"):
            finding.load(tmp_path / "model_final")
        finding.load(tmp_path)

    def test_the_run_saves_at_the_period_of_the_hook(self, tmp_path: Path) -> None:
        DefaultTrainer(config_of(tmp_path, QUIET, "train.checkpointer.period=5")).train()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
            "00000005",
            "00000008",
            "00000010",
            "00000012",
        ]

    def test_another_number_to_keep_than_the_config_says_is_refused(self, tmp_path: Path) -> None:
        class Keeping(DefaultTrainer):
            def build_hooks(self) -> list[Any]:
                return [hooks.PeriodicCheckpointer(self.checkpointer, 4, max_to_keep=3)]

        with pytest.raises(HookError, match=r"max_to_keep=3, but the run keeps 100"):
            Keeping(config_of(tmp_path, QUIET)).train()


class TestResume:
    @pytest.mark.parametrize("parts", [1, 2])
    def test_a_run_that_was_broken_off_goes_on_as_the_unbroken_one(self, parts: int, tmp_path: Path) -> None:
        overrides = f"train.num_accumulation_steps={parts}", "train.checkpointer.period=4"
        whole = DefaultTrainer(config_of(tmp_path / "whole", *overrides))
        whole.train()

        class Crash(HookBase):
            def after_step(self) -> None:
                if self.trainer.iter == 9:
                    raise KeyboardInterrupt

        class Breaking(DefaultTrainer):
            def build_hooks(self) -> list[Any]:
                return [*super().build_hooks(), Crash()]

        with pytest.raises(KeyboardInterrupt):
            Breaking(config_of(tmp_path / "cut", *overrides)).train()
        again = DefaultTrainer(config_of(tmp_path / "cut", *overrides, "train.resume=True"))
        assert again.iter == again.start_iter == again.cfg.train.start_iter == 8
        again.train()
        assert all(map(torch.equal, weights_of(whole), weights_of(again)))
        assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
        assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "cut")

    def test_resuming_where_there_is_nothing_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="Begin without --resume"):
            DefaultTrainer(config_of(tmp_path, "train.resume=True"))

    def test_load_weight_takes_the_weights_alone(self, tmp_path: Path) -> None:
        first = DefaultTrainer(config_of(tmp_path / "a", QUIET))
        first.train()
        second = DefaultTrainer(config_of(tmp_path / "b", QUIET, f"train.load_weight={tmp_path / 'a'}"))
        assert all(map(torch.equal, weights_of(first), weights_of(second)))
        assert second.iter == 0


def lines_of(folder: Path) -> list[Any]:
    """Return the lines of metrics.json without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    clocked = {"time", "train.time", "eta_seconds", "train.samples_per_second", "data_time"}
    return [{name: value for name, value in row.items() if name not in clocked} for row in rows]


class TestConfig:
    def test_keys_that_nobody_reads_are_listed(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("WARNING", "hezar_train"):
            DefaultTrainer(config_of(tmp_path, "+train.ema=0.99", "+train.topk=5"))
        assert "nothing here reads these keys of the config's group `train`: ema, topk" in caplog.text

    @pytest.mark.parametrize(
        ("sizes", "found"),
        [
            ((4, None, None), (4, 4, 1)),
            ((4, 8, None), (4, 8, 2)),
            ((None, 8, 2), (4, 8, 2)),
            ((4, None, 3), (4, 12, 3)),
        ],
    )
    def test_the_missing_batch_size_is_worked_out(self, sizes: Any, found: Any, tmp_path: Path) -> None:
        names = ("train_micro_batch_size", "global_batch_size", "num_accumulation_steps")
        overrides = [
            f"train.{name}={'null' if size is None else size}" for name, size in zip(names, sizes, strict=True)
        ]
        cfg = DefaultTrainer(config_of(tmp_path, QUIET, *overrides)).cfg
        assert tuple(cfg.train[name] for name in names) == found

    def test_batch_sizes_that_do_not_go_together_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"global_batch_size=9 is no multiple of 4"):
            DefaultTrainer(config_of(tmp_path, "train.global_batch_size=9"))
        with pytest.raises(ConfigError, match="4 x 1 x 3"):
            DefaultTrainer(config_of(tmp_path, "train.global_batch_size=8", "train.num_accumulation_steps=3"))

    def test_a_config_without_a_group_says_which(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no group `train`"):
            DefaultTrainer({"model": LazyCall(Classifier)()})

    def test_a_model_that_returns_no_loss_is_told(self, tmp_path: Path) -> None:
        class Mute(Classifier):  # type: ignore[misc, valid-type]
            def forward(self, images: Any, labels: Any = None) -> Any:
                return {"scores": self.layers(images)}

        cfg = config_of(tmp_path, QUIET)
        cfg.model = LazyCall(Mute)()
        with pytest.raises(DataError, match=r"no output has 'loss' in its name\. The model returned: scores"):
            DefaultTrainer(cfg).train()


class TestTest:
    def test_evaluators_see_every_batch_in_evaluation_mode(self, tmp_path: Path) -> None:
        class Counting(DatasetEvaluator):
            def reset(self) -> None:
                self.sizes: list[int] = []

            def process(self, inputs: Any, outputs: Any) -> None:
                self.sizes.append(len(outputs["prediction_scores"]))

            def evaluate(self) -> dict[str, Any]:
                return {"sizes": sum(self.sizes), "batches": len(self.sizes)}

        cfg = config_of(tmp_path, "train.test_micro_batch_size=6")
        loaders, model = DefaultTrainer.build_test_loader(cfg), DefaultTrainer.build_model(cfg)
        assert DefaultTrainer.test(cfg, loaders, model, Counting()) == {"sizes": 16, "batches": 3}
        assert model.training
        two = DefaultTrainer.test(cfg, [*loaders, *loaders], model, Counting())
        assert list(two) == ["Points", "Points_1"]


class TestWhatConfigsCall:
    """Functions that configs and trainers of LiBai's users import from its modules."""

    def test_groups_of_equal_settings_are_joined_and_later_settings_count(self) -> None:
        first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        found = reduce_param_groups(
            [
                {"params": [first], "lr": 0.1},
                {"params": [second], "lr": 0.2},
                {"params": [third, first], "lr": 0.2},
            ]
        )
        assert [(group["lr"], [id(one) for one in group["params"]]) for group in found] == [
            (0.2, [id(first), id(second), id(third)])
        ]

    def test_libais_own_layer_norm_turned_into_torch_is_a_norm(self) -> None:
        class LayerNorm(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

        model = nn.Sequential(nn.Linear(3, 3, bias=False), LayerNorm())
        found = get_default_optimizer_params(model, weight_decay=0.1, weight_decay_norm=0.0)
        assert [(group["weight_decay"], len(group["params"])) for group in found] == [(0.1, 1), (0.0, 1)]

    def test_a_schedule_is_built_from_its_config(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        cfg = LazyCall(WarmupStepLR)(max_iter=8, step_size=2, warmup_factor=0.1, warmup_iter=0)
        made = build_lr_scheduler(cfg, optimizer)
        assert made.optimizer is optimizer


def test_a_loader_of_indexed_files_is_refused_when_it_is_called() -> None:
    with pytest.raises(DataError, match=r"indexed files.* Use LazyCall\(build_nlp_train_loader\)"):
        build_nlp_train_val_test_loader(dataset=[], splits=[[1.0]])


class TestProcesses:
    def test_what_makes_tensors_global_leaves_them_as_they_are(self) -> None:
        tensor = torch.ones(2, requires_grad=True)
        assert dist.ttol(tensor, True, "cuda", [0]) is tensor
        assert dist.tton(tensor).tolist() == [1.0, 1.0]
        assert (dist.get_layer_placement(-1), dist.get_nd_sbp([None, None])) == (None, None)

    def test_the_model_is_whole_on_each_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (dist.get_tensor_parallel_size(), dist.get_pipeline_parallel_size(), dist.get_num_nodes()) == (1, 1, 1)
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert dist.get_num_nodes() == 2

    def test_sizes_beyond_the_processes_are_those_of_the_processes_as_in_libai(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        cfg = as_config({"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 4})
        dist.setup_dist_util(cfg)
        sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        assert cfg == {**sizes, "num_nodes": 1, "num_gpus_per_node": 1, "pipeline_num_layers": 10_000}
        assert "data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=4: the number of" in caplog.text
        caplog.clear()
        dist.setup_dist_util(cfg)
        dist.setup_dist_util(None)
        assert not caplog.messages
        monkeypatch.setenv("WORLD_SIZE", "2")
        dist.setup_dist_util(cfg)
        assert cfg.data_parallel_size == 2

    @pytest.mark.parametrize("name", ["tensor", "pipeline"])
    def test_a_model_that_would_really_be_cut_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=rf"{name}_parallel_size=2.* on 2 processes would cut the model.* to 1;"):
            dist.setup_dist_util(as_config({f"{name}_parallel_size": 2}))

    def test_the_sizes_may_be_asked_of_an_object(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        found = dist.get_dist_util()
        assert (found.data_parallel_size, found.world_size, found.is_data_parallel()) == (2, 2, True)
        assert (found.model_parallel_size, found.tensor_parallel_size, found.is_data_model_parallel()) == (1, 1, False)
        assert (found.get_layer_stage_id(3), found.parallel_hierarchy) == (0, None)

    def test_a_device_that_torch_does_not_have_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        dist.set_device_type("cuda")
        assert not caplog.messages
        dist.set_device_type("cuda+remat")
        assert "torch has no such device" in caplog.text


class TestAlone:
    def test_a_small_trainer_walks_as_libais(self) -> None:
        seen: list[Any] = []

        class Counting(TrainerBase):
            def run_step(self) -> None:
                seen.append(("run", self.iter, get_event_storage().iter))

        class Watch(HookBase):
            def before_train(self) -> None:
                seen.append("before")

            def after_train(self) -> None:
                seen.append(("after", self.trainer.iter, self.trainer.max_iter))

        trainer = Counting()
        trainer.register_hooks([None, Watch()])
        trainer.train(2, 4)
        assert seen == ["before", ("run", 2, 2), ("run", 3, 3), ("after", 4, 4)]

    def test_an_eager_trainer_updates_every_so_many_batches(self) -> None:
        torch.manual_seed(0)
        data = [{"images": torch.randn(4, 4), "labels": torch.randint(2, (4,))} for _ in range(4)]
        model, twin = Classifier(), Classifier()
        optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
        trainer = EagerTrainer(model, data, optimizer, grad_acc_steps=2)
        trainer.register_hooks([hooks.IterationTimer(), hooks.LRScheduler()])
        trainer.train(0, 4)
        for number, batch in enumerate(data):
            (sum(twin(**batch).values()) / 2).backward()
            if number % 2:
                other.step()
                other.zero_grad()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        assert len(trainer.storage.history("total_loss").values()) == 4

    def test_an_eager_trainer_does_not_clip_gradients_that_are_not_finite(self) -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(get_default_optimizer_params(model, 0.1, None, None, None, 1.0, 2.0))
        before = [one.detach().clone() for one in model.parameters()]
        data = [{"images": torch.full((4, 4), torch.inf), "labels": torch.zeros(4, dtype=torch.long)}]
        with pytest.raises(RuntimeError, match="non-finite"):
            EagerTrainer(model, data, optimizer).train(0, 1)
        assert all(map(torch.equal, model.parameters(), before))

    @pytest.mark.parametrize(("sizes", "told"), [([1, 1, 1], 0.2), ([1, 1, 2], 0.3), ([2, 1, 2], 0.1)])
    def test_the_rate_of_the_largest_group_is_put_or_the_commonest_where_each_has_one_parameter(
        self, sizes: list[int], told: float
    ) -> None:
        rates = [0.1, 0.2, 0.2] if sizes == [1, 1, 1] else [0.1, 0.2, 0.3]
        groups = [
            {"params": [torch.nn.Parameter(torch.zeros(1)) for _ in range(size)], "lr": rate}
            for size, rate in zip(sizes, rates, strict=True)
        ]
        trainer = EagerTrainer(Classifier(), batches(1), torch.optim.SGD(groups))
        trainer.register_hooks([hooks.LRScheduler()])
        trainer.train(0, 1)
        assert [rate for rate, _ in trainer.storage.history("lr").values()] == [told]


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"images": torch.randn(4, 4), "labels": torch.randint(2, (4,))} for _ in range(count)]


@pytest.mark.slow
def test_with_a_graph_an_iteration_is_a_whole_batch_and_the_model_is_compiled(tmp_path: Path) -> None:
    """As many iterations as `train_iter`, each of two micro-batches, with the weights of a run in eager mode."""
    overrides = QUIET, "train.num_accumulation_steps=2", "train.train_iter=6"
    graph = DefaultTrainer(config_of(tmp_path / "graph", *overrides, "graph.enabled=True", "train.warmup_ratio=0"))
    numbers: list[int] = []
    graph.register_hooks([hooks.CallbackHook(after_step=lambda trainer: numbers.append(trainer.iter))])
    graph.train()
    assert graph.config.compile
    assert numbers == list(range(6))
    assert (graph.iter, graph.max_iter, graph.state.global_step) == (6, 6, 12)
    assert len(graph.storage.history("lr").values()) == 6

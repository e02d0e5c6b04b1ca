"""What a federated worker relies on beyond the hooks: context, evaluation, exchange of weights, configs, lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from hezar_train import Hook
from hezar_train.compat.federatedscope import (
    MODE,
    Context,
    DittoTrainer,
    MultiModelTrainer,
    Trainer,
    TrainerConfig,
    get_trainer,
    wrap_DittoTrainer,
)
from hezar_train.compat.federatedscope import (
    CopiedModelsTrainer as GeneralMultiModelTrainer,
)
from hezar_train.errors import ConfigError, DataError

Build = Callable[..., Trainer]
Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def toy(toy: Build) -> Build:
    """Build the toy with FederatedScope's Trainer."""

    def build(cls: type[Trainer] = Trainer, **given: Any) -> Trainer:
        return toy(cls, **given)

    return build


DOCUMENTED = [
    *[name.format(split) for split in ("train", "val", "test") for name in ("{}_data", "{}_loader", "num_{}_data")],
    *[name.format(split) for split in ("train", "val", "test") for name in ("num_{}_batch", "num_{}_epoch")],
    "num_train_batch_last_epoch", "num_total_train_batch", "lifecycles", "cfg", "model", "data", "device", "cur_mode",
    "mode_stack", "cur_split", "split_stack", "trainable_para_names", "criterion", "regularizer", "grad_clip",
    "monitor", "models", "mirrored_models", "optimizer", "scheduler", "loss_batch_total", "loss_regular_total",
    "num_samples", "ys_true", "ys_prob", "eval_metrics",
]  # fmt: skip
SHARED = ("model", "data", "device", "criterion", "cfg", "storage", "state")


class Crash(Hook):
    """Fail before a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self) -> None:
        if self.trainer.state.global_step == self._step:
            raise RuntimeError("killed")


@pytest.fixture
def splits(rows: Rows) -> dict[str, Any]:
    numbered = [{**row, "id": number} for number, row in enumerate(rows())]
    return {"train": numbered, "val": rows(6, seed=2), "test": rows(7, seed=3)}


def weights_of(trainer: Trainer) -> list[float]:
    return [value for parameter in trainer.model.parameters() for value in parameter.detach().flatten().tolist()]


class TestContext:
    @pytest.mark.parametrize("verb", ["train", "evaluate", "finetune"])
    def test_every_documented_name_resolves_at_the_end_of_every_routine(
        self, toy: Build, splits: dict[str, Any], verb: str
    ) -> None:
        trainer = toy(train_dataset=splits)
        missing: list[list[str]] = []

        def look(ctx: Context) -> None:
            missing.append([name for name in DOCUMENTED if not hasattr(ctx, name)])

        for register in (trainer.register_hook_in_train, trainer.register_hook_in_eval, trainer.register_hook_in_ft):
            register(look, "on_fit_end")
        getattr(trainer, verb)("train")
        assert missing
        assert not any(missing), missing

    def test_shared_objects_are_the_same_in_all_routines(self, toy: Build, splits: dict[str, Any]) -> None:
        found: dict[str, list[int]] = {}
        trainer = toy(train_dataset=splits)

        def note(ctx: Context) -> None:
            found[str(ctx.mode)] = [id(ctx[name]) for name in SHARED]

        trainer.register_hook_in_train(note, "on_fit_start")
        trainer.register_hook_in_eval(note, "on_fit_start")
        trainer.train()
        assert set(found) == {"train", "val"}
        assert found["train"] == found["val"]

    def test_numbers_of_an_evaluation_are_those_of_its_split(self, toy: Build, splits: dict[str, Any]) -> None:
        found: list[tuple[int, ...]] = []
        trainer = toy(train_dataset=splits)
        trainer.register_hook_in_eval(
            lambda ctx: found.append((ctx.num_test_data, ctx.num_test_batch, ctx.num_test_epoch, ctx.num_samples)),
            "on_fit_end",
        )
        loss = trainer.evaluate("test")["loss"]
        assert found == [(7, 2, 1, 7)]
        assert trainer.ctx.eval_metrics == {"test_loss": loss}

    @pytest.mark.parametrize(
        ("settings", "numbers"),
        [
            ({"local_update_steps": 7}, (5, 2, 2, 7)),
            ({"local_update_steps": 3}, (3, 3, 1, 3)),
            ({"local_update_steps": 2, "batch_or_epoch": "epoch"}, (5, 5, 2, 10)),
            ({"num_epochs": 2}, (5, 5, 2, 10)),
        ],
    )
    def test_hooks_are_told_how_long_a_call_will_be(
        self, toy: Build, settings: dict[str, Any], numbers: tuple[int, ...]
    ) -> None:
        names = ("num_train_batch", "num_train_batch_last_epoch", "num_train_epoch", "num_total_train_batch")
        told: list[tuple[int, ...]] = []
        trainer = toy(**settings)
        trainer.register_hook_in_train(lambda ctx: told.append(tuple(ctx[name] for name in names)), "on_fit_start")
        trainer.train()
        assert told == [numbers]

    def test_an_evaluation_at_every_batch_leaves_the_training_as_it_is(
        self, toy: Build, splits: dict[str, Any]
    ) -> None:
        sums: list[tuple[int, float]] = []

        def note(ctx: Context) -> None:
            sums.append((ctx.num_samples, float(ctx.loss_batch_total)))

        def nested(ctx: Context) -> None:
            before = (ctx.mode_stack, ctx.cur_batch_i, ctx.batch["id"].tolist(), float(ctx.loss.detach()))
            ctx.model.layer.training = False  # a submodule's own mode comes back too
            ctx.trainer_of_test.evaluate("test")
            assert before == (ctx.mode_stack, ctx.cur_batch_i, ctx.batch["id"].tolist(), float(ctx.loss.detach()))
            assert (ctx.model.training, ctx.model.layer.training) == (True, False)

        for evaluates in (False, True):
            trainer = toy(out=f"run{evaluates}", train_dataset=splits, do_evaluate=False)
            trainer.ctx.share({"trainer_of_test": trainer})
            if evaluates:
                trainer.register_hook_in_train(nested, "on_batch_end")
            trainer.register_hook_in_train(note, "on_fit_end")
            trainer.train()
            sums.append((0, sum(weights_of(trainer))))
        assert sums[:2] == sums[2:]
        assert sums[0][0] == 20


class TestEvaluate:
    @pytest.mark.parametrize("settings", [{"num_epochs": 2}, {"local_update_steps": 1}, {"drop_last": True}])
    def test_the_training_split_is_evaluated_once_in_order_whatever_training_does(
        self, toy: Build, splits: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        seen: list[int] = []
        trainer = toy(train_dataset=splits, eval_batch_size=3, **settings)
        trainer.register_hook_in_eval(lambda ctx: seen.extend(ctx.batch["id"].tolist()), "on_batch_end")
        trainer.evaluate("train")
        assert seen == list(range(20))

    def test_a_failing_hook_leaves_no_mode_behind(self, toy: Build, splits: dict[str, Any]) -> None:
        trainer = toy(train_dataset=splits)

        def fail(_: Context) -> None:
            raise ZeroDivisionError

        trainer.register_hook_in_eval(fail, "on_batch_end")
        trainer.model.train()
        with pytest.raises(ZeroDivisionError):
            trainer.evaluate("val")
        assert (trainer.ctx.mode_stack, trainer.ctx.split_stack, trainer.model.training) == ([], [], True)
        trainer.reset_hook_in_eval("on_batch_end", "fail")
        assert set(trainer.evaluate("val")) == {"loss"}

    def test_the_split_may_be_given_by_federatedscopes_keyword(self, toy: Build, splits: dict[str, Any]) -> None:
        trainer = toy(train_dataset=splits)
        assert trainer.evaluate(target_data_split_name="test") == trainer.evaluate("test")

    def test_a_trainer_without_training_data_only_evaluates(
        self, toy: Build, classifier: type[nn.Module], rows: Rows, tmp_path: Path
    ) -> None:
        config = TrainerConfig(tmp_path / "other", criterion="CrossEntropyLoss")
        trainer = Trainer(config, classifier(), None, rows(6, seed=2))
        assert all(trainer.hooks_in_train.names(moment) == [] for moment in trainer.hooks_in_train)
        assert trainer.evaluate() == pytest.approx(toy(eval_dataset=rows(6, seed=2)).evaluate())
        with pytest.raises(DataError, match="built without training data"):
            trainer.train()


class TestSteps:
    def test_four_batches_accumulated_are_one_batch_of_four_times_the_size(self, toy: Build, rows: Rows) -> None:
        data = rows(32)
        whole = toy(out="whole", train_dataset=data, batch_size=16, optimizer="sgd")
        parts = toy(out="parts", train_dataset=data, batch_size=4, gradient_accumulation_steps=4, optimizer="sgd")
        updates: list[bool] = []
        parts.register_hook_in_train(lambda ctx: updates.append(ctx.closes_window), "on_batch_end")
        whole.train()
        parts.train()
        assert updates == [False, False, False, True] * 2
        assert weights_of(parts) == pytest.approx(weights_of(whole), abs=1e-6)

    def test_the_loaders_own_batches_are_counted_and_trained(self, toy: Build, rows: Rows) -> None:
        sizes: list[int] = []
        trainer = toy(train_dataset={"train": DataLoader(rows(18), batch_size=3)}, batch_size=10, num_epochs=2)
        trainer.register_hook_in_train(lambda ctx: sizes.append(len(ctx.batch["x"])), "on_batch_end")
        assert (trainer.plan.steps_in_epoch, trainer.plan.total_steps) == (6, 12)
        assert trainer.train().num_samples == 36
        assert sizes == [3] * 12

    def test_a_subclass_may_read_data_in_its_own_way(self, toy: Build, rows: Rows) -> None:
        class Own(Trainer):
            def parse_data(self, data: Any) -> Any:
                return super().parse_data({"train": data["mine"], "val": data["theirs"]})

        trainer = toy(Own, train_dataset={"mine": rows(), "theirs": rows(6)})
        assert trainer.train().num_samples == 20
        assert set(trainer.evaluate("val")) == {"loss"}


class TestLengths:
    @pytest.mark.parametrize(
        ("name", "value", "steps"),
        [
            ("num_train_epoch", 3, 15),
            ("num_train_epoch", 1, 5),
            ("num_total_train_batch", 7, 7),
            ("num_train_batch", 2, 4),
        ],
    )
    def test_what_a_hook_assigns_at_the_start_counts(self, toy: Build, name: str, value: int, steps: int) -> None:
        trainer = toy(num_epochs=2)
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, name, value), "on_fit_start")
        trainer.train()
        assert trainer.state.global_step == steps

    def test_a_set_of_hooks_for_one_call_is_used_in_it_alone(self, toy: Build, splits: dict[str, Any]) -> None:
        trainer = toy(train_dataset=splits, local_update_steps=2, do_evaluate=False)
        seen: list[str] = []
        for mode, verb in (
            (MODE.TRAIN, trainer.train),
            (MODE.FINETUNE, trainer.finetune),
            (MODE.VAL, trainer.evaluate),
        ):
            other = trainer.hooks[mode].copy()
            other.register(lambda ctx: seen.append(str(ctx.mode)), "on_fit_end", name="other")
            verb("train", hooks_set=other)
            verb("train")
            assert "other" not in trainer.hooks[mode].names("on_fit_end")
        assert seen == ["train", "finetune", "test"]


class TestExchange:
    @pytest.fixture
    def normed(self) -> nn.Module:
        class Normed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.bn = nn.Linear(4, 3), nn.BatchNorm1d(3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.bn(self.body(x))

        return Normed()

    def test_what_is_given_away_is_a_copy_and_what_is_taken_is_one_too(self, toy: Build) -> None:
        trainer = toy()
        given = trainer.get_model_para()
        kept = {name: value.clone() for name, value in given.items()}
        taken = {name: value + 1 for name, value in given.items()}
        trainer.update(taken)
        trainer.train()
        assert all(torch.equal(given[name], kept[name]) for name in kept)
        assert all(torch.equal(taken[name], kept[name] + 1) for name in kept)

    def test_one_bad_value_changes_nothing_at_all(self, toy: Build) -> None:
        trainer = toy()
        before = weights_of(trainer)
        for bad, words in (
            ({"layer.weight": [[1.0]]}, r"'layer.weight' has the shape \(1, 1\); expected \(3, 4\)"),
            ({"layer.weigth": [1.0]}, r"no parameter layer.weigth. Did you mean 'layer.weight'\? Nothing was changed"),
            ({"layer.weight": b"gASV"}, "given as text.*never unpickled"),
            ({"layer.weight": object()}, "is a object that makes no tensor"),
        ):
            with pytest.raises(DataError, match=words):
                trainer.update({"layer.bias": [1.0, 2.0, 3.0], **bad})
        assert weights_of(trainer) == before

    def test_a_strict_update_wants_what_is_exchanged_and_no_more(self, toy: Build, normed: nn.Module) -> None:
        trainer = toy(model=normed, local_param=["bn"])
        trainer.update({"body.weight": torch.zeros(3, 4), "body.bias": [0.0, 0.0, 0.0]}, strict=True)
        assert weights_of(trainer)[:15] == [0.0] * 15
        with pytest.raises(DataError, match=r"strict=True, but there is no value for: body.bias"):
            trainer.update({"body.weight": torch.zeros(3, 4)}, strict=True)

    def test_a_worker_keeps_its_own_normalisation(self, toy: Build, normed: nn.Module, rows: Rows) -> None:
        trainer = toy(model=normed, local_param=["bn"], local_update_steps=2, share_non_trainable_para=True)
        trainer.train()
        kept = {name: value.clone() for name, value in normed.state_dict().items() if "bn" in name}
        assert set(trainer.get_model_para()) == {"body.weight", "body.bias"}
        trainer.update({name: torch.full_like(value, 9) for name, value in normed.state_dict().items()})
        assert all(torch.equal(normed.state_dict()[name], value) for name, value in kept.items())
        assert float(normed.state_dict()["body.bias"].min()) == 9

    def test_a_number_is_taken_for_what_is_one(self, toy: Build, normed: nn.Module) -> None:
        trainer = toy(model=normed, share_non_trainable_para=True)
        trainer.update({"bn.num_batches_tracked": 7})
        tracked = normed.state_dict()["bn.num_batches_tracked"]
        assert (int(tracked), tracked.dtype) == (7, torch.int64)

    def test_a_round_is_one_file_of_plain_tensors(self, toy: Build, tmp_path: Path) -> None:
        trainer = toy()
        trainer.train()
        trainer.save_model(tmp_path / "deep" / "global.safetensors", cur_round=3)
        held = load_file(tmp_path / "deep" / "global.safetensors")
        assert torch.equal(held["layer.bias"], trainer.model.state_dict()["layer.bias"])
        assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "global.safetensors"]
        again = toy(out="again")
        assert again.load_model(tmp_path / "deep" / "global.safetensors") == 3
        assert weights_of(again) == weights_of(trainer)
        with pytest.raises(ValueError, match="does not exist"):
            again.load_model(tmp_path / "nowhere")

    def test_a_person_can_read_what_is_exchanged_and_what_runs(self, toy: Build, normed: nn.Module) -> None:
        text = toy(model=normed, local_param=["bn"]).print_trainer_meta_info()
        assert "exchanged: body.weight, body.bias\nlocal: bn.weight, bn.bias, bn.running_mean" in text
        assert "on_batch_backward: backward" in text


class TestConfig:
    @pytest.fixture
    def enlarge(self) -> Callable[[Trainer], None]:
        def assign(trainer: Trainer) -> None:
            trainer.cfg = TrainerConfig.from_dict(trainer.cfg.to_dict() | {"batch_size": 10})

        return assign

    def test_another_config_is_planned_for_between_two_epochs(self, toy: Build, enlarge: Any) -> None:
        trainer = toy(local_update_steps=1, batch_or_epoch="epoch")
        trainer.train()
        enlarge(trainer)
        assert (trainer.plan.steps_in_epoch, trainer.ctx.cfg.batch_size, trainer.ctx.config.batch_size) == (2, 10, 10)
        assert trainer.train().num_samples == 20
        assert trainer.state.global_step == 7

    def test_the_samples_of_an_update_stay_inside_an_epoch(self, toy: Build, enlarge: Any) -> None:
        trainer = toy(local_update_steps=2)
        trainer.train()
        with pytest.raises(DataError, match="cannot change in the middle of an epoch"):
            enlarge(trainer)
        assert (trainer.plan.steps_in_epoch, trainer.cfg.batch_size) == (5, 4)
        assert trainer.train().num_samples == 8

    @pytest.mark.parametrize("verb", ["train", "evaluate", "finetune"])
    @pytest.mark.parametrize("fails", [False, True])
    def test_the_model_leaves_the_device_once_when_the_outermost_call_ends(
        self, toy: Build, splits: dict[str, Any], verb: str, fails: bool
    ) -> None:
        moves: list[Any] = []

        class Watched(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

            def to(self, *args: Any, **kwargs: Any) -> Any:
                moves.append(args[0])
                return super().to(*args, **kwargs)

        trainer = toy(model=Watched(4, 3), train_dataset={**splits, "train": splits["val"]}, offload_after_routine=True)
        for register in (trainer.register_hook_in_train, trainer.register_hook_in_ft, trainer.register_hook_in_eval):
            register(lambda ctx: moves.append("end") if not fails else 1 / 0, "on_fit_end")
        moves.clear()
        if fails:
            with pytest.raises(ZeroDivisionError):
                getattr(trainer, verb)("train")
        else:
            getattr(trainer, verb)("train")
        assert moves[-1] == "cpu"
        assert moves.index("cpu", 1) == len(moves) - 1  # the first brings it to the run's device


class TestUseDiff:
    def test_the_loss_before_survives_a_kill(self, toy: Build, splits: dict[str, Any]) -> None:
        settings = {"use_diff": True, "train_dataset": splits, "save_steps": 1, "resume_from_checkpoint": True}
        unbroken = toy(out="unbroken", **settings).train().metrics
        with pytest.raises(RuntimeError, match="killed"):
            toy(hooks=[Crash(3)], **settings).train()
        resumed = toy(**settings).train().metrics
        names = ("val_avg_loss_before", "val_avg_loss_after", "val_total")
        assert [resumed[name] for name in names] == [unbroken[name] for name in names]
        assert unbroken["val_avg_loss_after"] < unbroken["val_avg_loss_before"]

    def test_each_round_has_its_own_loss_before(self, toy: Build, splits: dict[str, Any]) -> None:
        trainer = toy(use_diff=True, train_dataset=splits, local_update_steps=3, do_evaluate=False)
        first, second = trainer.train().metrics, trainer.train().metrics
        assert second["val_avg_loss_before"] == first["val_avg_loss_after"]
        assert second["val_avg_loss_after"] != first["val_avg_loss_after"]


class TestKinds:
    """What this door builds has the names of its Trainer."""

    def saves_and_loads(self, trainer: Any, path: Path) -> bool:
        before = [value.clone() for value in trainer.model.state_dict().values()]
        trainer.save_model(path, cur_round=2)
        trainer.train()
        is_read = trainer.load_model(path) == 2
        return is_read and all(map(torch.equal, before, trainer.model.state_dict().values()))

    def test_several_models_are_saved_as_one_round(
        self, classifier: type[nn.Module], splits: dict[str, Any], tmp_path: Path
    ) -> None:
        given = {"criterion": "CrossEntropyLoss", "local_update_steps": 2, "do_evaluate": False}
        one, other = (TrainerConfig(tmp_path / name, **given) for name in ("one", "other"))
        several = MultiModelTrainer(one, {"one": classifier(), "two": classifier()}, splits)
        alike = GeneralMultiModelTrainer(2, model=classifier(), data=splits, config=other)
        for trainer in (several, alike):
            trainer.discharge_model()
            assert self.saves_and_loads(trainer, trainer.folder.root / "round")
            trainer.cfg = TrainerConfig.from_dict(trainer.cfg.to_dict() | {"do_evaluate": True})
            assert trainer.ctx.cfg.do_evaluate
            assert "exchanged: " in trainer.print_trainer_meta_info()

    @pytest.mark.parametrize("trainer_type", ["general", "ditto"])
    def test_what_is_built_by_name_has_them(
        self, classifier: type[nn.Module], splits: dict[str, Any], tmp_path: Path, trainer_type: str
    ) -> None:
        config = TrainerConfig(tmp_path / "run", criterion="CrossEntropyLoss", local_update_steps=2, do_evaluate=False)
        trainer = get_trainer(config, classifier(), splits, trainer_type=trainer_type)
        assert type(trainer) is {"general": Trainer, "ditto": DittoTrainer}[trainer_type]
        assert self.saves_and_loads(trainer, tmp_path / "round")

    def test_a_trainer_of_this_door_is_wrapped_and_one_with_methods_of_its_own_is_not(
        self, toy: Build, splits: dict[str, Any], tmp_path: Path
    ) -> None:
        class Own(Trainer):
            pass

        given = {"train_dataset": splits, "local_update_steps": 2, "do_evaluate": False}
        trainer = wrap_DittoTrainer(toy(**given), personal_steps=3)
        assert type(trainer) is DittoTrainer
        assert self.saves_and_loads(trainer, tmp_path / "round")
        for refused in (toy(Own, **given), trainer):
            with pytest.raises(ConfigError, match="whose own methods would be lost"):
                wrap_DittoTrainer(refused)

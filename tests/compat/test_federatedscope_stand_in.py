"""An installed FederatedScope, here a small package of that form, trains with this door after `stand_in()` alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fs_toy import build, loaders, net, weights

from hezar_train.compat.federatedscope import BaseTrainer, GeneralTorchTrainer, ReIterator, get_trainer, stand_in
from hezar_train.compat.federatedscope.general import RELEASE
from hezar_train.errors import ConfigError

NAME = "federated_toy"
FILES = {
    "__init__.py": "",
    "register.py": "trainer_dict = {}\ndef register_trainer(key, module):\n    trainer_dict[key] = module\n",
    "core/__init__.py": "",
    "core/trainers/__init__.py": (
        f"from {NAME}.core.trainers.trainer import Trainer\nfrom {NAME}.core.trainers.plugin import wrap_own\n"
    ),
    "core/trainers/trainer.py": "class Trainer:\n    pass  # MODE.VAL\n",
    "core/trainers/utils.py": "def get_random():\n    return 7\n",
    "core/trainers/plugin.py": (
        f"from {NAME}.core.trainers.torch_trainer import GeneralTorchTrainer\n"
        f"from {NAME}.core.trainers.utils import get_random\n"
        "def wrap_own(trainer):\n    assert isinstance(trainer, GeneralTorchTrainer)\n    return get_random()\n"
    ),
    "core/trainers/torch_trainer.py": "class GeneralTorchTrainer:\n    pass\n",
    "core/auxiliaries/__init__.py": "",
    "core/auxiliaries/trainer_builder.py": (
        f"from {NAME}.core.trainers import GeneralTorchTrainer, Trainer\n"
        "def get_trainer(model, data, device, config):\n    return GeneralTorchTrainer(model, data, device, config)\n"
    ),
    "core/monitors/__init__.py": "",
    "core/monitors/metric_calculator.py": (
        "class MetricCalculator:\n    def __init__(self, metrics):\n        self.metrics = metrics\n"
        "    def eval(self, ctx):\n        split = ctx.cur_data_split\n        assert f'{split}_y_true' in ctx\n"
        "        rows = len(ctx[f'{split}_y_prob'])\n"
        "        return {f'{split}_total': ctx.get(f'num_samples_{split}'), f'{split}_rows': rows}\n"
    ),
    "core/configs/__init__.py": "",
    "core/configs/config.py": (
        "class CN(dict):\n    def __getattr__(self, name):\n        if name not in self:\n"
        "            raise AttributeError(name)\n        return self[name]\n    __setattr__ = dict.__setitem__\n"
    ),
    "contrib.py": (
        f"from {NAME}.register import register_trainer\nfrom {NAME}.core.trainers import GeneralTorchTrainer\n"
        "class Own(GeneralTorchTrainer):\n    pass\n"
        "register_trainer('own_toy', lambda name: Own if name == 'own_toy' else None)\n"
    ),
}  # fmt: skip
FILTERS_NOTHING = "x = lambda p: True if a.share_non_trainable_para else \\\n    lambda p: p in b\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of FederatedScope's form that can be imported and was not."""
    for path, text in FILES.items():
        (tmp_path / NAME / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / NAME / path).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = vars(RELEASE).copy()
    yield tmp_path / NAME
    vars(RELEASE).update(before)
    for module in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[module]


def found(path: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{NAME}.{path}"), name)


class TestInstalled:
    @pytest.mark.usefixtures("package")
    def test_its_own_builder_and_plugins_use_our_trainer(self, tmp_path: Path) -> None:
        stand_in(NAME)
        make = found("core.auxiliaries.trainer_builder", "get_trainer")
        trainer = make(net(), loaders(), "cpu", build(tmp_path).cfg)
        assert type(trainer) is GeneralTorchTrainer
        assert found("core.trainers", "wrap_own")(trainer) == 7
        assert found("core.trainers", "Trainer") is GeneralTorchTrainer
        assert found("core.trainers", "BaseTrainer") is BaseTrainer

    @pytest.mark.usefixtures("package")
    def test_what_a_replaced_module_has_beside_is_found_and_what_it_has_not_is_told(self) -> None:
        stand_in(NAME)
        assert found("core.trainers.utils", "get_random")() == 7
        with pytest.raises(AttributeError, match="nowhere"):
            found("core.trainers.utils", "nowhere")
        with pytest.raises(AttributeError, match="nowhere"):
            found("core.trainers.enums", "nowhere")  # a module that this release does not have

    @pytest.mark.usefixtures("package")
    def test_a_trainer_that_is_registered_with_it_is_known_to_both(self, tmp_path: Path) -> None:
        stand_in(NAME)
        stand_in(NAME)  # once more changes nothing
        own = found("contrib", "Own")
        assert found("register", "trainer_dict")["own_toy"]("own_toy") is own
        cfg = build(tmp_path).cfg
        cfg.trainer.type = "own_toy"
        assert type(get_trainer(net(), loaders(), "cpu", cfg)) is own

    @pytest.mark.usefixtures("package")
    def test_trainers_that_were_imported_before_are_told(self) -> None:
        importlib.import_module(f"{NAME}.core.trainers")
        with pytest.raises(ConfigError, match=r"was imported before stand_in\(\)"):
            stand_in(NAME)

    @pytest.mark.usefixtures("package")
    def test_another_backend_is_told_before_the_model_is_looked_at(self, tmp_path: Path) -> None:
        stand_in(NAME)
        kind = type("OfTensorFlow", (found("core.trainers", "Trainer"),), {})
        cfg = build(tmp_path).cfg
        cfg.backend = "tensorflow"
        with pytest.raises(ConfigError, match="Others train with FederatedScope's own trainer"):
            kind(model=object(), data={}, device="cpu", config=cfg)

    @pytest.mark.parametrize("is_old", [True, False])
    def test_modes_and_exchange_are_those_of_its_release(self, is_old: bool, package: Path, tmp_path: Path) -> None:
        if is_old:
            (package / "core" / "trainers" / "trainer.py").write_text(FILTERS_NOTHING, encoding="utf-8")
        stand_in(NAME)
        trainer, modes = build(tmp_path), []
        trainer.register_hook_in_eval(lambda ctx: modes.append(str(ctx.cur_mode)), "on_fit_start")
        trainer.evaluate("val")
        assert modes == ["test" if is_old else "val"]
        assert ("1.running_mean" in trainer.get_model_para()) == is_old


class TestEarlierRelease:
    def build(self, tmp_path: Path, **names: Any) -> Any:
        """A trainer with a config of version 0.1: no section `dataloader`, no schedules, no monitor with `eval`."""
        stand_in(NAME)
        node = found("core.configs.config", "CN")

        def nodes(given: Any) -> Any:
            return node({key: nodes(value) for key, value in given.items()}) if isinstance(given, dict) else given

        plain = {key: value for key, value in build(tmp_path).cfg.items() if key not in {"dataloader", "finetune"}}
        plain["data"] = {"type": "toy", "batch_size": 8, "shuffle": False, "drop_last": False}
        cfg = nodes({**plain, "finetune": {"before_eval": True, "local_update_steps": 1}})
        del cfg["train"]["scheduler"]
        kind = type("OfEarlier", (GeneralTorchTrainer,), names)
        monitor = type("Monitor", (), {"total_flops": 0, "flops_per_sample": 0, "total_model_size": 1})()
        return kind(net(), loaders(), "cpu", cfg, monitor=monitor)

    @pytest.mark.usefixtures("package")
    def test_its_config_is_completed_and_trains_the_same_weights(self, tmp_path: Path) -> None:
        earlier, today = self.build(tmp_path), build(tmp_path)
        assert earlier.train()[0] == today.train()[0]
        assert torch.equal(weights(earlier), weights(today))
        assert earlier.cfg.dataloader.batch_size == 8

    @pytest.mark.usefixtures("package")
    def test_names_with_a_split_are_those_of_the_routine_and_stay(self, tmp_path: Path) -> None:
        trainer, seen = self.build(tmp_path), []

        def look(ctx: Any) -> None:
            seen.append((ctx.cur_data_split, ctx.num_samples_test, len(ctx["test_y_true"]), "train_y_true" in ctx))

        trainer.register_hook_in_eval(look, "on_batch_end")
        assert trainer.evaluate("test") == {"test_total": 13, "test_rows": 13}
        assert seen == [("test", 8, 1, False), ("test", 13, 2, False)]
        assert trainer.ctx.num_samples_test == len(trainer.ctx.test_y_prob) == 13
        trainer.train()
        assert trainer.ctx.num_samples_train == 50
        assert trainer.ctx.num_samples_test == 13

    @pytest.mark.usefixtures("package")
    def test_that_finetuning_trains_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.build(tmp_path).finetune()
        assert "version 0.1 called no hooks of on_batch_backward" in caplog.text


class TestHooksOfRealTrainers:
    """What drawn files do and the door did otherwise."""

    def test_what_finetuning_hooks_freeze_stays_frozen(self, tmp_path: Path) -> None:
        trainer = build(tmp_path, finetune__before_eval=True)
        trainer.register_hook_in_ft(lambda ctx: ctx.model[0].requires_grad_(False), "on_fit_start")
        trainer.finetune()
        before = trainer.ctx.model[0].weight.clone()
        trainer.train()
        assert not trainer.ctx.model[0].weight.requires_grad
        assert torch.equal(trainer.ctx.model[0].weight, before)

    def test_gradients_that_an_own_backward_leaves_are_there_in_the_next_round(self, tmp_path: Path) -> None:
        trainer, found_first = build(tmp_path), []

        def backward(ctx: Any) -> None:
            found_first.append(ctx.model[0].weight.grad is not None)
            ctx.loss_task.backward()
            ctx.optimizer.step()

        trainer.replace_hook_in_train(backward, "on_batch_backward", "_hook_on_batch_backward")
        trainer.train()
        trainer.train()
        assert found_first == [False, *[True] * 13]

    def test_a_batch_that_hooks_skip_for_its_loss_is_told_and_another_is_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Skips(GeneralTorchTrainer):
            skipped = 0

            def _hook_on_batch_forward(self, ctx: Any) -> None:
                super()._hook_on_batch_forward(ctx)
                ctx.skip_this_batch = ctx.cur_batch_i == 2 and self.skipped == 0
                if ctx.skip_this_batch:
                    ctx.loss_batch = ctx.loss_batch * float("nan")

            def _hook_on_batch_backward(self, ctx: Any) -> None:
                if not ctx.skip_this_batch:
                    super()._hook_on_batch_backward(ctx)

            def _hook_on_batch_end(self, ctx: Any) -> None:
                if ctx.skip_this_batch:
                    self.skipped += 1
                    self._run_batch(self.hooks_in_train, run_step=1)
                    return
                super()._hook_on_batch_end(ctx)

        trainer = build(tmp_path, Skips, train__local_update_steps=4)
        num_samples, _, _ = trainer.train()
        assert num_samples == 4 * 8  # the fifth batch in the place of the third
        assert trainer.skipped == 1
        assert "skipped a batch whose loss is nan" in caplog.text
        assert torch.isfinite(weights(trainer)).all()

    def test_a_loader_that_a_hook_makes_goes_on_where_it_is(self, tmp_path: Path) -> None:
        taken: list[float] = []

        class OwnLoader(GeneralTorchTrainer):
            def _hook_on_epoch_start(self, ctx: Any) -> None:
                if not isinstance(ctx.get(f"{ctx.cur_split}_loader"), ReIterator):
                    ctx[f"{ctx.cur_split}_loader"] = ReIterator(ctx.get(f"{ctx.cur_split}_loader"))

            def _run_batch(self, hooks_set: Any, run_step: int = -1) -> None:
                for batch in range(self.ctx.num_train_batch_last_epoch if run_step == -1 else run_step):
                    self.ctx.cur_batch_i = batch
                    for trigger in ("on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end"):
                        for hook in hooks_set[trigger]:
                            hook(self.ctx)
                    taken.append(float(self.ctx.data_batch[0].sum()))

        trainer = build(tmp_path, OwnLoader, train__local_update_steps=4)
        trainer.train()
        trainer.train()
        expected = [float(x.sum()) for x, _ in loaders()["train"]]
        assert taken == [*expected, *expected[:2]]  # 42 samples are 6 batches
        assert trainer.state.global_step == 8

    def test_operations_of_batches_of_another_form_are_not_counted_and_that_is_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class OfDicts(GeneralTorchTrainer):
            def _hook_on_batch_start_init(self, ctx: Any) -> None:
                super()._hook_on_batch_start_init(ctx)
                x, y = ctx.data_batch
                ctx.data_batch = {"x": x, "y": y}

            def _hook_on_batch_forward(self, ctx: Any) -> None:
                kept, ctx.data_batch = ctx.data_batch, list(ctx.data_batch.values())
                super()._hook_on_batch_forward(ctx)
                ctx.data_batch = kept

        trainer, plain = build(tmp_path, OfDicts, eval__count_flops=True), build(tmp_path)
        trainer.train()
        plain.train()
        assert caplog.text.count("operations are not counted") == 1
        assert trainer.ctx.monitor.flops_per_sample == -1
        assert torch.equal(weights(trainer), weights(plain))

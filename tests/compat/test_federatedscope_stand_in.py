"""An installed FederatedScope, here a small package of that form, trains with this door after `stand_in()` alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fs_toy import build, loaders, net, weights

from hezar_train.compat.federatedscope import (
    BaseTrainer,
    GeneralTorchTrainer,
    ReIterator,
    get_optimizer,
    get_scheduler,
    get_trainer,
    stand_in,
)
from hezar_train.compat.federatedscope.context import RELEASE
from hezar_train.errors import ConfigError

NAME = "federated_toy"
FILES = {
    "__init__.py": "",
    "register.py": (
        "from torch.nn import CrossEntropyLoss, MultiMarginLoss\n"
        "losses = {'CrossEntropyLoss': CrossEntropyLoss, 'own_loss': MultiMarginLoss}\n"
        "trainer_dict = {}\ndef register_trainer(key, module):\n    trainer_dict[key] = module\n"
    ),
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
    "core/auxiliaries/criterion_builder.py": (
        f"from {NAME} import register\nfrom torch import nn\n"
        "def get_criterion(type, device):\n    return register.losses[type]()\n"
    ),
    "core/auxiliaries/scheduler_builder.py": (
        "from torch.optim import lr_scheduler\n"
        "def get_scheduler(optimizer, type, **kwargs):\n"
        "    return getattr(lr_scheduler, type)(optimizer, **kwargs) if type else None\n"
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
IN_CIRCLES = {
    "core/data/__init__.py": f"from {NAME}.core.data.base_data import ClientData\n",
    "core/data/base_data.py": (
        f"from {NAME}.core.auxiliaries.dataloader_builder import get_dataloader\nclass ClientData:\n    pass\n"
    ),
    "core/data/utils.py": "def filter_dict():\n    pass\n",
    "core/auxiliaries/dataloader_builder.py": (
        f"from {NAME}.core.data.utils import filter_dict\ndef get_dataloader():\n    return 3\n"
    ),
    "core/trainers/torch_trainer.py": (
        f"try:\n    import {NAME}.nowhere\n    import torch\nexcept ImportError:\n    torch = None\n"
        f"from {NAME}.core.data import ClientData\nfrom {NAME}.nowhere import nothing\n"
    ),
    "core/trainers/__init__.py": (
        f"from {NAME}.core.trainers.torch_trainer import GeneralTorchTrainer\n"
        f"from {NAME}.core.trainers.late import wrap_late\n"
    ),
    "core/trainers/late.py": (
        f"from {NAME}.core.auxiliaries.dataloader_builder import get_dataloader\n"
        "def wrap_late(trainer):\n    return get_dataloader()\n"
    ),
}  # fmt: skip
"""`dataloader_builder` cannot be imported before `core.data`, which FederatedScope's own trainers import first."""
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

    @pytest.mark.usefixtures("package")
    def test_its_own_builders_make_what_is_registered_with_it(self, tmp_path: Path) -> None:
        stand_in(NAME)
        cfg = as_installed(build(tmp_path).cfg)
        cfg["criterion"]["type"] = "own_loss"
        cfg["train"]["scheduler"] = type(cfg)({"type": "StepLR", "step_size": 3})
        trainer = GeneralTorchTrainer(net(), loaders(), "cpu", cfg)
        trainer.train()
        assert type(trainer.ctx.criterion) is torch.nn.MultiMarginLoss
        assert trainer.ctx.scheduler.get_last_lr() == pytest.approx([0.001])  # 7 batches
        assert dict(cfg.train.scheduler) == {"type": "StepLR", "step_size": 3}  # arguments, to which nothing is added

    @pytest.mark.usefixtures("package")
    def test_a_release_whose_monitor_does_not_measure_has_a_calculator_of_its_trainer(self, tmp_path: Path) -> None:
        stand_in(NAME)
        monitor = type("Monitor", (), {"total_flops": 0, "flops_per_sample": 0, "total_model_size": 1})()
        cfg = as_installed(build(tmp_path).cfg)
        trainer = GeneralTorchTrainer(net(), loaders(), "cpu", cfg, monitor=monitor)
        assert trainer.metric_calculator is not None
        trainer.ctx.cur_data_split = "test"  # which the calculator of this package reads
        trainer.register_hook_in_eval(as_its_calculator_reads, "on_fit_end", insert_pos=0)
        assert trainer.evaluate("test") == {"test_total": 13, "test_rows": 13}


class TestImportsInCircles:
    @pytest.fixture(autouse=True)
    def files(self, package: Path) -> None:
        for path, text in IN_CIRCLES.items():
            (package / path).parent.mkdir(exist_ok=True)
            (package / path).write_text(text, encoding="utf-8")

    @pytest.mark.parametrize("path", ["core.trainers", "core.trainers.late"])
    def test_what_only_their_trainers_import_in_time_is_imported_in_time(self, path: str) -> None:
        stand_in(NAME)
        assert found(path, "wrap_late")(None) == 3
        assert found("core.trainers", "GeneralTorchTrainer") is GeneralTorchTrainer

    def test_nothing_is_imported_before_a_trainer_is_asked_for(self) -> None:
        stand_in(NAME)
        assert f"{NAME}.core.data" not in sys.modules
        names: dict[str, Any] = {}
        exec(f"from {NAME}.core.trainers import *", names)  # as their packages of plug-ins do
        assert names["GeneralTorchTrainer"] is GeneralTorchTrainer
        assert f"{NAME}.core.data" in sys.modules


def as_installed(cfg: Any) -> Any:
    """Return a config in the class of the package's own."""
    node = found("core.configs.config", "CN")
    return node({key: as_installed(value) for key, value in cfg.items()}) if isinstance(cfg, dict) else cfg


def as_its_calculator_reads(ctx: Any) -> None:
    ctx["test_y_true"], ctx["num_samples_test"] = ctx.ys_true, ctx.num_samples
    ctx["test_y_prob"] = [row for rows in ctx.ys_prob for row in rows]


class TestHalfPrecision:
    def test_the_key_of_releases_for_language_models_is_kept(self, tmp_path: Path) -> None:
        class Halved(GeneralTorchTrainer):
            def setup_data(self, ctx: Any) -> None:
                ctx.data = {split: [(x.half(), y) for x, y in data.dataset] for split, data in ctx.data.items()}

        trainer = build(tmp_path, Halved, train__is_enable_half=True, train__local_update_steps=1)
        trainer.train()
        assert {one.dtype for one in trainer.ctx.model.parameters()} == {torch.float16}
        assert trainer.hooks_in_eval["on_fit_start"][0].__name__ == "_hook_on_fit_start_numerical_precision"

    def test_an_overridden_hook_is_called_and_others_keep_their_positions(self, tmp_path: Path) -> None:
        called: list[str] = []

        class Own(GeneralTorchTrainer):
            def _hook_on_fit_start_numerical_precision(self, ctx: Any) -> None:
                called.append(ctx.cur_mode)

        own, plain = build(tmp_path, Own), build(tmp_path)
        own.train()
        own.evaluate("test")
        assert called == ["train", "test"]
        assert plain.hooks_in_train["on_fit_start"][0].__name__ == "_hook_on_data_parallel_init"

    def test_default_hooks_that_a_fork_has_added_are_told(
        self, package: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = "class GeneralTorchTrainer:\n    def _hook_on_epoch_end(self, ctx):\n        pass\n"
        (package / "core/trainers/torch_trainer.py").write_text(text, encoding="utf-8")
        stand_in(NAME)
        assert "does not call: _hook_on_epoch_end. Define them in a class of your own" in caplog.text


LENGTH_OF_TRAINING = (
    "        if mode in ['train', 'finetune']:\n            num_batch = calculate_batch_epoch_num(\n"
    "                self.cfg.train.local_update_steps *\n                self.cfg.grad.grad_accum_count)\n"
)


class TestLengthOfFinetuning:
    def steps(self, trainer: Any) -> int:
        """Finetune once, and count the batches."""
        seen: list[int] = []
        trainer.register_default_hooks_ft()
        trainer.register_hook_in_ft(lambda ctx: seen.append(ctx.cur_batch_i), "on_batch_end")
        trainer.finetune()
        return len(seen)

    def test_a_release_that_reads_that_of_training_is_followed_and_that_is_told(
        self, package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (package / "core/trainers/context.py").write_text(LENGTH_OF_TRAINING, encoding="utf-8")
        stand_in(NAME)
        trainer = build(tmp_path, finetune__local_update_steps=2, finetune__batch_or_epoch="batch")
        assert self.steps(trainer) == 7
        trainer.finetune()
        assert caplog.text.count("finetune() is as long as train() is, 7 of batch") == 1
        assert "does not read finetune.local_update_steps=2 and finetune.batch_or_epoch='batch'" in caplog.text

    def test_one_that_multiplies_epochs_by_accumulated_batches_is_followed(self, package: Path, tmp_path: Path) -> None:
        asked = {"train__batch_or_epoch": "epoch", "train__local_update_steps": 2, "grad__grad_accum_count": 3}
        assert build(tmp_path, **asked).ctx.num_train_epoch == 2
        (package / "core/trainers/context.py").write_text(LENGTH_OF_TRAINING, encoding="utf-8")
        stand_in(NAME)
        assert build(tmp_path, **asked).ctx.num_train_epoch == 6

    def test_one_that_has_its_own_is_followed_too(
        self, package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (package / "core/trainers/context.py").write_text("self.cfg[mode].local_update_steps\n", encoding="utf-8")
        stand_in(NAME)
        assert self.steps(build(tmp_path, finetune__local_update_steps=2, finetune__batch_or_epoch="batch")) == 2
        assert "as long as train()" not in caplog.text


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
    def test_what_a_hook_assigns_outlives_the_batch(self, tmp_path: Path) -> None:
        def keep(trainer: Any, ctx: Any) -> None:
            batch = ctx.data_batch
            GeneralTorchTrainer._hook_on_batch_end(trainer, ctx)
            ctx.data_batch = batch

        trainer = self.build(tmp_path, _hook_on_batch_end=keep)
        seen: list[int] = []
        trainer.register_hook_in_train(lambda ctx: seen.append(len(ctx.data_batch[0])), "on_fit_end")
        trainer.train()
        assert seen == [8]

    @pytest.mark.usefixtures("package")
    def test_that_finetuning_trains_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.build(tmp_path).finetune()
        assert "version 0.1 called no hooks of on_batch_backward" in caplog.text


def lists_of_batches(data: Any) -> dict[str, Any]:
    """Return splits as loaders of another library, which count samples in numpy's numbers."""
    counts = {f"num_{split}_data": np.int64(len(loader.dataset)) for split, loader in data.items()}
    return {f"{split}_loader": list(loader) for split, loader in data.items()} | counts


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

    @pytest.mark.parametrize("is_of_torch", [True, False])
    def test_a_batch_that_hooks_skip_for_its_loss_is_told_and_the_next_is_taken(
        self, is_of_torch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        taken: list[float] = []

        class Skips(GeneralTorchTrainer):
            skipped = 0

            def parse_data(self, data: Any) -> Any:
                return super().parse_data(data) if is_of_torch else lists_of_batches(data)

            def _hook_on_batch_forward(self, ctx: Any) -> None:
                super()._hook_on_batch_forward(ctx)
                taken.append(float(ctx.data_batch[0].sum()))
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
        assert num_samples == 4 * 8
        assert taken == [float(x.sum()) for x, _ in loaders()["train"]][:5]  # the fifth in the place of the fourth
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

    def test_names_of_a_class_may_be_fields_of_our_config_and_those_of_parts_may_not(self, tmp_path: Path) -> None:
        class Tasked(GeneralTorchTrainer):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **named)
                self.task, self.seed = "agnews", 3

        trainer = build(tmp_path, Tasked)
        trainer.train()
        assert (trainer.task, trainer.seed) == ("agnews", 3)
        with pytest.raises(AttributeError, match="would change nothing"):
            trainer.lr_scheduler = None

    def test_a_schedule_whose_warmup_a_hook_knows_is_made_by_it(self, tmp_path: Path) -> None:
        class WarmsUp(GeneralTorchTrainer):
            def _hook_on_fit_start_init(self, ctx: Any) -> None:
                ctx.optimizer = get_optimizer(ctx.model, **ctx.cfg.train.optimizer)
                lengths = {"warmup_steps": 2, "total_steps": ctx.num_total_train_batch}
                ctx.scheduler = get_scheduler(ctx.optimizer, **ctx.cfg.train.scheduler, **lengths)
                ctx.loss_batch_total = ctx.loss_regular_total = ctx.num_samples = 0
                ctx.ys_true, ctx.ys_prob = [], []

        trainer = build(tmp_path, WarmsUp, train__scheduler__type="warmup_step")
        trainer.register_hook_in_train(lambda ctx: rates.append(ctx.scheduler.get_last_lr()[0]), "on_batch_end")
        rates: list[float] = []
        trainer.train()
        assert rates == pytest.approx([0.05, 0.1, 0.08, 0.06, 0.04, 0.02, 0])
        with pytest.raises(ConfigError, match="needs warmup_steps"):
            build(tmp_path, train__scheduler__type="warmup_step")

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


class TestDraws:
    """Workers of one course draw noise of their own, and leave the process's draws alone until they train."""

    def noise(self, trainer: Any) -> list[float]:
        drawn: list[float] = []
        trainer.register_hook_in_train(lambda _: drawn.append(float(torch.randn(()))), "on_batch_start")
        trainer.train()
        return drawn

    def test_two_workers_of_one_folder_draw_other_numbers_and_a_course_repeats_its_own(self, tmp_path: Path) -> None:
        first, second = build(tmp_path / "a"), build(tmp_path / "a")
        again = [build(tmp_path / "b"), build(tmp_path / "b")]
        drawn = [self.noise(first), self.noise(second)]
        assert not set(drawn[0]) & set(drawn[1])
        assert [self.noise(one) for one in again] == drawn

    def test_building_a_trainer_draws_nothing(self, tmp_path: Path) -> None:
        model = net()
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        GeneralTorchTrainer(model, loaders(), "cpu", build(tmp_path).cfg)
        net()  # seeds torch
        GeneralTorchTrainer(model, loaders(), "cpu", build(tmp_path).cfg)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()

    def test_workers_in_folders_of_their_own_without_seeds_of_their_own_are_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        build(tmp_path / "a", seed=1501)
        build(tmp_path / "b", seed=1502)
        assert "draw the same random numbers" not in caplog.text
        build(tmp_path / "c", seed=1501)
        assert "has the seed of the one in" in caplog.text
        assert "give each its own cfg.seed" in caplog.text

    def test_another_cfg_is_used_and_keeps_the_seed_of_a_worker(self, tmp_path: Path) -> None:
        build(tmp_path)
        trainer = build(tmp_path)
        seed = trainer.config.seed
        cfg = trainer.cfg.clone()
        cfg.train.local_update_steps = 2
        trainer.cfg = cfg
        assert trainer.config.seed == seed != cfg.seed
        assert trainer.train()[0] == 2 * 8

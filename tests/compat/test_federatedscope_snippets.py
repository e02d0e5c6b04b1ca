"""The snippets of FederatedScope's trainer documents, with the import changed and the dots filled in."""

from __future__ import annotations

import abc
import collections
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fs_toy import build, cfg, loaders, net, points, reference, weights
from torch.utils.data import DataLoader, Dataset

from hezar_train.compat.federatedscope import (
    HOOK_TRIGGER,
    LIFECYCLE,
    MODE,
    BaseTrainer,
    Context,
    CtxVar,
    GeneralMultiModelTrainer,
    GeneralTorchTrainer,
    MetricCalculator,
    get_optimizer,
    get_scheduler,
    lifecycle,
)

DOCUMENTED = [
    "train_data", "train_loader", "num_train_data", "val_data", "val_loader", "num_val_data", "test_data",
    "test_loader", "num_test_data", "lifecycles", "cfg", "model", "data", "device", "cur_mode", "mode_stack",
    "cur_split", "split_stack", "trainable_para_names", "criterion", "regularizer", "grad_clip", "num_train_batch",
    "num_train_batch_last_epoch", "num_train_epoch", "num_total_train_batch", "num_val_epoch", "num_val_batch",
    "num_test_epoch", "num_test_batch", "monitor", "models", "mirrored_models", "optimizer", "scheduler",
    "loss_batch_total", "loss_regular_total", "num_samples", "ys_true", "ys_prob", "eval_metrics",
]  # fmt: skip


def test_the_interface_of_a_base_trainer() -> None:
    assert issubclass(type(BaseTrainer), abc.ABCMeta)

    class UserDefineTrainer(BaseTrainer):
        def train(self) -> Any:
            return 1, self.model, {}

        def evaluate(self, target_data_split_name: str = "test") -> Any:
            return {f"{target_data_split_name}_loss": 0.0}

        def update(self, model_parameters: Any, strict: bool = False) -> None:
            self.model = model_parameters

        def get_model_para(self) -> Any:
            return self.model

    trainer = UserDefineTrainer("model", {"train": 1}, "cpu", some="thing")
    assert (trainer.model, trainer.data, trainer.device, trainer.kwargs) == (
        "model",
        {"train": 1},
        "cpu",
        {"some": "thing"},
    )


def test_every_documented_name_is_in_the_context_while_a_round_ends(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    missing: list[str] = []
    trainer.register_hook_in_train(
        lambda ctx: missing.extend(name for name in DOCUMENTED if not hasattr(ctx, name)), "on_fit_end"
    )
    trainer.train()
    assert missing == []


def test_a_context_is_built_from_model_config_data_and_device(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    data = loaders()
    ctx = Context(net(), trainer.cfg, data, "cpu", init_dict=trainer.parse_data(data))
    assert ctx.num_train_data == 42
    assert (ctx.num_train_batch, ctx.num_train_batch_last_epoch, ctx.num_train_epoch, ctx.num_total_train_batch) == (
        6,
        1,
        2,
        7,
    )


def test_hooks_are_kept_by_trigger(tmp_path: Path) -> None:
    assert HOOK_TRIGGER == [
        "on_fit_start", "on_epoch_start", "on_batch_start", "on_batch_forward", "on_batch_backward", "on_batch_end",
        "on_epoch_end", "on_fit_end",
    ]  # fmt: skip

    class Own(GeneralTorchTrainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.hooks_in_train = collections.defaultdict(list)
            self.hooks_in_eval = copy.deepcopy(self.hooks_in_train)
            self.hooks_in_ft = copy.deepcopy(self.hooks_in_train)
            self.register_default_hooks_train()
            if self.cfg.finetune.before_eval:
                self.register_default_hooks_ft()
            self.register_default_hooks_eval()

    trainer = build(tmp_path, Own)
    trainer.train()
    assert torch.equal(weights(trainer), reference(1, 7))


def test_the_routines_as_they_are_printed(tmp_path: Path) -> None:
    class Printed(GeneralTorchTrainer):
        @lifecycle(LIFECYCLE.ROUTINE)
        def _run_routine(self, mode: Any, hooks_set: Any, dataset_name: Any = None) -> Any:
            for hook in hooks_set["on_fit_start"]:
                hook(self.ctx)

            self._run_epoch(hooks_set)

            for hook in hooks_set["on_fit_end"]:
                hook(self.ctx)

            return self.ctx.num_samples

        @lifecycle(LIFECYCLE.EPOCH)
        def _run_epoch(self, hooks_set: Any) -> None:
            for epoch_i in range(self.ctx.get(f"num_{self.ctx.cur_split}_epoch")):
                self.ctx.cur_epoch_i = CtxVar(epoch_i, "epoch")

                for hook in hooks_set["on_epoch_start"]:
                    hook(self.ctx)

                self._run_batch(hooks_set)

                for hook in hooks_set["on_epoch_end"]:
                    hook(self.ctx)

        @lifecycle(LIFECYCLE.BATCH)
        def _run_batch(self, hooks_set: Any) -> None:
            for batch_i in range(self.ctx.get(f"num_{self.ctx.cur_split}_batch")):
                self.ctx.cur_batch_i = CtxVar(batch_i, LIFECYCLE.BATCH)

                for hook in hooks_set["on_batch_start"]:
                    hook(self.ctx)

                for hook in hooks_set["on_batch_forward"]:
                    hook(self.ctx)

                for hook in hooks_set["on_batch_backward"]:
                    hook(self.ctx)

                for hook in hooks_set["on_batch_end"]:
                    hook(self.ctx)

                # Break in the final epoch
                if (  # noqa: SIM102 - as it is printed
                    self.ctx.cur_mode in [MODE.TRAIN, MODE.FINETUNE]
                    and self.ctx.cur_epoch_i == self.ctx.num_train_epoch - 1
                ):
                    if batch_i >= self.ctx.num_train_batch_last_epoch - 1:
                        break

    trainer, plain = build(tmp_path, Printed), build(tmp_path)
    assert trainer.train()[0] == 50
    assert torch.equal(weights(trainer), reference(1, 7))
    plain.train()
    assert trainer.evaluate("test") == plain.evaluate("test")


def _hook_on_fit_start_init(ctx: Any) -> None:
    # prepare model and optimizer
    ctx.model.to(ctx.device)

    if ctx.cur_mode in [MODE.TRAIN, MODE.FINETUNE]:
        # Initialize optimizer here to avoid the reuse of optimizers
        # across different routines
        ctx.optimizer = get_optimizer(ctx.model, **ctx.cfg[ctx.cur_mode].optimizer)
        ctx.scheduler = get_scheduler(ctx.optimizer, **ctx.cfg[ctx.cur_mode].scheduler)

    # prepare statistics
    ctx.loss_batch_total = CtxVar(0.0, LIFECYCLE.ROUTINE)
    ctx.loss_regular_total = CtxVar(0.0, LIFECYCLE.ROUTINE)
    ctx.num_samples = CtxVar(0, LIFECYCLE.ROUTINE)
    ctx.ys_true = CtxVar([], LIFECYCLE.ROUTINE)
    ctx.ys_prob = CtxVar([], LIFECYCLE.ROUTINE)


def _hook_on_batch_forward(ctx: Any) -> None:
    x, label = [_.to(ctx.device) for _ in ctx.data_batch]
    pred = ctx.model(x)
    if len(label.size()) == 0:
        label = label.unsqueeze(0)

    ctx.y_true = CtxVar(label, LIFECYCLE.BATCH)
    ctx.y_prob = CtxVar(pred, LIFECYCLE.BATCH)
    ctx.loss_batch = CtxVar(ctx.criterion(pred, label), LIFECYCLE.BATCH)
    ctx.batch_size = CtxVar(len(label), LIFECYCLE.BATCH)


def _hook_on_batch_backward(ctx: Any) -> None:
    ctx.optimizer.zero_grad()
    ctx.loss_task.backward()
    if ctx.grad_clip > 0:
        torch.nn.utils.clip_grad_norm_(ctx.model.parameters(), ctx.grad_clip)
    ctx.optimizer.step()
    if ctx.scheduler is not None:
        ctx.scheduler.step()


@pytest.mark.parametrize("hook", [_hook_on_fit_start_init, _hook_on_batch_forward, _hook_on_batch_backward])
def test_the_hooks_as_they_are_printed(tmp_path: Path, hook: Any) -> None:
    trigger = {"fit": "on_fit_start", "for": "on_batch_forward", "bac": "on_batch_backward"}
    part = hook.__name__.removeprefix("_hook_on_").removeprefix("batch_")[:3]
    trainer = build(tmp_path, grad__grad_clip=0.05)
    trainer.replace_hook_in_train(hook, trigger[part], hook.__name__)
    trainer.train()
    assert torch.equal(weights(trainer), reference(1, 7, 0.05))


def test_hooks_are_reset_registered_and_replaced(tmp_path: Path) -> None:
    trainer = build(tmp_path)
    trainer.reset_hook_in_train("on_batch_forward", target_hook_name="_hook_on_batch_forward_flop_count")
    trainer.reset_hook_in_eval("on_fit_end")
    trainer.register_hook_in_train(_hook_on_batch_forward, "on_batch_forward", insert_pos=None, base_hook=None, insert_mode="before")  # fmt: skip  # noqa: E501
    trainer.replace_hook_in_train(_hook_on_batch_backward, "on_batch_backward", "_hook_on_batch_backward")
    assert len(trainer.hooks_in_train["on_batch_forward"]) == 3
    assert trainer.hooks_in_eval["on_fit_end"] == []


class ParsesAsPrinted(GeneralTorchTrainer):
    def parse_data(self, data: Any) -> dict[str, Any]:
        init_dict: dict[str, Any] = {}
        if isinstance(data, dict):
            for mode in ["train", "val", "test"]:
                init_dict[f"{mode}_data"] = None
                init_dict[f"{mode}_loader"] = None
                init_dict[f"num_{mode}_data"] = 0
                if data.get(mode, None) is not None:
                    if isinstance(data.get(mode), Dataset):
                        init_dict[f"{mode}_data"] = data.get(mode)
                        init_dict[f"num_{mode}_data"] = len(data.get(mode))  # type: ignore[arg-type]
                    elif isinstance(data.get(mode), DataLoader):
                        init_dict[f"{mode}_loader"] = data.get(mode)
                        init_dict[f"num_{mode}_data"] = len(data.get(mode).dataset)  # type: ignore[union-attr]
                    elif isinstance(data.get(mode), dict):
                        init_dict[f"{mode}_data"] = data.get(mode)
                        init_dict[f"num_{mode}_data"] = len(data.get(mode)["y"])  # type: ignore[index]
                    else:
                        raise TypeError(f"Type {type(data.get(mode))} is not supported.")
        else:
            raise TypeError("Type of data should be dict.")
        return init_dict


@pytest.mark.parametrize("form", ["loader", "dataset", "arrays"])
def test_data_is_parsed_as_it_is_printed(tmp_path: Path, form: str) -> None:
    train = points(42, 1)
    forms: dict[str, Any] = {
        "loader": DataLoader(train, batch_size=8),
        "dataset": train,
        "arrays": dict(zip("xy", train.tensors, strict=True)),
    }
    trainer = build(tmp_path, ParsesAsPrinted, {"train": forms[form]}, dataloader__shuffle=False)
    trainer.train()
    assert torch.equal(weights(trainer), reference(1, 7))


def test_modes_have_their_words_and_switch_the_model(tmp_path: Path) -> None:
    assert (MODE.TRAIN, MODE.TEST, MODE.VAL, MODE.FINETUNE) == ("train", "test", "val", "finetune")
    trainer = build(tmp_path, finetune__before_eval=True)
    seen: list[tuple[str, str, bool]] = []

    def note(ctx: Any) -> None:
        seen.append((ctx.cur_mode, ctx.cur_split, ctx.model.training))

    trainer.register_hook_in_train(note, "on_fit_end")
    trainer.register_hook_in_eval(note, "on_fit_end")
    trainer.register_hook_in_ft(note, "on_fit_end")
    trainer.train(target_data_split_name="train")
    trainer.evaluate(target_data_split_name="val")
    trainer.evaluate(target_data_split_name="train")
    trainer.finetune(target_data_split_name="train")
    assert seen == [
        ("train", "train", True), ("val", "val", False), ("test", "train", False), ("finetune", "train", True)
    ]  # fmt: skip


def test_metrics_have_the_split_before_their_name(tmp_path: Path) -> None:
    class Own(MetricCalculator):
        def eval(self, ctx: Any) -> dict[str, float]:
            return {f"{ctx.cur_split}_size": float(len(ctx.ys_true))}

    trainer = build(tmp_path)
    trainer.ctx.monitor.metric_calculator = Own()
    assert trainer.evaluate("test") == {"test_size": 13.0}


def test_a_variable_with_a_life_is_used_as_it_is_and_gone_after_it(tmp_path: Path) -> None:
    kinds: list[type] = []

    def _hook_on_fit_start(ctx: Any) -> None:
        ctx.loss_total = CtxVar(0.0, LIFECYCLE.ROUTINE)

    trainer = build(tmp_path)
    trainer.register_hook_in_train(_hook_on_fit_start, "on_fit_start")
    trainer.register_hook_in_train(lambda ctx: kinds.append(type(ctx.loss_total)), "on_batch_end")
    trainer.train()
    assert set(kinds) == {float}
    assert "loss_total" not in trainer.ctx


def test_several_models_as_they_are_printed(tmp_path: Path) -> None:
    class Own(GeneralMultiModelTrainer):
        def init_multiple_models(self) -> None:
            # By default, the internal models & optimizers are the same type
            additional_models = [copy.deepcopy(self.ctx.model) for _ in range(self.model_nums - 1)]
            self.ctx.models = [self.ctx.model] + additional_models  # noqa: RUF005 - as it is printed
            self.ctx.optimizers = [get_optimizer(one, **self.cfg.train.optimizer) for one in self.ctx.models]

        def _switch_model_ctx(self, next_model_idx: int | None = None) -> None:
            if next_model_idx is None:
                next_model_idx = (self.ctx.cur_model_idx + 1) % len(self.ctx.models)
            self.ctx.cur_model_idx = next_model_idx
            self.ctx.model = self.ctx.models[next_model_idx]
            self.ctx.optimizer = self.ctx.optimizers[next_model_idx]

    for mode in ("sequential", "parallel"):
        trainer = Own(2, mode, net(), loaders(), "cpu", cfg(tmp_path))
        assert len(trainer.hooks_in_train_multiple_models) == len(trainer.hooks_in_eval_multiple_models) == 2
        trainer.train()
        for model in trainer.ctx.models:
            found = torch.cat([value.flatten().double() for value in model.state_dict().values()])
            assert torch.equal(found, reference(1, 7))

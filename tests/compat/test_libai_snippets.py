"""Every snippet of LiBai's training document runs, with its imports changed and its dots filled in."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.compat.libai import distributed as dist
from hezar_train.compat.libai import get_event_storage, hooks
from hezar_train.compat.libai.config import LazyCall, default_argument_parser
from hezar_train.compat.libai.engine import DefaultTrainer, EagerTrainer, TrainerBase
from hezar_train.compat.libai.hooks import HookBase
from hezar_train.events import EventStorage

SPEC = importlib.util.spec_from_file_location("libai_run", Path(__file__).with_name("libai_run.py"))
assert SPEC is not None
assert SPEC.loader is not None
libai_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(libai_run)
config_of = libai_run.config_of

logger = logging.getLogger("libai." + __name__)


def test_the_loop_of_the_trainer_abstraction() -> None:
    calls: list[str] = []

    class Looping(TrainerBase):
        def train(self, start_iter: int, max_iter: int) -> None:
            self.start_iter, self.max_iter = start_iter, max_iter

            with EventStorage(self.start_iter) as self.storage:
                try:
                    self.before_train()  # in hooks
                    for self.iter in range(start_iter, max_iter):
                        self.before_step()  # in hooks
                        self.run_step()  # in self._trainer
                        self.after_step()  # in hooks
                    self.iter += 1
                except Exception:
                    logger.exception("Exception during training:")
                    raise
                finally:
                    self.after_train()  # in hooks

        def run_step(self) -> None:
            calls.append(f"run {self.iter} {self.storage.iter}")

    names = ("before_train", "before_step", "after_step", "after_train")
    watch: Any = hooks.CallbackHook(**{name: lambda _, name=name: calls.append(name) for name in names})
    trainer = Looping()
    trainer.register_hooks([watch])
    trainer.train(0, 2)
    steps = [word for number in (0, 1) for word in ("before_step", f"run {number} {number}", "after_step")]
    assert calls == ["before_train", *steps, "after_train"]
    assert trainer.iter == 2


class InfoHook(HookBase):
    def before_train(self) -> None:
        logger.info(f"start training at {self.trainer.iter}")

    def after_train(self) -> None:
        logger.info(f"end training ad {self.trainer.iter}")

    def after_step(self) -> None:
        if self.trainer.iter % 100 == 0:
            logger.info(f"iteration {self.trainer.iter}!")


class MyEagerTrainer(EagerTrainer):
    def __init__(self, model: Any, data_loader: Any, optimizer: Any, grad_acc_steps: int = 1) -> None:
        super().__init__(model, data_loader, optimizer, grad_acc_steps)
        self.previous_output = None

    def run_step(self, get_batch: Callable[..., Any]) -> None:  # type: ignore[override]
        start = time.perf_counter()
        data = get_batch(next(self._data_loader_iter))
        data_time = time.perf_counter() - start
        loss_dict = self.model(**data)
        self.previous_output = loss_dict
        losses = sum(v for k, v in loss_dict.items() if "loss" in k) / self.grad_acc_steps
        losses.backward()
        self.write_metrics(loss_dict, data_time)
        if (self.iter + 1) % self.grad_acc_steps == 0:
            self.optimizer.clip_grad()  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.zero_grad()


class MyTrainer(DefaultTrainer):
    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)

        # add your _trainer according to your own needs
        # NOTE: run_step() is overwrited in your _trainer
        self._trainer = MyEagerTrainer(self.model, self.train_loader, self.optimizer)

    def build_hooks(self) -> list[Any]:
        ret = [
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            hooks.PeriodicCheckpointer(self.checkpointer, self.cfg.train.checkpointer.period),
        ]
        # add your hook according to your own needs
        # NOTE: all hooks will be called sequentially
        ret.append(InfoHook())

        if dist.is_main_process():
            ret.append(hooks.PeriodicWriter(self.build_writers(), self.cfg.train.log_period))
        return ret


def test_my_train_net_with_its_trainer_hooks_and_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, the hook that prints `iter` and the step that keeps the model's output: all in one run."""
    made: list[MyTrainer] = []

    def main(args: Any) -> Any:
        cfg = config_of(tmp_path, *args.opts)
        trainer = MyTrainer(cfg)
        made.append(trainer)
        return trainer.train()

    monkeypatch.setattr(sys, "argv", ["my_train_net.py", "train.train_iter=6"])
    with caplog.at_level("INFO", "libai"):
        args = default_argument_parser().parse_args()
        main(args)
    assert [record.message for record in caplog.records if record.name != "hezar_train"] == [
        "start training at 0",
        "iteration 0!",
        "end training ad 6",
    ]
    assert set(made[0]._trainer.previous_output) == {"cls_loss", "size_loss"}
    assert (tmp_path / "metrics.json").read_text().count("\n") >= 2
    assert (tmp_path / "checkpoints" / "00000004").exists()


def test_a_hook_may_have_none_of_its_methods(tmp_path: Path) -> None:
    trainer = DefaultTrainer(config_of(tmp_path, "train.evaluation.enabled=False", "train.train_iter=1"))
    trainer.register_hooks([HookBase()])
    trainer.train()
    assert trainer.iter == 1


def test_a_model_puts_a_metric_into_the_storage(tmp_path: Path) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.layer(images)
            # inside the model:
            if self.training:
                value = (scores.argmax(dim=1) == labels).float().mean()
                storage = get_event_storage()
                storage.put_scalar("some_accuracy", value)
            return {"loss": nn.functional.cross_entropy(scores, labels)}

    cfg = config_of(tmp_path, "train.evaluation.enabled=False", "train.train_iter=3")
    cfg.model = LazyCall(Measured)()
    trainer = DefaultTrainer(cfg)
    trainer.train()
    assert [number for _, number in trainer.storage.history("some_accuracy").values()] == [0, 1, 2]
    assert '"some_accuracy": ' in (tmp_path / "metrics.json").read_text()

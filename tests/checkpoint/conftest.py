"""A tiny run to save, and ways to kill it."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import CheckpointStore, Contents, load_module_state, pack


class Run:
    """A model and its optimizer; every update is a function of the weights alone."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.step = 0

    def update(self, count: int = 1) -> None:
        data = torch.linspace(-1, 1, 12).reshape(4, 3)
        for _ in range(count):
            self.optimizer.zero_grad()
            (self.model(data) - 1).pow(4).sum().backward()
            self.optimizer.step()
            self.step += 1

    def parts(self, **changes: Any) -> Contents:
        given: dict[str, Any] = {
            "state": {"global_step": self.step, "loss": 0.1 + self.step},
            "texts": {"train_config.yaml": "seed: 0\n"},
            "extra": {"scheduler": {"last_epoch": self.step, "best": float("inf")}, "cursor": torch.arange(self.step)},
            "folders": {"preprocessor": lambda folder: (folder / "vocab.txt").write_text("a\nb\n")},
        }
        return Contents.gather(self.model, self.optimizer.state_dict(), **given | changes)

    def load(self, checkpoint: Any) -> None:
        load_module_state(self.model, *checkpoint.model())
        self.optimizer.load_state_dict(checkpoint.optimizer())
        self.step = checkpoint.state()["global_step"]

    def bits(self) -> object:
        return bits([self.model.state_dict(), self.optimizer.state_dict()])


def bits(tree: Any) -> object:
    """Return something that is equal only for trees that are equal to the last bit."""
    packed, tensors = pack(tree)
    raw = {name: tensor.reshape(-1).contiguous().view(torch.uint8).tolist() for name, tensor in tensors.items()}
    return packed, raw, {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


class Child:
    """A forked process that runs one function; forked and not spawned, because importing torch takes seconds."""

    def __init__(self, job: Callable[[], None]) -> None:
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            code = 1
            try:
                job()
                code = 0
            except BaseException:  # noqa: BLE001 - the exit code tells the parent
                traceback.print_exc()
            finally:
                os._exit(code)

    def kill(self) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status


@pytest.fixture
def new_run() -> type[Run]:
    return Run


@pytest.fixture
def bits_of() -> Callable[[Any], object]:
    return bits


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[], None]], Child]]:
    children: list[Child] = []

    def start(job: Callable[[], None]) -> Child:
        children.append(Child(job))
        return children[-1]

    yield start
    for child in children:
        child.kill()

"""The examples as modules, and how two runs of one are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Train as the command does: the bits of a run depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return a function that imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def contents() -> Callable[[Any], dict[str, Any]]:
    """Return a function that lists all that a run has learned: the weights and optimizers of all its trainers."""

    def read(run: Any) -> dict[str, Any]:
        trainers = getattr(run, "clients", [run])
        kept = {
            number: {
                "model": one.model.state_dict(),
                "optimizer": one.optimizer.state_dict(),
                "counts": one.state.to_dict(),
            }
            for number, one in enumerate(trainers)
        }
        more = {"server": run.server.state_dict()} if hasattr(run, "server") else {}
        more |= {name: one.state_dict() for name, one in vars(run).items() if isinstance(one, torch.optim.Optimizer)}
        return {name: _comparable(value) for name, value in _leaves("", {**kept, **more}) if not _is_of_a_start(name)}

    return read


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in pairs:
            yield from _leaves(f"{path}/{key}", one)
    else:
        yield path, value


def _comparable(value: Any) -> Any:
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _is_of_a_start(name: str) -> bool:
    return name.endswith("/logs_dir") or "/files/" in name  # names and sizes of files with times in them

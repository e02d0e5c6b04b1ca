"""The public names, and that importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hezar_train

ROOT = Path(hezar_train.__file__).parents[1]
PUBLIC_NAMES = [
    "LIFECYCLE",
    "CtxVar",
    "EventStorage",
    "Hook",
    "Lifecycle",
    "MetricConfig",
    "Mode",
    "Moment",
    "MultiModelTrainer",
    "RangedSampler",
    "Recipe",
    "RoutineResult",
    "Trainer",
    "TrainerConfig",
    "TrainerState",
    "__version__",
    "get_event_storage",
    "lifecycle",
    "without_weights",
]


def test_the_public_names_are_these() -> None:
    assert hezar_train.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(hezar_train))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_is_found(name: str) -> None:
    assert getattr(hezar_train, name) is getattr(hezar_train, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hezar_train' has no attribute 'Trainr'"):
        hezar_train.Trainr  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, hezar_train; assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_version_is_the_projects() -> None:
    assert hezar_train.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

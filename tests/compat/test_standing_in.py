"""Doors under other systems' names: code that imports lernomatic or LiBai finds the door, or is told what there is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hezar_train.compat import lernomatic, libai
from hezar_train.compat.libai.data import Instance
from hezar_train.compat.standing_in import put_in_place
from hezar_train.errors import ConfigError

NAME = "a_system_of_a_test"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for module in [one for one in sys.modules if one.split(".")[0] == NAME]:
        del sys.modules[module]
    importlib.invalidate_caches()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a trainer, a trainer made of it, and a model."""
    root = tmp_path / NAME
    (root / "train").mkdir(parents=True)
    (root / "train" / "trainer.py").write_text("class Trainer:\n    pass\n")
    (root / "train" / "mine.py").write_text(f"from {NAME}.train import trainer\nclass Mine(trainer.Trainer): pass\n")
    (root / "nets.py").write_text("size = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def names_after(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(code, found)
    return found


class TestLernomatic:
    def test_its_own_trainers_derive_from_the_doors(self, installed: Path) -> None:
        lernomatic.stand_in(NAME)
        found = names_after(f"from {NAME}.train import mine, schedule\nfrom {NAME}.nets import size")
        assert issubclass(found["mine"].Mine, lernomatic.Trainer)
        assert found["schedule"].StepScheduler is lernomatic.schedule.StepScheduler
        assert found["size"] == 3

    def test_without_it_the_doors_modules_are_all_there_is(self) -> None:
        put = lernomatic.stand_in(NAME)
        found = names_after(
            f"from {NAME}.models import common\nfrom {NAME}.param.lr_common import LogFinder\n"
            f"import {NAME}.train.trainer"
        )
        assert put == sorted(
            f"{NAME}.{one}" for one in ("models.common", "param.lr_common", "train.schedule", "train.trainer")
        )
        assert found["common"].LernomaticModel is lernomatic.LernomaticModel
        assert found["LogFinder"] is lernomatic.LogFinder
        assert found[NAME].train.trainer.Trainer is lernomatic.Trainer

    def test_a_call_after_an_import_is_refused(self, installed: Path) -> None:
        importlib.import_module(f"{NAME}.train.mine")
        with pytest.raises(ConfigError, match=rf"too late: {NAME}.train.trainer had been imported.* Call it before"):
            lernomatic.stand_in(NAME)


class TestLiBai:
    def test_its_modules_are_the_doors_and_the_door_stays_as_it_was(self) -> None:
        libai.stand_in(NAME)
        libai.stand_in(NAME)
        found = names_after(
            f"from {NAME}.engine import DefaultTrainer, hooks\nfrom {NAME}.engine.default import _check_batch_size\n"
            f"from {NAME}.engine.trainer import HookBase\nimport {NAME}.utils.distributed as dist\n"
            f"from {NAME}.utils import distributed\nfrom {NAME}.utils.checkpoint import Checkpointer\n"
            f"from {NAME}.config import LazyCall, instantiate\nfrom {NAME}.data.structures import Instance\n"
            f"import {NAME}.engine.default"
        )
        assert found["DefaultTrainer"] is found[NAME].engine.default.DefaultTrainer is libai.DefaultTrainer
        assert found["HookBase"] is libai.HookBase
        assert found["dist"] is found["distributed"]
        assert (
            found["instantiate"]
            is libai.instantiate
            is importlib.import_module("hezar_train.compat.libai.config").instantiate
        )
        assert found["Checkpointer"] is libai.Checkpointer

    @pytest.mark.parametrize("asked", ["models", "layers.linear", "data.datasets"])
    def test_what_is_not_offered_is_told_with_what_there_is(self, asked: str) -> None:
        libai.stand_in(NAME)
        with pytest.raises(ModuleNotFoundError, match=r"not offered where .* There are libai.config, .engine"):
            importlib.import_module(f"{NAME}.{asked}")

    def test_an_installed_one_is_not_touched(self, installed: Path) -> None:
        libai.stand_in(NAME)
        with pytest.raises(ModuleNotFoundError, match="not offered"):
            importlib.import_module(f"{NAME}.nets")


class TestTheRestOfLiBai:
    """What is turned into torch lies in a folder, and is found under LiBai's names beside the door."""

    @pytest.fixture
    def rest(self, tmp_path: Path) -> Path:
        folder = tmp_path / "turned"
        files = {
            "models/__init__.py": f"from {NAME}.layers import width\nfrom {NAME}.utils.paths import here",
            "layers.py": "width = 3",
            "utils/paths.py": "here = 'utils'",
            "data/datasets.py": f"from {NAME}.data.structures import Instance\nsample = Instance(x=1)",
            "engine/__init__.py": "from .default import DefaultTrainer, default_setup\nfrom .own import OwnTrainer",
            "engine/default.py": "class DefaultTrainer: pass\n_secret = 1",
            "engine/own.py": f"from {NAME}.engine import DefaultTrainer\nclass OwnTrainer(DefaultTrainer): pass",
        }
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    def test_modules_that_the_door_lacks_are_the_folders(self, rest: Path) -> None:
        libai.stand_in(NAME, rest=rest)
        found = names_after(
            f"from {NAME}.models import here, width\nfrom {NAME}.data.datasets import sample\n"
            f"from {NAME} import engine, layers"
        )
        assert (found["here"], found["width"], found["layers"].width) == ("utils", 3, 3)
        assert type(found["sample"]) is Instance
        assert found["engine"].DefaultTrainer is libai.DefaultTrainer

    def test_a_name_that_a_fork_adds_to_a_module_of_the_doors_is_found(self, rest: Path) -> None:
        libai.stand_in(NAME, rest=rest)
        found = names_after(f"from {NAME}.engine import DefaultTrainer, OwnTrainer\nfrom {NAME}.engine import default")
        assert issubclass(found["OwnTrainer"], libai.DefaultTrainer)
        assert found["DefaultTrainer"] is found["default"].DefaultTrainer is libai.DefaultTrainer
        assert not hasattr(found["default"], "_secret")
        assert not hasattr(found["default"], "nothing_of_this_name")

    @pytest.mark.parametrize(
        "asked", ["import {}.tokenizer", "from {}.engine import Nothing", "from {}.data import nothing"]
    )
    @pytest.mark.parametrize("has_rest", [False, True])
    def test_what_is_in_neither_is_told(self, asked: str, has_rest: bool, rest: Path) -> None:
        libai.stand_in(NAME, rest=rest if has_rest else None)
        with pytest.raises(ModuleNotFoundError, match=r"not offered where .* say where they are: stand_in\(rest="):
            names_after(asked.format(NAME))

    def test_a_folder_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no such folder; expected that of the package"):
            libai.stand_in(NAME, rest=tmp_path / "nowhere")


def test_a_package_that_fails_to_import_is_not_papered_over(installed: Path) -> None:
    (installed / "train" / "__init__.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        put_in_place(NAME, {"train.trainer": lernomatic.trainer})

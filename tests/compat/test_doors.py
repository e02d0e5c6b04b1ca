"""What holds for every door: it is built on public names alone, nothing depends on it, and its names are its own."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hezar_train
from hezar_train import Trainer, compat
from hezar_train.trainer.door_names import NAMES_BY_DOOR, door_of

PACKAGE = Path(hezar_train.__file__).parent
DOORS = PACKAGE / "compat"
FILES = sorted(DOORS.rglob("*.py"))
READERS = {"delattr", "getattr", "hasattr", "setattr"}


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives to something: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _used(tree: ast.Module) -> Iterator[str]:
    """Yield every name, attribute and import of a file, those that are told as a text included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READERS:
            yield from (one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str))


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_door_uses_no_private_name_but_those_that_doors_define(path: Path) -> None:
    defined = {name for one in FILES for name in _defined(_tree(one))}
    assert [name for name in _used(_tree(path)) if _is_private(name) and name not in defined] == []


def _ours(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that a file imports from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hezar_train":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "hezar_train")


def _public_packages(tree: ast.Module) -> dict[str, str]:
    """Return by its name in a file each package of ours that it imports as a whole."""
    return {
        alias.asname or alias.name: f"hezar_train.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "hezar_train"
        for alias in node.names
        if (PACKAGE / alias.name / "__init__.py").is_file()
    }


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_door_imports_only_names_that_their_module_calls_public(path: Path) -> None:
    tree = _tree(path)
    packages = _public_packages(tree)
    hidden = [
        f"{module}.{name}"
        for module, name in _ours(tree)
        if name not in importlib.import_module(module).__all__ and f"{module}.{name}" not in packages.values()
    ]
    assert hidden == []
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    for node in read:
        if node.value.id in packages:  # type: ignore[attr-defined]
            module = packages[node.value.id]  # type: ignore[attr-defined]
            assert node.attr in importlib.import_module(module).__all__, f"{module}.{node.attr}"


def test_nothing_outside_of_the_doors_imports_one() -> None:
    others = [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(DOORS)]
    for path in others:
        assert not [pair for pair in _ours(_tree(path)) if "compat" in ".".join(pair).split(".")], _name(path)


def test_the_doors_are_named_and_importing_their_package_imports_none() -> None:
    there = {path.stem for path in DOORS.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert there - {"__init__", "standing_in"} == set(compat.__all__)  # what the doors share is no door
    code = "import sys, hezar_train.compat; print(*{'torch', 'numpy', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("door", sorted(NAMES_BY_DOOR))
class TestNames:
    def test_each_is_on_the_doors_trainer_and_not_on_the_plain_one(self, door: str) -> None:
        theirs = importlib.import_module(f"hezar_train.compat.{door}").Trainer
        assert issubclass(theirs, Trainer)
        assert [name for name in sorted(NAMES_BY_DOOR[door]) if not hasattr(theirs, name)] == []
        assert [name for name in sorted(NAMES_BY_DOOR[door]) if hasattr(Trainer, name)] == []

    def test_each_public_name_that_a_door_adds_is_listed(self, door: str) -> None:
        theirs = importlib.import_module(f"hezar_train.compat.{door}").Trainer
        own = [name for name in dir(theirs) if not name.startswith("_") and name not in Trainer.__annotations__]
        added = {name for name in own if not hasattr(Trainer, name)}
        assert added == NAMES_BY_DOOR[door]

    def test_a_plain_trainer_that_is_asked_for_one_says_what_to_import(
        self, door: str, toy: Callable[..., Trainer]
    ) -> None:
        plain: Any = toy()
        for name in sorted(NAMES_BY_DOOR[door]):
            with pytest.raises(AttributeError, match=f"from hezar_train.compat.{door} import Trainer"):
                getattr(plain, name)


def test_no_name_is_behind_two_doors() -> None:
    listed = [name for names in NAMES_BY_DOOR.values() for name in names]
    assert sorted(listed) == sorted(set(listed))


def test_a_name_that_no_door_has_is_an_attribute_error_without_advice(toy: Callable[..., Trainer]) -> None:
    assert door_of("get_lerning_rate") == ""
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'get_lerning_rate'$"):
        toy().get_lerning_rate  # type: ignore[attr-defined]  # noqa: B018

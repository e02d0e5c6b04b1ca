"""The shape of the package as a test: who may import whom, what stays free of torch, what every file must have."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hezar_train"

# Low to high: a part imports lower rows only; parts of one row are strangers to each other.
ROWS = [
    {"errors", "types"},
    {"run_folder", "user_cache"},
    {"config"},
    {"plan", "state", "run_layout"},
    {"runtime"},
    {"data", "optim", "metrics", "events", "checkpoint"},
    {"report"},
    {"hub"},
    {"loop"},
    {"hooks", "terminal"},
    {"trainer"},
    {"multi_model"},
    {"federated"},
    {"compat"},
    {"recipes", "launch"},
    {"cli"},
    {"__main__"},
]
UPWARD = ("config", "hub")
"""Who may import what is above it, inside a function: the config's own ways to and from the Hub."""
ROW_OF_PART = {part: number for number, parts in enumerate(ROWS) for part in parts}
ABOVE_THE_LINE = {"multi_model", "federated", "compat", "recipes", "launch", "cli", "__main__"}
"""Built on the library as a user would; nothing below imports them, not even for a type."""
LARGEST_TRAINER = 73
"""Public names of the Trainer: whoever needs one more finds one to take away, or raises this on purpose."""
OWNERS = {
    "accelerate": {"runtime", "events"},
    "safetensors": {"checkpoint"},
    "huggingface_hub": {"hub"},
    "click": {"cli"},
    "peft": {"checkpoint"},
}
TORCH_FREE = {
    *("__init__", "__main__", "errors", "types", "run_folder", "user_cache", "config", "plan", "state", "run_layout"),
    *("recipes", "cli"),
}
HEAVY = {"torch", "numpy", "accelerate", "safetensors", "transformers", "datasets"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "core"}


class Import(NamedTuple):
    """One module that a file imports when it runs."""

    name: str
    is_at_module_level: bool


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _part(path: Path) -> str:
    """Return the row's name of a file: its package or, at the top, the module itself."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _imports(node: ast.AST, is_top: bool = True) -> Iterator[Import]:
    """Yield what a file imports, wherever it does so, but for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, is_top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are written in full"
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (Import(name, is_top) for name in names)
        else:
            yield from _imports(child, is_top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def _imports_of(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_a_file_belongs_to_a_part_of_the_design(path: Path) -> None:
    assert _part(path) in {*ROW_OF_PART, "__init__"}
    assert path.stem not in VAGUE_NAMES


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_a_file_imports_lower_parts_only(path: Path) -> None:
    part = _part(path)
    for name, is_at_module_level in _imports_of(path):
        if not name.startswith("hezar_train."):
            continue
        other = name.split(".")[1]
        if other in {part, "__version__"} or ((part, other) == UPWARD and not is_at_module_level):
            continue
        assert part != "__init__", "the top level imports nothing until a name is asked for"
        assert ROW_OF_PART[other] < ROW_OF_PART[part], f"{_name(path)} imports {name}"


@pytest.mark.parametrize(
    "path", [one for one in _modules() if _part(one) not in ABOVE_THE_LINE | {"__init__"}], ids=_name
)
def test_a_file_below_the_line_does_not_know_what_is_above(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    named = [f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".") for node in imports for alias in node.names]
    known = {name.split(".")[1] for name in named if name.startswith("hezar_train.")}
    assert not known & ABOVE_THE_LINE


@pytest.mark.parametrize(
    "path", [one for one in _modules() if _part(one) not in ABOVE_THE_LINE and one.stem != "__init__"], ids=_name
)
def test_a_file_below_the_line_is_in_the_drawing_of_its_room(path: Path) -> None:
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    rooms = re.split(r"^  (?=\w)", drawing, flags=re.MULTILINE)
    room = next((one for one in rooms if re.match(rf"{_part(path)}\b|errors  types", one)), "")
    assert path.stem == "__main__" or re.search(rf"\b{path.stem}\b", room)


def test_the_trainer_inherits_from_nobody_and_is_small() -> None:
    from hezar_train import Trainer

    assert Trainer.__mro__ == (Trainer, object)
    assert len([name for name in dir(Trainer) if not name.startswith("_")]) <= LARGEST_TRAINER


OF_OTHER_SYSTEMS = re.compile(
    r"_hook_on_\w+|_run_(routine|epoch|batch)|_switch_model_ctx|_param_filter|_register_hook|_reset_hook_in_trigger"
    r"|_setup_data_related_var_in_ctx|_init_(device|optimizer|dataloaders|history)|_send_to_device"
)
"""Names that begin with an underscore and that users of other systems call and override: a door's public face."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not OF_OTHER_SYSTEMS.fullmatch(name)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _defined(kind: ast.ClassDef) -> set[str]:
    """Return what a class defines: fields, methods, `self.name = ...` and `self.__dict__["name"] = ...`."""
    assigned = [node.targets if isinstance(node, ast.Assign) else [node.target] for node in kind.body
                if isinstance(node, ast.Assign | ast.AnnAssign)]  # fmt: skip
    names = {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            names.add(str(node.slice.value))
    return names


def _borrowed(kind: ast.ClassDef) -> set[str]:
    """Return the private names that a class reads of itself, or calls through super(), and does not define."""
    attributes = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and _is_private(node.attr)]
    return {node.attr for node in attributes if _is_self(node.value) or _is_super(node.value)} - _defined(kind)


def _classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)]


COMPOSED = [path for path in _modules() if ROW_OF_PART.get(_part(path), -1) >= ROW_OF_PART["loop"]]
"""From the loop on classes are composed; below, metrics, writers and sources of data are families."""


@pytest.mark.parametrize("path", COMPOSED, ids=_name)
def test_a_class_reads_no_private_attribute_that_another_class_sets(path: Path) -> None:
    assert {kind.name: names for kind in _classes(path) if (names := _borrowed(kind))} == {}


def _private_names(kind: type) -> set[str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    return {name for name in _defined(definition) if _is_private(name)}


@pytest.mark.parametrize("path", [path for path in COMPOSED if path.name != "__main__.py"], ids=_name)
def test_a_class_defines_no_private_name_of_a_class_that_it_is_derived_from(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for kind in [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]:
        for base in [one for one in kind.__mro__[1:] if one.__module__.startswith("hezar_train.")]:
            assert not _private_names(kind) & _private_names(base), f"{kind.__name__} and {base.__name__}"


@pytest.mark.parametrize(
    ("source", "borrowed"),
    [
        ("class A(B):\n  def f(self): return self._x", {"_x"}),
        ("class A(B):\n  def f(self): return super()._f()", {"_f"}),
        ("class A(B):\n  def _f(self): return super()._f()", set()),
        ("class A(B):\n  def f(self):\n    _x = 1\n    return self._x", {"_x"}),
        ("class A:\n  _x: int\n  def f(self): return self._x", set()),
        ("class A:\n  def g(self): self._x, self.y = 1, 2\n  def f(self): return self._x", set()),
        ("class A(B):\n  def f(self): return self.x, self.__dict__, other._x", set()),
    ],
)
def test_a_borrowed_name_is_found(source: str, borrowed: set[str]) -> None:
    (kind,) = ast.parse(source).body
    assert isinstance(kind, ast.ClassDef)
    assert _borrowed(kind) == borrowed


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_a_foreign_package_is_used_by_its_owner_only(path: Path) -> None:
    for name in (found.name.split(".")[0] for found in _imports_of(path)):
        assert _part(path) in OWNERS.get(name, {_part(path)}), f"{_name(path)} imports {name}"


@pytest.mark.parametrize("path", [path for path in _modules() if _part(path) in TORCH_FREE], ids=_name)
def test_a_light_file_imports_nothing_heavy_at_module_level(path: Path) -> None:
    assert not {found.name.split(".")[0] for found in _imports_of(path) if found.is_at_module_level} & HEAVY


def test_the_light_parts_load_without_anything_heavy() -> None:
    modules = ", ".join(f"hezar_train.{part}" for part in sorted(TORCH_FREE - {"__init__", "__main__"}))
    code = f"import sys, hezar_train, {modules}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == []


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, hezar_train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", [path for path in _modules() if path.name != "__main__.py"], ids=_name)
def test_a_module_says_what_it_is_for_and_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "the docstring is missing"
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    assert any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets), "__all__ is missing"


@pytest.mark.parametrize(
    "part",
    [
        *("config", "data", "optim", "metrics", "events", "checkpoint"),
        *("report", "hub", "loop", "hooks", "trainer", "multi_model", "federated"),
    ],
)
def test_what_a_package_names_it_has(part: str) -> None:
    module = __import__(f"hezar_train.{part}", fromlist=["__all__"])
    assert module.__all__
    assert all(hasattr(module, name) for name in module.__all__)


def _pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {_canonical(name): version for name, version in (line.split("==") for line in lines if "==" in line)}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _stated() -> list[tuple[str, str, str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    others = [line for line in lines if not line.startswith("hezar-train[")]
    matches = [re.fullmatch(r"([\w.-]+)(?:\[\w+\])?(>=|==)([\d.]+)", line) for line in others]
    assert all(matches), "a requirement is a name with the version that was run"
    return sorted({match.groups() for match in matches if match})  # type: ignore[misc]


@pytest.mark.parametrize(("name", "operator", "bound"), _stated())
def test_a_lower_bound_is_a_version_that_was_run(name: str, operator: str, bound: str) -> None:
    pinned = _pinned()[_canonical(name)]
    assert (pinned if operator == "==" else ".".join(pinned.split(".")[:2])) == bound


def test_the_makefile_installs_the_pinned_torch() -> None:
    assert f"TORCH := torch=={_pinned()['torch']}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")

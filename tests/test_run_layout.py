"""The layout of a run's folder: each name is spelled once, every path follows from it, and the page tells the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hezar_train import TrainerConfig, run_layout
from hezar_train.errors import ConfigError
from hezar_train.run_layout import RunLayout, is_run, step_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hezar_train"
LAYOUT = "run_layout.py"

SPELLED_BELOW = {run_layout.CONFIG_FILE: "config/trainer_config.py"}
"""What a part spells that the layout imports."""

NAMES = {
    value
    for name, value in vars(run_layout).items()
    if name.endswith(("_FILE", "_FOLDER", "_PREFIX", "_SUFFIX")) and isinstance(value, str)
}
WORDS = {name for name in NAMES if re.fullmatch(r"\.?\w+", name) and name != run_layout.DROPPED_SUFFIX}
"""Names that are words of the language, too: they count only where a path is made of them."""

TAKES_PATHS = {"Path", "glob", "joinpath", "rglob", "with_name", "read_json"}


def _literals(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the texts of a module, but for those that stand alone: docstrings."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def _in_paths(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that paths are made of: beside a slash, given to what takes paths, or kept as a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Div(), right=part):
                yield from _texts(part)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=parts) if name in TAKES_PATHS:
                yield from (text for part in parts for text in _texts(part))
            case ast.Assign(
                targets=[ast.Name(id=name)], value=(ast.Constant() | ast.Tuple() | ast.JoinedStr()) as part
            ) if name.isupper():
                yield from _texts(part)


def _texts(node: ast.expr) -> Iterator[str]:
    yield from (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def _spelled(path: Path) -> set[str]:
    """Return the names of a run's files that a module spells."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    whole = {name for node in _literals(tree) for name in NAMES - WORDS if name in str(node.value)}
    return whole | {word for text in _in_paths(tree) for word in WORDS if text.strip("/*").split("/")[0] == word}


def _modules() -> dict[str, Path]:
    """Return all modules but the layout, by their paths in the package."""
    found = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: path for name, path in found.items() if name != LAYOUT}


def test_no_other_module_spells_a_name_of_the_folder() -> None:
    spelled = {(module, name) for module, path in _modules().items() for name in _spelled(path)}
    assert spelled - {(module, name) for name, module in SPELLED_BELOW.items()} == set()


def test_no_other_module_knows_how_a_step_is_written() -> None:
    texts = {module: _literals(ast.parse(path.read_text(encoding="utf-8"))) for module, path in _modules().items()}
    assert [module for module, found in texts.items() if any(node.value == "08d" for node in found)] == []


def test_every_name_is_spelled_once() -> None:
    text = (PACKAGE / LAYOUT).read_text(encoding="utf-8")
    spelled = [str(node.value) for node in _literals(ast.parse(text)) if node.value in NAMES]
    defaults = {TrainerConfig.checkpoints_dir, TrainerConfig.logs_dir}
    assert sorted(spelled) == sorted(NAMES - set(SPELLED_BELOW) - defaults)


def test_a_folder_that_is_laid_out_by_a_config_is_found_again_by_its_config(tmp_path: Path) -> None:
    config = TrainerConfig(tmp_path / "run", checkpoints_dir="states/all", logs_dir="notes")
    config.save(tmp_path / "run")
    asked, found = RunLayout.of(config), RunLayout.at(tmp_path / "run")
    assert vars(asked) == vars(found)
    assert (asked.checkpoints, asked.all_logs) == (tmp_path / "run/states/all", tmp_path / "run/notes")


def test_a_config_under_another_name_is_found_in_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (3, 6):
        TrainerConfig(tmp_path, seed=step, logs_dir=f"logs-{step}").save(tmp_path / "checkpoints" / step_name(step))
    assert RunLayout.at(tmp_path).config == tmp_path / "checkpoints/00000006/train_config.yaml"
    assert RunLayout.at(tmp_path).all_logs == tmp_path / "logs-6"
    assert not is_run(tmp_path)


def test_a_folder_without_a_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no train_config\.yaml"):
        RunLayout.at(tmp_path)


def test_what_a_damaged_config_does_not_say_is_as_usual(tmp_path: Path) -> None:
    layout = RunLayout.with_settings(tmp_path, {"checkpoints_dir": None})
    assert vars(layout) == vars(RunLayout(tmp_path))


def test_logs_go_on_where_a_state_says_and_begin_in_a_folder_named_after_now_and_the_host(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert layout.logs("logs/first") == tmp_path / "logs/first"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[\w.-]+", layout.logs(None).name)
    assert layout.logs(None).parent == layout.all_logs


def test_what_is_named_after_a_step_is_found_by_it_under_any_padding(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    for name in ("00000010.json", "9.json", "00000010.json.1.dropped", "notes.json", "00000010/0.png"):
        (layout.evaluations / name).parent.mkdir(parents=True, exist_ok=True)
        (layout.evaluations / name).touch()
    assert list(layout.evaluation_records()) == [9, 10]
    assert layout.evaluation_records()[10] == layout.evaluation_record(10)
    assert layout.pictures(10) == layout.evaluations / "00000010"
    for name in ("00000120", "007", ".tmp-00000130-1-2", "last"):
        (layout.checkpoints / name).mkdir(parents=True)
    assert {step: path.name for step, path in layout.checkpoint_folders().items()} == {7: "007", 120: "00000120"}


def test_the_page_shows_the_folder_as_it_is() -> None:
    page = (ROOT / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    tree = page.partition("RUN/\n")[2].partition("```")[0]
    shown = {line.split()[0].split("/")[0] for line in tree.splitlines()} | {run_layout.CURVES_FILE}
    layout = RunLayout("run")
    paths = [*layout.pages, *(path for path in vars(layout).values() if isinstance(path, Path) and path != layout.root)]
    own = {path.relative_to("run").parts[0] for path in paths} | {run_layout.LR_FINDER_FILE}
    assert shown == own - {run_layout.COMPARISON_FILE}
    logs = next(line for line in tree.splitlines() if line.strip().startswith("logs/"))
    assert logs.split()[1:] == [run_layout.METRICS_FILE, run_layout.CSV_FILE, f"{run_layout.EVENTS_PREFIX}.."]

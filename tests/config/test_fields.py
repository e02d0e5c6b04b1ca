"""Rules of the config's source: every field explains itself, has one owner, and is checked by it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import hezar_train
from hezar_train.config import MetricConfig, TrainerConfig
from hezar_train.config.names import FOREIGN_FIELDS
from hezar_train.config.trainer_config import GROUPS
from hezar_train.errors import ConfigError


@pytest.mark.parametrize("cls", [*GROUPS, MetricConfig])
def test_every_field_has_a_docstring_beneath_it(cls: type) -> None:
    source = Path(inspect.getfile(cls))
    (tree,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") == cls.__name__]
    assert isinstance(tree, ast.ClassDef)
    fields = {field.name for field in dataclasses.fields(cls)}
    explained = {
        node.target.id
        for node, following in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    assert explained == fields


def test_the_groups_are_the_parents_and_share_no_field() -> None:
    assert TrainerConfig.__bases__ == GROUPS[::-1]
    names = [field.name for group in GROUPS for field in dataclasses.fields(group)]
    assert names == TrainerConfig("run").keys()


@pytest.mark.parametrize("name", list(TrainerConfig.fields()))
def test_every_field_refuses_what_it_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**{"output_dir": "run", name: object()})
    (problem,) = caught.value.problems
    assert ("save_steps" if name == "save_freq" else name) in problem


def test_only_fields_that_may_be_none_have_none_as_default() -> None:
    for name, field in TrainerConfig.fields().items():
        if field.default is None:
            TrainerConfig(**{"output_dir": "run", name: None})
        else:
            with pytest.raises(ConfigError):
                TrainerConfig(**{"output_dir": "run", name: None})


def test_foreign_fields_point_at_ours_and_are_none_of_ours() -> None:
    ours = set(TrainerConfig.fields())
    assert set(FOREIGN_FIELDS.values()) <= ours
    assert not set(FOREIGN_FIELDS) & ours


def test_a_config_is_read_checked_and_planned_without_torch(tmp_path: Path) -> None:
    TrainerConfig("run", optimizer="adamw", lr_scheduler="one_cycle", criterion="CrossEntropyLoss").save(tmp_path)
    code = (
        "import sys\n"
        "import hezar_train.plan, hezar_train.state\n"
        "from hezar_train.config import TrainerConfig\n"
        f"config = TrainerConfig.load({str(tmp_path)!r})\n"
        "hezar_train.plan.make_plan(config, num_samples=10)\n"
        "assert not {'torch', 'numpy', 'accelerate'} & set(sys.modules), 'too much was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(hezar_train.__file__).parents[1])

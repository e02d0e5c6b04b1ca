"""The wheel carries the recipes and finds them; slow, because pip builds it in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_wheel_carries_the_recipes_as_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    shipped = tmp_path / "installed" / "hezar_train" / "_recipes"
    assert files_of(shipped) == files_of(source / "recipes")
    assert {"sequence_labeling/templates.txt", "license_plate/fonts"} <= {
        path.relative_to(shipped).as_posix() for path in shipped.rglob("*")
    }
    code = (
        "from hezar_train.recipes import load_recipe, recipe_names\n"
        "for name in recipe_names(): print(load_recipe(name).source)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "installed")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == sorted(map(str, shipped.glob("*/recipe.py")))

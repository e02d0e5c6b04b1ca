"""Carry the recipes in the wheel as data; all other settings are in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path("recipes")
TARGET = Path("hezar_train") / "_recipes"


class BuildWithRecipes(build_py):
    """Copy `recipes/` into the built package, where `hezar_train.recipes` looks for names."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # the source tree itself is used then
            shutil.rmtree(Path(self.build_lib) / TARGET, ignore_errors=True)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(RECIPES, Path(self.build_lib) / TARGET, ignore=ignored)


setup(cmdclass={"build_py": BuildWithRecipes})

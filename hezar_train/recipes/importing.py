"""Run a recipe's source as a module; what it imports from its own folder must be in its hash, and is compiled anew.

A recipe is trusted by its hash. Python would import other things beside it, too: bytecode in `__pycache__`, which need
not be that of the source, and modules in hidden folders and among the files of a run, which the hash leaves out. So a
finder stands before Python's own: of the folder of a recipe it compiles the source, and refuses what the hash does not
cover. Modules from elsewhere are found as ever. What a recipe reads by other means than `import` is its own affair.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from hezar_train.errors import ConfigError
from hezar_train.recipes.recipe import is_hashed

__all__ = ["import_recipe"]


def import_recipe(source: Path) -> ModuleType:
    """Run a recipe's source as a module of its own name."""
    name = f"hezar_train_recipe_{source.resolve().parent.name}"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None:
        raise ConfigError(f"{source}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # loader workers and dataclasses look classes up by their module
    _finder.guard(source.parent)
    # Compiled from the source, which the recipe's hash covers: what lies in __pycache__ it does not.
    exec(compile(source.read_bytes(), source, "exec", dont_inherit=True), module.__dict__)
    return module


class _Source(SourceFileLoader):
    """Compile a module from its source, whatever bytecode lies beside it."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _RecipeFinder(MetaPathFinder):
    """Find modules as Python does; those in the folders of recipes by the rules of this module."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()

    def guard(self, folder: Path) -> None:
        """Apply the rules to a folder, from now on."""
        self._folders |= {folder.absolute(), folder.resolve()}
        if self not in sys.meta_path:
            own = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
            sys.meta_path.insert(own, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; raise if it is in the folder of a recipe and not in its hash."""
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not spec.has_location or spec.origin is None:
            return spec
        given = Path(os.path.abspath(spec.origin))
        found = [
            (folder, origin)
            for folder in self._folders
            for origin in {given, given.resolve()}  # by its name, and by where links lead
            if origin.is_relative_to(folder) and not _is_of_python(origin, folder)
        ]
        for folder, origin in found:
            if not is_hashed(folder, origin):
                raise ConfigError(
                    f"the recipe {folder} imports {fullname} from {origin}, which its hash does not cover, so that it "
                    "could be exchanged unseen: hidden folders, __pycache__, runs/, the folder of a run, and files of "
                    "more than 100 MB are left out. Move it to a folder beside recipe.py."
                )
        if found and type(spec.loader) is SourceFileLoader:
            spec.loader, spec.cached = _Source(fullname, spec.origin), None
        return spec


def _is_of_python(origin: Path, folder: Path) -> bool:
    """Tell whether a module is one of the environment, which may lie in the folder of a recipe."""
    prefixes = {Path(sys.prefix), Path(sys.prefix).resolve()} - {folder}
    return any(one.is_relative_to(folder) and origin.is_relative_to(one) for one in prefixes)


_finder = _RecipeFinder()

"""Let code that imports another system find a door under that system's names, with none of its imports changed.

`put_in_place`, called before that code is imported, puts modules of a door into `sys.modules`. What it does not put in
place is the system's own where that is installed, or that of a folder. Where it is neither, or cannot be, asking for
more is an `ImportError` that says what there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from hezar_train.errors import ConfigError

__all__ = ["is_installed", "put_in_place"]


def is_installed(name: str) -> bool:
    """Tell whether a package of this name can be imported."""
    return importlib.util.find_spec(name) is not None


def put_in_place(
    name: str, modules: Mapping[str, ModuleType], not_offered: str = "", rest: Path | None = None
) -> list[str]:
    """Put modules below a package's name, by their paths in it; return their full names.

    With `not_offered`, a sentence, the package is nothing but these modules and those below the folder `rest`: whatever
    else is imported from it raises with that sentence. Without it, the rest is the package's own.
    """
    _refuse_late_call(name, modules)
    placed = {f"{name}.{path}": StandIn(f"{name}.{path}", module) for path, module in modules.items()}
    sys.modules.update(placed)  # first, so that what packages import on their own is these, too
    if not_offered and not any(isinstance(one, NothingElse) and one.name == name for one in sys.meta_path):
        sys.meta_path.insert(0, NothingElse(name, not_offered))
    for path, module in placed.items():
        parent, _, last = path.rpartition(".")
        package = _package(parent, is_made=bool(not_offered))
        if not hasattr(package, last) or not isinstance(package, StandIn):  # a name of the door's own stays
            setattr(package, last, module)
    if rest is not None:
        _look_below(rest, name)
    return sorted(placed)


def _look_below(rest: Path, name: str) -> None:
    """Let the packages that are in place find what they lack in the folder."""
    for path, module in list(sys.modules.items()):
        if path == name or path.startswith(f"{name}."):
            module.__path__ = [str(rest.joinpath(*path.split(".")[1:]))]


class StandIn(ModuleType):
    """A module with the names of one of a door's; the door's own is not touched by what is put below it.

    A public name that the door lacks is taken from the file that the folder of the rest has for this module: what a
    fork of the system has added there.
    """

    _added: ModuleType | None

    def __init__(self, path: str, module: ModuleType) -> None:
        super().__init__(path, module.__doc__)
        vars(self).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
        self.__path__: list[str] = []
        self._added = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self.__path__ or not (added := self._what_was_added()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(added, name)

    def _what_was_added(self) -> ModuleType | None:
        """Run the folder's own file of this module, once; what it imports of the system is the door's."""
        place = Path(self.__path__[0])
        file = next((one for one in (place / "__init__.py", place.with_suffix(".py")) if one.is_file()), None)
        if self._added is None and file is not None:
            below = self.__path__ if file.name == "__init__.py" else None
            spec = importlib.util.spec_from_file_location(self.__name__, file, submodule_search_locations=below)
            if spec is not None and spec.loader is not None:
                self._added = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(self._added)
        return self._added


def _refuse_late_call(name: str, paths: Iterable[str]) -> None:
    imported = [path for one in paths if not isinstance(sys.modules.get(path := f"{name}.{one}"), StandIn | None)]
    if imported:
        raise ConfigError(
            f"stand_in() came too late: {', '.join(sorted(imported))} had been imported, and what was made of it would "
            f"not change. Call it before anything imports {name}."
        )


def _package(path: str, is_made: bool) -> ModuleType:
    """Return a package: the one that is there, or where there is none, or it is not wanted, one without files."""
    if path in sys.modules:
        return sys.modules[path]
    if not is_made:
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                raise
    package = ModuleType(path)
    package.__path__ = []
    sys.modules[path] = package
    parent, _, last = path.rpartition(".")
    if parent:
        setattr(_package(parent, is_made), last, package)
    return package


class NothingElse(MetaPathFinder):
    """Refuse every module of a package that is in none of its folders, with a sentence."""

    def __init__(self, name: str, sentence: str) -> None:
        self.name, self.sentence = name, sentence

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the package below the folder it was given, or raise; say nothing of others."""
        if not fullname.startswith(f"{self.name}."):
            return None
        found = PathFinder.find_spec(fullname, list(path or ()), target)
        if found is None:  # named after the package: `from ... import` passes over an error named after the module
            raise ModuleNotFoundError(f"{fullname}: {self.sentence}", name=self.name)
        return found

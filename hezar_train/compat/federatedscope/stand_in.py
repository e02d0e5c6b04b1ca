"""Let code that imports `federatedscope.core.trainers` and its like find this door there, with no import changed.

`stand_in()`, called once before that code is imported, puts modules of FederatedScope's names into `sys.modules`. Where
FederatedScope itself is installed, only what a trainer is made of is replaced: its workers, runners, data, models,
builders and plug-ins then train with this package's trainer, and what a replaced module has beside is still found in
it. Where it is not installed, the modules below are all there is of it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hezar_train.compat.federatedscope.context import RELEASE
from hezar_train.errors import ConfigError
from hezar_train.runtime import logger

__all__ = ["stand_in"]

REPLACED: dict[str, tuple[str, ...]] = {
    "core.trainers": (
        "BaseTrainer", "Context", "CtxVar", "GeneralMultiModelTrainer", "GeneralTorchTrainer", "Trainer",
    ),
    "core.trainers.base_trainer": ("BaseTrainer",),
    "core.trainers.trainer": ("GeneralTorchTrainer", "Trainer"),
    "core.trainers.torch_trainer": ("GeneralTorchTrainer",),
    "core.trainers.trainer_multi_model": ("GeneralMultiModelTrainer",),
    "core.trainers.context": ("Context", "CtxVar", "MODE", "lifecycle"),
    "core.trainers.enums": ("LIFECYCLE", "MODE", "TRIGGER"),
    "core.trainers.utils": (
        "calculate_batch_epoch_num", "filter_by_specified_keywords", "format_log_hooks", "move_to",
    ),
    "core.auxiliaries.decorators": ("use_diff",),
    "core.auxiliaries.ReIterator": ("ReIterator",),
    "core.optimizer": ("wrap_regularized_optimizer",),
}  # fmt: skip
"""Modules that are a trainer's alone."""

ADDED: dict[str, tuple[str, ...]] = {
    "register": (
        "register_criterion", "register_metric", "register_optimizer", "register_regularizer", "register_scheduler",
        "register_trainer",
    ),
    "core.trainers": ("wrap_DittoTrainer", "wrap_fedprox_trainer"),
    "core.auxiliaries.trainer_builder": ("get_trainer",),
    "core.auxiliaries.optimizer_builder": ("get_optimizer",),
    "core.auxiliaries.scheduler_builder": ("get_scheduler",),
    "core.auxiliaries.criterion_builder": ("get_criterion",),
    "core.auxiliaries.regularizer_builder": ("get_regularizer",),
    "core.auxiliaries.utils": ("merge_param_dict", "param2tensor"),
    "core.auxiliaries.model_builder": ("get_trainable_para_names",),
    "core.auxiliaries.enums": ("LIFECYCLE", "MODE"),
    "core.monitors": ("Monitor",),
    "core.monitors.monitor": ("Monitor",),
    "core.monitors.metric_calculator": ("MetricCalculator",),
    "core.configs.config": ("CN", "global_cfg"),
}  # fmt: skip
"""Names beside a trainer's; where FederatedScope is installed, its own are used."""

REGISTER = "register"
SAME_HERE = {"Trainer": "GeneralTorchTrainer"}
"""FederatedScope's `Trainer(model, data, device, config)` is what GeneralTorchTrainer is made from there; here one."""
FILTERS_NOTHING = r"share_non_trainable_para else[\s\\]+lambda"
"""How releases until 0.3 choose what is exchanged: by a function of a function, which is true of everything."""
LENGTH_OF_TRAINING = r"mode in \['train', 'finetune'\]:[^:]*cfg\.train\.local_update_steps"
"""How releases since 0.2 work out the length of both: by that of training."""
MULTIPLIED_LENGTH = r"local_update_steps \*\s*self\.cfg\.grad\.grad_accum_count"
"""How they do so with accumulated gradients: whether it is counted in batches or in epochs."""


def stand_in(name: str = "federatedscope") -> list[str]:
    """Put the modules in place; return their names."""
    is_installed = _is_installed(name)
    _refuse_imported(name)
    made = dict(REPLACED)
    for module, names in ({} if is_installed else ADDED).items():
        made[module] = (*made.get(module, ()), *names)
    for module, names in made.items():
        _put(f"{name}.{module}", names, _folder_of(f"{name}.{module}") if is_installed else None)
    if is_installed:
        trainers = Path(_folder_of(f"{name}.core.trainers"))
        _follow_release(trainers)
        _tell_unknown_hooks(trainers / "torch_trainer.py")
        _listen(importlib.import_module(f"{name}.{REGISTER}"))
    return [f"{name}.{module}" for module in made]


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return _has_file(sys.modules[name])
    return importlib.util.find_spec(name) is not None


def _refuse_imported(name: str) -> None:
    """Raise if code holds FederatedScope's own trainers already, which nothing can take from it."""
    paths = [f"{name}.{module}" for module in REPLACED]
    if imported := [path for path in paths if path in sys.modules and _has_file(sys.modules[path])]:
        raise ConfigError(
            f"{imported[0]} was imported before stand_in(), so its trainers are in use already. Call stand_in() before "
            f"anything of {name} is imported."
        )


def _has_file(module: ModuleType) -> bool:
    return getattr(module, "__file__", None) is not None


def _follow_release(trainers: Path) -> None:
    """Do as the installed release does where its documents or later ones say otherwise: its own text tells."""
    if text := _text_of(trainers / "trainer.py"):
        RELEASE.has_mode_val = "MODE.VAL" in text
        RELEASE.filters_untrained = re.search(FILTERS_NOTHING, text) is None
    if text := _text_of(trainers / "context.py"):
        RELEASE.finetunes_by_own_length = re.search(LENGTH_OF_TRAINING, text) is None
        RELEASE.multiplies_epochs = re.search(MULTIPLIED_LENGTH, text) is not None


def _tell_unknown_hooks(torch_trainer: Path) -> None:
    """Say which default hooks the installed trainer has and this one has not: nobody will call them."""
    ours = set(dir(_ours("GeneralTorchTrainer")))
    if unknown := sorted(set(re.findall(r"def (_hook_on_\w+)", _text_of(torch_trainer))) - ours):
        logger.warning(
            "default hooks of %s that this trainer has not, and does not call: %s. Define them in a class of your own, "
            "and register them there.", torch_trainer, ", ".join(unknown)
        )  # fmt: skip


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _listen(theirs: Any) -> None:
    """Let trainers that are registered with FederatedScope be known by name here, too."""
    register_with_them, register_with_us = theirs.register_trainer, _ours("register_trainer")
    if getattr(register_with_them, "is_heard", False):
        return

    def register_trainer(key: str, module: Any) -> None:
        register_with_them(key, module)
        register_with_us(key, module)

    register_trainer.is_heard = True  # type: ignore[attr-defined]
    theirs.register_trainer = register_trainer


def _put(path: str, names: tuple[str, ...], folder: str | None) -> None:
    """Make a module, and packages above it where there are none."""
    parent, _, last = path.rpartition(".")
    if parent and parent not in sys.modules:
        if folder is not None:
            importlib.import_module(parent)
        else:
            _put(parent, (), None)
    ours = {one: _ours(SAME_HERE.get(one, one)) for one in names}
    sys.modules[path] = _Replaced(path, ours, Path(folder)) if folder is not None else _Made(path, ours)
    if parent:
        setattr(sys.modules[parent], last, sys.modules[path])


class _Made(ModuleType):
    """A module of ours where no FederatedScope is."""

    def __init__(self, path: str, ours: Mapping[str, Any]) -> None:
        super().__init__(path, __doc__)
        vars(self).update(ours, __path__=[])


class _Replaced(ModuleType):
    """A module of ours in the place of one of FederatedScope's; what is not ours is found in the one it stands in for.

    First asked for anything, it imports what that one imports: modules of FederatedScope import one another in circles
    that hold only in this order.
    """

    def __init__(self, path: str, ours: Mapping[str, Any], folder: Path) -> None:
        super().__init__(path, __doc__)
        self._ours: Mapping[str, Any] | None = {**ours, "__path__": [str(folder)]}
        self._file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        self._original: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._ours is not None and (name == "__path__" or not name.startswith("__")):
            ours, self._ours = self._ours, None
            vars(self).update(ours)
            _import_what_it_imports(self._file, self.__name__.partition(".")[0])
            return getattr(self, name)
        if name.startswith("__") or not self._file.is_file():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self._run(), name)

    def _run(self) -> ModuleType:
        """Run the original, once, under a name of its own."""
        if self._original is None:
            spec = importlib.util.spec_from_file_location(f"{self.__name__}_of_federatedscope", self._file)
            assert spec is not None
            assert spec.loader is not None
            self._original = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self._original)
        return self._original


def _import_what_it_imports(file: Path, name: str) -> None:
    """Import, in the order of a file's own text, what it imports of FederatedScope, which may miss a package."""
    for one in _top_level(ast.parse(_text_of(file)).body):
        for module, names in _modules_of(one):
            if module.partition(".")[0] == name:
                with suppress(ImportError):  # whoever needs it is told
                    __import__(module, fromlist=names)


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, also those that are tried."""
    for one in body:
        yield from _top_level(one.body) if isinstance(one, ast.Try) else (one,)


def _modules_of(statement: ast.stmt) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a statement imports, each with what is taken from it."""
    if isinstance(statement, ast.Import):
        yield from ((one.name, ["*"]) for one in statement.names)
    elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        yield statement.module, [one.name for one in statement.names]


def _folder_of(path: str) -> str:
    """Return where a package of the installed FederatedScope lies, from which its other modules are imported."""
    root = importlib.util.find_spec(path.split(".", maxsplit=1)[0])
    assert root is not None
    assert root.origin is not None
    return str(Path(root.origin).parent.joinpath(*path.split(".")[1:]))


def _ours(name: str) -> Any:
    return getattr(importlib.import_module("hezar_train.compat.federatedscope"), name)

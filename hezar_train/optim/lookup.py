"""Find a class or function by its name or dotted path and check the keywords it is called with, before it is called.

Owns the sentences for names that are not known, for paths that do not import and for keywords that are unknown or
missing; which names there are, others say.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hezar_train.errors import ConfigError, a_kind, choices, suggestion

__all__ = ["Keywords", "find_factory", "import_dotted", "is_dotted", "keywords_of"]


ALIASES = {
    "nn": "torch.nn", "F": "torch.nn.functional", "optim": "torch.optim", "lr_scheduler": "torch.optim.lr_scheduler",
}  # fmt: skip
"""Short names that programs import modules under, which a path cannot begin with."""


def is_dotted(name: str) -> bool:
    """Tell whether a name reads package.module.Name."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def import_dotted(path: str, *, setting: str) -> Any:
    """Import what a dotted path names; `setting` says in an error where the path stood."""
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        first, _, rest = path.partition(".")
        remedy = "correct the path, or install the package."
        if first in ALIASES:
            remedy = f"write the whole path, '{ALIASES[first]}.{rest}'."
        elif error.name == first and (Path(f"{first}.py").is_file() or Path(first).is_dir()):
            remedy = (
                f"{first} is in this folder, where Python does not look; set PYTHONPATH=. to let it, or install it."
            )
        raise ConfigError(
            f"{setting}={path!r}: the module {module_name!r} cannot be imported ({error}). "
            f"Expected package.module.Name: {remedy}"
        ) from error
    if not hasattr(module, attribute):
        hint = suggestion(attribute, [name for name in vars(module) if not name.startswith("_")])
        raise ConfigError(
            f"{setting}={path!r}: the module {module_name!r} has no {attribute!r}.{hint} Expected package.module.Name: "
            "correct the path."
        )
    return getattr(module, attribute)


def find_factory(
    name: str,
    factories: Mapping[str, Callable[..., Any]],
    *,
    setting: str,
    known: Sequence[str],
    kind: str,
    example: str,
) -> Callable[..., Any]:
    """Return the class or function that a name, in any case, or a dotted path stands for.

    An error says which names are `known`, which `kind` was expected ("an optimizer") and how one might be called.
    """
    found: Any = factories.get(name.lower())
    if found is None and is_dotted(name):
        found = import_dotted(name, setting=setting)
    if found is None:
        raise ConfigError(
            f"{setting}={name!r} is not known. Known: {choices(known)}; or a dotted path such as "
            f"'my_package.my_module.{example}'.{suggestion(name, known)}"
        )
    if not callable(found):
        raise ConfigError(
            f"{setting}={name!r} is {a_kind(found)}, which cannot be called. Expected {kind}: its name, or the dotted "
            "path of its class."
        )
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Keywords:
    """The keywords that a class or function takes after its first argument."""

    accepted: frozenset[str]
    required: frozenset[str]
    takes_any: bool
    """Whether it also takes keywords that it does not name."""

    def takes(self, keyword: str) -> bool:
        """Tell whether the keyword may be passed."""
        return self.takes_any or keyword in self.accepted

    def check(self, given: Mapping[str, Any], *, owner: str) -> None:
        """Raise one error with every unknown and every missing keyword."""
        problems = list(self._problems(given, owner))
        if problems:
            raise ConfigError(problems)

    def _problems(self, given: Mapping[str, Any], owner: str) -> Iterator[str]:
        for keyword in given:
            if not self.takes(keyword):
                hint = suggestion(keyword, self.accepted)
                yield f"{owner} does not take {keyword!r}. It takes: {choices(self.accepted)}.{hint}"
        missing = self.required - given.keys()
        if missing:
            field = f"{owner.partition('=')[0]}_kwargs"
            yield f"{owner} needs {choices(missing)}: add it to the keyword arguments ({field})."


def keywords_of(factory: Callable[..., Any], *, withheld: Collection[str] = ()) -> Keywords:
    """Read the keywords off a signature; the `withheld` ones are ours to fill in, not the user's."""
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in withheld]
    return Keywords(
        accepted=frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )

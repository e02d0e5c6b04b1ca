"""What a config names besides plain settings: code to import or download, places to read from, services to tell.

A config that a user writes may name code (`optimizer: my_package.MyOptimizer`, `metrics: ["evaluate:./score.py"]`),
places (a dataset's folder, an address, `init_weights_from`) and services (`trackers: [wandb]`). One that came with a
run's folder, a checkpoint or a repository was perhaps written by somebody else: who reads such a file asks here what it
names, and refuses what nobody on this machine chose.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hezar_train.config.names import OWN_TRACKERS, is_dotted_path
from hezar_train.errors import ConfigError

__all__ = ["named_code", "named_places", "outside_settings", "refuse_foreign_code", "texts_in"]

CODE_FIELDS = (
    "optimizer", "lr_scheduler", "momentum_scheduler", "criterion", "regularizer", "finetune_optimizer",
    "finetune_lr_scheduler", "metrics",
)  # fmt: skip
SCRIPT_PREFIX = "evaluate:"  # a metric that is a script, on the Hub or in a file
REMOTE_CODE_KEYS = frozenset({"trust_remote_code", "custom_generate", "auto_map"})
HARMLESS = re.compile(r"(torch\.optim|torch\.optim\.lr_scheduler|torch\.nn|hezar_train\.(optim|metrics))\.[A-Z]\w*")
"""Classes where they are defined; deeper paths and functions reach everything that a module has imported."""
OUTSIDE_FIELDS: Mapping[str, Collection[Any]] = {
    "init_weights_from": (None,),
    "resume_from_checkpoint": (None, True, False, "last", "best"),
    "trackers": (None, *OWN_TRACKERS),
}
"""Fields by which a config leads out of its run, with the values that do not. Folders of logs and checkpoints and the
Hub have rules of their own (`run_layout.refuse_dirs_outside`, `recipes.trust`)."""
MARKS_OF_A_PLACE = re.compile(r"[/\\:~]|^\.\.?$")


def named_code(config: Mapping[str, Any]) -> set[str]:
    """Return all by which a config names code to import or download, but for the classes of torch and this package."""
    settings = {name: value for name, value in config.items() if name in CODE_FIELDS or str(name).endswith("_kwargs")}
    return set(_named(settings))


def refuse_foreign_code(config: Mapping[str, Any], source: str, accepted: Collection[str] = ()) -> None:
    """Raise if a config from elsewhere names code that nobody here has asked for."""
    if foreign := sorted(named_code(config) - set(accepted)):
        raise ConfigError(
            f"{source} names code, {', '.join(map(repr, foreign))}, which would be imported and run. That is refused: "
            "read it, and if you trust it, name it in a config of your own."
        )


def named_places(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a recipe that name a file, an address or a repository: each such text, with its option.

    A text is one if it is written like one (a slash, a colon, a tilde) or if something of that name is there.
    """
    return {text: name for name, value in options.items() for text in texts_in(value) if _is_place(text)}


def outside_settings(config: Mapping[str, Any]) -> set[str]:
    """Return the settings by which a config leads out of its run, each as it would be typed: `trackers=[wandb]`."""
    return {
        f"{name}=[{one}]" if isinstance(value, list | tuple) else f"{name}={one}"
        for name, harmless in OUTSIDE_FIELDS.items()
        for value in [config.get(name)]
        for one in (value if isinstance(value, list | tuple) else [value])
        if one not in harmless
    }


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a value, also from inside of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def _is_place(text: str) -> bool:
    try:
        return bool(MARKS_OF_A_PLACE.search(text)) or os.path.lexists(text)
    except ValueError:  # a zero byte
        return True


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.startswith(SCRIPT_PREFIX) or (is_dotted_path(value) and not HARMLESS.fullmatch(value)):
            yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in REMOTE_CODE_KEYS and item:
                yield f"{key}={item!r}"
            yield from _named(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(item)

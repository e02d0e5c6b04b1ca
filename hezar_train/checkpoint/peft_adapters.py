"""Adapters of peft in a model: which tensors are theirs, how peft calls them in a file, and the model with them merged.

The only module that knows peft, which is looked up and never imported: a model with adapters has imported it. It asks
peft itself for the tensors of an adapter (`get_peft_model_state_dict`), so that every kind of adapter is saved as peft
does it, and leaves out what peft would do beside that: asking the Hub whether the base model's vocabulary has grown.

Nothing here reads an `adapter_config.json`. Peft's own loaders import a library that this file names, and read a pickle
where there is no safetensors file; what this package loads are tensors, by name.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hezar_train.checkpoint.modules import clean_name, unwrap
from hezar_train.config.files import write_atomically
from hezar_train.errors import ConfigError
from hezar_train.run_layout import ADAPTER_CONFIG_FILE

__all__ = [
    "AdapterTensors",
    "adapted_modules",
    "adapter_tensors",
    "base_of",
    "has_adapters",
    "is_quantized",
    "merged_copy",
    "named_base",
    "refuse_shared_prompts",
    "write_adapter_configs",
]

DEFAULT_ADAPTER = "default"
"""Whose files peft keeps in the folder itself; those of others lie in a folder of their name."""
WRAPPED, TUNED = "base_model.model.", "base_model."
"""What peft puts before the names of a model's tensors, in every file."""
PROMPT_ENCODERS = "prompt_encoder"
QUANTIZED_KINDS = frozenset({"Params4bit", "Int8Params"})


@dataclass(frozen=True)
class AdapterTensors:
    """One adapter: where its files go, and its tensors."""

    prefix: str
    """Of the names of the module that has the adapter, empty for the model itself."""
    name_prefix: str
    """What peft's names of that module's tensors begin with, where the module's own do not."""
    folder: str
    names: dict[str, str]
    """The model's names of tensors by peft's."""
    computed: dict[str, Tensor]
    """Tensors by peft's names that are no part of the model's state: what a prompt encoder gives."""
    sources: list[str]
    """The model's names of the tensors that those are computed from."""


def has_adapters(model: nn.Module) -> bool:
    """Tell whether a model, or a part of it, has adapters of peft."""
    return bool(adapted_modules(model))


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules with adapters by their names, the outermost ones; the model itself is called ""."""
    if (peft := sys.modules.get("peft")) is None:
        return {}
    found: dict[str, Any] = {}
    for name, module in unwrap(model).named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if not is_inside and (isinstance(module, peft.PeftModel) or _is_injected(module, peft)):
            found[name] = module
    return found


def _is_injected(module: nn.Module, peft: Any) -> bool:
    """Tell whether adapters were put into a module without a wrapper, as transformers' `add_adapter` does."""
    configs = vars(module).get("peft_config")
    return isinstance(configs, dict) and any(isinstance(one, peft.PeftConfig) for one in configs.values())


def base_of(model: nn.Module) -> nn.Module:
    """Return the model that adapters were added to; a model without adapters is its own."""
    bare = unwrap(model)
    outer = adapted_modules(bare).get("")
    get_base: Any = getattr(outer, "get_base_model", None)
    return get_base() if callable(get_base) else bare


def adapter_tensors(model: nn.Module) -> list[AdapterTensors]:
    """Return every adapter of a model, also those that are not active."""
    return [
        _tensors_of(prefix, module, adapter)
        for prefix, module in adapted_modules(model).items()
        for adapter in module.peft_config
    ]


def _tensors_of(prefix: str, module: Any, adapter: str) -> AdapterTensors:
    from peft import get_peft_model_state_dict

    # Called on the class: peft's and transformers' models may leave parts out.
    state = dict(nn.Module.state_dict(module))
    names = {id(tensor): name for name, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that would have to be saved too: what is trained is saved
        found = get_peft_model_state_dict(module, state, adapter, save_embedding_layers=False)
    before = _name_prefix(module)
    start = f"{prefix}." if prefix else ""
    own = {before + key: clean_name(start + names[id(one)]) for key, one in found.items() if id(one) in names}
    computed = {before + key: tensor.detach() for key, tensor in found.items() if id(tensor) not in names}
    sources = [clean_name(start + name) for name in state if name.startswith(f"{PROMPT_ENCODERS}.{adapter}.")]
    return AdapterTensors(prefix, before, _folder(prefix, adapter), own, computed, sources if computed else [])


def _name_prefix(module: Any) -> str:
    if hasattr(module, "get_base_model"):
        return ""
    return TUNED if hasattr(module, "inject_adapter") else WRAPPED


def _folder(prefix: str, adapter: str) -> str:
    parts = [*prefix.split("."), *([] if adapter == DEFAULT_ADAPTER else [adapter])]
    return "/".join(part for part in parts if part)


def write_adapter_configs(model: nn.Module, folder: Path) -> None:
    """Write what peft needs to know of each adapter, where it looks for it below a folder."""
    for prefix, module in adapted_modules(model).items():
        for adapter, config in module.peft_config.items():
            below = folder / _folder(prefix, adapter)
            below.mkdir(parents=True, exist_ok=True)
            content = json.dumps(_plain(_shown_config(module, config)), indent=2, sort_keys=True)
            write_atomically(below / ADAPTER_CONFIG_FILE, f"{content}\n")


def _shown_config(module: Any, config: Any) -> dict[str, Any]:
    """Return the settings of an adapter for a file: who loads it wants to use it, and needs to know on which base."""
    base = base_of(module)
    shown: dict[str, Any] = {**config.to_dict(), "inference_mode": True}
    if shown.get("base_model_name_or_path") is None:
        shown["base_model_name_or_path"] = named_base(module)[0]
    if shown.get("task_type") is None:
        shown["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    return shown


def _plain(value: Any) -> Any:
    """Return settings as JSON has them; sets in an order that is the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def named_base(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the name or path of a base model and its revision, where adapters or the model's config tell them."""
    configs = [config for module in adapted_modules(model).values() for config in module.peft_config.values()]
    told = [(one.base_model_name_or_path, one.revision) for one in configs if one.base_model_name_or_path]
    config = getattr(base_of(model), "config", None)
    told.append((getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None)))
    name, revision = next(((name, revision) for name, revision in told if name), (None, None))
    return (str(name) if name else None), (str(revision) if name and revision else None)


def refuse_shared_prompts(model: nn.Module) -> None:
    """Raise if a model whose parameters are shared out has adapters that are computed from them for every file."""
    configs = [config for module in adapted_modules(model).values() for config in module.peft_config.values()]
    if prompts := sorted({_kind(one) for one in configs if one.is_prompt_learning}):
        raise ConfigError(
            f"sharding='full' cannot be used with {', '.join(prompts)}: its file is computed from whole parameters, "
            "and each process has a share. Use sharding='none'."
        )


def is_quantized(model: nn.Module) -> bool:
    """Tell whether weights of a model are kept in a few bits each, so that nothing can be added to them exactly."""
    return any(type(parameter).__name__ in QUANTIZED_KINDS for parameter in unwrap(model).parameters())


def merged_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with its active adapters added into its weights; the model stays as it is."""
    bare = unwrap(model)
    if is_quantized(bare):
        raise ConfigError(
            "the adapters cannot be merged into a quantized base model: its few bits cannot hold the sum. Export "
            "without merging, load the base model in full precision, and merge there: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()."
        )
    copied = copy.deepcopy(bare)
    for name, module in adapted_modules(copied).items():
        merged = _merged(module)
        if not name:
            return merged
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, merged)
    return copied


def _merged(module: Any) -> nn.Module:
    kinds = ", ".join(sorted({_kind(config) for config in module.peft_config.values()}))
    try:
        merged: nn.Module = module.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            f"adapters of the kind {kinds} cannot be merged into the weights of {type(base_of(module)).__name__}: "
            f"{error}. Export without merging; PeftModel.from_pretrained(base, folder) loads that."
        ) from error
    return merged


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))

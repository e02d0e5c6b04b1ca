"""FederatedScope's nested config: `cfg.train.optimizer.lr`, and what it becomes here.

`CN` is a dict whose keys are attributes, nested; `default_cfg()` makes the part of FederatedScope's tree that a trainer
and its plug-ins read. A config of FederatedScope itself (or of yacs) is used as it is, with keys added that came after
its version; a plain nested dict is merged into the defaults. `trainer_config` maps the keys that decide a training to a
`TrainerConfig`; what only a server reads is left alone, and `unknown_keys` lists what neither of both knows: such keys
are for the user's own hooks.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from hezar_train.config import TrainerConfig
from hezar_train.data import step_seed
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.types import TaskType

__all__ = [
    "CN",
    "STANDS_FOR_DATA",
    "as_cfg",
    "default_cfg",
    "global_cfg",
    "refuse_unkept",
    "trainer_config",
    "unknown_keys",
]

OWN_SECTION = "hezar_train"
"""The section of a cfg whose keys are fields of `TrainerConfig`: cfg.hezar_train.save_steps."""

OPEN_SECTIONS = frozenset(
    {"train.optimizer", "train.scheduler", "finetune.optimizer", "finetune.scheduler", OWN_SECTION}
)
"""Sections to which a user may add keys: arguments of an optimizer, of a schedule, fields of ours."""

OF_THE_SERVER = frozenset(
    {
        "aggregator", "asyn", "attack", "cfg_file", "check_completeness", "compression", "data", "distribute",
        "early_stop", "expname_tag", "feat_engr", "fedopt", "fedsageplus", "fedswa", "flitplus", "gcflplus", "hpo",
        "model", "nbafl", "print_decimal_digits", "sgdmf", "use_gpu", "verbose", "vertical", "wandb",
    }
)  # fmt: skip
"""Sections that FederatedScope documents and that no trainer reads by itself; a plug-in may."""

OF_LANGUAGE_MODELS = frozenset({"train.is_enable_half"})
"""Keys that only FederatedScope's releases for language models have, and that are kept."""

STANDS_FOR_DATA = "stands_for_data"
"""The key of a section `dataloader` that was added to a config of version 0.1, which has its keys in `data`."""

NOT_OF_AN_OPTIMIZER = ("__help_info__", "__cfg_check_funcs__", "is_ready_for_run")


class CN(dict[str, Any]):
    """A dict whose keys are attributes too; frozen, it refuses assignments."""

    def __init__(self, init_dict: Mapping[str, Any] | None = None, new_allowed: bool = True) -> None:
        super().__init__()
        object.__setattr__(self, "_is_frozen", False)
        object.__setattr__(self, "_new_allowed", new_allowed)
        for key, value in (init_dict or {}).items():
            dict.__setitem__(self, key, _as_node(value))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the config has no {name!r}.{suggestion(name, self)} It has: {choices(self)}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the config has no {name!r}")
        del self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        if self.is_frozen():
            raise AttributeError(f"cfg.{key} was assigned, but the config is frozen: call cfg.defrost() first")
        super().__setitem__(key, _as_node(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> CN:
        made = CN({key: copy.deepcopy(value, memo) for key, value in self.items()})
        if self.is_frozen():
            made.freeze()
        return made

    def clone(self) -> CN:
        """Return a copy, with copies of all sections."""
        return copy.deepcopy(self)

    def freeze(self, *_: Any, **__: Any) -> None:
        """Refuse assignments from now on; nothing is written or printed."""
        self._set_frozen(True)

    def defrost(self) -> None:
        """Take assignments again."""
        self._set_frozen(False)

    def is_frozen(self) -> bool:
        """Tell whether assignments are refused."""
        return bool(object.__getattribute__(self, "_is_frozen"))

    def merge_from_other_cfg(self, other: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Take over another config's values; keys that are new are added."""
        for key, value in other.items():
            if isinstance(value, Mapping) and isinstance(self.get(key), CN):
                self[key].merge_from_other_cfg(value)
            else:
                self[key] = value

    def merge_from_file(self, cfg_filename: str | os.PathLike[str], *_: Any, **__: Any) -> None:
        """Take over the values of a YAML file."""
        read = yaml.safe_load(Path(cfg_filename).read_text(encoding="utf-8"))
        if not isinstance(read, Mapping):
            raise ConfigError(f"{cfg_filename} holds a {type(read).__name__}; expected sections with keys")
        self.merge_from_other_cfg(read)

    def merge_from_list(self, cfg_list: Sequence[Any], *_: Any, **__: Any) -> None:
        """Take over values given as `["train.optimizer.lr", 0.1, ...]`."""
        if len(cfg_list) % 2:
            raise ConfigError(f"merge_from_list got {len(cfg_list)} items; expected a key before each value")
        for key, value in zip(cfg_list[::2], cfg_list[1::2], strict=True):
            *sections, last = str(key).split(".")
            node = self
            for section in sections:
                node = node.setdefault(section, CN())
            node[last] = yaml.safe_load(value) if isinstance(value, str) and value else value

    def _set_frozen(self, is_frozen: bool) -> None:
        object.__setattr__(self, "_is_frozen", is_frozen)
        for value in self.values():
            if isinstance(value, CN):
                value._set_frozen(is_frozen)


def _as_node(value: Any) -> Any:
    return CN(value) if type(value) is dict else value


def default_cfg() -> CN:
    """Return the keys that a trainer and its plug-ins read, with FederatedScope's defaults."""
    routine = {"local_update_steps": 1, "optimizer": {"type": "SGD", "lr": 0.1}}
    schedule = {"scheduler": {"type": "", "warmup_ratio": 0.0}}
    return CN(
        {
            "backend": "torch",
            "seed": 0,
            "device": -1,
            "outdir": "exp",
            "expname": "",
            "trainer": {"type": "general", "sam": {"adaptive": False, "rho": 1.0, "eta": 0.0}},
            "train": {**routine, **schedule, "batch_or_epoch": "batch", "data_para_dids": []},
            "finetune": {
                **routine, **schedule, "batch_or_epoch": "epoch", "before_eval": False, "freeze_param": "",
                "simple_tuning": False, "epoch_linear": 10, "lr_linear": 0.005, "weight_decay": 0.0, "local_param": [],
            },
            "grad": {"grad_clip": -1.0, "grad_accum_count": 1},
            "criterion": {"type": "MSELoss"},
            "regularizer": {"type": "", "mu": 0.0},
            "dataloader": {
                "type": "base", "batch_size": 64, "shuffle": True, "num_workers": 0, "drop_last": False,
                "pin_memory": False,
            },
            "data": {"type": "toy"},
            "model": {"type": "lr", "task": "node", "model_num_per_trainer": 1},
            "federate": {
                "mode": "standalone", "method": "FedAvg", "share_local_model": False, "use_diff": False,
                "process_num": 1, "restore_from": "", "save_to": "", "total_round_num": 50, "client_num": 0,
            },
            "personalization": {
                "local_param": [], "share_non_trainable_para": False, "local_update_steps": -1, "regular_weight": 0.1,
                "lr": 0.0, "K": 5, "beta": 1.0, "lr_feature": 0.1, "lr_linear": 0.1, "epoch_feature": 1,
                "epoch_linear": 2, "weight_decay": 0.0,
            },
            "fedprox": {"use": False, "mu": 0.0},
            "nbafl": {"use": False},
            "sgdmf": {"use": False},
            "attack": {"attack_method": ""},
            "eval": {
                "freq": 1, "metrics": [], "split": ["test", "val"],
                "report": ["weighted_avg", "avg", "fairness", "raw"], "best_res_update_round_wise_key": "val_loss",
                "monitoring": [], "count_flops": False, "base": 0.0,
            },
            "wandb": {"use": False},
        }
    )  # fmt: skip


global_cfg = default_cfg()
"""The defaults, for scripts that begin with `cfg = global_cfg.clone()`."""


def as_cfg(config: Any) -> Any:
    """Return a config that hooks may read by attributes: the one given, or a plain one merged into the defaults."""
    if isinstance(config, TrainerConfig):
        return _of_trainer_config(config)
    if isinstance(config, Mapping) and (type(config) is dict or isinstance(config, CN)):
        return _completed(config)
    if hasattr(config, "train") and hasattr(config, "federate"):
        return _completed_in_place(config)
    raise ConfigError(
        f"config is a {type(config).__name__}; expected FederatedScope's nested config: a CN, a nested dict such as "
        "{'train': {'local_update_steps': 5}}, or a TrainerConfig"
    )


def _completed(config: Mapping[str, Any]) -> CN:
    """Add the defaults that a config lacks; a `CN` stays the object it is."""
    node = config if isinstance(config, CN) else CN(config)
    was_frozen = node.is_frozen()
    node.defrost()
    _add_missing(node, default_cfg())
    if "batch_size" in node.data and "batch_size" not in config.get("dataloader", {}):  # its name before version 0.2
        node.dataloader.batch_size = node.data.batch_size
    if was_frozen:
        node.freeze()
    return node


def _add_missing(node: CN, defaults: CN) -> None:
    for key, value in defaults.items():
        if key not in node:
            node[key] = value
        elif isinstance(value, CN) and isinstance(node[key], CN):
            _add_missing(node[key], value)


def _completed_in_place(config: Any) -> Any:
    """Add keys of later versions to a config of FederatedScope itself, which stays the object it is."""
    if not isinstance(config, dict):
        return config
    if "dataloader" not in config:  # version 0.1
        names = ("batch_size", "shuffle", "drop_last", "num_workers")
        given = {name: config["data"][name] for name in names if name in config["data"]}
        dict.__setitem__(config, "dataloader", type(config)({**given, STANDS_FOR_DATA: True}))
    _add_later(config, default_cfg())
    return config


def _add_later(node: dict[str, Any], defaults: CN, path: str = "") -> None:
    """Add keys that a node lacks, in nodes of its own class, past what guards it against assignments.

    Not to sections that are the arguments of a builder: an earlier release's does not know them.
    """
    for key, value in defaults.items():
        if key not in node:
            dict.__setitem__(node, key, _plain_as(type(node), value))
        elif isinstance(value, CN) and isinstance(node[key], dict) and f"{path}{key}" not in OPEN_SECTIONS:
            _add_later(node[key], value, f"{path}{key}.")


def _plain_as(kind: type, value: Any) -> Any:
    if not isinstance(value, CN):
        return value
    made = kind()
    for key, one in value.items():
        dict.__setitem__(made, key, _plain_as(kind, one))
    return made


def _of_trainer_config(config: TrainerConfig) -> CN:
    """Show a `TrainerConfig` under FederatedScope's keys."""
    cfg = default_cfg()
    in_rounds = config.local_update_steps is not None
    cfg.seed, cfg.outdir = config.seed, str(config.output_dir)
    cfg.train.local_update_steps = config.local_update_steps if in_rounds else config.num_epochs
    cfg.train.batch_or_epoch = config.batch_or_epoch if in_rounds else "epoch"
    cfg.train.optimizer = {
        "type": _torch_name(config.optimizer_name if config.optimizer is not None else "adam"),
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        **({} if config.momentum is None else {"momentum": config.momentum}),
        **(config.optimizer_kwargs or {}),
    }
    cfg.finetune.before_eval, cfg.finetune.local_update_steps = config.finetune_before_eval, config.finetune_steps
    cfg.finetune.batch_or_epoch, cfg.finetune.optimizer = config.finetune_batch_or_epoch, cfg.train.optimizer.clone()
    cfg.grad.grad_clip = -1.0 if config.max_grad_norm is None else config.max_grad_norm
    cfg.grad.grad_accum_count = config.gradient_accumulation_steps
    cfg.criterion.type = config.criterion or "CrossEntropyLoss"
    cfg.dataloader.batch_size, cfg.dataloader.shuffle = config.batch_size, config.dataloader_shuffle
    cfg.dataloader.drop_last, cfg.dataloader.num_workers = config.drop_last, config.num_dataloader_workers
    cfg.federate.use_diff, cfg.federate.share_local_model = config.use_diff, not config.offload_after_routine
    cfg.personalization.local_param = list(config.local_param or [])
    cfg.personalization.share_non_trainable_para = config.share_non_trainable_para
    cfg.regularizer.type, cfg.regularizer.mu = config.regularizer or "", config.regularizer_mu
    _refuse_warmup(config.warmup_steps)
    if config.lr_scheduler is not None:
        raise ConfigError(
            "lr_scheduler is ours: behind FederatedScope's door a schedule is cfg.train.scheduler = {'type': 'StepLR', "
            "'step_size': 10}. For TrainerConfig's schedules use hezar_train.compat.federatedscope.Trainer."
        )
    names = ("save_enabled", "save_steps", "save_freq", "save_total_limit", "resume_from_checkpoint", "output_dir",
             "log_steps", "device", "use_cpu", "num_threads", "deterministic", "accept_changes")  # fmt: skip
    cfg[OWN_SECTION] = {name: getattr(config, name) for name in names}
    return cfg


def _torch_name(optimizer: str) -> str:
    """Return an optimizer's name as `torch.optim` spells it."""
    spelled = {name.lower(): name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    if optimizer.lower() not in spelled:
        raise ConfigError(f"optimizer={optimizer!r} is not in torch.optim, from which FederatedScope takes optimizers")
    return spelled[optimizer.lower()]


def unknown_keys(cfg: Any) -> list[str]:
    """List the keys, as "section.key", that are neither a trainer's nor a server's."""
    return sorted(set(_unknown(cfg, default_cfg(), "")) - OF_LANGUAGE_MODELS)


def _unknown(node: Any, known: CN, prefix: str) -> Iterator[str]:
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        name = f"{prefix}{key}"
        if key in {*NOT_OF_AN_OPTIMIZER, STANDS_FOR_DATA} or (
            not prefix and (key in OF_THE_SERVER or key == OWN_SECTION)
        ):
            continue
        if key in known:
            if isinstance(known[key], CN) and name not in OPEN_SECTIONS and key != "federate":
                yield from _unknown(value, known[key], f"{name}.")
        elif name not in OPEN_SECTIONS:
            yield name


def trainer_config(cfg: Any, *, device: Any, output_dir: Path, accumulates: bool, number: int = 1) -> TrainerConfig:
    """Return the fields of a `TrainerConfig` that the keys of a cfg stand for; raise for what cannot be kept.

    `number` tells trainers of one outdir apart: workers draw noise, masks and orders of their own. One with a folder of
    its own choice has the seed as it is.
    """
    refuse_unkept(cfg)
    batch_size, accumulation = int(cfg.dataloader.batch_size), int(cfg.grad.grad_accum_count) if accumulates else 1
    frozen = cfg.finetune.freeze_param
    own = {key: value for key, value in _own_section(cfg).items() if value is not None}
    fields: dict[str, Any] = {
        "output_dir": output_dir,
        "task": TaskType.REGRESSION if "regression" in str(cfg.model.task).lower() else None,
        "seed": int(cfg.seed) if number == 1 or "output_dir" in own else step_seed(int(cfg.seed), number, rank=0),
        "device": _device_name(device),
        "batch_size": batch_size,
        "global_batch_size": batch_size * accumulation,  # of all processes: several of them do what one does
        "loss_weight": "samples",  # batches count by their samples, whatever the model is called
        "dataloader_shuffle": bool(cfg.dataloader.shuffle),
        "drop_last": bool(cfg.dataloader.drop_last),
        "num_dataloader_workers": int(cfg.dataloader.num_workers),
        "learning_rate": float(cfg.train.optimizer.lr),
        "local_update_steps": int(cfg.train.local_update_steps) * accumulation,
        "batch_or_epoch": cfg.train.batch_or_epoch,
        "lr_scheduling_steps": accumulation,  # after every update
        "fresh_optimizer": True,
        "local_param": list(cfg.personalization.local_param) or None,
        "share_non_trainable_para": bool(cfg.personalization.share_non_trainable_para),
        "offload_after_routine": not cfg.federate.share_local_model,
        "finetune_steps": int(cfg.finetune.local_update_steps),
        "finetune_batch_or_epoch": cfg.finetune.batch_or_epoch,
        "finetune_learning_rate": float(cfg.finetune.optimizer.lr),
        "finetune_freeze_param": ([frozen] if isinstance(frozen, str) else list(frozen)) if frozen else None,
        "do_evaluate": False,  # a worker is asked to
        "save_enabled": False,
    }
    if cfg.train.batch_or_epoch == "epoch":
        fields["local_update_steps"] = int(cfg.train.local_update_steps)
    _refuse_warmup(own.get("warmup_steps"))
    if any(key.startswith("save_") or key == "resume_from_checkpoint" for key in own):
        fields["save_enabled"] = True
    return TrainerConfig(**{**fields, **own})


def _refuse_warmup(warmup_steps: Any) -> None:
    if warmup_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps!r} is ours: behind FederatedScope's door a warm-up is a part of "
            "cfg.train.scheduler = {'type': 'warmup_step', 'warmup_steps': 10, 'total_steps': 100}. For "
            "TrainerConfig's use hezar_train.compat.federatedscope.Trainer."
        )


def _own_section(cfg: Any) -> Mapping[str, Any]:
    own = cfg.get(OWN_SECTION, {}) if isinstance(cfg, Mapping) else getattr(cfg, OWN_SECTION, {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"cfg.{OWN_SECTION} is a {type(own).__name__}; expected fields of TrainerConfig by name")
    return own


def _device_name(device: Any) -> str | None:
    return None if device is None else str(device)


def refuse_unkept(cfg: Any) -> None:
    """Raise, with all problems at once, for keys that ask for what a trainer here does not do."""
    if problems := list(_problems(cfg)):
        raise ConfigError("FederatedScope's config cannot be kept here:\n" + "\n".join(f"  {one}" for one in problems))


def _problems(cfg: Any) -> Iterable[str]:
    if cfg.backend != "torch":
        yield f"backend={cfg.backend!r}: expected 'torch'. Others train with FederatedScope's own trainer"
    if len(cfg.train.get("data_para_dids", ())):
        yield "train.data_para_dids: torch.nn.DataParallel is not used. Start a process for each device instead"
    if cfg.federate.process_num > 1:
        yield f"federate.process_num={cfg.federate.process_num}: workers in processes are the runner's. Set it to 1"
    if cfg.dataloader.batch_size < 1:
        yield f"dataloader.batch_size={cfg.dataloader.batch_size}: expected at least 1"
    for name in ("train", "finetune"):
        if cfg[name].batch_or_epoch not in {"batch", "epoch"}:
            yield f"{name}.batch_or_epoch={cfg[name].batch_or_epoch!r}: expected 'batch' or 'epoch'"
    if cfg.train.local_update_steps < 1:
        yield f"train.local_update_steps={cfg.train.local_update_steps}: expected at least 1"

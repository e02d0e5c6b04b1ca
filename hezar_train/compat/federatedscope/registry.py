"""Trainers by name and their plug-ins, as FederatedScope's `get_trainer(model, data, device, config, ...)` builds them.

`register_trainer(key, call)` takes FederatedScope's kind of function, `call(trainer_type)`, which returns a class or
None, or a class. Plug-ins that a config asks for are added in FederatedScope's order; those that are not ours are found
among those of `register_plugin`.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hezar_train import federated
from hezar_train.compat.federatedscope.builders import builder_for
from hezar_train.compat.federatedscope.config import as_cfg
from hezar_train.compat.federatedscope.context import Context
from hezar_train.compat.federatedscope.general import GeneralTorchTrainer
from hezar_train.compat.federatedscope.trainer import DittoTrainer, Trainer
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError, choices, suggestion
from hezar_train.federated import RegularizedOptimizer
from hezar_train.runtime import logger
from hezar_train.trainer import Trainer as PlainTrainer

__all__ = [
    "BaseTrainer",
    "get_trainer",
    "register_plugin",
    "register_trainer",
    "wrap_DittoTrainer",
    "wrap_fedprox_trainer",
    "wrap_regularized_optimizer",
]

Call = Callable[..., Any]
_CALLS: dict[str, Call] = {}
_PLUGINS: dict[str, Call] = {}
METHODS = ("train", "evaluate", "update", "get_model_para")


class BaseTrainer(abc.ABC):
    """What a worker asks for: train, evaluate, update, get_model_para; whatever has all four is one."""

    def __init__(self, model: Any, data: Any, device: Any, **kwargs: Any) -> None:
        self.model, self.data, self.device, self.kwargs = model, data, device, kwargs

    @classmethod
    def __subclasshook__(cls, kind: type) -> Any:
        if cls is not BaseTrainer:
            return NotImplemented
        return all(any(name in base.__dict__ for base in kind.__mro__) for name in METHODS) or NotImplemented

    @abc.abstractmethod
    def train(self) -> Any:
        """Train for a round; return the number of samples, the parameters and the metrics."""

    @abc.abstractmethod
    def evaluate(self, target_data_split_name: str = "test") -> Any:
        """Evaluate on a split; return metrics by name."""

    @abc.abstractmethod
    def update(self, model_parameters: Any, strict: bool = False) -> None:
        """Take parameters over."""

    @abc.abstractmethod
    def get_model_para(self) -> Any:
        """Return the parameters that are exchanged."""

    def print_trainer_meta_info(self) -> str:
        """Return the class and what it was built with."""
        names = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        return f"{type(self).__name__}{tuple((name, getattr(self, name)) for name in names)}"


def register_trainer(key: str, call: Call) -> None:
    """Make a trainer known by a name: a function of the type asked for that returns a class or None; or a class."""
    _CALLS[key] = call
    federated.register_trainer(key, call)


def register_plugin(key: str, wrap: Call) -> None:
    """Make a plug-in known by a name: a function of a trainer that returns it."""
    _PLUGINS[key] = wrap
    federated.register_plugin(key, wrap)


def get_trainer(*given: Any, **settings: Any) -> Any:
    """Build a trainer by name and add the plug-ins that are asked for.

    FederatedScope's way is `get_trainer(model, data, device, config, only_for_eval, is_attacker, monitor)`: the config
    names the trainer and the plug-ins. With a TrainerConfig it is `hezar_train.federated.get_trainer`.
    """
    bound = dict(
        zip(("model", "data", "device", "config", "only_for_eval", "is_attacker", "monitor"), given, strict=False)
    )
    config = settings.get("config", bound.get("config"))
    if config is None or isinstance(config, TrainerConfig) or any(isinstance(one, TrainerConfig) for one in given):
        kinds: dict[Any, Any] = {PlainTrainer: Trainer, federated.DittoTrainer: DittoTrainer}
        return federated.get_trainer(*given, kinds=kinds, **settings)
    return _build({**bound, **settings})


def _build(asked: Mapping[str, Any]) -> Any:
    arguments = dict(asked)
    is_attacker = arguments.pop("is_attacker", False)
    cfg = arguments["config"] = as_cfg(arguments["config"])
    name = cfg.trainer.type
    if name == "none":
        return None
    kind = GeneralTorchTrainer if name == "general" else _registered(name)
    trainer = kind(**arguments)
    if not isinstance(trainer, GeneralTorchTrainer):
        logger.warning("%s is no GeneralTorchTrainer: plug-ins cannot be added to it", type(trainer).__name__)
        return trainer
    for plugin in _plugins_of(cfg, is_attacker=is_attacker):
        trainer = _plugin_named(plugin)(trainer) or trainer
    return trainer


def _registered(name: str) -> Any:
    for key, call in _CALLS.items():
        found = call if isinstance(call, type) and key == name else None if isinstance(call, type) else call(name)
        if found is not None:
            return found
    raise ConfigError(
        f"trainer.type={name!r} is not registered.{suggestion(name, _CALLS)} "
        f"Registered: {choices(['general', *_CALLS])}."
    )


def _plugins_of(cfg: Any, *, is_attacker: bool) -> list[str]:
    """Return what a config asks for, in FederatedScope's order."""
    wanted = [name for name in ("nbafl", "sgdmf") if _uses(cfg, name)]
    method = str(cfg.federate.method).lower()
    wanted += [method] if method in {"pfedme", "ditto", "fedem", "fedrep"} else []
    attack = str(getattr(getattr(cfg, "attack", None), "attack_method", ""))
    wanted += ["attack"] if is_attacker or "backdoor" in attack else []
    wanted += ["fedprox"] if _uses(cfg, "fedprox") else []
    wanted += ["simple_tuning"] if cfg.finetune.before_eval and getattr(cfg.finetune, "simple_tuning", False) else []
    return wanted


def _uses(cfg: Any, name: str) -> bool:
    return bool(getattr(getattr(cfg, name, None), "use", False))


def _plugin_named(name: str) -> Call:
    own: dict[str, Call] = {"fedprox": wrap_fedprox_trainer, "ditto": wrap_DittoTrainer}
    known = {**own, **_PLUGINS}
    if name not in known:
        raise ConfigError(
            f"the config asks for {name!r}, which is not among the plug-ins: {choices(known)}. Add it with "
            f"register_plugin({name!r}, wrap), where wrap(base_trainer) registers its hooks and returns the trainer."
        )
    return known[name]


def wrap_fedprox_trainer(base_trainer: Any, mu: float | None = None) -> Any:
    """Add FedProx: the regulariser draws the weights to those that a routine began with, `fedprox.mu` times."""
    if not isinstance(base_trainer, GeneralTorchTrainer):
        if mu is None:
            raise ConfigError("wrap_fedprox_trainer(trainer, mu) needs mu, the weight of the proximal term")
        return federated.wrap_fedprox_trainer(base_trainer, mu)
    cfg = base_trainer.cfg
    is_frozen = cfg.is_frozen()
    cfg.defrost()
    cfg.regularizer.type, cfg.regularizer.mu = "proximal_regularizer", cfg.fedprox.mu if mu is None else mu
    if is_frozen:
        cfg.freeze()
    base_trainer.ctx.regularizer = builder_for(cfg, "get_regularizer")(cfg.regularizer.type)
    for register in (base_trainer.register_hook_in_train, base_trainer.register_hook_in_eval):
        register(_hook_record_initialization, "on_fit_start", insert_pos=-1)
        register(_hook_del_initialization, "on_fit_end", insert_pos=-1)
    return base_trainer


def _hook_record_initialization(ctx: Context) -> None:
    ctx.weight_init = [parameter.detach().clone() for parameter in ctx.model.parameters()]


def _hook_del_initialization(ctx: Context) -> None:
    ctx.weight_init = None


def wrap_DittoTrainer(  # noqa: N802 - the name that FederatedScope gives it
    base_trainer: Any, regular_weight: float = 0.1, personal_steps: int | None = None
) -> Any:
    """Return a DittoTrainer of a trainer of a TrainerConfig; for a GeneralTorchTrainer register Ditto's own hooks."""
    if isinstance(base_trainer, GeneralTorchTrainer):
        raise ConfigError(
            "wrap_DittoTrainer takes a Trainer of a TrainerConfig. For a GeneralTorchTrainer, FederatedScope's own "
            "trainer_Ditto.py runs behind this door: after stand_in() as it is, or with its imports changed and "
            "register_plugin('ditto', its wrap_DittoTrainer)."
        )
    return federated.wrap_DittoTrainer(base_trainer, regular_weight, personal_steps, kind=DittoTrainer)


def wrap_regularized_optimizer(base_optimizer: Any, regular_weight: float) -> RegularizedOptimizer:
    """Draw an optimizer's parameters to a reference; one that was drawn before is drawn by this weight alone."""
    return federated.wrap_regularized_optimizer(base_optimizer, regular_weight)

"""Build an optimizer by name: every class of `torch.optim`, or a dotted path to a class or function of one's own.

Owns the choice of the fused kernel, the parameter groups that have a weight decay of their own (biases; the layers that
normalise), and the sentences for settings that cannot work. It refuses LBFGS, which evaluates the loss again through a
closure inside its step: a window of micro-batches has no such closure. It neither steps nor saves what it builds.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import LBFGS, Adafactor, Adagrad, Adam, Muon, Optimizer, Rprop, SparseAdam
from torch.optim import optimizer as torchs

from hezar_train.errors import ConfigError, a_kind, choices
from hezar_train.optim.lookup import Keywords, find_factory, keywords_of

__all__ = [
    "DirectStep",
    "build_optimizer",
    "largest_group",
    "optimizer_names",
    "parameter_groups",
]

_CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): found
    for name, found in vars(torch.optim).items()
    if inspect.isclass(found) and issubclass(found, Optimizer) and found is not Optimizer
}

# Each of these chooses a kernel of its own, which fused=True would contradict.
_KERNEL_KEYWORDS = frozenset({"fused", "foreach", "capturable", "differentiable"})
_FUSED_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "mtia"})
_STEPS_WHOLE_ONLY = (Adafactor, Rprop, SparseAdam)

# By name, since models bring layers of their own (LlamaRMSNorm, T5LayerNorm) that are no classes of torch.
_NORMALISES = re.compile(r"Norm(\d?d)?$")
_IS_BIAS = re.compile(r"(^|_)bias(_|$)")


AN_OPTIMIZER = (
    "Expected an optimizer: a name of torch.optim such as 'AdamW', or the dotted path of a class of Optimizer, or of a "
    "function (parameters, lr=...) that returns one."
)


def optimizer_names() -> list[str]:
    """List the names that `build_optimizer` knows without a dotted path, in lower case."""
    return sorted(name for name, found in _CLASSES.items() if not issubclass(found, LBFGS))


def build_optimizer(
    name: str,
    parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
    *,
    learning_rate: float,
    weight_decay: float,
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device,
    momentum: float | None = None,
) -> Optimizer:
    """Build the named optimizer over the parameters (or groups of them) that require a gradient."""
    factory = _find(name)
    groups = _trainable_groups(parameters)
    keywords = keywords_of(factory, withheld=("lr", "weight_decay"))
    owner = f"optimizer={name!r}"
    arguments = dict(kwargs or {})
    _refuse_settings_with_a_field(arguments, owner)
    keywords.check(arguments, owner=owner)
    if momentum is not None:
        arguments |= _momentum(factory, keywords, arguments, owner, momentum)
    _refuse_decay_in_vain(factory, groups, owner)
    _refuse_shares(factory, groups, owner)
    arguments |= _rates(factory, owner, learning_rate=learning_rate, weight_decay=weight_decay)
    if _fused_is_possible(factory, keywords, arguments, groups, device):
        arguments["fused"] = True
    return _call(factory, groups, arguments, owner)


def _find(name: str) -> Callable[..., Any]:
    """Return the class or function that a name stands for."""
    known = optimizer_names()
    found = find_factory(name, _CLASSES, setting="optimizer", known=known, kind="an optimizer", example="MyOptimizer")
    if inspect.isclass(found) and issubclass(found, LBFGS):
        raise ConfigError(
            f"optimizer={name!r} cannot be used: LBFGS evaluates the loss again through a closure in every step, which "
            f"gradient accumulation has not. Use 'adamw' or another of: {choices(known)}."
        )
    if inspect.isclass(found) and not issubclass(found, Optimizer):
        raise ConfigError(f"optimizer={name!r} is {a_kind(found)}. {AN_OPTIMIZER}")
    return found


def _trainable_groups(parameters: Iterable[torch.Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the parameters that require a gradient, in groups."""
    given = list(parameters)
    plain = [entry for entry in given if isinstance(entry, torch.Tensor)]
    groups = [{"params": plain}, *(entry for entry in given if isinstance(entry, dict))]
    kept = [{**group, "params": [p for p in _as_list(group["params"]) if p.requires_grad]} for group in groups]
    kept = [group for group in kept if group["params"]]
    if not any(_as_list(group["params"]) for group in groups):
        raise ConfigError(
            "The model has no parameters, so there is nothing to train. Layers in a plain list or dict are not seen: "
            "put them in a torch.nn.ModuleList or ModuleDict."
        )
    if not kept:
        raise ConfigError(
            "The model has no parameter that requires a gradient, so there is nothing to train. "
            "Unfreeze some: parameter.requires_grad_(True)."
        )
    return kept


def _as_list(params: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _refuse_settings_with_a_field(arguments: Mapping[str, Any], owner: str) -> None:
    """Refuse a second way to say what a field of the config says."""
    fields = {"lr": "learning_rate", "weight_decay": "weight_decay"}
    problems = [
        f"{owner}: {key!r} among the keyword arguments. Set the field {field!r} instead."
        for key, field in fields.items()
        if key in arguments
    ]
    if problems:
        raise ConfigError(problems)


def _momentum(
    factory: Callable[..., Any], keywords: Keywords, arguments: Mapping[str, Any], owner: str, momentum: float
) -> dict[str, Any]:
    """Return the momentum as the keyword that holds it: `momentum`, or the first of `betas`."""
    if doubled := {"momentum", "betas"} & arguments.keys():
        raise ConfigError(
            f"{owner}: {choices(doubled)} among the keyword arguments, and momentum={momentum!r}. Give one."
        )
    if "betas" in keywords.accepted and "momentum" not in keywords.accepted:
        _, *others = inspect.signature(factory).parameters["betas"].default
        return {"betas": (momentum, *others)}
    if not keywords.takes("momentum"):
        raise ConfigError(
            f"{owner} has no momentum, but momentum={momentum!r}. Leave it out, or use an optimizer that has one, "
            "such as 'sgd' or 'adamw'."
        )
    return {"momentum": momentum}


def _refuse_decay_in_vain(factory: Callable[..., Any], groups: list[dict[str, Any]], owner: str) -> None:
    """Refuse groups with a weight decay that the optimizer would not look at."""
    decays = {group["weight_decay"] for group in groups if group.get("weight_decay")}
    if decays and not keywords_of(factory).takes("weight_decay"):
        raise ConfigError(
            f"{owner} has no weight decay, but there are parameter groups with {choices(map(str, decays))}. Set "
            "weight_decay, weight_decay_norm and weight_decay_bias to 0 or leave them out."
        )


def _refuse_shares(factory: Callable[..., Any], groups: list[dict[str, Any]], owner: str) -> None:
    """Raise before the first step does, where torch's optimizer cannot step a share of a parameter."""
    if inspect.isclass(factory) and issubclass(factory, _STEPS_WHOLE_ONLY) and _are_shares(groups):
        raise ConfigError(
            f"{owner} steps whole parameters only; sharding='full' leaves each process a share. Use 'adamw'."
        )


def _rates(factory: Callable[..., Any], owner: str, *, learning_rate: float, weight_decay: float) -> dict[str, float]:
    """Return the rate and the decay as keywords, where they can be taken."""
    everything = keywords_of(factory)
    if not everything.takes("lr"):
        raise ConfigError(f"{owner} takes no 'lr', so learning_rate={learning_rate!r} cannot reach it. {AN_OPTIMIZER}")
    if everything.takes("weight_decay"):
        return {"lr": learning_rate, "weight_decay": weight_decay}
    if weight_decay != 0:
        raise ConfigError(f"{owner} has no weight decay, but weight_decay={weight_decay!r}. Set weight_decay=0.")
    return {"lr": learning_rate}


def _fused_is_possible(
    factory: Callable[..., Any],
    keywords: Keywords,
    arguments: Mapping[str, Any],
    groups: list[dict[str, Any]],
    device: torch.device,
) -> bool:
    """Tell whether one of torch's fused kernels can do this step; a kernel that the user chose is left alone."""
    if not inspect.isclass(factory) or not issubclass(factory, tuple(_CLASSES.values())):
        return False
    if "fused" not in keywords.accepted or _KERNEL_KEYWORDS & arguments.keys():
        return False
    devices = {"cpu"} if issubclass(factory, Adagrad) else _FUSED_DEVICES
    if _are_shares(groups) and not issubclass(factory, Adam):
        return False  # torch has no such kernel for them
    return device.type in devices and all(p.dtype in _FUSED_DTYPES for group in groups for p in group["params"])


def _are_shares(groups: list[dict[str, Any]]) -> bool:
    """Tell whether the parameters are shared out among processes."""
    return any(hasattr(parameter, "device_mesh") for group in groups for parameter in group["params"])


def _call(
    factory: Callable[..., Any], groups: list[dict[str, Any]], arguments: dict[str, Any], owner: str
) -> Optimizer:
    """Build it, and turn its refusal of a value into a config error."""
    try:
        with _without_collecting():
            built = factory(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        advice = f" It was given: {choices(arguments)}. Correct learning_rate, weight_decay or optimizer_kwargs."
        if factory is Muon:
            advice = " Muon trains matrices only: pass an optimizer object that gives the other parameters to AdamW."
        raise ConfigError(f"{owner} cannot be built: {str(error).rstrip('.')}.{advice}") from error
    if not isinstance(built, Optimizer):
        raise ConfigError(f"{owner} built a {type(built).__name__}. Expected a torch.optim.Optimizer.")
    return built


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Do not look for garbage meanwhile: the first optimizer of a process imports torch's compiler.

    What is imported stays; walking through it again and again, as it grows, takes a third of a second of a start.
    """
    if "torch._dynamo" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
) -> list[dict[str, Any]]:
    """Return a model's trainable parameters in groups by weight decay; None leaves a kind in the first group.

    Every trainable parameter is in exactly one group, also where two modules share it, and no frozen one is in any. The
    bias of a normalising layer is a bias first.
    """
    decays = {"other": weight_decay, "norm": weight_decay_norm, "bias": weight_decay_bias}
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in decays}
    for kinds, parameter in _kinds(model):
        groups[next(kind for kind in kinds if decays[kind] is not None)].append(parameter)
    return [{"params": found, "weight_decay": decays[kind]} for kind, found in groups.items() if found]


def _kinds(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Yield each trainable parameter once, with what it is, the most telling first."""
    seen: set[int] = set()
    for module in model.modules():
        normalises = any(_NORMALISES.search(cls.__name__) for cls in type(module).__mro__)
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_bias = _IS_BIAS.search(name) is not None
            yield [*(["bias"] if is_bias else []), *(["norm"] if normalises else []), "other"], parameter


def largest_group(optimizer: Optimizer) -> int:
    """Return the number of the group with the most values: the one whose rate tells most about the run."""
    sizes = [sum(parameter.numel() for parameter in group["params"]) for group in optimizer.param_groups]
    return sizes.index(max(sizes))


@dataclass(slots=True)
class DirectStep:
    """Step an optimizer of torch's past what torch puts around each step for hooks and profilers, while there are none.

    That is a quarter of the time of a step over a few small parameters. Any other optimizer, and one whose `step`
    somebody has wrapped, that has a hook beside those `of_no_use`, or that is profiled, is stepped by its `step()`.
    """

    optimizer: Optimizer
    of_no_use: Callable[[object], bool]
    _around: tuple[Any, ...] | None = field(default=None, init=False)
    _bare: Callable[[Optimizer], object] | None = field(default=None, init=False)

    def __call__(self) -> None:
        """Step; what is around it is looked at each time, because hooks come and go at any time."""
        optimizer = self.optimizer
        own, of_class = vars(optimizer).get("step"), type(optimizer).step
        before, after = optimizer._optimizer_step_pre_hooks.values(), optimizer._optimizer_step_post_hooks.values()
        around = (own, of_class, *before, *after)
        if around != self._around:
            is_torchs = type(optimizer).__module__.startswith("torch.optim.") and hasattr(of_class, "hooked")
            # a scheduler of torch's wraps the step to see that there is one, and tells what it has wrapped
            is_plain = own is None or (hasattr(own, "_wrapped_by_lr_sched") and own.__wrapped__ is of_class)
            is_direct = is_torchs and is_plain and all(map(self.of_no_use, (*before, *after)))
            self._around, self._bare = around, of_class.__wrapped__ if is_direct else None  # type: ignore[attr-defined]
            optimizer.step()  # also lets a scheduler of torch's know that it steps
        elif (
            self._bare is None
            or torchs._global_optimizer_pre_hooks
            or torchs._global_optimizer_post_hooks
            or _profiler_enabled()
        ):
            optimizer.step()
        else:
            self._bare(optimizer)

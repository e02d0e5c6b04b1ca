"""Build a learning-rate scheduler by name: short names, every class of `torch.optim.lr_scheduler`, or a dotted path.

Everything is counted in ticks, one tick being one `step()` of the scheduler. What a name leaves out is filled in:

- constant: factor=1.0, so the rate never changes.
- one_cycle: total_steps = the run's ticks, max_lr = the learning rate.
- cosine_annealing: T_max = the run's ticks, so the rate falls to eta_min (0) at the end.
- linear: total_iters = the run's ticks. Torch's factors stay: the rate rises from a third of the learning rate to the
  whole, a warm-up. For a decay to zero give start_factor=1.0 and end_factor=0.0.
- polynomial: total_iters = the run's ticks, so the rate falls to 0 at the end.
- cyclic: max_lr = the learning rate, base_lr = a tenth of max_lr, step_size_up = 2000 ticks or half of the run if that
  is shorter.
- sequential: the run's ticks mean, for each part, those between its milestones.

The curves (`triangular`, `warmup_cosine`, ...) fill in their own lengths and are followed by `CurveLR`;
docs/reference/schedules.md lists all.

`lambda` needs lr_lambda, a function (or a dotted path to one) from the tick to a factor. `sequential` needs milestones
and schedulers, a list of {"name": ..., "kwargs": {...}}.

A parameter of one's own scheduler called total_steps, T_max, total_iters or num_training_steps is filled in likewise.
`one_cycle` and `cyclic` cycle the momentum only of an optimizer that uses one (`one_cycle` also Adam's first beta, as
torch does). Torch's own names (`LinearLR`, ...) mean the same classes; only `ConstantLR` keeps torch's factor of 1/3.

Building a scheduler patches `optimizer.step`: look the method up after building, not before.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from hezar_train.config.names import scheduler_name
from hezar_train.errors import ConfigError, a_kind, choices
from hezar_train.optim.curves import CURVES, RATE, BoundCurve, Falls, Pace, bind_curve
from hezar_train.optim.lookup import Keywords, find_factory, import_dotted, is_dotted, keywords_of

__all__ = [
    "CurveLR",
    "build_scheduler",
    "scheduler_names",
    "set_rate",
    "watches_metric",
]

_HEZAR_NAMES: dict[str, type[LRScheduler]] = {
    "constant": ConstantLR,
    "cosine_anealing": CosineAnnealingLR,
    "cosine_annealing": CosineAnnealingLR,
    "cyclic": CyclicLR,
    "exponential": ExponentialLR,
    "lambda": LambdaLR,
    "linear": LinearLR,
    "multi_step": MultiStepLR,
    "one_cycle": OneCycleLR,
    "polynomial": PolynomialLR,
    "reduce_on_plateau": ReduceLROnPlateau,
    "sequential": SequentialLR,
    "step": StepLR,
}
_TORCH_NAMES: dict[str, type[LRScheduler]] = {
    name.lower(): vars(lr_scheduler)[name] for name in lr_scheduler.__all__ if name != "LRScheduler"
}
_CLASSES = _TORCH_NAMES | _HEZAR_NAMES

_TICKS_OF_THE_RUN = ("total_steps", "T_max", "total_iters", "num_training_steps")
_FUNCTIONS = ("lr_lambda", "scale_fn")


def scheduler_names() -> list[str]:
    """List the names that `build_scheduler` knows without a dotted path, in lower case."""
    return sorted(_CLASSES.keys() - {"cosine_anealing"} | CURVES.keys())


def watches_metric(name: str) -> bool:
    """Tell whether a schedule of this name follows evaluations, so that it needs a mode: "min" or "max"."""
    short = scheduler_name(name)
    return CURVES[short].watches if short in CURVES else _CLASSES.get(name.lower()) is ReduceLROnPlateau


def build_scheduler(
    name: str,
    optimizer: Optimizer,
    *,
    total_ticks: int,
    kwargs: Mapping[str, Any] | None = None,
    total_epochs: int | None = None,
    is_warmed: bool = False,
) -> LRScheduler:
    """Build the named scheduler over an optimizer for a run of `total_ticks` ticks and so many epochs.

    `is_warmed` says that a warm-up leads to it, so that it needs none of its own.
    """
    total_ticks = max(total_ticks, 1)
    if (short := scheduler_name(name)) in CURVES:
        curve = bind_curve(short, RATE, kwargs, total_ticks=total_ticks, total_epochs=total_epochs, is_warmed=is_warmed)
        return CurveLR(optimizer, curve)
    factory = _find(name)
    given = _with_functions(dict(kwargs or {}))
    owner = f"lr_scheduler={name!r}"
    if factory is SequentialLR:
        return _sequential(optimizer, total_ticks, given, owner)
    if factory is ChainedScheduler:
        return _chained(optimizer, total_ticks, given, owner)
    keywords = keywords_of(factory, withheld=("last_epoch",))
    arguments = _filled_in(factory, keywords, optimizer, total_ticks, given) | given
    if name.lower() == "constant":
        arguments.setdefault("factor", 1.0)
    keywords.check(arguments, owner=owner)
    return _call(lambda: factory(optimizer, **arguments), owner)


def _find(name: str) -> Callable[..., Any]:
    """Return the class or function that a name stands for."""
    return find_factory(
        name, _CLASSES, setting="lr_scheduler", known=scheduler_names(), kind="a scheduler", example="MyScheduler"
    )


def _filled_in(
    factory: Callable[..., Any], keywords: Keywords, optimizer: Optimizer, total_ticks: int, given: dict[str, Any]
) -> dict[str, Any]:
    """Return what the run and the optimizer say about keywords that may have been left out."""
    if factory is ConstantLR:
        return {}
    filled: dict[str, Any] = {key: total_ticks for key in _TICKS_OF_THE_RUN if key in keywords.accepted}
    if factory is OneCycleLR:
        if {"epochs", "steps_per_epoch"} <= given.keys():
            del filled["total_steps"]
        filled |= {"max_lr": _base_rates(optimizer)}
        filled |= {"cycle_momentum": _uses_momentum(optimizer) or "betas" in optimizer.defaults}
    if factory is CyclicLR:
        max_rates = given.get("max_lr", _base_rates(optimizer))
        filled |= {"max_lr": max_rates, "base_lr": _tenth(max_rates), "cycle_momentum": _uses_momentum(optimizer)}
        filled |= {"step_size_up": min(2000, max(1, total_ticks // 2))}
    return filled


def _base_rates(optimizer: Optimizer) -> list[float]:
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _tenth(rates: float | Sequence[float]) -> float | list[float]:
    return [rate / 10 for rate in rates] if isinstance(rates, Sequence) else rates / 10


def _uses_momentum(optimizer: Optimizer) -> bool:
    """Tell whether every group has a momentum at work; cycling would switch on one that is 0."""
    return all(group.get("momentum", 0) != 0 for group in optimizer.param_groups)


def _with_functions(given: dict[str, Any]) -> dict[str, Any]:
    """Import the functions that are given by dotted path."""
    for key in _FUNCTIONS:
        if given.get(key) is None:
            continue
        value = given[key]
        given[key] = [_function(key, f) for f in value] if isinstance(value, list | tuple) else _function(key, value)
    return given


def _function(key: str, given: Any) -> Callable[[int], float]:
    found = import_dotted(given, setting=key) if isinstance(given, str) and is_dotted(given) else given
    if not callable(found):
        raise ConfigError(f"{key}={given!r} is not a function. Give one, or a dotted path such as 'my_package.decay'.")
    # Torch reads the __dict__ of all but plain functions when it saves; builtins have none.
    return found if isinstance(found, types.FunctionType) or hasattr(found, "__dict__") else functools.partial(found)


def _sequential(optimizer: Optimizer, total_ticks: int, given: dict[str, Any], owner: str) -> LRScheduler:
    """Build parts that follow one another, each sized to the ticks between its milestones."""
    Keywords(frozenset({"schedulers", "milestones"}), frozenset({"schedulers", "milestones"}), takes_any=False).check(
        given, owner=owner
    )
    milestones = list(given["milestones"])
    edges = [0, *milestones]
    if any(later <= earlier for earlier, later in zip(edges, milestones, strict=False)):
        raise ConfigError(f"{owner}: milestones={milestones} must be ticks in rising order, the first at least 1.")
    parts = _parts(given["schedulers"], owner)
    if len(parts) != len(milestones) + 1:
        raise ConfigError(
            f"{owner}: {len(parts)} schedulers and {len(milestones)} milestones. Expected one milestone between each "
            "two schedulers."
        )
    ends = [*milestones, max(total_ticks, edges[-1] + 1)]
    built = []
    for (name, kwargs), start, end in zip(parts, edges, ends, strict=True):
        _start_from_the_base_rate(optimizer)
        built.append(build_scheduler(name, optimizer, total_ticks=end - start, kwargs=kwargs))
    return _call(lambda: SequentialLR(optimizer, built, milestones), owner)


def _chained(optimizer: Optimizer, total_ticks: int, given: dict[str, Any], owner: str) -> LRScheduler:
    """Build parts that multiply: each starts from the rate that the one before left."""
    Keywords(frozenset({"schedulers"}), frozenset({"schedulers"}), takes_any=False).check(given, owner=owner)
    parts = _parts(given["schedulers"], owner)
    if curves := [name for name, _ in parts if scheduler_name(name) in CURVES]:
        raise ConfigError(
            f"{owner}: {choices(curves)} cannot be a part of it: a curve sets the rate, and multiplies none."
        )
    _start_from_the_base_rate(optimizer)
    built = [build_scheduler(name, optimizer, total_ticks=total_ticks, kwargs=kwargs) for name, kwargs in parts]
    return _call(lambda: ChainedScheduler(built, optimizer), owner)


def _start_from_the_base_rate(optimizer: Optimizer) -> None:
    """Undo what an earlier part's construction did to the rate."""
    for group in optimizer.param_groups:
        rate = group["lr"]
        base = group.setdefault("initial_lr", rate.clone() if isinstance(rate, torch.Tensor) else rate)
        if isinstance(rate, torch.Tensor):
            rate.copy_(base)
        else:
            group["lr"] = base


def _parts(given: Any, owner: str) -> list[tuple[str, Mapping[str, Any] | None]]:
    """Read the list of parts, and report all that is wrong with it at once."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"{owner}: schedulers={given!r}. Expected a list of {{'name': ..., 'kwargs': {{...}}}}.")
    problems = list(_part_problems(given, owner))
    if problems:
        raise ConfigError(problems)
    return [(part["name"], part.get("kwargs")) for part in given]


def _part_problems(parts: Sequence[Any], owner: str) -> Iterator[str]:
    if not parts:
        yield f"{owner}: the list of schedulers is empty. Give at least one."
    for number, part in enumerate(parts):
        where = f"{owner}: schedulers[{number}]"
        if not isinstance(part, Mapping) or not isinstance(part.get("name"), str) or part.keys() - {"name", "kwargs"}:
            yield f"{where}={part!r}. Expected {{'name': ..., 'kwargs': {{...}}}}."
            continue
        if _is_bad_part(part["name"]):
            yield f"{where}: {part['name']!r} cannot be a part of another scheduler. Use it alone."


def _is_bad_part(name: str) -> bool:
    """Tell whether a schedule cannot share a run with others."""
    if (short := scheduler_name(name)) in CURVES:
        return CURVES[short].watches or CURVES[short].pace is not Pace.TICK
    factory = _find(name)
    # OneCycleLR keeps its rates in the optimizer's groups, where its neighbours would read them as their own;
    # torch cannot restart a nested sequence; and a plateau waits for a metric.
    alone = OneCycleLR | SequentialLR | ChainedScheduler | ReduceLROnPlateau
    return inspect.isclass(factory) and issubclass(factory, alone)


A_SCHEDULE = (
    "Expected a schedule's name such as 'warmup_cosine', or the dotted path of a class of "
    "torch.optim.lr_scheduler.LRScheduler, with arguments that it takes in lr_scheduler_kwargs."
)


def _call(build: Callable[[], Any], owner: str) -> LRScheduler:
    """Build it, and turn its refusal of a value into a config error."""
    try:
        built = build()
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"{owner} cannot be built: {error}. {A_SCHEDULE}") from error
    if not isinstance(built, LRScheduler):
        raise ConfigError(f"{owner} built {a_kind(built)}. {A_SCHEDULE}")
    return built


class CurveLR(LRScheduler):
    """Set every group's rate to a point of a curve.

    The rate follows from the tick, from the group's first rate and from how many evaluations fell, never from the rate
    before: what is saved are these, and no code.
    """

    def __init__(self, optimizer: Optimizer, curve: BoundCurve) -> None:
        self.curve = curve
        self.falls = Falls()
        for group in optimizer.param_groups:
            curve.check(float(group.get("initial_lr", group["lr"])))
        super().__init__(optimizer)
        self.base_lrs = [float(rate) for rate in self.base_lrs]  # a tick then never reads from a device

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of the present tick."""
        return [self.curve.value(self.last_epoch, float(base), self.falls.count) for base in self.base_lrs]

    def observe(self, value: float) -> None:
        """Take an evaluation into account."""
        self.falls = self.curve.judge(self.falls, value)
        if self.curve.pace is Pace.EVALUATION:
            self.last_epoch += 1
        self.refresh()

    def refresh(self) -> None:
        """Write the rates of the present tick into the groups once more."""
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            set_rate(group, float(rate))
        self._last_lr = rates

    def state_dict(self) -> dict[str, Any]:
        """Return where the curve is, in plain values."""
        state = {name: value for name, value in super().state_dict().items() if name != "curve"}
        return state | {"falls": dataclasses.asdict(self.falls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where a curve was saved."""
        super().load_state_dict(state_dict | {"falls": Falls(**state_dict["falls"])})


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Write a rate into a group; one that is a tensor stays the same tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate

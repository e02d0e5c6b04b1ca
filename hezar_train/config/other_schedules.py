"""What the schedules of other trainers are here: transformers' names and keywords, Lightning's dicts, in our fields.

Nothing is taken over: a config that is asked for another trainer's field is refused, and the sentence has the values
that do the same here. Tests follow each of them beside the schedule that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

__all__ = ["TRANSFORMERS", "answer_to", "answer_to_dict", "answer_to_name", "of_transformers"]

Fields: TypeAlias = dict[str, Any]

EVERY_UPDATE = {"lr_scheduling_steps": 1}
HALF_WAVE = {"num_cycles": 0.5}
TORCH = "torch.optim.lr_scheduler"
LIGHTNING = ("lightning.", "pytorch_lightning.")
BOLTS = "LinearWarmupCosineAnnealingLR"  # of Lightning Bolts, which came with no schedule in Lightning itself
NONE_OF_OURS = "greedy"


def _linear(_: Fields) -> Fields:
    return {"lr_scheduler": "warmup_linear"}


def _cosine(_: Fields) -> Fields:
    return {"lr_scheduler": "cosine_annealing", **EVERY_UPDATE}


def _cosine_with_restarts(given: Fields) -> Fields:
    return _with_keywords("cosine_with_restarts", _renamed(given, num_cycles="num_cycles"))


def _polynomial(given: Fields) -> Fields:
    keywords = {"end_learning_rate": given.get("lr_end", 1e-7), **_renamed(given, power="power")}
    return _with_keywords("warmup_polynomial", keywords)


def _constant(_: Fields) -> Fields:
    return {"lr_scheduler": None}


def _inverse_sqrt(given: Fields) -> Fields:
    keywords = _renamed(given, timescale="timescale")
    return _with_keywords("inverse_sqrt", keywords if given.get("_has_warmup") else {"timescale": 10_000} | keywords)


def _plateau(given: Fields) -> Fields:
    return _with_keywords("reduce_on_plateau", {name: value for name, value in given.items() if name != "_has_warmup"})


def _cosine_with_min_lr(given: Fields) -> Fields:
    if "min_lr_rate" in given:
        return _with_keywords("warmup_cosine", {"alpha": given["min_lr_rate"]})
    return _with_keywords("cosine_annealing", _renamed(given, min_lr="eta_min")) | EVERY_UPDATE


def _warmup_stable_decay(given: Fields) -> Fields:
    names = {"num_decay_steps": "decay_iter", "decay_type": "decay_method", "min_lr_ratio": "alpha"}
    return _with_keywords("warmup_stable_decay", _renamed(given, **names))


TRANSFORMERS: dict[str, tuple[Callable[[Fields], Fields], frozenset[str]]] = {
    "linear": (_linear, frozenset()),
    "cosine": (_cosine, frozenset()),
    "cosine_with_restarts": (_cosine_with_restarts, frozenset({"num_cycles"})),
    "polynomial": (_polynomial, frozenset({"lr_end", "power"})),
    "constant": (_constant, frozenset()),
    "constant_with_warmup": (_constant, frozenset()),
    "inverse_sqrt": (_inverse_sqrt, frozenset({"timescale"})),
    "reduce_lr_on_plateau": (
        _plateau,
        frozenset({"mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps"}),
    ),
    "cosine_with_min_lr": (_cosine_with_min_lr, frozenset({"min_lr", "min_lr_rate"})),
    "cosine_warmup_with_min_lr": (_cosine_with_min_lr, frozenset({"min_lr", "min_lr_rate"})),
    "warmup_stable_decay": (_warmup_stable_decay, frozenset({"num_decay_steps", "decay_type", "min_lr_ratio"})),
}
"""Each of transformers' schedules: how to say it here, and the keywords that can be said. The one that is missing,
`greedy`, raises the rate again when the loss falls, which nothing here does."""


def of_transformers(name: str, keywords: Mapping[str, Any] | None = None, *, has_warmup: bool = False) -> Fields | None:
    """Return the fields that do what a schedule of transformers does; None where nothing here does."""
    if name not in TRANSFORMERS:
        return None
    translate, known = TRANSFORMERS[name]
    given = {key: value for key, value in (keywords or {}).items() if (key, value) not in HALF_WAVE.items()}
    if name == "warmup_stable_decay" and given.get("warmup_type") == "linear":
        del given["warmup_type"]
    if given.keys() - known:
        return None
    return translate({**given, **({"_has_warmup": True} if has_warmup else {})})


def answer_to(field: str, given: Mapping[str, Any]) -> str | None:
    """Say what another trainer's field, as it was given beside others, is here; None for a field without values."""
    value = given.get(field)
    if field == "lr_scheduler_type":
        return _answer_to_type(str(getattr(value, "value", value)), given)
    if field in ("interval", "frequency"):
        return _answer_to_interval(field, given)
    if field in ("warmup_ratio", "num_warmup_steps", "warmup_iters", "warmup_iter", "warmup_epochs", "warmup"):
        return _answer_to_warmup(field, value, given)
    return None


def answer_to_name(name: Any) -> str:
    """Say what a name of transformers', given as `lr_scheduler`, is here; nothing for other names."""
    fields = of_transformers(name) if isinstance(name, str) else None
    if name == BOLTS:
        return f" Bolts' {name} is {_shown(_of_class(BOLTS, {}))} here, and warmup_steps."
    return "" if fields is None else f" transformers' {name!r} is {_shown(fields)} here."


def answer_to_dict(given: Mapping[str, Any], accumulation: int = 1) -> str:
    """Say what a schedule as Lightning has it, a dict of an object or a class path and when it steps, is here."""
    made, arguments = given.get("scheduler", given.get("class_path")), given.get("init_args") or {}
    arguments = dict(arguments) if isinstance(arguments, Mapping) else {}
    monitor = arguments.pop("monitor", given.get("monitor"))
    fields = {} if made is None else _of_class(made if isinstance(made, str) else type(made).__name__, arguments)
    if given.get("interval") == "step":
        fields["lr_scheduling_steps"] = _number(given.get("frequency"), 1) * accumulation
    fields |= {"metric_for_best_model": monitor} if isinstance(monitor, str) else {}
    told = f" What Lightning has in a dict is here: {_shown(fields)}." if fields else ""
    is_object = made is not None and not isinstance(made, str)
    return f"{told} A scheduler that is built goes to the Trainer: lr_scheduler=SCHEDULER." if is_object else told


def _of_class(path: str, arguments: Fields) -> Fields:
    """Return the fields for a class of torch's, Lightning's or one's own, and its arguments."""
    package, _, name = path.rpartition(".")
    if name == BOLTS:
        warmup, epochs = arguments.get("warmup_epochs", 0), arguments.get("max_epochs", 0)
        share = {"warmup_steps": round(warmup / epochs, 6)} if warmup and epochs else {}
        return _with_keywords("cosine_annealing", _renamed(arguments, eta_min="eta_min")) | EVERY_UPDATE | share
    is_known = package == TORCH or package.startswith(LIGHTNING)
    return _with_keywords(name if is_known else path, arguments)


def _answer_to_type(name: str, given: Mapping[str, Any]) -> str:
    keywords = given.get("lr_scheduler_kwargs")
    keywords = dict(keywords) if isinstance(keywords, Mapping) else {}
    told = f"lr_scheduler_type={name!r}{f' with lr_scheduler_kwargs={keywords!r}' if keywords else ''}"
    has_warmup = any("warmup" in field and bool(value) for field, value in given.items())
    fields = of_transformers(name, keywords, has_warmup=has_warmup)
    if fields is not None:
        return f"{told} is {_shown(fields)} here."
    if name == NONE_OF_OURS:
        return f"{told} is not offered; the nearest is lr_scheduler='reduce_on_plateau', which never raises the rate."
    return f"{told} has no counterpart here. Write one: lr_scheduler='lambda' with a function of the tick."


def _answer_to_warmup(field: str, value: Any, given: Mapping[str, Any]) -> str | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if value == 0:
        return f"{field}={value!r} is no warm-up: leave it out."
    if field == "warmup_epochs":
        return _answer_to_epochs(value, given)
    count = given.get("gradient_accumulation_steps", given.get("accumulate_grad_batches"))
    if isinstance(value, float) and value < 1:
        return f"{field}={value!r} is warmup_steps={value!r} here."
    steps = int(value) * _number(count, 1)
    beside = f", {_number(count, 1)} steps to an update" if _number(count, 1) > 1 else ""
    return f"{field}={value!r} is warmup_steps={steps} here{beside}."


def _answer_to_epochs(value: float, given: Mapping[str, Any]) -> str:
    names = ("num_epochs", "num_train_epochs", "max_epochs", "epochs")
    epochs = next((given[name] for name in names if isinstance(given.get(name), int)), 0)
    if 0 < value < epochs:
        share = float(Fraction(str(value)) / epochs)
        return f"warmup_epochs={value!r} of {epochs} is warmup_steps={round(share, 6)!r} here, a share of the run."
    return f"warmup_epochs={value!r} is warmup_steps here: a count of steps, or a share of the run below 1."


def _answer_to_interval(field: str, given: Mapping[str, Any]) -> str:
    count = _number(given.get("gradient_accumulation_steps", given.get("accumulate_grad_batches")), 1)
    every = _number(given.get("frequency"), 1)
    if given.get("interval") == "step":
        return f"interval='step', frequency={every} is lr_scheduling_steps={every * count} here."
    told = f"{field}={given[field]!r}"
    return (
        f"{told}: how often a schedule ticks is lr_scheduling_steps here; left out, torch's tick at each epoch's end."
    )


def _with_keywords(name: str, keywords: Fields) -> Fields:
    return {"lr_scheduler": name, **({"lr_scheduler_kwargs": keywords} if keywords else {})}


def _renamed(given: Fields, **names: str) -> Fields:
    return {ours: given[theirs] for theirs, ours in names.items() if theirs in given}


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _shown(fields: Fields) -> str:
    if fields == {"lr_scheduler": None}:
        return "a rate without lr_scheduler, which stays; or, after a warm-up, warmup_steps alone,"
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())

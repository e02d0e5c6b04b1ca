"""What a user hands to the Trainer, checked and settled once at the border: model, optimizer, data, best metric."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hezar_train.checkpoint import WeightReport, unwrap
from hezar_train.config import TrainerConfig
from hezar_train.data.splits import Splits
from hezar_train.errors import ConfigError, DataError, choices, suggestion
from hezar_train.hooks.early_stopping import metric_key_of
from hezar_train.metrics import MetricsHandler
from hezar_train.optim import parameter_groups
from hezar_train.plan import steps_of
from hezar_train.runtime import logger
from hezar_train.runtime.sharding import is_sharded

__all__ = [
    "NamedSet",
    "as_module",
    "best_key_of",
    "decide_evaluation",
    "evaluation_sets",
    "in_order",
    "max_steps_of",
    "named_sets",
    "one_set",
    "parameters_of",
    "refuse_absent_best",
    "refuse_missing",
    "refuse_stranger",
    "settle_preprocessor",
    "size_of",
    "tell_weights",
]


def parameters_of(model: nn.Module, config: TrainerConfig) -> Any:
    """Return what an optimizer is built over: all parameters, or groups with a weight decay of their own."""
    if config.weight_decay_norm is None and config.weight_decay_bias is None:
        return model.parameters()
    return parameter_groups(
        model, weight_decay=config.weight_decay, weight_decay_norm=config.weight_decay_norm,
        weight_decay_bias=config.weight_decay_bias,
    )  # fmt: skip


def in_order(config: Any, model: Any) -> tuple[Any, Any]:
    """Accept config and model in either order."""
    return (model, config) if isinstance(config, nn.Module) else (config, model)


def refuse_missing(*, needs_data: bool, **needed: Any) -> None:
    """Raise naming what was not given, or is of another kind; one that only evaluates needs no training data."""
    missing = [name for name, value in needed.items() if value is None]
    if missing and (needs_data or missing != ["train_dataset"]):
        raise ConfigError(
            "Trainer needs config, model (passed, or made by an overridden build_model()) and train_dataset; missing: "
            f"{choices(missing)}"
        )
    if not isinstance(needed["config"], TrainerConfig):
        raise ConfigError(f"config is a {type(needed['config']).__name__}; expected a TrainerConfig")


def as_module(model: Any) -> nn.Module:
    """Return the model if it is one."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    return model


def refuse_stranger(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if an optimizer that was passed in would leave the model as it is."""
    ours = {id(parameter) for parameter in model.parameters()}
    strangers = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in ours]
    if strangers and is_sharded(model):
        raise ConfigError(
            "the optimizer passed in was built over whole parameters, and sharding='full' has cut them since. Name it "
            "in the config (optimizer, optimizer_kwargs), or make it in an overridden build_optimizer()."
        )
    if not any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer passed in holds none of the model's parameters, so the model would stay as it is. Build it "
            "over model.parameters()."
        )


def decide_evaluation(config: TrainerConfig, eval_dataset: Any) -> bool:
    """Tell whether the run evaluates: if there is evaluation data and the config does not forbid it."""
    if config.use_diff and eval_dataset is None:
        raise ConfigError("use_diff=True evaluates before and after training, but there is no split 'val' to do it on.")
    if config.do_evaluate and eval_dataset is None:
        raise ConfigError("do_evaluate=True, but no eval_dataset was given. Pass one, or leave do_evaluate out.")
    if eval_dataset is None or config.do_evaluate is False:
        return False
    for name, data in evaluation_sets(None, eval_dataset).items():
        if size_of(data) == 0:
            which = f"eval_dataset[{name!r}]" if name else "the eval_dataset"
            raise DataError(f"{which} is empty: expected at least one sample, or no such set at all.")
    return True


def evaluation_sets(default: Any, given: Any) -> dict[str, Any]:
    """Return the sets to evaluate on by name; a set without a name has the empty one."""
    if isinstance(given, str):
        if not isinstance(default, Mapping) or given not in default:
            known = choices(default) if isinstance(default, Mapping) else "none: eval_dataset is a single set"
            raise DataError(f"there is no evaluation set {given!r}. Named sets: {known}.")
        return {"": default[given]}
    data = default if given is None else given
    if data is None:
        raise DataError("there is no evaluation data: pass eval_dataset to the Trainer, or a dataset to evaluate()")
    is_named = isinstance(data, Mapping) and all(isinstance(name, str) for name in data)
    return dict(data) if is_named else {"": data}


class NamedSet(NamedTuple):
    """Data to evaluate on, the name its metrics get, and its split."""

    name: str
    data: Any
    split: str


def named_sets(default: Any, splits: Splits, asked: Any) -> list[NamedSet]:
    """Return what to evaluate on: the default sets, data given, a named set or a split."""
    is_named = isinstance(default, Mapping) and isinstance(asked, str) and asked in default
    if not isinstance(asked, str) or is_named:
        return [NamedSet(name, data, "val") for name, data in evaluation_sets(default, asked).items()]
    if asked in splits.data:
        return [NamedSet("", splits.data[asked], asked)]
    known = [*splits.data, *(default if isinstance(default, Mapping) else ())]
    sentence = f"there is no evaluation set {asked!r}. There are: {choices(known)}.{suggestion(asked, known)}"
    if not splits.is_dict:
        raise DataError(sentence)
    logger.warning("%s Nothing was evaluated.", sentence)  # of many data owners, some lack a split
    return []


def best_key_of(config: TrainerConfig, handler: MetricsHandler, eval_dataset: Any) -> str:
    """Return the full name of the metric that decides the best model, checked against what there will be."""
    sets = [] if eval_dataset is None else list(evaluation_sets(None, eval_dataset))
    return metric_key_of("metric_for_best_model", config.metric_for_best_model, sets, handler.output_keys)


def one_set(default: Any, given: Any) -> Any:
    """Return the one set that is meant by a name, by data or by nothing."""
    sets = evaluation_sets(default, given)
    if len(sets) != 1:
        raise DataError(f"predict() goes over one set; there are several: {choices(sets)}. Name one of them.")
    return next(iter(sets.values()))


def refuse_absent_best(key: str, metrics: Mapping[str, float]) -> None:
    """Raise if an evaluation did not give what decides the best model; some metrics tell their outputs only then."""
    known = ["train.loss", *(f"evaluation.{name}" for name in metrics)]
    if key not in known:
        raise ConfigError(
            f"the best model is to be told by {key!r}, which the evaluation did not give. There are: {choices(known)}."
            f"{suggestion(key, known)}"
        )


def settle_preprocessor(model: nn.Module, given: Any) -> Any:
    """Choose the preprocessor to keep with the model: the one given, else the model's own."""
    bare = unwrap(model)
    if given is None:
        own = getattr(bare, "preprocessor", None)
        return None if isinstance(own, nn.Module) else own  # a layer of that name is a part of the model
    if getattr(bare, "preprocessor", given) is None:
        bare.preprocessor = given
    return given


def tell_weights(report: WeightReport, source: str | os.PathLike[str]) -> None:
    """Say what became of each name of the initial weights."""
    logger.info("%d tensors loaded from %s", len(report.loaded), source)
    for words, names in (
        ("not in it, so left as they are", report.missing),
        ("in it, but not in the model", report.unexpected),
        ("of another shape, so left as they are", report.mismatched),
    ):
        if names:
            logger.warning("%s: %s", words, ", ".join(names))


def size_of(data: Any) -> int | None:
    """Return the number of samples, None where there is no telling."""
    data = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(data, Mapping) and 0 not in data:
        sizes = [size_of(one) for one in data.values()]
        return None if None in sizes else sum(size or 0 for size in sizes)
    return len(data) if hasattr(data, "__len__") else None


def max_steps_of(config: TrainerConfig, whole: int) -> int:
    """Return the steps of a run whose whole length is known, as `max_steps` limits it."""
    asked = config.max_steps
    if asked is None:
        return whole
    return min(whole, steps_of(asked, whole))

"""FederatedScope's verbs over a `TrainerConfig`: `Trainer(config, model, data)`, models by name, Ditto.

Its hooks and context are the plain Trainer's. FederatedScope's own routines, hook names and nested config are those of
`GeneralTorchTrainer`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hezar_train import federated
from hezar_train.checkpoint import load_round, round_tensors, unwrap, write_round
from hezar_train.config import TrainerConfig
from hezar_train.data import Splits, parse_splits
from hezar_train.errors import ConfigError
from hezar_train.loop import Hook
from hezar_train.metrics import MetricsHandler
from hezar_train.multi_model import MultiModelTrainer as PlainMultiModelTrainer
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.assemble import in_order
from hezar_train.trainer.export import exchanged_names
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["CopiedModelsTrainer", "DittoTrainer", "MultiModelTrainer", "Trainer", "refuse_methods_of_general"]

MODE = Mode
OF_GENERAL = frozenset(
    {
        "_run_batch", "_run_epoch", "_run_routine", "_switch_model_ctx", "register_default_hooks_eval",
        "register_default_hooks_ft", "register_default_hooks_train", "setup_data",
    }
)  # fmt: skip
"""Methods that only a `GeneralTorchTrainer` calls."""


def refuse_methods_of_general(kind: type) -> None:
    """Raise if a trainer of a TrainerConfig has methods that nobody would call."""
    theirs = [name for name in dir(kind) if name in OF_GENERAL or name.startswith("_hook_on_")]
    found = sorted(name for name in theirs if not hasattr(PlainMultiModelTrainer, name))
    if found:
        raise ConfigError(
            f"{kind.__name__} has {', '.join(found)}, which a Trainer(config, model, data) never calls. Let it be a "
            "GeneralTorchTrainer(model, data, device, config)."
        )


def _refuse_other_config(config: Any) -> None:
    if config is not None and not isinstance(config, TrainerConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}; a Trainer takes (config, model, data) with a TrainerConfig. "
            "FederatedScope's (model, data, device, config) is GeneralTorchTrainer's."
        )


class Trainer(PlainTrainer):
    """A Trainer whose data may be parsed in a way of its own, and whose model is saved round by round."""

    config: TrainerConfig
    """Whether FederatedScope's own routines and hooks run in the place of the loop's."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        preprocessor: Any = None,
        metrics_handler: MetricsHandler | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        accelerator: Accelerator | None = None,
        hooks: Iterable[Hook | None] = (),
    ) -> None:
        self.config, model = in_order(config, model)
        if not hasattr(self, "_run_routine"):  # a GeneralTorchTrainer has routines of its own
            refuse_methods_of_general(type(self))
            _refuse_other_config(self.config)
        has_own_parser = type(self).parse_data is not Trainer.parse_data
        splits = Splits.of(train_dataset, eval_dataset, self.parse_data if has_own_parser else None)
        super().__init__(
            self.config, model, splits, None, data_collator, preprocessor, metrics_handler, optimizer, lr_scheduler,
            accelerator, hooks,
        )  # fmt: skip

    def parse_data(self, data: Any) -> Mapping[str, Any]:
        """Turn a dict of splits into `{split}_data`, `{split}_loader` and `num_{split}_data`; may be overridden."""
        return parse_splits(data)

    def save_model(self, path: str | os.PathLike[str], cur_round: int = -1) -> None:
        """Write the weights, and the round they are of, to one file."""
        tensors = round_tensors(unwrap(self.model), cur_round)
        self.runtime.processes.on_main(lambda: write_round(Path(path), tensors))

    def load_model(self, path: str | os.PathLike[str]) -> int:
        """Read what `save_model` wrote; return the round."""
        return load_round(Path(path), unwrap(self.model))

    def discharge_model(self) -> None:
        """Move the model to the CPU."""
        self.model.to("cpu")

    @property
    def cfg(self) -> TrainerConfig:
        """The config; assigning another one works out the data and the plan again."""
        return self.config

    @cfg.setter
    def cfg(self, config: TrainerConfig) -> None:
        self.reconfigure(config)

    def print_trainer_meta_info(self) -> str:
        """Return what a person wants to know: the model, what is exchanged, what stays, and the hooks."""
        model = unwrap(self.model)
        exchanged = exchanged_names(model, self.config)
        kept = [name for name in model.state_dict() if name not in set(exchanged)]
        return "\n".join(
            [
                f"model: {type(model).__name__}",
                f"exchanged: {', '.join(exchanged) or '-'}",
                f"local: {', '.join(kept) or '-'}",
                *(f"hooks of {mode}:\n{self.hooks[mode]}" for mode in (MODE.TRAIN, MODE.FINETUNE, MODE.VAL)),
            ]
        )


class MultiModelTrainer(PlainMultiModelTrainer, Trainer):
    """Several models by name, `hezar_train.MultiModelTrainer`, with the names of this module's Trainer."""


class CopiedModelsTrainer(MultiModelTrainer):
    """A number of models alike, from one model or from a trainer of a TrainerConfig.

    Of a trainer it takes the data, the collator, the preprocessor and copies of the model; the trainer stays as it is.
    """

    def __init__(
        self, model_nums: int, models_interact_mode: str = "sequential", model: nn.Module | None = None,
        data: Any = None, device: Any = None, config: TrainerConfig | None = None,
        base_trainer: PlainTrainer | None = None, **others: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model_nums, int) or isinstance(model_nums, bool) or model_nums < 1:
            raise ConfigError(f"model_nums={model_nums!r} must be a whole number of models, at least 1")
        if base_trainer is not None:
            model, config = copy.deepcopy(unwrap(base_trainer.model)), base_trainer.config
            data = dict(base_trainer.splits.data) if base_trainer.splits.is_dict else base_trainer.train_dataset
            kept = ("eval_dataset", "data_collator", "preprocessor")
            others = {name: getattr(base_trainer, name) for name in kept} | others
        makes_own = type(self).init_multiple_models is not CopiedModelsTrainer.init_multiple_models
        if (model is None and not makes_own) or config is None or data is None:
            raise ConfigError("give model, data and config, or a base_trainer that has them")
        del device  # the config says where
        self.model_nums, self._pattern = model_nums, model
        super().__init__(config, None, data, interact=models_interact_mode, **others)
        if len(self.models) != model_nums:
            raise ConfigError(f"model_nums={model_nums}, but init_multiple_models() made {len(self.models)} models")

    def init_multiple_models(self) -> Mapping[str, nn.Module] | Sequence[nn.Module]:
        """Make the models: the one given, and copies of it; an override may make different ones."""
        if self._pattern is None:
            raise ConfigError("give model, data and config, or a base_trainer that has them")
        return [copy.deepcopy(self._pattern) if number else self._pattern for number in range(self.model_nums)]


class DittoTrainer(federated.DittoTrainer, MultiModelTrainer):
    """Ditto's two models, `hezar_train.federated.DittoTrainer`, with the names of this module's Trainer."""

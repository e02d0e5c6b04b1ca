"""FederatedScope's trainer: `from hezar_train.compat.federatedscope import Trainer, CtxVar, LIFECYCLE, MODE`.

A worker's trainer over this loop. A routine (train, evaluate, finetune) is made of hooks at the moments of
`HOOK_TRIGGER`; a hook is a function of the context and is known by its name:

    on_fit_start
      on_epoch_start
        on_batch_start  on_batch_forward  on_batch_backward  on_batch_end
      on_epoch_end
    on_fit_end

What FederatedScope calls so, and where it is:

    Trainer(model, data, device, config)    Trainer(config, model, data); data is a dict of splits, as parse_data reads
                                            it: datasets, loaders, or arrays as {"x": ..., "y": ...}
    train, evaluate, finetune               the trainer's; train() unpacks as num_samples, model_para, eval_metrics
    update, get_model_para                  the trainer's; copies, without what local_param keeps at home
    save_model, load_model                  the trainer's; one file of plain tensors, with the round
    discharge_model                         the trainer's; offload_after_routine does it after every call
    cfg                                     the trainer's; assigning another config works out data and plan again
    hooks_in_train, _eval, _ft              the trainer's, with register_hook_in_*, reset_hook_in_*, replace_hook_in_*
    print_trainer_meta_info                 the trainer's; it returns the text
    ctx                                     Context, CtxVar, LIFECYCLE, lifecycle; every documented name is in it
    MODE, TRIGGER, HOOK_TRIGGER             the words for modes and moments
    BaseTrainer                             the four methods that a worker asks for
    get_trainer, register_trainer           trainers by name; plug-ins with register_plugin, in their PLUGIN_ORDER
    Monitor, MetricCalculator               its metrics, over all samples of a split; register_metric adds one
    wrap_fedprox_trainer, sam_trainer       wrap_fedprox_trainer(trainer, mu), wrap_sam_trainer(trainer, rho), or pass
                                            hooks=[FedProx(mu)], [SAM(rho)], [ASAM(rho, eta)]
    wrap_DittoTrainer                       the same, or a DittoTrainer: a personal model beside the global one
    wrap_regularized_optimizer              an optimizer that is drawn to reference values
    register_regularizer                    a function of the context, for `regularizer` in the config
    GeneralMultiModelTrainer                several models alike; MultiModelTrainer: models by name
    calculate_batch_epoch_num               how long a call of train() is
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
from hezar_train.federated import (
    ASAM,
    PLUGIN_ORDER,
    SAM,
    BaseTrainer,
    FedProx,
    MetricCalculator,
    Monitor,
    RegularizedOptimizer,
    is_larger_better,
    register_metric,
    register_plugin,
    register_trainer,
    wrap_fedprox_trainer,
    wrap_regularized_optimizer,
    wrap_sam_trainer,
)
from hezar_train.loop import HOOK_TRIGGER, LIFECYCLE, TRIGGER, Context, CtxVar, Hook, lifecycle
from hezar_train.metrics import MetricsHandler
from hezar_train.multi_model import MultiModelTrainer as PlainMultiModelTrainer
from hezar_train.plan import calculate_batch_epoch_num
from hezar_train.trainer import Trainer as PlainTrainer
from hezar_train.trainer.assemble import in_order
from hezar_train.trainer.export import exchanged_names
from hezar_train.trainer.model_runner import register_regularizer
from hezar_train.types import Mode

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "ASAM",
    "HOOK_TRIGGER",
    "LIFECYCLE",
    "MODE",
    "PLUGIN_ORDER",
    "SAM",
    "TRIGGER",
    "BaseTrainer",
    "Context",
    "CtxVar",
    "DittoTrainer",
    "FedProx",
    "GeneralMultiModelTrainer",
    "GeneralTorchTrainer",
    "MetricCalculator",
    "Monitor",
    "MultiModelTrainer",
    "RegularizedOptimizer",
    "Trainer",
    "TrainerConfig",
    "calculate_batch_epoch_num",
    "get_trainer",
    "is_larger_better",
    "lifecycle",
    "register_metric",
    "register_plugin",
    "register_regularizer",
    "register_trainer",
    "wrap_DittoTrainer",
    "wrap_fedprox_trainer",
    "wrap_regularized_optimizer",
    "wrap_sam_trainer",
]

MODE = Mode


class Trainer(PlainTrainer):
    """A Trainer whose data may be parsed in a way of its own, and whose model is saved round by round."""

    config: TrainerConfig

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


GeneralTorchTrainer = Trainer


class MultiModelTrainer(PlainMultiModelTrainer, Trainer):
    """Several models by name, `hezar_train.MultiModelTrainer`, with the names of this module's Trainer."""


class GeneralMultiModelTrainer(MultiModelTrainer):
    """FederatedScope's way to build it: a number of models alike, from one model or from a trainer.

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
        makes_own = type(self).init_multiple_models is not GeneralMultiModelTrainer.init_multiple_models
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


def wrap_DittoTrainer(  # noqa: N802 - the name that FederatedScope gives it
    base_trainer: PlainTrainer, regular_weight: float = 0.1, personal_steps: int | None = None
) -> federated.DittoTrainer:
    """Return a DittoTrainer of another trainer's config, model, data and hook objects."""
    return federated.wrap_DittoTrainer(base_trainer, regular_weight, personal_steps, kind=DittoTrainer)


def get_trainer(*given: Any, **settings: Any) -> Any:
    """Build a trainer by name, as `hezar_train.federated.get_trainer` does, with the names of this module's Trainer."""
    kinds: dict[Any, Any] = {PlainTrainer: Trainer, federated.DittoTrainer: DittoTrainer}
    return federated.get_trainer(*given, kinds=kinds, **settings)

"""FederatedScope's `GeneralMultiModelTrainer`: several models alike."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.multi_model.trainer import MultiModelTrainer
from hezar_train.trainer import Trainer

__all__ = ["GeneralMultiModelTrainer"]


class GeneralMultiModelTrainer(MultiModelTrainer):
    """FederatedScope's way to build it: a number of models alike, from one model or from a trainer.

    Of a trainer it takes the data, the collator, the preprocessor and copies of the model; the trainer stays as it is.
    """

    def __init__(
        self, model_nums: int, models_interact_mode: str = "sequential", model: nn.Module | None = None,
        data: Any = None, device: Any = None, config: TrainerConfig | None = None, base_trainer: Trainer | None = None,
        **others: Any,
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

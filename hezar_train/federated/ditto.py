"""Ditto: a worker trains a personal model beside the global one, with a proximal term towards the global one.

A call of `train()` first trains the personal model for a number of steps of its own, with `regular_weight` times its
distance from the global one added to the gradients, then the global one, plainly. The personal model is evaluated; the
global one is exchanged and counted. It stands still while the personal one learns, so two models and their optimizers
are all that a checkpoint has to hold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.loop import Context, Hook, HookSet, Moment
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.trainer import RoutineResult, Trainer
from hezar_train.trainer.export import exchanged_names, give_parameters, take_parameters

__all__ = ["GLOBAL", "PERSONAL", "DittoTrainer", "wrap_DittoTrainer"]

PERSONAL, GLOBAL = "personal", "global"


class DittoTrainer(MultiModelTrainer):
    """Train the models "personal" and "global" of one worker, one after the other."""

    def __init__(
        self,
        config: TrainerConfig,
        model: nn.Module | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        regular_weight: float = 0.1,
        personal_steps: int | None = None,
        **others: Any,
    ) -> None:
        """Take what a Trainer takes; `personal_steps` counts what `local_update_steps` counts, and is the same if None.

        The model is the global one; the personal one begins as a copy of it.
        """
        _refuse_misgiven(config, regular_weight, personal_steps)
        self._first_model, self._regular_weight = model, regular_weight
        self._personal_steps, self._counts = personal_steps, _SampleCounts()
        super().__init__(config, None, train_dataset, eval_dataset, eval_model=PERSONAL, **others)
        self.register_hooks([self._counts])
        self.register_hook_in_train(self.draw_to_global, Moment.BATCH_BACKWARD, PERSONAL)

    def init_multiple_models(self) -> Mapping[str, nn.Module]:
        """Return the global model and a copy of it."""
        model = self.build_model() if self._first_model is None else self._first_model
        if not isinstance(model, nn.Module):
            raise ConfigError(f"DittoTrainer needs the global model, a torch module; given: {model!r:.60}")
        return {PERSONAL: copy.deepcopy(model), GLOBAL: model}

    def steps_in_call(self, name: str) -> int:
        """Return the steps that a call trains a model for."""
        whole, local_steps = super().steps_in_call(name), self.config.local_update_steps
        if name == GLOBAL or self._personal_steps is None or local_steps is None:
            return whole
        return whole // local_steps * self._personal_steps

    def draw_to_global(self, ctx: Context) -> None:
        """Add the distance from the global model to the gradients of a whole window; a hook of the personal model."""
        if not ctx.closes_window:
            return
        pairs = zip(self.models[PERSONAL].parameters(), self.models[GLOBAL].parameters(), strict=True)
        with torch.no_grad():
            for own, other in pairs:
                if own.requires_grad:
                    pull = self._regular_weight * (own - other)
                    own.grad = pull if own.grad is None else own.grad + pull

    def train(self, target_data_split_name: str = "train", hooks_set: HookSet | None = None) -> RoutineResult:
        """Train both models; samples count for the global one, `train_total_local_model` has those of the personal."""
        result = super().train(target_data_split_name, hooks_set)
        personal, shared = self._counts.of_the_call(self.state.samples_seen)
        metrics = {**result.metrics, "train_total_local_model": float(personal)}
        return RoutineResult(shared, metrics, self.get_model_para)

    def run_facts(self) -> dict[str, Any]:
        return {
            **super().run_facts(),
            "regular_weight": self._regular_weight,
            "personal_steps": self._personal_steps,
        }

    def get_model_para(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return copies of the global model's parameters that are exchanged."""
        model = self.models[GLOBAL]
        return give_parameters(model, exchanged_names(model, self.config))

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        """Take parameters over into the global model."""
        model = self.models[GLOBAL]
        take_parameters(model, model_parameters, exchanged_names(model, self.config), strict=strict)


def wrap_DittoTrainer(  # noqa: N802 - the name that FederatedScope gives it
    base_trainer: Trainer, regular_weight: float = 0.1, personal_steps: int | None = None,
    kind: type[DittoTrainer] = DittoTrainer,
) -> DittoTrainer:  # fmt: skip
    """Return a DittoTrainer, of a `kind`, of another trainer's config, model, data and hook objects.

    A run that is to be resumed is built as a `DittoTrainer`: its checkpoints hold two models, which no other one reads.
    """
    if isinstance(base_trainer, MultiModelTrainer) or not issubclass(kind, type(base_trainer)):
        raise ConfigError(
            f"wrap_DittoTrainer was given a {type(base_trainer).__name__}, whose own methods would be lost; expected a "
            "plain Trainer. Write a subclass of DittoTrainer instead."
        )
    splits = base_trainer.splits
    return kind(
        base_trainer.config,
        unwrap(base_trainer.model),
        dict(splits.data) if splits.is_dict else base_trainer.train_dataset,
        base_trainer.eval_dataset,
        regular_weight=regular_weight,
        personal_steps=personal_steps,
        data_collator=base_trainer.data_collator,
        preprocessor=base_trainer.preprocessor,
        metrics_handler=base_trainer.metrics_handler,
        hooks=base_trainer.parts.checkpointing.hooks,
    )


class _SampleCounts(Hook):
    """Count the samples of each model in a call, also over a kill: where each model's part began is saved."""

    @property
    def name(self) -> str:
        return "DittoSampleCounts"

    def __init__(self) -> None:
        self._call_end: int | None = None
        self._starts: dict[str, int] = {}

    def on_fit_start(self, ctx: Context) -> None:
        """Note the samples seen so far; a part that goes on began earlier."""
        if self._call_end != ctx.state.call_end:
            self._call_end, self._starts = ctx.state.call_end, {}
        self._starts.setdefault((PERSONAL, GLOBAL)[ctx.cur_model_idx], ctx.state.samples_seen)

    def of_the_call(self, samples_seen: int) -> tuple[int, int]:
        """Return the samples that the personal and the global model were trained on in the last call."""
        middle = self._starts.get(GLOBAL, samples_seen)
        return middle - self._starts.get(PERSONAL, middle), samples_seen - middle

    def state_dict(self) -> dict[str, Any]:
        """Return the call and where its parts began."""
        return {"call_end": self._call_end, "starts": dict(self._starts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a call where it was left."""
        self._call_end, self._starts = state["call_end"], dict(state["starts"])


def _refuse_misgiven(config: TrainerConfig, regular_weight: Any, personal_steps: Any) -> None:
    is_number = isinstance(regular_weight, int | float) and not isinstance(regular_weight, bool)
    if not is_number or not 0 <= regular_weight < math.inf:
        raise ConfigError(f"Ditto has regular_weight={regular_weight!r}: give a number of at least 0")
    is_count = isinstance(personal_steps, int) and not isinstance(personal_steps, bool)
    if personal_steps is not None and (not is_count or personal_steps < 1):
        raise ConfigError(f"Ditto has personal_steps={personal_steps!r}: give a whole number of at least 1, or None")
    if config.local_update_steps is None:
        raise ConfigError("Ditto trains in rounds: set local_update_steps, what one call of train() does")

"""FederatedScope's names on the trainer: hook sets by mode, parameters in and out, splits, a config to assign."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hezar_train.checkpoint import load_round, round_tensors, unwrap, write_round
from hezar_train.data import parse_splits
from hezar_train.errors import HookError
from hezar_train.loop import HookCall, HookSet, Moment, name_of
from hezar_train.trainer.export import give_parameters, shared_names, take_parameters
from hezar_train.types import Mode

if TYPE_CHECKING:
    from torch import nn

    from hezar_train.config import TrainerConfig
    from hezar_train.runtime import Runtime

__all__ = ["FederatedView", "register_at"]

INSERT_MODES = ("before", "after")


class FederatedView:
    """What a federated worker asks of a trainer."""

    if TYPE_CHECKING:
        config: TrainerConfig
        model: nn.Module
        hooks: dict[Mode, HookSet]
        runtime: Runtime

        def _replan(self, config: TrainerConfig, splits: Any = None) -> None: ...

    @property
    def hooks_in_train(self) -> HookSet:
        """The hooks of training."""
        return self.hooks[Mode.TRAIN]

    @property
    def hooks_in_eval(self) -> HookSet:
        """The hooks of evaluation, of whatever split."""
        return self.hooks[Mode.VAL]

    @property
    def hooks_in_ft(self) -> HookSet:
        """The hooks of finetuning."""
        return self.hooks[Mode.FINETUNE]

    def register_hook_in_train(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to training: at a position (-1: the end), or before or after another one, else at the end."""
        register_at(self.hooks_in_train, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def register_hook_in_eval(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to evaluation, as `register_hook_in_train` does to training."""
        register_at(self.hooks_in_eval, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def register_hook_in_ft(
        self, new_hook: HookCall, trigger: str | Moment, insert_pos: int | None = None,
        base_hook: HookCall | str | None = None, insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to finetuning, as `register_hook_in_train` does to training."""
        register_at(self.hooks_in_ft, new_hook, trigger, insert_pos, base_hook, insert_mode)

    def reset_hook_in_train(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of training and return its position; without a name take all out and return -1."""
        return _reset(self.hooks_in_train, target_trigger, target_hook_name)

    def reset_hook_in_eval(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of evaluation and return its position; without a name take all out and return -1."""
        return _reset(self.hooks_in_eval, target_trigger, target_hook_name)

    def reset_hook_in_ft(self, target_trigger: str | Moment, target_hook_name: str | None = None) -> int:
        """Take a hook out of finetuning and return its position; without a name take all out and return -1."""
        return _reset(self.hooks_in_ft, target_trigger, target_hook_name)

    def replace_hook_in_train(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of training; without a name, of all."""
        _replace(self.hooks_in_train, new_hook, target_trigger, target_hook_name)

    def replace_hook_in_eval(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of evaluation; without a name, of all."""
        _replace(self.hooks_in_eval, new_hook, target_trigger, target_hook_name)

    def replace_hook_in_ft(
        self, new_hook: HookCall, target_trigger: str | Moment, target_hook_name: str | None
    ) -> None:
        """Put a hook in the place of another one of finetuning; without a name, of all."""
        _replace(self.hooks_in_ft, new_hook, target_trigger, target_hook_name)

    def parse_data(self, data: Any) -> Mapping[str, Any]:
        """Turn a dict of splits into `{split}_data`, `{split}_loader` and `num_{split}_data`; may be overridden."""
        return parse_splits(data)

    def get_model_para(self) -> Any:
        """Return copies, on the CPU, of the parameters that are exchanged."""
        return give_parameters(unwrap(self.model), self._exchanged())

    def update(self, model_parameters: Mapping[str, Any], strict: bool = False) -> None:
        """Take parameters over, as tensors, lists or numbers; only those that are exchanged."""
        take_parameters(unwrap(self.model), model_parameters, self._exchanged(), strict=strict)

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
        self._replan(config)

    def print_trainer_meta_info(self) -> str:
        """Return what a person wants to know: the model, what is exchanged, what stays, and the hooks."""
        exchanged = self._exchanged()
        kept = [name for name in unwrap(self.model).state_dict() if name not in set(exchanged)]
        return "\n".join(
            [
                f"model: {type(unwrap(self.model)).__name__}",
                f"exchanged: {', '.join(exchanged) or '-'}",
                f"local: {', '.join(kept) or '-'}",
                *(f"hooks of {mode}:\n{self.hooks[mode]}" for mode in (Mode.TRAIN, Mode.FINETUNE, Mode.VAL)),
            ]
        )

    def _exchanged(self) -> list[str]:
        config = self.config
        return shared_names(unwrap(self.model), config.local_param, with_untrained=config.share_non_trainable_para)


def register_at(
    hooks: HookSet, new_hook: HookCall, trigger: str | Moment, position: int | None,
    base_hook: HookCall | str | None, insert_mode: str,
) -> None:  # fmt: skip
    """Add a hook as `register_hook_in_train` does, to any set."""
    if insert_mode not in INSERT_MODES:
        raise HookError(f"insert_mode={insert_mode!r} is not known. Choose from: before, after.")
    if position is not None or base_hook is None:
        hooks.register(new_hook, trigger, position=position)
        return
    base = base_hook if isinstance(base_hook, str) else name_of(base_hook)
    hooks.register(new_hook, trigger, **{insert_mode: base})  # type: ignore[arg-type]


def _reset(hooks: HookSet, trigger: str | Moment, name: str | None) -> int:
    if name is not None:
        return hooks.remove(trigger, name)
    hooks.clear(trigger)
    return -1


def _replace(hooks: HookSet, new_hook: HookCall, trigger: str | Moment, name: str | None) -> None:
    if name is not None:
        hooks.replace(new_hook, trigger, name)
        return
    hooks.clear(trigger)
    hooks.register(new_hook, trigger)

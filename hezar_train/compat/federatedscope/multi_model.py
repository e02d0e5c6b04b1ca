"""FederatedScope's `GeneralMultiModelTrainer`: several models, each with an optimizer and a hook set, in one trainer.

In the mode "sequential" one model goes through its whole routine, then the next one. In the mode "parallel" all models
take turns at every trigger, on the same batch, and `_switch_model_ctx` stands between their hooks. Switching puts the
model and the optimizer into the context; what one model has made of a batch is put away until it has its turn again.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from typing import Any

import numpy as np
from torch import nn

from hezar_train.checkpoint import unwrap
from hezar_train.compat.federatedscope.builders import builder_for
from hezar_train.compat.federatedscope.context import LEARNING, Context
from hezar_train.compat.federatedscope.general import GeneralTorchTrainer, is_data
from hezar_train.errors import ConfigError, DataError, choices
from hezar_train.loop import HOOK_TRIGGER as TRIGGERS
from hezar_train.trainer.export import give_parameters, take_parameters
from hezar_train.types import Mode

__all__ = ["GeneralMultiModelTrainer"]

MODES = ("sequential", "parallel")
ROUND = "models_of_the_round"
"""Where the state keeps which models of a round are done."""
OF_THE_BATCH = frozenset({"cur_batch_i", "data_batch"})
"""Variables of a batch that all models share."""


MADE_ANEW = frozenset(
    {
        "cfg", "cur_mode", "cur_split", "data", "device", "lifecycles", "mirrored_models", "mode_stack", "model",
        "models", "monitor", "split_stack",
    }
)  # fmt: skip
"""Names of the context that are not those of the trainer that one is built from."""


class GeneralMultiModelTrainer(GeneralTorchTrainer):
    """Train several models; built from one model, which is copied, or from a trainer of one."""

    goes_on_with_own_loops = True  # `_run_routine` below knows which model a round was broken off with

    def __init__(
        self, model_nums: int, models_interact_mode: str = "sequential", model: nn.Module | None = None,
        data: Any = None, device: Any = None, config: Any = None, base_trainer: GeneralTorchTrainer | None = None,
        monitor: Any = None, **others: Any,
    ) -> None:  # fmt: skip
        if not isinstance(model_nums, int) or isinstance(model_nums, bool) or model_nums < 1:
            raise ConfigError(f"model_nums={model_nums!r} must be a whole number of models, at least 1")
        if models_interact_mode not in MODES:
            raise ConfigError(
                f"models_interact_mode={models_interact_mode!r} is not known. Choose from: {choices(MODES)}."
            )
        self._as_base: GeneralTorchTrainer | None = None
        copied: dict[int, Any] = {}
        if base_trainer is not None:
            _refuse_plain(base_trainer)
            self._as_base = _with_attributes_of(self, type(base_trainer))
            model = copy.deepcopy(unwrap(base_trainer.ctx.model), copied)
            data, device = base_trainer.ctx.data, base_trainer.ctx.device
            config, monitor = base_trainer.cfg, base_trainer.ctx.monitor
        if model is None or data is None or config is None:
            raise ConfigError("give model, data and config, or a base_trainer that has them")
        super().__init__(model, data, device, config, monitor=monitor, **others)
        if base_trainer is not None:
            self._take_over(base_trainer, copied)
        self.model_nums, self.models_interact_mode = model_nums, models_interact_mode
        self._put_away: dict[int, dict[str, Any]] = {}
        self.ctx.cur_model_idx = 0
        self.hooks_in_train_multiple_models = [self.hooks_in_train]
        self.hooks_in_eval_multiple_models = [self.hooks_in_eval]
        self.init_multiple_models()
        self.init_multiple_model_hooks()
        self._refuse_other_numbers()
        self.names_of_class |= set(vars(self))

    def _take_over(self, base: GeneralTorchTrainer, copied: dict[int, Any]) -> None:
        """Take over copies of a trainer's hooks, of its own attributes, and of what was put into its context.

        `copied` has what is copied already, so that whatever refers to the model refers to its copy. Hooks that are
        the other's methods stay methods of its class, with this trainer's attributes.
        """
        copied |= {id(base): self._as_base, id(base.ctx): self.ctx, id(base.cfg): self.cfg}
        for mode in ("train", "eval", "ft"):
            lists = dict(getattr(base, f"hooks_in_{mode}"))
            setattr(self, f"hooks_in_{mode}", defaultdict(list, copy.deepcopy(lists, copied)))
        for name, value in vars(base).items():
            if name not in base.names_of_class:
                setattr(self, name, copy.deepcopy(value, copied))
        own = {name: value for name, value in base.ctx.items() if name not in MADE_ANEW and not is_data(name)}
        self.ctx.merge_from_dict(copy.deepcopy(own, copied))

    def _setup_data_related_var_in_ctx(self, ctx: Context) -> None:
        """Parse the data as the trainer does that this one is built from."""
        if self._as_base is None:
            super()._setup_data_related_var_in_ctx(ctx)
        else:
            self._as_base._setup_data_related_var_in_ctx(ctx)

    def _refuse_other_numbers(self) -> None:
        counts = {
            "ctx.models": len(self.ctx.models),
            "hooks_in_train_multiple_models": len(self.hooks_in_train_multiple_models),
            "hooks_in_eval_multiple_models": len(self.hooks_in_eval_multiple_models),
        }
        if wrong := [f"{name} has {count}" for name, count in counts.items() if count != self.model_nums]:
            raise ConfigError(f"model_nums={self.model_nums}, but {choices(wrong)}: expected one for each model")

    def init_multiple_models(self) -> None:
        """Set `ctx.models` and `ctx.optimizers`: the model and copies of it; may be overridden."""
        others = [copy.deepcopy(self.ctx.model) for _ in range(self.model_nums - 1)]
        self.ctx.models = [self.ctx.model, *others]
        make = builder_for(self.cfg, "get_optimizer")
        self.ctx.optimizers = [make(model, **self.cfg.train.optimizer) for model in self.ctx.models]

    def register_multiple_model_hooks(self) -> None:
        """Give every model the hooks of the first; may be overridden."""
        for lists in (self.hooks_in_train_multiple_models, self.hooks_in_eval_multiple_models):
            lists.extend([lists[0]] * (self.model_nums - 1))

    def init_multiple_model_hooks(self) -> None:
        """Make the hook sets of all models: a list of sets in the mode sequential, one set in the mode parallel."""
        self.register_multiple_model_hooks()
        if self.models_interact_mode == "sequential":
            self.hooks_in_train = self.hooks_in_train_multiple_models
            self.hooks_in_eval = self.hooks_in_eval_multiple_models
            return
        self.hooks_in_train = self._in_turns(self.hooks_in_train_multiple_models)
        self.hooks_in_eval = self._in_turns(self.hooks_in_eval_multiple_models)

    def _in_turns(self, sets: list[Any]) -> Any:
        """Return one set in which the models' hooks follow one another at each trigger, with a switch after each."""
        switch = functools.partial(_switched, self)
        switch.__name__ = "_switch_model_ctx"  # type: ignore[attr-defined]
        turns = {trigger: [hook for one in sets for hook in (*one.get(trigger, ()), switch)] for trigger in TRIGGERS}
        return defaultdict(list, turns)

    def register_hook_in_train(  # type: ignore[override]
        self, new_hook: Any, trigger: str, model_idx: int = 0, insert_pos: int | None = None, base_hook: Any = None,
        insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to the training of one model, the first if none is named."""
        self._register_hook(base_hook, self._set_of("train", model_idx), insert_mode, insert_pos, new_hook, trigger)

    def register_hook_in_eval(  # type: ignore[override]
        self, new_hook: Any, trigger: str, model_idx: int = 0, insert_pos: int | None = None, base_hook: Any = None,
        insert_mode: str = "before",
    ) -> None:  # fmt: skip
        """Add a hook to the evaluation of one model, the first if none is named."""
        self._register_hook(base_hook, self._set_of("eval", model_idx), insert_mode, insert_pos, new_hook, trigger)

    def reset_hook_in_train(self, target_trigger: str, target_hook_name: str | None = None, model_idx: int = 0) -> int:
        """Take a hook out of the training of one model."""
        return self._reset_hook_in_trigger(self._set_of("train", model_idx), target_hook_name, target_trigger)

    def reset_hook_in_eval(self, target_trigger: str, target_hook_name: str | None = None, model_idx: int = 0) -> int:
        """Take a hook out of the evaluation of one model."""
        return self._reset_hook_in_trigger(self._set_of("eval", model_idx), target_hook_name, target_trigger)

    def _set_of(self, mode: str, model_idx: int) -> Any:
        """Return a model's hook set; while the trainer is built there is one for all."""
        sets = self.__dict__.get(f"hooks_in_{mode}_multiple_models")
        if sets is None:
            return self.hook_lists[mode]
        if not -len(sets) <= model_idx < len(sets):
            raise ConfigError(f"model_idx={model_idx}; expected 0 to {len(sets) - 1}")
        if (
            self.models_interact_mode == "parallel"
            and len(sets) == self.model_nums
            and self.hook_lists[mode] is not sets[0]
        ):
            raise ConfigError(
                "in the mode parallel the hooks of all models are one set, made when the trainer is built. Register "
                f"in an overridden register_multiple_model_hooks(), or change hooks_in_{mode}[trigger]."
            )
        return sets[model_idx]

    def _switch_model_ctx(self, next_model_idx: int | None = None) -> None:
        """Give the next model its turn; may be overridden."""
        index = (self.ctx.cur_model_idx + 1) % len(self.ctx.models) if next_model_idx is None else next_model_idx
        self.ctx.cur_model_idx = index
        self.ctx.model, self.ctx.optimizer = self.ctx.models[index], self.ctx.optimizers[index]

    def _run_routine(self, mode: str, hooks_set: Any, dataset_name: str | None = None) -> Any:
        """Run the routine of each model, one after another, or one routine in which they take turns."""
        if self.models_interact_mode == "parallel":
            self._put_away = {}
            return super()._run_routine(mode, hooks_set, dataset_name)
        _refuse_single_set(hooks_set, len(self.ctx.models))
        first, counts = self._place_among_models(mode)
        last = len(self.ctx.models) - 1
        for index in range(first, last + 1):
            if mode == Mode.TRAIN:
                self.state.model_index = index
                self.state.hooks[ROUND] = {"samples": [int(count) for count in counts], "has_next": index < last}
            self._switch_model_ctx(index)
            self.ctx.change_mode(mode)
            counts = [*counts, super()._run_routine(mode, hooks_set[index], dataset_name)]
        return np.mean(counts)

    def _place_among_models(self, mode: str) -> tuple[int, list[int]]:
        """Return the model that a round goes on with, and the samples of those before: at its start the first."""
        kept = self.state.hooks.get(ROUND, {"samples": [], "has_next": False})
        if mode != Mode.TRAIN or not self.kept_names.has_saved:
            return 0, []
        if self.call_is_open:
            return self.state.model_index, list(kept["samples"])
        if not kept["has_next"]:
            return 0, []
        return self.state.model_index + 1, [*kept["samples"], int(self.kept_names.value("num_samples", 0))]

    def turn_to_next(self) -> None:
        """Put away what a model has made of the batch, switch, and bring out what the next one has."""
        ctx = self.ctx
        names = (ctx.lifecycles.get("batch", set()) | ctx.lifecycles.get("routine", set())) - OF_THE_BATCH
        own = {name: ctx[name] for name in names if name in ctx}
        self._put_away[ctx.cur_model_idx] = own
        self._switch_model_ctx()
        for name in own:
            ctx.pop(name, None)
        for name, value in self._put_away.pop(ctx.cur_model_idx, {}).items():
            dict.__setitem__(ctx, name, value)
        if ctx.cur_mode in LEARNING or ctx.cur_mode is not None:
            ctx.change_mode(ctx.cur_mode)

    def get_model_para(self) -> Any:
        """Return copies of the exchanged parameters of each model; of a single one, not in a list."""
        found = [
            give_parameters(one, list(self._param_filter(one.state_dict()))) for one in map(unwrap, self.ctx.models)
        ]
        return found[0] if self.model_nums == 1 else found

    def update(self, model_parameters: Any, strict: bool = False) -> None:
        """Take parameters over: a dict for each model."""
        if self.model_nums == 1:
            super().update(model_parameters, strict=strict)
            return
        if not isinstance(model_parameters, list) or len(model_parameters) != self.model_nums:
            raise DataError(f"expected a list of {self.model_nums} dicts of parameters, one for each model")
        for model, given in zip(map(unwrap, self.ctx.models), model_parameters, strict=True):
            take_parameters(model, given, list(self._param_filter(model.state_dict())), strict=strict)


def _switched(trainer: GeneralMultiModelTrainer, _: Context) -> None:
    trainer.turn_to_next()


def _with_attributes_of(trainer: GeneralTorchTrainer, kind: type[GeneralTorchTrainer]) -> GeneralTorchTrainer:
    """Return a trainer as another class with the same attributes, now and later: its methods may call `super()`."""
    other = object.__new__(kind)
    object.__setattr__(other, "__dict__", vars(trainer))
    return other


def _refuse_plain(base: Any) -> None:
    if not isinstance(base, GeneralTorchTrainer):
        raise ConfigError(
            f"base_trainer is a {type(base).__name__}; expected a GeneralTorchTrainer. For several models of a plain "
            "config use hezar_train.compat.federatedscope.MultiModelTrainer."
        )


def _refuse_single_set(hooks_set: Any, count: int) -> None:
    if not isinstance(hooks_set, list) or len(hooks_set) != count:
        raise ConfigError(
            f"in the mode sequential the hooks are a list of {count} sets, one for each model; given: "
            f"{type(hooks_set).__name__}"
        )

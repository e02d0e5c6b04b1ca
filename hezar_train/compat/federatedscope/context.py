"""FederatedScope's Context: a dict of names that hooks read and write as attributes.

A name lives as long as the trainer unless it was set as a `CtxVar`, whose life `lifecycle` ends: a batch, an epoch, a
routine. Nothing is read only: what a hook assigns (`ctx.model`, `ctx.optimizer`, `ctx.loss_batch`, ...) is what the
default hooks then use. Lengths (`num_{split}_batch`, `num_{split}_epoch`, ...) are worked out from the config until
somebody sets them. What the loop below knows beside (`ctx.state`, `ctx.closes_window`, ...) can be read, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hezar_train.compat.federatedscope.builders import builder_for
from hezar_train.errors import DataError
from hezar_train.loop import Context as LoopContext
from hezar_train.loop import CtxVar
from hezar_train.plan import calculate_batch_epoch_num
from hezar_train.runtime import logger
from hezar_train.types import Mode

__all__ = ["LEARNING", "RELEASE", "Context", "lifecycle"]

LEARNING = frozenset({Mode.TRAIN, Mode.FINETUNE})
OF_THE_LOOP = frozenset(
    {
        "applied", "batch", "batch_in_window", "closes_window", "config", "failed", "grad_norm", "loss_value",
        "outputs", "state", "step", "storage", "window",
    }
)  # fmt: skip
CURRENT = ("mode", "split")
LENGTH = re.compile(r"num_(?P<total>total_)?(?P<split>\w+?)_(?P<what>batch_last_epoch|batch|epoch)")
LENGTHS = ("batch", "batch_last_epoch", "epoch", "total")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Release:
    """In what the installed FederatedScope differs from its documents; `stand_in()` finds it out."""

    has_mode_val: bool = True
    """Whether "val" is evaluated in the mode val; releases until 0.3 evaluate every split in the mode test."""
    filters_untrained: bool = True
    """Whether parameters and buffers that are not trained stay at home; releases until 0.3 exchange all."""
    finetunes_by_own_length: bool = True
    """Whether finetune() is as long as `finetune.local_update_steps` says; releases until 0.3 read those of `train`."""
    multiplies_epochs: bool = False
    """Whether `grad.grad_accum_count` makes more epochs, and not only more batches, of `local_update_steps`."""


RELEASE = Release()


class Context(dict[str, Any]):
    """The names of a trainer: `ctx.x`, `ctx["x"]`, `ctx.get("x")`, `del ctx.x`, `"x" in ctx`, `ctx.keys()`."""

    def __init__(
        self, model: Any, cfg: Any, data: Any = None, device: Any = None, init_dict: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        object.__setattr__(self, "_loop_context", None)
        self.lifecycles: dict[Any, set[str]] = {}
        self.cfg, self.model, self.data, self.device = cfg, model, data, device
        self.merge_from_dict({"cur_mode": None, "cur_split": None, "mode_stack": [], "split_stack": []})
        self.merge_from_dict(init_dict or {})
        self.setup_vars()

    def setup_vars(self) -> None:
        """Set what follows from config and model: criterion, regularizer, grad_clip, trainable_para_names."""
        self.trainable_para_names = [name for name, one in self.model.named_parameters() if one.requires_grad]
        self.criterion = builder_for(self.cfg, "get_criterion")(self.cfg.criterion.type, self.device)
        self.regularizer = builder_for(self.cfg, "get_regularizer")(self.cfg.regularizer.type)
        self.grad_clip = self.cfg.grad.grad_clip

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in CURRENT:
            return self[f"cur_{name}"]
        below = object.__getattribute__(self, "_loop_context")
        if name in OF_THE_LOOP and below is not None:
            return getattr(below, name)
        if (found := LENGTH.fullmatch(name)) is not None and "cfg" in self:
            return self._length(found)
        raise AttributeError(f"the context has no {name!r} at this moment")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(value, CtxVar):
            for names in self.lifecycles.values():
                names.discard(name)
            self.lifecycles.setdefault(value.lifecycle, set()).add(name)
            value = value.obj
        super().__setitem__(name, value)

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the context has no {name!r} at this moment")
        del self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a name's value, or `default` where it has none."""
        return getattr(self, name, default)

    def clear(self, lifecycle: Any = None) -> None:
        """Drop the variables whose life ends now; without a life nothing is dropped."""
        for name in self.lifecycles.pop(lifecycle, set()) if lifecycle is not None else ():
            self.pop(name, None)

    def merge_from_dict(self, other_dict: Mapping[str, Any]) -> None:
        """Set several names."""
        for name, value in other_dict.items():
            self[name] = value

    def follow(self, loop_context: LoopContext) -> None:
        """Show what the loop knows beside."""
        object.__setattr__(self, "_loop_context", loop_context)

    def track_mode(self, mode: str) -> None:
        """Enter a mode; the model is switched to it."""
        self.mode_stack.append(mode)
        self.cur_mode = mode
        self.change_mode(mode)

    def reset_mode(self) -> None:
        """Leave a mode for the one around it."""
        self.mode_stack.pop()
        self["cur_mode"] = self.mode_stack[-1] if self.mode_stack else None
        if self.cur_mode is not None:
            self.change_mode(self.cur_mode)

    def change_mode(self, mode: str) -> None:
        """Put the model into training or evaluation mode."""
        self.model.train(mode in LEARNING)

    def track_split(self, dataset: str) -> None:
        """Enter a split."""
        self.split_stack.append(dataset)
        self.cur_split = dataset

    def reset_split(self) -> None:
        """Leave a split for the one around it."""
        self.split_stack.pop()
        self["cur_split"] = self.split_stack[-1] if self.split_stack else None

    def check_split(self, target_split_name: str, skip: bool = False) -> bool:
        """Tell whether a split has data; raise where it has none, unless it may be skipped."""
        if self.get(f"{target_split_name}_data") is not None or self.get(f"{target_split_name}_loader") is not None:
            return True
        known = [
            name.removeprefix("num_").removesuffix("_data") for name in self if re.fullmatch(r"num_\w+_data", name)
        ]
        sentence = f"there is no split {target_split_name!r}. There are: {', '.join(known) or 'none'}."
        if not skip:
            raise DataError(sentence)
        logger.warning("%s Nothing was evaluated.", sentence)
        return False

    def names_with_a_life(self) -> dict[str, Any]:
        """Return the variables that end with a batch, an epoch or a routine, and their values."""
        names = {name for life, some in self.lifecycles.items() if life is not None for name in some}
        return {name: self[name] for name in names if name in self}

    def _length(self, asked: re.Match[str]) -> int:
        """Work out a length: of a mode that learns by its section of the config, of a split by one pass over it."""
        of, what = asked["split"], "total" if asked["total"] else asked["what"]
        size = int(self.cfg.dataloader.batch_size)
        is_learning = of in {"train", "finetune"}
        split = "train" if of == "finetune" else of
        count = self.get(f"num_{split}_data")
        if count is None:
            raise AttributeError(f"the context has no num_{split}_data, from which {asked[0]} follows")
        if not is_learning:
            steps = -(-count // size) if not self.cfg.dataloader.drop_last else count // size
            return 1 if what == "epoch" else int(steps)
        is_finetuning = of == "finetune" or self.cur_mode == Mode.FINETUNE
        section = self.cfg.finetune if is_finetuning and RELEASE.finetunes_by_own_length else self.cfg.train
        steps = int(section.local_update_steps)
        if section.batch_or_epoch == "batch" or RELEASE.multiplies_epochs:
            steps *= int(self.cfg.grad.grad_accum_count)
        numbers = calculate_batch_epoch_num(
            steps, section.batch_or_epoch, count, size, bool(self.cfg.dataloader.drop_last)
        )
        return int(numbers[LENGTHS.index(what)])


def lifecycle(lifecycle: Any) -> Callable[[F], F]:
    """Drop the variables of a life after a trainer's method, also when it fails.

    Around a whole routine, mode and split are entered and left as well, and what learns is counted, logged and saved.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def routine(self: Any, mode: str, hooks_set: Any, dataset_name: str | None = None) -> Any:
            return self.run_as_routine(mode, dataset_name or mode, lambda: method(self, mode, hooks_set, dataset_name))

        @functools.wraps(method)
        def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                result = method(self, *args, **kwargs)
                if lifecycle == "batch":
                    self._note_open_step()  # while its loss is there
                return result
            finally:
                self.ctx.clear(lifecycle)

        return routine if lifecycle == "routine" else limited  # type: ignore[return-value]

    return decorate

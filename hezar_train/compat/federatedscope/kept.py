"""What a checkpoint holds of FederatedScope's context and of a trainer's own attributes.

A round that is killed goes on only if what hooks put into the context goes on with it: counters, copies of weights,
models and optimizers of their own. Saved are plain values, tensors and arrays (also in lists and dicts), and the states
of modules, optimizers and schedules. An object that two names share is saved once. Values that end with a batch, data
and whatever cannot be stored are left out: hooks make them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, cast

from torch import nn

from hezar_train.checkpoint.format import pack
from hezar_train.checkpoint.optimizer_state import load_state
from hezar_train.errors import CheckpointError
from hezar_train.loop import Hook

__all__ = ["KeptNames"]

VALUE, STATE, SAME, LIST = "value", "state", "same", "list"
CURRENT = frozenset({"model", "optimizer", "scheduler"})
"""Names that stand for one object now and for another one later, so that another name has its state."""
Owners = dict[int, str]


class KeptNames(Hook):
    """Save names of the context and of the trainer in every checkpoint, and put them back."""

    def __init__(
        self,
        names: Callable[[], Mapping[str, Any]],
        known: Callable[[], Mapping[str, Any]],
        put: Callable[[str, Any], None],
        model: Callable[[], nn.Module],
        ends_with_round: Callable[[], Collection[str]],
    ) -> None:
        """Save what `names` returns; what is `known` is saved elsewhere, and `put` sets a name again."""
        self._names, self._known, self._put, self._model = names, known, put, model
        self._ends_with_round = ends_with_round
        self._saved: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        return "FederatedScopeNames"

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint was read whose names are not all put back yet."""
        return bool(self._saved)

    def value(self, name: str, default: Any = None) -> Any:
        """Return a plain value that the checkpoint has under a name and that is not put back yet."""
        return self._saved.get("names", {}).get(name, {}).get(VALUE, default)

    def state_dict(self) -> dict[str, Any]:
        """Return the names with what can be stored of each."""
        owners = {id(value): name for name, value in self._known().items()}
        names = sorted(self._names().items(), key=lambda item: item[0] in CURRENT)
        kept = {name: form for name, value in names if (form := _form(name, value, owners)) is not None}
        frozen = [name for name, one in self._model().named_parameters() if not one.requires_grad]
        return {"names": kept, "frozen": frozen, "of_round": sorted(self._ends_with_round())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Note what the checkpoint has; it is put back when a routine begins."""
        names = state.get("names")
        if not isinstance(names, Mapping) or not all(map(_is_form, names.values())):
            raise CheckpointError("the stored names of the context are not of the form that is kept")
        if not all(_are_texts(state.get(name)) for name in ("frozen", "of_round")):
            raise CheckpointError("the stored names of frozen parameters and of a round are no names")
        self._saved = state

    def put_back(self, *, is_last: bool) -> None:
        """Put back what can be: values at once, states into the objects that hooks have made by now.

        `is_last` says that a round goes on and no hook will make more of them: then what is missing raises, and what
        ends with a round is put back, too.
        """
        left_out = set() if is_last else set(self._saved.get("of_round", ()))
        forms = {name: form for name, form in self._saved.get("names", {}).items() if name not in left_out}
        there = {**self._names(), **self._known()}
        for name, form in forms.items():
            self._restore(name, form, there, is_last=is_last)
        for name, form in forms.items():
            if form["kind"] == SAME and form["of"] in there:
                self._put(name, there[form["of"]])
        frozen = set(self._saved.get("frozen", ()))
        for name, one in self._model().named_parameters():
            one.requires_grad_(name not in frozen)
        if is_last:
            self._saved = {}

    def forget(self) -> None:
        """Put nothing more back: another round has begun."""
        self._saved = {}

    def _restore(self, name: str, form: Mapping[str, Any], there: dict[str, Any], *, is_last: bool) -> None:
        kind, target = form["kind"], cast("Any", there.get(name))
        if kind == VALUE:
            self._put(name, form[VALUE])
        elif kind == STATE and _is_stateful(target):
            load_state(target, form[STATE], f"ctx.{name}")
            if isinstance(target, nn.Module):
                for parameter_name, one in target.named_parameters():
                    one.requires_grad_(parameter_name not in form["frozen"])
        elif kind == LIST and isinstance(target, list) and len(target) == len(form["items"]):
            for number, (one, of) in enumerate(zip(target, form["items"], strict=True)):
                self._restore(f"{name}.{number}", of, {**there, f"{name}.{number}": one}, is_last=is_last)
        elif kind in {STATE, LIST} and is_last:
            raise CheckpointError(
                f"the checkpoint has a state for ctx.{name}, which no hook at on_fit_start or wrap function has made. "
                "Build the trainer as it was built before, or begin another run."
            )


def _is_form(form: Any) -> bool:
    """Tell whether something has a form that `_form` returns."""
    match form:
        case {"kind": "value", "value": _} | {"kind": "same", "of": str()} if len(form) == 2:
            return True
        case {"kind": "state", "state": Mapping(), "frozen": frozen} if len(form) == 3:
            return _are_texts(frozen)
        case {"kind": "list", "items": list(items)} if len(form) == 2:
            return all(map(_is_form, items))
    return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def _form(name: str, value: Any, owners: Owners) -> dict[str, Any] | None:
    """Return what is stored of a value; None: nothing."""
    if _is_stateful(value) or (isinstance(value, list) and value and _is_stateful(value[0])):
        return _shared_form(name, value, owners)
    try:
        pack(value)
    except CheckpointError:
        return None
    return {"kind": VALUE, VALUE: value}


def _shared_form(name: str, value: Any, owners: Owners) -> dict[str, Any]:
    if id(value) in owners:
        return {"kind": SAME, "of": owners[id(value)]}
    if isinstance(value, list):
        return {
            "kind": LIST,
            "items": [_shared_form(f"{name}.{number}", one, owners) for number, one in enumerate(value)],
        }
    owners[id(value)] = name
    frozen = [one for one, parameter in _parameters(value) if not parameter.requires_grad]
    return {"kind": STATE, STATE: value.state_dict(), "frozen": frozen}


def _parameters(value: Any) -> Iterator[tuple[str, nn.Parameter]]:
    return value.named_parameters() if isinstance(value, nn.Module) else iter(())


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")

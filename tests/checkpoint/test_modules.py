from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import load_module_state, module_state, unwrap
from hezar_train.errors import CheckpointError

Bits = Callable[[Any], object]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen: Any = {"count": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Lenient(nn.Module):
    def __init__(self, first: str = "a") -> None:
        super().__init__()
        self.add_module(first, nn.Linear(2, 2))
        self.add_module("b", nn.Linear(2, 2))

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("a model's own load_state_dict must not be used")


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def test_values_are_loaded_into_the_same_parameters(bits_of: Bits) -> None:
    source, target = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    source(torch.randn(8, 3))
    before = [id(value) for value in [*target.parameters(), *target.buffers()]]
    load_module_state(target, *module_state(source))
    assert bits_of(target.state_dict()) == bits_of(source.state_dict())
    assert [id(value) for value in [*target.parameters(), *target.buffers()]] == before


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    tensors, meta = module_state(Tied())
    assert list(tensors) == ["embed.weight"]
    assert isinstance(meta, dict)
    assert meta["aliases"] == {"head.weight": "embed.weight"}
    target = Tied()
    load_module_state(target, tensors, meta)
    assert target.head.weight is target.embed.weight
    assert torch.equal(target.head.weight, tensors["embed.weight"])


def test_overlapping_views_are_stored_apart() -> None:
    module = nn.Module()
    memory = torch.arange(6.0)
    for name, view in {"whole": memory, "part": memory[:3], "grid": memory.view(2, 3)}.items():
        module.register_buffer(name, view)
    tensors, meta = module_state(module)
    assert set(tensors) == {"whole", "part", "grid"}
    assert isinstance(meta, dict)
    assert meta["aliases"] == {}


def test_values_that_are_no_longer_tied_are_refused() -> None:
    target = Tied()
    apart = Tied()
    apart.head.weight = nn.Parameter(torch.randn(5, 3))
    with pytest.raises(CheckpointError, match=r"no longer tied: head\.weight and embed\.weight"):
        load_module_state(target, *module_state(apart))


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        lambda model: nn.DataParallel(torch.compile(model)),
        lambda model: torch.compile(nn.DataParallel(model)),
        Wrapper,
    ],
)
def test_wrappers_leave_no_trace_in_the_names(wrap: Callable[[Any], Any], bits_of: Bits) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = wrap(model)
    assert unwrap(wrapped) is model
    assert bits_of(module_state(wrapped)) == bits_of(module_state(model))
    load_module_state(wrapped, *module_state(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))


def test_a_compiled_submodule_leaves_no_trace_either(bits_of: Bits) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    plain = module_state(model)
    half = nn.Sequential(model[0], torch.compile(model[1]))
    assert any("_orig_mod" in name for name in half.state_dict())
    assert bits_of(module_state(half)) == bits_of(plain)
    fresh = nn.Sequential(nn.Linear(2, 3), torch.compile(nn.BatchNorm1d(3)))
    load_module_state(fresh, *plain)
    assert bits_of(module_state(fresh)) == bits_of(plain)


def test_extra_state_is_kept_with_its_types(bits_of: Bits) -> None:
    source, target = Counting(), Counting()
    source.seen = {"count": 3, "shape": (1, 2), 0: torch.ones(2)}
    tensors, meta = module_state(source)
    load_module_state(target, tensors, meta)
    assert bits_of(target.seen) == bits_of(source.seen)
    assert target.seen["shape"] == (1, 2)


def test_extra_state_may_be_a_tensor_of_any_size() -> None:
    source, target = Counting(), Counting()
    source.seen, target.seen = torch.arange(7), torch.arange(2)
    load_module_state(target, *module_state(source))
    assert torch.equal(target.seen, torch.arange(7))


def test_loading_goes_by_name_and_never_through_the_models_own_lenient_method() -> None:
    load_module_state(Lenient(), *module_state(Lenient()))
    with pytest.raises(CheckpointError) as caught:
        load_module_state(Lenient("a"), *module_state(Lenient("c")))
    assert "does not fit the model Lenient" in str(caught.value)
    assert "missing in the checkpoint: a.weight, a.bias" in str(caught.value)
    assert "not in the model: c.weight, c.bias" in str(caught.value)


def test_other_shapes_and_dtypes_are_refused_and_nothing_is_touched() -> None:
    target = nn.Linear(2, 3)
    before = target.bias.detach().clone()
    tensors, meta = module_state(nn.Linear(4, 3))
    with pytest.raises(
        CheckpointError, match=r"weight \(model \[3, 2\] torch.float32, checkpoint \[3, 4\] torch.float32\)"
    ):
        load_module_state(target, tensors, meta)
    with pytest.raises(CheckpointError, match=r"torch\.bfloat16"):
        load_module_state(target, *module_state(nn.Linear(2, 3).bfloat16()))
    assert torch.equal(target.bias, before)


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        target = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    source = module_state(nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)))
    with pytest.raises(CheckpointError, match=r"0\.weight \(model on the meta device") as caught:
        load_module_state(target, *source)
    assert "tied" not in str(caught.value)


def test_versions_of_modules_are_kept() -> None:
    _, meta = module_state(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
    assert isinstance(meta, dict)
    assert meta["versions"] == {"1": 2}


def test_a_lazy_module_is_refused_until_it_has_seen_a_batch() -> None:
    with pytest.raises(CheckpointError, match="weight is not initialised yet"):
        module_state(nn.LazyLinear(3))
    target = nn.LazyLinear(3)
    load_module_state(target, *module_state(nn.Linear(2, 3)))
    assert target.weight.shape == (3, 2)


def test_what_is_no_name_in_a_file_is_told_as_what_does_not_fit() -> None:
    model = nn.Linear(2, 1)
    tensors, meta = module_state(model)
    with pytest.raises(CheckpointError, match=r"not in the model: \(1, 'x'\)"):
        load_module_state(model, {**tensors, (1, "x"): torch.zeros(1)}, meta)  # type: ignore[dict-item]

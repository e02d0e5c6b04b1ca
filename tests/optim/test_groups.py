from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from hezar_train.errors import ConfigError
from hezar_train.optim import build_optimizer, largest_group, parameter_groups

CPU = torch.device("cpu")


class OwnRMSNorm(nn.Module):
    """A layer that normalises, as models bring their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), OwnRMSNorm(), nn.LSTM(4, 4))
    made.append(made[0])  # a shared layer
    return made


def kinds(**decays: Any) -> dict[float, set[str]]:
    """Return the names of the parameters with each weight decay."""
    made = model()
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    groups = parameter_groups(made, weight_decay=0.5, **decays)
    return {group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


WEIGHTS = {"0.weight", "4.weight_ih_l0", "4.weight_hh_l0"}
BIASES = {"0.bias", "4.bias_ih_l0", "4.bias_hh_l0"}
NORM_WEIGHTS = {"1.weight", "2.weight", "3.weight"}
NORM_BIASES = {"1.bias", "2.bias"}


def test_norms_and_biases_have_groups_of_their_own() -> None:
    assert kinds(weight_decay_norm=0.1, weight_decay_bias=0.0) == {
        0.5: WEIGHTS,
        0.1: NORM_WEIGHTS,
        0.0: BIASES | NORM_BIASES,
    }


def test_none_leaves_a_kind_where_it_would_be_otherwise() -> None:
    assert kinds() == {0.5: WEIGHTS | BIASES | NORM_WEIGHTS | NORM_BIASES}
    assert kinds(weight_decay_norm=0.0) == {0.5: WEIGHTS | BIASES, 0.0: NORM_WEIGHTS | NORM_BIASES}
    assert kinds(weight_decay_bias=0.0) == {0.5: WEIGHTS | NORM_WEIGHTS, 0.0: BIASES | NORM_BIASES}


def test_each_parameter_is_in_exactly_one_group_and_no_frozen_one_in_any() -> None:
    made = model()
    made[0].weight.requires_grad_(False)
    groups = parameter_groups(made, weight_decay=0.5, weight_decay_norm=0.0, weight_decay_bias=0.0)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(found) == len(set(found))
    assert set(found) == {id(parameter) for parameter in made.parameters() if parameter.requires_grad}


def test_one_group_is_the_plain_list_of_parameters() -> None:
    made = model()
    (group,) = parameter_groups(made, weight_decay=0.5)
    assert [id(one) for one in group["params"]] == [id(one) for one in made.parameters()]


def test_the_groups_reach_the_optimizer() -> None:
    groups = parameter_groups(model(), weight_decay=0.01, weight_decay_norm=0.0, weight_decay_bias=0.0)
    optimizer = build_optimizer("adamw", groups, learning_rate=1e-4, weight_decay=0.01, device=CPU)
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [
        (0.01, 1e-4),
        *[(0.0, 1e-4)] * 2,
    ]


def test_a_decay_that_the_optimizer_would_not_look_at_is_refused() -> None:
    groups = parameter_groups(model(), weight_decay=0.0, weight_decay_norm=0.1)
    with pytest.raises(ConfigError, match=r"has no weight decay, but there are parameter groups with 0\.1"):
        build_optimizer("rprop", groups, learning_rate=0.1, weight_decay=0.0, device=CPU)


def test_the_largest_group_is_the_one_with_the_most_values() -> None:
    sizes = (3, 50, 7)
    assert largest_group(SGD([{"params": [nn.Parameter(torch.ones(size))]} for size in sizes], lr=0.1)) == 1

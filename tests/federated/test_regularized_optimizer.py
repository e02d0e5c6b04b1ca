from __future__ import annotations

import pytest
import torch
from torch import nn

from hezar_train.errors import ConfigError
from hezar_train.federated import wrap_regularized_optimizer

RATE, WEIGHT = 0.1, 0.5


def test_a_step_goes_along_the_gradient_and_towards_the_reference() -> None:
    parameter = nn.Parameter(torch.tensor([3.0, -4.0]))
    wrapped = wrap_regularized_optimizer(torch.optim.SGD([parameter], lr=RATE), WEIGHT)
    reference = torch.tensor([1.0, 1.0])
    wrapped.set_compared_para_group([{"params": [reference]}])
    parameter.square().sum().backward()
    before, gradient = parameter.detach().clone(), parameter.grad.clone()
    wrapped.step()
    assert torch.allclose(parameter, before - RATE * (gradient + WEIGHT * (before - reference)), atol=1e-6)


def test_the_reference_is_a_copy_and_the_optimizer_stays_itself() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    wrapped = wrap_regularized_optimizer(optimizer, WEIGHT)
    wrapped.reset_compared_para_group()
    for expected in (1 - RATE, 1 - 2 * RATE - RATE * WEIGHT * -RATE):
        parameter.grad = torch.ones(2)
        optimizer.step()  # whoever steps it
        assert torch.allclose(parameter, torch.full((2,), expected), atol=1e-6)
    assert wrapped.param_groups is optimizer.param_groups
    wrapped.zero_grad()
    assert parameter.grad is None


def test_without_a_reference_or_a_gradient_nothing_is_added() -> None:
    parameter, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    wrapped = wrap_regularized_optimizer(torch.optim.SGD([parameter, unused], lr=RATE), WEIGHT)
    parameter.grad = torch.ones(2)
    wrapped.step()
    assert parameter.tolist() == pytest.approx([0.9, 0.9])
    wrapped.set_compared_para_group([{"params": [torch.zeros(2), torch.zeros(2)]}])
    wrapped.step()
    assert unused.tolist() == [1.0, 1.0]


def test_groups_of_another_form_are_refused() -> None:
    wrapped = wrap_regularized_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=RATE), WEIGHT)
    with pytest.raises(ConfigError, match=r"have the shapes .*3.* the optimizer's are .*2"):
        wrapped.set_compared_para_group([{"params": [torch.zeros(3)]}])

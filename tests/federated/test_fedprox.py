from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.federated import FedProx, wrap_fedprox_trainer, wrap_regularized_optimizer
from hezar_train.loop import Context
from hezar_train.multi_model import MultiModelTrainer

Build = Callable[..., Trainer]
Read = Callable[[Trainer], torch.Tensor]
MU = 0.7
RATE, WEIGHT = 0.1, 0.5


class Gradients(Hook):
    """Note the gradient of each window at its own place among the hooks, and the weights."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []

    def on_batch_backward(self, ctx: Context) -> None:
        if ctx.closes_window:
            self.gradients.append(ctx.model.layer.weight.grad.clone())
            self.weights.append(ctx.model.layer.weight.detach().clone())


class Crash(Hook):
    """Fail before a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def before_step(self) -> None:
        if self.trainer.state.global_step == self._step:
            raise RuntimeError("killed")


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_gradient_is_the_plain_one_and_the_pull(worker: Build, accumulation: int) -> None:
    plain, pulled = Gradients(), Gradients()
    hooks = [plain, FedProx(MU), pulled]
    worker(gradient_accumulation_steps=accumulation, arguments={"hooks": hooks}).train()
    start, *_ = plain.weights
    assert not torch.equal(plain.weights[-1], start)
    for before, after, weight in zip(plain.gradients, pulled.gradients, plain.weights, strict=True):
        assert torch.allclose(after - before, MU * (weight - start), atol=1e-6)


def test_hooks_see_the_value_of_the_pull_and_the_log_does_not(worker: Build, rows: Any) -> None:
    seen: list[tuple[float, float]] = []

    def note(ctx: Context) -> None:
        far = sum((p.detach() - ctx.weight_init[name]).square().sum() for name, p in ctx.model.named_parameters())
        seen.append((float((ctx.loss_task - ctx.loss_batch).detach()), MU / 2 * float(far)))

    data = rows(1)
    trainer = worker(num_epochs=3, arguments={"train_dataset": data, "hooks": [FedProx(MU)]})
    trainer.register_hook_in_train(note, "on_batch_backward", insert_pos=0)
    first = trainer.evaluate(data)["loss"]
    trainer.train()
    assert [value for value, _ in seen] == [pytest.approx(expected, abs=1e-6) for _, expected in seen]
    assert seen[-1][1] > 0
    assert trainer.state.loss_tracker_sum / 3 < first  # a pull of ten times the loss would show


def test_the_starting_point_is_gone_when_the_call_ends(worker: Build) -> None:
    hook = FedProx(MU)
    trainer = worker(arguments={"hooks": [hook]})
    during: list[int] = []
    trainer.register_hook_in_train(lambda ctx: during.append(len(hook.state_dict()["start"])), "on_batch_end")
    trainer.train()
    assert during == [2] * 5
    assert hook.state_dict() == {}
    assert "weight_init" not in trainer.ctx


def test_each_call_starts_from_the_weights_that_it_was_given(worker: Build) -> None:
    starts: list[list[float]] = []
    trainer = wrap_fedprox_trainer(worker(local_update_steps=3), MU)
    trainer.register_hook_in_train(lambda ctx: starts.append(ctx.weight_init["layer.bias"].tolist()), "on_fit_start")
    for bias in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        trainer.update({"layer.bias": bias})
        trainer.train()
    assert starts == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.mark.parametrize("step", [4, 5, 7])
def test_a_call_that_was_killed_goes_on_towards_its_own_starting_point(
    worker: Build, weights_of: Read, step: int
) -> None:
    settings = {"local_update_steps": 4, "save_steps": 1, "resume_from_checkpoint": True}
    unbroken = worker(out="unbroken", arguments={"hooks": [FedProx(MU)]}, **settings)
    unbroken.train()
    unbroken.train()
    broken = worker(arguments={"hooks": [FedProx(MU), Crash(step)]}, **settings)
    broken.train()
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    resumed = worker(arguments={"hooks": [FedProx(MU)]}, **settings)
    assert resumed.state.global_step == step
    while resumed.state.global_step < 8:
        resumed.train()
    assert torch.equal(weights_of(resumed), weights_of(unbroken))


def test_a_whole_run_that_was_killed_keeps_its_starting_point(worker: Build, weights_of: Read) -> None:
    settings = {"num_epochs": 2, "save_steps": 3, "resume_from_checkpoint": True}
    unbroken = worker(out="unbroken", arguments={"hooks": [FedProx(MU)]}, **settings)
    unbroken.train()
    with pytest.raises(RuntimeError, match="killed"):
        worker(arguments={"hooks": [FedProx(MU), Crash(7)]}, **settings).train()
    resumed = worker(arguments={"hooks": [FedProx(MU)]}, **settings)
    resumed.train()
    assert torch.equal(weights_of(resumed), weights_of(unbroken))
    assert not torch.equal(weights_of(resumed), weights_of(worker(out="other")))


def test_finetuning_is_pulled_to_its_own_start_and_leaves_that_of_the_training(worker: Build) -> None:
    starts: list[tuple[str, list[float]]] = []
    trainer = wrap_fedprox_trainer(worker(max_steps=2, finetune_steps=1), MU)

    def note(ctx: Context) -> None:
        starts.append((str(ctx.mode), ctx.weight_init["layer.bias"].tolist()))

    trainer.register_hook_in_ft(note, "on_fit_end")
    trainer.register_hook_in_train(note, "on_fit_end")
    trainer.register_hook_in_train(lambda ctx: trainer.finetune() and None, "on_epoch_end")
    first = trainer.get_model_para()["layer.bias"].tolist()
    trainer.train()
    assert [mode for mode, _ in starts] == ["finetune", "train"]
    assert starts[0][1] != first
    assert starts[1][1] == first


@pytest.mark.parametrize("mu", [-1, float("nan"), "much", True])
def test_a_factor_that_is_none_is_refused(mu: Any) -> None:
    with pytest.raises(ConfigError, match="FedProx has mu="):
        FedProx(mu)


def test_a_trainer_of_several_models_is_refused(tmp_path: Any, rows: Any) -> None:
    models = {"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)}
    trainer = MultiModelTrainer(TrainerConfig(tmp_path, criterion="CrossEntropyLoss"), models, rows())
    with pytest.raises(ConfigError, match="FedProx goes with a Trainer of one model; this one has: one, two"):
        wrap_fedprox_trainer(trainer, MU)


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

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hezar_train.errors import ConfigError
from hezar_train.optim import DirectStep, build_optimizer, largest_group, optimizer_names, parameter_groups

CPU = torch.device("cpu")


class KeywordOptimizer(SGD):
    """An optimizer of a user's own, with keywords that it does not name."""

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **keywords)


def optimizer_without_rate(params: Any) -> Optimizer:
    return SGD(params, lr=1.0)


def not_an_optimizer(params: Any, lr: float) -> str:
    return "nothing"


def build(name: str, parameters: Any = None, weight_decay: float = 0.0, device: torch.device = CPU, **kwargs: Any):
    parameters = [nn.Parameter(torch.ones(2, 3))] if parameters is None else parameters
    return build_optimizer(
        name, parameters, learning_rate=0.01, weight_decay=weight_decay, kwargs=kwargs or None, device=device
    )


def build_with_momentum(name: str, **kwargs: Any) -> Optimizer:
    parameters = [nn.Parameter(torch.ones(2, 3))]
    return build_optimizer(
        name, parameters, learning_rate=0.01, weight_decay=0.0, kwargs=kwargs, device=CPU, momentum=0.6
    )


def step_on_a_tiny_model(name: str) -> float:
    """Return how far one step moves the weights."""
    model = nn.Embedding(4, 3, sparse=True) if name == "sparseadam" else nn.Linear(3, 4, bias=name != "muon")
    optimizer = build(name, model.parameters())
    before = model.weight.detach().clone()
    output = model(torch.tensor([1, 2])) if name == "sparseadam" else model(torch.ones(2, 3))
    output.square().sum().backward()
    optimizer.step()
    return (model.weight.detach() - before).abs().max().item()


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_of_torch_is_built_by_name_and_takes_a_step(name: str) -> None:
    assert step_on_a_tiny_model(name) > 0


def test_the_list_of_names_is_every_class_of_torch_but_lbfgs() -> None:
    assert optimizer_names() == (
        [
            "adadelta",
            "adafactor",
            "adagrad",
            "adam",
            "adamax",
            "adamw",
            "asgd",
            "muon",
            "nadam",
            "radam",
            "rmsprop",
            "rprop",
            "sgd",
            "sparseadam",
        ]
    )


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW", "torch.optim.AdamW"])
def test_a_name_is_read_in_any_case_and_as_a_dotted_path(name: str) -> None:
    assert type(build(name)) is AdamW


def test_rate_and_decay_arrive_in_the_groups_with_the_keywords() -> None:
    group = build("sgd", weight_decay=0.2, momentum=0.9).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.01, 0.2, 0.9)


def test_the_decay_of_the_config_replaces_the_default_of_adamw() -> None:
    assert build("adamw").param_groups[0]["weight_decay"] == 0.0


@pytest.mark.parametrize(("name", "cls"), [("adam", Adam), ("adamw", AdamW), ("sgd", SGD), ("adagrad", Adagrad)])
def test_fused_is_on_where_the_class_and_the_cpu_have_it(name: str, cls: type[Optimizer]) -> None:
    optimizer = build(name)
    assert type(optimizer) is cls
    assert optimizer.param_groups[0]["fused"] is True


def test_fused_is_left_out_where_the_class_has_none() -> None:
    assert "fused" not in build("rmsprop").param_groups[0]


@pytest.mark.parametrize("kwargs", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}])
def test_a_kernel_that_the_user_chose_is_left_alone(kwargs: dict[str, bool]) -> None:
    assert not build("adam", **kwargs).param_groups[0]["fused"]


def test_fused_is_off_on_a_device_without_the_kernel() -> None:
    assert build("adamw", device=torch.device("meta")).param_groups[0]["fused"] is None
    assert build("adagrad", device=torch.device("cuda")).param_groups[0]["fused"] is None
    assert build("sgd", device=torch.device("cuda")).param_groups[0]["fused"] is True


def test_fused_is_off_for_complex_parameters() -> None:
    assert build("adam", [nn.Parameter(torch.ones(2, dtype=torch.complex64))]).param_groups[0]["fused"] is None


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    assert [p is model.weight for p in build("adam", model.parameters()).param_groups[0]["params"]] == [True]


def test_groups_keep_their_own_rate_and_lose_their_frozen_parameters() -> None:
    free, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = build("sgd", [{"params": [free, frozen], "lr": 0.5}, {"params": [frozen]}])
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 1)]


def test_a_model_without_a_trainable_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        build("adam", [nn.Parameter(torch.ones(2), requires_grad=False)])


def test_an_unknown_name_is_told_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"optimizer='adamx' is not known\. Known: adadelta.*Did you mean 'adamax'\?"):
        build("adamx")


def test_lbfgs_is_refused_with_the_reason_by_name_and_by_path() -> None:
    for name in ("lbfgs", "torch.optim.LBFGS"):
        with pytest.raises(ConfigError, match="closure"):
            build(name)


def test_muon_with_a_vector_is_refused_with_what_to_do() -> None:
    assert type(build("muon")) is Muon
    with pytest.raises(ConfigError, match=r"only supports 2D.*Muon trains matrices only"):
        build("muon", [nn.Parameter(torch.ones(2))])


def test_unknown_keywords_are_all_told_with_the_accepted_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        build("sgd", momentun=0.9, dampen=0.1)
    assert len(caught.value.problems) == 2
    assert "It takes: dampening, differentiable, foreach, fused, maximize, momentum, nesterov." in str(caught.value)
    assert "Did you mean 'momentum'?" in caught.value.problems[0]


def test_rate_and_decay_among_the_keywords_point_to_their_fields() -> None:
    with pytest.raises(ConfigError) as caught:
        build("adam", lr=0.1, weight_decay_=0.1)
    assert caught.value.problems == [
        "optimizer='adam': 'lr' among the keyword arguments. Set the field 'learning_rate' instead."
    ]


def test_weight_decay_for_a_class_without_it_is_refused() -> None:
    assert build("rprop").param_groups[0]["lr"] == 0.01
    with pytest.raises(ConfigError, match=r"has no weight decay, but weight_decay=0.1\. Set weight_decay=0"):
        build("rprop", weight_decay=0.1)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "muon"])
def test_the_momentum_arrives_in_the_groups(name: str) -> None:
    assert build_with_momentum(name).param_groups[0]["momentum"] == 0.6


@pytest.mark.parametrize(("name", "second"), [("adamw", 0.999), ("nadam", 0.999), ("adamax", 0.999)])
def test_the_momentum_of_the_adams_is_their_first_beta(name: str, second: float) -> None:
    assert build_with_momentum(name).param_groups[0]["betas"] == (0.6, second)


def test_the_momentum_makes_nesterov_possible() -> None:
    assert build_with_momentum("sgd", nesterov=True).param_groups[0]["nesterov"] is True


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("adagrad", {}, r"optimizer='adagrad' has no momentum, but momentum=0\.6\. Leave it out"),
        ("sgd", {"momentum": 0.9}, r"momentum among the keyword arguments, and momentum=0\.6\. Give one"),
        ("adam", {"betas": (0.9, 0.99)}, r"betas among the keyword arguments, and momentum=0\.6"),
    ],
)
def test_a_momentum_that_cannot_be_taken_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_with_momentum(name, **kwargs)


def test_a_value_that_torch_refuses_becomes_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"optimizer='adam' cannot be built: Invalid beta parameter"):
        build("adam", betas=(2.0, 0.9))


def test_a_class_of_the_users_own_gets_rate_decay_and_any_keyword() -> None:
    group = build(f"{__name__}.KeywordOptimizer", weight_decay=0.3, nesterov=True, momentum=0.5).param_groups[0]
    assert (group["lr"], group["weight_decay"], group["nesterov"]) == (0.01, 0.3, True)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.Adam", r"'no_such_package' cannot be imported .*install the package"),
        ("torch.optim.AdamWW", r"'torch.optim' has no 'AdamWW'\. Did you mean 'AdamW'\?"),
        (f"{__name__}.CPU", r"is a device, which cannot be called\. Expected an optimizer"),
        (f"{__name__}.not_an_optimizer", r"built a str\. Expected a torch.optim.Optimizer"),
        (f"{__name__}.optimizer_without_rate", r"takes no 'lr'"),
        ("adam.", r"optimizer='adam\.' is not known"),
    ],
)
def test_a_dotted_path_that_cannot_work_says_why(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(path)


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


FIRST_OPTIMIZER = """
import gc, torch
from hezar_train.optim import build_optimizer
walks = []
gc.callbacks.append(lambda phase, facts: walks.append(facts["generation"]) if phase == "start" else None)
parameters = [torch.nn.Parameter(torch.ones(2))]
build_optimizer("adamw", parameters, learning_rate=0.1, weight_decay=0.0, device=torch.device("cpu"))
print(len(walks), gc.isenabled())
"""


def test_the_first_optimizer_of_a_process_imports_torchs_compiler_without_looking_for_garbage() -> None:
    told = subprocess.run([sys.executable, "-c", FIRST_OPTIMIZER], capture_output=True, text=True, check=True).stdout
    walks, enabled = told.split()
    assert int(walks) <= 3  # the first look afterwards; hundreds without
    assert enabled == "True"


def test_a_collector_that_the_user_turned_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    gc.disable()
    try:
        build("adamw")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_works_again_after_an_optimizer_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with pytest.raises(ConfigError):
        build("adamw", betas=(2.0, 2.0))
    assert gc.isenabled()


def stepped(optimizer: Optimizer, num_steps: int, step: Any) -> list[torch.Tensor]:
    for number in range(num_steps):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, number + 1.0)
        step()
    return [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]


class TestDirectStep:
    """What torch puts around a step is passed by, unless somebody would see it."""

    @staticmethod
    def known(hook: object) -> bool:
        return getattr(hook, "__name__", "") == "of_no_use"

    @pytest.fixture
    def optimizer(self) -> Optimizer:
        optimizer: Optimizer = build("adamw")
        LinearLR(optimizer)  # which wraps its step
        return optimizer

    @pytest.fixture
    def step(self, optimizer: Optimizer) -> DirectStep:
        step = DirectStep(optimizer, self.known)
        stepped(optimizer, 2, step)
        return step

    def calls_of_torchs(self, optimizer: Optimizer, step: DirectStep, monkeypatch: pytest.MonkeyPatch) -> int:
        """Count in how many of three steps torch's own way is taken, which opens a record for its profiler."""
        names: list[str] = []
        plain = torch.autograd.profiler.record_function.__init__

        def noted(self: Any, name: str, args: str | None = None) -> None:
            names.append(name)
            plain(self, name, args)

        monkeypatch.setattr(torch.autograd.profiler.record_function, "__init__", noted)
        stepped(optimizer, 3, step)
        return sum(name.startswith("Optimizer.step") for name in names)

    @pytest.mark.parametrize("name", sorted({*optimizer_names()} - {"sparseadam"}))
    def test_it_takes_the_same_steps(self, name: str) -> None:
        one, other = build(name), build(name)
        assert all(map(torch.equal, stepped(one, 5, DirectStep(one, self.known)), stepped(other, 5, other.step)))

    def test_it_leaves_out_what_nobody_sees(self, optimizer: Any, step: Any, monkeypatch: Any) -> None:
        def of_no_use(*_: Any) -> None: ...

        optimizer.register_step_pre_hook(of_no_use)
        stepped(optimizer, 1, step)
        assert self.calls_of_torchs(optimizer, step, monkeypatch) == 0
        assert torch.is_grad_enabled()

    def test_a_scheduler_knows_of_the_steps(self, recwarn: pytest.WarningsRecorder) -> None:
        optimizer = build("adamw")
        scheduler, step = LinearLR(optimizer), DirectStep(optimizer, self.known)
        for _ in range(3):
            stepped(optimizer, 1, step)
            scheduler.step()
        assert not list(recwarn)

    @pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
    def test_a_hook_is_called_as_long_as_it_is_there(self, optimizer: Any, step: Any, register: str) -> None:
        seen: list[int] = []
        handle = getattr(optimizer, register)(lambda *_: seen.append(1))
        stepped(optimizer, 3, step)
        assert len(seen) == 3
        handle.remove()
        stepped(optimizer, 3, step)
        assert len(seen) == 3

    @pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
    def test_a_hook_of_all_optimizers_is_called(self, optimizer: Any, step: Any, register: Any) -> None:
        seen: list[int] = []
        handle = register(lambda *_: seen.append(1))
        try:
            stepped(optimizer, 3, step)
        finally:
            handle.remove()
        assert len(seen) == 3

    def test_a_step_that_is_wrapped_is_called(self, optimizer: Any, step: Any) -> None:
        seen: list[int] = []
        plain = optimizer.step
        optimizer.step = lambda *given: (seen.append(1), plain(*given))[1]
        stepped(optimizer, 3, step)
        assert len(seen) == 3

    def test_a_step_of_the_class_that_is_replaced_is_called(self, optimizer: Any, step: Any, monkeypatch: Any) -> None:
        seen: list[int] = []
        del optimizer.step  # the scheduler's wrapper, which would call the one that it has wrapped
        monkeypatch.setattr(AdamW, "step", lambda self, closure=None: seen.append(1))
        stepped(optimizer, 3, step)
        assert len(seen) == 3

    def test_a_profiler_sees_each_step(self, optimizer: Any, step: Any) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            stepped(optimizer, 3, step)
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["Optimizer.step#AdamW.step"] == 3

    def test_an_optimizer_of_a_users_own_is_stepped_by_its_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        optimizer = KeywordOptimizer([nn.Parameter(torch.ones(2))], lr=0.1)
        step = DirectStep(optimizer, self.known)
        assert self.calls_of_torchs(optimizer, step, monkeypatch) == 3

"""How often a schedule ticks when nobody says it, and how long the warm-up is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hezar_train.config import TrainerConfig
from hezar_train.config.names import SHORT_SCHEDULERS
from hezar_train.plan import Plan, exactness_changes, keeping_ticks, make_plan, with_ticks

HEZARS = (
    "constant", "lambda", "step", "reduce_on_plateau", "multi_step", "one_cycle", "linear", "exponential", "cyclic",
    "sequential", "polynomial", "cosine_annealing",
)  # fmt: skip
BY_UPDATE = {
    "triangular", "inv_triangular", "triangular2", "triangular_decay_when_acc", "warm_restarts", "linear_decay",
    "log_decay", "warmup_cosine", "warmup_cosine_annealing", "warmup_polynomial", "warmup_linear", "warmup_multi_step",
    "warmup_noam", "warmup_stable_decay", "inverse_sqrt", "cosine_with_restarts",
}  # fmt: skip


def plan_of(num_processes: int = 1, num_samples: int | None = 10, **fields: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # periods inside a window
        config = TrainerConfig("run", **{"num_epochs": 3, **fields})
    return make_plan(config, num_samples, num_processes)


@pytest.mark.parametrize("name", HEZARS)
def test_names_that_are_hezars_tick_at_epoch_ends(name: str) -> None:
    assert (plan_of(lr_scheduler=name).schedule_updates, plan_of(lr_scheduler=name).total_ticks) == (None, 3)


@pytest.mark.parametrize("name", sorted(set(SHORT_SCHEDULERS) - set(HEZARS)))
def test_of_the_others_those_tick_every_update_of_which_nothing_counts_ticks(name: str) -> None:
    plan = plan_of(lr_scheduler=name)
    assert (plan.schedule_updates, plan.total_ticks) == ((1, 30) if name in BY_UPDATE else (None, 3))


@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "my_package.Schedule", None])
def test_classes_of_torch_and_of_ones_own_tick_at_epoch_ends(name: str | None) -> None:
    assert plan_of(lr_scheduler=name).schedule_updates is None


@pytest.mark.parametrize(
    ("name", "kwargs", "period"),
    [
        ("warmup_linear", {"warmup_ratio": 0.1}, 1),
        ("warmup_linear", {"warmup_iter": 2}, None),
        ("warmup_linear", {"warmup_steps": 2}, None),
        ("warmup_linear", {"warmup_ratio": 0.1, "max_iter": 3}, None),
        ("WarmupCosineLR", {"total_steps": 3}, None),
        ("warmup_cosine", {"alpha": 0.5, "warmup_method": "constant"}, 1),
        ("warmup_multi_step", {"milestones": [0.5, 0.9]}, 1),
        ("warmup_multi_step", {"milestones": [1, 2]}, None),
        ("triangular", {"lr_min": 0.1}, 1),
        ("triangular", {"stepsize": 2}, None),
        ("linear_decay", {"num_iter": 3}, None),
        ("warmup_noam", {"warmup_ratio": 0.5}, 1),
        ("warmup_stable_decay", {"decay_iter": 2}, 1),  # a name that no earlier version has
        ("wsd", {}, 1),
        ("inverse_sqrt", {"timescale": 4}, 1),
    ],
)
def test_a_length_that_is_given_in_ticks_keeps_its_meaning(
    name: str, kwargs: dict[str, Any], period: int | None
) -> None:
    assert plan_of(lr_scheduler=name, lr_scheduler_kwargs=kwargs).schedule_updates == period


@pytest.mark.parametrize("name", sorted(BY_UPDATE))
def test_who_is_told_how_often_ticks_so(name: str) -> None:
    assert plan_of(lr_scheduler=name, lr_scheduling_steps=10).total_ticks == 3
    assert plan_of(lr_scheduler="step", lr_scheduling_steps=1).total_ticks == 30


def test_rate_and_momentum_share_a_tick_which_both_must_leave_open() -> None:
    rate, curve = {"lr_scheduler": "warmup_linear"}, {"momentum_scheduler": "inv_triangular"}
    assert plan_of(**rate, **curve).schedule_updates == 1
    assert plan_of(**rate, **curve, momentum_scheduler_kwargs={"stepsize": 2}).schedule_updates is None
    assert plan_of(lr_scheduler="step", **curve).schedule_updates is None
    assert plan_of(**curve).schedule_updates == 1
    for counts_none in ("reduce_on_plateau", "decay_to_epoch", "decay_when_acc"):
        assert plan_of(lr_scheduler=counts_none, **curve).schedule_updates == 1


@pytest.mark.parametrize(
    ("fields", "warmup", "ticks"),
    [
        ({"warmup_steps": 4, "lr_scheduler": "warmup_linear"}, 4, 26),
        ({"warmup_steps": 0.1, "lr_scheduler": "warmup_linear"}, 3, 27),
        ({"warmup_steps": 4, "lr_scheduler": "cosine_annealing"}, 4, 3),
        ({"warmup_steps": 10, "lr_scheduler": "cosine_annealing"}, 10, 2),
        ({"warmup_steps": 25, "lr_scheduler": "cosine_annealing"}, 25, 1),
        ({"warmup_steps": 4, "lr_scheduler": "step", "lr_scheduling_steps": 5}, 4, 5),
        ({"warmup_steps": 5, "gradient_accumulation_steps": 2}, 3, 3),
        ({"warmup_steps": 500}, 500, 1),
        ({"warmup_steps": 0}, 0, 3),
    ],
)
def test_the_warm_up_in_updates_and_the_ticks_of_the_rest(fields: dict[str, Any], warmup: int, ticks: int) -> None:
    plan = plan_of(**fields)
    assert (plan.warmup_updates, plan.total_ticks) == (warmup, ticks)


def test_a_warm_up_takes_no_ticks_from_the_momentum() -> None:
    plan = plan_of(warmup_steps=6, momentum_scheduler="inv_triangular")
    assert (plan.total_ticks, plan.ticks_of_the_run) == (24, 30)
    assert plan_of(warmup_steps=15, lr_scheduler="step").ticks_of_the_run == 3


@given(
    st.integers(1, 200), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40) | st.floats(0.01, 0.99),
    st.none() | st.integers(1, 9),
)  # fmt: skip
def test_ticks_and_warm_up_are_the_same_on_any_number_of_processes(
    samples: int, processes: int, epochs: int, warmup: float, every: int | None
) -> None:
    fields = {"num_epochs": epochs, "batch_size": 2, "global_batch_size": 8, "warmup_steps": warmup}
    fields |= {"lr_scheduler": "warmup_cosine", "lr_scheduling_steps": every}
    one, many = (plan_of(number, samples, **fields) for number in (1, processes))
    for name in ("schedule_updates", "warmup_updates", "total_ticks", "ticks_of_the_run"):
        assert getattr(one, name) == getattr(many, name)
    assert with_ticks(many, TrainerConfig("run", **fields)) == many


WARMED = {"lr_scheduler": "warmup_linear", "lr_scheduler_kwargs": {"warmup_ratio": 0.1}}


def earlier(plan: Plan) -> Plan:
    """Return the plan as an earlier version stored it: a tick at each epoch's end, no warm-up."""
    values = plan.to_dict() | {"schedule_updates": None, "total_ticks": 3}
    del values["warmup_updates"]
    return Plan.from_dict(values)


def test_a_run_of_an_earlier_version_goes_on_with_its_own_tick() -> None:
    config = TrainerConfig("run", num_epochs=3, **WARMED).to_dict()
    old_config = {name: value for name, value in config.items() if name != "warmup_steps"}
    new = plan_of(**WARMED)
    old = earlier(new)
    assert exactness_changes(old_config, config, old, new) != []
    kept = keeping_ticks(new, config, old, old_config)
    assert (kept.schedule_updates, kept.total_ticks) == (None, 3)
    assert exactness_changes(old_config, config, old, kept) == []
    assert keeping_ticks(new, config, kept, config) == kept  # and from then on


def test_another_schedule_ticks_as_it_does_in_a_new_run() -> None:
    config, other = (TrainerConfig("run", lr_scheduler=name).to_dict() for name in ("warmup_linear", "warmup_cosine"))
    new = plan_of(lr_scheduler="warmup_cosine")
    assert keeping_ticks(new, other, earlier(new), config) == new
    assert keeping_ticks(new, config | {"lr_scheduling_steps": 1}, earlier(new), config) == new


def test_another_warm_up_is_told() -> None:
    def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
        configs = [TrainerConfig("run", **fields).to_dict() for fields in (before, now)]
        plans = [make_plan(TrainerConfig("run", **fields), 20) for fields in (before, now)]
        return exactness_changes(*configs, *plans)  # type: ignore[arg-type]

    assert changes({}, {"warmup_steps": 0}) == []
    assert changes({}, {"warmup_steps": 3}) == ["warmup_steps: None in the checkpoint, 3 now"]
    assert changes({"warmup_steps": 3}, {"warmup_steps": 3, "num_epochs": 2}) == []
    assert changes({"warmup_steps": 0.1}, {"warmup_steps": 0.1, "num_epochs": 2}) == [
        "updates of the warm-up (warmup_steps=0.1): 2 in the checkpoint, 4 now"
    ]

"""What is said of another trainer's schedules does what theirs do: each row of the page, beside the real thing."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from hezar_train import TrainerConfig
from hezar_train.config.other_schedules import BOLTS, TRANSFORMERS, answer_to_dict, of_transformers
from hezar_train.errors import ConfigError
from hezar_train.plan import make_plan
from hezar_train.trainer.optimizer_setup import schedule_for, scheduler_for

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "coming_from_transformers.md"
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RATE, UPDATES, WARMUP = 0.1, 40, 8


def fields_of(written: str) -> dict[str, Any]:
    """Read keyword arguments as a page has them."""
    call = ast.parse(f"f({written})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


OF_TRANSFORMERS = [(theirs, ours) for theirs, ours in ROWS if theirs.startswith("lr_scheduler_type")]
OF_LIGHTNING = [(theirs, ours) for theirs, ours in ROWS if theirs.startswith("{")]
OF_WARM_UPS = [row for row in ROWS if "warmup" in row[0] and row not in OF_TRANSFORMERS and row not in OF_LIGHTNING]


def make_optimizer() -> torch.optim.Optimizer:
    return SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)


def our_rates(fields: dict[str, Any]) -> list[float]:
    """Return the rate of each update of a run with these fields."""
    config = TrainerConfig("run", learning_rate=RATE, warmup_steps=WARMUP, **fields)
    plan, optimizer = make_plan(config, UPDATES), make_optimizer()
    schedule = schedule_for(
        optimizer, scheduler_for(optimizer, config, plan, "minimize", None), config, plan, "minimize"
    )
    seen = []
    for update in range(1, UPDATES + 1):
        seen += schedule.rates()
        optimizer.step()
        schedule.after_update(update, ends_epoch=update == UPDATES)
    return seen


def their_rates(name: str, keywords: dict[str, Any] | None) -> list[float]:
    """Return the rate of each update with transformers' own schedule."""
    from transformers import get_scheduler

    optimizer = make_optimizer()
    scheduler = get_scheduler(name, optimizer, WARMUP, UPDATES, scheduler_specific_kwargs=keywords)
    seen = []
    for _ in range(UPDATES):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("theirs", "ours"), OF_TRANSFORMERS)
def test_each_schedule_of_transformers_is_answered_with_the_one_of_the_page(theirs: str, ours: str) -> None:
    given, expected = fields_of(theirs), fields_of(ours)
    name, keywords = given["lr_scheduler_type"], given.get("lr_scheduler_kwargs")
    assert of_transformers(name, keywords, has_warmup=True) == expected
    with pytest.raises(ConfigError, match=f"lr_scheduler_type='{name}'") as caught:
        TrainerConfig("run", warmup_steps=WARMUP, **given)
    (problem,) = caught.value.problems
    if expected != {"lr_scheduler": None}:
        assert all(f"{field}={value!r}" in problem for field, value in expected.items())


@pytest.mark.parametrize(("theirs", "ours"), OF_TRANSFORMERS)
def test_each_schedule_of_transformers_has_the_same_rates_here(theirs: str, ours: str) -> None:
    given = fields_of(theirs)
    name, keywords = given["lr_scheduler_type"], given.get("lr_scheduler_kwargs")
    if name == "reduce_lr_on_plateau":
        assert fields_of(ours) == {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": keywords}
        return  # torch's own class in both
    found, expected = our_rates(fields_of(ours)), their_rates(name, keywords)
    assert found[:WARMUP] == pytest.approx([RATE * update / WARMUP for update in range(1, WARMUP + 1)])
    if name == "cosine_warmup_with_min_lr":
        assert found[WARMUP + 1 :] == pytest.approx(expected[WARMUP:-1], abs=1e-12)
        return
    assert found[WARMUP:] == pytest.approx(expected[WARMUP:], abs=1e-12)
    if name not in ("constant", "warmup_stable_decay"):
        assert found[: WARMUP - 1] == pytest.approx(expected[1:WARMUP], abs=1e-12)


def test_the_page_has_all_schedules_of_transformers_but_one() -> None:
    from transformers.trainer_utils import SchedulerType

    shown = {fields_of(theirs)["lr_scheduler_type"] for theirs, _ in OF_TRANSFORMERS}
    assert shown == set(TRANSFORMERS) == {one.value for one in SchedulerType} - {"greedy"}


def test_a_member_of_their_enum_is_answered_as_its_name() -> None:
    from transformers.trainer_utils import SchedulerType

    with pytest.raises(ConfigError, match="lr_scheduler_type='linear' is lr_scheduler='warmup_linear' here"):
        TrainerConfig("run", lr_scheduler_type=SchedulerType.LINEAR)  # type: ignore[call-arg]


@pytest.mark.parametrize(("theirs", "ours"), OF_WARM_UPS)
def test_each_warm_up_is_answered_with_the_one_of_the_page(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig("run", **fields_of(theirs))
    (problem,) = caught.value.problems
    assert f"is warmup_steps={fields_of(ours)['warmup_steps']!r} here" in problem


@pytest.mark.parametrize(("theirs", "ours"), OF_LIGHTNING)
def test_each_schedule_of_lightning_is_answered_with_the_one_of_the_page(theirs: str, ours: str) -> None:
    told, expected = answer_to_dict(ast.literal_eval(theirs)), fields_of(ours)
    assert told == f" What Lightning has in a dict is here: {', '.join(f'{k}={v!r}' for k, v in expected.items())}."
    with pytest.raises(ConfigError, match=re.escape(told)):
        TrainerConfig("run", lr_scheduler=ast.literal_eval(theirs))
    TrainerConfig("run", **expected)


def test_every_row_of_the_page_is_one_of_these() -> None:
    rows = [row for row in ROWS if row != ("TrainingArguments", "TrainerConfig")]
    assert sorted(rows) == sorted([*OF_TRANSFORMERS, *OF_LIGHTNING, *OF_WARM_UPS])
    assert min(map(len, (OF_TRANSFORMERS, OF_LIGHTNING, OF_WARM_UPS))) >= 3


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"lr_scheduler_type": "greedy"}, "is not offered; the nearest is lr_scheduler='reduce_on_plateau'"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}}, "has no counterpart here"),
        ({"lr_scheduler_type": "inverse_sqrt"}, "'inverse_sqrt', lr_scheduler_kwargs={'timescale': 10000}"),
        ({"lr_scheduler_type": "inverse_sqrt", "warmup_ratio": 0.1}, "is lr_scheduler='inverse_sqrt' here"),
        ({"warmup_ratio": 0.0}, "warmup_ratio=0.0 is no warm-up: leave it out"),
        ({"warmup_epochs": 1, "num_epochs": 8}, "warmup_epochs=1 of 8 is warmup_steps=0.125 here"),
        ({"warmup_epochs": 1}, "warmup_epochs=1 is warmup_steps here: a count of steps"),
        ({"num_warmup_steps": "x"}, "Here it is called 'warmup_steps'"),
        ({"interval": "step", "frequency": 3}, "interval='step', frequency=3 is lr_scheduling_steps=3 here"),
        ({"interval": "epoch"}, "interval='epoch': how often a schedule ticks is lr_scheduling_steps here"),
        ({"monitor": "val_loss"}, "Here it is called 'metric_for_best_model'"),
        ({"lr_scheduler": "cosine"}, "transformers' 'cosine' is lr_scheduler='cosine_annealing', lr_sch"),
        ({"lr_scheduler": BOLTS}, f"Bolts' {BOLTS} is lr_scheduler='cosine_annealing', lr_scheduling_steps=1 here"),
        ({"lr_scheduler": {"scheduler": object()}}, "A scheduler that is built goes to the Trainer"),
        ({"lr_scheduler": {"class_path": "mine.Own"}}, "is here: lr_scheduler='mine.Own'"),
    ],
)  # fmt: skip
def test_what_has_no_row_is_answered_too(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig("run", **given)
    assert any(answer in problem for problem in caught.value.problems), caught.value.problems


def test_no_answer_names_what_a_config_refuses() -> None:
    for name, warmed in itertools.product(TRANSFORMERS, (True, False)):
        fields = of_transformers(name, has_warmup=warmed)
        assert fields is not None
        TrainerConfig("run", **fields)

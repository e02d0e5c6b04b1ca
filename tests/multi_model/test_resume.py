"""Several models in one run, broken off anywhere, end as those of the unbroken run, bit by bit."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from pairs import BOTH, crash_after, crash_at_model, make_noisy, noisy_pair, same_bits
from torch import nn
from torch.utils.data import IterableDataset
from workload import Crash, CrashAt, NoisyPoints, checkpoint_steps, crash, differences, make_config, rows_of

from hezar_train import Hook
from hezar_train.loop import Context, Moment
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.types import Mode

# sequential: 16 steps for the first model, 16 for the second; parallel: 16 steps for both
PLACES: dict[str, dict[str, tuple[int, str, Mode]]] = {
    "sequential": {
        "before the first save": (1, "on_batch_start", Mode.TRAIN),
        "inside a window": (4, "on_batch_backward", Mode.TRAIN),
        "in the first phase's evaluation": (8, "on_batch_end", Mode.VAL),
        "in the first phase's last evaluation": (16, "on_batch_end", Mode.VAL),
        "at the end of the first phase, or the start of the second": (16, "on_fit_end", Mode.TRAIN),
        "before the second phase's first step": (16, "on_batch_start", Mode.TRAIN),
        "in the second phase, before its first save": (18, "on_batch_backward", Mode.TRAIN),
        "at an update of the second phase": (21, "on_update", Mode.TRAIN),
        "in the second phase's evaluation": (24, "on_fit_start", Mode.VAL),
        "between the second phase's epochs": (24, "on_epoch_start", Mode.TRAIN),
        "in the last evaluation": (32, "on_batch_end", Mode.VAL),
        "at the very end": (32, "on_fit_end", Mode.TRAIN),
    },
    "parallel": {
        "before the first save": (1, "on_batch_start", Mode.TRAIN),
        "inside a window": (4, "on_batch_backward", Mode.TRAIN),
        "at an update": (5, "on_update", Mode.TRAIN),
        "in an evaluation": (8, "on_batch_end", Mode.VAL),
        "between the epochs": (8, "on_epoch_start", Mode.TRAIN),
        "in the last evaluation": (16, "on_batch_end", Mode.VAL),
    },
}  # fmt: skip


class Mixing(MultiModelTrainer):
    """Let every turn outside the step itself, or every end of a routine, move all weights a little, by chance."""

    def interact(self, ctx: Context) -> None:
        if ctx.moment in {Moment.BATCH_FORWARD, Moment.BATCH_BACKWARD}:
            return
        with torch.no_grad():
            for model in self.models.values():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))


class OwnStep(MultiModelTrainer):
    """Let both models learn in one step, in their own way."""

    def training_step(self, batch: Any) -> Any:
        first = nn.functional.cross_entropy(self.models["normed"](batch["x"]), batch["labels"])
        self.learn("normed", first)
        second = nn.functional.cross_entropy(self.models["wide"](batch["x"]), batch["labels"])
        self.learn("wide", second)
        return first.detach() + second.detach()


CASES = {
    "sequential": ("sequential", MultiModelTrainer),
    "parallel": ("parallel", MultiModelTrainer),
    "sequential, mixing": ("sequential", Mixing),
    "parallel, mixing": ("parallel", Mixing),
    "a step of one's own": ("parallel", OwnStep),
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, MultiModelTrainer]]:
    """The runs that nothing happened to."""
    found = {}
    for case, (interact, cls) in CASES.items():
        out = tmp_path_factory.mktemp("unbroken")
        trainer = make_noisy(out, interact, cls)
        trainer.train()
        found[case] = (out, trainer)
    return found


def expect_the_same(unbroken: tuple[Path, MultiModelTrainer], out: Path, trainer: MultiModelTrainer) -> None:
    assert differences(unbroken[0], out) == []
    assert [name for name, model in trainer.models.items() if not same_bits(model, unbroken[1].models[name])] == []


@pytest.mark.parametrize(("interact", "place"), [(interact, place) for interact in BOTH for place in PLACES[interact]])
@pytest.mark.parametrize("mixing", [False, True])
def test_a_run_that_crashed_anywhere_ends_like_the_unbroken_run(
    tmp_path: Path, unbroken: Any, interact: str, place: str, mixing: bool
) -> None:
    case = f"{interact}, mixing" if mixing else interact
    cls = CASES[case][1]
    crash(make_noisy(tmp_path, interact, cls, hooks=[CrashAt(*PLACES[interact][place])]))
    again = make_noisy(tmp_path, interact, cls)
    again.train()
    expect_the_same(unbroken[case], tmp_path, again)


@pytest.mark.parametrize("moment", ["on_batch_forward", "on_batch_backward", "on_update", "on_batch_end"])
@pytest.mark.parametrize("model", [0, 1])
def test_a_crash_between_the_turns_of_two_models_leaves_nothing_of_the_first(
    tmp_path: Path, unbroken: Any, moment: str, model: int
) -> None:
    broken = make_noisy(tmp_path, "parallel")
    crash_at_model(broken, 13, moment, model)  # the last step of a window
    crash(broken)
    again = make_noisy(tmp_path, "parallel")
    again.train()
    expect_the_same(unbroken["parallel"], tmp_path, again)


@pytest.mark.parametrize("num_moments", [61, 83, 127])
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_crashes_after_every_so_many_moments_ends_like_the_unbroken_run(
    tmp_path: Path, unbroken: Any, case: str, num_moments: int
) -> None:
    interact, cls = CASES[case]
    num_crashes = 0
    for more in range(50):
        trainer = make_noisy(tmp_path, interact, cls)
        crash_after(trainer, num_moments + more)
        try:
            trainer.train()
            break
        except Crash:
            num_crashes += 1
    assert 1 <= num_crashes < 50
    expect_the_same(unbroken[case], tmp_path, trainer)


@pytest.mark.parametrize("interact", BOTH)
def test_a_crashed_trainer_may_train_on_without_being_built_again(tmp_path: Path, unbroken: Any, interact: str) -> None:
    class Once(Hook):
        is_over = False

        def on_batch_start(self, ctx: Context) -> None:
            if self.trainer.state.global_step == 11 and not self.is_over:  # right after an update
                self.is_over = True
                raise Crash

    trainer = make_noisy(tmp_path, interact, hooks=[Once()])
    crash(trainer)
    trainer.train()
    expect_the_same(unbroken[interact], tmp_path, trainer)


@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_that_is_started_again_has_the_models_of_the_unbroken_run(
    tmp_path: Path, unbroken: Any, case: str
) -> None:
    interact, cls = CASES[case]
    make_noisy(tmp_path, interact, cls).train()
    again = make_noisy(tmp_path, interact, cls)
    assert again.train().num_samples == 0
    expect_the_same(unbroken[case], tmp_path, again)
    again.train()
    expect_the_same(unbroken[case], tmp_path, again)  # what is done is not done twice


@pytest.mark.parametrize("step", [3, 7, 9, 12])
def test_a_run_cut_by_max_steps_goes_on_in_its_second_phase(tmp_path: Path, step: int) -> None:
    changes = {"max_steps": 7, "gradient_accumulation_steps": 2, "lr_scheduling_steps": 4}
    whole = make_noisy(tmp_path / "whole", "sequential", **changes)
    whole.train()
    assert (whole.state.global_step, checkpoint_steps(tmp_path / "whole")[-1]) == (14, 14)
    crash(make_noisy(tmp_path / "broken", "sequential", hooks=[CrashAt(step, "on_batch_start")], **changes))
    again = make_noisy(tmp_path / "broken", "sequential", **changes)
    again.train()
    expect_the_same((tmp_path / "whole", whole), tmp_path / "broken", again)


@pytest.mark.parametrize("step", [2, 5, 8, 11, 14, 17])
def test_rounds_that_a_crash_broke_off_end_like_unbroken_rounds(tmp_path: Path, step: int) -> None:
    changes = {"local_update_steps": 3, "batch_or_epoch": "batch", "gradient_accumulation_steps": 1, "save_steps": 1}
    changes |= {"lr_scheduler": "step", "lr_scheduler_kwargs": {"step_size": 2}}
    whole = make_noisy(tmp_path / "whole", "sequential", **changes)
    for end in (6, 12, 18):
        whole.train()
        assert whole.state.global_step == end
    broken = make_noisy(tmp_path / "broken", "sequential", hooks=[CrashAt(step, "on_batch_start")], **changes)
    for _ in range(step // 6):
        broken.train()
    crash(broken)
    again = make_noisy(tmp_path / "broken", "sequential", **changes)
    while again.state.global_step < 18:
        again.train()
    expect_the_same((tmp_path / "whole", whole), tmp_path / "broken", again)


@pytest.mark.parametrize("schedule", ["one_cycle", "reduce_on_plateau"])
@pytest.mark.parametrize("interact", BOTH)
def test_schedules_go_on_where_they_were(tmp_path: Path, interact: str, schedule: str) -> None:
    kwargs = {"patience": 0, "threshold": 10.0} if schedule == "reduce_on_plateau" else None
    changes = {"lr_scheduler": schedule, "lr_scheduler_kwargs": kwargs}
    whole = make_noisy(tmp_path / "whole", interact, **changes)
    whole.train()
    for step in (5, 8, 14):
        crash(make_noisy(tmp_path / "broken", interact, hooks=[CrashAt(step, "on_batch_start")], **changes))
    again = make_noisy(tmp_path / "broken", interact, **changes)
    again.train()
    expect_the_same((tmp_path / "whole", whole), tmp_path / "broken", again)
    assert len({row["train.learning_rate"] for row in rows_of(tmp_path / "broken") if "train.recent_loss" in row}) > 1


class Counted(IterableDataset[dict[str, torch.Tensor]]):
    """A stream that keeps its place."""

    def __init__(self, num_samples: int) -> None:
        self._points, self._place = NoisyPoints(num_samples), 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self._place < len(self._points):
            self._place += 1
            yield self._points[self._place - 1]
        self._place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["place"]


@pytest.mark.parametrize("step", [4, 8, 10, 13])
@pytest.mark.parametrize("interact", BOTH)
def test_models_that_read_a_stream_go_on_where_it_was(tmp_path: Path, interact: str, step: int) -> None:
    def build(name: str, *hooks: Hook) -> MultiModelTrainer:
        changes = {
            "max_steps": 8 if interact == "sequential" else 16,
            "lr_scheduler": None,
            "lr_scheduling_steps": None,
        }
        config = make_config(tmp_path / name, **{"num_epochs": 3, "save_steps": 3, "eval_steps": None, **changes})
        return MultiModelTrainer(config, noisy_pair(), Counted(50), NoisyPoints(10), interact=interact, hooks=hooks)

    whole = build("whole")
    whole.train()
    crash(build("broken", CrashAt(step, "on_batch_start")))
    again = build("broken")
    again.train()
    assert again.state.global_step == 16
    expect_the_same((tmp_path / "whole", whole), tmp_path / "broken", again)


@pytest.mark.parametrize("interact", BOTH)
def test_save_and_resume_touch_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interact: str) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a pickle was touched")

    make_noisy(tmp_path / "warm", interact, num_epochs=1).train()  # torch makes classes when it is first used
    for owner, names in (
        (pickle, ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    crash(make_noisy(tmp_path / "run", interact, Mixing, hooks=[CrashAt(12, "on_batch_start")]))
    again = make_noisy(tmp_path / "run", interact, Mixing)
    assert again.state.global_step == 11
    again.train()
    again.save(tmp_path / "export")

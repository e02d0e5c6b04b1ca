"""How far a reader walks to follow a tiny run: functions and files of ours that it passes, and changes between files.

Distance is what a reader pays: hops, files, names to learn. So it has a budget. A change that needs more raises the
number on purpose, in the same commit, and says why; one that needs less lowers it.

    python -m tests.test_walk             prints what is measured now
    python -m tests.test_walk --step      and the hops of one quiet step, in order
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import TensorDataset

import hezar_train
from hezar_train import Hook, Trainer, TrainerConfig

PACKAGE = str(Path(hezar_train.__file__).parent) + "/"


class Distance(NamedTuple):
    """What it takes to follow a stretch of a run."""

    functions: int
    files: int
    changes: int
    """How often one goes on in another file."""


BUDGET = {
    "a quiet step": Distance(functions=69, files=19, changes=42),
    "a step with log, save and evaluation": Distance(functions=461, files=53, changes=504),
    "resume": Distance(functions=505, files=68, changes=1350),  # readers believe nothing: many small checks
    "the whole": Distance(functions=1066, files=82, changes=4215),
}


class Call(NamedTuple):
    """A function of ours that was called, or a generator that went on."""

    file: str
    function: str


class Tracer:
    """Every call inside the package, in order, with marks between them."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.marks: dict[str, int] = {}

    def mark(self, name: str) -> None:
        self.marks[name] = len(self.calls)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)

    def between(self, first: str, last: str) -> list[Call]:
        return self.calls[self.marks[first] : self.marks[last]]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        # the bodies of classes and modules run once, at an import; comprehensions are part of their function
        if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<"):
            self.calls.append(Call(code.co_filename[len(PACKAGE) :], code.co_qualname))


class Marks(Hook):
    """Mark the start of each batch by its number, from 1 on."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._count = tracer, 0

    def on_batch_start(self, ctx: Any) -> None:
        self._count += 1
        self._tracer.mark(f"batch {self._count}")


def build(folder: Path, num_epochs: int, *, resumes: bool) -> Trainer:
    """Build a classifier of 32 points; eight steps an epoch, a log at the third and sixth, all else at the sixth."""
    points = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    labels = (points.sum(1) > 0).long()
    config = TrainerConfig(
        folder, task="image_classification", criterion="CrossEntropyLoss", num_epochs=num_epochs, batch_size=4,
        log_steps=3, save_steps=6, eval_steps=6, resume_from_checkpoint=resumes, accept_changes=resumes,
        async_save=False, use_cpu=True, trackers=[],
    )  # fmt: skip
    data, evaluation = TensorDataset(points, labels), TensorDataset(points[:8], labels[:8])
    return Trainer(config, torch.nn.Linear(4, 2), data, evaluation)


def follow(folder: Path) -> Tracer:
    """Trace a run that is built, trained, evaluated and resumed."""
    tracer = Tracer()
    tracer.mark("start")
    with tracer.tracing():
        trainer = build(folder, 1, resumes=False)
    trainer.register_hooks([Marks(tracer)])
    with tracer.tracing():
        trainer.train()
        trainer.evaluate()
        tracer.mark("evaluated")
        build(folder, 2, resumes=True)
        tracer.mark("resumed")
    return tracer


def stretches(folder: Path) -> dict[str, list[Call]]:
    """Return the calls of each stretch of a run."""
    follow(folder / "before")  # what is imported, cached or set up once in a process is no part of the walk
    tracer = follow(folder / "traced")
    return {
        "a quiet step": tracer.between("batch 2", "batch 3"),
        "a step with log, save and evaluation": tracer.between("batch 6", "batch 7"),
        "resume": tracer.between("evaluated", "resumed"),
        "the whole": tracer.between("start", "resumed"),
    }


def distance(calls: list[Call]) -> Distance:
    files = [call.file for call in calls]
    return Distance(len(set(calls)), len(set(files)), sum(one != other for one, other in pairwise(files)))


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    return stretches(tmp_path_factory.mktemp("walk"))


@pytest.mark.parametrize("name", BUDGET)
def test_a_reader_walks_no_further_than_the_budget(name: str, walked: dict[str, list[Call]]) -> None:
    found, limit = distance(walked[name])._asdict(), BUDGET[name]._asdict()
    further = [f"{what} {found[what]} > {limit[what]}" for what in found if found[what] > limit[what]]
    assert not further, f"{name}: {', '.join(further)}; python -m tests.test_walk shows the way"


def test_every_stretch_has_a_budget_and_was_walked(walked: dict[str, list[Call]]) -> None:
    assert walked.keys() == BUDGET.keys()
    assert all(walked.values())


def main() -> None:
    """Print what is measured."""
    with tempfile.TemporaryDirectory() as folder:
        found = stretches(Path(folder))
    for name, calls in found.items():
        print(f"{name:40}{distance(calls)}")
    if "--step" in sys.argv[1:]:
        print(*(f"{call.file} {call.function}" for call in found["a quiet step"]), sep="\n")


if __name__ == "__main__":
    main()

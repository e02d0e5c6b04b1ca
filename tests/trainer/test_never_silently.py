"""Random subclasses, hooks and assignments: each trains as a loop written here by hand does, or it is refused.

The loop below knows nothing of the package: only which samples each update took, from a run without any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hezar_train import Trainer, TrainerConfig
from hezar_train.errors import HezarTrainError
from hezar_train.loop import Context

NUM_SAMPLES, BATCH = 10, 3
DATA = [
    {"x": point, "labels": label % 3}
    for label, point in enumerate(torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double())
]

OWN_STEPS = ("default", "super", "hezar", "plain", "nothing")
OWN_UPDATES = ("default", "super", "plain", "twice", "nothing")
BACKWARDS = ("default", "federatedscope", "plain", "accelerate", "nothing")
LOSSES = ("default", "doubled")
REMOVED = (
    "seed", "prepare_input", "forward", "backward", "gather", "guard", "clip", "step", "zero_grad", "count",
    "schedule", "keep_place", "progress", "due",
)  # fmt: skip
ASSIGNED = (
    "loss", "loss_batch", "loss_task", "data_batch", "grad_clip", "model", "optimizer", "num_samples",
    "regularizer", "criterion", "closes_window", "cur_batch_i", "window", "mine",
)  # fmt: skip
REFUSED = frozenset(
    {"model", "optimizer", "num_samples", "regularizer", "criterion", "closes_window", "cur_batch_i", "window"}
)
REQUIRED = frozenset({"count", "keep_place", "due"})
MOMENTS = {
    "seed": "on_batch_start", "prepare_input": "on_batch_start", "forward": "on_batch_forward",
    "backward": "on_batch_backward", "gather": "on_gradients", "guard": "on_update", "clip": "on_update",
    "step": "on_update", "zero_grad": "on_update",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a user has made of a trainer."""

    training_step: str
    optimization_step: str
    backward: str
    compute_loss: str
    removed: str | None
    assigned: str | None
    accumulation: int
    optimizer: str
    max_grad_norm: float | None
    num_epochs: int


def mostly_default(choices: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Choose the default half of the time: what meets too much at once is refused, and nothing is learned."""
    return st.sampled_from(["default"] * (len(choices) - 1) + list(choices[1:]))


CASES = st.builds(
    Case, mostly_default(OWN_STEPS), mostly_default(OWN_UPDATES), st.sampled_from(BACKWARDS),
    st.sampled_from(LOSSES), st.none() | st.sampled_from(REMOVED), st.none() | st.sampled_from(ASSIGNED),
    st.sampled_from([1, 1, 2, 3]), st.sampled_from(["sgd", "adam"]), st.sampled_from([None, 0.3]), st.integers(1, 2),
)  # fmt: skip


def new_model() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3).double()


def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {
        "input": torch.stack([one["x"] for one in samples]),
        "labels": torch.tensor([one["labels"] for one in samples]),
    }


class Own(Trainer):
    """Overrides as a case says."""

    case: Case

    def forward(self, batch: Any) -> dict[str, Any]:
        return {"logits": self.model(batch["input"])}

    def compute_loss(self, model_outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
        loss = functional.cross_entropy(model_outputs["logits"], labels)
        return 2 * loss if self.case.compute_loss == "doubled" else loss

    def training_step(self, batch: Any) -> dict[str, Any]:
        how = self.case.training_step
        if how in {"default", "super"}:
            return super().training_step(batch)
        outputs = self.forward(batch)
        loss = self.compute_loss(outputs, batch["labels"])
        if how == "hezar":
            self.accelerator.backward(loss)
        if how == "plain":
            loss.backward()  # type: ignore[no-untyped-call]
        return {**outputs, "loss": loss.detach()}

    def optimization_step(self) -> None:
        how = self.case.optimization_step
        if how in {"default", "super"}:
            super().optimization_step()
        if how in {"plain", "twice"}:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if how == "twice":
            super().optimization_step()


def own_backward(how: str, trainer: Trainer) -> Callable[[Context], None]:
    def replaced(ctx: Context) -> None:
        if how == "federatedscope":
            ctx.optimizer.zero_grad()
            ctx.loss_batch.backward()
            ctx.optimizer.step()
        elif how == "plain":
            ctx.loss_batch.backward()
        elif how == "accelerate":
            trainer.accelerator.backward(ctx.loss_batch)

    return replaced


def assign(name: str) -> Callable[[Context], None]:
    def hook(ctx: Context) -> None:
        if name in {"loss", "loss_batch", "loss_task"}:
            ctx[name] = ctx.loss_batch * 0.5
        elif name == "data_batch":
            ctx.data_batch = {**ctx.data_batch, "input": ctx.data_batch["input"] * 2}
        elif name == "grad_clip":
            ctx.grad_clip = 0.1
        else:
            ctx[name] = None

    return hook


def build(case: Case, out: Path) -> Own:
    kind = type("Case", (Own,), {"case": case})
    config = TrainerConfig(
        out, batch_size=BATCH, learning_rate=0.1, num_epochs=case.num_epochs, optimizer=case.optimizer,
        gradient_accumulation_steps=case.accumulation, max_grad_norm=case.max_grad_norm, save_enabled=False,
        trackers=[], task="text_classification",
    )  # fmt: skip
    trainer: Own = kind(config, new_model(), DATA, data_collator=collated)
    if case.removed is not None:
        trainer.reset_hook_in_train(MOMENTS.get(case.removed, "on_batch_end"), case.removed)
    if case.backward != "default" and case.removed != "backward":
        trainer.replace_hook_in_train(own_backward(case.backward, trainer), "on_batch_backward", "backward")
    if case.assigned is not None:
        moment = "on_batch_start" if case.assigned == "data_batch" else "on_batch_forward"
        trainer.register_hook_in_train(assign(case.assigned), moment)
    return trainer


def updates_of(case: Case, out: Path) -> list[list[dict[str, torch.Tensor]]]:
    """Return the micro-batches of each update, as a run takes them that nobody has changed."""
    plain = Case(
        "default", "default", "default", "default", None, None, case.accumulation, "sgd", None, case.num_epochs
    )
    found: list[list[Any]] = []
    trainer = build(plain, out)
    trainer.register_hook_in_train(lambda ctx: found.append(ctx.window.batches), "on_update")
    trainer.train()
    return found


@dataclass
class Outcome:
    weights: list[float]
    steps: int
    updates: int
    loss: float


def by_hand(case: Case, updates: list[list[dict[str, torch.Tensor]]]) -> Outcome:
    """Train in plain torch what the case means."""
    model = new_model()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[case.optimizer]
    optimizer = kind(model.parameters(), lr=0.1)
    uses_hooks = case.training_step in {"default", "super"}
    total, steps, applied = 0.0, 0, 0
    for batches in updates:
        samples = sum(len(batch["labels"]) for batch in batches)
        has_stepped = False
        for batch in batches:
            inputs = batch["input"] * 2 if case.assigned == "data_batch" else batch["input"]
            loss = functional.cross_entropy(model(inputs), batch["labels"])
            loss = 2 * loss if case.compute_loss == "doubled" else loss
            trained = loss
            if uses_hooks and case.assigned in {"loss", "loss_batch"}:
                loss = trained = loss * 0.5
            elif uses_hooks and case.assigned == "loss_task" and case.backward == "default":
                trained = loss * 0.5  # own backwards take loss_batch
            share = len(batch["labels"]) / samples
            has_stepped |= backward(case, optimizer, trained, share, uses_hooks=uses_hooks)
            total += float(loss) * len(batch["labels"])
            steps += 1
        applied += update(case, model, optimizer, has_stepped=has_stepped)
    weights = [value for one in model.parameters() for value in one.flatten().tolist()]
    return Outcome(weights, steps, applied, total / sum(len(b["labels"]) for one in updates for b in one))


def backward(case: Case, optimizer: Any, loss: torch.Tensor, share: float, *, uses_hooks: bool) -> bool:
    """Do a micro-batch's backward; tell whether it has stepped the optimizer, too."""
    how = case.backward if uses_hooks else case.training_step
    if how == "nothing" or (uses_hooks and case.removed == "backward"):
        return False
    if how == "federatedscope":
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return True
    (loss * share).backward()  # type: ignore[no-untyped-call]
    return False


def update(case: Case, model: nn.Module, optimizer: Any, *, has_stepped: bool) -> bool:
    """Do an update; tell whether one counts."""
    if case.optimization_step in {"plain", "twice"}:
        optimizer.step()
        optimizer.zero_grad()
        return True
    if case.optimization_step == "nothing":
        return True  # the user's own code has the update
    if has_stepped:
        if case.removed != "zero_grad":
            optimizer.zero_grad()
        return True
    is_assigned = case.assigned == "grad_clip" and case.training_step in {"default", "super"}  # else no hook runs
    limit = 0.1 if is_assigned else case.max_grad_norm
    if limit is not None and case.removed != "clip":
        nn.utils.clip_grad_norm_(model.parameters(), limit)
    if case.removed != "step":
        optimizer.step()
    if case.removed != "zero_grad":
        optimizer.zero_grad()
    return case.removed != "step"


def may_be_refused(case: Case) -> bool:
    """Tell whether this package has a reason to refuse a case."""
    uses_hooks = case.training_step in {"default", "super"}
    own = case.backward if uses_hooks else case.training_step
    return (
        case.removed in REQUIRED
        or case.removed == "guard"
        or (uses_hooks and case.removed == "forward")
        or (uses_hooks and case.assigned in REFUSED)
        or (case.accumulation > 1 and own in {"federatedscope", "plain", "nothing"})
        or (case.accumulation > 1 and case.removed == "backward")
    )


def check(case: Case, folder: Path) -> None:
    updates = updates_of(case, folder / "plain")
    try:
        trainer = build(case, folder / "own")
        trainer.train()
    except (HezarTrainError, AttributeError):
        if not may_be_refused(case):
            raise
        return
    state = trainer.state
    expected = by_hand(case, updates)
    weights = [value for one in trainer.model.parameters() for value in one.flatten().tolist()]
    assert weights == pytest.approx(expected.weights, rel=1e-9, abs=1e-12)
    assert (state.global_step, state.update_step) == (expected.steps, expected.updates)
    assert math.isclose(state.loss_tracker_avg, expected.loss, rel_tol=1e-9)


QUICK = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)  # fmt: skip


@QUICK
@given(case=CASES)
def test_what_a_user_makes_of_a_trainer_trains_as_written_or_is_refused(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check(case, tmp_path_factory.mktemp("case"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(QUICK, max_examples=1000)
@given(case=CASES)
def test_a_thousand_of_them(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(case, tmp_path_factory.mktemp("case"))

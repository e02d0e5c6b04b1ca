"""Everything else a trainer does, on two processes: the same results on both, files and prints of the main one only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Watch, build, distance, steps_saved
from ranks import on_ranks, outcomes_on

from hezar_train import Hook, Trainer
from hezar_train.compat import lernomatic
from hezar_train.errors import ConfigError
from hezar_train.types import Mode


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_as_alone(work: Any, *arguments: Any, limit: float = 1e-5) -> tuple[Any, dict[str, torch.Tensor]]:
    """Run work that returns (values, weights) on one and on two processes; all must agree."""
    ((values, weights),) = on_ranks(1, work, *arguments)
    told = on_ranks(2, work, *arguments)
    for ours, our_weights in told:
        assert ours == (pytest.approx(values, rel=limit) if isinstance(values, Mapping | list) else values)
        assert distance(our_weights, weights) <= limit
    assert told[0][0] == told[1][0]
    return values, weights


def finetune(out: Path, trained_first: bool, **changes: Any) -> Any:
    trainer = build("short last window", out, finetune_steps=2, finetune_batch_or_epoch="epoch", **changes)
    if trained_first:
        trainer.train()
    result = trainer.finetune()
    return result.metrics, weights_of(trainer)


@pytest.mark.parametrize("trained_first", [False, True])
@pytest.mark.parametrize("changes", [{}, {"finetune_param": ["layers.2"]}], ids=["all", "a part"])
def test_finetuning_is_that_of_one_process(trained_first: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    assert_as_alone(lambda: finetune(tmp_path, trained_first, **changes))


def test_evaluating_with_finetuned_weights_is_that_of_one_process(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = build("plain", tmp_path, finetune_before_eval=True, finetune_batch_or_epoch="epoch")
        return trainer.evaluate(), weights_of(trainer)

    assert_as_alone(work)


def test_finding_a_learning_rate_is_that_of_one_process_and_leaves_no_trace(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = build("plain", tmp_path)
        before = weights_of(trainer)
        found = trainer.find_lr(num_steps=8, lr_max=1.0, acc_test=True, acc_batches=2)
        assert distance(weights_of(trainer), before) == 0.0
        trainer.train()
        return found.losses + found.accuracies, weights_of(trainer)

    assert_as_alone(work)


def test_the_check_of_a_loss_holds_and_leaves_no_gradient(tmp_path: Path) -> None:
    def work() -> tuple[bool, bool]:
        trainer = build("variable lengths", tmp_path)
        holds = trainer.verify_invariance().holds
        return holds, all(one.grad is None for one in trainer.model.parameters())

    assert on_ranks(2, work) == [(True, True)] * 2


def test_rounds_are_those_of_one_process(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = build("short last window", tmp_path, local_update_steps=1, batch_or_epoch="epoch", use_diff=True)
        results = [trainer.train() for _ in range(3)]
        return [value for one in results for _, value in sorted(one.metrics.items())], weights_of(trainer)

    assert_as_alone(work)


class Sum(Hook):
    """A hook with a state: the sum of the losses."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_batch_end(self, ctx: Any) -> None:
        self.total += ctx.loss_value if ctx.closes_window else 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def test_a_hooks_state_is_resumed_on_all_processes(tmp_path: Path) -> None:
    def work(**changes: Any) -> float:
        hook = Sum()
        build("plain", tmp_path, [hook], **changes).train()
        return hook.total

    first = on_ranks(2, lambda: work(num_epochs=1))
    both = on_ranks(2, lambda: work(num_epochs=2, resume_from_checkpoint=True))
    assert first[0] == first[1] < both[0] == both[1]


STOPPING: dict[str, dict[str, Any]] = {
    "patience": {"early_stopping_patience": 1, "early_stopping_threshold": 10.0},
    "plateau": {"lr_scheduler": "reduce_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}},
    "best": {"metric_for_best_model": "accuracy", "save_total_limit": 1, "learning_rate": 2.0},
}


@pytest.mark.parametrize("kind", STOPPING)
def test_what_follows_from_an_evaluation_is_the_same_on_all(kind: str, tmp_path: Path) -> None:
    def work(out: Path) -> tuple[Any, ...]:
        watch = Watch()
        trainer = build("plain", out, [watch], num_epochs=6, **STOPPING[kind])
        trainer.train()
        state = trainer.state
        return state.update_step, state.stop_reason, state.best_metric_value, watch.rates

    (alone,) = on_ranks(1, work, tmp_path / "alone")
    told = on_ranks(2, work, tmp_path / "two")
    assert told[0] == told[1]
    assert (told[0][0], told[0][3]) == (alone[0], alone[3])
    assert (told[0][1] is None) == (kind != "patience")
    if kind == "best":
        best = json.loads((tmp_path / "two/best.json").read_text())
        assert best["value"] == told[0][2]
        assert best["step"] in steps_saved(tmp_path / "two")


class AskOnOne(Hook):
    """Ask on one process only, as a clock may."""

    def __init__(self, rank: int, what: str) -> None:
        self._rank, self._what = rank, what

    def after_step(self) -> None:
        if (self.trainer.runtime.rank, self.trainer.state.update_step) == (self._rank, 3):
            if self._what == "stop":
                self.trainer.request_stop("it is late")
            else:
                self.trainer.request_save()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["stop", "save"])
def test_what_one_process_asks_for_all_do(rank: int, what: str, tmp_path: Path) -> None:
    def work() -> tuple[int, str | None]:
        trainer = build("plain", tmp_path, [AskOnOne(rank, what)])
        trainer.train()
        return trainer.state.update_step, trainer.state.stop_reason

    told = on_ranks(2, work)
    assert told[0][0] == told[1][0] == (3 if what == "stop" else 8)
    assert {reason is None for _, reason in told} == {what == "save"}
    assert len(steps_saved(tmp_path)) == (1 if what == "stop" else 3)


class OwnStep(Trainer):
    """A step in the user's own way."""

    def run_step(self) -> torch.Tensor:
        batch = self.ctx.batch
        loss = self.compute_loss(self.forward(batch), batch["labels"])
        (loss / len(self.ctx.window.batches)).backward()
        if self.ctx.closes_window:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


class Norms(Hook):
    """Note the norm of each parameter's gradient, and that of all, for every update."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_gradients(self, _: Any) -> None:
        self.found += [float(parameter.grad.norm()) for parameter in self.trainer.model.parameters()]  # type: ignore[union-attr]

    def on_batch_end(self, ctx: Any) -> None:
        if ctx.closes_window:
            self.found.append(ctx.grad_norm)


@pytest.mark.parametrize("replaces_gather", [False, True])
def test_the_gradients_that_hooks_see_are_those_of_one_process(replaces_gather: bool, tmp_path: Path) -> None:
    def work() -> Any:
        norms = Norms()
        trainer = build("short last window", tmp_path, [norms], max_grad_norm=0.05)
        if replaces_gather:  # then only the norm of all is told: each process has its own gradients until it is taken
            trainer.reset_hook_in_train("on_gradients")
        trainer.train()
        return norms.found, weights_of(trainer)

    values, _ = assert_as_alone(work)
    assert len(values) == (1 if replaces_gather else 5) * 10  # five updates in each of two epochs, four parameters


def test_a_step_of_ones_own_trains_one_model(tmp_path: Path) -> None:
    def work() -> Any:
        plain = build("plain", tmp_path, batch_size=12)
        trainer = OwnStep(plain.config, plain.model, plain.train_dataset, plain.eval_dataset)
        trainer.train()
        return [], weights_of(trainer)

    assert_as_alone(work)


class LogAndPrint(Hook):
    """What a user's hook may do on every process: log, and put."""

    modes = frozenset({Mode.TRAIN})

    def after_step(self) -> None:
        self.trainer.log({"mine": 1.0}, self.trainer.state.global_step)
        self.trainer.storage.put_scalar("put", 2.0)


def train_and_tell(out: Path) -> list[str]:
    """Train, export, write histories; return the files that this process opened for writing in the meantime."""
    import sys

    opened: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[1])[0] in "wxa":
            opened.append(str(arguments[0]))

    sys.addaudithook(audit)
    trainer = build("plain", out / "run", [LogAndPrint()], kind=lernomatic.Trainer, trackers=None, log_steps=1)
    trainer.train()
    trainer.save(out / "export")
    trainer.save_history(out / "history.json")
    trainer.predict(path=out / "found.jsonl")
    assert trainer.load_csv_logs()["mine"]
    return [path for path in opened if path.startswith(str(out))]


def test_only_the_main_process_writes_and_prints(tmp_path: Path) -> None:
    outcomes = outcomes_on(2, train_and_tell, tmp_path)
    assert [one.exit_code for one in outcomes] == [0, 0], outcomes[1].error
    assert outcomes[0].value != []
    assert outcomes[1].value == []
    assert "Training done!" in outcomes[0].output
    assert outcomes[1].output == ""
    rows = next((tmp_path / "run/logs").glob("*/metrics.json")).read_text().splitlines()
    assert sum('"mine"' in row for row in rows) == 16  # once for each step


class HezarSteps(Trainer):
    """A step of the user's own: Accelerate's backward, and the plain optimizer's step."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward(batch)
        loss = self.compute_loss(outputs, **batch)
        self.accelerator.backward(loss)
        return {**outputs, "loss": loss.detach()}

    def optimization_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainSteps(HezarSteps):
    """The same with torch's own backward, which knows nothing of the other processes."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        outputs = self.forward(batch)
        loss = self.compute_loss(outputs, **batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return {**outputs, "loss": loss.detach()}


@pytest.mark.parametrize("kind", [HezarSteps, PlainSteps])
def test_steps_of_ones_own_are_those_of_one_process(kind: type[Trainer], tmp_path: Path) -> None:
    def work() -> Any:
        sizes = (
            {"batch_size": 12} if kind is PlainSteps else {}
        )  # an update of one micro-batch; the last has one sample
        trainer = build("short last window", tmp_path, kind=kind, **sizes)
        trainer.train()
        return [trainer.state.loss_tracker_avg, trainer.state.update_step], weights_of(trainer)

    assert_as_alone(work)


class TwoOptimizers(Trainer):
    """Has an optimizer of its own beside the trainer's."""

    def build_hooks(self) -> list[Hook | None]:
        self.second = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return []


def test_an_optimizer_of_ones_own_that_would_see_one_process_alone_is_refused(tmp_path: Path) -> None:
    def work() -> str:
        with pytest.raises(ConfigError, match="second of the trainer would see the gradients of one process alone"):
            build("plain", tmp_path, kind=TwoOptimizers).train()
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


def go_on_elsewhere(out: Path) -> tuple[int | None, float | None]:
    build("short last window", out / "first", num_epochs=2, save_steps=16, save_total_limit=None).train()
    saved = sorted((out / "first" / "checkpoints").iterdir())
    trainer = build(
        "short last window", out / "second", num_epochs=2, learning_rate=3.0, resume_from_checkpoint=saved[-2],
        accept_changes=True,
    )  # fmt: skip
    trainer.train()
    return trainer.state.best_checkpoint, trainer.state.best_metric_value


def test_a_run_that_goes_on_in_another_folder_has_the_same_best_result_on_all_processes(tmp_path: Path) -> None:
    ours, theirs = on_ranks(2, go_on_elsewhere, tmp_path)
    assert ours == theirs
    assert ours[0] in steps_saved(tmp_path / "second")

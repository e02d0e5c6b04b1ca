"""Gradients are exchanged by torch's DDP during the backward, whatever the model and the user's code do there."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from cases import NUM_CLASSES, NUM_FEATURES, distance, points
from ranks import on_ranks, outcomes_on
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError, HezarTrainError
from hezar_train.federated import SAM
from hezar_train.runtime import processes
from hezar_train.runtime.gradient_exchange import GradientExchange

NUM_SAMPLES, WIDTH = 49, 400


class Net(nn.Module):
    """Two layers; subclasses add what DDP is said not to follow."""

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.first(x).tanh() * self.scale)
        return logits


class SeveralForwards(Net):
    """Called twice by a trainer's own forward before there is a backward."""


class OutsideForward(Net):
    """A loss that uses weights without calling the model, and a parameter that only it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(NUM_CLASSES))

    settings: ClassVar[dict[str, Any]] = {"criterion": None}

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits * self.noise.exp(), labels) + 0.01 * self.first.weight.square().sum()


class Checkpointed(Net):
    """One block used twice in checkpointed parts, whose gradients come in two parts if the checkpoint is reentrant."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self._part, hidden, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.last(hidden)
        return logits

    def _part(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.block(hidden).tanh() * self.scale


class ReentrantCheckpoints(Checkpointed):
    reentrant = True


class GradientPenalty(Net):
    """A loss with the gradient of an output in it, so that the backward is a double one."""

    settings: ClassVar[dict[str, Any]] = {"criterion": None, "eval_steps": 10**6}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().requires_grad_()
        logits = super().forward(x)
        if not torch.is_grad_enabled():
            return {"logits": logits, "penalty": logits.sum() * 0}
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return {"logits": logits, "penalty": slope.square().sum(-1).mean()}

    def compute_loss(self, logits: torch.Tensor, penalty: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, labels) + 0.1 * penalty


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class PassedWithoutGradient(Net):
    """A backward that passes a parameter and brings it nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(_NoGradient.apply(self.first(x).tanh(), self.scale))
        return logits


class LateSparse(Net):
    """Sparse gradients that no module announces."""

    settings: ClassVar[dict[str, Any]] = {"optimizer_kwargs": {"fused": False}}

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding((x[:, 0] > 0).long(), self.table, sparse=True)
        return super().forward(x) + rows


class Twice(Trainer):
    """Calls the model twice, by keyword."""

    def forward(self, inputs: Any) -> dict[str, Any]:
        return {"logits": self.model(x=inputs["x"]) + self.model(x=-inputs["x"])}


class TwoBackwards(Trainer):
    """Sums two losses by two backwards."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        loss = cross_entropy(self.model(batch["x"]), batch["labels"])
        self.accelerator.backward(loss)
        other = cross_entropy(self.model(-batch["x"]), batch["labels"])
        self.accelerator.backward(other)
        return {"loss": (loss + other).detach()}


class FreezeNowAndThen(Hook):
    """Freeze a layer in every other update."""

    def on_batch_start(self, ctx: Any) -> None:
        if ctx.batch_in_window == 0:
            self.trainer.model.first.requires_grad_(self.trainer.state.update_step % 2 == 0)


def trainer_of(
    make: Callable[[], nn.Module], out: Path, hooks: Any = (), kind: type[Trainer] = Trainer, **changes: Any
) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    rows = [{**row, "x": row["x"].float()} for row in points(NUM_SAMPLES)]
    settings = {
        "batch_size": 2, "global_batch_size": 12, "num_epochs": 2, "criterion": "CrossEntropyLoss", "optimizer": "sgd",
        "learning_rate": 0.1, "task": "text_classification", "trackers": [],
    }  # fmt: skip
    return kind(TrainerConfig(out, **settings | getattr(make, "settings", {}) | changes), model, rows, hooks=hooks)


def train(make: Callable[[], nn.Module], out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    trainer = trainer_of(make, out, **changes)
    trainer.train()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


AWKWARD: dict[str, tuple[type[Net], dict[str, Any]]] = {
    "plain": (Net, {}),
    "several forwards": (SeveralForwards, {"kind": Twice}),
    "weights used outside forward": (OutsideForward, {}),
    "checkpointed": (Checkpointed, {}),
    "gradients in several parts": (ReentrantCheckpoints, {}),
    "gradient penalty": (GradientPenalty, {}),
    "passed without a gradient": (PassedWithoutGradient, {}),
    "sparse": (LateSparse, {}),
    "several backwards": (Net, {"kind": TwoBackwards}),
    "frozen now and then": (Net, {"hooks": [FreezeNowAndThen()]}),
    "sharpness-aware": (Net, {"hooks": [SAM(rho=0.1)]}),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_whatever_the_model_does_it_trains_as_on_one_process(name: str, tmp_path: Path) -> None:
    make, changes = AWKWARD[name]
    (alone,) = on_ranks(1, lambda: train(make, tmp_path, **changes))
    for count in (2, 3):
        told = on_ranks(count, lambda: train(make, tmp_path, **changes))
        for weights in told:
            assert distance(weights, alone) < 1e-5
            assert distance(weights, told[0]) == 0.0


REASONS = {
    "gradients in several parts": "reentrant gradient checkpointing",
    "sparse": "some of them are sparse",
    "several backwards": "an update has several backwards",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_where_nothing_can_overlap_one_sentence_says_so(name: str, tmp_path: Path) -> None:
    make, changes = AWKWARD[name]
    outcomes = outcomes_on(2, lambda: train(make, tmp_path, **changes) and None)
    assert [one.exit_code for one in outcomes] == [0, 0], outcomes[0].error
    told = outcomes[0].output.count("exchanged after the backward and not during it")
    assert told == (1 if name in REASONS else 0)
    assert REASONS.get(name, "") in outcomes[0].output


class Wide(nn.Module):
    """Enough weights for several buckets: the first holds one megabyte."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        for layer in self.middle:
            hidden = layer(hidden).tanh()
        logits: torch.Tensor = self.last(hidden)
        return logits


class FailAfter(Hook):
    def __init__(self, update: int) -> None:
        self._update = update

    def on_batch_forward(self, _: Any) -> None:
        if self.trainer.state.update_step == self._update:
            raise RuntimeError("stop here")


def break_and_resume(out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    for update in (2, 4):
        with pytest.raises(RuntimeError, match="stop here"):
            train(Wide, out, save_steps=1, resume_from_checkpoint=True, hooks=[FailAfter(update)], **changes)
    return train(Wide, out, save_steps=1, resume_from_checkpoint=True, **changes)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_buckets_are_rounded_alike_before_and_after_a_resume(count: int, tmp_path: Path) -> None:
    changes = {"optimizer": "adamw", "learning_rate": 0.001, "num_epochs": 1, "batch_size": 1}
    unbroken = on_ranks(count, lambda: train(Wide, tmp_path / "unbroken", save_steps=1, **changes))
    resumed = on_ranks(count, lambda: break_and_resume(tmp_path / "resumed", **changes))
    assert distance(resumed[0], unbroken[0]) == 0.0
    assert distance(unbroken[-1], unbroken[0]) == 0.0


@pytest.mark.parametrize("count", [2, 3])
def test_compressed_gradients_train_and_are_resumed_bit_by_bit(count: int, tmp_path: Path) -> None:
    changes = {"learning_rate": 0.01, "num_epochs": 1, "gradient_compression": "fp16"}
    unbroken = on_ranks(count, lambda: train(Wide, tmp_path / "unbroken", save_steps=1, **changes))
    resumed = on_ranks(count, lambda: break_and_resume(tmp_path / "resumed", **changes))
    assert distance(resumed[0], unbroken[0]) == 0.0
    assert distance(unbroken[-1], unbroken[0]) == 0.0
    (alone,) = on_ranks(1, lambda: train(Wide, tmp_path / "alone", **changes))
    assert 1e-7 < distance(unbroken[0], alone) < 1e-3  # rounded to half precision, and trained


def test_with_compressed_gradients_another_number_of_processes_is_a_change(tmp_path: Path) -> None:
    changes = {"gradient_compression": "fp16", "num_epochs": 1, "save_steps": 1}

    def begin() -> None:
        with pytest.raises(RuntimeError, match="stop here"):
            train(Net, tmp_path, hooks=[FailAfter(2)], **changes)

    def go_on(**others: Any) -> dict[str, torch.Tensor]:
        return train(Net, tmp_path, resume_from_checkpoint=True, **changes | others)

    on_ranks(2, begin)
    for one in outcomes_on(3, go_on):
        assert "number of processes: 2 in the checkpoint, 3 now (gradient_compression='fp16'" in one.error
    for one in outcomes_on(2, lambda: go_on(gradient_compression=None)):
        assert "gradient_compression: 'fp16' in the checkpoint, None now" in one.error
    on_ranks(3, lambda: go_on(accept_changes=True))


def test_gradients_that_cannot_be_compressed_are_refused(tmp_path: Path) -> None:
    def work() -> str:
        with pytest.raises(ConfigError, match="needs GPUs whose processes talk through NCCL; these talk through gloo"):
            train(Net, tmp_path, gradient_compression="bf16")
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2
    with pytest.raises(ConfigError, match="gradient_compression='fp16' cannot be used with sharding='full'"):
        TrainerConfig(tmp_path, gradient_compression="fp16", sharding="full")


class Sent:
    """Notes when DDP sends a bucket, and when the gradient of a layer is known."""

    def __init__(self, trainer: Any) -> None:
        self.told: list[str] = []
        trainer.model.first.weight.register_hook(lambda _: self.told.append("first layer"))
        made = GradientExchange.__init__

        def make(exchange: GradientExchange, *given: Any) -> None:
            made(exchange, *given)
            exchange._ddp.register_comm_hook(None, lambda _, bucket: self._send(bucket))  # type: ignore[no-untyped-call]

        GradientExchange.__init__ = make  # type: ignore[method-assign]

    def _send(self, bucket: Any) -> Any:
        self.told.append("bucket")
        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def sent(out: Path, **changes: Any) -> list[str]:
    trainer = trainer_of(Wide, out, num_epochs=1, **changes)
    noted = Sent(trainer)
    trainer.train()
    return noted.told


def test_buckets_are_sent_while_the_backward_runs_and_once_for_an_update(tmp_path: Path) -> None:
    changes = {"global_batch_size": None, "gradient_accumulation_steps": 3, "max_steps": 9}
    (told, _) = on_ranks(2, lambda: sent(tmp_path, **changes))
    observed = ["first layer"] * 3 + ["bucket"] * 2
    overlapped = ["first layer"] * 2 + ["bucket", "first layer", "bucket"]
    assert told == observed + overlapped * 2


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "barrier", "reduce", "all_gather_into_tensor")


class CountMessages(Hook):
    """Note what the package itself sends in each update."""

    def __init__(self) -> None:
        self.sizes: list[list[tuple[str, int]]] = []

    def on_fit_start(self, _: Any) -> None:
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def on_batch_start(self, ctx: Any) -> None:
        if ctx.batch_in_window == 0:
            self.sizes.append([])

    def _counted(self, name: str, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            tensors = [one for one in given if isinstance(one, torch.Tensor)]
            if self.sizes:
                self.sizes[-1].append((name, sum(one.nbytes for one in tensors)))
            return send(*given, **named)

        return counted


@pytest.mark.parametrize("accumulation", [1, 4])
def test_an_update_sends_two_small_messages_of_ours_in_one_round_each(accumulation: int, tmp_path: Path) -> None:
    def sizes() -> list[list[tuple[str, int]]]:
        counting = CountMessages()
        changes = {"global_batch_size": None, "gradient_accumulation_steps": accumulation, "save_enabled": False}
        train(Wide, tmp_path, hooks=[counting], num_epochs=1, **changes)
        return counting.sizes

    for one in on_ranks(2, sizes):
        assert len(one) > 3
        for messages in one[1:-1]:  # in the first DDP is made; after the last the epoch ends
            assert [name for name, _ in messages] == ["all_gather"] * 2  # gloo's all_reduce takes two rounds
            assert max(size for _, size in messages) <= 64


def test_a_sum_has_the_same_bits_on_all_processes_and_is_the_one_of_many_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sums() -> list[list[float]]:
        runtime = trainer_of(Net, tmp_path).runtime
        rank = runtime.rank
        given = [0.1 * (rank + 1), 2.0**53 * (rank - 1), math.inf if rank == 1 else 1.0, torch.tensor(1.0 / (rank + 3))]
        found = [runtime.processes.sum(given)]
        monkeypatch.setattr(processes, "FEW", 1)
        return [*found, runtime.processes.sum(given)]

    told = on_ranks(3, sums)
    gathered, reduced = told[0]
    assert told == [[gathered, reduced]] * 3
    assert gathered == pytest.approx([0.6, 0.0, math.inf, 47 / 60], rel=1e-7)
    assert reduced == pytest.approx(gathered, rel=1e-15)


class Noise(Hook):
    """Change gradients, after the backward, on each process in its own way."""

    def __init__(self, *, unseen: bool) -> None:
        self._unseen = unseen

    def on_batch_backward(self, ctx: Any) -> None:
        for parameter in self.trainer.model.parameters() if ctx.closes_window else ():
            changed = parameter.grad.data if self._unseen else parameter.grad
            changed.add_(torch.randn_like(changed) * 0.1)


class OwnNoise(Trainer):
    """The same before a step of one's own."""

    def optimization_step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad += torch.randn_like(parameter.grad) * 0.1
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    "changes", [{"hooks": [Noise(unseen=False)]}, {"hooks": [Noise(unseen=True)]}, {"kind": OwnNoise}]
)
def test_what_each_process_does_to_its_gradients_does_not_part_the_copies(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    outcomes = outcomes_on(2, lambda: train(Net, tmp_path, **changes))
    assert [one.exit_code for one in outcomes] == [0, 0], outcomes[0].error
    assert distance(outcomes[0].value, outcomes[1].value) == 0.0
    assert outcomes[0].output.count("so they are averaged once more") == 1
    (plain, _) = on_ranks(2, lambda: train(Net, tmp_path / "plain"))
    assert distance(outcomes[0].value, plain) > 0.01  # the noise counts


class FailInBackward(Hook):
    """Let backwards fail, from an update on, so often."""

    def __init__(self, update: int) -> None:
        self._update, self.is_on = update, True

    def on_batch_forward(self, ctx: Any) -> None:
        if self.is_on and self.trainer.state.update_step == self._update and ctx.closes_window:
            ctx.loss.register_hook(self._fail)

    def _fail(self, _: torch.Tensor) -> None:
        raise RuntimeError("no backward today")


class Careless(Trainer):
    """Goes on after whatever happens in a step."""

    def training_step(self, batch: Any) -> dict[str, Any]:
        try:
            return super().training_step(batch)
        except RuntimeError:
            loss = torch.zeros(())
            self.note_loss(loss)
            return {"loss": loss}


def test_a_backward_that_failed_half_way_is_forgotten_when_training_goes_on(tmp_path: Path) -> None:
    def work() -> dict[str, torch.Tensor]:
        failing = FailInBackward(3)
        trainer = trainer_of(Net, tmp_path / "failing", hooks=[failing], save_steps=1)
        with pytest.raises(RuntimeError, match="no backward today"):
            trainer.train()
        failing.is_on = False
        trainer.train()
        return {name: value.clone() for name, value in trainer.model.state_dict().items()}

    told = on_ranks(2, work)
    expected = on_ranks(2, lambda: train(Net, tmp_path / "plain", save_steps=1))
    assert distance(told[0], told[1]) == 0.0
    assert distance(told[0], expected[0]) == 0.0


def test_a_failed_backward_is_not_passed_over(tmp_path: Path) -> None:
    def work() -> str:
        trainer = trainer_of(Net, tmp_path, kind=Careless, hooks=[FailInBackward(3)])
        with pytest.raises(HezarTrainError, match="a backward failed half way while its gradients were exchanged"):
            trainer.train()
        return "refused"

    assert on_ranks(2, work) == ["refused"] * 2


class FreezeOnOne(Hook):
    def on_fit_start(self, _: Any) -> None:
        self.trainer.model.first.requires_grad_(self.trainer.runtime.rank == 0)


def test_processes_that_train_different_parameters_are_told(tmp_path: Path) -> None:
    for one in outcomes_on(2, lambda: train(Net, tmp_path, hooks=[FreezeOnOne()])):
        assert "the processes train different parameters" in one.error


def test_the_model_stays_the_users_own_and_can_be_copied(tmp_path: Path) -> None:
    def work() -> bool:
        trainer = trainer_of(Net, tmp_path)
        model = trainer.model
        trainer.train()
        twin = copy.deepcopy(model)
        twin(torch.ones(2, NUM_FEATURES)).sum().backward()
        return type(model) is Net and trainer.model is model and model.last.bias.grad is None

    assert on_ranks(2, work) == [True, True]


def test_gradients_that_were_exchanged_outlast_another_training_in_between(tmp_path: Path) -> None:
    def work() -> bool:
        trainer = trainer_of(Net, tmp_path, finetune_steps=2)
        rows = [trainer.train_dataset[number] for number in range(4)]
        batch = {"x": torch.stack([row["x"] for row in rows]), "labels": torch.tensor([row["labels"] for row in rows])}
        trainer.training_step(batch)
        before = [one.grad.clone() for one in trainer.model.parameters()]
        trainer.finetune()
        return all(map(torch.equal, before, (one.grad for one in trainer.model.parameters())))

    assert on_ranks(2, work) == [True, True]


def test_an_exchange_that_is_dropped_is_freed_with_its_buckets(tmp_path: Path) -> None:
    def is_freed() -> list[bool]:
        trainer = trainer_of(Wide, tmp_path, num_epochs=1)
        trainer.train()
        given = list(nn.Linear(3, 2).parameters())
        exchanges = [GradientExchange(given), GradientExchange(given)]
        exchanges[1].close()
        seen = [weakref.ref(kept) for one in exchanges for kept in (one, one._reducer)]
        exchanges.clear()
        gc.collect()
        return [one() is None for one in seen]

    assert on_ranks(2, is_freed) == [[True] * 4] * 2

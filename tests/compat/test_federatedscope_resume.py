"""Behind FederatedScope's door a round that is killed goes on bit by bit, whatever its hooks keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fs_toy import build, cfg, loaders, net, weights

from hezar_train.compat.federatedscope import (
    CN,
    Context,
    GeneralMultiModelTrainer,
    GeneralTorchTrainer,
    get_optimizer,
    wrap_fedprox_trainer,
    wrap_regularized_optimizer,
)
from hezar_train.errors import DataError

Wrap = Callable[[GeneralTorchTrainer], GeneralTorchTrainer]


class OwnBackward(GeneralTorchTrainer):
    def _hook_on_batch_backward(self, ctx: Any) -> None:
        ctx.optimizer.zero_grad()
        ctx.loss_task.backward()
        ctx.optimizer.step()


class WithSecondOptimizer(GeneralTorchTrainer):
    """A model and an optimizer beside the trainer's own, both made by the subclass."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.aux_model = net()
        self.num_calls = 0

    def _hook_on_fit_start_init(self, ctx: Any) -> None:
        super()._hook_on_fit_start_init(ctx)
        if ctx.cur_mode == "train":
            ctx.aux_optimizer = get_optimizer(self.aux_model, "SGD", 0.1, momentum=0.9)

    def _hook_on_batch_backward(self, ctx: Any) -> None:
        super()._hook_on_batch_backward(ctx)
        x, y = ctx.data_batch
        ctx.aux_optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.aux_model(x), y).backward()
        ctx.aux_optimizer.step()
        self.num_calls += 1


def as_it_is(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    return trainer


def with_fedprox(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    trainer.cfg.fedprox.mu = 0.3
    return wrap_fedprox_trainer(trainer)  # type: ignore[no-any-return]


def with_head_first(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    """Train the head in the first epoch and the rest in the second, each with an optimizer of its own."""

    def start(ctx: Context) -> None:
        ctx.epochs_begun = 0
        ctx.for_head = get_optimizer(ctx.model[3], "SGD", 0.1, momentum=0.9)
        ctx.for_body = get_optimizer(ctx.model[0], "SGD", 0.1, momentum=0.9)
        ctx.optimizer = ctx.for_head

    def switch(ctx: Context) -> None:
        ctx.epochs_begun += 1
        if ctx.epochs_begun == 2:
            ctx.optimizer = ctx.for_body
            ctx.model[3].requires_grad_(False)

    def end(ctx: Context) -> None:
        ctx.model[3].requires_grad_(True)

    trainer.register_hook_in_train(start, "on_fit_start")
    trainer.register_hook_in_train(switch, "on_epoch_start")
    trainer.register_hook_in_train(end, "on_fit_end")
    return trainer


def with_ends(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    """Change the weights at the end of each epoch and of each round."""

    def shrink(ctx: Context) -> None:
        ctx.model.load_state_dict({name: value * 0.9 for name, value in ctx.model.state_dict().items()})

    trainer.register_hook_in_train(shrink, "on_epoch_end")
    trainer.register_hook_in_train(shrink, "on_fit_end")
    return trainer


def with_reference(trainer: GeneralTorchTrainer) -> GeneralTorchTrainer:
    """Draw the weights to those of the round's start, by the optimizer."""

    def start(ctx: Context) -> None:
        ctx.optimizer = wrap_regularized_optimizer(ctx.optimizer, 0.5)
        ctx.optimizer.set_compared_para_group([{"params": list(ctx.model.parameters())}])

    trainer.register_hook_in_train(start, "on_fit_start")
    return trainer


def saving(asked: CN, *, resume: bool = False) -> CN:
    asked.hezar_train = {
        "output_dir": str(Path(asked.outdir) / "run"),
        "save_steps": 2,
        "resume_from_checkpoint": resume,
    }
    return asked


def kill_at(trainer: Any, step: int) -> None:
    def fail(ctx: Context) -> None:
        if ctx.state.global_step == step:
            raise KeyboardInterrupt

    trainer.hooks_in_train["on_batch_forward"].append(fail)


def everything(trainer: Any) -> torch.Tensor:
    aux = getattr(trainer, "aux_model", None)
    more = [] if aux is None else [value.flatten().double() for value in aux.state_dict().values()]
    return torch.cat([weights(trainer), *more])


CASES: list[tuple[type[GeneralTorchTrainer], Wrap]] = [
    (GeneralTorchTrainer, as_it_is), (OwnBackward, as_it_is), (WithSecondOptimizer, as_it_is),
    (GeneralTorchTrainer, with_fedprox), (GeneralTorchTrainer, with_head_first), (GeneralTorchTrainer, with_reference),
    (GeneralTorchTrainer, with_ends),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "wrap"), CASES)
@pytest.mark.parametrize(
    "step", [6, 9, pytest.param(3, marks=pytest.mark.slow), 12, pytest.param(14, marks=pytest.mark.slow)]
)
def test_a_round_that_is_killed_ends_as_the_unbroken_one(
    tmp_path: Path, kind: type[GeneralTorchTrainer], wrap: Wrap, step: int
) -> None:
    changes: dict[str, Any] = {"train__batch_or_epoch": "epoch", "train__local_update_steps": 2}
    whole = wrap(kind(net(), loaders(), "cpu", saving(cfg(tmp_path / "whole", **changes))))
    wanted = [whole.train()[2] for _ in range(2)]

    broken = wrap(kind(net(), loaders(), "cpu", saving(cfg(tmp_path / "broken", **changes))))
    kill_at(broken, step)
    with pytest.raises(KeyboardInterrupt):
        [broken.train() for _ in range(2)]
    again = wrap(kind(net(), loaders(), "cpu", saving(cfg(tmp_path / "broken", **changes), resume=True)))
    assert 0 < again.state.global_step <= step
    found = [again.train()[2] for _ in range(2 if step <= 12 else 1)]
    assert torch.equal(everything(again), everything(whole))
    assert found[-1] == wanted[-1]


def test_a_loader_that_a_hook_assigns_is_told_that_no_checkpoint_knows_its_place(tmp_path: Path) -> None:
    def assigned(*, resume: bool = False) -> GeneralTorchTrainer:
        trainer = GeneralTorchTrainer(net(), loaders(), "cpu", saving(cfg(tmp_path), resume=resume))
        trainer.register_hook_in_train(lambda ctx: setattr(ctx, "train_loader", loaders()["train"]), "on_fit_start")
        return trainer

    broken = assigned()
    kill_at(broken, 3)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    with pytest.raises(DataError, match=r"ctx.train_loader is a hook's own: no checkpoint knows its place"):
        assigned(resume=True).train()


def test_a_loop_of_ones_own_is_told_that_it_cannot_go_on_in_the_middle(tmp_path: Path) -> None:
    class OwnLoop(GeneralTorchTrainer):
        def _run_epoch(self, hooks_set: Any) -> None:
            super()._run_epoch(hooks_set)

    broken = OwnLoop(net(), loaders(), "cpu", saving(cfg(tmp_path)))
    kill_at(broken, 3)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = OwnLoop(net(), loaders(), "cpu", saving(cfg(tmp_path), resume=True))
    with pytest.raises(DataError, match=r"broken off at step 2, and _run_epoch of OwnLoop"):
        again.train()


@pytest.mark.parametrize(("mode", "step"), [("sequential", 3), ("sequential", 7), ("sequential", 10), ("parallel", 4)])
def test_several_models_that_are_killed_end_as_the_unbroken_ones(tmp_path: Path, mode: str, step: int) -> None:
    def make(folder: str, **how: bool) -> GeneralMultiModelTrainer:
        return GeneralMultiModelTrainer(2, mode, net(), loaders(), "cpu", saving(cfg(tmp_path / folder), **how))

    whole, broken = make("whole"), make("broken")
    wanted = whole.train()[0]

    def fail(ctx: Context) -> None:
        if ctx.state.global_step == step:
            raise KeyboardInterrupt

    for one in broken.hooks_in_train if mode == "sequential" else [broken.hooks_in_train]:
        one["on_batch_start"].append(fail)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    again = make("broken", resume=True)
    assert again.train()[0] == wanted
    for one, other in zip(again.ctx.models, whole.ctx.models, strict=True):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_a_run_folder_of_its_own_for_each_trainer(tmp_path: Path) -> None:
    first, second = build(tmp_path), build(tmp_path)
    assert first.folder.root != second.folder.root
    first.train()
    second.train()
    assert torch.equal(weights(first), weights(second))

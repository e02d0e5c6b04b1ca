"""Everything else that a trainer does, where each process has a share of the model: as with one process, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from cases import NUM_CLASSES, NUM_FEATURES, Fail, distance, points
from ranks import on_ranks, outcomes_on
from safetensors.torch import load_file
from spread import SETTINGS, climb, tower
from torch import nn
from torch.utils.data import IterableDataset
from workload import last_checkpoint

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.compat import federatedscope, lernomatic
from hezar_train.federated import FedProx
from hezar_train.multi_model import MultiModelTrainer
from hezar_train.runtime.sharding import is_sharded
from hezar_train.trainer.finetuning import freeze_first


def assert_as_alone(work: Any, limit: float = 1e-9) -> Any:
    """Run work that returns (values, weights) on one process and on two with shares; all must agree."""
    ((values, weights),) = on_ranks(1, work)
    told = on_ranks(2, work)
    for ours, our_weights in told:
        assert ours == (pytest.approx(values, rel=limit) if isinstance(values, Mapping | list) else values)
        assert distance(our_weights, weights) <= limit
    return values


@pytest.mark.parametrize("count", [9, 13], ids=["one process has none of the last", "uneven"])
@pytest.mark.parametrize("max_eval_batches", [None, 3])
def test_evaluation_and_prediction_count_every_sample_once(
    max_eval_batches: int | None, count: int, tmp_path: Path
) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, max_eval_batches=max_eval_batches, eval_batch_size=4)
        predicted = trainer.predict(points(count))
        assert len(predicted) == count
        assert trainer.evaluate(points(count)) == trainer.evaluate(points(count))
        found = {**trainer.evaluate(points(count)), **{str(n): value for n, value in enumerate(predicted)}}
        return found, trainer.get_model_para()

    assert_as_alone(work)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(points(13, 13))


def test_a_stream_is_evaluated_in_step(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, eval_batch_size=4)
        assert len(trainer.predict(Stream())) == 13
        return trainer.evaluate(Stream()), trainer.get_model_para()

    assert_as_alone(work)


def test_a_trainer_that_only_evaluates_loads_shares(tmp_path: Path) -> None:
    on_ranks(2, lambda: climb(tmp_path))

    def work() -> Any:
        trained = tower(tmp_path, resume_from_checkpoint=True)
        trainer = Trainer(trained.config, tower(tmp_path / "other", sharding="none").model, None, trained.eval_dataset)
        assert is_sharded(trainer.model) == (trainer.runtime.num_processes > 1)
        assert trainer.evaluate() == trained.evaluate()
        return trainer.evaluate(), trainer.get_model_para()

    assert_as_alone(work)


@pytest.mark.parametrize("changes", [{}, {"finetune_param": ["last", "blocks.1"]}], ids=["all", "a part"])
def test_finetuning_after_training_is_that_of_one_process(changes: dict[str, Any], tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, finetune_steps=2, finetune_batch_or_epoch="epoch", **changes)
        trainer.train()
        return trainer.finetune().metrics, trainer.get_model_para()

    assert_as_alone(work)


def test_evaluating_with_finetuned_weights_leaves_the_weights(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, finetune_before_eval=True, finetune_batch_or_epoch="epoch")
        return trainer.evaluate(), trainer.get_model_para()

    assert_as_alone(work)


def test_finding_a_learning_rate_leaves_no_trace(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path)
        before = trainer.get_model_para()
        found = trainer.find_lr(num_steps=8, lr_max=1.0, acc_test=True, acc_batches=2)
        assert distance(trainer.get_model_para(), before) == 0.0
        trainer.train()
        return found.losses + found.accuracies, trainer.get_model_para()

    assert_as_alone(work)


def test_a_search_for_a_rate_that_fails_inside_the_model_leaves_no_trace(tmp_path: Path) -> None:
    def work() -> Any:
        trainer, calls = tower(tmp_path), iter(range(1000))

        def fail(*_: Any) -> None:
            if next(calls) == 7:
                raise Fail

        handle = trainer.model.blocks[1].norm.register_forward_hook(fail)
        before = trainer.get_model_para()
        with pytest.raises(Fail):
            trainer.find_lr(num_steps=8, lr_max=1.0)
        handle.remove()
        found = trainer.evaluate()
        assert distance(trainer.get_model_para(), before) == 0.0
        trainer.train()
        return found, trainer.get_model_para()

    assert_as_alone(work)


def test_what_is_frozen_stays_and_what_is_thawed_learns(tmp_path: Path) -> None:
    def work() -> Any:
        trainer: Any = tower(tmp_path, kind=lernomatic.Trainer, local_update_steps=1, batch_or_epoch="epoch")
        seen = []
        for count in (6, 3):  # the first layer and the first block; then half of that block learns
            trainer.unfreeze_to(6)
            trainer.freeze_to(count)
            before = trainer.get_model_para()
            trainer.train()
            after = trainer.get_model_para()
            seen.append([name for name in after if not torch.equal(after[name], before[name])])
        return [len(names) for names in seen], after

    assert assert_as_alone(work) == [13, 16]  # of 21, of which two are unused


def test_a_block_that_was_frozen_from_the_start_learns_once_it_is_thawed(tmp_path: Path) -> None:
    class Frozen(lernomatic.Trainer):
        def build_optimizer(self) -> Any:
            made = super().build_optimizer()
            freeze_first(self.model, 6)
            return made

    def work() -> Any:
        trainer: Any = tower(tmp_path, kind=Frozen, local_update_steps=1, batch_or_epoch="epoch")
        trainer.train()
        trainer.unfreeze_to(6)
        trainer.train()
        return [], {name: value for name, value in trainer.get_model_para().items() if "unused" not in name}

    assert_as_alone(work)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adagrad", "adamax", "nadam", "rmsprop", "adadelta", "asgd"])
def test_optimizers_step_shares_as_they_step_the_whole(optimizer: str, tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, optimizer=optimizer, weight_decay=0.0, num_epochs=1)
        trainer.train()
        return [], trainer.get_model_para()

    assert_as_alone(work)


def test_parameters_go_out_and_come_in_whole(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, local_update_steps=1, batch_or_epoch="epoch")
        samples, given, _ = trainer.train()
        given = {name: value / 2 for name, value in given.items()}
        trainer.update(given, strict=True)
        trainer.train()
        return [samples], trainer.get_model_para()

    assert_as_alone(work)


def test_an_export_is_one_plain_file_that_the_main_process_writes(tmp_path: Path) -> None:
    def work(out: Path) -> dict[str, torch.Tensor]:
        trainer = tower(out / "run")
        trainer.train()
        trainer.save(out / "export")
        return trainer.get_model_para()

    (alone,) = on_ranks(1, work, tmp_path / "alone")
    on_ranks(2, work, tmp_path / "two")
    one, two = tmp_path / "alone/export", tmp_path / "two/export"
    assert {path.relative_to(one) for path in one.rglob("*")} == {path.relative_to(two) for path in two.rglob("*")}
    for name in ("model.safetensors", "train/optimizer.safetensors"):
        ours, theirs = load_file(two / name), load_file(one / name)
        ours.pop("num_samples", None), theirs.pop("num_samples", None)  # counted by the main process alone
        assert distance(ours, theirs) <= 1e-9
    assert set(alone) - set(load_file(two / "model.safetensors")) == {"tied.weight"}


@pytest.mark.parametrize("readers", [1, 2])
def test_weights_to_begin_with_come_from_shares_or_from_a_plain_file(readers: int, tmp_path: Path) -> None:
    def export() -> dict[str, torch.Tensor]:
        trainer = tower(tmp_path / "run")
        trainer.train()
        trainer.save(tmp_path / "export")
        return trainer.get_model_para()

    first, _ = on_ranks(2, export)
    for source in (tmp_path / "run", last_checkpoint(tmp_path / "run"), tmp_path / "export"):
        for one in on_ranks(readers, lambda s=source: tower(tmp_path, init_weights_from=s).get_model_para()):
            assert distance(one, first) == 0.0


class OfTwoDoors(federatedscope.Trainer, lernomatic.Trainer):
    """Has the names of both."""


def test_checkpoints_and_rounds_at_a_path_of_ones_own(tmp_path: Path) -> None:
    def work() -> Any:
        trainer: Any = tower(tmp_path / "run", kind=OfTwoDoors, local_update_steps=1, batch_or_epoch="epoch")
        trainer.train()
        before = trainer.get_model_para()
        trainer.save_checkpoint(tmp_path / "mine")
        trainer.save_model(tmp_path / "round", 7)
        trainer.train()
        assert distance(trainer.get_model_para(), before) > 0.0
        assert trainer.load_model(tmp_path / "round") == 7
        assert distance(trainer.get_model_para(), before) == 0.0
        trainer.train()
        trainer.load_checkpoint(tmp_path / "mine")
        assert distance(trainer.get_model_para(), before) == 0.0
        trainer.load_model_checkpoint(tmp_path / "mine")
        trainer.train()
        return [trainer.state.update_step], trainer.get_model_para()

    assert_as_alone(work)


def test_the_check_of_a_loss_holds(tmp_path: Path) -> None:
    assert on_ranks(2, lambda: tower(tmp_path).verify_invariance().holds) == [True, True]


class FailOnce(Hook):
    """Raise once after three updates: behind the forward, behind the backward, or in the middle of one of them."""

    def __init__(self, place: str) -> None:
        self._place, self._is_done = place, False

    def before_train(self) -> None:
        layer = self.trainer.model.blocks[1].norm
        layer.register_forward_hook(lambda *_: self._fail("inside the forward"))
        layer.register_full_backward_hook(lambda *_: self._fail("inside the backward"))

    def on_batch_forward(self, _: Any) -> None:
        self._fail("behind the forward")

    def on_batch_backward(self, _: Any) -> None:
        self._fail("behind the backward")

    def _fail(self, place: str) -> None:
        if (place, self.trainer.state.update_step, self._is_done) == (self._place, 3, False):
            self._is_done = True
            raise Fail(place)


@pytest.mark.parametrize(
    "place", [f"{where} the {what}" for where in ("behind", "inside") for what in ("forward", "backward")]
)
def test_a_call_that_failed_on_all_processes_can_be_repeated(place: str, tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, [FailOnce(place)])
        with pytest.raises(Fail):
            trainer.train()
        trainer.train()
        return [trainer.state.update_step], trainer.get_model_para()

    assert_as_alone(work)


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


def test_a_step_of_ones_own_trains_one_model(tmp_path: Path) -> None:
    def work() -> Any:
        trainer = tower(tmp_path, kind=OwnStep, batch_size=6, max_steps=4)
        trainer.train()
        return [], trainer.get_model_para()

    assert_as_alone(work)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}], ids=["fp32", "bf16"])
def test_batch_statistics_over_all_processes_are_those_of_one(settings: dict[str, Any], tmp_path: Path) -> None:
    def work() -> Any:
        torch.manual_seed(0)
        dtype = torch.float32 if settings else torch.float64
        data = [{**row, "x": row["x"].to(dtype)} for row in points(48)]
        changes = {"sync_batchnorm": True, "global_batch_size": 12, "batch_size": 12, "task": None}
        config = TrainerConfig(tmp_path, **{**SETTINGS, **changes, **settings})
        trainer = Trainer(config, Normalised().to(dtype), data)
        trainer.train()
        state = trainer.model.state_dict()
        means = {name: state[name].clone() for name in state if "running" in name}
        return [], trainer.get_model_para() | means

    assert_as_alone(work, 0.1 if settings else 1e-9)


class Speaker(nn.Module):
    """Generates as many tokens as the first one says: on each process another number of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        found = tokens
        for _ in range(int(tokens.max())):
            hidden = self.embedding(found[:, -1:])
            for block in self.blocks:
                hidden = block(hidden)
            found = torch.cat([found, self.head(hidden).argmax(-1)], dim=1)
        return found


class Words:
    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in (rows.tolist() if hasattr(rows, "tolist") else rows)]

    def save(self, folder: str) -> None:
        Path(folder, "words").touch()


@pytest.mark.parametrize("trained_first", [True, False])
def test_texts_of_any_length_are_generated_by_each_process_on_its_own(trained_first: bool, tmp_path: Path) -> None:
    def work() -> Any:
        torch.manual_seed(0)
        rows = [{"tokens": [n % 5 + 1, 2], "labels": [2, n % 5 + 1]} for n in range(7)]
        collate = lambda some: {key: torch.tensor([one[key] for one in some]) for key in some[0]}  # noqa: E731
        settings = {**SETTINGS, "task": "text_generation", "metrics": ["bleu"], "batch_size": 1, "global_batch_size": 2}
        trainer = Trainer(
            TrainerConfig(tmp_path, **settings), Speaker().double(), rows, rows, collate, preprocessor=Words()
        )
        if trained_first:
            trainer.train()
        return [len(str(one)) for one in trainer.predict()] + list(
            trainer.evaluate().values()
        ), trainer.get_model_para()

    assert_as_alone(work)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer over whole parameters": (
        {"optimizer_object": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)},
        "was built over whole parameters, and sharding='full' has cut them since. Name it in the config",
    ),
    "new weights": ({"finetune_reinit": True, "finetune_param": ["last"]}, "finetune_reinit=True cannot be used with"),
    "moving away": ({"offload_after_routine": True}, "offload_after_routine=True cannot be used with a sharded model"),
    "a hook that moves weights": ({"hooks": [FedProx(0.1)]}, "FedProx moves whole weights"),
    "an optimizer that steps whole parameters": (
        {"optimizer": "adafactor"},
        "optimizer='adafactor' steps whole parameters only; sharding='full' leaves each process a share. Use 'adamw'.",
    ),
    "half precision": ({"mixed_precision": "fp16"}, "mixed_precision='fp16' cannot be used with sharding='full'"),
    "another word": ({"sharding": "half"}, "sharding='half' is not known. Choose from: full, none."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_with_shares_is_refused_with_a_reason(what: str, tmp_path: Path) -> None:
    changes, words = REFUSED[what]
    for one in outcomes_on(2, lambda: tower(tmp_path, **changes)):
        assert one.exit_code == 1
        assert "ConfigError" in one.error
        assert words in one.error


def test_several_models_are_not_shared_out(tmp_path: Path) -> None:
    config = TrainerConfig(tmp_path, sharding="full")
    with pytest.raises(ValueError, match="sharding='full' cuts one model; several are trained with sharding='none'"):
        MultiModelTrainer(config, {"one": Normalised(), "two": Normalised()}, points(4))


def test_a_parameter_without_a_dimension_is_refused_by_name(tmp_path: Path) -> None:
    def work() -> Any:
        model = Normalised()
        model.temperature = nn.Parameter(torch.tensor(1.0))
        return Trainer(TrainerConfig(tmp_path, **SETTINGS), model, points(8))

    for one in outcomes_on(2, work):
        assert "cannot cut parameters without a dimension: temperature. Give them the shape (1,)." in one.error

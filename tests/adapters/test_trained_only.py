"""A frozen backbone without adapters: `save_trained_only` holds what is trained, whatever becomes of its freezing."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Group
from safetensors.torch import load_file, save_file
from tiny import LAST_STEP, Kill, checkpoint, settings
from torch import nn

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.checkpoint import Checkpoint, Checkpointer, CheckpointStore, Contents, TrainedPart, export_model
from hezar_train.errors import CheckpointError, ConfigError

WIDTH = 64


class Net(nn.Module):
    """A frozen backbone with statistics of its own, a head, and a teacher that nobody gives a gradient."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.head, self.teacher = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.backbone.requires_grad_(False)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(x))
        return found


class At(Hook):
    """Do something to the model after a step."""

    def __init__(self, acts: dict[int, Callable[[Any], object]]) -> None:
        self._acts = acts

    def on_batch_end(self, ctx: Any) -> None:
        act = self._acts.get(self.trainer.state.global_step)
        if act is not None:
            act(self.trainer.model)


def build(out: Path, model: nn.Module | None = None, hooks: Any = (), **changes: Any) -> Trainer:
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.rand(16, 4, generator=generator), torch.randint(2, (16,), generator=generator)
    )
    given = settings(criterion="CrossEntropyLoss", save_trained_only=True, optimizer="sgd")
    return Trainer(TrainerConfig(out, **given | changes), Net() if model is None else model, data, hooks=hooks)


def stored(out: Path, step: int = LAST_STEP) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(out, step) / "model.safetensors")


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_checkpoint_holds_the_head_and_the_statistics_and_is_resumed_after_a_kill(tmp_path: Path) -> None:
    unbroken = build(tmp_path / "unbroken")
    unbroken.train()
    statistics = {f"backbone.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert stored(tmp_path / "unbroken").keys() == {"head.weight", "head.bias", *statistics}
    with Group(1, lambda: build(tmp_path / "killed", hooks=[Kill(5)]).train()) as group:
        (killed,) = group.wait()
    assert killed.exit_code == -signal.SIGKILL
    again = build(tmp_path / "killed", resume_from_checkpoint=True)
    assert 0 < again.state.global_step < LAST_STEP
    again.train()
    assert same(again.model, unbroken.model)


def test_nothing_is_left_out_without_the_field_or_where_nothing_is_frozen(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", save_trained_only=None)
    whole.train()
    assert stored(tmp_path / "whole").keys() == whole.model.state_dict().keys()
    model = Net().requires_grad_(True)
    build(tmp_path / "unfrozen", model).train()
    assert stored(tmp_path / "unfrozen").keys() == whole.model.state_dict().keys()
    assert not (checkpoint(tmp_path / "unfrozen") / "base_model.json").exists()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_layer_that_was_trained_for_two_steps_stays_in_checkpoints(optimizer: str, tmp_path: Path) -> None:
    def thaw(model: Any) -> None:
        model.backbone[3].requires_grad_(True)

    def freeze(model: Any) -> None:
        model.backbone[3].requires_grad_(False)

    def learn(**changes: Any) -> Trainer:
        model = Net()
        thaw(model)  # the optimizer has it
        made = build(tmp_path, model, [At({5: thaw, 7: freeze})], optimizer=optimizer, save_steps=4, **changes)
        if not changes:
            freeze(model)
        return made

    made = learn()
    made.train()
    assert "backbone.3.weight" not in stored(tmp_path, 4)
    assert "backbone.3.weight" in stored(tmp_path)
    again = learn(resume_from_checkpoint=True)
    assert same(again.model, made.model)
    assert not torch.equal(again.model.backbone[3].weight, Net().backbone[3].weight)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("through_data", [True, False])
def test_a_frozen_average_that_code_writes_to_is_held(through_data: bool, tmp_path: Path) -> None:
    def average(model: Any) -> None:
        with torch.no_grad():
            for mine, others in zip(model.teacher.parameters(), model.head.parameters(), strict=True):
                (mine.data if through_data else mine).mul_(0.9).add_(others, alpha=0.1)

    made = build(tmp_path, hooks=[At(dict.fromkeys(range(1, LAST_STEP + 1), average))])
    made.train()
    assert "teacher.weight" in stored(tmp_path)
    assert "backbone.0.weight" not in stored(tmp_path)
    assert same(build(tmp_path, resume_from_checkpoint=True).model, made.model)


def test_another_backbone_is_refused_also_by_an_evaluation(tmp_path: Path) -> None:
    build(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"base model that it was trained on: Net\. .* frozen tensors differ"):
        build(tmp_path, Net(seed=1), resume_from_checkpoint=True)
    config = TrainerConfig(tmp_path, resume_from_checkpoint=True, use_cpu=True, criterion="CrossEntropyLoss")
    data = torch.utils.data.TensorDataset(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(CheckpointError, match="frozen tensors differ"):
        Trainer(config, Net(seed=1), eval_dataset=data)
    assert same(
        Trainer(config, Net(), eval_dataset=data).model.head, build(tmp_path, resume_from_checkpoint=True).model.head
    )  # type: ignore[arg-type]


def test_the_base_may_come_from_the_initial_weights(tmp_path: Path) -> None:
    save_file(Net(seed=7).state_dict(), tmp_path / "pretrained.safetensors")
    source = {"init_weights_from": tmp_path / "pretrained.safetensors"}
    made = build(tmp_path / "run", **source)
    made.train()
    assert "backbone.0.weight" not in stored(tmp_path / "run")
    again = build(tmp_path / "run", **source, resume_from_checkpoint=str(checkpoint(tmp_path / "run", 4)))
    again.train()
    assert same(again.model, made.model)
    with pytest.raises(CheckpointError, match="frozen tensors differ"):
        build(tmp_path / "run", resume_from_checkpoint=True)


def test_the_export_is_not_taken_for_a_whole_model_and_begins_another_run(tmp_path: Path) -> None:
    made = build(tmp_path / "run")
    made.train()
    made.save(tmp_path / "exported")
    assert not (tmp_path / "exported" / "model.safetensors").exists()
    for source in (tmp_path / "exported", tmp_path / "run"):
        begun = build(tmp_path / "next", init_weights_from=source)
        assert same(begun.model, made.model)
    made.save(tmp_path / "whole", merge=True)
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == made.model.state_dict().keys()


def test_one_file_of_a_trained_part_is_refused_with_the_way_to_it(tmp_path: Path) -> None:
    build(tmp_path).train()
    with pytest.raises(CheckpointError, match=r"not its base model, Net: .* hezar-train export RUN FOLDER --merge"):
        export_model(CheckpointStore(tmp_path / "checkpoints").open(checkpoint(tmp_path)), tmp_path / "x.safetensors")


def test_a_checkpointer_loads_a_trained_part_onto_its_base_alone(tmp_path: Path) -> None:
    made = build(tmp_path)
    made.train()
    model = Net()
    Checkpointer(model, tmp_path / "checkpoints").load(checkpoint(tmp_path), [], strict=True)
    assert same(model, made.model)
    with pytest.raises(CheckpointError, match="frozen tensors differ"):
        Checkpointer(Net(seed=1), tmp_path / "checkpoints").load(checkpoint(tmp_path), [], strict=True)


def test_digests_do_not_make_a_save_wait_and_are_made_once(tmp_path: Path) -> None:
    part = TrainedPart(Net())
    held = part.held()
    assert held is not None
    first = json.loads(held.record())
    known = dict(part.digest())
    assert {name: one["sha256"] for name, one in first["tensors"].items()} == {k: v.sha256 for k, v in known.items()}
    assert all(part.digest()[name] is one for name, one in known.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record | {"format": 2}, "not of the form"),
        (lambda record: record | {"tensors": {"x": {"dtype": "float32", "shape": [2], "sha256": "0"}}}, "is none"),
        (lambda record: record | {"tensors": {"x": {"dtype": "float32"}}}, "must have dtype, shape and sha256"),
        (lambda record: record | {"others": ["not.there"]}, "does not fit the tensors"),
        (lambda record: record | {"base": {"name": 3, "class": "Net"}}, "must be texts"),
        (
            lambda record: record | {"adapters": [{"folder": "../x", "tensors": {}, "computed": []}]},
            "which is refused",
        ),
        (lambda record: record | {"adapters": [{"folder": "", "tensors": [], "computed": []}]}, "names by names"),
        (lambda record: record | {"tensors": {"head.weight": record["tensors"]["teacher.weight"]}}, "does not fit"),
    ],
)
def test_a_record_that_no_save_has_written_is_refused(change: Callable[[Any], Any], words: str, tmp_path: Path) -> None:
    model = Net()
    held = TrainedPart(model).held()
    assert held is not None
    told = json.dumps(change(json.loads(held.record()))).encode()
    part = type(held)(held.left_out, lambda: told, {})
    contents = Contents.gather(model, {}, {}, {"train_config.yaml": "{}\n"}, part=part)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(CheckpointStore(tmp_path).publish(1, contents.write))


def test_the_field_takes_true_false_and_none_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_trained_only"):
        TrainerConfig(tmp_path, save_trained_only="adapters")  # type: ignore[arg-type]

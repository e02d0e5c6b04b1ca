"""A model that no process has memory for: built without values, spread, and filled share by share from safetensors."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # before the forks: it takes seconds
from cases import NUM_CLASSES, NUM_FEATURES, Fail, FailAt, Watch, distance, ledger_of, points
from ranks import on_ranks, outcomes_on
from safetensors.torch import save_file
from spread import SETTINGS, told
from torch import Tensor, nn

from hezar_train import Trainer, TrainerConfig, without_weights

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.inner(self.norm(x)).tanh()
        return mixed


class Wave(nn.Module):
    """Frequencies that are computed when the model is built, and in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 0.5 ** torch.arange(WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        waved: Tensor = x + (x * self.frequencies).sin()
        return waved


class Large(nn.Module):
    """Blocks, a tied weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.wave = Wave()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, NUM_CLASSES)
        self.tied = nn.Linear(WIDTH, NUM_CLASSES, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.full((WIDTH,), 1.0))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wave(self.first(x)) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.last(hidden) + self.tied(hidden.square())
        return logits


@pytest.fixture(params=["one file", "several files"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the weights of a model of other values than a fresh one, its buffer included."""
    torch.manual_seed(7)
    model, folder = Large(), tmp_path / "weights"
    model.scale *= 0.75
    tensors = {name: one for name, one in model.state_dict().items() if name != "tied.weight"}
    folder.mkdir()
    if request.param == "one file":
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    files = {name: names[number % 3] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: one for name, one in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def large(out: Path, model: nn.Module, hooks: Any = (), **changes: Any) -> Trainer:
    train, evaluation = points(49, 49), points(13, 13)
    return Trainer(TrainerConfig(out, **SETTINGS | changes), model, train, evaluation, hooks=hooks)


def learn(out: Path, model: nn.Module, **changes: Any) -> dict[str, Any]:
    watch = Watch()
    trainer = large(out, model, [watch], **changes)
    buffers = {name: one.clone() for name, one in trainer.model.named_buffers()}
    return {"buffers": buffers, **told(trainer, watch)}


@pytest.mark.parametrize(
    ("count", "changes"),
    [(1, {}), (2, {}), (4, {}), (4, {"sharding_group_size": 2}), (2, {"sharding_offload": True})],
    ids=["1", "2", "4", "4 in groups", "2 from the host"],
)
def test_it_trains_as_copies_with_the_same_weights_do(
    count: int, changes: dict[str, Any], weights: Path, tmp_path: Path
) -> None:
    given = {"init_weights_from": weights}
    copies = on_ranks(2, lambda: learn(tmp_path / "copies", Large(), sharding="none", **given))
    spread = on_ranks(count, lambda: learn(tmp_path / "spread", without_weights(Large), **given, **changes))
    assert ledger_of(tmp_path / "spread") == ledger_of(tmp_path / "copies")
    for one in spread:
        assert distance(one["buffers"], copies[0]["buffers"]) == 0.0
        assert one["losses"] == pytest.approx(copies[0]["losses"], rel=1e-9)
        assert distance(one["weights"], copies[0]["weights"]) <= 1e-9


def test_it_goes_on_from_a_checkpoint_bit_by_bit_and_needs_no_other_source_then(weights: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_steps": 6, "resume_from_checkpoint": True}

    given = {**settings, "init_weights_from": weights}

    def fail() -> None:
        trainer = large(tmp_path / "run", without_weights(Large), [FailAt(5)], **given)
        with pytest.raises(Fail):
            trainer.train()

    unbroken = on_ranks(4, lambda: learn(tmp_path / "unbroken", without_weights(Large), **given))
    on_ranks(4, fail)
    gone_on = on_ranks(4, lambda: learn(tmp_path / "run", without_weights(Large), **settings))
    assert 0 < len(gone_on[0]["losses"]) < len(unbroken[0]["losses"])
    assert distance(gone_on[0]["weights"], unbroken[0]["weights"]) == 0.0
    assert distance(gone_on[0]["buffers"], unbroken[0]["buffers"]) == 0.0


def test_a_tied_weight_stays_one_and_what_trains_is_what_it_was_told() -> None:
    torch.manual_seed(0)
    model = without_weights(Large)
    assert model.tied.weight is model.last.weight
    assert {one.is_meta for one in model.parameters()} == {True}
    assert {one.is_meta for one in model.buffers()} == {False}
    frozen = without_weights(lambda: nn.Linear(2, 2).requires_grad_(False))
    assert not frozen.weight.requires_grad


def test_building_keeps_no_module_from_having_values_afterwards() -> None:
    with pytest.raises(ZeroDivisionError):
        without_weights(lambda: nn.Linear(1 // 0, 1))
    assert not nn.Linear(2, 2).weight.is_meta


MEGABYTE = 1 << 20


class Wide(nn.Module):
    """Twenty-four blocks of 4 MB between small ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NUM_FEATURES, 1024)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(24))
        self.last = nn.Linear(1024, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.float())
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.last(hidden)
        return logits


def peak_of(work: Callable[[], Any]) -> float:
    """Return by how many megabytes this process's memory grew at most while it worked."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = _status("VmRSS")
    kept = work()
    peak = _status("VmHWM") - before
    del kept
    return peak / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def wide_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    save_file(Wide().state_dict(), folder / "model.safetensors")
    return folder


WIDE: dict[str, Any] = {"init_weights_from": None, "optimizer": "sgd", "max_steps": 2, "do_evaluate": False,
                        "global_batch_size": 8, "save_enabled": False, "num_epochs": 1, "sharding": "full"}  # fmt: skip


@pytest.mark.parametrize("weights", ["one file"], indirect=True)
def test_no_process_ever_holds_the_whole_model(wide_weights: Path, weights: Path, tmp_path: Path) -> None:
    settings = {**WIDE, "init_weights_from": wide_weights}
    whole = sum(one.nbytes for one in without_weights(Wide).parameters()) / MEGABYTE

    def build(model: Callable[[], nn.Module]) -> float:
        """Return the peak of a process that only builds the trainer."""
        large(tmp_path / "small", without_weights(Large), **{**settings, "init_weights_from": weights}).train()
        return peak_of(lambda: large(tmp_path / "run", model(), **settings))

    def train() -> tuple[float, float]:
        """Return the peak of a process that builds and trains, and what it holds of the model."""
        large(tmp_path / "small", without_weights(Large), **{**settings, "init_weights_from": weights}).train()
        trainers: list[Any] = []

        def work() -> None:
            trainers.append(large(tmp_path / "run", without_weights(Wide), **settings))
            trainers[0].train()

        peak = peak_of(work)
        return peak, sum(one.to_local().nbytes for one in trainers[0].model.parameters()) / MEGABYTE

    in_full = on_ranks(4, build, Wide)
    built = on_ranks(4, build, lambda: without_weights(Wide))
    trained, held = zip(*on_ranks(4, train), strict=True)
    told = f"MB: whole {whole:.0f}; peak with a whole one {in_full}, built {built}, trained {trained}, held {held}"
    print(told)
    assert whole > 95
    assert min(in_full) > whole, told  # or the measure would tell nothing
    assert max(built) < whole * 0.6, told  # a share, and what is read at a time beside it
    assert max(trained) < whole * 0.8, told  # shares of weights and gradients, and some blocks that are gathered
    assert max(held) < whole / 4 + 1, told


def meta_model() -> Large:
    with torch.device("meta"):
        return Large()


class HalfThere(Large):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2, device="meta")


def without_a_part(weights: Path) -> Path:
    torch.manual_seed(7)
    tensors = {name: one for name, one in Large().state_dict().items() if not name.startswith(("tied", "blocks.1"))}
    folder = weights.with_name("lacking")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


REFUSED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "a buffer that no file holds": (
        lambda out, weights: large(out, meta_model(), init_weights_from=weights),
        "the model has buffers on the device 'meta' that no file holds (persistent=False): wave.frequencies. Their "
        "values cannot be known. Build the model with hezar_train.without_weights(function)",
    ),
    "a part of the parameters": (
        lambda out, weights: large(out, HalfThere(), init_weights_from=weights),
        "the model's more.weight is on the device 'meta' and first.weight is not: expected all parameters there",
    ),
    "no source": (
        lambda out, weights: large(out, without_weights(Large)),
        "on the device 'meta', where weights have no values. Build the model on 'cpu', or say where its weights are",
    ),
    "nothing to resume": (
        lambda out, weights: large(out, without_weights(Large), resume_from_checkpoint=True),
        "on the device 'meta', where weights have no values. Build the model on 'cpu', or say where its weights are",
    ),
    "a source that lacks some": (
        lambda out, weights: large(out, without_weights(Large), init_weights_from=without_a_part(weights)),
        "does not have all of the model, which was built without values: 4 of its",
    ),
}


@pytest.mark.parametrize("weights", ["one file"], indirect=True)
@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_filled_is_refused_when_the_trainer_is_built(
    what: str, weights: Path, tmp_path: Path
) -> None:
    work, words = REFUSED[what]
    for one in outcomes_on(2, work, tmp_path / "run", weights):
        assert words in one.error, one.error


def test_a_model_on_meta_whose_buffers_are_all_saved_needs_no_other_function(tmp_path: Path) -> None:
    class Plain(Large):
        def __init__(self) -> None:
            super().__init__()
            self.wave = nn.Identity()

    torch.manual_seed(7)
    save_file({k: v for k, v in Plain().state_dict().items() if k != "tied.weight"}, tmp_path / "model.safetensors")

    def work(model: Callable[[], nn.Module], sharding: str) -> Any:
        return learn(tmp_path / sharding, model(), init_weights_from=tmp_path / "model.safetensors", sharding=sharding)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Plain()

    copies, spread = on_ranks(2, work, Plain, "none"), on_ranks(2, work, on_meta, "full")
    assert distance(spread[0]["weights"], copies[0]["weights"]) <= 1e-9
    assert distance(spread[0]["buffers"], copies[0]["buffers"]) == 0.0


def test_what_torch_writes_from_several_processes_fills_it(tmp_path: Path) -> None:
    """Its writer knows no tied weights, so one name of the two is left out, as in files of the Hub."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(7)
    source = Large()

    def write() -> None:
        dist.init_process_group("gloo")
        model = copy.deepcopy(source)
        for block in model.blocks:
            fully_shard(block)
        state = {name: one for name, one in fully_shard(model).state_dict().items() if name != "tied.weight"}
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "dcp"), save_distributed=True))

    on_ranks(3, write)
    assert len(list((tmp_path / "dcp").glob("shard-*.safetensors"))) == 3

    def read() -> Any:
        given = {"init_weights_from": tmp_path / "dcp"}
        return large(tmp_path / "run", without_weights(Large), **given).get_model_para()

    for weights in on_ranks(2, read):
        assert distance(weights, {name: one for name, one in source.state_dict().items() if name in weights}) == 0.0

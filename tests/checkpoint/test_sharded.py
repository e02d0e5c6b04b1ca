"""Checkpoints of a model that is sharded over several processes (gloo, forked), as FSDP2 shards it; its shard files."""

from __future__ import annotations

import errno
import functools
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch._dynamo  # this and fsdp before the forks: they take seconds
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hezar_train.checkpoint import (
    Checkpoint,
    CheckpointStore,
    CheckpointWriter,
    Contents,
    SavingGroup,
    SharedStore,
    export_model,
    gather_shards,
    load_shards,
    pack,
    read_tensors,
)
from hezar_train.checkpoint.shard_files import Box, ShardIndex
from hezar_train.checkpoint.sharded import ShardedContents
from hezar_train.errors import CheckpointError
from hezar_train.runtime.sharding import shard_model

TEXTS = {"train_config.yaml": "seed: 0\n"}
MAX_NORM = 0.5
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], torch.dtype, float]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.float32, 1e-5),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2), torch.float64, 1e-9),
}


class Net(nn.Module):
    """Blocks to cut, tied weights, rows that do not divide, a parameter of one number, and a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("num_calls", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        self.num_calls += 1
        hidden = self.emb(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden) * self.scale
        return logits


class Process:
    """One process of a run, with its model: sharded, replicated, or alone."""

    def __init__(self, kind: str = "adamw", rank: int = 0, count: int = 1, sharding: str = "none") -> None:
        make, dtype, _ = OPTIMIZERS[kind]
        self.rank, self.count = rank, count
        torch.manual_seed(0)
        self.model: nn.Module = Net().to(dtype)
        self.runner = self.model
        if sharding == "full":
            shard_model(self.model, count)
        elif count > 1:
            self.runner = DistributedDataParallel(self.model)
        self.optimizer = make(self.model.parameters())

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            ids = torch.arange(12).mul(step + 3).remainder(7)[self.rank :: self.count]
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.runner(ids), ids.add(step).remainder(7)).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()

    def parts(self, step: int) -> ShardedContents:
        state, extra = {"global_step": step}, {"cursor": torch.arange(step)}
        return gather_shards(
            self.model, self.optimizer.state_dict(), state, TEXTS, extra, rank=self.rank, count=self.count
        )

    def save(self, root: Path, step: int) -> None:
        SharedStore(root, SavingGroup.form()).publish(step, self.parts(step).write)


@pytest.fixture
def world(fork: Any, tmp_path: Path) -> Callable[..., None]:
    """Run a job on several processes, each with its number and their count; all of them must end well."""
    worlds = iter(range(1000))

    def run(count: int, job: Callable[[int, int], None], exit_codes: tuple[int, ...] = (0,)) -> list[Any]:
        place = tmp_path / f"rendezvous-{next(worlds)}"

        def member(rank: int) -> None:
            dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count)
            job(rank, count)
            dist.barrier()

        children = [fork(lambda rank=rank: member(rank)) for rank in range(count)]
        if exit_codes:
            assert {child.wait() for child in children} == set(exit_codes)
        return children

    return run


def contents(checkpoint: Checkpoint, bits_of: Callable[[Any], object]) -> object:
    """Return all values of a checkpoint, whole, however they are stored."""
    index = ShardIndex(checkpoint.path)
    whole = [index.read_whole("model"), index.read_whole("optimizer")]
    return bits_of(whole), checkpoint.text("trainer_state.json")


def opened(root: Path, step: int) -> Checkpoint:
    return CheckpointStore(root).open(root / f"{step:08d}")


def distance(root: Path, expected: nn.Module, step: int) -> float:
    found = ShardIndex(root / f"{step:08d}").read_whole("model")
    wanted = expected.state_dict()
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


@pytest.fixture
def written_by_two(world: Any, tmp_path: Path) -> Path:
    def job(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        run.train(0, 10)
        run.save(tmp_path / "two", 10)

    world(2, job)
    return tmp_path / "two"


def test_shards_that_the_main_process_has_verified_are_not_read_by_each_of_the_others(written_by_two: Path) -> None:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    folder = written_by_two / "00000010"
    flip(folder / "model.shard-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model.shard-00002-of-00002.safetensors does not match its SHA-256"):
        Checkpoint(folder)
    assert Checkpoint(folder, believes_shards=True).step == 10
    with (folder / "optimizer.shard-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="bytes instead of"):
        Checkpoint(folder, believes_shards=True)


def test_all_but_shards_is_read_by_each_process(written_by_two: Path) -> None:
    state = written_by_two / "00000010" / "trainer_state.json"
    state.write_bytes(state.read_bytes()[:-1] + b" ")
    with pytest.raises(CheckpointError, match=r"trainer_state.json does not match its SHA-256"):
        Checkpoint(state.parent, believes_shards=True)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_two_processes_train_like_one(kind: str, sharding: str, world: Any, tmp_path: Path) -> None:
    def job(rank: int, count: int) -> None:
        run = Process(kind, rank, count, sharding)
        run.train(0, 20)
        run.save(tmp_path / "run", 20)

    world(2, job)
    alone = Process(kind)
    alone.train(0, 20)
    assert 0 <= distance(tmp_path / "run", alone.model, 20) < OPTIMIZERS[kind][2]


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_checkpoint_of_two_processes_goes_on_with_others(kind: str, readers: int, world: Any, tmp_path: Path) -> None:
    def first(rank: int, count: int) -> None:
        run = Process(kind, rank, count, "full")
        run.train(0, 10)
        run.save(tmp_path / "run", 10)

    def second(rank: int, count: int) -> None:
        run = Process(kind, rank, count, "full")
        load_shards(opened(tmp_path / "run", 10), run.model, run.optimizer)
        run.train(10, 20)
        run.save(tmp_path / "run", 20)

    world(2, first)
    world(readers, second)
    alone = Process(kind)
    alone.train(0, 20)
    assert distance(tmp_path / "run", alone.model, 20) < OPTIMIZERS[kind][2]


def test_at_the_same_number_of_processes_a_resumed_run_is_the_unbroken_one_bit_by_bit(
    world: Any, tmp_path: Path, written_by_two: Path, bits_of: Any
) -> None:
    def unbroken(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        run.train(0, 20)
        run.save(tmp_path / "unbroken", 20)

    def resumed(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        load_shards(opened(written_by_two, 10), run.model, run.optimizer)
        run.train(10, 20)
        run.save(written_by_two, 20)

    world(2, unbroken)
    world(2, resumed)
    assert contents(opened(written_by_two, 20), bits_of) == contents(opened(tmp_path / "unbroken", 20), bits_of)


def test_what_is_loaded_is_what_was_saved_bit_by_bit(
    world: Any, tmp_path: Path, written_by_two: Path, bits_of: Any
) -> None:
    def job(rank: int, count: int, sharding: str) -> None:
        run = Process("adamw", rank, count, sharding)
        load_shards(opened(written_by_two, 10), run.model, run.optimizer)
        run.save(tmp_path / f"{sharding}-{count}", 10)

    saved = contents(opened(written_by_two, 10), bits_of)
    for readers, sharding in [(1, "none"), (1, "full"), (2, "full"), (3, "full"), (5, "full")]:
        world(readers, functools.partial(job, sharding=sharding))
        assert contents(opened(tmp_path / f"{sharding}-{readers}", 10), bits_of) == saved


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_a_plain_checkpoint_is_loaded_into_shards_bit_by_bit(
    kind: str, world: Any, tmp_path: Path, bits_of: Any
) -> None:
    plain = Process(kind)
    plain.train(0, 4)
    extra = {"cursor": torch.arange(4)}
    parts = Contents.gather(plain.model, plain.optimizer.state_dict(), {"global_step": 4}, TEXTS, extra)
    CheckpointStore(tmp_path / "plain").publish(4, parts.write)

    def job(rank: int, count: int) -> None:
        run = Process(kind, rank, count, "full")
        load_shards(opened(tmp_path / "plain", 4), run.model, run.optimizer)
        run.save(tmp_path / "sharded", 4)

    world(3, job)
    assert contents(opened(tmp_path / "sharded", 4), bits_of) == contents(opened(tmp_path / "plain", 4), bits_of)


def test_the_export_is_the_file_that_a_plain_checkpoint_has(written_by_two: Path, tmp_path: Path) -> None:
    checkpoint = opened(written_by_two, 10)
    exported = export_model(checkpoint, tmp_path / "model.safetensors")
    plain = Process()
    load_shards(checkpoint, plain.model, plain.optimizer)
    store = CheckpointStore(tmp_path / "plain")
    path = store.publish(10, Contents.gather(plain.model, plain.optimizer.state_dict(), {}, TEXTS).write)
    assert exported.read_bytes() == (path / "model.safetensors").read_bytes()
    assert read_tensors(exported).keys() == plain.model.state_dict().keys() - {"head.weight"}  # tied: stored once


def test_the_saved_values_are_those_that_torch_gathers(world: Any, tmp_path: Path, bits_of: Any) -> None:
    def job(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        run.train(0, 2)
        run.runner(torch.arange(7))  # leaves the outermost parameters gathered, as an evaluation does
        run.save(tmp_path / "run", 2)
        state: dict[str, Any] = dict(run.model.state_dict())
        whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}
        del whole["head.weight"]
        saved = ShardIndex(tmp_path / "run" / "00000002").read_whole("model")
        assert bits_of(dict(sorted(whole.items()))) == bits_of(dict(sorted(saved.items())))

    world(3, job)


def test_each_process_writes_its_own_share_and_nothing_twice(written_by_two: Path) -> None:
    folder = written_by_two / "00000010"
    names = {path.name for path in folder.iterdir()}
    assert {f"{part}.shard-0000{n}-of-00002.safetensors" for part in ("model", "optimizer") for n in (1, 2)} < names
    assert set(read_tensors(folder / "model.safetensors")) == {"num_calls"}
    shares = [read_tensors(folder / f"model.shard-0000{number}-of-00002.safetensors") for number in (1, 2)]
    assert [len(share["emb.weight"]) for share in shares] == [4, 3]
    assert [len(share.get("scale", [])) for share in shares] == [1, 0]


def test_damage_of_any_file_is_noticed(written_by_two: Path) -> None:
    folder = written_by_two / "00000010"
    files = sorted(folder.glob("*shard*"))
    assert len(files) == 6
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=f"{file.name} does not match its SHA-256"):
            opened(written_by_two, 10)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            opened(written_by_two, 10)
        file.write_bytes(content)
    assert opened(written_by_two, 10).step == 10


def test_a_model_of_another_shape_is_refused_by_the_whole_shapes(world: Any, written_by_two: Path) -> None:
    def job(rank: int, count: int) -> None:
        run = Process("adamw", rank, count)
        other = Net().to(torch.float64)
        other.emb = nn.Embedding(8, 6, dtype=torch.float64)
        shard_model(other, count)
        with pytest.raises(CheckpointError, match=r"emb.weight \(model \[8, 6\], checkpoint \[7, 6\]\)"):
            load_shards(opened(written_by_two, 10), other, run.optimizer)

    world(2, job)


def test_shards_that_do_not_make_up_a_tensor_are_refused(written_by_two: Path) -> None:
    index = ShardIndex(written_by_two / "00000010")
    with pytest.raises(CheckpointError, match=r"do not make up emb.weight"):
        index.read("model", {"emb.weight": Box((0, 0), (8, 6))})


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("a pickle was touched")


def test_no_pickle_is_written_read_or_sent(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        run.train(0, 1)
        group = SavingGroup.form()
        for module, names in ((pickle, ("dump", "dumps", "load", "loads")), (torch, ("save", "load"))):
            for name in names:
                monkeypatch.setattr(module, name, refuse)
        for module, name in ((pickle, "Pickler"), (pickle, "Unpickler"), (c10d, "_pickler"), (c10d, "_unpickler")):
            monkeypatch.setattr(module, name, type(name, (), {"__init__": refuse}))
        with pytest.raises(AssertionError, match="a pickle was touched"):
            dist.all_gather_object([None] * count, rank)
        SharedStore(tmp_path / "run", group).publish(1, run.parts(1).write)
        load_shards(opened(tmp_path / "run", 1), run.model, run.optimizer)
        export_model(opened(tmp_path / "run", 1), tmp_path / f"{rank}.safetensors")

    world(2, job)
    for path in (tmp_path / "run" / "00000001").iterdir():
        assert path.suffix in {".safetensors", ".json", ".yaml"}


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left"), CheckpointError("broken")])
def test_what_fails_on_one_process_is_raised_on_all(problem: Exception, world: Any, tmp_path: Path) -> None:
    def job(rank: int, count: int) -> None:
        parts = Process("adamw", rank, count, "full").parts(1)
        store = SharedStore(tmp_path / "run", SavingGroup.form())

        def fill(draft: Any, failing: int) -> None:
            parts.write(draft)
            if rank == failing:
                raise problem

        for failing in range(count):
            with pytest.raises(type(problem), match=f"process {failing}: {type(problem).__name__}"):
                store.publish(1, functools.partial(fill, failing=failing))
            assert list(store.root.iterdir()) == []
            dist.barrier()
        store.publish(1, parts.write)
        store.publish(1, functools.partial(fill, failing=0))  # a checkpoint that is there is not written again

    world(3, job)
    assert opened(tmp_path / "run", 1).step == 1


def test_a_failure_before_the_rename_is_raised_on_all(world: Any, tmp_path: Path) -> None:
    def job(rank: int, count: int) -> None:
        store = SharedStore(tmp_path / "run", SavingGroup.form())
        with pytest.raises(ZeroDivisionError if rank == 0 else CheckpointError, match="by zero"):
            store.publish(1, Process("adamw", rank, count, "full").parts(1).write, before_commit=lambda: 1 // 0)

    world(2, job)
    assert list((tmp_path / "run").iterdir()) == []


def test_processes_that_save_different_steps_write_nothing(world: Any, tmp_path: Path) -> None:
    def job(rank: int, count: int) -> None:
        parts = Process("adamw", rank, count, "full").parts(rank)
        with pytest.raises(CheckpointError, match=r"process 1: .*saves step 1 while the main process saves step 0"):
            SharedStore(tmp_path / "run", SavingGroup.form()).publish(rank, parts.write)

    world(2, job)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("background", [True, False])
def test_the_writer_saves_for_all_processes_and_keeps_the_newest(
    background: bool, world: Any, tmp_path: Path, bits_of: Any
) -> None:
    def job(rank: int, count: int) -> None:
        run = Process("adamw", rank, count, "full")
        writer = CheckpointWriter(SharedStore(tmp_path / "run", SavingGroup.form()), background, keep=2)
        for step in range(1, 6):
            run.train(step - 1, step)  # in the background: while the last save is being written
            writer.save(step, run.parts(step))
        writer.close()
        plain = Process("adamw", rank, count, "full")
        plain.train(0, 5)
        plain.save(tmp_path / "in_line", 5)

    world(2, job)
    store = CheckpointStore(tmp_path / "run")
    assert store.steps() == [4, 5]
    assert contents(opened(store.root, 5), bits_of) == contents(opened(tmp_path / "in_line", 5), bits_of)


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_of_any_process_at_any_moment_leaves_whole_checkpoints(
    seed: int, world: Any, tmp_path: Path, bits_of: Any
) -> None:
    chance = random.Random(seed)

    def job(rank: int, count: int) -> None:
        run = Process("sgd", rank, count, "full")
        writer = CheckpointWriter(SharedStore(tmp_path / "run", SavingGroup.form()), bool(seed % 2), keep=2)
        for step in range(1, 1000):
            run.train(step - 1, step)
            writer.save(step, run.parts(step))  # waits for the one before
            (tmp_path / f"{rank}-saved-{step}").touch()

    children = world(3, job, exit_codes=())
    while not all((tmp_path / f"{rank}-saved-2").exists() for rank in range(3)):
        time.sleep(0.005)
    time.sleep(chance.uniform(0.02, 0.3))
    victim = children[chance.randrange(3)]
    victim.kill()
    assert [child.wait() for child in children if child is not victim] == [1, 1]  # an error, not a hang
    assert_whole(CheckpointStore(tmp_path / "run"), bits_of)


def assert_whole(store: CheckpointStore, bits_of: Callable[[Any], object]) -> None:
    newest, rejected = store.newest()
    assert newest is not None
    assert rejected == []
    for step in store.steps():
        checkpoint = opened(store.root, step)
        plain, expected = Process("sgd"), Process("sgd")
        load_shards(checkpoint, plain.model, plain.optimizer)
        expected.train(0, step)
        assert int(plain.model.num_calls) == step  # type: ignore[arg-type]
        assert distance(store.root, expected.model, step) < 1e-4
        assert len(pack(plain.optimizer.state_dict())[1]) == len(pack(expected.optimizer.state_dict())[1])
    store.clean()
    assert not list(store.root.glob(".tmp-*"))

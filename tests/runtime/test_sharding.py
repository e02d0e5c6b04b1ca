"""A model that is spread over processes (gloo, forked): the same training, whatever the number of processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # this and fsdp before the forks: they take seconds
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

from hezar_train.errors import ConfigError
from hezar_train.runtime.sharding import (
    Sharding,
    gradient_norm,
    is_sharded,
    local_gradients,
    shard_model,
)


class Net(nn.Module):
    """Repeated blocks, with tied weights and a buffer outside them."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("offset", torch.full((7,), float(seed)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.emb(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(hidden) + self.offset
        return logits


@pytest.fixture
def world(tmp_path: Path) -> Callable[[int, Callable[[int, int], None]], None]:
    """Run a job on several processes, each with its number and their count; all of them must end well."""

    def member(job: Callable[[int, int], None], rank: int, count: int) -> None:
        try:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=rank, world_size=count)
            job(rank, count)
            dist.barrier()
        except BaseException:  # noqa: BLE001 - the exit code tells the parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def run(count: int, job: Callable[[int, int], None]) -> None:
        children = []
        for rank in range(count):
            children.append(os.fork())
            if children[-1] == 0:
                member(job, rank, count)
        assert {os.waitpid(child, 0)[1] for child in children} == {0}

    return run


def backward(model: nn.Module, ids: Tensor, share: float = 1.0) -> None:
    (nn.functional.cross_entropy(model(ids), ids.add(1).remainder(7)) * share).backward()


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def test_gradients_their_norm_and_their_scaling_are_those_of_the_plain_model(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        plain, sharded = Net(), shard_model(Net(), count)
        ids = torch.arange(12).remainder(7)
        backward(plain, ids)
        backward(sharded, ids[rank::count])
        for norm_type in (1.0, 2.0, float("inf")):
            expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)  # type: ignore[misc]
            torch.testing.assert_close(gradient_norm(sharded.parameters(), norm_type), expected)
        torch._foreach_mul_(local_gradients(sharded.parameters()), 0.5)
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad * 0.5)  # type: ignore[operator]

    world(3, job)


def test_local_gradients_are_the_memory_that_the_optimizer_reads(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = shard_model(Net(), count)
        backward(model, torch.arange(7))
        torch._foreach_zero_(local_gradients(model.parameters()))
        assert all(not whole(parameter.grad).any() for parameter in model.parameters())
        assert not gradient_norm(model.parameters())

    world(2, job)


def test_gradients_of_the_micro_batches_of_a_window_add_up(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        plain, sharded = Net(), shard_model(Net(), count)
        ids = torch.arange(12).remainder(7)
        backward(plain, ids)
        for part in ids.chunk(3):
            backward(sharded, part[rank::count], share=1 / 3)
        for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad)

    world(2, job)


def test_all_processes_start_with_the_weights_and_buffers_of_the_main_one(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = shard_model(Net(seed=rank), count)
        expected = Net(seed=0).state_dict()
        assert all(torch.equal(whole(value), expected[name]) for name, value in model.state_dict().items())

    world(2, job)


def test_blocks_are_spread_one_by_one_and_tied_weights_stay_tied(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = Net()
        assert not is_sharded(model)
        shard_model(model, count)
        assert is_sharded(model)
        own = [name for name, module in model.named_modules() if isinstance(module, torch.distributed.fsdp.FSDPModule)]
        assert own == ["", "blocks.0", "blocks.1"]
        assert model.head.weight is model.emb.weight

    world(2, job)


def test_a_block_that_shares_a_weight_with_the_rest_stays_with_the_rest(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = Net()
        model.blocks[1][1].weight = model.blocks[0][1].weight  # type: ignore[index]
        shard_model(model, count)
        backward(model, torch.arange(7))
        assert model.blocks[1][1].weight is model.blocks[0][1].weight  # type: ignore[index]
        assert not isinstance(model.blocks[0], torch.distributed.fsdp.FSDPModule)

    world(2, job)


def test_in_bf16_weights_gradients_and_outputs_stay_in_full_precision(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = shard_model(Net(), count, Sharding("bf16"))
        seen = []
        model.blocks[0][1].register_forward_hook(lambda *args: seen.append(args[2].dtype))  # type: ignore[index]
        backward(model, torch.arange(7))
        assert seen == [torch.bfloat16]
        assert model(torch.arange(7)).dtype == torch.float32
        state = {value.dtype for value in model.state_dict().values()}
        assert state | {p.grad.dtype for p in model.parameters()} == {torch.float32}  # type: ignore[union-attr]

    world(2, job)


def test_in_bf16_batch_statistics_are_kept_in_full_precision(world: Any) -> None:
    def job(rank: int, count: int) -> None:
        model = shard_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), count, Sharding("bf16"))
        model(torch.randn(8, 4)).sum().backward()
        assert model[1].running_mean.dtype == torch.float32  # type: ignore[index]
        assert model[1].running_mean.any()  # type: ignore[index]
        assert all(parameter.grad is not None for parameter in model.parameters())

    world(2, job)


def test_what_cannot_be_sharded_is_refused_with_a_reason() -> None:
    model = Net()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        shard_model(model, 2, Sharding("fp16"))
    assert len(caught.value.problems) == 3
    for words in ("mixed_precision='fp16'", "temperature. Give them the shape", "Start the script with a launcher"):
        assert words in str(caught.value)

"""The Accelerator as it was asked for, a batch on its way to the device, and memory that the next step uses again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from hezar_train.config import TrainerConfig
from hezar_train.errors import ConfigError
from hezar_train.runtime import build_runtime, to_device

needs_no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="tells what a machine without says")


@contextmanager
def same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Let no test see what another one asked of Accelerate, which keeps it in a global and in the environment."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with same_environment():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def config(**fields: Any) -> TrainerConfig:
    return TrainerConfig(output_dir="run", **fields)


def product_type(runtime: Any) -> torch.dtype:
    """Return the type that a matrix product has in a runtime's forward."""
    with runtime.autocast()():
        return (torch.ones(2, 2, device=runtime.device) @ torch.ones(2, 2, device=runtime.device)).dtype


class TestDevice:
    @needs_no_accelerator
    def test_without_a_wish_it_is_what_is_there(self) -> None:
        runtime = build_runtime(config())
        assert runtime.device == torch.device("cpu")
        assert (runtime.num_processes, runtime.rank, runtime.is_main) == (1, 0, True)

    @pytest.mark.parametrize("fields", [{"device": "cpu"}, {"use_cpu": True}, {"device": "cpu", "use_cpu": True}])
    def test_the_cpu_is_taken_when_asked_for(self, fields: dict[str, Any]) -> None:
        assert build_runtime(config(**fields)).device.type == "cpu"

    @needs_no_accelerator
    @pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "xpu:0"])
    def test_one_that_is_not_there_is_refused(self, device: str) -> None:
        with pytest.raises(
            ConfigError, match=f"device='{device}' is not on this machine. Leave device out to take what"
        ):
            build_runtime(config(device=device))

    def test_one_that_holds_no_values_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="device='meta'"):
            config(device="meta")
        assigned = config()
        assigned.device = "meta"
        with pytest.raises(ConfigError, match="device='meta' holds no values"):
            build_runtime(assigned)

    def test_a_wish_is_not_left_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
        assert build_runtime(config(device="cpu:0")).device == torch.device("cpu:0")
        assert "ACCELERATE_TORCH_DEVICE" not in os.environ

    def test_a_wish_of_the_users_own_stays_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        build_runtime(config(device="cpu:0"))
        assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


class TestPrecision:
    @pytest.mark.parametrize(
        ("asked", "got", "dtype"),
        [
            (None, "no", torch.float32),
            ("no", "no", torch.float32),
            ("full", "no", torch.float32),
            ("bf16", "bf16", torch.bfloat16),
        ],
    )
    def test_the_forward_runs_in_what_was_asked_for(self, asked: str | None, got: str, dtype: torch.dtype) -> None:
        runtime = build_runtime(config(mixed_precision=asked, use_cpu=True))
        assert runtime.precision == got
        assert product_type(runtime) == dtype
        assert runtime.scaler is None

    def test_half_precision_on_the_cpu_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"'fp16' needs an accelerator, and this run is on the CPU.*'bf16'"):
            build_runtime(config(mixed_precision="fp16", device="cpu"))

    def test_half_precision_with_use_cpu_is_full_precision_and_it_is_said(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        runtime = build_runtime(config(mixed_precision="fp16", use_cpu=True))
        assert (runtime.precision, product_type(runtime), runtime.scaler) == ("no", torch.float32, None)
        assert "this run, with use_cpu=True, trains in full precision" in caplog.text

    @needs_no_accelerator
    def test_half_precision_where_nothing_else_is_found_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'fp16' needs an accelerator"):
            build_runtime(config(mixed_precision="fp16"))

    def test_half_precision_is_refused_where_ray_gave_a_worker_no_gpu_of_a_machine_that_has_some(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
        with pytest.raises(ConfigError, match="'fp16' needs an accelerator, and this run is on the CPU"):
            build_runtime(config(mixed_precision="fp16"))

    def test_one_process_may_have_two_runtimes_of_different_precision(self) -> None:
        half = build_runtime(config(mixed_precision="bf16", use_cpu=True))
        full = build_runtime(config(use_cpu=True))
        again = build_runtime(config(mixed_precision="bf16", use_cpu=True))
        assert [runtime.precision for runtime in (half, full, again)] == ["bf16", "no", "bf16"]
        assert [product_type(runtime) for runtime in (half, full, again)] == [
            torch.bfloat16, torch.float32, torch.bfloat16,
        ]  # fmt: skip

    def test_what_the_environment_says_does_not_override_the_config(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert product_type(build_runtime(config(mixed_precision="no", use_cpu=True))) == torch.float32


class TestProcesses:
    def test_a_launcher_whose_processes_came_up_alone_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        alone = Accelerator(cpu=True)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"started 2 processes \(WORLD_SIZE\) but Accelerate sees one"):
            build_runtime(config(), alone)

    def test_processes_that_cannot_find_each_other_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        with same_environment():
            monkeypatch.setenv("WORLD_SIZE", "2")
            with pytest.raises(ConfigError, match=r"Accelerate refused .*WORLD_SIZE='2': .*MASTER_ADDR"):
                build_runtime(config(use_cpu=True))
        assert build_runtime(config(use_cpu=True)).num_processes == 1

    def test_a_launcher_with_one_process_is_fine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert build_runtime(config()).num_processes == 1

    def test_distributed_with_one_process_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"distributed=True, but there is one process. Start the script with a la"
        ):
            build_runtime(config(distributed=True))

    def test_all_broken_promises_are_told_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerator = Accelerator(cpu=True)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError) as caught:
            build_runtime(config(distributed=True, mixed_precision="bf16"), accelerator)
        assert [problem.split()[0] for problem in caught.value.problems] == [
            "the", "distributed=True,", "mixed_precision='bf16'",
        ]  # fmt: skip


class TestGivenAccelerator:
    def test_it_is_the_one_in_use(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        runtime = build_runtime(config(), accelerator)
        assert runtime.accelerator is accelerator
        assert runtime.precision == "bf16"
        assert product_type(runtime) == torch.bfloat16

    def test_it_may_say_the_same_as_the_config(self) -> None:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        assert build_runtime(config(mixed_precision="bf16", device="cpu"), accelerator).accelerator is accelerator

    @pytest.mark.parametrize(
        ("ours", "theirs", "words"),
        [
            ({"mixed_precision": "bf16"}, {}, "mixed_precision='bf16' in the config, but the accelerator runs 'no'"),
            ({"mixed_precision": "no"}, {"mixed_precision": "bf16"}, "mixed_precision='no' in the config"),
            ({"device": "cuda:0"}, {}, "device='cuda:0' was asked for, but the accelerator uses 'cpu'"),
            ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, "but the accelerator has 4"),
        ],
    )
    def test_one_that_contradicts_the_config_is_refused(self, ours: Any, theirs: Any, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            build_runtime(config(**ours), Accelerator(cpu=True, **theirs))


class TestTrackers:
    def test_our_own_writer_needs_no_tracker(self) -> None:
        assert build_runtime(config(trackers=["tensorboard"])).accelerator.log_with == []

    @pytest.mark.filterwarnings("ignore:.*no supported trackers")
    def test_one_that_is_not_installed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("accelerate.tracking.get_available_trackers", list)
        monkeypatch.setattr("accelerate.tracking.is_wandb_available", bool)
        with pytest.raises(
            ConfigError, match=r"trackers has 'wandb', but its package is not installed. Install it, or"
        ):
            build_runtime(config(trackers=["tensorboard", "wandb"]))

    def test_a_refusal_does_not_spoil_the_next_runtime(self) -> None:
        with pytest.raises(ConfigError):
            build_runtime(config(mixed_precision="fp8"))
        assert build_runtime(config(mixed_precision="bf16")).precision == "bf16"


class TestDeterminism:
    @pytest.fixture(autouse=True)
    def _torch_as_before(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        algorithms, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        yield
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        torch.use_deterministic_algorithms(algorithms)
        torch.backends.cudnn.benchmark = benchmark

    def test_it_is_asked_of_torch(self) -> None:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True
        build_runtime(config(deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    def test_without_it_torch_is_left_alone(self) -> None:
        torch.use_deterministic_algorithms(False)
        build_runtime(config())
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


META = torch.device("meta")


class Pair(NamedTuple):
    inputs: Any
    labels: Any


def rows() -> torch.Tensor:
    return torch.ones(3)


def test_a_tensor_is_moved() -> None:
    assert to_device(rows(), META).device == META


@pytest.mark.parametrize("kind", [dict, OrderedDict, BatchEncoding])
def test_every_kind_of_mapping_becomes_a_dict_of_moved_tensors(kind: Any) -> None:
    moved = to_device(kind({"ids": rows(), "names": "abc", "missing": None}), META)
    assert type(moved) is dict
    assert moved["ids"].device == META
    assert (moved["names"], moved["missing"]) == ("abc", None)


def test_nested_structures_keep_their_shape() -> None:
    batch = {"a": [rows(), (rows(), "text", 3)], "b": Pair(rows(), {"c": [rows()]})}
    moved = to_device(batch, META)
    assert moved["a"][0].device == META
    assert type(moved["a"][1]) is tuple
    assert moved["a"][1][0].device == META
    assert moved["a"][1][1:] == ("text", 3)
    assert type(moved["b"]) is Pair
    assert moved["b"].inputs.device == META
    assert moved["b"].labels["c"][0].device == META


def test_a_packed_sequence_keeps_its_sizes_where_they_must_be() -> None:
    moved = to_device({"x": pack_sequence([rows(), rows()[:2]])}, META)["x"]
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_what_holds_no_tensor_is_handed_on_as_it_is() -> None:
    thing = object()
    assert to_device(thing, META) is thing
    assert to_device("abc", META) == "abc"


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = rows()
    assert to_device([tensor], torch.device("cpu"))[0] is tensor


SCRIPT = """
import resource, torch
from hezar_train.config import TrainerConfig
from hezar_train.runtime import build_runtime

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        parts = [torch.zeros(2 << 20) for _ in range(3)]
        del parts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

build_runtime(TrainerConfig(output_dir="run", use_cpu=True))
faults()
print(faults())
"""


def page_faults(**environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_batches_reuse_memory_unless_the_environment_says_otherwise() -> None:
    assert page_faults() < 2000  # 24 MB are 6,000 pages, twenty times over
    assert page_faults(MALLOC_TRIM_THRESHOLD_="131072") > 20_000

"""Two hosts: two network namespaces with a cable between them, torchrun in each, one folder for both."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORLD = Path(__file__).with_name("world.py")
PAGE = (ROOT / "docs" / "how_to" / "cluster.md").read_text(encoding="utf-8")
ADDRESSES = ("10.77.0.1", "10.77.0.2")

Hosts = Callable[..., "list[subprocess.Popen[str]]"]
Wait = Callable[..., None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Two namespaces; the device in each has its name."""
    found = [f"ht{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in found:
            ip("netns", "add", name)
        ip("link", "add", found[0], "netns", found[0], "type", "veth", "peer", "name", found[1], "netns", found[1])
        for name, address in zip(found, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    else:
        yield found
    finally:
        for name in found:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts(names: list[str], tmp_path: Path, environment: dict[str, str]) -> Iterator[Hosts]:
    """Run the line of the page on both hosts, with other words in the place of what it trains."""
    started: list[subprocess.Popen[str]] = []
    (line,) = re.findall(r"^\S+=.* torchrun (--nnodes .*) -m hezar_train", PAGE, re.MULTILINE)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), *line.split()]

    def call(*what: str) -> list[subprocess.Popen[str]]:
        for number, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            place = ["--local_addr", address, "--rdzv_conf", f"is_host={int(number == 0)}"]
            variables = {"GLOO_SOCKET_IFNAME": name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = ["ip", "netns", "exec", name, *torchrun, *place, *what]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=tmp_path,
                    env={**environment, **variables},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=(tmp_path / f"{name}.err").open("w"),
                )
            )
        return started

    yield call
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def trainer_on(name: str) -> int:
    """Return the pid of the process that trains on a host."""
    pids = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True).stdout.split()
    (found,) = [pid for pid in pids if "\0RANK=" in Path(f"/proc/{pid}/environ").read_text()]
    return int(found)


def test_two_hosts_are_one_world(hosts: Hosts) -> None:
    first, second = hosts(str(WORLD))
    words = first.communicate(timeout=120)[0] + second.communicate(timeout=120)[0]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sorted(words.splitlines()) == ["rank 0 of 2 sees [0, 1]", "rank 1 of 2 sees [0, 1]"]


def test_a_run_on_two_hosts_survives_the_death_of_a_process(
    hosts: Hosts, names: list[str], recipe: str, tmp_path: Path, wait_for: Wait
) -> None:
    both = hosts("-m", "hezar_train", "train", recipe, "recipe.seconds=0.05", "resume_from_checkpoint=true")
    wait_for((tmp_path / "run/checkpoints/00000012").exists)
    os.kill(trainer_on(names[1]), signal.SIGKILL)
    words = "".join(process.communicate(timeout=200)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert words.count("Everything lies in run") == 1
    errors = "".join((tmp_path / f"{name}.err").read_text() for name in names)
    assert errors.count("resuming from run/checkpoints/") == 1
    assert (tmp_path / "run/checkpoints/00000040/manifest.json").exists()


def test_a_signal_to_both_hosts_saves_once_and_the_same_lines_go_on(
    hosts: Hosts, names: list[str], recipe: str, tmp_path: Path, wait_for: Wait
) -> None:
    what = ["-m", "hezar_train", "train", recipe, "resume_from_checkpoint=true", "save_steps=1000"]
    both = hosts(*what, "recipe.seconds=0.05")
    wait_for((tmp_path / "run/ledger.jsonl").exists)
    time.sleep(1)
    for process in both:
        process.terminate()
    for process in both:
        process.communicate(timeout=120)
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("[0-9]*"))
    assert len(saved) >= 1
    both.clear()
    again = hosts(*what, "recipe.seconds=0.05")
    for process in again:
        process.communicate(timeout=200)
    assert [process.returncode for process in again] == [0, 0]
    errors = "".join((tmp_path / f"{name}.err").read_text() for name in names)
    assert f"resuming from run/checkpoints/{saved[-1]}" in errors

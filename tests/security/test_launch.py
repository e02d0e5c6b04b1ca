"""Several processes on one machine: nothing that another user of the machine could reach or take the place of."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hezar_train

ROOT = Path(hezar_train.__file__).parents[1]
NOBODY = 65534
LISTENING = "0A"
LOOPBACK = "0100007F"
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "TORCHELASTIC_RESTART_COUNT")
RECIPE = """\
import os, time
from pathlib import Path
import torch
from accelerate import Accelerator
from hezar_train import Recipe

class Slow(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            Path(f"waits{os.environ['RANK']}").touch()
        while self.calls >= 3 and not Path("go").exists():
            time.sleep(0.05)
        return super().forward(x)

def build() -> Recipe:
    Accelerator()  # a recipe's own: it finds the group that is there
    x = torch.rand(64, 2)
    return Recipe(Slow(2, 1), torch.utils.data.TensorDataset(x, x.prod(dim=1, keepdim=True)))
"""
CONFIG = "trainer: {output_dir: run, batch_size: 4, criterion: MSELoss, num_epochs: 1, save_steps: 8}\n"
TRAIN = [sys.executable, "-m", "hezar_train", "train", "recipe", "--num-processes", "2", "--max-restarts", "0"]
PEER = """\
import sys
import torch.distributed as dist
from hezar_train.runtime.group import KEY, verify_peers

rank = int(sys.argv[1])
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
key = dist.HashStore()
key.set(KEY, sys.argv[2])
verify_peers(key if rank else store, rank, 2)
"""
JOINING = """\
from pathlib import Path
from hezar_train.runtime.group import join_through_file

join_through_file(Path("store"), on_cpu=True)
"""
IMPOSTOR = """\
import sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=1, world_size=2)
word = torch.zeros(32, dtype=torch.uint8)
if sys.argv[1] == "returns":
    dist.recv(word, 0)
dist.send(word, 0)
"""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHERS_VARIABLES}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two processes that is in the middle of its training, until there is a file `go`."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.py").write_text(RECIPE)
    (tmp_path / "recipe" / "config.yaml").write_text(CONFIG)
    variables = environment(TMPDIR=str(tmp_path), GLOO_SOCKET_IFNAME="eth0")
    process = subprocess.Popen(
        TRAIN, cwd=tmp_path, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_for(lambda: process.poll() is not None or len(list(tmp_path.glob("waits*"))) == 2)
    yield process
    (tmp_path / "go").touch()
    process.kill()
    process.communicate()


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def end_of(training: subprocess.Popen[str], folder: Path) -> int:
    (folder / "go").touch()
    print(training.communicate(timeout=120)[0])
    return training.returncode


def processes_of(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from processes_of(int(child))


def listening(pid: int) -> set[str]:
    """Return the addresses (as the kernel writes them) on which a process and its children listen."""
    inodes = {
        os.readlink(link).strip("socket:[]")
        for one in processes_of(pid)
        for link in Path(f"/proc/{one}/fd").iterdir()
        if link.is_symlink() and os.readlink(link).startswith("socket:")
    }
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == LISTENING and row[9] in inodes}


@needs_proc
def test_while_two_processes_train_another_user_finds_gloo_on_loopback_alone_and_cannot_disturb_it(
    training: subprocess.Popen[str], tmp_path: Path
) -> None:
    found = listening(training.pid)
    (folder,) = tmp_path.glob("hezar_train_*")
    assert found, "gloo listens"
    assert {address.partition(":")[0] for address in found} == {LOOPBACK}, "others could connect from elsewhere"
    assert folder.stat().st_mode & 0o777 == 0o700
    if os.getuid() == 0:  # only root can become another user
        attack([int(address.partition(":")[2], 16) for address in found])
    assert end_of(training, tmp_path) == 0


def attack(ports: list[int]) -> None:
    """Send a pickle to each port as another user, under the numbers that gloo waits for."""
    script = f"""
import encodings.idna, os, socket
os.setgid({NOBODY}); os.setuid({NOBODY})
for port in {ports}:
    for number in range(8):
        with socket.create_connection(("127.0.0.1", port), 5) as link:
            link.sendall(number.to_bytes(8, "little") + b"cbuiltins\\nexit\\n." * 100)
"""
    subprocess.run([sys.executable, "-c", script], cwd="/", check=True)


FURTHER_GROUP = """\
import os, sys
from pathlib import Path
import torch.distributed as dist
from hezar_train.checkpoint import SavingGroup
from hezar_train.runtime import group

os.environ.update(RANK=sys.argv[1], WORLD_SIZE="2", LOCAL_RANK=sys.argv[1], LOCAL_WORLD_SIZE="2")
group.join_through_file(Path("store"), on_cpu=True)
if sys.argv[1:] == ["1", "guessed"]:  # somebody else at the end of a connection of the group that is made now
    group._stores[0] = dist.HashStore()
    group._stores[0].set(f"{group.KEY}.1", "guessed")
print(SavingGroup.form().gather(os.environ["RANK"]))
"""


@pytest.mark.parametrize("key", ["guessed", "read"])
def test_a_group_that_is_made_later_is_proven_too(tmp_path: Path, key: str) -> None:
    variables = environment(GLOO_SOCKET_IFNAME="lo", ACCELERATE_USE_CPU="true")
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", FURTHER_GROUP, str(rank), key],
            cwd=tmp_path,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    words = [peer.communicate(timeout=120) for peer in peers]
    if key == "read":
        assert [one.strip() for one, _ in words] == ["['0', '1']"] * 2
    else:
        assert any("was connected to something that is not process" in one for _, one in words)
        assert not any(one.strip() for one, _ in words)


def test_a_process_that_cannot_read_the_key_is_not_taken_for_a_peer(tmp_path: Path) -> None:
    variables = environment(GLOO_SOCKET_IFNAME="lo")
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(rank), "guessed"],
            cwd=tmp_path,
            env=variables,
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    words = [peer.communicate(timeout=120)[1] for peer in peers]
    assert any("was connected to something that is not process" in one for one in words)


@pytest.mark.parametrize("deed", ["guesses", "returns"])
def test_a_group_is_not_joined_with_who_guesses_a_word_or_returns_what_it_heard(tmp_path: Path, deed: str) -> None:
    variables = environment(GLOO_SOCKET_IFNAME="lo", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    given = {"cwd": tmp_path, "env": variables, "text": True, "stderr": subprocess.PIPE}
    joining = subprocess.Popen([sys.executable, "-c", JOINING], **given)
    impostor = subprocess.Popen([sys.executable, "-c", IMPOSTOR, deed], **given)
    words = joining.communicate(timeout=120)[1]
    impostor.kill()
    impostor.communicate()
    assert joining.returncode == 1
    assert "process 0 was connected to something that is not process 1 of this run" in words

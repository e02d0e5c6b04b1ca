"""What is compiled, and run again later, lies where no other user of the machine can put something in its place."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hezar_train
from hezar_train import TrainerConfig
from hezar_train.runtime import build_runtime, keep_compiled_code_apart
from hezar_train.user_cache import is_closed, own_folder

ROOT = Path(hezar_train.__file__).parents[1]
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
NOBODY = 65534
TRAINING = """\
import sys
from pathlib import Path
from tests.security.hostile import make_trainer

make_trainer(Path(sys.argv[1])).train()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's own files, and no place for compiled code that the environment names."""
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(HEADERS, raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("before", [None, "torch's own choice"])
def test_compiled_code_lies_in_a_folder_of_the_users_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    if before is not None:  # torch writes into the environment where it has looked
        monkeypatch.setenv(VARIABLE, default_cache_dir())
    build_runtime(TrainerConfig(str(tmp_path / "run")))
    assert Path(cache_dir()) == cache / "compiled"
    assert (cache / "compiled").stat().st_mode & 0o077 == 0


def test_compiled_code_lies_where_the_user_says(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    keep_compiled_code_apart()
    assert os.environ[VARIABLE] == str(tmp_path / "mine")
    assert not (cache / "compiled").exists()


@pytest.mark.parametrize("kind", ["nothing", "the user's own", "one that all may write to", "a file", "a link"])
def test_headers_are_compiled_beforehand_only_where_torchs_own_folder_is_this_users(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(HEADERS, "1")
    usual = tmp_path / f"torchinductor_{getpass.getuser()}"
    if kind == "a file":
        usual.touch()
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    elif kind != "nothing":
        usual.mkdir()
        usual.chmod(0o755 if kind == "the user's own" else 0o1777)
    keep_compiled_code_apart()
    assert os.environ[HEADERS] == ("1" if kind in ("nothing", "the user's own") else "0")
    assert os.environ[VARIABLE] == str(cache / "compiled")
    if kind == "nothing":
        assert usual.stat().st_mode & 0o077 == 0


def test_a_file_where_torch_would_keep_compiled_code_stops_no_training(cache: Path, tmp_path: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "run")]
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()  # who comes first has the name, whoever it is
    ended = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_folder_that_others_can_write_to_or_exchange_is_not_taken(cache: Path) -> None:
    assert own_folder("mine") == cache / "mine"
    for folder, mode in ((cache / "mine", 0o777), (cache, 0o757), (cache.parent, 0o1777)):
        before = folder.stat().st_mode
        folder.chmod(mode)
        is_safe = mode & 0o1000 and folder.stat().st_uid == 0
        assert is_closed(cache / "mine") is bool(is_safe)
        assert (own_folder("mine") == cache / "mine") is bool(is_safe)
        folder.chmod(before)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="makes another user's folder")
@pytest.mark.parametrize("name", ["cache/mine", "cache", "."])
def test_a_folder_of_another_user_is_not_taken(cache: Path, name: str) -> None:
    (cache / "mine").mkdir()
    os.chown(cache.parent / name, NOBODY, NOBODY)
    found = own_folder("mine")
    assert not found.is_relative_to(cache.parent)
    assert (found.stat().st_uid, found.stat().st_mode & 0o077) == (0, 0)


def test_a_link_that_leads_to_a_folder_is_followed_once(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "mine").symlink_to(tmp_path / "elsewhere")
    assert own_folder("mine") == tmp_path / "elsewhere"


def test_without_a_cache_there_is_a_folder_as_long_as_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "file"))
    found = own_folder("passing")
    assert found == own_folder("passing")
    assert found.parent == Path(tempfile.gettempdir())
    assert found.stat().st_mode & 0o077 == 0

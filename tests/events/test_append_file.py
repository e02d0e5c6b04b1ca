from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.events import keep_until
from hezar_train.events.writers import AppendFile


def test_bytes_reach_the_file_at_flush_and_size_says_how_many(tmp_path):
    file = AppendFile(tmp_path / "deep" / "a.txt")
    file.append(b"one\n")
    file.append(b"two\n")
    assert (file.size, file.has_pending) == (0, True)
    file.flush()
    assert (file.size, file.has_pending) == (8, False)
    assert file.path.read_bytes() == b"one\ntwo\n"
    file.close()
    file.close()


def test_reopening_appends_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntw")
    file = AppendFile(path)
    assert file.size == 4
    file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "a.txt.dropped").read_bytes() == b"tw\n"


def test_sync_from_another_thread_survives_a_close(tmp_path):
    file = AppendFile(tmp_path / "a.txt")
    errors = []

    def sync_often() -> None:
        try:
            for _ in range(200):
                file.sync()
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=sync_often)
    thread.start()
    for number in range(100):
        file.append(b"%d\n" % number)
        file.flush()
    file.close()
    thread.join()
    assert errors == []


def test_a_full_disk_delays_a_write_whole_and_warns_once(tmp_path):
    code = """
import logging, resource, sys
from hezar_train.events.writers import AppendFile
logging.basicConfig(level=logging.WARNING)
file = AppendFile(sys.argv[1])
file.append(b"a" * 9 + b"\\n")
file.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (15, resource.RLIM_INFINITY))
for line in (b"b" * 9 + b"\\n", b"c" * 9 + b"\\n"):
    file.append(line)
    file.flush()
    assert file.size == 10 and open(sys.argv[1], "rb").read() == b"a" * 9 + b"\\n"
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.flush()
file.close()
"""
    path = tmp_path / "a.txt"
    result = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert path.read_bytes() == b"aaaaaaaaa\nbbbbbbbbb\nccccccccc\n"
    assert result.stderr.count("cannot grow") == 1


@settings(deadline=None)
@given(st.lists(st.binary(max_size=6).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_a_cut_keeps_whole_lines_and_moves_the_rest(tmp_path_factory, lines, data):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "a.txt"
    content = b"".join(line + b"\n" for line in lines) + data.draw(st.sampled_from([b"", b"torn"]))
    size = data.draw(st.integers(0, len(content)))
    path.write_bytes(content)
    assert keep_until(path, size) == len(content) - size
    kept = content[: content[:size].rfind(b"\n") + 1]
    assert path.read_bytes() == kept
    dropped = folder / "a.txt.dropped"
    moved = dropped.read_bytes() if dropped.exists() else b""
    rest = content[len(kept) :]
    assert moved == (rest if not rest or rest.endswith(b"\n") else rest + b"\n")


def test_two_cuts_add_up_in_the_dropped_file(tmp_path):
    path = tmp_path / "a.txt"
    for line in (b"two\n", b"three\n"):
        path.write_bytes(b"one\n" + line)
        assert keep_until(path, 4) == len(line)
    assert path.read_bytes() == b"one\n"
    assert (tmp_path / "a.txt.dropped").read_bytes() == b"two\nthree\n"


def test_a_file_that_is_too_short_keeps_its_lines_and_says_what_it_lacks(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n")
    assert keep_until(path, 10) == -6
    assert path.read_bytes() == b"one\n"
    assert keep_until(tmp_path / "none.txt", 10) == -10
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_dropped_part_is_on_the_disk_before_the_file_is_cut(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n")

    def fail(descriptor: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="power cut"):
        keep_until(path, 4)
    assert path.read_bytes() == b"one\ntwo\n"

"""A Hezar model's `model.pt`: its tensors are read, and nothing that the pickle says is ever run."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import pickle
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hezar_train.checkpoint import initial_weights
from hezar_train.checkpoint.hezar_weights import read_hezar_weights
from hezar_train.compat.lernomatic.keeping import read_file
from hezar_train.errors import CheckpointError

CONFIG = "name: bert_text_classification\nconfig_type: model\n"


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model_config.yaml").write_text(CONFIG)
    torch.save(network().state_dict(), tmp_path / "model.pt")
    return tmp_path


@pytest.mark.parametrize("inner", ["", "model.pt"])
def test_the_folder_and_the_file_give_the_weights_bit_by_bit_and_it_is_said(
    folder: Path, inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, saved = network(), torch.load(folder / "model.pt", weights_only=True)
    with caplog.at_level(logging.INFO):
        report = initial_weights(target, folder / inner)
    assert (report.missing, report.unexpected, report.mismatched) == ([], [], [])
    assert all(torch.equal(value, saved[name]) for name, value in target.state_dict().items())
    assert "is a pickle: its 7 tensors were read, and nothing of it was run" in caplog.text


def test_parameters_and_every_kind_of_number_are_read(folder: Path) -> None:
    kinds = (
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
    given: dict[str, Any] = {str(kind): torch.ones(2, dtype=kind) for kind in kinds}
    torch.save(given | {"own": nn.Parameter(torch.ones(3)), "epoch": 7, "text": "no weight"}, folder / "model.pt")
    found = read_hezar_weights(folder / "model.pt")
    assert sorted(found) == sorted([*given, "own"])
    assert all(torch.equal(found[name], value) for name, value in given.items())


def test_a_pickle_that_no_config_calls_a_hezar_models_is_not_read(folder: Path) -> None:
    (folder / "model_config.yaml").unlink()
    with pytest.raises(CheckpointError, match="pickles are not read"):
        initial_weights(network(), folder)


class Evil:
    """Leave a trace if it is ever unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_it_is_refused_by_name_and_never_run(folder: Path, protocol: int) -> None:
    trace = folder / "trace"
    torch.save({"0.weight": torch.ones(2, 3), "x": Evil(trace)}, folder / "model.pt", pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"(names '|holds an object of its own).*can run any code"):
        initial_weights(network(), folder)
    assert not trace.exists()


def test_a_class_that_the_process_trusts_elsewhere_is_refused_all_the_same(folder: Path) -> None:
    torch.save({"0.weight": torch.ones(2, 3), "x": collections.Counter("a")}, folder / "model.pt")
    with (
        torch.serialization.safe_globals([collections.Counter]),
        pytest.raises(CheckpointError, match=r"names 'collections\.Counter', which is no tensor"),
    ):
        initial_weights(network(), folder)


def test_the_old_format_and_a_bare_pickle_are_refused(folder: Path) -> None:
    torch.save(network().state_dict(), folder / "model.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"is no archive of torch\.save"):
        initial_weights(network(), folder)
    (folder / "model.pt").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"is no archive of torch\.save"):
        initial_weights(network(), folder)


def rewritten(path: Path, compression: int, change: Callable[[str, bytes], bytes]) -> None:
    """Write an archive anew, with each entry changed."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as old, zipfile.ZipFile(path, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))


def test_a_compressed_archive_is_refused(folder: Path) -> None:
    rewritten(folder / "model.pt", zipfile.ZIP_DEFLATED, lambda name, content: content)
    with pytest.raises(CheckpointError, match="is compressed"):
        initial_weights(network(), folder)


def test_a_cut_pickle_and_one_that_is_no_mapping_are_clear_errors(folder: Path) -> None:
    rewritten(folder / "model.pt", zipfile.ZIP_STORED, lambda name, content: content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        initial_weights(network(), folder)
    torch.save([torch.ones(2)], folder / "model.pt")
    with pytest.raises(CheckpointError, match="holds no weights by name"):
        initial_weights(network(), folder)


@pytest.mark.parametrize("number", range(12))
def test_an_archive_with_other_bytes_is_read_or_refused(folder: Path, number: int) -> None:
    whole, draw = (folder / "model.pt").read_bytes(), random.Random(number)
    for _ in range(25):
        content = bytearray(whole)
        content[draw.randrange(len(content))] = draw.choice([0, 255, draw.randrange(256)])
        (folder / "model.pt").write_bytes(content)
        with contextlib.suppress(CheckpointError):
            read_hezar_weights(folder / "model.pt")


ORDERED = b"ccollections\nOrderedDict\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


@pytest.mark.parametrize(
    "content",
    [
        ORDERED + b"K\x05\x85R.", REBUILD + b")R.", b"K\x05Q.", b")Q.", ORDERED + b")RK\x05b.", b"h\x05.", b"}]K\x01s.",
        b"ctorch\nFloatStorage\nK\x05\x85R.", b"ctorch._utils\n_rebuild_parameter\nK\x01K\x02K\x03\x87R.",
    ],
)  # fmt: skip
def test_a_pickle_of_tensors_put_together_otherwise_is_refused(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02" + content)
        archive.writestr("model/version", "3\n")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_hezar_weights(folder / "model.pt")


def test_bools_that_are_neither_true_nor_false_are_refused(folder: Path) -> None:
    torch.save({"mask": torch.tensor([7, 1], dtype=torch.uint8).view(torch.bool)}, folder / "model.pt")
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        read_hezar_weights(folder / "model.pt")
    with pytest.raises(CheckpointError, match="neither 0 nor 1"):
        read_file(folder / "model.pt")


DOUBLED = b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (level - 1, level) for level in range(1, 60))
"""A tuple that holds the one before it twice, sixty times: two to the power of sixty values."""


@pytest.mark.parametrize("content", [b"}" + DOUBLED + b"K\x01s.", DOUBLED + b"Q.", b"]q\x00h\x00a.", b"}2K\x01s."])
def test_a_pickle_that_makes_more_than_it_holds_is_refused_at_once(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02" + content)
        archive.writestr("model/version", "3\n")
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"makes more values|changes after it was used|DUP"):
        initial_weights(network(), folder)
    assert time.process_time() - began < 5


def test_a_pickle_of_millions_of_opcodes_is_not_followed_to_its_end(folder: Path) -> None:
    rewritten(folder / "model.pt", zipfile.ZIP_STORED, lambda name, content: b"\x80\x02}" + b")0" * 2_000_000 + b".")
    began = time.process_time()
    with pytest.raises(CheckpointError, match="makes more values than weights have"):
        initial_weights(network(), folder)
    assert time.process_time() - began < 20


def test_a_view_of_one_value_a_billion_times_costs_nothing(folder: Path) -> None:
    masks = {f"mask{kind}": torch.zeros(1, dtype=kind).expand(1 << 40) for kind in (torch.bool, torch.float32)}
    torch.save(masks | {"0.weight": torch.ones(1).expand(2, 3)}, folder / "model.pt")
    target = network()
    report = initial_weights(target, folder)
    assert report.loaded == ["0.weight"]
    assert torch.equal(target.state_dict()["0.weight"], torch.ones(2, 3))


@pytest.mark.parametrize(("before", "behind"), [(b"x" * 64, b""), (b"", b"x")])
def test_an_archive_in_which_two_readers_find_two_directories_is_refused(
    folder: Path, before: bytes, behind: bytes
) -> None:
    content = bytearray((folder / "model.pt").read_bytes())
    if behind:
        content[-2:] = len(behind).to_bytes(2, "little")  # of a comment
    (folder / "model.pt").write_bytes(before + content + behind)
    with pytest.raises(CheckpointError, match=r"a directory that not every reader would find|is no archive"):
        read_hezar_weights(folder / "model.pt")

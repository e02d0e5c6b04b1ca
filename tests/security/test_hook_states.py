"""What a checkpoint says of hooks and of a trainer's attributes is as strict to read as it was to write."""

from __future__ import annotations

import os
import pickle
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from hezar_train.checkpoint import Checkpointer
from hezar_train.compat.federatedscope.kept import KeptNames
from hezar_train.compat.lernomatic import Trainer as LernomaticTrainer
from hezar_train.compat.lernomatic.keeping import Keeper, read_file, write_file
from hezar_train.compat.lernomatic.models import LernomaticModel
from hezar_train.compat.libai import DefaultTrainer
from hezar_train.compat.libai.hooks import PeriodicCheckpointer
from hezar_train.errors import CheckpointError
from hezar_train.federated import RegularizedOptimizer
from hezar_train.hooks.periodic import Checkpointed
from tests.compat.fs_toy import build
from tests.compat.libai_run import config_of
from tests.security.hostile import edit_state, newest


class Saving(DefaultTrainer):
    """A run of LiBai's that also saves into a folder of the user's."""

    def build_hooks(self) -> list[Any]:
        self.hook_of_mine = PeriodicCheckpointer(
            Checkpointer(self.model, Path(self.cfg.train.output_dir).parent / "mine"), 1, max_to_keep=2
        )
        return [*super().build_hooks(), self.hook_of_mine]


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    (tmp_path / "treasure").mkdir()
    (tmp_path / "treasure" / "photo.jpg").write_text("the only copy")
    return tmp_path / "treasure"


@pytest.mark.parametrize("name", ["{treasure}", "../treasure", "beside", ".", ""])
def test_a_hook_that_keeps_few_checkpoints_deletes_no_folder_that_a_state_names(
    tmp_path: Path, treasure: Path, name: str
) -> None:
    run, quiet = tmp_path / "run", "train.evaluation.enabled=False"
    Saving(config_of(run, quiet)).train()
    (tmp_path / "mine" / "beside").mkdir()
    (tmp_path / "mine" / "beside" / "notes.txt").write_text("mine")
    shutil.rmtree(newest(run))
    edit_state(newest(run), lambda sections: _name_as_saved(sections, name.format(treasure=treasure)))
    Saving(config_of(run, quiet, "train.resume=True")).train()
    assert (treasure / "photo.jpg").exists()
    assert (tmp_path / "mine" / "beside" / "notes.txt").exists()
    assert {"model_0000010", "model_0000011", "model_final"} <= {path.name for path in (tmp_path / "mine").iterdir()}


def _name_as_saved(sections: dict[str, Any], name: str) -> None:
    (hook,) = (one for one in sections["extra"]["hooks"].values() if one.get("saved"))
    hook["saved"] = [name] * 5


def test_a_checkpointer_deletes_its_own_checkpoints(tmp_path: Path) -> None:
    keeper = Checkpointer(nn.Linear(2, 1), tmp_path / "kept")
    keeper.save("one")
    keeper.save("two")
    keeper.delete("one")
    assert [path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()] == ["two"]


class Owner:
    """A trainer with lernomatic's kind of attributes."""

    def __init__(self) -> None:
        self.loss_iter, self.loss_history, self.checkpoint_dir = 3, np.zeros(4), "checkpoints"
        self.num_epochs = 2
        self.lr_scheduler: Any = None
        self.mtm_scheduler: Any = None

    def save(self) -> str:
        return self.checkpoint_dir


@pytest.mark.parametrize(
    "values",
    [
        {"checkpoint_dir": "/home/me"}, {"save": 5}, {"_private": 5}, {"num_epochs": 10**9}, {"__class__": 5},
        {"loss_iter": "x"}, {"loss_iter": [1]}, {"loss_iter": {}}, {5: 5}, [], None,
    ],
)  # fmt: skip
def test_a_checkpoint_sets_no_attribute_that_it_would_not_have_kept(values: Any) -> None:
    owner = Owner()
    with pytest.raises(CheckpointError):
        Keeper(owner, {"num_epochs"}).load_state_dict({"values": values, "schedules": {}})
    assert (owner.checkpoint_dir, owner.num_epochs, owner.save()) == ("checkpoints", 2, "checkpoints")


@pytest.mark.parametrize(
    "schedules", [{"loss": {}}, {"lr_scheduler": {"step": 5}}, {"lr_scheduler": {"rate": "x"}}, {"mtm_scheduler": [5]}]
)
def test_a_checkpoint_sets_nothing_but_numbers_of_a_schedule(schedules: Any) -> None:
    owner = Owner()
    owner.lr_scheduler = owner.mtm_scheduler = StepLR(SGD(nn.Linear(1, 1).parameters(), 0.1), 1)
    with pytest.raises(CheckpointError):
        Keeper(owner, ()).load_state_dict({"values": {}, "schedules": schedules})


@pytest.mark.parametrize("numbers", [{"rate": "x"}, [5], {5: 5}])
def test_what_waits_for_a_schedule_is_numbers(numbers: Any) -> None:
    with pytest.raises(CheckpointError):
        Keeper(Owner(), ()).load_state_dict({"values": {}, "schedules": {"lr_scheduler": numbers}})


def test_what_waited_for_a_schedule_takes_no_method_of_it() -> None:
    owner = Owner()
    keeper = Keeper(owner, ())
    keeper.load_state_dict({"values": {}, "schedules": {"lr_scheduler": {"step": 5}}})
    owner.lr_scheduler = StepLR(SGD(nn.Linear(1, 1).parameters(), 0.1), 1)
    with pytest.raises(CheckpointError):
        keeper.on_fit_start(None)


def test_counters_arrays_and_tensors_come_back() -> None:
    owner = Owner()
    kept = {"loss_iter": 7, "loss_history": np.ones(2), "average": torch.ones(1), "rate": np.float64(0.5)}
    Keeper(owner, {"num_epochs"}).load_state_dict({"values": kept, "schedules": {}})
    assert (owner.loss_iter, owner.loss_history.tolist()) == (7, [1.0, 1.0])
    assert vars(owner)["average"] == torch.ones(1)


class Wrapper(LernomaticModel):
    """A wrapper as users of lernomatic write them."""

    def __init__(self, **_: Any) -> None:
        self.net = nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("where", "path", "name"),
    [
        ("module", "subprocess", "Popen"), ("module", "pathlib", "Path"), ("module", __name__, "Wrapper"),
        ("module", 5, []), ("model", "subprocess", "Popen"), ("model", "http.server", "ThreadingHTTPServer"),
    ],
)  # fmt: skip
def test_a_file_of_lernomatic_makes_nothing_but_models(tmp_path: Path, where: str, path: Any, name: Any) -> None:
    contents = Wrapper().get_params() | {
        f"{where}_import_path": path, f"{where}_name": name, "model_args": {"args": ["touch", str(tmp_path / "ran")]},
    }  # fmt: skip
    torch.save({"model": contents, "trainer_params": {}, "optim": {}}, tmp_path / "kept.pkl")
    reader: Any = Wrapper() if where == "module" else LernomaticTrainer(checkpoint_dir=str(tmp_path))
    with pytest.raises(CheckpointError):
        reader.load_checkpoint(tmp_path / "kept.pkl")
    assert not (tmp_path / "ran").exists()


def test_a_wrapper_takes_its_own_file_over(tmp_path: Path) -> None:
    first, second = Wrapper(), Wrapper()
    torch.save({"model": first.get_params()}, tmp_path / "kept.pkl")
    second.load_checkpoint(tmp_path / "kept.pkl")
    assert torch.equal(first.get_net().weight, second.get_net().weight)


@pytest.mark.parametrize("contents", [{"checkpoint_dir": "/home/me"}, {"train": 5}, {"cur_epoch": "x"}])
def test_a_file_of_histories_sets_nothing_else(tmp_path: Path, contents: dict[str, Any]) -> None:
    torch.save({"loss_history": torch.ones(2), **contents}, tmp_path / "history.pkl")
    trainer = LernomaticTrainer(checkpoint_dir=str(tmp_path))
    with pytest.raises(CheckpointError):
        trainer.load_history(tmp_path / "history.pkl")
    assert (trainer.checkpoint_dir, trainer.cur_epoch) == (str(tmp_path), 0)


def test_a_file_of_lernomatic_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr("hezar_train.compat.lernomatic.keeping.secrets.token_hex", lambda _: "guessed")
    for name in (f".kept.pkl.{os.getpid()}", ".kept.pkl.guessed.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "kept.pkl", {"loss_iter": 3})
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "state",
    [
        {}, {"names": []}, {"names": {"a": {"kind": "value"}}}, {"names": {"a": {"kind": "class", "of": "os.system"}}},
        {"names": {"a": 5}}, {"names": {}, "frozen": [5], "of_round": []}, {"names": {}, "frozen": [], "of_round": 5},
        {"names": {"a": {"kind": "list", "items": [{}]}}, "frozen": [], "of_round": []},
        {"names": {"a": {"kind": "state", "state": 5, "frozen": []}}, "frozen": [], "of_round": []},
    ],
)  # fmt: skip
def test_names_of_federatedscope_that_are_none_are_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        KeptNames(dict, dict, lambda *_: None, lambda: nn.Linear(1, 1), list).load_state_dict(state)


@pytest.mark.parametrize("name", ["self.train", "self.parts", "self._cfg", "cfg", "device", "lifecycles", "self.ctx"])
def test_a_checkpoint_puts_no_value_where_a_federatedscope_trainer_has_its_own(tmp_path: Path, name: str) -> None:
    trainer = build(tmp_path)
    trainer.kept_names.load_state_dict({"names": {name: {"kind": "value", "value": "x"}}, "frozen": [], "of_round": []})
    with pytest.raises(CheckpointError, match="which none holds"):
        trainer.kept_names.put_back(is_last=True)


class Called:
    """What a pickle has called when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


class Rebuilt(Called):
    """The same, with a state for what the call returns."""

    def __init__(self, state: Any, function: Any, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self._state = state

    def __reduce__(self) -> Any:
        return (*self._call, self._state)


NUMPYS_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
NUMPYS_SCALAR: Any = np.float64(0).__reduce__()[0]
ADDRESS = b"\x41" * 8
POINTER_FIELD = (3, "<", None, ("a",), {"a": (np.dtype("f8"), 0)}, 8, 8, 27)


@pytest.mark.parametrize(
    "value",
    [
        Called(np.ndarray, (1,), "O", ADDRESS),
        Called(np.ndarray, (1,), np.dtype("f8"), ADDRESS, 1 << 40),
        Called(np.ndarray, (1 << 40,), "f8"),
        Called(np.dtype, "O"),
        Called(NUMPYS_SCALAR, np.dtype("f8"), ADDRESS + ADDRESS),
        Called(NUMPYS_SCALAR, Rebuilt(POINTER_FIELD, np.dtype, "f8", False, True), ADDRESS),
        Called(NUMPYS_RECONSTRUCT, np.ndarray, (1,), "O"),
        Rebuilt((1, (1,), np.dtype("f8"), False, ADDRESS[:3]), NUMPYS_RECONSTRUCT, np.ndarray, (0,), b"b"),
        Rebuilt((1, (-1,), np.dtype("f8"), False, ADDRESS), NUMPYS_RECONSTRUCT, np.ndarray, (0,), b"b"),
        Rebuilt((1, (1,), "O", False, ADDRESS), NUMPYS_RECONSTRUCT, np.ndarray, (0,), b"b"),
        Rebuilt((1, (1,), np.dtype("f8"), False, [ADDRESS]), NUMPYS_RECONSTRUCT, np.ndarray, (0,), b"b"),
    ],
    ids=range(11),
)
def test_no_bytes_of_a_file_of_lernomatic_s_become_objects(tmp_path: Path, value: Any) -> None:
    torch.save({"loss_history": value}, tmp_path / "history.pkl")
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        read_file(tmp_path / "history.pkl")


@pytest.mark.parametrize("content", [[1], "x", torch.zeros(2)])
def test_a_file_of_lernomatic_s_is_names_with_values(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "history.pkl")
    with pytest.raises(CheckpointError):
        read_file(tmp_path / "history.pkl")


def test_the_arrays_of_a_file_that_lernomatic_wrote_are_read_as_they_were(tmp_path: Path) -> None:
    arrays = {
        "losses": np.linspace(0, 1, 7),
        "table": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "rows": np.arange(6, dtype=">i2").reshape(3, 2),
        "flags": np.array([True, False]),
        "deep": [{"inner": (np.float32([1.5]), 3)}],
    }
    torch.save({**arrays, "last": np.float64(0.25)}, tmp_path / "history.pkl")
    found = read_file(tmp_path / "history.pkl")
    for name in ("losses", "table", "rows", "flags"):
        assert found[name].dtype == arrays[name].dtype
        assert np.array_equal(found[name], arrays[name])
    assert found["deep"][0]["inner"][0].tolist() == [1.5]
    assert (found["last"], type(found["last"])) == (0.25, np.float64)


def short_averages(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state whose averages are shorter than their parameters, which a fused kernel would write past."""
    state = optimizer.state_dict()
    for kept in state["state"].values():
        kept["exp_avg"] = torch.zeros(1)
    return state


def stepped_adam() -> torch.optim.Adam:
    weight = nn.Parameter(torch.zeros(4096))
    weight.grad = torch.ones(4096)
    optimizer = torch.optim.Adam([weight], fused=True)
    optimizer.step()
    return optimizer


def test_no_door_gives_an_optimizer_averages_of_another_size() -> None:
    optimizer = stepped_adam()
    state = short_averages(optimizer)
    with pytest.raises(CheckpointError, match="exp_avg of a parameter of shape"):
        RegularizedOptimizer(optimizer, 0.1).load_state_dict({"optimizer": state, "compared": None})
    with pytest.raises(CheckpointError, match="exp_avg of a parameter of shape"):
        Checkpointed("mine", optimizer).load_state_dict(state)
    kept = KeptNames(lambda: {"own": optimizer}, dict, lambda *_: None, lambda: nn.Linear(1, 1), tuple)
    form = {"kind": "state", "state": state, "frozen": []}
    kept.load_state_dict({"names": {"own": form}, "frozen": [], "of_round": []})
    with pytest.raises(CheckpointError, match="exp_avg of a parameter of shape"):
        kept.put_back(is_last=False)


DOUBLED = b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (level - 1, level) for level in range(1, 60))
"""A tuple that holds the one before it twice, sixty times."""


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("content", [b"}" + DOUBLED + b"K\x01s.", b"}K\x01" + DOUBLED + b"s."])
def test_a_file_of_lernomatic_s_that_makes_more_than_it_holds_is_refused_at_once(
    tmp_path: Path, is_archive: bool, content: bytes
) -> None:
    path = tmp_path / "history.pt"
    if is_archive:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("history/data.pkl", b"\x80\x02" + content)
            archive.writestr("history/version", "3\n")
    else:
        torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
        whole = pickle.dumps({"a": 1}, 2)
        assert whole in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(whole, b"\x80\x02" + content))
    began = time.process_time()
    with pytest.raises(CheckpointError, match="far more values than it holds"):
        read_file(path)
    assert time.process_time() - began < 5


def test_a_file_of_lernomatic_s_in_torch_s_earlier_form_is_read(tmp_path: Path) -> None:
    shared = [1.0, 2.0]
    torch.save(
        {"a": shared, "b": shared, "c": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False
    )
    found = read_file(tmp_path / "old.pt")
    assert (found["a"], found["b"]) == (shared, shared)
    assert torch.equal(found["c"], torch.ones(2))

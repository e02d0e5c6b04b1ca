"""A run's folder that somebody else made: training, resuming and pushing touch nothing outside of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint import Checkpointer, CheckpointStore, RunLock, load_round, write_round
from hezar_train.errors import CheckpointError, ConfigError
from hezar_train.hub.pushed_files import SavedRun, stage
from hezar_train.run_folder import RunFolderError, open_file, plain_path, read_file, write_anew
from hezar_train.run_layout import RunLayout, refuse_dirs_outside
from hezar_train.trainer.report_samples import SampleLooks
from hezar_train.trainer.run_files import RunFolder
from tests.security.hostile import edit_state, make_trainer, newest, sealed


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """A folder of the user's that no run has anything to do with."""
    folder = tmp_path / "treasure"
    (folder / "2019").mkdir(parents=True)
    (folder / "2019" / "photo.jpg").write_text("the only copy")
    (folder / "00000004").mkdir()
    (folder / "00000004" / "notes.txt").write_text("mine")
    (folder / ".tmp-of-mine-1").mkdir()
    (folder / ".tmp-of-mine-1" / "draft.txt").write_text("mine")
    (folder / "thesis.txt").write_text("line one\nline two\n")
    (folder / "00000099.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def resume(run: Path, **settings: Any) -> None:
    make_trainer(run, **{"num_epochs": 3, "accept_changes": True, "resume_from_checkpoint": True, **settings}).train()


def at_step_8(run: Path) -> Path:
    """Let the run have something left to do, so that a resume writes."""
    shutil.rmtree(newest(run))
    return newest(run)


@pytest.mark.parametrize("name", ["../treasure/thesis.txt", "{treasure}/thesis.txt", "logs/../../treasure/thesis.txt"])
def test_a_checkpoint_cuts_no_file_outside_of_the_run(run: Path, treasure: Path, name: str) -> None:
    before = content(treasure)
    named = name.format(treasure=treasure)
    edit_state(at_step_8(run), lambda sections: sections["state"].update(files={named: 3}))
    resume(run)
    assert content(treasure) == before


@pytest.mark.parametrize("name", ["train_config.yaml", "checkpoints/00000004/trainer_state.json", "best.json"])
def test_a_checkpoint_cuts_no_file_of_the_run_but_its_logs(run: Path, name: str) -> None:
    (run / "best.json").write_text("{}\n{}\n")
    before = (run / name).read_bytes()
    edit_state(at_step_8(run), lambda sections: sections["state"].update(files={name: 1}))
    resume(run)
    assert not (run / f"{name}.dropped").exists() or name == "best.json"
    if name.startswith("checkpoints"):
        assert (run / name).read_bytes() == before


def test_logs_do_not_go_to_a_folder_that_a_checkpoint_names_outside(run: Path, treasure: Path) -> None:
    before = content(treasure)
    edit_state(at_step_8(run), lambda sections: sections["state"].update(logs_dir="../treasure"))
    resume(run)
    assert content(treasure) == before


@pytest.mark.parametrize("logs_dir", ["logs", "own/logs"])
def test_logs_do_not_go_through_a_link_that_a_checkpoint_names(run: Path, treasure: Path, logs_dir: str) -> None:
    before = content(treasure)
    (run / "elsewhere").symlink_to(treasure)
    edit_state(at_step_8(run), lambda sections: sections["state"].update(logs_dir="elsewhere"))
    resume(run, logs_dir=logs_dir)
    assert content(treasure) == before


def test_a_file_behind_a_link_that_a_checkpoint_names_is_not_cut(run: Path, treasure: Path) -> None:
    (treasure / "2019" / "all.json").write_text("line one\nline two\n")
    before = content(treasure)
    (run / "elsewhere").symlink_to(treasure)
    edit_state(at_step_8(run), lambda sections: sections["state"].update(files={"elsewhere/2019/all.json": 0}))
    resume(run)
    assert content(treasure) == before


def test_a_new_folder_of_logs_is_no_link_that_waited_for_its_moment(
    run: Path, treasure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hezar_train.run_layout.time.strftime", lambda _: "now")
    layout = RunLayout(run, logs_dir=".")
    layout.new_logs().symlink_to(treasure)
    with pytest.raises(RunFolderError, match="is a link"):
        layout.new_logs()


@pytest.mark.parametrize("name", ["exports/00000012", "exports/00000012/weights.txt"])
def test_what_a_user_s_own_save_writes_does_not_go_through_a_link(run: Path, treasure: Path, name: str) -> None:
    before = content(treasure)
    at_step_8(run)
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(treasure / "thesis.txt" if "." in name else treasure)
    trainer = make_trainer(run, trainer_class=_WithOwnSave, resume_from_checkpoint=True)
    with pytest.raises(RunFolderError, match="is a link"):
        trainer.train()
    assert content(treasure) == before


class _WithOwnSave(Trainer):
    def save(self, path: str, **_: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        Path(path, "weights.txt").write_text("weights")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "/".join(["x" * 200] * 30)])
@pytest.mark.parametrize("where", ["logs_dir", "files"])
def test_a_checkpoint_that_names_what_no_file_can_be_called_is_passed_over(run: Path, where: str, name: str) -> None:
    value = f"logs/{name}" if where == "logs_dir" else {f"logs/{name}.json": 0}
    edit_state(newest(run), lambda sections: sections["state"].update({where: value}))
    trainer = make_trainer(run, resume_from_checkpoint=True)
    assert trainer.state.global_step == 8


@pytest.mark.parametrize(
    "name",
    [
        *(
            "lock",
            "evaluations",
            "checkpoints",
            "logs",
            "previous",
            ".hub",
            "ledger.jsonl.dropped",
            "train_config.yaml",
        ),
        *("checkpoints/00000004", "checkpoints/.tmp-00000012-1-1", "evaluations/00000099.json"),
    ],
)
def test_a_run_with_a_link_inside_is_refused_and_the_target_is_as_it_was(run: Path, treasure: Path, name: str) -> None:
    before = content(treasure)
    link = run / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(treasure / "thesis.txt" if link.suffix or name == "lock" else treasure)
    with pytest.raises(RunFolderError, match="is a link"):
        resume(run)
    assert content(treasure) == before


def test_temporary_names_and_logs_are_not_written_through_links(run: Path, treasure: Path) -> None:
    (logs,) = (run / "logs").iterdir()
    at_step_8(run)
    for name in (".training_logs.csv.tmp", "metrics.json.dropped"):
        (logs / name).symlink_to(treasure / "thesis.txt")
    before = content(treasure)
    with pytest.raises(RunFolderError, match="is a link"):
        resume(run)
    assert content(treasure) == before


IN_THE_LOGS = ("metrics.json", "metrics.json.dropped", "training_logs.csv")


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.jsonl.dropped", *IN_THE_LOGS])
def test_a_file_of_a_run_that_has_a_second_name_elsewhere_is_not_written_to(
    run: Path, treasure: Path, name: str
) -> None:
    (logs,) = (run / "logs").iterdir()
    at_step_8(run)
    path = (logs if name in IN_THE_LOGS else run) / name
    path.unlink(missing_ok=True)
    path.hardlink_to(treasure / "thesis.txt")
    before = content(treasure)
    with pytest.raises(RunFolderError, match="second name"):
        resume(run)
    assert content(treasure) == before


def test_a_lock_with_a_second_name_is_taken_and_not_written_to(run: Path, treasure: Path) -> None:
    at_step_8(run)
    (run / "lock").unlink()
    (run / "lock").hardlink_to(treasure / "thesis.txt")
    before = content(treasure)
    resume(run)
    assert content(treasure) == before


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_pictures_take_the_place_of_a_link(tmp_path: Path, treasure: Path, link: Callable[..., None]) -> None:
    before = content(treasure)
    for name in ("sample.png", "lr_finder.png"):
        link(treasure / "thesis.txt", tmp_path / name)
    write_anew(tmp_path / "sample.png", b"pixels")
    make_trainer(tmp_path / "run").find_lr(num_steps=4).plot(tmp_path / "lr_finder.png")
    assert content(treasure) == before
    assert (tmp_path / "sample.png").read_bytes() == b"pixels"
    assert (tmp_path / "lr_finder.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_of_samples_take_the_place_of_a_link(tmp_path: Path, treasure: Path) -> None:
    before = content(treasure)
    os.link(treasure / "thesis.txt", tmp_path / "0.png")
    looks = SampleLooks(tmp_path, tmp_path, 0, None)
    data = [{"pixel_values": torch.zeros(3, 8, 8)}]
    assert looks.added([{"sample": 0}], data, "") == [{"sample": 0, "image": "0.png"}]
    assert content(treasure) == before


def test_what_a_user_s_own_save_writes_goes_to_no_file_with_a_second_name(run: Path, treasure: Path) -> None:
    before = content(treasure)
    at_step_8(run)
    (run / "exports" / "00000012").mkdir(parents=True)
    (run / "exports" / "00000012" / "weights.txt").hardlink_to(treasure / "thesis.txt")
    with pytest.raises(RunFolderError, match="second name"):
        make_trainer(run, trainer_class=_WithOwnSave, resume_from_checkpoint=True).train()
    assert content(treasure) == before


@pytest.mark.parametrize("checkpoints", ["checkpoints", ".", "checkpoints/..", "logs", "evaluations"])
@pytest.mark.parametrize("place", ["evaluations/00000099.json", "logs/{logs}/more.json", "best.json"])
def test_a_push_sends_no_record_that_has_a_second_name(run: Path, treasure: Path, place: str, checkpoints: str) -> None:
    (logs,) = (run / "logs").iterdir()
    config = run / "train_config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "checkpoints_dir": checkpoints}))
    if checkpoints != "checkpoints":  # where a config says that the checkpoints are, does not make them of its records
        shutil.copytree(newest(run), run / checkpoints / newest(run).name)
    path = run / place.format(logs=logs.name)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.hardlink_to(treasure / "thesis.txt")
    with pytest.raises(RunFolderError, match="second name"):
        stage(SavedRun(run), 12, "every_save")


def test_links_on_the_way_to_a_run_are_followed(run: Path, tmp_path: Path) -> None:
    at_step_8(run)
    (tmp_path / "latest").symlink_to(run)
    resume(tmp_path / "latest")
    assert newest(run).name == "00000018"


def test_a_lock_that_is_a_link_is_neither_emptied_nor_taken(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(RunFolderError, match="is a link"), RunLock(tmp_path / "lock"):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_retention_deletes_nothing_that_has_no_manifest_of_ours(run: Path, treasure: Path) -> None:
    before = content(treasure)
    store = CheckpointStore(treasure)
    assert store.clean() == []
    assert store.prune(keep=1) == []
    assert content(treasure) == before
    for name in ("00000004", "2019", ".tmp-of-mine-1"):
        shutil.copytree(
            treasure / name, run / "checkpoints" / f"{name}1" if name != "00000004" else run / "checkpoints/3"
        )
    mine = content(run / "checkpoints" / "3")
    own = CheckpointStore(run / "checkpoints")
    own.clean()
    assert own.prune(keep=1, protect={20191}) == [4, 6, 8, 12]
    assert content(run / "checkpoints" / "3") == mine
    assert (run / "checkpoints" / ".tmp-of-mine-11").exists()


def test_of_old_evaluations_nothing_but_pictures_is_deleted_and_nothing_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_text("the only copy")
    old = tmp_path / "run" / "evaluations" / "00000004"
    old.mkdir(parents=True)
    (old / "sample.png").write_text("a picture")
    (old / "notes.txt").write_text("mine")
    (old.parent / "00000005").symlink_to(tmp_path / "mine")
    (old.parent / "00000008").mkdir()
    (old.parent / "00000008" / "sample.png").write_text("of now")
    RunFolder(tmp_path / "run").drop_pictures_but_of({8})
    assert content(old) == {"notes.txt": "mine"}
    assert content(tmp_path / "mine") == {"photo.png": "the only copy"}
    assert content(old.parent / "00000008") == {"sample.png": "of now"}


@pytest.mark.parametrize("name", ["checkpoints_dir", "logs_dir"])
def test_two_runs_with_one_folder_outside_each_have_their_own_in_it(tmp_path: Path, name: str) -> None:
    for run in ("one", "two", "one"):  # the third starts the first afresh
        make_trainer(tmp_path / run, **{name: "../shared"}).train()
    layouts = {run: RunLayout.of(TrainerConfig.load(tmp_path / run)) for run in ("one", "two")}
    folders = [layout.all_logs if name == "logs_dir" else layout.checkpoints for layout in layouts.values()]
    assert len({folder.resolve() for folder in folders}) == 2
    assert all(any(folder.iterdir()) for folder in folders)
    assert len(list((tmp_path / "shared").iterdir())) == 3  # the earlier run's is kept beside
    assert not list(tmp_path.glob("*/previous/shared"))


@pytest.mark.parametrize("name", ["checkpoints_dir", "logs_dir"])
def test_a_run_with_a_folder_outside_is_resumed_and_told_of(tmp_path: Path, name: str) -> None:
    given = {name: str(tmp_path / "shared")}
    make_trainer(tmp_path / "run", **given).train()
    make_trainer(tmp_path / "run", **given, num_epochs=3, accept_changes=True, resume_from_checkpoint=True).train()
    layout = (
        RunLayout.at(tmp_path / "run") if name == "logs_dir" else RunLayout.of(TrainerConfig.load(tmp_path / "run"))
    )
    steps = [json.loads(line)["step"] for path in layout.log_files("metrics.json") for line in path.open()]
    assert steps == list(range(1, 19))
    assert max(layout.checkpoint_folders()) == 18


def test_a_config_from_a_run_sends_nothing_out_of_it_unless_the_user_says_so(run: Path, treasure: Path) -> None:
    with pytest.raises(ConfigError, match="leads out of"):
        refuse_dirs_outside(run, {"logs_dir": str(treasure)})
    refuse_dirs_outside(run, {"logs_dir": str(treasure)}, given=[f"logs_dir={treasure}"])
    RunLayout(run, logs_dir=treasure).all_logs.mkdir()  # as a run at this path has done before
    refuse_dirs_outside(run, {"logs_dir": str(treasure)})


@pytest.mark.parametrize(
    "place",
    ["evaluations/00000099.json", "logs/{logs}/more.json", "checkpoints/{step}/preprocessor/x.json", "best.json"],
)
def test_a_push_sends_nothing_that_a_link_leads_to(run: Path, treasure: Path, place: str) -> None:
    (logs,) = (run / "logs").iterdir()
    path = run / place.format(logs=logs.name, step=newest(run).name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(treasure / "thesis.txt")
    with pytest.raises(RunFolderError, match="is a link"):
        stage(SavedRun(run), 12, "every_save")


def test_a_push_sends_no_logs_of_a_folder_that_a_config_names_outside(run: Path, treasure: Path) -> None:
    config = run / "train_config.yaml"
    for path in (config, *run.glob("checkpoints/*/train_config.yaml")):
        path.write_text(config.read_text().replace("logs_dir: logs", f"logs_dir: {treasure}"))
    staged = stage(SavedRun(run), 12, "end", verified=True)
    assert not any("thesis" in name or "photo" in name or "notes" in name for name in staged.files)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", "\ud800"])
def test_a_name_that_leads_out_is_no_path_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunFolderError):
        plain_path(tmp_path, name)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
        with pytest.raises(RunFolderError, match="FIFO"):
            open_file(tmp_path / "fifo", flags)
    (tmp_path / "large").write_bytes(bytes(11))
    with pytest.raises(RunFolderError, match="more than"):
        read_file(tmp_path / "large", 10)


def test_a_checkpoint_with_a_link_inside_does_not_verify(run: Path, warnings_of: Callable[[], str]) -> None:
    weights = newest(run) / "model.safetensors"
    weights.rename(run / "elsewhere")
    weights.symlink_to(run / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        CheckpointStore(run / "checkpoints").open(newest(run))


@pytest.mark.parametrize("tag", ["../treasure", "/etc", "..", ".", "a/b", "", "\x00"])
def test_a_tag_names_a_checkpoint_beside_it_and_nothing_else(tmp_path: Path, treasure: Path, tag: str) -> None:
    (tmp_path / ".replaced-treasure").mkdir()
    keeper = Checkpointer(torch.nn.Linear(2, 1), tmp_path / "kept")
    keeper.save("one")
    (tmp_path / "kept" / "last_checkpoint").write_text(tag)
    with pytest.raises(CheckpointError, match="plain folder name"):
        keeper.get_checkpoint_file()


@pytest.mark.parametrize("name", ["lock", "ledger.jsonl", "nowhere/deep"])
def test_logs_go_on_in_folders_of_logs_only(run: Path, name: str) -> None:
    assert RunLayout(run).logs(name).parent == run / "logs"


@pytest.mark.parametrize("note", [b"{}", b"[", b"[" * 5000, b'{"cur_round": "1", "model": {}}', b"\xff"])
def test_a_round_s_file_of_nonsense_is_refused(tmp_path: Path, note: bytes) -> None:
    tensors = {"hezar_train.note": torch.tensor(list(note), dtype=torch.uint8), "weight": torch.ones(1, 2)}
    write_round(tmp_path / "round.safetensors", tensors)
    with pytest.raises(CheckpointError):
        load_round(tmp_path / "round.safetensors", torch.nn.Linear(2, 1, bias=False))


def test_a_manifest_s_names_hold_nothing_that_a_terminal_obeys(run: Path) -> None:
    (newest(run) / "a\x1b[2J").write_text("x")
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(run / "checkpoints").open(sealed(newest(run)))
    assert "\x1b" not in str(caught.value)

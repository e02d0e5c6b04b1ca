"""Small files that are made to hang, to crash or to mislead: every reader answers in time, with an error of ours."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import hezar_train
from hezar_train.checkpoint import CheckpointStore
from hezar_train.checkpoint.format import read_tensors
from hezar_train.checkpoint.manifest import Manifest, read_manifest
from hezar_train.cli import root
from hezar_train.cli.runs import summarize
from hezar_train.cli.verify import audit_run
from hezar_train.config import TrainerConfig, read_mapping
from hezar_train.config.files import load_json, parse_yaml, to_plain
from hezar_train.data import Lengths
from hezar_train.errors import CheckpointError, ConfigError, DataError
from hezar_train.events import CSVWriter, EventStorage, Ledger, keep_until, read_rows
from hezar_train.hub.pushed_files import SavedRun, stage
from hezar_train.recipes import load_recipe, run_config
from hezar_train.recipes.recipe import hash_of
from hezar_train.report import write_report
from hezar_train.report.read import read_run, saved_checkpoints, starts_of, time_split
from hezar_train.run_folder import RunFolderError
from hezar_train.state import TrainerState
from tests.security.hostile import edit_state, make_trainer, newest, sealed

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


WAITS = 12  # times as many seconds as of CPU time: the machine may be busy


@contextmanager
def within_seconds(most: float = 5.0) -> Iterator[None]:
    """Fail after so many seconds of CPU time, or a minute of waiting, also where the body would never end."""

    def fail(*_: object) -> None:
        raise AssertionError(f"this takes more than {most} seconds, or waits for something")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, most), signal.SIGALRM: (signal.ITIMER_REAL, most * WAITS)}
    handlers = {number: signal.signal(number, fail) for number in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(root, [str(one) for one in arguments], prog_name="hezar-train")


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: &a {<<: [*a]}",
        "a: &a [*a]",
        "base: &b {x: 1}\n"
        + "".join(f"m{n}: &m{n} {{<<: [{', '.join(['*b'] * 9)}], k{n}: 1}}\n" for n in range(20_000)),
        "a: " + "[" * 5000,
        "a: " + ":".join(["1"] * 100_000),
        "a: " + "9" * 5000,
        "a: !!int x",
        "a: !!bool x",
        "a: !!timestamp x",
        "a: !!float x",
        "a: !!python/object/apply:os.system [ls]",
        "? [a]\n: 1",
        "x: [" + "a," * 400_000 + "]",
        "#" * 900_000,
    ],
    ids=[
        "aliases",
        "merges itself",
        "holds itself",
        "merges",
        "depth",
        "base 60",
        "digits",
        *"ibtfp",
        "key",
        "long",
        "note",
    ],
)
def test_yaml_is_read_or_refused_in_time(text: str) -> None:
    with within_seconds(15.0):  # the longest takes 2 to 5, by the machine; what is not linear takes minutes
        try:
            to_plain(parse_yaml(text, Path("train_config.yaml")))
        except ConfigError:
            return


def test_one_long_text_is_not_written_a_hundred_thousand_times() -> None:
    text = f"note: &a {'x' * 500_000}\ngeneration_kwargs: {{words: [{'*a,' * 90_000}]}}\n"
    with pytest.raises(ConfigError, match="aliases stand for more than"):
        parse_yaml(text, Path("train_config.yaml"))
    assert parse_yaml(f"note: {'x' * 900_000}", Path("a.yaml"))["note"]


def test_yaml_of_megabytes_is_not_begun() -> None:
    with within_seconds(2), pytest.raises(ConfigError, match="at most 1,048,576 are read"):
        parse_yaml("# a note\n" * (4 << 20), Path("train_config.yaml"))


@pytest.mark.parametrize(
    "number", ["9" * 500, ":".join(["1"] * 300), "0." + "1" * 500], ids=["plain", "base 60", "float"]
)
def test_a_number_of_hundreds_of_digits_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match="more than 400 digits"):
        parse_yaml(f"a: {number}", Path("train_config.yaml"))


def test_json_of_millions_of_values_is_not_begun() -> None:
    with pytest.raises(ValueError, match="more than 4,000,000 values"):
        load_json(b"[" + b"[]," * 5_000_000)


def test_honest_anchors_and_merges_are_read() -> None:
    text = "base: &base {lr: 0.1, betas: [0.9, 0.99]}\nfast: {<<: *base, lr: 1.0}\nsame: *base\n"
    found = parse_yaml(text, Path("a.yaml"))
    assert found["fast"] == {"lr": 1.0, "betas": [0.9, 0.99]}
    assert found["same"] == {"lr": 0.1, "betas": [0.9, 0.99]}


LISTS = ("runs", "report")
REFUSING = ("verify", "audit", "config show", "config validate", "push --repo me/x", "evaluate", "resume")


@pytest.mark.parametrize("command", [*LISTS, *REFUSING])
def test_a_config_of_aliases_does_not_hang_a_command(run: Path, command: str) -> None:
    (run / "train_config.yaml").write_text(
        (run / "train_config.yaml").read_text()
        + "optimizer_kwargs:\n"
        + "".join(f"  {line}\n" for line in LAUGHS.splitlines())
    )
    with within_seconds(20):
        done = invoke(*command.split(), run)
    assert done.exit_code == (0 if command in LISTS else 2), done.output
    assert command in LISTS or "its aliases stand for more than 100,000 values" in done.stderr


YAML_PIECES = [
    "a: ",
    "&x ",
    "*x",
    "[",
    "]",
    "{",
    "}",
    "- ",
    "\n",
    "  ",
    "!!int ",
    "!!set ",
    "? ",
    "<<: ",
    "|",
    ">",
    "'",
    '"',
    "1e5",
    "%",
]


@settings(max_examples=300, deadline=5000)
@given(st.lists(st.sampled_from(YAML_PIECES) | st.text(max_size=3), max_size=30).map("".join))
def test_any_yaml_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, Path("a.yaml"))
    except ConfigError:
        return


@settings(max_examples=100, deadline=5000)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_any_file_is_a_mapping_or_refused(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_bytes(content)
    try:
        read_mapping(path)
    except ConfigError:
        return


def deep(run: Path, name: str) -> None:
    (run / name).write_text("[" * 200_000)


def fifo(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)


SPOILS: dict[str, Callable[[Path], object]] = {
    "a huge pid": lambda run: (run / "lock").write_text(json.dumps({"pid": 10**30, "host": os.uname().nodename})),
    "a pid of everybody": lambda run: (run / "lock").write_text(json.dumps({"pid": -1, "host": os.uname().nodename})),
    **{
        f"{name} is deep": lambda run, name=name: deep(run, name)
        for name in ("plan.json", "best.json", "environment.json")
    },
    **{
        f"{name} is a FIFO": lambda run, name=name: fifo(run, name)
        for name in ("lock", "plan.json", "best.json", "recipe.json", "environment.json")
    },
    "an evaluation of no step": lambda run: (
        (run / "evaluations").mkdir(exist_ok=True),
        (run / "evaluations" / "².json").write_text("{}"),
    ),
    "pictures of no step": lambda run: (run / "evaluations" / "²").mkdir(parents=True),
    "a log is a FIFO": lambda run: fifo(next((run / "logs").iterdir()), "metrics.json"),
    "a log is deep": lambda run: (
        next((run / "logs").iterdir()).joinpath("metrics.json").write_text("[" * 60_000 + "\n")
    ),
    "a best value without end": lambda run: (run / "best.json").write_text(
        '{"value": 1' + "0" * 400 + ', "metric": "m"}'
    ),
    "a time without end": lambda run: (next((run / "logs").iterdir()) / ("events.out.tfevents." + "9" * 200)).touch(),
    "a state of many values": lambda run: (newest(run) / "trainer_state.json").write_text("[" + "[]," * 5_000_000),
    "a link to itself": lambda run: (run.parent / "loop").symlink_to(run.parent),
    "links that go round": lambda run: [(run.parent / f"loop{n}").symlink_to(run.parent) for n in range(8)],
    "a folder that nobody may read": lambda run: (run.parent / "closed").mkdir(mode=0),
    "a checkpoint of no number": lambda run: (run / "checkpoints" / "²").mkdir(),
}


@pytest.fixture
def two_runs(trained: Path, tmp_path: Path) -> Path:
    for name in ("bad", "good"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    return tmp_path / "runs"


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_one_bad_run_does_not_end_the_list_of_all(two_runs: Path, spoil: Callable[[Path], object]) -> None:
    spoil(two_runs / "bad")
    with within_seconds():
        done = invoke("runs", two_runs)
    assert done.exit_code == 0, done.output
    assert any(line.startswith("good ") for line in done.stdout.splitlines())
    with within_seconds(10):
        report = read_run(two_runs / "bad")
        time_split(report, starts_of(report))
        saved_checkpoints(report.layout)


@pytest.mark.parametrize("pid", [-1, 0, True, 10**30, "1", None])
def test_a_pid_that_is_none_is_no_sign_of_life(run: Path, pid: Any) -> None:
    (run / "lock").write_text(json.dumps({"pid": pid, "host": os.uname().nodename}))
    assert summarize(run, "run").state == "finished"


def test_escape_sequences_in_names_do_not_reach_the_terminal(two_runs: Path) -> None:
    (two_runs / "bad").rename(two_runs / "bad\x1b]0;title\x07")
    (two_runs / "good" / "best.json").write_text(json.dumps({"metric": "acc\x1b[2J", "value": 1.0}))
    done = invoke("runs", two_runs)
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "\x07" not in done.output


def test_a_state_names_only_what_a_state_has() -> None:
    good = TrainerState(best_metric_value=0.5, files={"a": 1}).to_dict()
    TrainerState.refuse_misfits(good)
    odd: dict[str, Any] = {"epoch": "1", "position": -1, "global_step": True, "files": {"a": "b"}, "logs_dir": 3}
    odd |= {"best_metric_value": [], "epoch_finished": 1, "hooks": [], "loss_tracker_sum": None}
    for name, value in odd.items():
        with pytest.raises(CheckpointError, match=name):
            TrainerState.refuse_misfits({**good, name: value})


Change = Callable[[dict[str, Any]], None]


def put(section: str, name: str, value: Any) -> Change:
    return lambda sections: sections[section].update({name: value})


NONSENSE = [None, 3, "text", [], {}, -1, True, {"a": 1}, [1, 2], {"$tuple": []}]


def in_plan(name: str, value: Any) -> Change:
    return lambda sections: sections["extra"]["plan"].update({name: value})


def section(name: str, value: Any) -> Change:
    return lambda sections: sections.update({name: value})


COUNTERS = ("global_step", "position", "files", "logs_dir", "epoch_finished")
PARTS = ("plan", "schedule", "hooks", "measured", "facts")
MEASURED = (
    {"a": "x"},
    {"a": {"$tuple": ["x", 1, None]}},
    {"a": {"$tuple": [1.0, -1, None]}},
    {"a": {"$tuple": [1.0, 1, 5]}},
)
HOSTILE: list[Change] = [
    *[put("state", name, value) for name in COUNTERS for value in (-1, [1], {"a": "b"})],
    *[put("extra", name, value) for name in PARTS for value in (3, "text", [1])],
    *[put("extra", "plan", {"total_steps": value}) for value in (1, "x")],
    *[put("extra", "measured", value) for value in MEASURED],
    *[in_plan("window_samples", value) for value in (0, "x", None, -3)],
    section("optimizer", {"$tensor": "gone"}),
    *[section("model", value) for value in (None, [], {}, {"aliases": {"a": "b"}, "versions": {}, "extra": {}})],
    lambda sections: sections.pop("extra"),
    lambda sections: sections["extra"].pop("plan"),
    put("model", "versions", {"": "x"}),
    put("model", "extra", {"$tuple": []}),
]


@pytest.mark.parametrize("change", HOSTILE, ids=range(len(HOSTILE)))
def test_of_a_sealed_checkpoint_that_says_nonsense_the_one_before_is_taken(
    run: Path, change: Change, warnings_of: Callable[[], str]
) -> None:
    edit_state(newest(run), change)
    assert make_trainer(run, resume_from_checkpoint=True).state.global_step == 8
    assert "00000012 is damaged and was passed over" in warnings_of()


@pytest.mark.parametrize("value", [3, []], ids=str)
def test_a_section_that_is_no_state_of_an_optimizer_is_refused(run: Path, value: Any) -> None:
    edit_state(newest(run), section("optimizer", value))
    with pytest.raises(CheckpointError, match="does not fit this optimizer"):
        make_trainer(run, resume_from_checkpoint=True)


@pytest.mark.parametrize("value", NONSENSE, ids=map(str, range(len(NONSENSE))))
@pytest.mark.parametrize("name", ["state", "param_groups"])
def test_an_optimizer_of_nonsense_is_refused(run: Path, name: str, value: Any) -> None:
    edit_state(newest(run), put("optimizer", name, value))
    if name == "state" and value in ({}, {"a": 1}):  # of no parameter there is: those that there are begin anew
        assert make_trainer(run, resume_from_checkpoint=True).state.global_step == 12
        return
    with pytest.raises(CheckpointError):
        make_trainer(run, resume_from_checkpoint=True)


def test_a_learning_rate_of_text_is_refused_before_the_first_step(run: Path) -> None:
    edit_state(newest(run), lambda sections: sections["optimizer"]["param_groups"][0].update(lr="fast"))
    with pytest.raises(CheckpointError, match="lr='fast'"):
        make_trainer(run, resume_from_checkpoint=True)


def test_a_config_that_is_none_passes_the_checkpoint_over(run: Path) -> None:
    (newest(run) / "train_config.yaml").write_text(LAUGHS + "- x")
    sealed(newest(run))
    assert make_trainer(run, resume_from_checkpoint=True).state.global_step == 8


KEYS = ["format", "step", "files", "size", "sha256", "a", "../a", "a\x00b", "\ud800"]
MANIFESTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=5000)
@given(MANIFESTS)
def test_any_manifest_is_one_or_refused(tmp_path_factory: pytest.TempPathFactory, content: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    body = {"format": 1, **content} if isinstance(content, dict) else content
    if isinstance(body, dict):
        body.pop("sha256", None)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body = {**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(body))
    try:
        assert isinstance(read_manifest(folder), Manifest)
    except CheckpointError:
        return


@pytest.mark.parametrize("line", ["{}", "[]", "1", '{"update": "x", "epoch": 1, "first": 0, "count": 1}', "[" * 3000,
                                  '{"update": -1, "epoch": 1, "first": 0, "count": 1}', "x" * 9_000_000,
                                  "\x00"])  # fmt: skip
def test_a_line_that_is_none_of_a_ledger_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "ledger.jsonl").write_text(line + "\n")
    with within_seconds(), pytest.raises(DataError):
        list(Ledger.read(tmp_path / "ledger.jsonl"))


def test_a_ledger_without_an_end_of_line_costs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").touch()
    os.truncate(tmp_path / "ledger.jsonl", 1 << 28)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="line 1 is not a line of a ledger"):
            list(Ledger.read(tmp_path / "ledger.jsonl"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=150, deadline=5000)
@given(st.binary(max_size=120))
def test_any_ledger_is_one_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "ledger.jsonl"
    path.write_bytes(content)
    try:
        list(Ledger.read(path))
    except DataError:
        return


FILES = ["plan.json", "best.json", "environment.json", "recipe.json", "train_config.yaml", "logs/x/metrics.json",
         "evaluations/00000001.json", "lock"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["step", "time", "epoch", "metrics", "starts", "end", "seconds", "tables", "rows", "columns",
                         "values", "pid",
                         "name", "worst_samples", "examples", "total_steps", "value", "metric", "how", "host"]), inner,
        max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=100, deadline=5000)
@given(st.dictionaries(st.sampled_from(FILES), VALUES, max_size=5))
def test_any_files_of_a_run_can_be_told_of(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any]) -> None:
    run = tmp_path_factory.mktemp("fuzz") / "run"
    for name, value in {"train_config.yaml": {}, **files}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(json.dumps(value) + "\n")
    done = invoke("runs", run.parent)
    assert done.exit_code == 0, done.output
    found = read_run(run)
    time_split(found, starts_of(found))
    assert isinstance(found.is_finished, bool)
    assert isinstance(found.is_running, bool)
    shutil.rmtree(run)


def test_a_store_with_files_that_are_no_files_is_told_of(run: Path) -> None:
    (newest(run) / "model.safetensors").unlink()
    os.mkfifo(newest(run) / "model.safetensors")
    with within_seconds():
        found, _ = CheckpointStore(run / "checkpoints").newest()
    assert found is not None
    assert found.step == 8


def _as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILED_STATES: dict[str, Callable[[Path], object]] = {
    "a FIFO": _as_fifo,
    "deep": lambda path: path.write_text("[" * 200_000),
    "a list": lambda path: path.write_text("[]"),
    "an epoch of text": lambda path: path.write_text('{"state": {"epoch": "x", "position": 3}}'),
    "a state of text": lambda path: path.write_text('{"state": "x"}'),
    "no JSON": lambda path: path.write_bytes(b"\0" * 100),
}


@pytest.mark.parametrize("spoil", SPOILED_STATES.values(), ids=SPOILED_STATES)
def test_an_audit_neither_waits_for_nor_believes_a_state_that_is_none(
    run: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(newest(run) / "trainer_state.json")
    with within_seconds(), pytest.raises(CheckpointError, match="cannot be read"):
        audit_run(run_config(run))


def test_an_audit_of_a_state_that_is_gigabytes_is_refused_in_time(run: Path) -> None:
    os.truncate(newest(run) / "trainer_state.json", 1 << 40)
    with pytest.raises(CheckpointError, match="has more than"):
        audit_run(run_config(run))


def make_holes(path: Path, size: int) -> None:
    """Make a file large that has nothing on the disk."""
    with path.open("ab") as file:
        file.truncate(size)


@pytest.mark.parametrize("known", [0, 40, 10**12])
def test_a_log_with_holes_is_not_copied_to_set_it_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    monkeypatch.setattr("hezar_train.events.writers._MOST_DROPPED_BYTES", 1 << 20)
    log = tmp_path / "metrics.json"
    log.write_text("a line\n" * 5)
    make_holes(log, 3 << 20)
    with pytest.raises(RunFolderError, match="would have to be set aside"):
        keep_until(log, known)
    assert list(tmp_path.iterdir()) == [log]
    log.write_bytes(b"a line\n" * 5 + bytes(1 << 19))
    assert keep_until(log, 1 << 30) == 35 + (1 << 19) - (1 << 30)
    assert log.stat().st_size == 35


def test_a_line_without_an_end_costs_no_memory(tmp_path: Path) -> None:
    for name, read in {"metrics.json": read_rows, "table.csv": CSVWriter}.items():
        (tmp_path / name).write_text("")
        make_holes(tmp_path / name, 1 << 30)
        with (tmp_path / name).open("ab") as file:
            file.write(b"\n")
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=r"is not a logged row|is no table"):
                read(tmp_path / name)
            assert tracemalloc.get_traced_memory()[1] < 200 << 20
        finally:
            tracemalloc.stop()


def test_records_with_holes_are_not_copied_for_a_push(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hezar_train.hub.pushed_files.free_bytes", lambda _: 1 << 20)
    make_holes(run / "ledger.jsonl", 1 << 21)
    with pytest.raises(CheckpointError, match="the records of the run have"):
        stage(SavedRun(run), 12, "end")
    assert not list((run / ".hub").iterdir())


@pytest.mark.parametrize("name", ["logs_dir", "checkpoints_dir"])
@pytest.mark.parametrize("value", ["a" * 5000, "a/" * 3000, "\0"])
def test_a_page_is_made_of_a_run_whose_config_names_no_place(run: Path, name: str, value: str) -> None:
    config = read_mapping(run / "train_config.yaml")
    (run / "train_config.yaml").write_text(json.dumps({**config, name: value}))
    assert write_report([run]).is_file()


@pytest.mark.parametrize("count", [3, 10**11, 1 << 62])
def test_an_audit_takes_no_memory_for_lengths_that_are_not_there(run: Path, count: int) -> None:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "num_samples": count}))
    Lengths([1, 2, 3, 4]).save(run / "lengths.bin")
    config = replace(run_config(run), group_by_length=True)
    if count == 3:
        with pytest.raises(CheckpointError, match="does not hold the lengths of"):
            audit_run(config)
    else:
        assert not any("shuffle" in words for words in audit_run(config).proven)


@pytest.mark.parametrize("grouped", [False, True])
def test_an_audit_of_many_short_epochs_ends_in_time(run: Path, grouped: bool) -> None:
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "num_samples": 1, "num_epochs": 30_000}))
    Lengths([1]).save(run / "lengths.bin")
    lines = ({"update": n, "epoch": n, "first": 0, "count": 1, "updates": 1} for n in range(1, 30_001))
    (run / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    began = time.process_time()
    found = audit_run(replace(run_config(run), group_by_length=grouped))
    assert time.process_time() - began < 6
    assert any("5000 of 30000 orders computed" in words for words in found.proven)


def test_an_audit_reads_no_lengths_of_gigabytes_that_are_holes(run: Path) -> None:
    count = 10**9
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "num_samples": count}))
    header = {"format": "hezar_train lengths 1", "count": count, "digest": "", "fingerprint": ""}
    (run / "lengths.bin").write_bytes(json.dumps(header).encode() + b"\n")
    make_holes(run / "lengths.bin", (run / "lengths.bin").stat().st_size + 4 * count)
    config = replace(run_config(run), group_by_length=True)
    with within_seconds(2.0):
        audit_run(config)


SOURCES = {
    "signs before signs": "def build():\n    return " + "-" * 200_000 + "1\n",
    "names in names": "def build():\n    return " + "a." * 200_000 + "b\n",
    "megabytes": "#" * (5 << 20) + "\ndef build(): ...\n",
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_recipe_whose_source_python_cannot_read_is_refused_with_a_sentence(tmp_path: Path, kind: str) -> None:
    (tmp_path / "recipe.py").write_text(SOURCES[kind])
    (tmp_path / "config.yaml").write_text("trainer: {output_dir: run}\n")
    with pytest.raises(ConfigError, match=r"nested too deeply|has more than"):
        load_recipe(tmp_path)


def test_a_recipe_waits_for_no_file_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("def build(): ...\n")
    before = hash_of(tmp_path)
    for name in ("kmsg", "self/pagemap", "self/mem", "self/environ"):
        (tmp_path / f"{Path(name).name}.txt").symlink_to(Path("/proc", name))
    with within_seconds(2.0):
        assert hash_of(tmp_path) != before


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1])
def test_a_tensor_of_no_values_with_a_size_of_64_bits_is_refused(tmp_path: Path, size: int) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": [0, size], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        read_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize("kind", ["a FIFO", "a link that goes round", "gigabytes", "a picture"])
def test_a_page_does_not_wait_for_a_picture_that_is_none(run: Path, kind: str) -> None:
    picture = run / "evaluations" / "one.png"
    picture.parent.mkdir(exist_ok=True)
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    if kind == "gigabytes":
        os.truncate(picture, 1 << 40)
    elif kind != "a picture":
        picture.unlink()
        if kind == "a FIFO":
            os.mkfifo(picture)
        else:
            picture.symlink_to("one.png")
    worst = {"": [{"sample": 1, "loss": 1.0, "image": "evaluations/one.png", "target": "a", "prediction": "b"}]}
    (run / "evaluations" / "00000012.json").write_text(
        json.dumps({"step": 12, "epoch": 2, "metrics": {}, "worst_samples": worst, "examples": worst})
    )
    with within_seconds():
        page = write_report([run]).read_text()
    assert ('alt="sample 1"' in page) == (kind == "a picture")


def test_histories_in_a_fifo_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.json")
    with within_seconds(), pytest.raises(DataError, match="is not a file of histories"):
        EventStorage().load_history(tmp_path / "history.json")


READS = re.compile(
    r"\.read_bytes\(\)|\.read_text\(|json\.load\(|\.open\(\s*(?:newline|encoding|\"r)|(?<!def )(?<![\w.])open\("
)
READ_ELSEWHERE = {
    "run_folder.py",  # which is the one
    "recipes/recipe.py", "recipes/importing.py", "cli/recipes.py",  # recipes, which are hashed before they are run
    "recipes/open_run.py",  # inputs that a user names
    "launch/process.py", "launch/agent.py",  # a folder that was made for this command
    "runtime/accelerator.py", "runtime/group.py",  # /proc
    "report/page.py",  # the package's own
    "events/writers.py",  # a table that was just opened to write to it
    "hub/push.py", "hub/client.py",  # a card that was just downloaded, files that were staged
    "hub/fetch.py",  # a manifest that was just downloaded, and one of ours
}  # fmt: skip


def test_files_that_may_be_anybody_s_are_read_in_one_place() -> None:
    package = Path(hezar_train.__file__).parent
    modules = [path for path in package.rglob("*.py") if "compat" not in path.parts and "_recipes" not in path.parts]
    found = {path.relative_to(package).as_posix() for path in modules if READS.search(path.read_text())}
    assert found <= READ_ELSEWHERE


@pytest.mark.parametrize(
    "fields",
    [
        {"num_dataloader_workers": 5000}, {"num_threads": 100_000}, {"bootstrap_samples": 10**12},
        {"metrics": [{"name": "accuracy", "n_decimals": 10**9}]},
    ],
)  # fmt: skip
def test_a_config_asks_for_no_more_than_a_machine_has(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at most"):
        TrainerConfig.from_dict({"output_dir": "run", **fields})


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "x" * 300])
@pytest.mark.parametrize(
    "name", ["output_dir", "checkpoints_dir", "logs_dir", "init_weights_from", "resume_from_checkpoint"]
)
def test_a_config_names_places_that_can_be(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match="is no path that a file can have"):
        TrainerConfig.from_dict({"output_dir": "run", name: value})


def _of_sets(samples: Any) -> dict[str, Any]:
    return {f"set{number}": samples for number in range(3000)}


ONE_PICTURE = {"sample": 1, "loss": 1.0, "image": "evaluations/one.png", "target": "aab" * 130, "prediction": "a" * 390}
LARGE_RECORDS: dict[str, dict[str, Any]] = {
    "samples": {"worst_samples": {"": [ONE_PICTURE] * 20_000}},
    "sets of samples": {"examples": _of_sets([ONE_PICTURE])},
    "fields": {"examples": {"": [{f"{one}_{two}": 1 for two in range(2000)} for one in range(200)]}},
    "metrics of sets": {"metrics": {f"set{n % 3000}.m{n}": 1.0 for n in range(20_000)}, "tables": _of_sets([])},
}


@pytest.mark.parametrize("kind", LARGE_RECORDS)
def test_a_record_of_many_samples_makes_no_page_without_end(run: Path, kind: str) -> None:
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "evaluations" / "one.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(200_000))
    (run / "evaluations" / "00000012.json").write_text(json.dumps({"step": 12, **LARGE_RECORDS[kind]}))
    began = time.process_time()
    page = write_report([run])
    assert time.process_time() - began < 10
    assert page.stat().st_size < 60_000_000
    is_told = "holds more than a page shows" in page.read_text()
    assert is_told == (kind != "fields")


def test_logs_of_many_names_and_starts_make_a_page_in_time(run: Path) -> None:
    (logs,) = run.glob("logs/*/metrics.json")
    rows = [{"step": number, "epoch": 1, "time": 1e9 + number, f"train.m{number}": 1.0} for number in range(20_000)]
    logs.write_text("".join(json.dumps(one) + "\n" for one in rows))
    starts = [{"time": 1e9 + number} for number in range(20_000)]
    (run / "environment.json").write_text(json.dumps({"starts": starts}))
    began = time.process_time()
    page = write_report([run]).read_text()
    assert time.process_time() - began < 20
    assert "more than 5,000 names were logged: those beyond are not shown" in page

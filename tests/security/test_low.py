"""What names, data and a user's own code may not do: steer a terminal, write markup, end a command as if done."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import hezar_train.cli
from hezar_train import Trainer, TrainerConfig
from hezar_train.checkpoint import Checkpointer
from hezar_train.checkpoint.manifest import replace_file
from hezar_train.cli.main import root
from hezar_train.compat.lernomatic.keeping import write_file
from hezar_train.config.files import write_atomically
from hezar_train.errors import CheckpointError, ConfigError, HezarTrainError, printable
from hezar_train.events import CSVWriter
from hezar_train.hub.card import RunFacts, render_card
from hezar_train.hub.client import _retry_after_seconds
from hezar_train.hub.pushed_files import SavedRun
from hezar_train.launch import agent
from hezar_train.runtime.logging import make_visible
from hezar_train.terminal import Progress, print_facts
from hezar_train.trainer.predictions import PredictionFile
from tests.security.hostile import data, make_trainer, sealed

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
RECIPE = """\
import sys

import torch

from hezar_train import Recipe


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        {in_getitem}
        return torch.ones(2), torch.ones(1)


def build() -> Recipe:
    {in_build}
    return Recipe(torch.nn.Linear(2, 1), Numbers())
"""
CONFIG = "trainer: {output_dir: run, task: regression, batch_size: 4, num_epochs: 1, criterion: MSELoss}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who remembers nothing yet."""
    monkeypatch.setenv("HEZAR_TRAIN_CACHE", str(tmp_path / "cache"))


def output_of(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(root, list(arguments))
    return result.exit_code, result.output


# Terminals


def test_what_a_terminal_obeys_is_replaced_and_persian_is_not() -> None:
    persian = "می\N{ZERO WIDTH NON-JOINER}روم\N{RIGHT-TO-LEFT MARK}\tو\n"
    assert printable(persian) == persian
    assert printable("a\x1b[2Jb\r\x9bc\u202ed\udcff") == "a�[2Jb��c�d�"


def test_the_commands_print_in_one_place() -> None:
    folder = Path(hezar_train.cli.__file__).parent
    lines = [line for path in folder.glob("*.py") if path.name != "output.py" for line in path.read_text().split("\n")]
    assert not [line for line in lines if re.search(r"click\.echo\(|\bprint\(", line) and "ERASED_LINE" not in line
                and "console.print(" not in line and "_print(" not in line]  # fmt: skip


@pytest.mark.parametrize("command", ["evaluate", "resume", "verify", "audit", "report", "runs", "predict", "push"])
def test_a_folder_s_name_steers_no_terminal(command: str, tmp_path: Path) -> None:
    folder = tmp_path / f"run{ESCAPE}"
    folder.mkdir()
    (folder / "train_config.yaml").write_text('"un\\eknown": 1\noutput_dir: x\n')
    _, output = output_of(command, str(folder))
    assert output
    assert "\x1b" not in output
    assert "\x07" not in output


def test_the_command_line_s_own_errors_and_the_launcher_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = output_of("runs", "one", f"two{ESCAPE}")
    assert code == 2
    assert "two" in output
    agent._print(f"process 1 failed first: {ESCAPE}")
    output += capsys.readouterr().err
    assert "failed first" in output
    assert "\x1b" not in output
    assert "\x07" not in output


def test_a_config_that_is_shown_or_compared_steers_no_terminal(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(f'output_dir: "{name}\\e]0;x\\a"\nrun_name: "\\e[2J{name}"\n')
    for arguments in (["show", "a.yaml"], ["validate", "a.yaml"], ["diff", "a.yaml", "b.yaml"]):
        _, output = output_of("config", arguments[0], *(str(tmp_path / name) for name in arguments[1:]))
        assert "\x1b" not in output, arguments


def test_the_table_of_a_terminal_keeps_its_styles_and_loses_those_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from hezar_train.cli.options import show, table

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rows = table("name")
    rows.add_row(f"run{ESCAPE}")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    show(rows)
    shown = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "run" in shown
    assert "\x1b]" not in shown
    assert "\x1b[2J" not in shown


def test_logs_facts_and_lines_of_a_run_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.Logger("a log of its own")
    log.parent = None
    monkey = logging.getLogger().handlers[:]
    logging.getLogger().handlers.clear()
    try:
        make_visible(log)
    finally:
        logging.getLogger().handlers[:] = monkey
    log.warning("the file %s", ESCAPE)
    stream = io.StringIO()
    print_facts({f"Task{ESCAPE}": ESCAPE}, stream)
    Progress(1, 1, stream=stream).say(f"saved {ESCAPE}")
    shown = capsys.readouterr()
    assert "the file" in shown.err
    assert "\x1b" not in shown.err + stream.getvalue()


# The card


def card_of(run: Path, **start: Any) -> str:
    path = run / "environment.json"
    path.write_text(json.dumps({"starts": [{"time": 1.0, **start}]}))
    saved = SavedRun(run)
    return render_card(RunFacts(saved, 12), "me/model", {})


def test_markup_in_names_and_data_is_shown_as_it_is(run: Path) -> None:
    data = {"train": {"dataset_name": "[free](javascript:x) <img src=x onerror=y>", "size": "**1**"}}
    card = card_of(run, data=data, hardware={"cpu": "`a` | b"}, model={"class": "A` <b>x</b> `"})
    page = card.split("---", 2)[2]
    assert "<img" not in page
    assert "](javascript" not in page.replace("\\](", "")
    assert "**1**" not in page
    assert r"\[free\](javascript:x) &lt;img src=x onerror=y&gt;" in page
    assert r"\`a\` \| b" in page
    assert "`A' <b>x</b> '`" in page


def test_a_command_closes_no_block_of_code_and_ends_no_part_of_ours(run: Path) -> None:
    card = card_of(run, command="hezar-train train x\n```\n<script>\n<!-- hezar-train: end -->")
    assert "````bash\nhezar-train train x\n```\n<script>" in card
    assert card.count("hezar-train: end -->") == 2
    assert card.count("<!-- hezar-train: end -->") == 1


def test_settings_keep_their_names_on_the_card(run: Path) -> None:
    assert "| num_epochs | 2 |" in card_of(run)


# Temporary names, numbers, devices


def test_a_link_with_the_name_of_a_temporary_file_leads_nowhere(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / ".out.jsonl.tmp").symlink_to(precious)
    with PredictionFile(tmp_path / "out.jsonl") as file:
        file.add(0, "cat")
    assert precious.read_text() == "mine"
    assert "cat" in (tmp_path / "out.jsonl").read_text()


def _write_table(path: Path) -> None:
    writer = CSVWriter(path)
    writer.rebuild([])
    writer.close()


def _write_predictions(path: Path) -> None:
    with PredictionFile(path.with_suffix(".jsonl")) as file:
        file.add(0, "cat")


def _save(path: Path) -> None:
    Checkpointer(nn.Linear(2, 1), path.with_suffix("")).save("one")


WRITERS: dict[str, Callable[[Path], object]] = {
    "small files": lambda path: write_atomically(path, "{}"),
    "files of a round": lambda path: replace_file(path, [b"{}"]),
    "tables": _write_table,
    "predictions": _write_predictions,
    "checkpoints": _save,
    "files of lernomatic": lambda path: write_file(path.with_suffix(".pkl"), {"loss_iter": 3}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_is_being_written_has_a_name_that_nobody_can_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], object]
) -> None:
    drafts: list[str] = []
    for call in (os.rename, os.replace):
        monkeypatch.setattr(os, call.__name__, _noting(call, drafts))
    write(tmp_path / "file.json")
    first = [name for name in drafts if name.startswith(".")]
    write(tmp_path / "file.json")
    second = [name for name in drafts if name.startswith(".")][len(first) :]
    assert first
    assert not set(first) & set(second)


def _noting(call: Callable[..., None], drafts: list[str]) -> Callable[..., None]:
    def noted(source: Any, target: Any) -> None:
        drafts.append(Path(source).name)
        call(source, target)

    return noted


def test_a_link_with_a_guessed_name_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / "precious").write_text("mine")
    for name in (".plan.json.guessed.tmp", ".out.jsonl.guessed.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "plan.json", "{}")
    with pytest.raises(FileExistsError):
        PredictionFile(tmp_path / "out.jsonl")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_superscript_is_no_number_of_seconds() -> None:
    answer = SimpleNamespace(response=SimpleNamespace(headers={"Retry-After": "²"}))
    assert _retry_after_seconds(answer) == 0.0  # type: ignore[arg-type]


def test_a_superscript_is_no_step(run: Path) -> None:
    from hezar_train.recipes.open_run import _step_of

    with pytest.raises(ConfigError, match="there is no checkpoint '²'"):
        _step_of(TrainerConfig(str(run)), "²", [4, 8, 12], run)


@pytest.mark.parametrize("device", ["cpu:7", "mps:1"])
def test_a_device_that_no_machine_has_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="there is one"):
        TrainerConfig("x", device=device)


def test_the_first_cpu_is_the_cpu() -> None:
    assert TrainerConfig("x", device="cpu:0").device == "cpu:0"


# Ends that are none


def recipe_with(folder: Path, in_getitem: str = "pass", in_build: str = "pass") -> list[str]:
    folder.mkdir()
    (folder / "recipe.py").write_text(RECIPE.format(in_getitem=in_getitem, in_build=in_build))
    (folder / "config.yaml").write_text(CONFIG)
    return ["train", str(folder), f"output_dir={folder.parent / 'run'}"]


@pytest.mark.parametrize("call", ["sys.exit(0)", "sys.exit()", "raise SystemExit"])
@pytest.mark.parametrize("where", ["in_getitem", "in_build"])
def test_an_exit_in_a_recipe_or_a_dataset_is_no_success(where: str, call: str, tmp_path: Path) -> None:
    code, output = output_of(*recipe_with(tmp_path / "mine", **{where: call}))
    assert code in (1, 2)
    assert any(words in output for words in ("sys.exit(", "the call that ends the program"))


def test_a_run_without_such_an_exit_succeeds(tmp_path: Path) -> None:
    code, output = output_of(*recipe_with(tmp_path / "mine"))
    assert code == 0, output


# Collators


def trained_with(collate: Callable[[list[Any]], Any], folder: Path, **settings: Any) -> Trainer:
    config = TrainerConfig(str(folder), num_epochs=1, batch_size=4, criterion="MSELoss", **settings)
    trainer = Trainer(config, nn.Linear(2, 1), data(), data_collator=collate)
    trainer.train()
    return trainer


def three_of(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples[:3]]), torch.stack([y for _, y in samples[:3]])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collator_that_leaves_samples_out_is_told_and_not_audited_away(
    workers: int, tmp_path: Path, warnings_of: Callable[[], str]
) -> None:
    trained_with(three_of, tmp_path / "run", num_dataloader_workers=workers)
    assert warnings_of().count("3 rows of 4 samples") == 1
    code, output = output_of("audit", str(tmp_path / "run"))
    assert code == 0
    assert "Every sample was trained" not in output
    assert "It made 3 rows of 4 samples" in output


def test_a_whole_batch_is_not_told_of(run: Path, warnings_of: Callable[[], str]) -> None:
    make_trainer(run.parent / "another").train()
    assert "rows of" not in warnings_of()
    assert "Every sample was trained exactly once per epoch" in output_of("audit", str(run.parent / "another"))[1]


def test_every_error_is_shown_without_escapes() -> None:
    @root.command("fails_for_this_test", hidden=True)
    def fails() -> None:
        raise HezarTrainError(f"bad {ESCAPE}")

    try:
        code, output = output_of("fails_for_this_test")
    finally:
        del root.commands["fails_for_this_test"]
    assert code == 1
    assert "bad" in output
    assert "\x1b" not in output


# Optimizers


def with_average_of(checkpoint: Path, shape: tuple[int, ...]) -> None:
    path = checkpoint / "optimizer.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({**tensors, "state.0.exp_avg": torch.zeros(shape)}, path, {"format": "pt", "complex128": "[]"})
    sealed(checkpoint)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1), ()])
def test_an_average_of_another_size_than_its_parameter_is_refused(run: Path, shape: tuple[int, ...]) -> None:
    for checkpoint in (run / "checkpoints").glob("[0-9]*"):
        with_average_of(checkpoint, shape)
    with pytest.raises(CheckpointError, match="exp_avg of a parameter of shape"):
        make_trainer(run, resume_from_checkpoint=True, num_epochs=3).train()


def test_an_optimizer_of_ones_own_loop_takes_no_average_of_another_size(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for kept in optimizer.state.values():
        kept["exp_avg"] = torch.zeros(1)
    checkpointer = Checkpointer(model, tmp_path, optimizer=optimizer)
    checkpointer.save("one")
    with pytest.raises(CheckpointError, match="exp_avg of a parameter of shape"):
        checkpointer.load("one")

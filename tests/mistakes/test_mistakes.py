"""What users do wrong, and what they are told: what was given, what was expected, what to do, and the exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TABLE = tomllib.loads((HERE / "mistakes.toml").read_text())["mistake"]
CALLS = tomllib.loads((HERE / "calls.toml").read_text())["call"]
NOBODY = 65534

Answer = tuple[int, str]
Ask = Callable[..., Answer]


def check(answer: Answer, code: int, words: str) -> None:
    """Hold an answer to its code and its words; it never says that nobody has thought of it."""
    given, text = answer[0], " ".join(answer[1].split())
    assert re.search(words, text), text[-600:]
    assert given == code, text[-600:]
    assert "This was not expected" not in text
    assert "Traceback" not in text


def hold_to(text: str, says: list[str]) -> None:
    """Hold a text to what it must say, in this order."""
    place, words = 0, " ".join(text.split())
    for each in says:
        assert each in words[place:], f"{each!r} is not in: {words[-900:]}"
        place = words.index(each, place)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", TABLE, ids=[f"{row['kind']}: {row['given']!r}"[:60] for row in TABLE])
def test_a_mistake_in_a_recipe_or_a_config_is_answered(
    row: dict[str, Any], ask: Ask, write_recipe: Callable[..., None]
) -> None:
    write_recipe(**row.get("parts", {}))
    answer = ask("train", "tiny", *row.get("overrides", []))
    hold_to(answer[1], row["says"])
    check(answer, row["code"], "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", CALLS, ids=[row["python"].strip()[:60] for row in CALLS])
def test_a_mistake_in_a_call_is_answered(
    row: dict[str, Any], call_names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="") as raised:  # noqa: PT011 - its class is the row's
        exec(compile(row["python"], "user.py", "exec"), call_names)
    assert type(raised.value).__name__ == row["raises"]
    hold_to("\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())]), row["says"])


def test_every_answer_is_pinned_by_more_than_its_beginning() -> None:
    assert [row["given"] for row in TABLE if len(row["says"]) < 2] == []
    assert [row["python"] for row in CALLS if len(row["says"]) < 2] == []


@pytest.mark.parametrize("value", ["[" * 2000, "{a: " * 3000, "x: [" * 1000])
def test_a_value_without_end_is_refused(value: str, ask: Ask, write_recipe: Callable[..., None]) -> None:
    write_recipe()
    answer = ask("train", "tiny", f"metrics={value}")
    check(answer, 2, "cannot be read as YAML.*nested too deeply")
    assert len(answer[1]) < 400


def test_a_label_out_of_range_names_the_samples_of_its_batch(ask: Ask, write_recipe: Callable[..., None]) -> None:
    write_recipe(get="return torch.ones(2), 7 if i == 3 else 1")
    check(
        ask("train", "tiny"), 2, r"the labels hold 7; expected 0 to 1.* of the training data\. It is about sample 3\."
    )


USES = [
    (["evaluate", "runs/tiny", "--checkpoint", "²"], 2, r"there is no checkpoint '²' in .*There are: best, last, 4"),
    (["evaluate", "runs/tiny", "--checkpoint", "99"], 2, r"there is no checkpoint '99' .*There are: best, last, 4"),
    (["evaluate", "runs/tiny", "--checkpoint", "-1"], 2, r"there is no checkpoint '-1' .*There are: best, last, 4"),
    (["evaluate", "runs/tiny", "--split", "tset"], 2, r"there is no split 'tset'\. This recipe has: "),
    (["evaluate", "runs/tyni"], 2, r"is not the folder of a run.*Did you mean '.*runs/tiny'\?"),
    (["evaluate"], 2, r"Missing argument 'RUN'"),
    (["evaluate", "runs/tiny", "--recipe", "nowhere"], 2, r"there is no recipe 'nowhere'\. Recipes found: .*tiny"),
    (["resume", "nowhere"], 2, r"nowhere is not the folder of a run.*`hezar-train runs` lists"),
    (["predict", "runs/tiny", "nothing.txt"], 2, r"nothing\.txt: there is no such file"),
    (
        ["predict", "runs/tiny", "wide.txt"],
        2,
        r"the model cannot predict for what was given: .*Expected inputs.*float32 of shape 1x3\)\. Correct the",
    ),
    (
        ["predict", "runs/tiny", "words.txt"],
        2,
        r"input 1 of 1, 'two words', cannot be made a sample: ValueError: could not convert.*correct",
    ),
    (
        ["predict", "runs/tiny", "empty.txt"],
        2,
        r"there is nothing to predict for: empty\.txt has no line.*Give an input",
    ),
    (
        ["predict", "runs/tiny", "bytes.txt"],
        2,
        r"bytes\.txt: cannot be read: it is no text in UTF-8 .* at byte 0.* Save it as UTF-8",
    ),
    (["predict", "runs/tiny", "bad.jsonl"], 2, r"bad\.jsonl, line 2 is not JSON.* Expected one JSON value a line"),
    (["predict", "runs/tiny", "deep.jsonl"], 2, r"deep\.jsonl, line 1 is nested too deeply"),
    (
        ["predict", "runs/tiny", "good.txt", "--out", "runs"],
        2,
        r"'--out': File 'runs' is a directory",
    ),
    (["predict", "runs/tiny", "good.txt", "--out", "/proc/x/y.jsonl"], 2, r"/proc/x/y\.jsonl cannot be written"),
    (["train", "nosuchrecipe"], 2, r"no recipe 'nosuchrecipe'\. Recipes found: .*tiny.* may also be"),
    (["train", "tiny", "--batch-size", "3"], 2, r"No such option '--batch-size'.*batch_size=VALUE"),
    (["find-lr", "tiny", "--num-steps", "1"], 2, r"1 is not in the range x>=2"),
    (["config", "explain", "learningrate"], 2, r"'learningrate' is not a field\. Did you mean 'learning_rate'\?"),
    (
        ["config", "validate", "nothing.yaml"],
        2,
        r"nothing\.yaml: there is no such file\. Name a config file that is there",
    ),
    (["train", "recipes/tiny/recipe.py"], 2, r"recipes/tiny/recipe\.py is the code of a recipe; .*: recipes/tiny$"),
    (["train", "tiny", "--resume"], 2, r"No such option '--resume'\. To go on with a run: hezar-train resume RUN"),
    (["train", "tiny", "--config", "x.yaml"], 2, r"'--config'\. A config file is given in the place of the recipe"),
    (
        ["resume", "runs/tiny", "resume_from_checkpoint=runs/tiny/checkpoints/00000004"],
        0,
        r"resuming from runs/tiny/checkpoints/00000004",
    ),
    (
        ["train", "tiny", "--fast-dev-run", "max_steps=2", "output_dir=runs/x"],
        0,
        r"step 2/2.*Everything lies in runs/x-dev",
    ),
    (
        ["train", "tiny", "--fast-dev-run", "max_steps=2", "max_steps=3"],
        0,
        r"max_steps is given more than once: the last.*3/3",
    ),
    (["resume", "runs/tiny", "--checkpoint", "4"], 2, r"'--checkpoint'\. .*another one: resume_from_checkpoint=FOLDER"),
    (["verify", "runs/tiny/checkpoints/00000004"], 2, r"is a checkpoint; expected the folder of its run.*: runs/tiny"),
    (["evaluate", "runs/tiny/checkpoints"], 2, r"is not the folder of a run.*Did you mean 'runs/tiny'\?"),
    (
        ["find-lr", "runs/tiny"],
        2,
        r"runs/tiny is a run, not a recipe\. Name its config: runs/tiny/train_config\.yaml; .* hezar-train resume",
    ),
    (
        ["resume", "runs/tiny", "output_dir=x"],
        2,
        r"a run goes on in its own folder\. To start another one.*output_dir=",
    ),
    (["resume", "runs/tiny", "recipe.width=8"], 2, r"recipe\.width: not given when the run began, 8 now.*Put it back"),
    (["push", "runs/tiny", "--repo", "me"], 2, r"'me' has 0 slashes, a repository has one; expected owner/name"),
    (["runs", "nowhere"], 2, r"there is no folder nowhere\. Name the one"),
    (["report", "nowhere"], 2, r"nowhere is not the folder of a run.*Name the output_dir of a run"),
    (["nosuchcommand"], 2, r"No such command 'nosuchcommand'"),
    (["resum", "runs/tiny"], 2, r"No such command 'resum'\. Did you mean 'resume'\?"),
    (["evaluate", "tiny"], 2, r"tiny is not the folder of a run.*Did you mean '.*runs/tiny'\?"),
    (
        ["evaluate", "runs/tiny/checkpoints/00000004"],
        2,
        r"is a checkpoint; expected the folder of its run.*: .*runs/tiny --checkpoint 4",
    ),
    (["resume", "runs/tiny", "batch_size=4"], 2, r"batch_size: 8 in the checkpoint, 4 now.*accept_changes=True"),
    (
        ["train", "recipes/tiny/config.yml"],
        2,
        r"config\.yml: there is no such file\. Did you mean 'recipes/tiny/config\.yaml'\?",
    ),
    (
        ["train", "recipes/tiny/flat.yaml"],
        2,
        r"'batch_size' is not a section.*write 'trainer:' above it, and indent",
    ),
    (["train", "recipes/tiny/glued.yaml"], 2, r"the section 'trainer' is a str; .*with a space after the colon"),
    (["train", "tiny", "--num-processes", "100000"], 2, r"expected at most \d+ here.*Give a process to each GPU"),
    (
        ["config", "validate", "comma.json"],
        2,
        r"line 1: .*Take out the comma before it, or the comment: JSON has",
    ),
    (["config", "validate", "single.json"], 2, r"line 1: .*Write names and texts in double quotes, or save"),
    (["config", "validate", "open.yaml"], 2, r"open\.yaml, line 1: a quote is opened there and not closed\. Close it"),
    (
        ["config", "validate", "template.yaml"],
        2,
        r"A value that begins with '\{\{' is no text: quote it",
    ),
    (["push", "runs/tiny"], 2, r"names no repository \(hub_model_id\)\. Name one: --repo OWNER/NAME"),
    (["export", "runs/tiny", "recipes"], 2, r"recipes is not empty\. Name a folder that is, or one that is not there"),
    (["config", "validate", "open.yml"], 2, r"open\.yml: there is no such file\. Did you mean 'open\.yaml'\?"),
    (
        ["config", "validate", "bracket.yaml"],
        2,
        r"bracket\.yaml, line 2: a '\[' is opened there and not closed\. Close it",
    ),
    (
        ["train", "tiny", "resume_from_checkpoint=runs/tiny/checkpoints/4"],
        2,
        r"checkpoints has 00000004; true takes the newest\. Did you mean 'runs/tiny/checkpoints/00000004'\?",
    ),
]
FILES = {
    "wide.txt": b"1 2 3\n",
    "words.txt": b"two words\n",
    "good.txt": b"1 2\n",
    "empty.txt": b"\n \n",
    "bytes.txt": b"\xff\xfe\x00\n",
    "bad.jsonl": b'"1 2"\n{"text":\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "comma.json": b'{"output_dir": "x", "batch_size": 8,}',
    "single.json": b"{'output_dir': 'x'}",
    "open.yaml": b"output_dir: 'runs/x\n",
    "bracket.yaml": b"output_dir: runs/x\nmetrics: [mse,\nbatch_size: 8\n",
    "template.yaml": b"output_dir: {{ out }}\n",
    "recipes/tiny/flat.yaml": b"output_dir: runs/x\nbatch_size: 8\n",
    "recipes/tiny/glued.yaml": b"trainer:\n  output_dir:runs/x\n",
}


@pytest.mark.parametrize(("command", "code", "words"), USES, ids=[" ".join(use[0]) for use in USES])
@pytest.mark.usefixtures("trained")
def test_a_wrong_use_of_a_run_is_answered(command: list[str], code: int, words: str, ask: Ask) -> None:
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    check(ask(*command), code, words)


def as_nobody(ask: Ask, *arguments: str) -> Answer:
    """Ask as a user without rights, in a child: who reads everything cannot be told that something is unreadable."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, json.dumps(ask(*arguments)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answered:
        text = answered.read()
    os.waitpid(child, 0)
    code, words = json.loads(text)
    return code, words


RIGHTS = [
    ("runs/tiny/checkpoints", ["evaluate", "runs/tiny", "--trust"], r"Permission denied\. You have no right", (1,)),
    ("runs/tiny/train_config.yaml", ["evaluate", "runs/tiny"], r"Permission denied\. You have no right.*Change", (2,)),
    ("recipes/tiny/recipe.py", ["train", "tiny"], r"cannot be read: Permission denied\. You have no right", (2,)),
    ("runs/tiny", ["runs"], r"runs/tiny is left out: Permission denied\. You have no right", (0,)),
    ("good.txt", ["predict", "runs/tiny", "good.txt"], r"'good\.txt' is not readable", (1, 2)),
]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody without rights")
@pytest.mark.parametrize(("closed", "command", "words", "codes"), RIGHTS, ids=[row[0] for row in RIGHTS])
@pytest.mark.usefixtures("trained")
def test_no_right_to_read_is_said_and_is_no_damage(
    closed: str, command: list[str], words: str, codes: tuple[int, ...], ask: Ask, open_to_all: None
) -> None:
    Path("good.txt").write_text("1 2\n")
    Path(closed).chmod(0)
    code, text = as_nobody(ask, *command)
    Path(closed).chmod(0o755)
    assert re.search(words, text), text[-800:]
    assert code in codes, text[-1500:]
    assert "damaged" not in text
    assert "This was not expected" not in text


@pytest.mark.usefixtures("trained")
def test_a_damaged_checkpoint_names_another_one_only_where_there_is_one(ask: Ask) -> None:
    for path in Path("runs/tiny/checkpoints/00000004").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    answer = ask("evaluate", "runs/tiny")
    check(answer, 1, r"is damaged: .* The run has no other one: restore it from a copy, or train again\.")
    assert "--checkpoint last" not in answer[1]


def test_a_hub_that_cannot_be_reached_says_where_to_look(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    check(
        ask("reproduce", "me/digits"),
        1,
        r"me/digits could not be read: ConnectError: .* http://127\.0\.0\.1:9 was asked: check the network and HF_",
    )


@pytest.mark.usefixtures("trained")
def test_a_removed_recipe_is_asked_for(ask: Ask) -> None:
    shutil.rmtree("recipes")
    check(
        ask("evaluate", "runs/tiny"),
        2,
        r"the recipe of .*tiny was .*and is not there any more.*--recipe",
    )

"""`hezar-train evaluate`, `predict` and `find-lr`: they leave the run as it is; a terminal sees batches counted."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result

from hezar_train.cli.evaluate import ERASED_LINE, counting
from hezar_train.recipes import load_run, open_run

Invoke = Callable[..., Result]


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_an_evaluation_gives_what_the_run_recorded_and_changes_nothing(invoke: Invoke, trained: Path) -> None:
    before = files_of(trained)
    done = invoke("evaluate", "runs/sums", "--checkpoint", "6", "--json")
    recorded = json.loads((trained / "evaluations/00000006.json").read_text())["metrics"]
    assert json.loads(done.stdout) == {"checkpoint": "00000006", "split": None, "metrics": recorded}
    assert files_of(trained) == before


def test_a_named_set_or_a_split_is_evaluated_alone(invoke: Invoke, trained: Path) -> None:
    whole = json.loads(invoke("evaluate", "runs/sums", "--json").stdout)["metrics"]
    for split in ("odd", "train"):
        alone = json.loads(invoke("evaluate", "runs/sums", "--split", split, "--json").stdout)["metrics"]
        assert alone["loss"] == pytest.approx(whole["odd.loss"])


def test_the_weights_are_those_of_the_checkpoint_asked_for(invoke: Invoke, trained: Path) -> None:
    losses = {
        name: json.loads(invoke("evaluate", "runs/sums", "--checkpoint", name, "--json").stdout)["metrics"]["even.loss"]
        for name in ("3", "6", "last", "best")
    }
    best = json.loads((trained / "best.json").read_text())["value"]
    assert losses["3"] != losses["6"] == losses["last"]
    assert losses["best"] == best == min(losses.values())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--split", "eve"], 2, "there is no split 'eve'. This recipe has: even, odd, train. Did you mean 'even'?"),
        (["--checkpoint", "4"], 2, "there is no checkpoint '4' in runs/sums/checkpoints. There are: best, last, 3, 6."),
    ],
)
def test_what_is_not_there_is_told_with_what_is(
    invoke: Invoke, trained: Path, arguments: list[str], code: int, words: str
) -> None:
    done = invoke("evaluate", "runs/sums", *arguments)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr


def test_a_damaged_checkpoint_is_not_evaluated(invoke: Invoke, trained: Path) -> None:
    (trained / "checkpoints/00000006/model.safetensors").write_bytes(b"damaged")
    done = invoke("evaluate", "runs/sums", "--checkpoint", "6")
    assert (done.exit_code, "damaged" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"step": 6}', "the checkpoint runs/sums/checkpoints/00000006 is damaged: "),
        ('{"step": 5}', "runs/sums/best.json names step 5, which has no checkpoint."),
        ('{"step": "x"}', "runs/sums/best.json: expected the step of the best checkpoint, got step='x'."),
        ("{}", "runs/sums/best.json: expected the step of the best checkpoint, got step=None."),
        ("{", "runs/sums/best.json, line 1: "),
    ],
)
def test_a_best_checkpoint_that_cannot_be_had_is_told_with_the_one_that_can(
    invoke: Invoke, trained: Path, content: str, words: str
) -> None:
    (trained / "best.json").write_text(content)
    (trained / "checkpoints/00000006/model.safetensors").write_bytes(b"damaged")
    done = invoke("evaluate", "runs/sums")
    assert (done.exit_code, words in done.stderr) == (1, True), done.stderr
    assert "--checkpoint last is the newest that is whole." in done.stderr
    assert "resume_from_checkpoint" not in done.stderr
    assert '"checkpoint": "00000003"' in invoke("evaluate", "runs/sums", "--checkpoint", "last", "--json").stdout


def test_texts_json_values_and_the_standard_input_are_predicted_in_order(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("0.1 0.2\n\n0.5 0.5\n")
    (tmp_path / "mine.jsonl").write_text('{"text": "0.1 0.2"}\n[0.5, 0.5]\n')
    lines = invoke("predict", "runs/sums", "mine.txt", "mine.jsonl").stdout.splitlines()
    given, predicted = zip(*(line.split("\t") for line in lines), strict=True)
    assert given == ("0.1 0.2", "0.5 0.5", "0.1 0.2", "[0.5, 0.5]")
    assert predicted[:2] == predicted[2:]
    assert invoke("predict", "runs/sums", "-", stdin="0.1 0.2\n").stdout.splitlines() == lines[:1]


def test_predictions_go_to_a_file_with_what_they_are_of(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("0.1 0.2\n")
    done = invoke("predict", "runs/sums", "mine.txt", "--out", "found/all.jsonl")
    assert done.stdout == "1 prediction is in found/all.jsonl\n"
    (line,) = (tmp_path / "found/all.jsonl").read_text().splitlines()
    assert json.loads(line)["input"] == "0.1 0.2"
    assert isinstance(json.loads(line)["prediction"], float)
    both = invoke("predict", "runs/sums", "mine.txt", "mine.txt", "--out", "found/all.jsonl")
    assert both.stdout == "2 predictions are in found/all.jsonl\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "one two\n",
            "input 1 of 1, 'one two', cannot be made a sample: ValueError: could not convert string to float",
        ),
        ("\n", "there is nothing to predict for"),
    ],
)
def test_an_input_that_cannot_be_read_is_told(
    invoke: Invoke, trained: Path, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "mine.txt").write_text(content)
    done = invoke("predict", "runs/sums", "mine.txt")
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("error", ["AttributeError", "IndexError", "RuntimeError", "OverflowError"])
def test_an_input_that_a_recipe_was_not_made_for_is_named(
    invoke: Invoke, trained: Path, tmp_path: Path, error: str
) -> None:
    source = tmp_path / "recipes/sums/recipe.py"
    source.write_text(source.read_text() + f"\n\ndef read(given, preprocessor):\n    raise {error}('no')\n")
    (tmp_path / "mine.jsonl").write_text('{"a": 1}\n')
    done = invoke("predict", "runs/sums", "mine.jsonl", "--trust")
    said = (
        f"error: input 1 of 1, \"{{'a': 1}}\", cannot be made a sample: {error}: no. Expected what the recipe's read()"
    )
    assert (done.exit_code, done.stderr.splitlines()[-1].startswith(said)) == (2, True)


def test_what_a_recipe_says_of_an_input_is_told_as_it_is() -> None:
    from hezar_train.errors import DataError
    from hezar_train.recipes import Inputs

    def read(given: object) -> None:
        raise DataError(f"{given} is no picture")

    with pytest.raises(DataError, match=r"^input 1 of 1, '5', cannot be made a sample: 5 is no picture\. "):
        Inputs([5], read)[0]


def test_an_empty_folder_is_said_to_have_no_files(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    done = invoke("predict", "runs/sums", "pictures", "-", stdin="\n")
    assert done.exit_code == 2
    assert "nothing to predict for: the folder pictures has no files" in done.stderr
    assert "the standard input has no line that is not empty" in done.stderr


def test_a_recipe_that_does_not_say_how_to_read_is_refused(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "recipes/sums/recipe.py"
    source.write_text(source.read_text().replace("def read(", "def unread("))
    (tmp_path / "mine.txt").write_text("0.1 0.2\n")
    done = invoke("predict", "runs/sums", "mine.txt", "--trust")
    assert (done.exit_code, "define read(given, preprocessor) in its recipe.py" in done.stderr) == (2, True)


def test_a_preprocessor_reads_where_the_recipe_does_not_say_how() -> None:
    from types import ModuleType

    from hezar_train.recipes.open_run import reader_of

    read = reader_of(ModuleType("recipe"), lambda given: [given, type(given)])
    assert read(Path("a.png")) == ["a.png", str]
    assert read("a text") == ["a text", str]


def test_pictures_of_digits_are_read_by_the_recipe(invoke: Invoke, smoke: str, tmp_path: Path) -> None:
    from PIL import Image

    from hezar_train.recipes import import_recipe

    pixels = torch.zeros(8, 8)
    pixels[1:7, 3:5] = 255
    for name, picture in (("light", pixels), ("dark", 255 - pixels)):
        Image.fromarray(picture.byte().numpy()).resize((64, 64), Image.Resampling.NEAREST).save(
            tmp_path / f"{name}.png"
        )
    read = import_recipe(Path(smoke).with_name("recipe.py")).read
    (light,), (dark,) = (read(tmp_path / f"{name}.png", None) for name in ("light", "dark"))
    assert torch.equal(light, pixels.unsqueeze(0) / 255)
    assert torch.equal(light, dark)


def test_a_learning_rate_is_suggested_and_only_the_picture_is_kept(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    before = files_of(trained)
    done = invoke("find-lr", "sums", "batch_size=6", "--num-steps", "40", "--out", "curve.png")
    assert done.exit_code == 0, done.stderr
    assert "The curve is in curve.png" in done.stdout
    assert "To train with it: hezar-train train sums batch_size=6 learning_rate=" in done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert files_of(trained) == before


def test_the_suggested_command_can_be_pasted_into_a_shell(invoke: Invoke, trained: Path) -> None:
    done = invoke("find-lr", "sums", "metrics=[]", "output_dir=runs/my run", "--num-steps", "40", "--out", "curve.png")
    assert "hezar-train train sums 'metrics=[]' 'output_dir=runs/my run' learning_rate=" in done.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("sums", "Did you mean 'runs/sums'?"),
        ("runs/sms", "Did you mean 'runs/sums'?"),
        ("runs/image_classification", "Nothing was trained there yet: hezar-train train image_classification."),
    ],
)
def test_a_run_that_is_not_there_is_answered_with_what_may_be_meant(
    invoke: Invoke, trained: Path, given: str, words: str
) -> None:
    done = invoke("evaluate", given)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_terminal_shows_how_many_batches_were_looked_at_and_a_file_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    opened = open_run(load_run(trained))
    before = opened.trainer.hooks_in_eval.names("on_batch_end")
    monkeypatch.setattr(sys, "stderr", stream)
    with counting(opened.trainer.hooks_in_eval, "evaluated"):
        opened.evaluate()
    shown = [ERASED_LINE + "evaluated: 1 batches", ERASED_LINE] if stream.isatty() else [""]
    assert (stream.getvalue().startswith(shown[0]), stream.getvalue().endswith(shown[-1])) == (True, True)
    assert bool(stream.getvalue()) is stream.isatty()
    assert opened.trainer.hooks_in_eval.names("on_batch_end") == before

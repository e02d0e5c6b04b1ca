"""`hezar-train resume`: a run goes on from its folder alone."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Invoke = Callable[..., Result]


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"{step:08d}" / "model.safetensors").read_bytes()


def test_a_run_goes_on_from_another_folder_and_ends_like_the_unbroken_one(
    invoke: Invoke, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("train", "sums", "num_epochs=4", "output_dir=runs/unbroken").exit_code == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done = invoke("resume", str(trained), "num_epochs=4")
    assert (done.exit_code, list(elsewhere.iterdir())) == (0, [])
    assert weights(trained, 12) == weights(tmp_path / "runs/unbroken", 12)


def test_a_run_that_was_moved_goes_on_where_it_is_now(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    trained.rename(tmp_path / "moved")
    assert invoke("resume", "moved", "num_epochs=3").exit_code == 0
    assert (tmp_path / "moved/checkpoints/00000009").is_dir()
    assert not trained.exists()


def test_a_changed_recipe_is_refused_unless_changes_are_accepted_and_then_only_once(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    source = tmp_path / "recipes/sums/recipe.py"
    source.write_text(source.read_text() + "# changed\n")
    refused = invoke("resume", "runs/sums", "num_epochs=3")
    assert refused.exit_code == 2
    assert "recipes/sums has changed since this run began (recipe.py)" in refused.stderr
    assert invoke("resume", "runs/sums", "num_epochs=3", "accept_changes=true").exit_code == 0
    source.write_text(source.read_text() + "# again\n")
    assert invoke("resume", "runs/sums", "num_epochs=4").exit_code == 2


def test_data_beside_the_recipe_belongs_to_it_and_what_is_for_looking_does_not(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    home = tmp_path / "recipes/sums"
    (home / "README.md").write_text("changed")
    (home / "smoke.yaml").write_text("trainer: {}\n")
    assert invoke("resume", "runs/sums", "num_epochs=3").exit_code == 0
    (home / "templates.txt").write_text("new")
    refused = invoke("resume", "runs/sums", "num_epochs=4")
    assert (refused.exit_code, "(templates.txt)" in refused.stderr) == (2, True), refused.stderr
    assert "the run would not go on exactly" in refused.stderr


def test_a_run_that_was_recorded_with_the_hash_of_the_source_alone_goes_on(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipes/sums/templates.txt").write_text("was there before")
    source = hashlib.sha256((tmp_path / "recipes/sums/recipe.py").read_bytes()).hexdigest()
    record = json.loads((trained / "recipe.json").read_text())
    del record["parts"]
    (trained / "recipe.json").write_text(json.dumps({**record, "sha256": source}))
    asked = invoke("resume", "runs/sums", "num_epochs=3")  # of what lies beside the source such a run knows nothing
    assert (asked.exit_code, "--trust, once" in asked.stderr) == (2, True), asked.stderr
    assert invoke("resume", "runs/sums", "num_epochs=3", "--trust").exit_code == 0
    assert json.loads((trained / "recipe.json").read_text())["parts"].keys() == {"recipe.py", "templates.txt"}
    assert invoke("resume", "runs/sums").exit_code == 0


@pytest.mark.parametrize(("change", "why"), [("", "it finished"), ("killed", "it ended before its first save")])
def test_a_run_that_has_trained_and_saved_nothing_is_refused_with_the_way_to_start_anew(
    invoke: Invoke, trained: Path, change: str, why: str
) -> None:
    run = trained.parent / "my run"
    assert invoke("train", "sums", f"output_dir={run}", "save_enabled=false").exit_code == 0
    if change == "killed":
        (run / "environment.json").unlink()
    done = invoke("resume", str(run))
    assert (done.exit_code, f"{why}, with save_enabled=false." in done.stderr) == (1, True), done.stderr
    (command,) = re.findall(r"hezar-train (train .*);", done.stderr)
    assert not (run / "previous").exists()
    assert invoke(*shlex.split(command)).exit_code == 0
    assert (run / "previous/0001/ledger.jsonl").is_file()


def test_a_run_that_never_began_starts_from_the_beginning(
    invoke: Invoke, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hezar_train")
    shutil.rmtree(trained / "checkpoints")
    (trained / "environment.json").unlink()
    (trained / "ledger.jsonl").write_text("")
    assert invoke("resume", "runs/sums").exit_code == 0
    assert "nothing to resume in runs/sums/checkpoints: starting from the beginning" in caplog.text
    assert (trained / "checkpoints/00000006").is_dir()


def test_the_help_says_when_the_number_of_epochs_is_not_free(invoke: Invoke, trained: Path) -> None:
    words = " ".join(invoke("resume", "--help").stdout.split())
    assert "num_epochs, too, unless a schedule is laid out over the whole run." in words
    assert invoke("train", "sums", "output_dir=runs/laid", "lr_scheduler=cosine_annealing").exit_code == 0
    refused = invoke("resume", "runs/laid", "num_epochs=4")
    assert (refused.exit_code, "is laid out over the whole run" in refused.stderr) == (2, True), refused.stderr


def test_an_unchanged_copy_of_a_changed_recipe_may_be_named(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    home = tmp_path / "recipes/sums"
    shutil.copytree(home, tmp_path / "kept")
    (home / "recipe.py").write_text("def build(): ...\n")
    assert invoke("resume", "runs/sums", "num_epochs=3", "--recipe", "kept").exit_code == 0
    assert json.loads((trained / "recipe.json").read_text())["path"] == "kept"


def test_other_options_are_refused(invoke: Invoke, trained: Path) -> None:
    done = invoke("resume", "runs/sums", "recipe.width=3")
    assert done.exit_code == 2
    assert "recipe.width: 2 when the run began, 3 now" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/sum"], "runs/sum is not the folder of a run: it has no train_config.yaml. Did you mean 'runs/sums'?"),
        (["runs/sums", "output_dir=x"], "hezar-train train runs/sums/train_config.yaml output_dir=..."),
        (["runs/sums", "bach_size=1"], "'bach_size' is not a field. Did you mean 'batch_size'?"),
    ],
)
def test_a_mistake_is_told_with_what_to_do(invoke: Invoke, trained: Path, arguments: list[str], words: str) -> None:
    done = invoke("resume", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_run_without_a_recipe_and_one_whose_recipe_is_gone_are_refused(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "recipes")
    assert "Say where it is: --recipe FOLDER" in invoke("resume", "runs/sums").stderr
    (trained / "recipe.json").unlink()
    assert "was not started from a recipe" in invoke("resume", "runs/sums").stderr


def test_the_config_of_a_run_starts_another_one(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    done = invoke("train", "runs/sums/train_config.yaml", "output_dir=runs/again")
    assert done.exit_code == 0
    assert weights(tmp_path / "runs/again", 6) == weights(trained, 6)
    assert "or go on with the run: hezar-train resume runs/sums" in invoke("train", "runs/sums").stderr

"""`hezar-train config show`, `explain`, `diff` and `validate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hezar_train import TrainerConfig
from hezar_train.config.files import parse_yaml

Invoke = Callable[..., Result]
FIVE_MISTAKES = """\
output_dir: runs/x
learning_rte: 0.1
num_epochs: three
batch_size: 0
optimizer: adamv
device: gpu
"""


def test_what_is_shown_of_a_recipe_is_a_config_file_of_it(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    shown = invoke("config", "show", "sums", "num_epochs=5", "recipe.width=3").stdout
    content = parse_yaml(shown, Path("shown"))
    assert content["recipe"] == {"width": 3}
    assert content["trainer"]["num_epochs"] == 5
    (tmp_path / "recipes/sums/other.yaml").write_text(shown)
    assert invoke("config", "show", "recipes/sums/other.yaml").stdout == shown


def test_all_fields_are_shown_on_request(invoke: Invoke, trained: Path) -> None:
    content = parse_yaml(invoke("config", "show", "runs/sums", "--all").stdout, Path("shown"))
    assert list(content["trainer"]) == list(TrainerConfig.fields())


def test_a_plain_file_is_shown_without_sections(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("output_dir: runs/x\nbatch_size: 1\nseed: 7\n")
    assert invoke("config", "show", "plain.yaml").stdout == "output_dir: runs/x\nseed: 7\n"


def test_a_field_is_explained_with_its_type_default_and_meaning(invoke: Invoke) -> None:
    shown = invoke("config", "explain", "save_total_limit").stdout
    assert shown.startswith("save_total_limit: int | None = None\n")
    assert "Checkpoints to keep, the newest ones and the best. None: all." in shown
    assert "Elsewhere it is called: max_to_keep" in shown


def test_another_trainers_word_leads_to_ours(invoke: Invoke) -> None:
    shown = invoke("config", "explain", "per_device_train_batch_size").stdout
    assert shown.startswith(
        "per_device_train_batch_size is another trainer's word. Here it is:\n\nbatch_size: int = 1\n"
    )


def test_an_unknown_field_is_refused_with_the_nearest(invoke: Invoke) -> None:
    done = invoke("config", "explain", "bach_size")
    assert (done.exit_code, "Did you mean 'batch_size'?" in done.stderr) == (2, True)


def test_without_a_name_every_field_is_listed(invoke: Invoke) -> None:
    words = invoke("config", "explain").stdout.split()
    assert set(TrainerConfig.fields()) <= set(words)


@pytest.mark.parametrize("pair", [("sums", "runs/sums"), ("runs/sums", "recipes/sums/config.yaml")])
def test_a_run_differs_in_nothing_from_what_it_was_started_with(
    invoke: Invoke, trained: Path, pair: tuple[str, str]
) -> None:
    assert invoke("config", "diff", *pair).stdout == "no differences\n"


def test_differences_are_listed_field_by_field(invoke: Invoke, trained: Path, tmp_path: Path) -> None:
    other = invoke("config", "show", "sums", "seed=1", "recipe.width=3").stdout
    (tmp_path / "recipes/sums/other.yaml").write_text(other)
    _, *rows = invoke("config", "diff", "sums", "recipes/sums/other.yaml").stdout.splitlines()
    assert [row.split() for row in rows] == [["recipe.width", "2", "3"], ["seed", "42", "1"]]


def test_a_good_file_is_said_to_have_no_problems(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("output_dir: runs/x\nlearning_rate: 1e-3\n")
    done = invoke("config", "validate", "good.yaml")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "good.yaml: no problems\n", "")


def test_five_mistakes_are_five_problems_in_one_block(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(FIVE_MISTAKES)
    done = invoke("config", "validate", "bad.yaml")
    first, *problems = done.stderr.splitlines()
    assert (done.exit_code, done.stdout, first) == (2, "", "error: 5 problems:")
    assert [line[:5] for line in problems] == [f"  {number}. " for number in range(1, 6)]
    assert "'learning_rte' is not a field. Did you mean 'learning_rate'?" in problems[0]


def test_the_sections_of_a_recipe_are_checked_together(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("import torch\ndef build(width, depth=2):\n    raise RuntimeError('not run')\n")
    (tmp_path / "config.yaml").write_text("recipe:\n  widht: 3\ntrainer:\n  output_dir: x\n  batch_size: 0\n")
    done = invoke("config", "validate", "config.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 3 problems:")
    assert "recipe.widht is not an option of this recipe. Its build() takes: depth, width. Did you mean 'width'?" in (
        done.stderr
    )
    assert "recipe.width is missing" in done.stderr


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("- a\n", "bad.yaml, line 1: expected a mapping"),
        ("a: [\n", "bad.yaml, line 2"),
        ("trainer: 3\n", "the section 'trainer' is an int"),
        (
            "recipe: {}\ntrianer: {}\n",
            "'trianer' is not a section: expected recipe and trainer. Did you mean 'trainer'?",
        ),
    ],
)
def test_a_file_of_another_form_is_refused_with_its_place(
    invoke: Invoke, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    done = invoke("config", "validate", "bad.yaml")
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_refused(invoke: Invoke) -> None:
    done = invoke("config", "validate", "nothing.yaml")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: nothing.yaml: there is no such file. Name a config file that is there.\n",
    )


def test_what_works_but_may_not_be_meant_is_a_warning(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("output_dir: x\ngradient_accumulation_steps: 2\nsave_steps: 3\n")
    done = invoke("config", "validate", "odd.yaml")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: save_steps=3 is not a multiple of gradient_accumulation_steps=2")


@pytest.mark.parametrize(
    ("field", "group"),
    [
        ("seed", "the run as a whole"),
        ("save_steps", "checkpoints"),
        ("finetune_steps", "`finetune()`"),
        ("lr_scheduler", "the schedules of learning rate and momentum"),
    ],
)
def test_a_field_is_explained_with_the_group_that_it_belongs_to(invoke: Invoke, field: str, group: str) -> None:
    assert f"\nAmong the fields of {group}. On the command line: " in invoke("config", "explain", field).stdout
    assert group in invoke("config", "explain").stdout.splitlines()

"""`hezar-train config show`, `explain` and `diff`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hezar_train import TrainerConfig
from hezar_train.config.files import parse_yaml

Invoke = Callable[..., Result]


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

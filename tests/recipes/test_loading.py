"""What recipes load by override, from a Hub or a folder; what fails is told in a sentence."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi

from hezar_train.errors import DataError
from hezar_train.recipes import (
    asked_for,
    build_trainer,
    load_recipe,
    load_splits,
    with_held_out,
)
from tests.hub.conftest import hub  # noqa: F401
from tests.hub.server import LoopbackHub

sys.path.insert(0, str(Path(__file__).parents[2]))
Upload = Callable[..., None]
RECIPES = Path(__file__).parents[2] / "recipes"
MISSING = {  # of each recipe, the overrides that load something
    "finetune_lora": ["recipe.dataset=", "recipe.model="],
    "finetune_transformers": ["recipe.dataset=", "recipe.model="],
    "hezar_model": ["recipe.dataset=", "recipe.model="],
    "language_modeling": ["recipe.dataset=", "recipe.model="],
    "license_plate": ["recipe.dataset=", "recipe.model="],
    "sequence_labeling": ["recipe.dataset=", "recipe.model="],
    "speech_recognition": ["recipe.data=hub:", "recipe.pretrained="],
    "text_classification": ["recipe.dataset=", "recipe.model="],
    "text_generation": ["recipe.data=hub:", "recipe.pretrained="],
}
COLUMNS = {"text_generation": ":source:target"}  # which are part of the dataset's name there
CASES = [(recipe, override) for recipe, overrides in MISSING.items() for override in overrides]


@pytest.fixture
def upload(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upload:  # noqa: F811
    """Upload folders of `tmp_path`, as `tester/FOLDER`, to a Hub that `datasets` and `hezar` ask as well."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    _keep_what_hezar_fetches(tmp_path / "cache", monkeypatch)
    api = HfApi(token=hub.token)

    def uploaded(**kinds: str) -> None:
        for name, kind in kinds.items():
            api.create_repo(f"tester/{name}", repo_type=kind)
            api.upload_folder(repo_id=f"tester/{name}", repo_type=kind, folder_path=tmp_path / name)

    return uploaded


def _keep_what_hezar_fetches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("hezar") is None:
        return
    from hezar.data import Dataset
    from hezar.models import model

    monkeypatch.setattr(model, "HEZAR_CACHE_DIR", str(folder))  # `Model.load` hands it to whatever loads a part
    monkeypatch.setattr(Dataset, "cache_dir", str(folder))


def _write_rows(folder: Path, **sizes: int) -> None:
    folder.mkdir(parents=True)
    for split, size in sizes.items():
        lines = [json.dumps({"text": f"{split} {number}"}) for number in range(size)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(("recipe", "override"), CASES)
def test_what_the_hub_does_not_have_is_a_mistake_in_the_override(
    upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, override: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = f"{override}tester/nothing{COLUMNS.get(recipe, '') if 'data' in override else ''}"
    with pytest.raises(DataError, match=rf"^{asked}.* cannot be loaded\. Expected OWNER/NAME on the Hub"):
        build_trainer(load_recipe(RECIPES / recipe / "smoke.yaml", [asked]))


def _assert_that_nothing_can_be_loaded() -> None:
    transformers, models = pytest.importorskip("transformers"), pytest.importorskip("hezar.models")
    with pytest.raises(DataError, match=r"^recipe\.dataset=tester/rows cannot be loaded"):
        load_splits("recipe.dataset=tester/rows", "tester/rows")
    for load in (transformers.AutoModel.from_pretrained, models.Model.load):
        with pytest.raises(DataError, match=r"^recipe\.model=tester/bert cannot be loaded"):
            with asked_for("recipe.model=tester/bert"):
                load("tester/bert")


def test_what_may_not_be_read_is_told_in_a_sentence(upload: Upload, hub: LoopbackHub) -> None:  # noqa: F811
    hub.faults.set("*", 403)
    _assert_that_nothing_can_be_loaded()


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_told_in_a_sentence(upload: Upload, hub: LoopbackHub) -> None:  # noqa: F811
    hub.stop()  # the clients try again, half a minute each
    _assert_that_nothing_can_be_loaded()


def test_files_that_cannot_be_read_are_told_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(DataError, match=r"(?s)rows cannot be loaded.*DatasetGenerationError: "):
        load_splits("recipe.dataset=rows", str(tmp_path / "rows"))


def test_an_error_of_our_own_passes_as_it_is() -> None:
    with pytest.raises(DataError, match=r"^no such column$"), asked_for("recipe.dataset=rows"):
        raise DataError("no such column")


def test_a_mistake_in_the_code_is_not_taken_for_one_in_the_override() -> None:
    with pytest.raises(ZeroDivisionError), asked_for("recipe.dataset=rows"):
        _ = 1 / 0


def test_a_configuration_of_a_dataset_is_named_behind_a_colon(upload: Upload, tmp_path: Path) -> None:
    for language in ("fa", "en"):
        _write_rows(tmp_path / "news" / language, train=3)
    listed = "".join(f"- config_name: {language}\n  data_dir: {language}\n" for language in ("fa", "en"))
    (tmp_path / "news" / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    upload(news="dataset")
    assert len(load_splits("recipe.dataset=...", "tester/news:en")["train"]) == 3
    with pytest.raises(DataError, match=r"(?s)news:de cannot be loaded.*'de' not found. Available: \['fa', 'en'\]"):
        load_splits("recipe.dataset=tester/news:de", "tester/news:de")


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"train": 20, "validation": 5, "test": 4}, {"train": 20, "held_out": 5, "test": 4}),
        ({"train": 20, "test": 4}, {"train": 20, "held_out": 4}),
        ({"train": 20}, {"train": 18, "held_out": 2}),
        ({"test": 20}, {"train": 18, "held_out": 2}),
    ],
)
def test_every_dataset_has_rows_to_train_on_and_some_that_are_held_out(
    tmp_path: Path, sizes: dict[str, int], found: dict[str, int]
) -> None:
    pytest.importorskip("datasets")
    _write_rows(tmp_path / "rows", **sizes)
    splits = with_held_out("recipe.dataset=rows", load_splits("recipe.dataset=rows", str(tmp_path / "rows")))
    assert {split: len(rows) for split, rows in splits.items()} == found


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ({"test": [1], "validation": [2]}, "rows has the splits test, validation; expected train, and validation"),
        ({"train": [1]}, "rows has 1 rows: too few to hold some out"),
    ],
)
def test_a_dataset_that_cannot_be_split_is_refused(splits: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        with_held_out("recipe.dataset=rows", splits)

"""The recipe of topics: its data and split, its tokenizer, its overrides, and that a run learns and goes on exactly."""

from __future__ import annotations

import gzip
import importlib.util
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import ConfigError, DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "text_classification"
LARGEST_SAMPLE_BYTES = 600_000
INDEX = """\
Package: abc
Section: games
Description: puzzle game with letters
Tag: game::puzzle,
 Section: not a field

Package: abc-data
Source: abc (1.0-1)
Section: non-free/games
Description: Puzzle game with letters!

Package: old
Section: games
Description: transitional package for abc

Package: libabc
Section: libs
Description: library of letters

Package: def
Section: sound
Description: player of sounds
"""


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


def test_the_sample_is_small_and_has_every_topic_in_every_split(recipe: ModuleType) -> None:
    assert recipe.SAMPLE_FILE.stat().st_size < LARGEST_SAMPLE_BYTES
    corpus = recipe.debian_corpus()
    assert [len(corpus.splits[split]) for split in recipe.SPLITS] == [5287, 759, 678]
    assert all({label for _, label in pairs} == set(range(16)) for pairs in corpus.splits.values())


def test_no_source_package_and_no_description_is_in_two_splits(recipe: ModuleType) -> None:
    found = recipe.read_sample()
    by_split = {split: [one for one in found if recipe.split_of(one.source) == split] for split in recipe.SPLITS}
    for field in ("source", "text"):
        values = [{getattr(one, field).lower() for one in part} for part in by_split.values()]
        assert sum(map(len, values)) == len(set.union(*values))


def test_an_index_gives_one_description_of_each_kind_under_its_topic(recipe: ModuleType) -> None:
    found = recipe.distinct(recipe.parse_index(INDEX.splitlines(keepends=True)))
    assert [tuple(one) for one in found] == [
        ("abc", "games", "Puzzle game with letters!"),
        ("def", "sound", "player of sounds"),
    ]


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_an_index_is_read_from_a_path_and_a_url_packed_or_not(
    recipe: ModuleType, tmp_path: Path, suffix: str, pack: type
) -> None:
    index = tmp_path / f"Packages{suffix}"
    index.write_bytes(pack(INDEX.encode()))
    for location in (str(index), index.as_uri()):
        corpus = recipe.debian_corpus("full", location)
        assert sum(map(len, corpus.splits.values())) == 2


def test_an_index_that_is_not_there_and_data_of_another_name_are_refused(recipe: ModuleType) -> None:
    with pytest.raises(DataError, match=r"cannot be read .* recipe.data=full recipe.index=Packages"):
        recipe.debian_corpus("full", "nowhere/Packages")
    with pytest.raises(ConfigError, match=r"recipe.data='ful' is neither 'sample' nor 'full'. Did you mean 'full'"):
        recipe.debian_corpus("ful")


def test_another_process_learns_the_same_pieces(recipe: ModuleType, tmp_path: Path) -> None:
    code = "import sys, recipe; recipe.build(vocab_size=900).preprocessor.save(sys.argv[1])"
    subprocess.run([sys.executable, "-B", "-c", code, str(tmp_path / "other")], check=True, cwd=FOLDER)
    recipe.build(vocab_size=900).preprocessor.save(str(tmp_path / "here"))
    here, other = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("here", "other"))
    assert here == other


def test_padding_does_not_change_what_the_encoder_says(recipe: ModuleType) -> None:
    built = recipe.build(vocab_size=500, width=16, num_layers=1, num_heads=2)
    samples = [built.preprocessor(text) for text in ("a game", "a far longer description of a player of sounds")]
    model = built.model.eval()
    alone, together = model(**built.data_collator(samples[:1])), model(**built.data_collator(samples))
    torch.testing.assert_close(together[:1], alone)


def test_a_text_without_a_known_piece_is_a_sample_all_the_same(recipe: ModuleType) -> None:
    read = recipe.build(vocab_size=500).preprocessor
    assert read("")["input_ids"] == [recipe.UNKNOWN_ID]
    assert recipe.UNKNOWN_ID in read("平仮名")["input_ids"]
    assert len(read("word " * 99)["input_ids"]) == 48


def test_a_run_learns_topics_and_tells_them_of_new_texts(tmp_path: Path) -> None:
    options = ["recipe.width=32", "num_epochs=1", "learning_rate=0.005", f"output_dir={tmp_path}/run"]
    options += ["lr_scheduler=", "lr_scheduler_kwargs="]
    trainer = build_trainer(load_recipe(FOLDER, options))
    before = trainer.evaluate()["accuracy"]
    assert trainer.train().metrics["evaluation.accuracy"] > before + 0.2
    assert trainer.evaluate("test")["accuracy"] > before + 0.2
    run = open_run(load_run(tmp_path / "run"))
    assert run.predict(["TrueType font of Thai letters", "puzzle game"]) == ["fonts", "games"]


class BreakOff(Hook):
    """End a run as a kill would, behind a step that was not saved."""

    def after_step(self) -> None:
        if self.trainer.state.global_step == 7:
            raise KeyboardInterrupt


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    def trainer_in(folder: str) -> Trainer:
        return build_trainer(load_recipe(FOLDER / "smoke.yaml", [f"output_dir={tmp_path / folder}"]))

    unbroken, broken = trainer_in("a"), trainer_in("b")
    unbroken.train()
    broken.register_hooks([BreakOff()])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer_in("b")
    assert resumed.state.global_step == 5
    resumed.train()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def _write_mails(folder: Path, text_column: str = "text", label_column: str = "label") -> None:
    folder.mkdir()
    kinds = [(kind, number) for number in range(10) for kind in ("ham", "spam")]
    rows = [{text_column: f"{kind} number {number}", label_column: kind} for kind, number in kinds]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _of_the_hub(folder: Path, *overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER, [*overrides, f"output_dir={folder}", "max_steps=2"]))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_mails(tmp_path / "mails")
    upload(mails="dataset")
    trainer = _of_the_hub(tmp_path / "run", "recipe.dataset=tester/mails")
    assert "evaluation.accuracy" in trainer.train().metrics
    assert trainer.model.config.id2label == {0: "ham", 1: "spam"}


def test_weights_of_the_hub_are_trained_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _tiny_bert(pytest.importorskip("transformers"), tmp_path / "bert")
    upload(bert="model")
    trainer = _of_the_hub(tmp_path / "run", "recipe.model=tester/bert")
    assert "evaluation.accuracy" in trainer.train().metrics
    assert len(trainer.model.config.id2label) == 16


def test_a_dataset_and_weights_of_the_hub_take_their_places(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_mails(tmp_path / "mails", "body", "kind")
    _tiny_bert(pytest.importorskip("transformers"), tmp_path / "bert")
    upload(mails="dataset", bert="model")
    names = ("recipe.dataset=tester/mails", "recipe.model=tester/bert")
    columns = ("recipe.text_column=body", "recipe.label_column=kind")
    trainer = _of_the_hub(tmp_path / "run", *names, *columns, "batch_size=4")
    assert trainer.model.config.id2label == {0: "ham", 1: "spam"}
    assert [len(trainer.splits.data[split]) for split in ("train", "val", "test")] == [16, 2, 2]
    assert trainer.train().num_samples == 8
    assert (tmp_path / "run" / "checkpoints" / "00000002" / "preprocessor" / "tokenizer.json").exists()


def _tiny_bert(transformers: ModuleType, folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ham", "spam", "number"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(folder)


def test_labels_that_a_dataset_has_as_numbers_keep_the_names_it_gives_them(recipe: ModuleType, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["spam", "ham"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["hello"], "label": [1]}, features=features)
    for split in ("train", "validation", "test"):
        rows.to_parquet(tmp_path / f"{split}.parquet")
    corpus = recipe.hub_corpus(str(tmp_path), "text", "label")
    assert corpus.labels == ["spam", "ham"]
    assert corpus.splits["val"] == [("hello", 1)]


def test_a_dataset_without_the_columns_is_refused_with_those_it_has(recipe: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.csv").write_text("words,topic\n" + 20 * "a,b\n")
    with pytest.raises(DataError, match=r"has no label, text. Its columns: topic, words"):
        recipe.hub_corpus(str(tmp_path), "text", "label")
    with pytest.raises(DataError, match=r"recipe\.dataset=.*nowhere cannot be loaded"):
        recipe.hub_corpus(str(tmp_path / "nowhere"), "text", "label")


def test_pieces_are_put_together_again_for_the_report(recipe: ModuleType) -> None:
    preprocessor = recipe.build(vocab_size=800, width=16).preprocessor
    assert preprocessor.decode(preprocessor("Plays music, in a terminal")["input_ids"]) == "plays music, in a terminal"


def test_a_logistic_regression_does_better_than_the_encoder_did(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    spec: Any = importlib.util.spec_from_file_location("text_classification_baseline", FOLDER / "baseline.py")
    baseline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(baseline)
    corpus = recipe.debian_corpus()
    quickest = {"tfidf__sublinear_tf": True, "tfidf__min_df": 2, "classifier__C": 3.0}  # of the grid, not the best
    pipeline = baseline.fitted(corpus, quickest)
    for split, (accuracy, f1) in {"val": (0.714, 0.659), "test": (0.652, 0.639)}.items():  # the README's best figures
        found = baseline.scores(corpus, split, pipeline)
        assert (found[0] > accuracy, found[1] > f1) == (True, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_best_logistic_regression_scores_as_the_readme_states() -> None:
    command = [sys.executable, "-B", "baseline.py"]
    done = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True)
    found = re.findall(r"accuracy (\S+)  macro f1 (\S+)", done.stdout)[1:]  # not those of training
    row = " | ".join(f"{float(score):.3f}" for scores in found for score in scores)
    table = (FOLDER / "README.md").read_text(encoding="utf-8").replace("*", "")
    assert f"| TF-IDF, logistic regression | {row} |" in table

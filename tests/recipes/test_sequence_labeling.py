"""The recipe of Persian entities: sentences, pieces, overrides, and that a run learns and goes on exactly."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hezar_train import Hook, Trainer
from hezar_train.errors import DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

pytest.importorskip("faker")

FOLDER = Path(__file__).parents[2] / "recipes" / "sequence_labeling"
SETS = ("names", "templates", "held_out")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def corpus(recipe: ModuleType):  # type: ignore[no-untyped-def]
    return recipe.made_corpus(800, 200, 0.1, seed=0)


def _entities(recipe: ModuleType, sentences: list, kind: str) -> set[str]:
    found = set()
    for words, numbers in sentences:
        labels = [recipe.LABELS[number] for number in numbers]
        for first in [number for number, label in enumerate(labels) if label == f"B-{kind}"]:
            last = first + 1
            while last < len(labels) and labels[last] == f"I-{kind}":
                last += 1
            found.add(" ".join(words[first:last]))
    return found


@pytest.mark.parametrize("kind", ["PER", "LOC", "ORG"])
def test_names_that_are_held_out_are_never_trained_on(recipe: ModuleType, corpus, kind: str) -> None:  # type: ignore[no-untyped-def]
    trained = _entities(recipe, corpus.train, kind)
    for name in ("names", "held_out"):
        held_out = _entities(recipe, corpus.evaluation[name], kind)
        assert len(held_out) > 15
        assert not held_out & trained
    assert _entities(recipe, corpus.evaluation["templates"], kind) & trained


def test_templates_that_are_held_out_are_never_trained_on(recipe: ModuleType) -> None:
    trained, held_out = recipe.templates()
    assert (len(trained), len(held_out)) == (75, 16)
    assert not set(trained) & set(held_out)


def test_a_template_is_filled_and_labelled_word_by_word(recipe: ModuleType) -> None:
    fill = recipe.lists(held_out=False)
    words, labels = recipe.filled("به|از {street} و_بعد {day} رفت .", fill, random.Random(1))
    assert [recipe.LABELS[label] for label in labels[:3]] == ["O", "B-LOC", "I-LOC"]
    assert words[0] in {"به", "از"}
    assert words[1] in fill["way"]
    assert words[-5:-3] == ["و", "بعد"]
    assert words[-3] in fill["day"]
    assert set(labels[-5:]) == {0}


def test_noise_puts_other_words_in_place_of_a_templates_own_and_leaves_the_rest(recipe: ModuleType) -> None:
    fill = recipe.lists(held_out=False)
    words, labels = recipe.filled("دیروز {org} تعطیل شد .", fill, random.Random(1), word_noise=1.0)
    assert not {"دیروز", "تعطیل", "شد"} & set(words)
    assert words[-1] == "."
    assert (labels[0], labels[1], labels[-1]) == (0, recipe.LABELS.index("B-ORG"), 0)


def test_the_sentences_are_a_function_of_the_seed_in_every_process(recipe: ModuleType) -> None:
    code = "import recipe, json; print(json.dumps(recipe.made_corpus(20, 5, 0.2, 7)))"
    command = [sys.executable, "-B", "-c", code]
    other = subprocess.run(command, check=True, cwd=FOLDER, capture_output=True, text=True).stdout
    here = recipe.made_corpus(20, 5, 0.2, 7)
    assert json.loads(other) == json.loads(json.dumps(here))
    assert recipe.made_corpus(20, 5, 0.2, 8).train != here.train


def test_a_words_label_stands_at_its_first_piece(recipe: ModuleType, corpus) -> None:  # type: ignore[no-untyped-def]
    read = recipe.Preprocessor.trained_on(corpus.train, 300, 64)
    words, labels = ["شرکت", "پتروشیمی", "اصفهان"], [0, 5, 6]
    sample = read(words, labels)
    assert len(sample["input_ids"]) == len(sample["labels"]) == len(sample["attention_mask"]) > 3
    assert [label for label in sample["labels"] if label != -100] == labels
    assert sample["labels"][0] == 0
    pieces = [read([word])["input_ids"] for word in words]
    assert sample["input_ids"] == [piece for word in pieces for piece in word]


def test_arabic_letters_other_digits_marks_and_an_empty_text_are_read(recipe: ModuleType, corpus) -> None:  # type: ignore[no-untyped-def]
    assert recipe.words_of("كتابِ علي، «می‌خواهم» 25٢؟") == ["کتابِ", "علی", "،", "«", "می‌خواهم", "»", "۲۵۲", "؟"]
    read = recipe.Preprocessor.trained_on(corpus.train, 300, 64)
    assert read("علي")["input_ids"] == read("علی")["input_ids"]
    assert len(read("")["input_ids"]) == 1


def test_labels_of_pieces_become_entities(recipe: ModuleType, corpus) -> None:  # type: ignore[no-untyped-def]
    read = recipe.Preprocessor.trained_on(corpus.train, 300, 64)
    text = "مریم رضایی از اصفهان آمد."
    numbers = read(text, list(range(6)))["labels"]

    def found(*labels: str) -> list[tuple[str, str]]:
        predicted = ["B-ORG" if number == -100 else labels[number] for number in numbers]
        return read.entities(text, [*predicted, "B-PER"])  # what is said of padding does not count

    assert found("B-PER", "I-PER", "O", "B-LOC", "O", "O") == [("مریم رضایی", "PER"), ("اصفهان", "LOC")]
    assert found("B-PER", "B-PER", "O", "O", "O", "O") == [("مریم", "PER"), ("رضایی", "PER")]
    # One that begins with I, or changes its kind, is an entity all the same.
    assert found("I-PER", "I-LOC", "O", "I-LOC", "O", "O") == [("مریم", "PER"), ("رضایی", "LOC"), ("اصفهان", "LOC")]


def test_padding_does_not_change_what_the_tagger_says(recipe: ModuleType) -> None:
    built = recipe.build(num_train=50, num_eval=2, vocab_size=200, width=16, num_layers=1)
    samples = [built.preprocessor(text) for text in ("علی آمد", "مریم دیروز از اصفهان به تهران رفت و برنگشت")]
    model = built.model.eval()
    alone, together = model(**built.data_collator(samples[:1])), model(**built.data_collator(samples))
    torch.testing.assert_close(together[:1, : alone.shape[1]], alone)


def test_a_run_learns_to_find_names_and_finds_them_in_a_text_of_ones_own(tmp_path: Path) -> None:
    options = [
        "recipe.num_train=1200", "recipe.num_eval=100", "recipe.width=64", "recipe.num_layers=1", "recipe.dropout=0",
        "recipe.piece_dropout=0", "recipe.word_noise=0", "num_epochs=3", "batch_size=16", f"output_dir={tmp_path}/run",
    ]  # fmt: skip
    metrics = build_trainer(load_recipe(FOLDER, options)).train().metrics
    assert all(metrics[f"evaluation.{name}.f1"] > 0.3 for name in SETS)
    run = open_run(load_run(tmp_path / "run"))
    found = run.predict(["علی", "مریم رضایی در اصفهان زندگی می‌کند."])  # of unequal lengths, in one batch
    assert ("اصفهان", "LOC") in found[1]
    assert all(name == "علی" for name, _ in found[0])
    assert run.trainer.predict(run.sets["held_out"])[0][0] in range(7)  # samples with labels are answered so


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


def _write_towns(folder: Path, labels_column: str = "ner_tags") -> None:
    folder.mkdir()
    rows = [{"tokens": ["from", "Rome", "to", "Bonn"], labels_column: ["O", "B-LOC", "O", "B-LOC"]}] * 6
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _of_the_hub(folder: Path, *overrides: str) -> Trainer:
    return build_trainer(load_recipe(FOLDER, [*overrides, f"output_dir={folder}", "max_steps=2"]))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_towns(tmp_path / "towns")
    upload(towns="dataset")
    metrics = _of_the_hub(tmp_path / "run", "recipe.dataset=tester/towns").train().metrics
    assert {"evaluation.held_out.f1", "evaluation.test.f1"} <= metrics.keys()
    assert json.loads((tmp_path / "run" / "best.json").read_text())["metric"] == "evaluation.held_out.f1"


def test_weights_of_the_hub_are_trained_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _tiny_bert(pytest.importorskip("transformers"), tmp_path / "bert")
    upload(bert="model")
    trainer = _of_the_hub(tmp_path / "run", "recipe.model=tester/bert")
    assert {f"evaluation.{name}.f1" for name in SETS} <= trainer.train().metrics.keys()
    assert type(trainer.model).__name__ == "BertForTokenClassification"


def test_a_dataset_and_weights_of_the_hub_take_their_places(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_towns(tmp_path / "towns", "tags")
    _tiny_bert(pytest.importorskip("transformers"), tmp_path / "bert")
    upload(towns="dataset", bert="model")
    names = ("recipe.dataset=tester/towns", "recipe.model=tester/bert", "recipe.labels_column=tags")
    trainer = _of_the_hub(tmp_path / "run", *names, "batch_size=3")
    assert trainer.train_dataset[0]["labels"] == [-100, 1, 0, 1, 0, -100, -100]
    assert trainer.train().num_samples == 6
    assert (tmp_path / "run" / "checkpoints" / "00000002" / "preprocessor" / "tokenizer_config.json").exists()
    found = open_run(load_run(tmp_path / "run")).predict(["from Rome to Bonn"])[0]
    assert {kind for _, kind in found} <= {"LOC"}
    assert {name for name, _ in found} <= {"from", "Rome", "to", "Bonn"}


def test_words_of_ones_own_are_read_as_a_text_is_and_what_is_neither_is_refused(recipe: ModuleType) -> None:
    preprocessor = recipe.build(num_train=50, num_eval=2).preprocessor
    assert recipe.read(["علی", "آمد"], preprocessor) == recipe.read("علی آمد", preprocessor)
    for given in ({"words": ["علی"]}, ["علی", 5], Path("bad.png")):
        with pytest.raises(DataError, match=r"a text is expected\. Put texts into a \.txt file, a line each"):
            recipe.read(given, preprocessor)


def _tiny_bert(transformers: ModuleType, folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "from", "rome", "to", "bo", "##nn"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    transformers.BertModel(config).save_pretrained(folder)


def test_labels_that_a_dataset_has_as_numbers_keep_the_names_it_gives_them(recipe: ModuleType, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tags = datasets.ClassLabel(names=["O", "B-PER", "B-LOC"])
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(tags)})
    rows = datasets.Dataset.from_dict({"tokens": [["to", "Rome"]], "ner_tags": [[0, 2]]}, features=features)
    for split in ("train", "test"):
        rows.to_parquet(tmp_path / f"{split}.parquet")
    corpus = recipe.hub_corpus(str(tmp_path), "tokens", "ner_tags")
    assert corpus.labels == ["O", "B-PER", "B-LOC"]
    assert corpus.evaluation == {"held_out": [(["to", "Rome"], [0, 2])]}


def test_a_dataset_without_the_columns_is_refused_with_those_it_has(recipe: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("words,tags\na,b\n")
    with pytest.raises(DataError, match=r"has no ner_tags, tokens. Its columns: tags, words"):
        recipe.hub_corpus(str(tmp_path), "tokens", "ner_tags")


def test_pieces_are_put_together_again_for_the_report(recipe: ModuleType) -> None:
    preprocessor = recipe.build(num_train=100, num_eval=5).preprocessor
    assert preprocessor.decode(preprocessor("مریم در اصفهان است")["input_ids"]) == "مریم در اصفهان است"

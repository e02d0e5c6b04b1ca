"""The summarising recipe: its pairs, its network that copies, and that a run learns and goes on exactly."""

from __future__ import annotations

import lzma
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe
from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

pytest.importorskip("transformers")

FOLDER = Path(__file__).parents[2] / "recipes" / "text_generation"
INDEX = """\
Package: first
Description-md5: 0
Description-en: compare numbers of any kind
 This program can compare numbers of any kind, be they large or small, and
 tells which of them is the largest.
 .
 A second paragraph is left out.

Package: first-doc
Description-en: compare numbers of any kind (manual)
 This program can compare numbers of any kind, be they large or small, and
 tells which of them is the largest.

Package: other
Description-en: wonderful inventions nobody mentioned
 The first line of this text has not a single word in common with the summary,
 which therefore could be written by nobody who reads it.
"""
CATALOGUE = """\
msgid ""
msgstr ""
"Language: fa\\n"

#: menu.py:3
msgid "Open"
msgstr "باز کردن"

#, fuzzy
msgid "Close"
msgstr "شاید"

msgid "Say \\"no\\""
msgstr ""
"بگو\\n"
"«نه»"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d پرونده"

msgid "Untranslated"
msgstr ""
"""


@pytest.fixture(scope="module")
def recipe() -> Any:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def network(recipe: Any) -> Any:
    torch.manual_seed(0)
    return recipe.CopyingNet(50, 16, 0.0).eval()


def _table(path: Path, count: int = 60) -> str:
    words = ["باز", "بسته", "روشن", "خاموش", "بلند", "کوتاه"]
    rows = [f"{number} {words[number % 6]} {number % 7}\t{words[number % 6]}" for number in range(count)]
    path.write_text("\n".join(rows), encoding="utf-8")
    return str(path)


def test_the_bundled_pairs_are_split_by_family_in_the_same_way_every_time(recipe: Any) -> None:
    train, held_out = recipe.split(recipe.read_pairs())
    assert (len(train), len(held_out)) == (7405, 595)
    assert not {source[:60] for source, _ in train} & {source[:60] for source, _ in held_out}
    assert (train, held_out) == recipe.split(recipe.read_pairs())


def test_debians_index_is_read_without_repeats_and_inventions(recipe: Any) -> None:
    assert list(recipe.descriptions(INDEX)) == [
        (
            "This program can compare numbers of any kind, be they large or small, and tells which of them is the "
            "largest.",
            "compare numbers of any kind",
        )
    ]


def test_pairs_may_come_from_a_table_or_a_compressed_index(recipe: Any, tmp_path: Path) -> None:
    assert recipe.read_pairs(_table(tmp_path / "pairs.tsv"))[1] == ("1 بسته 1", "بسته")
    many = "\n".join(INDEX.replace("any kind", f"kind {number}") for number in range(70))
    (tmp_path / "Translation-en.xz").write_bytes(lzma.compress(many.encode()))
    assert len(recipe.read_pairs(str(tmp_path / "Translation-en.xz"))) == 70


def test_translations_are_read_from_a_catalogue_but_for_doubtful_and_plural_ones(recipe: Any) -> None:
    assert list(recipe.translations(CATALOGUE)) == [("Open", "باز کردن"), ('Say "no"', "بگو\n«نه»")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a\tb\nno tab\n", "line 2 of .* has no tab"),
        ("a\tb\n", "1 pairs in 1 files; expected at least 50"),
        (None, "0 pairs in 0 files"),
    ],
)
def test_a_file_without_pairs_is_refused(recipe: Any, tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "pairs.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=words):
        recipe.build(data=str(path))


def test_the_tokenizer_writes_any_script_and_ends_texts(recipe: Any) -> None:
    tokenizer = recipe.train_tokenizer([("one text", "تنها")] * 3, 300)
    ids = tokenizer("سلام 世界")["input_ids"]
    assert ids[-1] == recipe.END_ID
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["سلام 世界"]


def test_what_may_be_written_are_probabilities_that_include_words_copied_from_the_source(network: Any) -> None:
    source, mask = torch.tensor([[7, 8, 9]]), torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        losses = [float(network(source, mask, torch.tensor([[label]]))["loss"]) for label in range(50)]
    assert torch.tensor(losses).neg().exp().sum() == pytest.approx(1.0, abs=1e-5)
    assert max(losses[7:10]) < min(losses[:7] + losses[10:])


def test_padding_changes_neither_the_loss_nor_what_is_written(network: Any) -> None:
    source, labels = torch.tensor([[7, 8, 9], [5, 6, 0]]), torch.tensor([[7, 9, 2], [6, 2, -100]])
    mask = (source != 0).long()
    together = network(source, mask, labels)["loss"]
    first = network(source[:1], mask[:1], labels[:1])["loss"]
    second = network(source[1:, :2], mask[1:, :2], labels[1:, :2])["loss"]
    assert torch.allclose(together, (3 * first + 2 * second) / 5)
    written = network.generate(source, mask, max_new_tokens=6)
    assert written[1].tolist()[:4] == network.generate(source[1:, :2], mask[1:, :2], max_new_tokens=6)[0].tolist()[:4]


def test_a_text_that_has_ended_is_padded_while_others_go_on_and_all_stop_when_none_does(
    recipe: Any, network: Any
) -> None:
    goes_on, ends = [7, 8, 9], [recipe.END_ID] * 3  # a fresh network copies most of the time
    mask = torch.ones(2, 3, dtype=torch.long)
    written = network.generate(torch.tensor([goes_on, ends]), mask, max_new_tokens=4).tolist()
    assert set(written[0]) <= set(goes_on)
    assert written[1] == [recipe.END_ID, *[recipe.PAD_ID] * 3]
    assert network.generate(torch.tensor([ends, ends]), mask, max_new_tokens=4).shape == (2, 1)


def test_the_network_learns_to_copy_the_word_that_matters(recipe: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = recipe.build(data=_table(tmp_path / "pairs.tsv", 120), vocab_size=320, width=48, dropout=0.0)
    config = TrainerConfig(
        tmp_path / "run", "text_generation", batch_size=32, num_epochs=30, optimizer="adamw", learning_rate=0.01,
        lr_scheduler="one_cycle", lr_scheduling_steps=1, save_enabled=False, do_evaluate=False, trackers=[],
        metrics=["rouge", "chrf"], generation_kwargs={"max_new_tokens": 8},
    )  # fmt: skip
    trainer = built.make_trainer(config)
    assert trainer.evaluate()["rougeL"] < 0.3
    trainer.train()
    assert trainer.evaluate()["rougeL"] > 0.9
    assert trainer.predict([recipe.read("444 روشن 3", built.preprocessor)]) == ["روشن"]


def _write_pairs(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for part in ("train", "validation"):
        rows = datasets.Dataset.from_dict({"en": ["open the door"] * 4, "fa": ["در را باز کن"] * 4})
        rows.to_parquet(str(folder / f"{part}.parquet"))


def _write_tiny_t5(folder: Path, recipe: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = recipe.train_tokenizer([("open the door", "در را باز کن")] * 3, 300)
    tokenizer.save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=recipe.PAD_ID,
        eos_token_id=recipe.END_ID, decoder_start_token_id=recipe.PAD_ID,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)


def test_a_pretrained_model_gets_its_prefix_before_every_text(recipe: Any, tmp_path: Path) -> None:
    _write_pairs(tmp_path / "dataset")
    _write_tiny_t5(tmp_path / "tiny", recipe)
    built = recipe.build(
        data=f"hub:{tmp_path / 'dataset'}:en:fa", pretrained=str(tmp_path / "tiny"), prefix="translate: ", num_pairs=3
    )
    assert (len(built.train_dataset), len(built.eval_dataset)) == (3, 3)
    own = recipe.read("open the door", built.preprocessor)
    assert own["input_ids"] == built.train_dataset[0]["input_ids"]
    assert built.preprocessor.decode(own["input_ids"], skip_special_tokens=True) == "translate: open the door"


def _of_the_hub(folder: Path, *overrides: str) -> Trainer:
    few = ("max_steps=2", "max_eval_batches=1", f"output_dir={folder}")
    return build_trainer(load_recipe(FOLDER, [*overrides, *few]))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_pairs(tmp_path / "pairs")
    upload(pairs="dataset")
    assert "evaluation.rougeL" in _of_the_hub(tmp_path / "run", "recipe.data=hub:tester/pairs:en:fa").train().metrics


def test_weights_of_the_hub_are_trained_with_one_override(recipe: Any, upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_tiny_t5(tmp_path / "tiny", recipe)
    upload(tiny="model")
    assert "evaluation.rougeL" in _of_the_hub(tmp_path / "run", "recipe.pretrained=tester/tiny").train().metrics


def test_a_command_trains_a_model_of_the_hub_on_a_dataset_of_the_hub(
    recipe: Any,
    upload: Upload,  # noqa: F811
    tmp_path: Path,
) -> None:
    _write_pairs(tmp_path / "pairs")
    _write_tiny_t5(tmp_path / "tiny", recipe)
    upload(pairs="dataset", tiny="model")
    overrides = ["recipe.data=hub:tester/pairs:en:fa", "recipe.pretrained=tester/tiny", "max_steps=1"]
    command = [sys.executable, "-m", "hezar_train", "train", str(FOLDER), *overrides, f"output_dir={tmp_path}/run"]
    subprocess.run(command, check=True, timeout=240)
    assert (tmp_path / "run" / "best.json").exists()


def test_pairs_of_one_family_leave_nothing_to_test_on_and_are_refused(recipe: Any) -> None:
    with pytest.raises(DataError, match="all 60 pairs are of one family"):
        recipe.split([("the same beginning " * 4 + str(number), "end") for number in range(60)])


def test_a_dataset_without_named_columns_is_refused(recipe: Any) -> None:
    with pytest.raises(DataError, match="expected hub:OWNER/NAME:SOURCE_COLUMN:TARGET_COLUMN"):
        recipe.build(data="hub:owner/name")


class BreakOff(Hook):
    """Die in the middle of a run."""

    def after_step(self) -> None:
        if self.trainer.state.global_step == 3:
            raise RuntimeError("killed")


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    smoke = FOLDER / "smoke.yaml"
    unbroken = build_trainer(load_recipe(smoke, ["output_dir=a"]))
    unbroken.train()
    broken = build_trainer(load_recipe(smoke, ["output_dir=b"]))
    broken.register_hooks([BreakOff()])
    with pytest.raises(RuntimeError, match="killed"):
        broken.train()
    resumed = build_trainer(load_recipe(smoke, ["output_dir=b"]))
    assert resumed.state.global_step == 2
    resumed.train()
    weights = resumed.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in unbroken.model.state_dict().items())
    kept = (tmp_path / "b" / "checkpoints" / "00000006" / "preprocessor" / "tokenizer.json").read_bytes()
    assert kept == (tmp_path / "a" / "checkpoints" / "00000006" / "preprocessor" / "tokenizer.json").read_bytes()


def test_summaries_that_need_no_learning_score_as_the_readme_states() -> None:
    command = [sys.executable, "-B", "baseline.py"]
    done = subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, text=True)
    table = (FOLDER / "README.md").read_text(encoding="utf-8").replace("*", "")
    found = [re.findall(r"\d\.\d{3}", line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    for rouge1, rouge2, rouge_l, _, chrf in found:
        assert f" | {rouge1} | {rouge2} | {rouge_l} | {chrf} |\n" in table

"""The recipe of docstrings: its data and split, what it counts, what it writes, its overrides; it goes on exactly."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from hezar_train import Hook, Trainer
from hezar_train.errors import DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

FOLDER = Path(__file__).parents[2] / "recipes" / "language_modeling"
LARGEST_SAMPLE_BYTES = 250_000
SMALL = {"vocab_size": 300, "context": 32, "width": 16, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def documents(recipe: ModuleType) -> list[dict[str, str]]:
    return list(map(json.loads, lzma.decompress(recipe.SAMPLE_FILE.read_bytes()).decode().splitlines()))


@pytest.fixture(scope="module")
def short(documents: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the beginnings of some documents."""
    path = tmp_path_factory.mktemp("data") / "short.jsonl"
    path.write_text("".join(json.dumps({**one, "text": one["text"][:500]}) + "\n" for one in documents[:60]))
    return path


def test_the_sample_is_small_and_every_split_has_modules(recipe: ModuleType) -> None:
    assert recipe.SAMPLE_FILE.stat().st_size < LARGEST_SAMPLE_BYTES
    splits = recipe.file_splits(recipe.SAMPLE_FILE)
    assert {split: len(texts) for split, texts in splits.items()} == {"train": 126, "val": 14, "test": 12}


def test_no_module_and_no_paragraph_is_in_two_splits(recipe: ModuleType, documents: list[dict[str, str]]) -> None:
    assert len({one["name"] for one in documents}) == len(documents)
    paragraphs: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for one in documents:
        paragraphs[recipe.split_of(one["name"])].update(one["text"].split("\n\n"))
    assert sum(map(len, paragraphs.values())) == len(set.union(*paragraphs.values()))


@pytest.mark.parametrize("count", [9, 15, 16, 17, 100])
def test_every_token_but_the_first_is_predicted_once(recipe: ModuleType, count: int) -> None:
    found = recipe.blocks(list(range(count)), context=8)
    assert {len(one["input_ids"]) for one in found} == {len(one["labels"]) for one in found} == {8}
    predicted = [label for one in found for label in one["labels"][1:] if label != -100]
    assert predicted == list(range(1, count))


def test_too_short_a_text_and_a_file_that_is_no_text_are_refused(recipe: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 tokens do not fill a block: expected more than context=8"):
        recipe.blocks([1] * 8, context=8)
    (tmp_path / "picture.txt").write_bytes(b"\xff\xd8")
    with pytest.raises(DataError, match=r"picture.txt' cannot be read"):
        recipe.file_splits(tmp_path / "picture.txt")


def test_the_tokenizer_gives_back_any_text(recipe: ModuleType, short: Path) -> None:
    tokenizer = recipe.build(str(short), **SMALL).preprocessor
    text = "def f(x):\n    return 'سلام 🙂'\t\n"
    assert tokenizer.batch_decode([tokenizer(text)["input_ids"]]) == [text]
    counts = recipe.bytes_of_tokens(tokenizer.get_vocab(), end=0)
    assert sum(counts[token] for token in tokenizer(text)["input_ids"]) == len(text.encode())
    assert counts[recipe.END_ID] == 1


def test_no_place_sees_what_is_behind_it(recipe: ModuleType, short: Path) -> None:
    model = recipe.build(str(short), **SMALL).model.eval()
    tokens = torch.arange(20).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 12:] = 7
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_bits_per_byte_are_those_of_the_whole_held_out_text(recipe: ModuleType, short: Path, tmp_path: Path) -> None:
    trainer = _trainer(short, tmp_path / "run", "eval_batch_size=7")
    metrics = trainer.evaluate("val")
    nats, num_tokens = 0.0, 0
    for one in trainer.splits.data["val"]:
        ids, labels = torch.tensor([one["input_ids"]]), torch.tensor([one["labels"]])
        logits = trainer.model.eval()(ids).detach()[0, :-1]
        nats += float(functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
        num_tokens += int((labels[0, 1:] != -100).sum())
    num_bytes = sum(len(text.encode()) + 1 for text in recipe.file_splits(short)["val"])
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=1e-5)


def test_a_text_goes_on_in_the_same_way_alone_and_beside_a_longer_one(recipe: ModuleType, short: Path) -> None:
    built = recipe.build(str(short), **SMALL)
    samples = [recipe.read(text, built.preprocessor) for text in ("def", "class Queue of many letters")]
    alone, together = (
        built.model.eval().generate(**built.data_collator(given), max_new_tokens=5, do_sample=False)
        for given in (samples[:1], samples)
    )
    assert together[0, -5:].equal(alone[0, -5:])
    assert len(recipe.read("word " * 99, built.preprocessor)["input_ids"]) == 32
    assert recipe.read("", built.preprocessor)["input_ids"] == [recipe.END_ID]


def test_only_the_likeliest_tokens_are_drawn(recipe: ModuleType) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9])
    assert {int(recipe.sampled(logits, top_k=2)) for _ in range(50)} == {1, 3}


def test_a_run_learns_and_continues_texts_in_the_same_way_each_time(short: Path, tmp_path: Path) -> None:
    trainer = _trainer(short, tmp_path / "run", "max_steps=", "num_epochs=4", "learning_rate=0.02", "save_steps=")
    before = trainer.evaluate("val")["bits_per_byte"]
    trainer.train()
    assert trainer.evaluate("val")["bits_per_byte"] < 0.75 * before
    first, again = (open_run(load_run(tmp_path / "run")).predict(["def open(", "class"]) for _ in range(2))
    assert first == again
    assert all(isinstance(text, str) and text for text in first)


class BreakOff(Hook):
    """End a run as a kill would, behind a step that was not saved."""

    def after_step(self) -> None:
        if self.trainer.state.global_step == 7:
            raise KeyboardInterrupt


def test_a_run_that_is_killed_half_way_goes_on_to_the_same_weights(short: Path, tmp_path: Path) -> None:
    unbroken, broken = _trainer(short, tmp_path / "a"), _trainer(short, tmp_path / "b")
    unbroken.train()
    broken.register_hooks([BreakOff()])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = _trainer(short, tmp_path / "b")
    assert resumed.state.global_step == 5
    resumed.train()
    for name, weight in unbroken.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_a_text_of_ones_own_is_trained_on_with_its_end_held_out(recipe: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("".join(f"line {number}\n" for number in range(400)))
    splits = recipe.file_splits(tmp_path / "own.txt")
    assert splits["train"][0].startswith("line 0\n")
    assert splits["test"][0].endswith("line 399\n")
    assert "".join(text for texts in splits.values() for text in texts) == (tmp_path / "own.txt").read_text()
    assert _trainer(tmp_path / "own.txt", tmp_path / "run", "max_steps=2").train().num_samples > 0


def test_a_hub_dataset_and_a_pretrained_model_take_their_places(
    recipe: ModuleType, short: Path, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    _tiny_gpt2(recipe.build(str(short), **SMALL).preprocessor, tmp_path / "gpt2")
    (tmp_path / "lines").mkdir()
    rows = [{"body": f"number {number} is a number"} for number in range(60)]
    (tmp_path / "lines" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = (f"recipe.dataset={tmp_path}/lines", "recipe.text_column=body", f"recipe.model={tmp_path}/gpt2")
    trainer = _trainer(short, tmp_path / "run", "max_steps=2", "batch_size=4", *options)
    assert type(trainer.model).__name__ == "GPT2LMHeadModel"
    assert trainer.train().metrics["evaluation.bits_per_byte"] > 0
    assert len(open_run(load_run(tmp_path / "run")).predict(["number", "a number of numbers is"])) == 2
    with pytest.raises(DataError, match=r"has no text. Its columns: body"):
        recipe.hub_splits(str(tmp_path / "lines"), "text")


def _of_the_hub(folder: Path, *overrides: str) -> Trainer:
    few = ("max_steps=2", "max_eval_batches=1", f"output_dir={folder}")
    return build_trainer(load_recipe(FOLDER, [*overrides, *few]))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(
    documents: list[dict[str, str]],
    upload: Upload,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "docs").mkdir()
    rows = [json.dumps({"text": one["text"][:3000]}) for one in documents[:40]]
    (tmp_path / "docs" / "train.jsonl").write_text("\n".join(rows))
    upload(docs="dataset")
    metrics = _of_the_hub(tmp_path / "run", "recipe.dataset=tester/docs").train().metrics
    assert {"evaluation.bits_per_byte", "evaluation.perplexity"} <= metrics.keys()


@pytest.mark.parametrize("is_of_bytes", [True, False])
def test_weights_of_the_hub_are_trained_with_one_override_whatever_their_tokens_are(
    recipe: ModuleType,
    short: Path,
    upload: Upload,  # noqa: F811
    tmp_path: Path,
    is_of_bytes: bool,
) -> None:
    tokenizer = recipe.build(str(short), **SMALL).preprocessor if is_of_bytes else _letters(recipe, short)
    _tiny_gpt2(tokenizer, tmp_path / "gpt2")
    upload(gpt2="model")
    trainer = _of_the_hub(tmp_path / "run", "recipe.model=tester/gpt2")
    assert len(trainer.splits.data["train"][0]["input_ids"]) == 64  # the places that the model has, not 256
    metrics = trainer.train().metrics
    assert "evaluation.perplexity" in metrics
    assert ("evaluation.bits_per_byte" in metrics) == is_of_bytes


def _letters(recipe: ModuleType, data: Path) -> Any:
    """A tokenizer whose tokens are letters, as SentencePiece's are."""
    from tokenizers import SentencePieceBPETokenizer

    tokenizer = SentencePieceBPETokenizer(unk_token="<unk>")
    texts = recipe.file_splits(data)["train"]
    tokenizer.train_from_iterator(texts, 300, special_tokens=["<|endoftext|>", "<unk>"], show_progress=False)
    return recipe.Tokenizer(tokenizer, context=64)


def test_tokens_that_are_letters_have_no_bytes_to_count(recipe: ModuleType) -> None:
    assert recipe.bytes_of_tokens({"<s>": 0, "▁کتاب": 1}, end=0) is None


def test_the_sample_is_made_of_public_headers_and_docstrings_without_repeats(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_sample = _script("make_sample", recipe, monkeypatch)
    monkeypatch.setattr(make_sample, "FEWEST_LETTERS", 1)
    (tmp_path / "a.py").write_text('"""About a."""\n@wraps\ndef f(x=1):\n  """Do.\n\n  It all."""\ndef _g():\n  "No."')
    (tmp_path / "b.py").write_text('class C(D):\n    """Do it.\n\n    It, all!"""\n    def f(self): pass\n')
    (tmp_path / "_c.py").write_text('"""Private."""')
    assert dict(make_sample.documents(tmp_path)) == {
        "a": '"""About a."""\n\ndef f(x=1):\n    """Do.\n\n    It all.\n    """',
        "b": 'class C(D):\n    """Do it.',
    }


def test_the_n_gram_model_to_compare_with_gives_every_byte_a_share_of_one(
    recipe: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = _script("baseline", recipe, monkeypatch)
    model = baseline.ByteModel(b"abracadabra", longest=3)
    for context in (b"", b"ab", b"xra", b"zzz"):
        assert sum(model.probability(context, byte) for byte in range(256)) == pytest.approx(1)
    assert model.probability(b"abr", ord("a")) > 0.7


def _script(name: str, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script that lies beside the recipe."""
    monkeypatch.setitem(sys.modules, "recipe", recipe)
    spec: Any = importlib.util.spec_from_file_location(f"language_modeling_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trainer(data: Path, run: Path, *overrides: str) -> Trainer:
    small = [f"recipe.{name}={value}" for name, value in SMALL.items()]
    return build_trainer(
        load_recipe(FOLDER / "smoke.yaml", [*small, f"recipe.data={data}", f"output_dir={run}", *overrides])
    )


def _tiny_gpt2(tokenizer: Any, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(str(folder))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(fast), n_positions=64, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)

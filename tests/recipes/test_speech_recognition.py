"""The speech recipe: who says what, how sound becomes features, and that a run learns and goes on exactly."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hezar_train import Hook, Trainer, TrainerConfig
from hezar_train.errors import ConfigError, DataError
from hezar_train.recipes import build_trainer, import_recipe, load_recipe, load_run, open_run

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.hub.conftest import hub  # noqa: F401
from tests.recipes.test_loading import Upload, upload  # noqa: F401

espeakng_loader = pytest.importorskip("espeakng_loader")
soundfile = pytest.importorskip("soundfile")

FOLDER = Path(__file__).parents[2] / "recipes" / "speech_recognition"
RATE = 8000


@pytest.fixture(scope="module")
def recipe() -> Any:
    return import_recipe(FOLDER / "recipe.py")


@pytest.fixture(scope="module")
def speak() -> Any:
    """The program that speaks, as a module."""
    spec = importlib.util.spec_from_file_location("speech_recognition_speak", FOLDER / "speak.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small(recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A build of few utterances."""
    return recipe.build(num_utterances=48, width=16, num_blocks=2, cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("language", ["fa", "en"])
def test_neither_a_held_out_text_nor_a_new_voice_is_trained_on(speak: Any, language: str) -> None:
    parts = speak.planned(speak.LANGUAGES[language], 2400)
    texts = {name: {text for text, *_ in part} for name, part in parts.items()}
    voices = {name: {voice for _, voice, *_ in part} for name, part in parts.items()}
    assert texts["held_out"] == texts["new_voices"]
    assert not texts["train"] & texts["held_out"]
    assert voices["held_out"] <= voices["train"]
    assert not voices["train"] & voices["new_voices"]
    assert min(len(part) for part in parts.values()) > 100


def test_the_voices_say_the_same_samples_in_every_process_and_are_then_read_from_the_cache(
    recipe: Any, tmp_path: Path
) -> None:
    first, second = (recipe.spoken("fa", 24, RATE, tmp_path / name) for name in ("a", "b"))
    (cached,) = (tmp_path / "a").iterdir()
    assert cached.read_bytes() == next((tmp_path / "b").iterdir()).read_bytes()
    assert [text for text, _ in first["held_out"]] == [text for text, _ in second["new_voices"]]
    pairs = [(known, new) for (_, known), (_, new) in zip(first["held_out"], first["new_voices"], strict=True)]
    assert not any(torch.equal(known[:RATE], new[:RATE]) for known, new in pairs), "another voice sounds differently"
    assert all(len(sound) > RATE // 5 and sound.abs().max() > 0.1 for part in first.values() for _, sound in part)
    written = cached.stat().st_mtime_ns
    recipe.spoken("fa", 24, RATE, tmp_path / "a")
    assert cached.stat().st_mtime_ns == written


@pytest.mark.parametrize(("voice", "words"), [("fa+f2", "has an echo"), ("fa+nobody", "no voice 'fa\\+nobody'")])
def test_a_voice_that_is_not_there_or_never_the_same_is_refused(speak: Any, voice: str, words: str) -> None:
    speaker = speak.Speaker(espeakng_loader.get_library_path(), espeakng_loader.get_data_path())
    with pytest.raises(SystemExit, match=words):
        speaker.speak("هفت", voice, 150, 50)


def test_a_program_that_fails_is_told_of_and_leaves_no_cache(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "speak.py"
    broken.write_text("raise SystemExit('eSpeak has no voice')")
    monkeypatch.setattr(recipe, "SPEAK", broken)
    with pytest.raises(DataError, match="eSpeak could not speak: eSpeak has no voice"):
        recipe.spoken("fa", 4, RATE, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_resampled_tone_keeps_its_pitch_and_loudness(recipe: Any) -> None:
    tone = (2 * math.pi * 440 * torch.arange(22050) / 22050).sin()
    found = recipe.resampled(tone, 22050, RATE)
    assert torch.allclose(found, (2 * math.pi * 440 * torch.arange(RATE) / RATE).sin(), atol=1e-3)


def test_a_tone_is_loudest_in_its_own_band(recipe: Any) -> None:
    log_mel = recipe.LogMel("ab")
    loudest = [
        int(log_mel.features((2 * math.pi * hertz * torch.arange(RATE) / RATE).sin())[10].argmax())
        for hertz in (200, 800, 3000)
    ]
    assert loudest == sorted(set(loudest))


def test_a_sample_reads_the_same_alone_and_padded_in_a_batch(small: Any) -> None:
    model = small.model.eval()
    samples = [small.train_dataset[number] for number in range(8)]

    def logits(chosen: list[Any]) -> torch.Tensor:
        batch = small.data_collator(chosen)
        return model(batch["input_features"], batch["num_frames"])

    together = logits(samples)
    for number, sample in enumerate(samples):
        alone = logits([sample])[:, 0]
        assert torch.allclose(together[: len(alone), number], alone, atol=1e-5)


def test_texts_come_back_from_their_ids_and_what_was_saved_builds_the_same(
    recipe: Any, small: Any, tmp_path: Path
) -> None:
    log_mel = small.preprocessor
    text = "شماره نه نه را بگیر"
    ids = log_mel.encode(text)
    log_mel.save(str(tmp_path))
    again = recipe.LogMel(**json.loads((tmp_path / "log_mel.json").read_text(encoding="utf-8")))
    assert again.batch_decode(torch.tensor([[*ids, 0, 0]])) == [text]


def test_an_unknown_language_is_refused_with_those_there_are(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe.language='da' is not known. Known are: en, fa."):
        recipe.build(language="da", cache_dir=str(tmp_path))


def _write_prompts(folder: Path) -> None:
    lines = ["; prompts", "beep: [a tone]", "gone: Not there.", "year: Press 19.", "agent: Press 1, please."]
    lines += [f"digits/{number}: Number {number}" for number in range(9)]
    (folder / "digits").mkdir(parents=True)
    (folder / "transcripts.txt").write_text("\n".join(lines))
    for name in ("beep", "year", "agent", *(f"digits/{number}" for number in range(9))):
        soundfile.write(folder / f"{name}.wav", torch.randn(RATE // 2).numpy() / 10, RATE)


def test_recorded_prompts_are_read_with_their_words(recipe: Any, tmp_path: Path) -> None:
    _write_prompts(tmp_path)
    found = dict(recipe.recorded(tmp_path, RATE))
    assert list(found)[:2] == ["press one please", "number zero"]
    assert len(found) == 10
    built = recipe.build(data=str(tmp_path))
    assert (len(built.train_dataset), len(built.eval_dataset["held_out"])) == (9, 1)


def test_prompts_are_read_where_debian_installs_them(recipe: Any, tmp_path: Path) -> None:
    share = tmp_path / "usr" / "share"
    folder, documents = share / "asterisk" / "sounds" / "en_US_f_Allison", share / "doc" / "asterisk-core-sounds-en"
    _write_prompts(folder)
    documents.mkdir(parents=True)
    content = (folder / "transcripts.txt").read_bytes()
    (folder / "transcripts.txt").unlink()
    (documents / "core-sounds-en.txt.gz").write_bytes(gzip.compress(content))
    texts = [text for text, _ in recipe.recorded(folder, RATE)]
    assert texts[:2] == ["press one please", "number zero"]
    assert len(texts) == 10
    options = [f"recipe.data={folder}", "num_epochs=40", "max_steps=1", f"output_dir={tmp_path}/run"]
    assert "evaluation.held_out.wer" in build_trainer(load_recipe(FOLDER, options)).train().metrics


def test_prompts_that_say_the_same_are_held_out_together(recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "transcripts.txt").write_text("\n".join(f"{number}: Word {number % 20 // 2}" for number in range(40)))
    for number in range(40):
        soundfile.write(tmp_path / f"{number}.wav", torch.randn(800).numpy() / 10, RATE)
    built = recipe.build(data=str(tmp_path))
    assert (len(built.train_dataset), len(built.eval_dataset["held_out"])) == (36, 4)
    kept = [built.eval_dataset["held_out"][number]["labels"] for number in range(4)]
    assert all(labels == kept[0] for labels in kept)


def test_a_file_without_sound_is_refused(recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "no.wav").write_text("text")
    soundfile.write(tmp_path / "short.wav", torch.zeros(9).numpy(), RATE)
    for name, words in (
        ("no.wav", r"cannot read the sound: .*no\.wav"),
        ("short.wav", r"short\.wav is too short: 9 samples"),
    ):
        with pytest.raises(DataError, match=words):
            recipe.read_sound(tmp_path / name, RATE)


def test_a_folder_without_transcripts_is_refused(recipe: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no transcripts: expected .*transcripts.txt, with lines 'name: text'"):
        recipe.build(data=str(tmp_path))


def _write_voices(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sound = io.BytesIO()
    soundfile.write(sound, torch.randn(RATE).numpy() / 10, 2 * RATE, format="WAV")
    row = {"audio": {"bytes": sound.getvalue(), "path": None}, "sentence": " یک "}
    for split in ("train", "validation"):
        rows = datasets.Dataset.from_list([row] * 3)
        rows.cast_column("audio", datasets.Audio(decode=False)).to_parquet(str(folder / f"{split}.parquet"))


def test_a_dataset_of_the_hub_is_trained_on_with_one_override(upload: Upload, tmp_path: Path) -> None:  # noqa: F811
    _write_voices(tmp_path / "voices")
    upload(voices="dataset")
    options = ["recipe.data=hub:tester/voices", "max_steps=2", f"output_dir={tmp_path}/run"]
    assert "evaluation.held_out.wer" in build_trainer(load_recipe(FOLDER, options)).train().metrics


def test_weights_of_the_hub_are_trained_with_one_override(
    small: Any,
    upload: Upload,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_tiny_wav2vec2(tmp_path / "tiny", small.preprocessor.symbols)
    upload(tiny="model")
    trainer = build_trainer(load_recipe(FOLDER / "smoke.yaml", ["recipe.pretrained=tester/tiny", "max_steps=1"]))
    assert "evaluation.held_out.wer" in trainer.train().metrics
    assert type(trainer.model).__name__ == "Wav2Vec2ForCTC"


def test_a_dataset_of_the_hub_is_read_without_torchcodec(recipe: Any, tmp_path: Path) -> None:
    _write_voices(tmp_path / "dataset")
    built = recipe.build(data=f"hub:{tmp_path / 'dataset'}")
    assert built.preprocessor.batch_decode(torch.tensor([built.train_dataset[0]["labels"]])) == ["یک"]
    assert built.eval_dataset["held_out"][0]["num_frames"] == pytest.approx(0.5 / 0.0125, abs=3)


def test_a_pretrained_ctc_model_is_trained_on_the_same_utterances(recipe: Any, small: Any, tmp_path: Path) -> None:
    _write_tiny_wav2vec2(tmp_path / "tiny", small.preprocessor.symbols)
    built = recipe.build(pretrained=str(tmp_path / "tiny"), num_utterances=16, cache_dir=str(tmp_path / "cache"))
    config = TrainerConfig(tmp_path / "run", "speech_recognition", batch_size=4, max_steps=1, metrics=["wer"])
    assert built.train_dataset[0].keys() == {"input_values", "attention_mask", "labels"}
    trainer = built.make_trainer(config)
    result = trainer.train()
    assert math.isfinite(result.metrics["evaluation.new_voices.loss"])
    assert "evaluation.new_voices.wer" in result.metrics
    soundfile.write(tmp_path / "mine.wav", torch.randn(RATE).numpy() / 10, RATE)
    assert [type(text) for text in trainer.predict([recipe.read(tmp_path / "mine.wav", built.preprocessor)])] == [str]


def _write_tiny_wav2vec2(folder: Path, symbols: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    vocabulary = {"<pad>": 0, "|": 1, **{one: number for number, one in enumerate(symbols.strip(), start=2)}}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(
        folder / "vocab.json", unk_token="<pad>", bos_token="<pad>", eos_token="<pad>"
    )
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=16000, return_attention_mask=True)
    transformers.Wav2Vec2Processor(extractor, tokenizer).save_pretrained(folder)
    sizes = {"conv_dim": (8, 8), "conv_kernel": (10, 8), "conv_stride": (10, 16), "num_feat_extract_layers": 2}
    config = transformers.Wav2Vec2Config(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, pad_token_id=0, **sizes,
    )  # fmt: skip
    transformers.Wav2Vec2ForCTC(config).save_pretrained(folder)


class BreakOff(Hook):
    """Die in the middle of a run."""

    def after_step(self) -> None:
        if self.trainer.state.global_step == 3:
            raise RuntimeError("killed")


def test_a_run_reads_a_sound_file_of_ones_own(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build_trainer(load_recipe(FOLDER / "smoke.yaml", ["save_steps=0"])).train()
    for rate in (RATE, 44100):
        soundfile.write(tmp_path / f"{rate}.wav", torch.randn(rate, 2).numpy() / 10, rate)
    found = open_run(load_run("runs/speech_recognition-smoke")).predict([tmp_path / "8000.wav", tmp_path / "44100.wav"])
    assert [type(text) for text in found] == [str, str]


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


def test_the_network_learns_four_utterances_by_heart(recipe: Any, small: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kept = [small.eval_dataset["held_out"][number] for number in range(4)]
    config = TrainerConfig(
        tmp_path, "speech_recognition", batch_size=4, num_epochs=100, optimizer="adamw", learning_rate=0.01,
        lr_scheduler="one_cycle", lr_scheduling_steps=1, save_enabled=False, do_evaluate=False, metrics=["wer"],
        trackers=[],
    )  # fmt: skip
    model = recipe.SpeechNet(len(small.preprocessor.symbols), 48, 3, 0.0)
    trainer = Trainer(config, model, kept, kept, small.data_collator, small.preprocessor)
    assert trainer.evaluate()["wer"] == 1
    trainer.train()
    assert trainer.evaluate()["wer"] < 0.2

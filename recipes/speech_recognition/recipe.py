"""Speech becomes text: log-mel features in torch, and a small network of convolutions with CTC.

Owns how sound becomes features and where utterances come from: voices of eSpeak NG, which speak.py lets say digits and
commands, recorded prompts, or a dataset of the Hub. An utterance is a text and its samples, from -1 to 1.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hezar_train import Recipe
from hezar_train.data import SpeechRecognitionDataCollator
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices, suggestion
from hezar_train.launch import asked_for, load_splits, path_of, with_held_out

Utterance = tuple[str, torch.Tensor]
Sets = dict[str, list[Utterance]]
"""What to train on ("train"), and what to evaluate on."""

SPEAK = Path(__file__).with_name("speak.py")
LANGUAGES = ("en", "fa")
FULL_SCALE = 32767
HUB_PREFIX = "hub:"
TEXT_COLUMNS = ("sentence", "text", "transcription", "transcript")
DEBIAN_TRANSCRIPTS = "../../../doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
SPELLED_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LONGEST_PROMPT_SECONDS = 10.0
SPLIT_SEED = 0  # not the run's: every run is tested on the same prompts

TELEPHONE_RATE = 8000
NUM_BANDS = 40
WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.0125
LOWEST_HERTZ, HIGHEST_HERTZ = 60.0, 3800.0
QUIETEST = 1e-6
HEARING_RANGE = 11.5  # of logarithms of power: 50 dB
KERNEL_FRAMES = 11
BLANK = 0


class LogMel:
    """The preprocessor: sound to log-mel features, text to character ids, and ids back to text."""

    padding_value = 0.0
    pad_token_id = BLANK

    def __init__(self, symbols: str, rate: int = TELEPHONE_RATE) -> None:
        self.symbols, self.rate = symbols, rate
        self._ids = {symbol: number for number, symbol in enumerate(symbols, start=BLANK + 1)}
        self._window = torch.hann_window(round(WINDOW_SECONDS * rate))
        self._num_fft = 1 << (len(self._window) - 1).bit_length()
        self._bank = mel_bank(rate, self._num_fft)

    def features(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the power in each band, frame by frame."""
        samples = functional.pad(samples / samples.std().clamp_min(QUIETEST), (0, self._num_fft))
        hop = round(HOP_SECONDS * self.rate)
        spectrum = torch.stft(
            samples, self._num_fft, hop, len(self._window), self._window, center=False, return_complex=True
        )
        return (self._bank @ spectrum.abs().square()).clamp_min(QUIETEST).log().T.contiguous()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text's characters; those without one are left out."""
        return [self._ids[symbol] for symbol in text if symbol in self._ids]

    def batch_decode(self, rows: torch.Tensor, **_: Any) -> list[str]:
        """Return the texts of rows of ids."""
        return ["".join(self.symbols[number - 1] for number in row if number != BLANK) for row in rows.tolist()]

    def save(self, folder: str) -> None:
        """Write what it takes to build this again: `LogMel(**json)`."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        settings = {"symbols": self.symbols, "rate": self.rate}
        (target / "log_mel.json").write_text(json.dumps(settings, ensure_ascii=False), encoding="utf-8")


class SpeechDataset:
    """Features and labels of utterances; in training, a hiss and gaps are laid over what is fetched."""

    def __init__(self, log_mel: LogMel, utterances: list[Utterance], *, is_disturbed: bool = False) -> None:
        self._is_disturbed = is_disturbed
        self._features = [log_mel.features(samples) for _, samples in utterances]
        self._labels = [log_mel.encode(text) for text, _ in utterances]

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        features = self._features[number]
        heard = sample_of(disturbed(features) if self._is_disturbed else features)
        return {**heard, "labels": self._labels[number]}


class Block(nn.Module):
    """A convolution over time, one over channels, and a way past both; what is padding stays zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(width, width, KERNEL_FRAMES, padding=KERNEL_FRAMES // 2, groups=width)
        self.over_channels = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, frames: torch.Tensor, is_own: torch.Tensor) -> torch.Tensor:
        mixed = self.over_channels(self.over_time(frames.transpose(1, 2)).transpose(1, 2))
        return (frames + self.norm(mixed).relu()) * is_own


class SpeechNet(nn.Module):
    """Convolutions alone; the first halves the frame rate. A sample reads the same in any batch, however padded."""

    loss_func_name = "ctc"  # the trainer then takes logits with time first and reads them as a CTC decoder does

    def __init__(self, num_symbols: int, width: int, num_blocks: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv1d(NUM_BANDS, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, num_symbols + 1)

    def forward(self, input_features: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        frames = self.first(input_features.transpose(1, 2)).transpose(1, 2)
        places = torch.arange(frames.shape[1], device=frames.device)
        is_own = (places < half(num_frames).unsqueeze(1)).unsqueeze(-1)
        frames = frames.relu() * is_own
        for block in self.blocks:
            frames = block(frames, is_own)
        logits = self.classifier(self.dropout(frames))
        silence = torch.zeros_like(logits[0, 0])
        silence[BLANK] = 1
        return torch.where(is_own, logits, silence).transpose(0, 1)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor, num_frames: torch.Tensor) -> torch.Tensor:
        is_symbol = labels > BLANK
        targets = labels.masked_fill(~is_symbol, BLANK + 1)  # any symbol will do behind the end
        return functional.ctc_loss(
            logits.log_softmax(-1), targets, half(num_frames), is_symbol.sum(1), blank=BLANK, zero_infinity=True
        )


def build(
    language: str = "fa",
    data: str | None = None,
    pretrained: str | None = None,
    num_utterances: int = 2400,
    width: int = 160,
    num_blocks: int = 6,
    dropout: float = 0.2,
    cache_dir: str = "runs/.cache",
) -> Recipe:
    """Let voices speak (or read what was recorded), and build the network that shall understand them."""
    processor = None if pretrained is None else _processor(pretrained)
    rate = TELEPHONE_RATE if processor is None else int(processor.feature_extractor.sampling_rate)
    if data is None:
        sets = spoken(language, num_utterances, rate, Path(cache_dir))
    elif data.startswith(HUB_PREFIX):
        sets = _of_the_hub(data.removeprefix(HUB_PREFIX), rate)
    else:
        sets = _split(list(recorded(Path(data), rate)))
    if pretrained is not None:
        return _finetuned(pretrained, processor, sets)
    symbols = sorted({symbol for utterances in sets.values() for text, _ in utterances for symbol in text})
    log_mel = LogMel("".join(symbols), rate)
    return Recipe(
        model=SpeechNet(len(symbols), width, num_blocks, dropout),
        train_dataset=SpeechDataset(log_mel, sets.pop("train"), is_disturbed=True),
        eval_dataset={name: SpeechDataset(log_mel, utterances) for name, utterances in sets.items()},
        data_collator=SpeechRecognitionDataCollator(log_mel, log_mel),
        preprocessor=log_mel,
    )


def read(given: str | os.PathLike[str], preprocessor: Any) -> dict[str, Any]:
    """Return the sample of a sound file, for predictions."""
    if isinstance(preprocessor, LogMel):
        return sample_of(preprocessor.features(read_sound(path_of(given), preprocessor.rate)))
    return _heard_by(preprocessor, read_sound(path_of(given), preprocessor.feature_extractor.sampling_rate))


def spoken(language: str, num_utterances: int, rate: int, cache_dir: Path) -> Sets:
    """Return what the voices say, from the cache if they said it before."""
    if language not in LANGUAGES:
        raise ConfigError(
            f"recipe.language={language!r} is not known. Known are: {choices(LANGUAGES)}."
            f"{suggestion(str(language), LANGUAGES)}"
        )
    asked = (language, num_utterances, rate, SPEAK.read_text(encoding="utf-8"))
    path = cache_dir / f"speech-{hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}.npz"
    if not path.exists():
        names, texts, sounds = zip(*_synthesised(language, num_utterances, rate), strict=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.stem}-{os.getpid()}.npz")
        lengths = [len(sound) for sound in sounds]
        np.savez(temporary, names=names, texts=texts, lengths=lengths, samples=np.concatenate(sounds))
        temporary.replace(path)  # several processes may do this at once, with the same result
    with np.load(path, allow_pickle=False) as cached:
        samples = torch.from_numpy(cached["samples"]).float() / FULL_SCALE
        sounds = samples.split(cached["lengths"].tolist())
        sets: Sets = {}
        for name, text, sound in zip(cached["names"].tolist(), cached["texts"].tolist(), sounds, strict=True):
            sets.setdefault(name, []).append((text, sound))
        return sets


def _synthesised(language: str, num_utterances: int, rate: int) -> Iterator[tuple[str, str, np.ndarray]]:
    """Let a fresh process speak; yield set, text and samples of 16 bits at the rate asked for."""
    if importlib.util.find_spec("espeakng_loader") is None:
        raise MissingDependencyError("espeakng-loader", "recipes", "the recipe 'speech_recognition'")
    command = [sys.executable, str(SPEAK), language, str(num_utterances)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"eSpeak could not speak: {done.stderr.decode(errors='replace').strip()}")
    stream = io.BytesIO(done.stdout)
    while header := stream.readline():
        name, text, own_rate, count = json.loads(header)
        samples = np.frombuffer(stream.read(2 * count), np.int16).astype(np.float32) / FULL_SCALE
        sound = resampled(torch.from_numpy(samples), own_rate, rate)
        yield name, text, (FULL_SCALE * sound).round().to(torch.int16).numpy()


def recorded(folder: Path, rate: int) -> Iterator[Utterance]:
    """Yield the prompts of a folder; `transcripts.txt` in it (or where Debian has it) has lines like `name: text`."""
    places = (folder / "transcripts.txt", folder / DEBIAN_TRANSCRIPTS)
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise DataError(
            f"recipe.data={str(folder)!r} has no transcripts: expected {places[0]}, with lines 'name: text'"
        )
    content = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    for line in content.decode("utf-8").splitlines():
        name, _, text = line.partition(": ")
        path, words = folder / f"{name}.wav", _plain_words(text)
        if words is None or line.startswith(";") or not path.is_file():
            continue
        samples = read_sound(path, rate)
        if len(samples) < LONGEST_PROMPT_SECONDS * rate:
            yield words, samples


def _plain_words(text: str) -> str | None:
    """Return a transcript as it is spoken, None for one that is no speech or has numbers of several digits."""
    if "[" in text or re.search(r"\d\d", text):
        return None
    spelled = re.sub(r"\d", lambda digit: f" {SPELLED_DIGITS[int(digit[0])]} ", text.lower())
    return " ".join(re.sub(r"[^\w' ]", " ", spelled).split()) or None


def _split(utterances: list[Utterance]) -> Sets:
    """Hold out a tenth of the distinct texts."""
    distinct = sorted({text for text, _ in utterances})
    if len(distinct) < 2:
        raise DataError(f"recipe.data has {len(distinct)} prompts with a text and a sound file; expected at least 2")
    held_out = set(random.Random(SPLIT_SEED).sample(distinct, max(1, len(distinct) // 10)))
    sets: Sets = {"train": [], "held_out": []}
    for text, samples in utterances:
        sets["held_out" if text in held_out else "train"].append((text, samples))
    return sets


def _of_the_hub(name: str, rate: int) -> Sets:
    """Read a speech dataset of the Hub, `OWNER/NAME` or `OWNER/NAME:CONFIG`, or a folder of such files."""
    override = f"recipe.data={HUB_PREFIX}{name}"
    loaded = with_held_out(override, load_splits(override, name))
    columns = loaded["train"].column_names
    text_column = next((column for column in TEXT_COLUMNS if column in columns), None)
    if text_column is None or "audio" not in columns:
        raise DataError(
            f"{override} has the columns {choices(columns)}; expected audio and one of {choices(TEXT_COLUMNS)}"
        )

    def utterances(split: str) -> list[Utterance]:
        from datasets import Audio

        rows = loaded[split].cast_column("audio", Audio(decode=False))  # soundfile decodes, not torchcodec
        heard = ((row[text_column], row["audio"]["bytes"] or row["audio"]["path"]) for row in rows)
        return [(text.strip(), read_sound(sound, rate)) for text, sound in heard]

    return {split: utterances(split) for split in ("train", "held_out")}


def _processor(pretrained: str) -> Any:
    try:
        from transformers import AutoProcessor
    except ImportError as error:
        raise MissingDependencyError("transformers", "recipes", f"recipe.pretrained={pretrained}") from error
    with asked_for(f"recipe.pretrained={pretrained}"):
        return AutoProcessor.from_pretrained(pretrained)


def _finetuned(pretrained: str, processor: Any, sets: Sets) -> Recipe:
    """Build a pretrained CTC model of transformers, such as Wav2Vec2, over the same utterances."""
    from transformers import AutoModelForCTC

    def samples(name: str) -> list[dict[str, Any]]:
        heard = ((_heard_by(processor, sound), processor.tokenizer(text).input_ids) for text, sound in sets[name])
        return [{**sample, "labels": labels} for sample, labels in heard]

    with asked_for(f"recipe.pretrained={pretrained}"):
        model = AutoModelForCTC.from_pretrained(pretrained, ctc_loss_reduction="mean", ctc_zero_infinity=True)
    return Recipe(
        model=model,
        train_dataset=samples("train"),
        eval_dataset={name: samples(name) for name in sets if name != "train"},
        data_collator=SpeechRecognitionDataCollator(processor.feature_extractor, processor.tokenizer),
        preprocessor=processor,
    )


def _heard_by(processor: Any, sound: torch.Tensor) -> dict[str, Any]:
    extractor = processor.feature_extractor
    heard: Mapping[str, Any] = extractor(sound.numpy(), sampling_rate=extractor.sampling_rate)
    return {key: value[0] for key, value in heard.items()}  # with a mask, if the model wants one


def read_sound(source: str | os.PathLike[str] | bytes, rate: int) -> torch.Tensor:
    """Read a sound file of any usual kind as one channel at a rate."""
    try:
        import soundfile
    except ImportError as error:
        raise MissingDependencyError("soundfile", "recipes", "reading sound files") from error
    try:
        samples, own_rate = soundfile.read(io.BytesIO(source) if isinstance(source, bytes) else source, dtype="float32")
    except soundfile.SoundFileError as error:
        raise DataError(f"cannot read the sound: {error}") from error
    if len(samples) < WINDOW_SECONDS * own_rate:
        name = "a sound of the dataset" if isinstance(source, bytes) else source
        raise DataError(f"{name} is too short: {len(samples)} samples at {own_rate} Hz")
    samples = torch.from_numpy(samples)
    return resampled(samples.mean(1) if samples.ndim > 1 else samples, own_rate, rate)


def resampled(samples: torch.Tensor, old_rate: int, rate: int) -> torch.Tensor:
    """Return the same sound at another rate: frequencies that do not fit are cut off, new ones are zero."""
    if old_rate == rate:
        return samples
    count = round(len(samples) * rate / old_rate)
    spectrum = torch.fft.rfft(samples)[: count // 2 + 1]
    return torch.fft.irfft(spectrum, count) * (count / len(samples))


def mel_bank(rate: int, num_fft: int) -> torch.Tensor:
    """Return triangles over the spectrum, evenly spaced on the mel scale, one row a band."""

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    corners = torch.linspace(mel(LOWEST_HERTZ), mel(HIGHEST_HERTZ), NUM_BANDS + 2)
    left, middle, right = (700 * (10 ** (corners / 2595) - 1)).unfold(0, 3, 1).T.unsqueeze(-1)
    hertz = torch.linspace(0, rate / 2, num_fft // 2 + 1)
    return torch.minimum((hertz - left) / (middle - left), (right - hertz) / (right - middle)).clamp_min(0)


def normalised(features: torch.Tensor) -> torch.Tensor:
    """Return features without what is too soft to matter, and without what the line adds to all frames alike."""
    heard = features.clamp_min(features.max() - HEARING_RANGE)
    return (heard - heard.mean(0)) / heard.std().clamp_min(QUIETEST)


def sample_of(features: torch.Tensor) -> dict[str, Any]:
    """Return what the network takes of one utterance."""
    return {"input_features": normalised(features), "num_frames": len(features)}


def disturbed(features: torch.Tensor) -> torch.Tensor:
    """Put a hiss over features, and leave out some bands and some frames; a function of torch's generator."""
    hiss = features.max() - HEARING_RANGE * (0.3 + torch.rand(1))
    features = torch.logaddexp(features, hiss + torch.randn_like(features))
    for dimension, longest in ((0, 10), (1, 6)):
        length = int(torch.randint(longest + 1, ()))
        first = int(torch.randint(features.shape[dimension] - length + 1, ()))
        features.narrow(dimension, first, length).fill_(features.mean())
    return features


def half(lengths: torch.Tensor) -> torch.Tensor:
    """Return how many frames a convolution of stride two leaves."""
    return (lengths + 1) // 2

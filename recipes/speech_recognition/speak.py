"""Who says what, and eSpeak NG, which says it:  python speak.py LANGUAGE NUM_UTTERANCES > utterances

Each utterance is a line of JSON, [set, text, rate, number of samples], and its samples of 16 bits. This is a program of
its own because what eSpeak says depends on all that it said before in the same process. A fresh one gives the same
samples each time, bit by bit, but for voices with an echo, which are refused.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

Job = tuple[str, str, int, int]
"""What to say, in which voice, how fast (words a minute) and how high (0 to 100)."""

SPLIT_SEED = 0  # not the run's: every run is tested on the same utterances
SPEEDS, PITCHES = (120, 140, 160, 180, 200), (30, 40, 50, 60, 70)
VARIANTS = ("m1", "m3", "m4", "m5", "m6", "m8", "adam", "max", "f1", "Andrea", "Annie", "grandma")
NEW_VARIANTS = ("m7", "belinda")

SYNCHRONOUS, NO_EXIT, UTF8 = 2, 0x8000, 1  # of espeak-ng/speak_lib.h, as the next two
SPEED, PITCH = 1, 3

Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Language:
    """What can be said: digits, and commands with a choice in each slot; `#` is a short number."""

    digits: Sequence[str]
    commands: Sequence[Sequence[Sequence[str]]]
    voice: str
    spellings: Mapping[str, str]
    """How eSpeak must see a word to say it as it is meant."""


PERSIAN = Language(
    digits=["صفر", "یک", "دو", "سه", "چهار", "پنج", "شش", "هفت", "هشت", "نه"],
    commands=(
        (("چراغ", "کولر", "بخاری", "پنکه"), ("", "اتاق", "آشپزخانه", "سالن"), ("را روشن کن", "را خاموش کن")),
        (("در", "پنجره", "پرده"), ("", "اتاق", "آشپزخانه", "سالن"), ("را باز کن", "را ببند")),
        (("صدا", "نور"), ("را زیاد کن", "را کم کن")),
        (("تلویزیون", "رادیو"), ("را روشن کن", "را خاموش کن", "را قطع کن")),
        (("شماره",), ("#",), ("را بگیر",)),
        (("کانال",), ("#",)),
    ),
    voice="fa",
    spellings={"نه": "نُه"},  # unmarked it is read as "na", no
)
ENGLISH = Language(
    digits=["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    commands=(
        (("turn on", "turn off"), ("the lamp", "the fan", "the heater"), ("", "in the kitchen", "in the bedroom")),
        (("open", "close"), ("the door", "the window", "the curtain"), ("", "in the kitchen", "in the bedroom")),
        (("volume", "brightness"), ("up", "down")),
        (("turn on", "turn off", "mute"), ("the radio", "the television")),
        (("call",), ("#",)),
        (("channel",), ("#",)),
    ),
    voice="en-us",
    spellings={},
)
LANGUAGES = {"en": ENGLISH, "fa": PERSIAN}


def planned(language: Language, num_utterances: int) -> dict[str, list[Job]]:
    """Return who shall say what, by set: a tenth of the texts is not trained on, nor is anything by the new voices."""
    rng = random.Random(SPLIT_SEED)
    texts = list(_texts(language, rng, num_utterances))
    distinct = sorted(set(texts))
    held_out = set(rng.sample(distinct, max(1, len(distinct) // 10)))
    voices = [language.voice, *(f"{language.voice}+{variant}" for variant in VARIANTS)]
    new_voices = [f"{language.voice}+{variant}" for variant in NEW_VARIANTS]

    def said(voices: Sequence[str], *, is_held_out: bool) -> list[Job]:
        chosen = (text for text in texts if (text in held_out) is is_held_out)
        return [(text, rng.choice(voices), rng.choice(SPEEDS), rng.choice(PITCHES)) for text in chosen]

    return {
        "train": said(voices, is_held_out=False),
        "held_out": said(voices, is_held_out=True),
        "new_voices": said(new_voices, is_held_out=True),
    }


def _texts(language: Language, rng: random.Random, count: int) -> Iterator[str]:
    """Yield as many texts, commands and digits by turns."""

    def number(shortest: int, longest: int) -> str:
        return " ".join(rng.choices(language.digits, k=rng.randint(shortest, longest)))

    for turn in range(count):
        if turn % 2:
            yield number(1, 5)
        else:
            words = [rng.choice(slot) for slot in rng.choice(language.commands)]
            yield " ".join(number(1, 4) if word == "#" else word for word in words if word)


class Speaker:
    """The library, opened; it has one voice at a time."""

    def __init__(self, library: str, data: str) -> None:
        self._engine, self._heard = ctypes.CDLL(library), bytearray()
        self._variants = Path(data) / "voices" / "!v"
        self.rate = self._engine.espeak_Initialize(SYNCHRONOUS, 0, data.encode(), NO_EXIT)
        self._callback = Callback(self._hear)  # kept, or it would be freed while the library calls it
        self._engine.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, voice: str, speed: int, pitch: int) -> bytes:
        """Return the samples of a text."""
        self._choose(voice)
        self._engine.espeak_SetParameter(SPEED, speed, 0)
        self._engine.espeak_SetParameter(PITCH, pitch, 0)
        self._heard.clear()
        spoken = text.encode()
        self._engine.espeak_Synth(spoken, len(spoken) + 1, 0, 1, 0, UTF8, None, None)
        return bytes(self._heard)

    def _choose(self, voice: str) -> None:
        _, plus, variant = voice.partition("+")
        is_there = not plus or (self._variants / variant).is_file()  # eSpeak itself takes an unknown one for none
        if not is_there or self._engine.espeak_SetVoiceByName(voice.encode()) != 0:
            sys.exit(f"eSpeak has no voice {voice!r}")
        if plus and "\necho" in (self._variants / variant).read_text(encoding="utf-8"):
            sys.exit(f"the voice {voice!r} has an echo, which makes it sound differently every time: choose another")

    def _hear(self, samples: Any, count: int, _: Any) -> int:
        if samples and count > 0:
            self._heard += ctypes.string_at(samples, 2 * count)
        return 0


def write_all(speaker: Speaker, language: Language, num_utterances: int, target: BinaryIO) -> None:
    """Say everything that is planned, in its order."""
    for name, jobs in planned(language, num_utterances).items():
        for text, *manner in jobs:
            spelled = " ".join(language.spellings.get(word, word) for word in text.split(" "))
            samples = speaker.speak(spelled, *manner)
            header = json.dumps([name, text, speaker.rate, len(samples) // 2])
            target.write(header.encode() + b"\n" + samples)


if __name__ == "__main__":
    import espeakng_loader

    language_name, count = sys.argv[1:]
    engine = Speaker(espeakng_loader.get_library_path(), espeakng_loader.get_data_path())
    write_all(engine, LANGUAGES[language_name], int(count), sys.stdout.buffer)

"""Persian licence plates: rendered pictures of them, and a small convolutional and recurrent network with CTC."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import ctc_loss

from hezar_train import Recipe
from hezar_train.data import CharLevelOCRDataCollator
from hezar_train.errors import ConfigError, DataError, MissingDependencyError, choices, suggestion
from hezar_train.launch import asked_for, load_splits, path_of, with_held_out

try:
    from PIL import Image, ImageDraw, ImageFilter, ImageFont
except ImportError as missing:
    raise MissingDependencyError("pillow", "recipes", "the recipe 'license_plate'") from missing

DIGITS = "۰۱۲۳۴۵۶۷۸۹"
LETTERS = "ابپتثجدزژسشصطعفقکگلمنوهی"
ALPHABET = DIGITS + LETTERS
NAMES = dict(enumerate(("", *ALPHABET)))  # of the classes; the first is the blank
LENGTH = 8  # two digits, a letter, three digits, and the two digits of the province
WRITTEN_OUT = {"ا": "\ue000"}  # a plate shows the word "alef"; the fonts have it, and "Iran", as one glyph
IRAN = "\ue001"
PAPER = {"ت": 190, "ع": 190, "ک": 190, "ش": 165, "ا": 85, "پ": 60, "ث": 75, "ز": 70, "ف": 70}  # the others: white
WHITE, BLACK = 235, 25

FONTS_DIR = Path(__file__).parent / "fonts"
SPLITS = ("train", "held_out", "held_out_font")
HELD_OUT_SHARE = 10  # one text in so many is never trained on, with any font
HEIGHT, WIDTH = 32, 128
BODY = (280, 88)  # a piece of the car, twice as fine as the picture, with the plate in it
PLATE = (12, 12, 268, 76)

LEAST_GAP = 2.5
Y, X = np.mgrid[-1 : 1 : HEIGHT * 1j, -1 : 1 : WIDTH * 1j].astype(np.float32)

Field = tuple[int, int, int]  # left, right, baseline


def plate_text(rng: np.random.Generator, is_held_out: bool) -> str:
    """Draw a plate's text, from those that are held out or from those that are not; they share none."""
    while True:
        front, province = rng.integers(1, 10, size=5), int(rng.integers(10, 100))  # there is no zero but the province's
        numbers = [DIGITS[digit] for digit in (*front, *divmod(province, 10))]
        text = "".join((*numbers[:2], LETTERS[rng.integers(len(LETTERS))], *numbers[2:]))
        if (zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0) == is_held_out:
            return text


@cache
def font_of(name: str, height: int) -> ImageFont.FreeTypeFont:
    """Load a font in the size in which its digits have the height; Pillow's basic layout needs no other library."""

    def load(size: float) -> ImageFont.FreeTypeFont:
        return ImageFont.truetype(str(FONTS_DIR / f"{name}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)

    _, top, _, bottom = load(100).getbbox("۸")
    return load(100 * height / (bottom - top))


@cache
def glyph_of(symbol: str, font: str, height: int) -> tuple[Image.Image, int]:
    """Draw a symbol, cut to its ink; return it with its top as seen from the baseline."""
    kind = font_of(font, height)
    left, top, right, bottom = kind.getbbox(WRITTEN_OUT.get(symbol, symbol), anchor="ls")
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), WRITTEN_OUT.get(symbol, symbol), 255, kind, anchor="ls")
    return ink, top


def write(picture: Image.Image, symbols: str, font: str, height: int, field: Field, ink: int, off: np.ndarray) -> None:
    """Write symbols side by side into a field, smaller if it is too narrow, each `off` its place by some pixels."""
    left, right, baseline = field
    gap = 0.0
    while gap < LEAST_GAP:
        glyphs = [glyph_of(symbol, font, height) for symbol in symbols]
        gap = (right - left - sum(glyph.width for glyph, _ in glyphs)) / (len(glyphs) + 1)
        height -= 1
    place = left + gap
    for (glyph, top), (dx, dy) in zip(glyphs, off, strict=True):
        picture.paste(ink, (round(place) + int(dx), baseline + top + int(dy)), glyph)
        place += glyph.width + gap


def draw_plate(text: str, font: str, rng: np.random.Generator) -> Image.Image:
    """Draw a clean plate on a piece of car; every symbol sits a little off its place."""
    paper = PAPER.get(text[2], WHITE)
    ink = BLACK if paper > 128 else WHITE
    picture = Image.new("L", BODY, int(rng.integers(20, 230)))
    draw = ImageDraw.Draw(picture)
    draw.rounded_rectangle(PLATE, 5, fill=paper, outline=ink, width=2)
    draw.rectangle((15, 15, 36, 73), fill=int(rng.integers(50, 80)))  # the blue strip with the flag
    draw.rectangle((19, 19, 32, 28), fill=150)
    draw.line((209, 14, 209, 74), fill=ink, width=2)
    off, large, small = rng.integers(-1, 2, size=(9, 2)), int(rng.integers(28, 37)), int(rng.integers(21, 27))
    write(picture, text[:6], font, large, (38, 207, 60), ink, off[:6])
    write(picture, text[6:], font, small, (211, 266, 66), ink, off[6:8])
    write(picture, IRAN, font, 11, (211, 266, 33), ink, off[8:])
    return picture


def photograph(plate: Image.Image, rng: np.random.Generator, damage: float) -> Image.Image:
    """Turn a clean plate into a poor picture: slant, blur, few pixels, dirt, shadow, uneven light, noise."""
    left, top, right, bottom = PLATE
    corners = np.array([left, top, left, bottom, right, bottom, right, top], dtype=float)
    corners += damage * rng.uniform(-9, 9, size=8) + np.tile(rng.uniform(-3, 3, size=2), 4)
    picture = plate.transform((WIDTH, HEIGHT), Image.Transform.QUAD, corners.tolist(), Image.Resampling.BILINEAR)
    if rng.random() < 0.5 * damage:
        share = rng.uniform(0.5, 1.0)
        few = picture.resize((round(WIDTH * share), round(HEIGHT * share)), Image.Resampling.BILINEAR)
        picture = few.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    picture = picture.filter(ImageFilter.GaussianBlur(damage * rng.uniform(0, 0.9)))
    if rng.random() < 0.3 * damage:
        picture = picture.filter(ImageFilter.BoxBlur((rng.uniform(0, 1.5), 0)))  # the car moves
    pixels = np.asarray(picture, dtype=np.float32)
    pixels = with_light(with_dirt(pixels, rng, damage), rng, damage)
    pixels += rng.standard_normal(pixels.shape, dtype=np.float32) * (damage * rng.uniform(0, 16))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def with_dirt(pixels: np.ndarray, rng: np.random.Generator, damage: float) -> np.ndarray:
    """Cover parts of a picture with blots of one grey."""
    coarse = Image.fromarray(rng.standard_normal((4, 14), dtype=np.float32))
    cover = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)) - rng.uniform(0.8, 2.0)
    cover = damage * cover.clip(0, 0.8)
    return pixels * (1 - cover) + rng.uniform(40, 200) * cover


def with_light(pixels: np.ndarray, rng: np.random.Generator, damage: float) -> np.ndarray:
    """Let light fall from a side, and perhaps a shadow with a straight edge; change contrast and brightness."""
    slope_x, slope_y, contrast, brightness = damage * rng.uniform(-1, 1, size=4) * (0.35, 0.2, 0.35, 40)
    light = 1 + slope_x * X + slope_y * Y
    if rng.random() < 0.3 * damage:
        light *= np.where(X + rng.uniform(-1, 1) * Y > rng.uniform(-1, 1), 1.0, rng.uniform(0.4, 0.8))
    return (pixels * light - 128) * (1 + contrast) + 128 + brightness


class RenderedPlates:
    """Pictures of plates with their texts; each is made when it is asked for, from its number alone."""

    def __init__(self, split: str, size: int, fonts: Sequence[str], seed: int = 0, damage: float = 1.0) -> None:
        self.split, self.size, self.fonts, self.seed, self.damage = split, size, list(fonts), seed, damage

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        rng = np.random.default_rng((self.seed, SPLITS.index(self.split), index))
        text = plate_text(rng, self.split != "train")
        font = self.fonts[rng.integers(len(self.fonts))]
        return photograph(draw_plate(text, font, rng), rng, self.damage), text


class PlateProcessor:
    """Turn pictures of plates into tensors, texts into numbers and numbers into texts; a JSON file holds all of it."""

    FILE = "plate_processor.json"

    def __init__(self, height: int = HEIGHT, width: int = WIDTH, alphabet: str = ALPHABET) -> None:
        self.height, self.width, self.alphabet = height, width, alphabet

    def __call__(self, image: Any) -> dict[str, torch.Tensor]:
        """Read a picture, or a file with one, as a sample for the model: grey, of one size, mean 0, deviation 1."""
        picture = image if isinstance(image, Image.Image) else Image.open(image)
        grey = picture.convert("L").resize((self.width, self.height), Image.Resampling.BILINEAR)
        pixels = np.asarray(grey, dtype=np.float32)
        return {"pixel_values": torch.from_numpy((pixels - pixels.mean()) / (pixels.std() + 1.0)).unsqueeze(0)}

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:  # noqa: ARG002
        """Return the text of each row of ids; 0 stands for no symbol."""
        numbers = torch.as_tensor(rows).tolist()
        return ["".join(self.alphabet[number - 1] for number in row if number > 0) for row in numbers]

    def save(self, folder: str | Path) -> None:
        """Write the settings into a folder."""
        Path(folder, self.FILE).write_text(
            json.dumps(vars(self), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: str | Path) -> PlateProcessor:
        """Read the settings that a run keeps: `RUN/checkpoints/STEP/preprocessor`."""
        return cls(**json.loads(Path(folder, cls.FILE).read_text(encoding="utf-8")))


class PlateReader(nn.Module):
    """A CRNN: convolutions down to one row of 32 places, a recurrent layer in both directions over it, CTC."""

    loss_func_name = "ctc"  # says that logits come time first and that class 0 is the blank, as Hezar's models do

    def __init__(self, num_symbols: int, channels: int = 32, hidden: int = 96, dropout: float = 0.1) -> None:
        super().__init__()
        widths = (1, channels, 2 * channels, 3 * channels, 4 * channels)
        pools = ((2, 2), (2, 2), (2, 1), (4, 1))
        blocks = [
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(pool)
            )
            for (before, after), pool in zip(pairwise(widths), pools, strict=True)
        ]
        self.features = nn.Sequential(*blocks, nn.Dropout(dropout))
        self.context = nn.GRU(widths[-1], hidden, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, num_symbols + 1)

    def forward(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        columns = self.features(pixel_values).squeeze(2).permute(2, 0, 1)  # time, sample, feature
        return {"logits": self.classifier(self.context(columns)[0]).log_softmax(-1)}

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return CTC's loss; labels are padded with the blank."""
        num_places = torch.full((logits.shape[1],), logits.shape[0])
        return ctc_loss(logits, labels, num_places, (labels > 0).sum(1), zero_infinity=True)


def read(given: Any, preprocessor: Any) -> dict[str, torch.Tensor]:
    """Make a sample of a picture, or of a file with one, by this recipe's processor or by Hezar's."""
    pixels = preprocessor(given if isinstance(given, Image.Image) else str(path_of(given)))["pixel_values"]
    return {"pixel_values": pixels.reshape(pixels.shape[-3:])}  # Hezar makes a batch of one


class PlateSamples:
    """Pairs of picture and text as samples for a model, read by its processor."""

    def __init__(self, pairs: Any, processor: Any, names: Mapping[int, str]) -> None:
        self.pairs, self._processor = pairs, processor
        self._ids = {name: number for number, name in names.items()}
        # Hezar may mirror pictures, for Persian is read from the right. A plate is not: its text is then turned round.
        self._step = -1 if getattr(getattr(processor, "config", None), "mirror", False) else 1

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, text = self.pairs[index]
        return {**read(picture, self._processor), "labels": [self._ids[symbol] for symbol in text[:: self._step]]}


def rendered_sets(num_train: int, num_eval: int, held_out_font: str, seed: int, damage: float) -> dict[str, Any]:
    """Return the plates by split: to train on, with texts held out, and with texts and a font held out."""
    fonts = sorted(path.stem for path in FONTS_DIR.glob("*.ttf"))
    if held_out_font not in fonts:
        raise ConfigError(
            f"recipe.held_out_font={held_out_font!r} is not a font of this recipe. There are: {choices(fonts)}."
            f"{suggestion(held_out_font, fonts)}"
        )
    known = [font for font in fonts if font != held_out_font]
    return {
        "train": RenderedPlates("train", num_train, known, seed, damage),
        "held_out": RenderedPlates("held_out", num_eval, known, seed, damage),
        "held_out_font": RenderedPlates("held_out_font", num_eval, [held_out_font], seed, damage),
    }


class HubPlates:
    """Plates of a dataset: a picture and its text in each row; those that cannot be written are left out."""

    def __init__(self, name: str, rows: Any, symbols: Iterable[str]) -> None:
        known = set(symbols)
        if missing := {"image_path", "label"} - set(rows.column_names):
            raise DataError(f"{name} has no column {choices(missing)}. It has: {choices(rows.column_names)}.")
        self._rows = rows.filter(lambda label: known.issuperset(as_on_a_plate(label)), input_columns="label")
        if not len(self._rows):
            raise DataError(f"{name}: none of its {len(rows)} labels can be written with {''.join(sorted(known))}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Image.Image, str]:
        row = self._rows[index]
        return row["image_path"], as_on_a_plate(row["label"])


def hub_sets(name: str, symbols: Iterable[str]) -> dict[str, HubPlates]:
    """Return the plates of a Hub dataset, or of a folder that `datasets` can load: to train on, and held out."""
    override = f"recipe.dataset={name}"
    splits = with_held_out(override, load_splits(override, name))
    return {split: HubPlates(override, splits[split], symbols) for split in ("train", "held_out")}


def as_on_a_plate(label: Any) -> str:
    """Write a label with Persian digits and letters."""
    return str(label).replace("الف", "ا").translate(str.maketrans("0123456789٤٥٦كي", DIGITS + "۴۵۶کی"))


def hezar_model(name: str) -> tuple[nn.Module, Any, dict[int, str]]:
    """Build Hezar's CRNN with its image processor: untrained ("hezar"), or from the Hub or a folder."""
    if name != "hezar" and "/" not in name:
        raise ConfigError(f"recipe.model={name!r} is not known. Expected crnn, hezar, or OWNER/NAME of a Hezar model.")
    try:
        from hezar.models import CRNNImage2Text, CRNNImage2TextConfig, Model
        from hezar.preprocessors import ImageProcessor, ImageProcessorConfig
    except ImportError as error:
        raise MissingDependencyError("hezar", "hezar", f"recipe.model={name}") from error
    if name != "hezar":
        with asked_for(f"recipe.model={name}"):
            model = Model.load(name)
        if not isinstance(model, CRNNImage2Text):
            raise ConfigError(f"recipe.model={name!r} is a {type(model).__name__}; expected a CRNN of image to text")
        processor = model.preprocessor.image_processor
        model.config.reverse_output_digits = processor.config.mirror  # see PlateSamples
        return model, processor, model.config.id2label
    config = CRNNImage2TextConfig(id2label=NAMES, image_height=HEIGHT, image_width=WIDTH, map2seq_in_dim=1024)
    looks = ImageProcessorConfig(size=(WIDTH, HEIGHT), gray_scale=True, rescale=1 / 255, mean=[0.5], std=[0.25])
    return CRNNImage2Text(config), ImageProcessor(looks), NAMES


def build(
    model: str = "crnn",
    dataset: str = "rendered",
    num_train: int = 10_000,
    num_eval: int = 1_000,
    held_out_font: str = "lalezar",
    damage: float = 1.0,
    data_seed: int = 0,
    channels: int = 24,
    hidden: int = 96,
    dropout: float = 0.1,
) -> Recipe:
    """Build a network, "crnn", "hezar" or OWNER/NAME of a Hezar model, and plates, "rendered" or OWNER/NAME."""
    if model == "crnn":
        network, processor, names = PlateReader(len(ALPHABET), channels, hidden, dropout), PlateProcessor(), NAMES
    else:
        network, processor, names = hezar_model(model)
    if dataset != "rendered":
        sets = hub_sets(dataset, names.values())
    elif missing := set(ALPHABET).difference(names.values()):
        raise ConfigError(f"recipe.model={model!r} cannot write {choices(missing)}, which the rendered plates have")
    else:
        sets = rendered_sets(num_train, num_eval, held_out_font, data_seed, damage)
    samples = {split: PlateSamples(pairs, processor, names) for split, pairs in sets.items()}
    return Recipe(
        model=network,
        train_dataset=samples.pop("train"),
        eval_dataset=samples,
        data_collator=CharLevelOCRDataCollator(),
        preprocessor=processor,
    )

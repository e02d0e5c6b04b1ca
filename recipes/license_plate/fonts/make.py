"""Make the fonts of this folder from their full versions: only what a plate shows, each symbol one ready-made glyph.

Not needed to train. It shapes every symbol with HarfBuzz once, here, so that drawing a plate needs no shaping library
and gives the same pixels everywhere. The words of a plate have code points of the private area, see WORDS.

    for family in amiri cairo estedad lalezar markazi-text noto-kufi-arabic noto-sans-arabic rubik vazirmatn; do
        npm pack @fontsource/$family@5.3.0 && mkdir $family && tar xzf fontsource-$family-5.3.0.tgz -C $family
    done
    pip install fonttools uharfbuzz && python make.py .
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import uharfbuzz
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.cu2quPen import Cu2QuPen
from fontTools.pens.recordingPen import DecomposingRecordingPen
from fontTools.pens.transformPen import TransformPen
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont

WEIGHTS = {
    "amiri": 700, "cairo": 800, "estedad": 700, "lalezar": 400, "markazi-text": 700, "noto-kufi-arabic": 700,
    "noto-sans-arabic": 700, "rubik": 700, "vazirmatn": 700,
}  # fmt: skip
SYMBOLS = "۰۱۲۳۴۵۶۷۸۹ابپتثجدزژسشصطعفقکگلمنوهی"
WORDS = {0xE000: "الف", 0xE001: "ایران"}
KEPT_NAMES = {
    0: "copyright",
    1: "familyName",
    2: "styleName",
    4: "fullName",
    5: "version",
    6: "psName",
    14: "licenseInfoURL",
}


def make(source: Path, target: Path) -> None:
    """Write a font that has a glyph for each symbol and word."""
    full = TTFont(source)
    full.flavor = None
    content = io.BytesIO()
    full.save(content)
    shaper = uharfbuzz.Font(uharfbuzz.Face(content.getvalue()))
    texts = {ord(symbol): symbol for symbol in SYMBOLS} | WORDS
    glyphs, widths = {".notdef": TTGlyphPen(None).glyph()}, {".notdef": (0, 0)}
    for code, text in texts.items():
        glyphs[f"u{code:04X}"], widths[f"u{code:04X}"] = shaped(full, shaper, text)
    builder = FontBuilder(full["head"].unitsPerEm, isTTF=True)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({code: f"u{code:04X}" for code in texts})
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(widths)
    builder.setupHorizontalHeader(ascent=full["hhea"].ascent, descent=full["hhea"].descent)
    names = {key: full["name"].getDebugName(number) for number, key in KEPT_NAMES.items()}
    builder.setupNameTable({key: name for key, name in names.items() if name})
    builder.setupOS2()
    builder.setupPost(keepGlyphNames=False)
    builder.font["head"].created = builder.font["head"].modified = full["head"].created
    builder.font.recalcTimestamp = False
    builder.save(target)


def shaped(full: TTFont, shaper: uharfbuzz.Font, text: str) -> tuple[object, tuple[int, int]]:
    """Draw a shaped text as one glyph; return it with its advance."""
    buffer = uharfbuzz.Buffer()
    buffer.add_str(text)
    buffer.guess_segment_properties()
    uharfbuzz.shape(shaper, buffer)
    pen, outlines, names, place = TTGlyphPen(None), full.getGlyphSet(), full.getGlyphOrder(), 0
    for info, position in zip(buffer.glyph_infos, buffer.glyph_positions, strict=True):
        moved = (1, 0, 0, 1, place + position.x_offset, position.y_offset)
        outline = DecomposingRecordingPen(outlines)
        outlines[names[info.codepoint]].draw(outline)
        outline.replay(TransformPen(Cu2QuPen(pen, max_err=1.0), moved))
        place += position.x_advance
    return pen.glyph(), (place, 0)


if __name__ == "__main__":
    for family, weight in WEIGHTS.items():
        found = f"{family}/package/files/{family}-arabic-{weight}-normal.woff"
        make(Path(sys.argv[1]) / found, Path(__file__).parent / f"{family}.ttf")

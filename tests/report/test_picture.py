"""Which curves share a panel, how many of their points are kept, and the picture of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hezar_train.events import Row
from hezar_train.report import CURVES_FILE, curves_png
from hezar_train.report.picture import Curve, make_panels, round_ends, round_ticks, thinned, tick_words
from hezar_train.report.read import read_run
from tests.report.runs import BEGUN, HandmadeRun, finished_run


def test_training_and_every_evaluation_set_share_the_panel_of_a_quantity(tmp_path: Path) -> None:
    finished_run(tmp_path)
    panels = {panel.name: panel for panel in make_panels([read_run(tmp_path)])}
    assert list(panels)[:2] == ["loss", "cer"]
    assert panels["loss"].roles == ["train", "evaluation", "evaluation held_out_font"]
    assert panels["cer"].lines[0].curve.low
    assert not panels["mean loss since the start"].is_main


def test_lines_of_several_runs_lie_in_one_panel(tmp_path: Path) -> None:
    records = [read_run(finished_run(tmp_path / name).root) for name in ("a", "b")]
    rate = next(panel for panel in make_panels(records) if panel.name == "learning_rate")
    assert [line.run for line in rate.lines] == [0, 1]


def test_only_the_set_that_chooses_the_best_checkpoint_is_marked(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for metric, role in (
        ("evaluation.cer", "evaluation"),
        ("evaluation.held_out_font.wer", "evaluation held_out_font"),
    ):
        run.write("best.json", {"step": 400, "metric": metric, "value": 0.1})
        panels = {panel.name: panel for panel in make_panels([read_run(tmp_path)])}
        assert [line.role for line in panels["cer"].lines if line.chooses] == [role]
        assert [line.role for line in panels["loss"].lines if line.chooses] == [role]


@pytest.mark.parametrize(
    ("ticks", "words"),
    [
        ([0, 0.0005, 0.001], ["0", "0.0005", "0.001"]),
        ([0, 5e-6, 1e-5], ["0", "5e-6", "1e-5"]),
        ([-2.5e-7, 1.0], ["-2.5e-7", "1e0"]),
        ([1e5, 2.5e6], ["100000", "2500000"]),
        ([5e7, 1e8], ["5e7", "1e8"]),
        ([123456.25, 123456.5], ["123456.25", "123456.5"]),
        ([], []),
    ],
)
def test_the_numbers_of_an_axis_are_in_one_notation(ticks: list[float], words: list[str]) -> None:
    assert tick_words(ticks) == words


def test_seconds_are_no_curve(tmp_path: Path) -> None:
    HandmadeRun(tmp_path).log([Row(1, 1, BEGUN, {"train.loss": 1.0, "time.data_seconds": 2.0})])
    assert [panel.name for panel in make_panels([read_run(tmp_path)])] == ["loss"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=41, max_size=400), st.integers(0, 40))
def test_thinning_keeps_the_ends_the_extremes_and_what_is_not_finite(values: list[float], broken: int) -> None:
    values[broken] = math.nan
    steps = list(range(len(values)))
    kept = thinned(Curve(steps, [float(step) for step in steps], values), most=40)
    finite = [value for value in values if math.isfinite(value)]
    assert len(kept.steps) <= 40
    assert kept.steps == sorted(set(kept.steps))
    assert kept.steps[-1] == steps[-1]
    assert {min(finite), max(finite)} <= set(kept.values)
    assert broken in kept.steps


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 9))
def test_ticks_are_few_and_inside_ends_that_hold_the_range(low: float, width: float, most: int) -> None:
    first, last = round_ends(low, low + width, most)
    assert first <= low + width * 1e-6
    assert last >= (low + width) - width * 1e-6
    assert 1 <= len(round_ticks(first, last, most + 1)) <= most + 1


def test_the_picture_is_a_png_of_the_curves_beside_the_report(real_run: Path) -> None:
    path = curves_png(real_run)
    assert path == real_run / CURVES_FILE
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width == 1760
        assert len(picture.convert("RGB").getcolors(1 << 16) or []) > 10  # not an empty sheet

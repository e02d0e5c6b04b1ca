"""The charts in a browser: what is drawn where, and by which numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hezar_train.events import Row
from hezar_train.report import write_report
from tests.report.conftest import Open
from tests.report.runs import BEGUN, HandmadeRun


def _ticks(chart: Any) -> list[str]:
    """Return the numbers beside a chart."""
    beside = "all => all.filter(one => one.getAttribute('x') === all[0].getAttribute('x')).map(one => one.textContent)"
    return list(chart.locator("svg text").evaluate_all(beside))


def _chart(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.get_by_text(title, exact=True))


def test_a_zoomed_curve_does_not_leave_its_plot(open_page: Open, report: Path) -> None:
    page = open_page(report)
    plot = page.locator(".plot").first
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 80, steps=4)
    page.mouse.up()
    page.mouse.move(0, 0)
    left = float(plot.locator(".grid").first.get_attribute("x1"))
    with Image.open(io.BytesIO(plot.screenshot())) as picture:
        saturation = picture.convert("RGB").convert("HSV").getchannel("S")
        beside = saturation.crop((0, 0, int(left) - 3, saturation.height))  # half a point may stand on the axis
        inside = saturation.crop((int(left), 0, int(left) + 60, saturation.height))
    assert inside.getextrema()[1] > 150
    assert beside.getextrema()[1] < 100  # numbers are grey


def test_the_ring_of_the_best_checkpoint_is_on_the_set_that_chose_it(open_page: Open, report: Path) -> None:
    page = open_page(report)
    rings = page.locator(".plot:visible .best")
    assert rings.count() == 2  # of the loss and of the metric
    assert set(rings.evaluate_all("rings => rings.map(one => one.parentElement.className.baseVal)")) == {"c1 d0"}
    page.locator("#smoothing").fill("0.5")
    assert rings.count() == 2


def test_samples_per_second_start_at_zero(open_page: Open, report: Path) -> None:
    page = open_page(report)
    assert _ticks(_chart(page, "Samples per second"))[0] == "0"
    page.locator("#log-scale").check()
    assert "0" not in _ticks(_chart(page, "Samples per second"))


@pytest.mark.parametrize(("rate", "has_powers"), [(0.001, False), (2e-5, True), (3e7, True)])
def test_the_numbers_beside_a_chart_are_in_one_notation(
    open_page: Open, tmp_path: Path, rate: float, has_powers: bool
) -> None:
    rows = [Row(step, 1, BEGUN + step, {"train.learning_rate": rate * step / 50}) for step in range(51)]
    HandmadeRun(tmp_path).log(rows)
    ticks = _ticks(_chart(open_page(write_report([tmp_path])), "Learning rate"))
    assert ticks[0] == "0"
    assert {"e" in tick for tick in ticks[1:]} == {has_powers}

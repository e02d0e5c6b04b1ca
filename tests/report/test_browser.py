"""The page in a browser: it draws, answers, asks nobody for anything and fits every screen.

Without Chromium (`apt-get install chromium`) or the Python package playwright these tests are left out.
"""

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


def _number_of_points(page: Any) -> int:
    return int(page.locator(".plot").first.locator("path.curve").first.get_attribute("d").count("L")) + 1


def test_every_panel_is_drawn(open_page: Open, report: Path) -> None:
    page = open_page(report)
    assert page.locator(".charts").first.locator(".plot").count() == 5
    assert page.locator(".plot:visible svg path.curve").count() == 3 + 2 + 3
    assert page.locator(".plot:visible svg path.band").count() == 2
    assert page.locator(".plot:visible svg .resume").count() == 5


def test_hovering_shows_the_values_there_in_every_panel(open_page: Open, report: Path) -> None:
    page = open_page(report)
    plot = page.locator(".plot").first
    before = page.locator(".legend output").first.inner_text()
    plot.hover(position={"x": 60, "y": 60})
    page.wait_for_function("document.querySelector('.at').textContent.startsWith('step ')")
    assert page.locator(".legend output").first.inner_text() != before
    places = page.locator(".chart:visible .at").all_inner_texts()
    assert len(places) == 5
    assert len(set(places)) == 1
    page.mouse.move(0, 0)
    page.wait_for_function("document.querySelector('.at').textContent === 'last value'")
    assert page.locator(".legend output").first.inner_text() == before


def test_a_finger_on_a_curve_shows_the_values_there_and_a_phone_is_told_so(open_page: Open, report: Path) -> None:
    page = open_page(report, 390, has_touch=True, is_mobile=True)
    assert page.locator(".for-touch").is_visible()
    assert not page.locator(".for-mouse").first.is_visible()
    page.locator(".plot").first.tap(position={"x": 80, "y": 60})
    page.wait_for_function("document.querySelector('.at').textContent.startsWith('step ')")
    assert len(set(page.locator(".chart:visible .at").all_inner_texts())) == 1


def test_dragging_zooms_all_panels_and_a_double_click_shows_all(open_page: Open, report: Path) -> None:
    page = open_page(report)
    whole = _number_of_points(page)
    box = page.locator(".plot").first.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 80, steps=4)
    page.mouse.up()
    assert _number_of_points(page) < whole / 2
    page.locator(".plot").first.dblclick(position={"x": 100, "y": 50})
    assert _number_of_points(page) == whole


def test_the_keyboard_moves_and_zooms(open_page: Open, report: Path) -> None:
    page = open_page(report)
    whole = _number_of_points(page)
    page.locator(".plot").first.focus()
    page.keyboard.press("Home")
    assert page.locator(".at").first.inner_text() == "step 10"
    page.keyboard.press("ArrowRight")
    assert page.locator(".at").first.inner_text() == "step 20"
    assert "step 20: train" in page.locator("[aria-live=polite]").inner_text()
    page.keyboard.press("+")
    assert _number_of_points(page) < whole
    page.keyboard.press("Escape")
    assert _number_of_points(page) == whole
    assert page.locator(".at").first.inner_text() == "last value"


def test_smoothing_axis_and_scale_redraw(open_page: Open, report: Path) -> None:
    page = open_page(report)
    shapes = [page.locator(".plot").first.inner_html()]
    page.locator("#smoothing").fill("0.9")
    assert page.locator(".plot").first.locator("path.raw").count() == 1
    assert page.locator(".plot").nth(2).locator("path.raw").count() == 0  # a learning rate has no noise
    shapes.append(page.locator(".plot").first.inner_html())
    for axis in ("epoch", "time"):
        page.locator("#axis").select_option(axis)
        shapes.append(page.locator(".plot").first.inner_html())
    page.locator("#log-scale").check()
    shapes.append(page.locator(".plot").first.inner_html())
    assert len(set(shapes)) == 5
    assert "NaN" not in "".join(shapes)


def test_runs_can_be_hidden_in_a_comparison(open_page: Open, report: Path, tmp_path: Path) -> None:
    other = HandmadeRun(tmp_path / "other").train(300).evaluate(300)
    page = open_page(write_report([report.parent, other.root], tmp_path / "two.html"))
    assert page.locator(".plot").first.locator("path.curve").count() == 6
    page.locator("[data-run='1']").uncheck()
    assert page.locator(".plot").first.locator("path.curve").count() == 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(open_page: Open, report: Path, scheme: str) -> None:
    page = open_page(report, 360, color_scheme=scheme, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".plot svg").first.bounding_box()["width"] > 250


def test_the_dark_page_is_dark_and_its_print_is_not(open_page: Open, report: Path) -> None:
    page = open_page(report, color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(paper) == "rgb(16, 20, 26)"
    page.emulate_media(media="print")
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    assert not page.locator(".toolbar").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_without_scripts_there_is_all_text_and_a_picture_of_the_curves(open_page: Open, report: Path) -> None:
    page = open_page(report, java_script_enabled=False)
    assert page.locator("noscript img, img[alt^='Curves of']").first.is_visible()
    assert "812,345" in page.locator("main").inner_text()


def test_the_symbols_of_a_plate_stand_as_on_the_plate_and_words_as_words_do(open_page: Open, report: Path) -> None:
    page = open_page(report)
    places = """(element) => {
        const text = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), range = document.createRange();
        const found = [];
        for (let node = text.nextNode(); node; node = text.nextNode())
            for (let place = 0; place < node.length; place++) {
                range.setStart(node, place); range.setEnd(node, place + 1);
                found.push(range.getBoundingClientRect().left);
            }
        return found;
    }"""
    plate = page.locator(".cards bdo").first.evaluate(places)
    assert len(plate) == len("۱۲ب۳۴۵")
    assert plate == sorted(plate)
    words = page.locator(".cards dd span[dir=auto]", has_text="دنیا").first.evaluate(places)
    assert words[0] > words[-1]


def test_all_pictures_are_there_at_once(open_page: Open, report: Path) -> None:
    page = open_page(report)
    widths = page.locator(".cards img").evaluate_all("pictures => pictures.map(one => one.naturalWidth)")
    assert len(widths) >= 8
    assert set(widths) == {160}


def test_a_long_command_does_not_make_a_phone_scroll_sideways(open_page: Open, tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path / "run").train()
    starts = [{"time": BEGUN + 100 * place, "command": f"train /{'x' * 90}/{place}"} for place in range(2)]
    run.write("environment.json", {"starts": starts})
    page = open_page(write_report([run.root]), 360, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_beyond_a_phone_has_a_shadow_at_that_edge(
    open_page: Open, report: Path, scheme: str
) -> None:
    page = open_page(report, 390, color_scheme=scheme, has_touch=True, is_mobile=True)
    starts = page.locator("#time .scroll")
    assert starts.evaluate("box => box.scrollWidth > box.clientWidth")
    left, right = _edges(starts)
    assert left == _edges(page.locator("#evaluation .scroll").first)[0]  # nothing is hidden on that side
    assert right < left
    starts.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    scrolled_left, scrolled_right = _edges(starts)
    assert scrolled_left < scrolled_right == left


def _edges(box: Any) -> tuple[int, int]:
    """Return how bright the box is at its left and right edge, between the lines of its table."""
    with Image.open(io.BytesIO(box.screenshot())) as picture:
        grey = picture.convert("L")
        return grey.getpixel((1, 2)), grey.getpixel((grey.width - 2, 2))


def test_names_of_options_are_broken_on_a_phone_only(open_page: Open, tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path / "run").train()
    run.write("recipe.json", {"sha256": 32 * "5e", "options": {"held_out_font_of_plates": 7}})
    path = write_report([run.root])
    heights = [
        open_page(path, width).locator(".pairs th", has_text="held_out").bounding_box()["height"]
        for width in (390, 1280)
    ]
    assert heights[0] > 1.5 * heights[1]


def test_hostile_names_are_drawn_as_they_are(open_page: Open, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    run = HandmadeRun(tmp_path / "run")
    run.log([Row(step, 1, BEGUN + step, {f"train.{hostile}": step, "train.loss": float("nan")}) for step in range(5)])
    page = open_page(write_report([run.root]))
    page.get_by_text("Also logged").click()
    assert page.locator("img").count() == 0
    assert page.locator(".broken").count() == 5
    assert hostile in page.locator("main").inner_text()


def test_a_page_of_many_long_curves_answers_at_once(open_page: Open, tmp_path: Path) -> None:
    names = [f"train.value_{number}" for number in range(20)]
    rows = [Row(step, 1, BEGUN + step, dict.fromkeys(names, step * 37 % 101)) for step in range(1, 5001)]
    HandmadeRun(tmp_path / "run").log(rows)
    page = open_page(write_report([tmp_path / "run"]))
    page.get_by_text("Also logged").click()
    assert page.locator(".plot svg").count() == 20
    seconds = page.evaluate("""() => {
        const begun = performance.now(), slider = document.getElementById("smoothing");
        slider.value = 0.9; slider.dispatchEvent(new Event("input"));
        return (performance.now() - begun) / 1000;
    }""")
    assert seconds < 3  # 0.1 on a quiet machine

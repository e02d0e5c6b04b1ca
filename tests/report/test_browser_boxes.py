"""Boxes that scroll and folds, on the screen and on paper."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hezar_train.report import write_report
from tests.report.conftest import Open
from tests.report.runs import BEGUN, finished_run

IS_CUT = "boxes => boxes.some(one => one.offsetHeight && one.scrollHeight > one.clientHeight + 1)"


def _run_with_much(root: Path) -> Path:
    """Return a run with a long table of versions, many samples, and many classes."""
    names = [f"class_{number}" for number in range(16)]
    values = [[float(row == column) for column in range(16)] for row in range(16)]
    table = {"name": "confusion_matrix", "rows": names, "columns": names, "values": values}
    samples = [{"sample": number, "loss": 1.0, "prediction": "a", "target": "b"} for number in range(16)]
    run = finished_run(root).evaluate(tables={"": [table]}, worst_samples={"": samples})
    versions = {f"package_{number}": "1.0" for number in range(40)}
    run.write("environment.json", {"starts": [{"time": BEGUN, "command": "train", "versions": versions}]})
    return run.root


@pytest.fixture(scope="module")
def much(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report([_run_with_much(tmp_path_factory.mktemp("boxes"))])


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("boxes")
    return write_report([_run_with_much(folder / name) for name in "ab"], folder / "page.html")


def _onto_paper(page: Any) -> Any:
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    return page


def test_a_matrix_of_many_classes_is_seen_as_a_whole(open_page: Open, much: Path) -> None:
    matrix = open_page(much).locator(".scroll:has(.heat)")
    assert matrix.bounding_box()["height"] > 590  # more than other tables get
    assert not matrix.evaluate_all(IS_CUT)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_goes_on_below_its_box_has_a_shadow_there(open_page: Open, much: Path, scheme: str) -> None:
    page = open_page(much, color_scheme=scheme)
    page.locator("#config summary", has_text="fields").click()
    box = page.locator("#config details[open] .scroll")
    assert box.evaluate_all(IS_CUT)
    top, bottom = _top_and_bottom(box)
    assert bottom < 0.9 * top
    box.evaluate("box => { box.scrollTop = box.scrollHeight; }")
    assert _top_and_bottom(box)[1] == top


def _top_and_bottom(box: Any) -> tuple[int, int]:
    """Return how bright the first and the last line of pixels are in the middle."""
    with Image.open(io.BytesIO(box.screenshot())) as picture:
        grey = picture.convert("L")
        return grey.getpixel((grey.width // 2, 1)), grey.getpixel((grey.width // 2, grey.height - 2))


def test_nothing_on_paper_is_cut_or_runs_into_what_follows(open_page: Open, comparison: Path) -> None:
    page = _onto_paper(open_page(comparison, 690))
    assert page.locator("article > details[open]").count() == 10
    boxes = page.locator(".scroll")
    assert not boxes.evaluate_all(IS_CUT)
    assert page.evaluate("document.documentElement.scrollWidth") <= 690


def test_a_closed_fold_is_not_on_paper_but_for_a_word_of_how_much_it_holds(open_page: Open, much: Path) -> None:
    page = _onto_paper(open_page(much))
    assert not page.get_by_text("All 91 fields").is_visible()
    assert not page.get_by_text("The plan").is_visible()
    more = page.locator(".more > summary", has_text="6 more")
    assert more.is_visible()
    assert more.evaluate("one => getComputedStyle(one, '::after').content") == '" on the page, not printed"'
    assert more.evaluate("one => getComputedStyle(one).listStyleType") == "none"


def test_a_comparison_is_printed_in_full_without_scripts(open_page: Open, comparison: Path) -> None:
    page = open_page(comparison, java_script_enabled=False)
    assert not page.locator("article .heat").first.is_visible()
    page.emulate_media(media="print")
    assert page.locator("article .heat").count() == page.locator("article .heat:visible").count() == 2
    assert not page.get_by_text("The plan").first.is_visible()


def test_folds_that_were_opened_for_the_paper_are_closed_after_it(open_page: Open, comparison: Path) -> None:
    page = open_page(comparison)
    page.locator("article summary", has_text="Config").first.click()
    _onto_paper(page).evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.locator("article > details[open]").count() == 1

"""Runs compared side by side, and the environment: in groups, and what changed from one start to the next."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hezar_train import TrainerConfig
from hezar_train.report import write_report
from tests.report.runs import BEGUN, HandmadeRun, data_of, finished_run


def _page(run: HandmadeRun) -> str:
    return write_report([run.root]).read_text(encoding="utf-8").replace("<wbr>", "")


def _changes(page: str) -> list[str]:
    return re.findall('<li dir="auto">(.*? at start .*?|.*? by start .*?)</li>', page)


def _note_starts(run: HandmadeRun, *steps: int, **facts: Any) -> None:
    starts = [{"time": BEGUN + place, "step": step, **facts} for place, step in enumerate(steps)]
    run.write("environment.json", {"starts": starts})


def test_facts_stand_in_groups(tmp_path: Path) -> None:
    page = _page(finished_run(tmp_path))
    groups = re.findall('<th colspan="2" scope="rowgroup">(.*?)</th>', page)
    assert groups == ["versions", "hardware", "model", "data"]
    assert '<th scope="row">Python</th><td dir="auto">3.11.2</td>' in page
    assert '<th scope="row">parameters</th><td dir="auto">812,345</td>' in page
    assert '<th scope="row">train</th><td dir="auto">Plates, 3,200 samples</td>' in page


def test_every_set_of_an_evaluation_has_its_line(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    sets = {"": {"kind": "list", "size": 7}, "held_out_font": {"kind": "Plates", "fingerprint": "5e"}}
    _note_starts(run, 0, data={"evaluation": sets})
    page = _page(run)
    assert '<th scope="row">evaluation</th><td dir="auto">list, 7 samples</td>' in page
    assert '<th scope="row">evaluation · held_out_font</th><td dir="auto">Plates, fingerprint 5e</td>' in page


def test_what_changed_between_starts_is_told(tmp_path: Path) -> None:
    assert _changes(_page(finished_run(tmp_path))) == ["hardware · processes: 1 → 2 at start 2"]


def test_a_change_of_the_config_is_told_as_far_as_checkpoints_remember_it(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path, num_epochs=6, accept_changes=True)
    given = {"task": "image2text", "learning_rate": 0.002, "metric_for_best_model": "cer"}
    TrainerConfig(tmp_path, num_epochs=4, **given).save(tmp_path / "checkpoints" / "00000100")
    _note_starts(run, 0, 200)
    assert _changes(_page(run)) == ["num_epochs: 4 → 6 at start 2"]
    _note_starts(run, 0, 200, 300)
    assert _changes(_page(run)) == ["num_epochs: 4 → 6 by start 3"]
    (tmp_path / "checkpoints" / "00000100" / "train_config.yaml").write_text("{", encoding="utf-8")
    assert _changes(_page(run)) == []


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_several_runs_are_compared_with_the_settings_in_which_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_run(tmp_path / "a")
    HandmadeRun(tmp_path / "b", learning_rate=0.5).train(300).evaluate(300)
    monkeypatch.chdir(tmp_path)
    page = write_report([tmp_path / "a", tmp_path / "b"]).read_text(encoding="utf-8")
    assert Path("comparison.html").exists()
    text = _Tags(page).text
    assert "2 runs compared" in text
    assert "Settings that differ" in text
    assert "learning_rate0.0020.5" in text
    assert [run["name"] for run in data_of(page)["runs"]] == ["a", "b"]


def test_every_column_of_a_comparison_says_what_it_holds(tmp_path: Path) -> None:
    runs = [HandmadeRun(tmp_path / name).train().evaluate(metrics={"cer": 0.5, "loss": 1.0}).root for name in "ab"]
    page = write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    head = re.findall('<th scope="col">(.*?)</th>', page)
    assert head[:7] == ["run", "steps", "best", "last CER", "last loss", "time at work", "status"]
    assert "CER 0.5 at step 400" in page

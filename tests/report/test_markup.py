"""Text of users is shown as it is, and names as they are written everywhere else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

from hezar_train.events import Row
from hezar_train.report import write_report
from tests.report.runs import BEGUN, HandmadeRun, data_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\u2028\ud800"


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


def test_text_that_looks_like_a_tag_is_shown_and_nothing_else(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path)
    run.write("train_config.yaml", {"task": HOSTILE[:-1], HOSTILE[:-1]: HOSTILE[:-1]})
    run.log([Row(1, 1, BEGUN, {HOSTILE[:-1]: 1.0, "train.loss": 2.0})])
    table = {"name": HOSTILE, "rows": [HOSTILE], "columns": [HOSTILE], "values": [[1.0]]}
    sample = {
        "sample": HOSTILE,
        "loss": 1.0,
        "prediction": HOSTILE,
        "target": [HOSTILE],
        "input": HOSTILE,
        "image": HOSTILE,
    }
    found = {"step": 1, "metrics": {HOSTILE: 1.0}, "tables": {HOSTILE: [table]}, "worst_samples": {HOSTILE: [sample]}}
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "00000001.json").write_text(
        json.dumps(found | {"examples": {"": [{HOSTILE: HOSTILE}]}})
    )
    (tmp_path / "recipe.json").write_text(json.dumps({"path": HOSTILE, "options": {HOSTILE: HOSTILE}}))
    (tmp_path / "environment.json").write_text(json.dumps({"starts": [{"time": BEGUN, HOSTILE: {HOSTILE: HOSTILE}}]}))
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    tags = _Tags(page).tags
    assert [tag for tag, _ in tags].count("script") == 2
    assert not [one for tag, one in tags if "onerror" in one or one.get("src") == "x"]
    assert data_of(page)["panels"][1]["title"].startswith("</script>")


def test_abbreviations_are_written_as_everywhere_else(tmp_path: Path) -> None:
    names = {"cer": "CER", "rougeLsum": "ROUGE-Lsum", "chrf": "chrF", "old.f1": "Old · F1", "fresh_air": "Fresh air"}
    HandmadeRun(tmp_path).log([Row(1, 1, BEGUN, {f"evaluation.{name}": 0.5 for name in names})])
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert re.findall("<figcaption><strong>(.*?)</strong>", page) == list(names.values())


def test_names_may_be_broken_between_their_words_and_numbers_may_not(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path, learning_rate=0.002)
    run.write("recipe.json", {"path": "recipes/plate", "options": {"held_out": "<b>"}})
    page = write_report([run.root]).read_text(encoding="utf-8")
    assert "recipe.<wbr>held_<wbr>out" in page
    assert "recipes/<wbr>plate" in page
    assert ">0.002<" in page
    assert "&lt;b&gt;" in page

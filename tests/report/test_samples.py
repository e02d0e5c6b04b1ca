"""The section about an evaluation: metrics by set, samples and examples with their pictures, what differs marked."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hezar_train.metrics import handler_for
from hezar_train.report import write_report
from tests.report.runs import HandmadeRun, finished_run


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


def test_persian_text_runs_in_its_own_direction_and_differences_are_marked(tmp_path: Path) -> None:
    page = write_report([finished_run(tmp_path).root]).read_text(encoding="utf-8")
    assert '<bdo dir="ltr">۱۲<mark>ب</mark>۳۴۵</bdo>' in page  # a plate is read as it is seen
    assert '<span dir="auto">س<mark>ل' in page
    assert "س<mark>لا</mark>م دنیا" in page  # one letter form, marked as one


def test_pictures_of_misread_samples_are_inlined_and_none_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    run = finished_run(tmp_path / "run")
    (run.root / "not.png").write_bytes(b"GIF89a")
    samples = [{"sample": 1, "image": name} for name in ("../secret.png", "not.png", "absent.png", "\0")]
    page = write_report([run.root]).read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == 1 + 2 * 4  # the still curves, four samples of two sets
    run.evaluate(400, worst_samples={"": samples})
    (run.root / "evaluations" / "00000350.json").unlink()
    page = write_report([run.root]).read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == 1


def test_the_metrics_of_several_sets_stand_side_by_side(tmp_path: Path) -> None:
    metrics = {"old.cer": 0.5, "old.cer.low": 0.4, "old.cer.high": 0.6, "old.new.cer": 0.25, "total": 7.0}
    sample = [{"sample": 1, "prediction": "a", "target": "b"}]
    run = HandmadeRun(tmp_path).train().evaluate(metrics={"cer": 0.1, **metrics}, worst_samples={"old": sample})
    run.evaluate(400, metrics={"cer": 0.1, **metrics}, worst_samples={"old": sample, "old.new": sample})
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert '<span dir="auto">old</span></th><td>0.5 (0.4 to 0.6)</td>' in page
    assert '<span dir="auto">old.new</span></th><td>0.25</td>' in page
    assert '<th scope="row">total</th><td>7</td>' in page


def test_examples_are_shown_with_their_pictures(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path).train().evaluate(400)
    picture = next((tmp_path / "evaluations/00000400").iterdir()).relative_to(tmp_path).as_posix()
    plain = write_report([tmp_path]).read_text(encoding="utf-8")
    run.evaluate(400, examples={"": [{"prediction": "۱۲پ۳", "target": "۱۲ب۳", "image": picture}]})
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert page.count('src="data:image/png') == plain.count('src="data:image/png') + 1
    assert '<dd><bdo dir="ltr">۱۲<mark>پ</mark>۳</bdo></dd>' in page
    assert picture not in page


@pytest.mark.parametrize(
    ("task", "num_wrong"), [("image2text", 2), ("speech_recognition", 2), ("text_generation", 0), (None, 0)]
)
def test_a_wrong_example_is_marked_where_the_task_is_to_read_exactly(
    tmp_path: Path, task: str | None, num_wrong: int
) -> None:
    examples = [
        {"prediction": said, "target": "a sunny day", "input": "a rainy day"}
        for said in ("a sunny day", "a funny day", "")
    ]
    HandmadeRun(tmp_path, task=task).train().evaluate(400, worst_samples={}, examples={"": examples})
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert page.count('<li class="wrong">') == num_wrong
    assert ("a <mark>f</mark>unny day" in page) == bool(num_wrong)
    assert ("(nothing)" in page) == bool(num_wrong)
    assert "<mark>r" not in page  # what was given is not compared


@pytest.mark.parametrize(("given", "shown"), [("error rate", "error rate"), (None, "loss"), (7, "loss"), ("", "loss")])
def test_the_number_of_the_worst_samples_is_called_what_it_is(tmp_path: Path, given: object, shown: str) -> None:
    HandmadeRun(tmp_path).train().evaluate(400, sample_loss_name=given)
    text = _Tags(write_report([tmp_path]).read_text(encoding="utf-8")).text
    assert f"samples with the largest {shown}" in text
    assert f"sample 0 · {shown} 2.5" in text


def test_a_real_record_says_what_the_number_of_its_worst_samples_is(real_run: Path) -> None:
    record = json.loads(max((real_run / "evaluations").glob("*.json")).read_text(encoding="utf-8"))
    assert record["sample_loss_name"] == "loss"


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("image2text", "error rate"),
        ("speech_recognition", "error rate"),
        ("text_generation", "error rate"),
        ("regression", "squared error"),
        ("language_modeling", "loss"),
        (None, "loss"),
    ],
)
def test_every_task_names_what_it_orders_its_worst_samples_by(task: str | None, name: str) -> None:
    assert handler_for(task, None).sample_loss_name == name

"""The page as a whole: its sections, that it needs nothing else, and that no file of a run can keep it away."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.events import Row
from hezar_train.report import curves_png, write_report
from tests.report.runs import BEGUN, LOGS, HandmadeRun, data_of, everything, finished_run

FILES = [
    *("plan.json", "best.json", "recipe.json", "environment.json", "train_config.yaml", "evaluations/00000060.json"),
    *(f"logs/{LOGS}/metrics.json", f"logs/{LOGS}/metrics.json.dropped"),
]
KNOWN_KEYS = [
    *(
        "step",
        "epoch",
        "time",
        "metrics",
        "tables",
        "worst_samples",
        "examples",
        "starts",
        "options",
        "value",
        "metric",
    ),
    *("name", "rows", "columns", "values", "image", "target", "prediction", "loss", "model", "num_parameters", "data"),
    *(
        "total_steps",
        "steps_in_epoch",
        "sample_loss_name",
        "logs_dir",
        "checkpoints_dir",
        "task",
        "path",
        "stop_reason",
        "hardware",
    ),
]
KEYS = st.text(max_size=3) | st.sampled_from(KNOWN_KEYS)


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


def test_a_real_run_has_every_section_as_text(real_run: Path) -> None:
    assert write_report([real_run]) == real_run / "report.html"
    text = _Tags(everything(real_run)).text
    for words in ("finished", "Confusion matrix", "Samples with the largest loss", "Different from the defaults"):
        assert words.lower() in text.lower()
    assert "verified" in text
    assert "best" in text
    assert "done again" in text


def test_a_page_fetches_nothing_and_lets_only_its_own_script_run(tmp_path: Path) -> None:
    page = write_report([finished_run(tmp_path).root]).read_text(encoding="utf-8")
    tags = _Tags(page).tags
    links = [value for _, attributes in tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(str(link).startswith(("data:image/", "#")) for link in links)
    assert "url(" not in page.replace("url(#", "")
    policy = next(str(one["content"]) for tag, one in tags if tag == "meta" and "http-equiv" in one)
    assert re.search(r"default-src 'none'.*script-src 'sha256-[\w+/=]+'", policy)


def test_damage_is_told_on_the_page(tmp_path: Path) -> None:
    finished_run(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    (tmp_path / "checkpoints" / "00000400").mkdir(parents=True)
    text = _Tags(write_report([tmp_path]).read_text(encoding="utf-8")).text
    assert "Not everything could be read" in text
    assert "plan.json cannot be read" in text
    assert "damaged: manifest.json is missing" in text


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(name=st.sampled_from(FILES), content=ANY_JSON)
@settings(max_examples=25)
def test_no_content_of_a_json_file_can_keep_a_page_from_being_written(name: str, content: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        HandmadeRun(Path(folder)).log([Row(60, 1, BEGUN, {"train.loss": 1.0})])
        (Path(folder) / name).parent.mkdir(exist_ok=True)
        (Path(folder) / name).write_text(json.dumps(content) + "\n")
        assert write_report([folder]).exists()


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    HandmadeRun(tmp_path)
    assert "Nothing has been logged yet." in write_report([tmp_path]).read_text(encoding="utf-8")
    assert curves_png(tmp_path) is None


def test_tens_of_thousands_of_points_make_a_small_page(tmp_path: Path) -> None:
    rows = [
        Row(step, 1, BEGUN + step, {"train.recent_loss": 1 / step, "train.grad_norm": step % 7})
        for step in range(1, 20_001)
    ]
    HandmadeRun(tmp_path).log(rows)
    path = write_report([tmp_path])
    assert path.stat().st_size < 400_000
    assert len(data_of(path.read_text(encoding="utf-8"))["panels"][0]["lines"][0]["x"]) <= 1200


def test_values_that_are_not_finite_become_gaps(tmp_path: Path) -> None:
    values = [1.0, float("nan"), float("inf"), 0.5]
    HandmadeRun(tmp_path).log([Row(step, 1, BEGUN, {"train.loss": value}) for step, value in enumerate(values)])
    line = data_of(write_report([tmp_path]).read_text(encoding="utf-8"))["panels"][0]["lines"][0]
    assert line["y"] == [1.0, None, None, 0.5]


def test_numbers_that_no_axis_holds_do_no_harm(tmp_path: Path) -> None:
    values = [1e308, -1e308, 5e-324, 1e-320]
    run = HandmadeRun(tmp_path)
    run.log([Row(step, 1, BEGUN, {"train.loss": value}) for step, value in enumerate(values)])
    run.evaluate(4, metrics={"cer": 10**400})
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert data_of(page)["panels"][0]["lines"][0]["y"][:2] == [None, None]
    assert "∞" in page


def test_a_report_of_logs_needs_no_torch(tmp_path: Path) -> None:
    finished_run(tmp_path)
    code = "import sys, hezar_train.report as r; r.write_report([sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_a_comparison_says_what_is_folded_away_under_the_evaluation(tmp_path: Path) -> None:
    table = {"name": "confusion_matrix", "rows": ["a"], "columns": ["a"], "values": [[1.0]]}
    full = HandmadeRun(tmp_path / "full").train().evaluate(tables={"": [table]}, examples={"": [{"text": "a"}]})
    bare = HandmadeRun(tmp_path / "bare").train().evaluate(worst_samples={})
    new = HandmadeRun(tmp_path / "new")
    page = write_report([full.root, bare.root, new.root], tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.findall("<summary>(Evaluation.*?)</summary>", page) == [
        f"Evaluation of {_of_user('full')}: metrics, confusion matrix, samples with the largest loss, examples",
        f"Evaluation of {_of_user('bare')}: metrics",
        "Evaluation",
    ]


def _of_user(name: str) -> str:
    return f'<span dir="auto">{name}</span>'


@pytest.mark.parametrize(
    ("recipe", "words"), [("recipes/image2text", "image2text"), ("recipes/plates", "plates · task image2text")]
)
def test_the_task_is_told_once(tmp_path: Path, recipe: str, words: str) -> None:
    run = HandmadeRun(tmp_path)
    run.write("recipe.json", {"path": recipe})
    assert f"· recipe recipes/{words}</p>" in write_report([tmp_path]).read_text(encoding="utf-8")


def test_writing_a_report_needs_no_torch(real_run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from hezar_train.report import write_report\n"
        f"write_report([{str(real_run)!r}], {str(tmp_path / 'page.html')!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
    assert "verified" in (tmp_path / "page.html").read_text(encoding="utf-8")

"""The page as text: what it says, that it cannot be broken out of, that it needs nothing else."""

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
from PIL import Image

from hezar_train.events import Row
from hezar_train.metrics import handler_for
from hezar_train.report import CURVES_FILE, curves_png, write_report
from tests.report.runs import BEGUN, LOGS, HandmadeRun, data_of, everything, finished_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e\u2028\ud800"


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


def test_the_picture_is_a_png_of_the_curves_beside_the_report(real_run: Path) -> None:
    path = curves_png(real_run)
    assert path == real_run / CURVES_FILE
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width == 1760
        assert len(picture.convert("RGB").getcolors(1 << 16) or []) > 10  # not an empty sheet


def test_a_report_of_logs_needs_no_torch(tmp_path: Path) -> None:
    finished_run(tmp_path)
    code = "import sys, hezar_train.report as r; r.write_report([sys.argv[1]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


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


def test_abbreviations_are_written_as_everywhere_else(tmp_path: Path) -> None:
    names = {"cer": "CER", "rougeLsum": "ROUGE-Lsum", "chrf": "chrF", "old.f1": "Old · F1", "fresh_air": "Fresh air"}
    HandmadeRun(tmp_path).log([Row(1, 1, BEGUN, {f"evaluation.{name}": 0.5 for name in names})])
    page = write_report([tmp_path]).read_text(encoding="utf-8")
    assert re.findall("<figcaption><strong>(.*?)</strong>", page) == list(names.values())


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


def test_every_column_of_a_comparison_says_what_it_holds(tmp_path: Path) -> None:
    runs = [HandmadeRun(tmp_path / name).train().evaluate(metrics={"cer": 0.5, "loss": 1.0}).root for name in "ab"]
    page = write_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    head = re.findall('<th scope="col">(.*?)</th>', page)
    assert head[:7] == ["run", "steps", "best", "last CER", "last loss", "time at work", "status"]
    assert "CER 0.5 at step 400" in page


@pytest.mark.parametrize(
    ("recipe", "words"), [("recipes/image2text", "image2text"), ("recipes/plates", "plates · task image2text")]
)
def test_the_task_is_told_once(tmp_path: Path, recipe: str, words: str) -> None:
    run = HandmadeRun(tmp_path)
    run.write("recipe.json", {"path": recipe})
    assert f"· recipe recipes/{words}</p>" in write_report([tmp_path]).read_text(encoding="utf-8")


def test_names_may_be_broken_between_their_words_and_numbers_may_not(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path, learning_rate=0.002)
    run.write("recipe.json", {"path": "recipes/plate", "options": {"held_out": "<b>"}})
    page = write_report([run.root]).read_text(encoding="utf-8")
    assert "recipe.<wbr>held_<wbr>out" in page
    assert "recipes/<wbr>plate" in page
    assert ">0.002<" in page
    assert "&lt;b&gt;" in page


def test_writing_a_report_needs_no_torch(real_run: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from hezar_train.report import write_report\n"
        f"write_report([{str(real_run)!r}], {str(tmp_path / 'page.html')!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
    assert "verified" in (tmp_path / "page.html").read_text(encoding="utf-8")

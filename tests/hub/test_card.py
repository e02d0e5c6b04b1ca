"""The card: parsed back it gives the run's metrics; what somebody wrote is kept; a person can load the model by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard

from hezar_train.hub import push_run
from hezar_train.hub.card import BEGIN, END, PIPELINE_TAGS, RunFacts, render_card
from hezar_train.hub.pushed_files import SavedRun, stage
from hezar_train.types import TaskType
from tests.hub.runs import METRICS, REPO, HandmadeRun, finished_run
from tests.hub.server import LoopbackHub


@pytest.fixture
def run(tmp_path: Path) -> HandmadeRun:
    return finished_run(tmp_path / "run")


def card_of(run: HandmadeRun, existing: str | None = None, step: int = 10, **metadata: Any) -> str:
    paths = SavedRun(run.root)
    return render_card(RunFacts(paths, step), REPO, stage(paths, step, "end").files, existing, metadata)


def values(card: ModelCard) -> dict[str, float]:
    return {one.metric_type: one.metric_value for one in card.data.eval_results}


def test_parsed_back_it_gives_the_metrics_of_the_run(run: HandmadeRun, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card_of(run, datasets="digits"))
    card = ModelCard.load(tmp_path / "README.md")
    assert values(card) == {"loss": METRICS["loss"], "accuracy": METRICS["accuracy"], "f1": METRICS["f1"]}
    expected = EvalResult(
        "image-classification", "digits", "digits", "accuracy", METRICS["accuracy"], metric_name="accuracy",
        dataset_split="evaluation",
    )  # fmt: skip
    assert expected in card.data.eval_results
    assert (card.data.model_name, card.data.pipeline_tag) == ("digits", "image-classification")
    assert card.data.metrics == ["accuracy", "f1", "loss"]


def test_the_metrics_are_those_of_the_pushed_step(run: HandmadeRun) -> None:
    run.evaluate(5, {"loss": 9.0})
    assert values(ModelCard(card_of(run, step=5))) == {"loss": 9.0}
    run.save(12)
    text = card_of(run, step=12)
    assert "at step 10. The weights are those of step 12." in text


def test_metadata_comes_from_the_user_then_the_card_then_the_run(run: HandmadeRun) -> None:
    existing = "---\nlicense: mit\nlanguage: fa\npipeline_tag: other\ncustom: 1\ntags: [mine]\n---\nHello\n"
    data = ModelCard(card_of(run, existing, license="apache-2.0", base_model="a/b")).data.to_dict()
    assert {key: data[key] for key in ("license", "language", "pipeline_tag", "custom", "base_model")} == {
        "license": "apache-2.0", "language": "fa", "pipeline_tag": "other", "custom": 1, "base_model": "a/b",
    }  # fmt: skip
    assert data["tags"] == ["mine", "hezar-train"]


def test_results_on_other_data_are_kept_and_our_own_replaced(run: HandmadeRun) -> None:
    first = card_of(run, datasets="digits")
    card = ModelCard(first)
    card.data.eval_results.append(EvalResult("image-classification", "mnist", "MNIST", "accuracy", 0.5))
    run.evaluate(10, {"loss": 0.125})
    found = ModelCard(card_of(run, str(card), datasets="digits")).data.eval_results
    assert [(one.dataset_type, one.metric_type, one.metric_value) for one in found] == [
        ("digits", "loss", 0.125),
        ("mnist", "accuracy", 0.5),
    ]


def test_hand_written_parts_are_kept_around_ours(run: HandmadeRun) -> None:
    mine = "---\nlicense: mit\n---\n# My model\n\nWritten by hand.\n"
    first = card_of(run, mine)
    assert first.index("Written by hand.") < first.index(BEGIN)
    edited = first.replace(END, f"{END}\n\n## Limits\n\nIt is small.").replace("# digits", "# changed by hand")
    run.evaluate(10, {"loss": 0.125})
    second = card_of(run, edited)
    assert second.count(BEGIN) == second.count(END) == 1
    assert second.index("Written by hand.") < second.index(BEGIN) < second.index(END) < second.index("It is small.")
    assert "changed by hand" not in second
    assert "0.1250" in second
    assert card_of(run, second) == second


@pytest.mark.parametrize("broken", ["---\n- a list\n---\nKept text\n", "---\nmodel-index: 3\n---\nKept text\n"])
def test_a_card_with_broken_metadata_keeps_its_text(run: HandmadeRun, broken: str) -> None:
    text = card_of(run, broken)
    assert "Kept text" in text
    assert values(ModelCard(text))["loss"] == METRICS["loss"]


def test_it_says_how_the_model_came_about(run: HandmadeRun) -> None:
    (run.root / "recipe.json").write_text(json.dumps({"path": "recipes/digits", "sha256": "ab" * 32}))
    text = card_of(run)
    for words in (
        "| accuracy | 0.8765 | 0.8100 to 0.9300 |", "![The run's curves](train/curves.png)", "| seed | 7 |",
        "| torch | 2", "| device | cpu |", "hezar-train train digits num_epochs=2",
        "hezar-train reproduce tester/digits", "ab" * 32, "| training | TensorDataset | 6 | `",
        "A `Linear` with 36 parameters",
        'model.load_state_dict(load_file(hf_hub_download("tester/digits", "model.safetensors")))',
    ):  # fmt: skip
        assert words in text


def test_hours_do_not_count_the_time_between_two_starts(run: HandmadeRun) -> None:
    starts = [{"time": 1e9}, {"time": 1e9 + 60 * 9}]
    (run.root / "environment.json").write_text(json.dumps({"starts": starts}))
    assert RunFacts(SavedRun(run.root), 10).hours == pytest.approx((5 + 1) / 60)  # rows at minutes 1, 5 and 10


def test_sets_by_name_are_told_apart(run: HandmadeRun) -> None:
    run.note_environment(eval_data={"easy": [1], "hard": [1, 2]})
    run.evaluate(10, {"easy.loss": 0.1, "hard.loss": 0.2, "hard.top.5": 0.3})
    found = ModelCard(card_of(run, datasets="digits")).data.eval_results
    assert [(one.dataset_split, one.metric_type, one.metric_value) for one in found] == [
        ("easy", "loss", 0.1), ("hard", "loss", 0.2), ("hard", "top.5", 0.3),
    ]  # fmt: skip


def test_a_run_without_anything_but_a_checkpoint_has_a_card(tmp_path: Path) -> None:
    run = HandmadeRun(tmp_path / "bare", task=None)
    run.save(1)
    card = ModelCard(card_of(run, step=1))
    assert card.data.eval_results is None
    assert "## Results" not in str(card)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": {"model_type": "bert", "architectures": ["BertModel"]}}, 'BertModel.from_pretrained("'),
        ({"config.json": {"model_type": "bert"}, "tokenizer.json": {}}, "AutoTokenizer.from_pretrained("),
        ({"config.json": {"model_type": "vit"}, "preprocessor_config.json": {}}, "AutoProcessor.from_pretrained("),
        ({"config.json": {"mine": 1}}, "load_file(hf_hub_download("),
        ({"model_config.yaml": {}}, "build_model(config.name, config)"),
        ({"model_config.yaml": {}, "model.pt": {}}, 'Model.load("tester/digits")'),
    ],
)
def test_each_kind_of_model_has_its_way_to_be_loaded(
    run: HandmadeRun, tmp_path: Path, files: dict[str, Any], words: str
) -> None:
    paths = {name: tmp_path / name for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content))
    text = render_card(RunFacts(SavedRun(run.root), 10), REPO, paths)
    assert words in text
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_every_task_of_the_hub_has_its_tag(run: HandmadeRun) -> None:
    without = {TaskType.REGRESSION, TaskType.TEXT_DETECTION}
    assert set(PIPELINE_TAGS) == set(TaskType) - without


def test_a_pushed_card_keeps_what_was_written_on_the_hub(
    hub: LoopbackHub, run: HandmadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    push_run(run.root, REPO)
    card = ModelCard.load(REPO)
    assert values(card)["accuracy"] == METRICS["accuracy"]
    card.text += "\nMy own words.\n"
    card.push_to_hub(REPO)
    run.save(12)
    push_run(run.root, REPO)
    assert "My own words." in hub.files(REPO)["README.md"].decode()


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{one}: &{one} [{', '.join([f'*{before}'] * 9)}]\n" for before, one in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "metadata",
    [
        f"{LAUGHS}tags: *j\n", f"{LAUGHS}datasets: [*j]\n", "tags: &t [*t]\n", "to_yaml: x\nto_dict: y\n", "{: [\n",
        "self: 5\n", "5: 6\n", "tags: 5\n", "model-index: 5\n", "model-index: [{}]\n", "model-index: [[]]\n",
        "model-index: [{name: x, results: [5]}]\n", "!!python/object:os.system {}\n", "eval_results: 5\n",
        "datasets: 5\n", "metrics: 5\n", "tags: {a: b}\n", "[" * 2000 + "\n",
    ],
    ids=range(18),
)  # fmt: skip
def test_a_card_that_somebody_made_to_harm_does_not_stop_a_push(run: HandmadeRun, metadata: str) -> None:
    written = card_of(run, f"---\n{metadata}---\nHello\n")
    assert "Hello" in written
    assert len(written) < 100_000

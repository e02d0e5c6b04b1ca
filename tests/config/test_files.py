"""What is written is read back equal, and what cannot be read is told with file and line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hezar_train.config import MetricConfig, TrainerConfig, read_mapping, to_yaml, write_atomically
from hezar_train.config import files as files_module
from hezar_train.config.files import parse_yaml
from hezar_train.errors import ConfigError
from hezar_train.types import TaskType


def decay(tick: int) -> float:
    return 0.9**tick


def full_config() -> TrainerConfig:
    return TrainerConfig(
        Path("runs") / "یک",
        TaskType.SEQUENCE_LABELING,
        max_steps=0.5,
        mixed_precision="no",
        learning_rate=1e-05,
        optimizer_kwargs={"betas": (0.9, 0.999), "eps": 1e-12},
        lr_scheduler="lambda",
        lr_scheduler_kwargs={"lr_lambda": decay},
        metrics=[
            "accuracy",
            MetricConfig("f1", "maximize", ["f1", "precision"], 2, {"average": "macro", "normalize": False}),
        ],
        resume_from_checkpoint=Path("runs/checkpoints/00000005"),
        do_evaluate=False,
        trackers=[],
        save_steps=0,
    )


@pytest.mark.parametrize("filename", ["train_config.yaml", "other.yml", "config.json"])
@pytest.mark.parametrize("skip_none_fields", [True, False])
def test_a_saved_config_loads_equal(tmp_path: Path, filename: str, skip_none_fields: bool) -> None:
    config = full_config()
    path = config.save(tmp_path, filename, subfolder="train", skip_none_fields=skip_none_fields)
    assert path == tmp_path / "train" / filename
    assert TrainerConfig.load(path) == config
    assert TrainerConfig.load(tmp_path, filename, subfolder="train") == config
    assert ("eval_steps" in path.read_text()) is not skip_none_fields


def test_a_loaded_metric_is_a_metric_config_again(tmp_path: Path) -> None:
    full_config().save(tmp_path)
    metrics = TrainerConfig.load(tmp_path).metrics
    assert metrics == full_config().metrics
    assert type(metrics[1]) is MetricConfig


def test_falsy_overrides_are_honoured(tmp_path: Path) -> None:
    TrainerConfig("run", save_enabled=True, seed=7, trackers=["wandb"], max_steps=5).save(tmp_path)
    config = TrainerConfig.load(tmp_path, save_enabled=False, seed=0, trackers=[], max_steps=None)
    assert (config.save_enabled, config.seed, config.trackers, config.max_steps) == (False, 0, [], None)


def test_a_metric_object_is_held_by_its_name() -> None:
    class Accuracy:
        name = "accuracy"

        def compute(self) -> float:
            return 1.0

    metric = Accuracy()
    config = TrainerConfig("run", metrics=[metric])
    assert config.metrics == [metric]
    assert config.to_dict()["metrics"] == ["accuracy"]


@settings(deadline=None, max_examples=50)
@given(
    learning_rate=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    max_steps=st.none() | st.integers(1, 10**12) | st.floats(0, 1, exclude_min=True, exclude_max=True),
    output_dir=st.text(min_size=1).filter(lambda name: bool(name.strip())),
)
def test_yaml_and_json_hold_every_value_exactly(
    tmp_path_factory: pytest.TempPathFactory, learning_rate: float, max_steps: int | float | None, output_dir: str
) -> None:
    folder = tmp_path_factory.mktemp("config")
    config = TrainerConfig(output_dir, learning_rate=learning_rate, max_steps=max_steps)
    for filename in ("config.yaml", "config.json"):
        loaded = TrainerConfig.load(config.save(folder, filename))
        assert loaded == config
        assert type(loaded.max_steps) is type(max_steps)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-5", 1e-5), ("2E3", 2000.0), ("-1e+2", -100.0), ("1.5e-3", 0.0015), (".5", 0.5), ("5", 5), ("no", "no")],
)
def test_yaml_is_read_by_the_newer_rules(tmp_path: Path, written: str, value: object) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(f"value: {written}\nquoted: '{written}'\nflag: true\nday: 2024-01-31\n")
    values = read_mapping(path)
    assert values == {"value": value, "quoted": written, "flag": True, "day": "2024-01-31"}
    assert type(values["value"]) is type(value)


def test_a_bare_no_is_a_precision(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("output_dir: run\nmixed_precision: no\nlearning_rate: 3e-4\n")
    config = TrainerConfig.load(path)
    assert (config.mixed_precision, config.learning_rate) == ("no", 3e-4)


@pytest.mark.parametrize(
    ("filename", "content", "sentence"),
    [
        ("a.yaml", "output_dir: run\nseed: [1, 2\n", "a.yaml, line 2: a '[' is opened there and not closed"),
        ("a.yaml", "output_dir: run\nx: {a: 1\nseed: 1\n", "a.yaml, line 2: a '{' is opened there and not closed"),
        ("a.yaml", "x: 1\noutput_dir: 'run\nseed: 1\n", "a.yaml, line 2: a quote is opened there and not closed"),
        ("a.yaml", "output_dir: run\n\tseed: 1\n", "a.yaml, line 2: "),
        ("a.yaml", "seed: 1\nbatch_size: 2\nseed: 3\n", "a.yaml, line 3: the key 'seed' appears twice"),
        ("a.yaml", "- seed\n", "a.yaml, line 1: expected a mapping of names to values (batch_size: 16), got a list"),
        (
            "a.yaml",
            "",
            "a.yaml, line 1: expected a mapping of names to values (batch_size: 16), got nothing: the file is empty",
        ),
        ("a.yaml", "x: !!python/name:os.system\n", "a.yaml, line 1: could not determine a constructor"),
        ("a.json", '{"seed": 1,\n "batch_size" 2}', "a.json, line 2: "),
        ("a.json", '{"seed": 1, "seed": 2}', "a.json: the key 'seed' appears twice"),
        ("a.json", "[]", "a.json, line 1: expected a mapping"),
        ("a.toml", "seed = 1", "a.toml: expected a name that ends in .yaml, .yml or .json"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, filename: str, content: str, sentence: str) -> None:
    path = tmp_path / filename
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.load(path)
    assert sentence in str(caught.value)


def test_a_missing_or_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train_config\.yaml: there is no such file"):
        TrainerConfig.load(tmp_path)
    (tmp_path / "train_config.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainerConfig.load(tmp_path)


def test_yaml_anchors_and_merges_are_not_taken_for_doubled_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b\n  <<: *a\n  x: 3\nc:\n  <<: *b\n  y: 4\n")
    assert read_mapping(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 4}}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_atomically(tmp_path / "new" / "file.json", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.json"]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    path = write_atomically(tmp_path / "atomic", b"x")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_yaml_keeps_the_order_and_the_letters() -> None:
    assert to_yaml({"b": "سلام", "a": ("x", 1e-5)}) == "b: سلام\na:\n- x\n- 1.0e-05\n"
    assert json.loads(json.dumps(full_config().to_dict())) == full_config().to_dict()


@pytest.mark.parametrize("text", ["0\x85", "a\u2028b", "x\u2029", "two\nlines\n", "\r", "", "a\x0bb", "سلام‌ دنیا"])
def test_a_line_break_of_any_kind_survives_yaml(text: str) -> None:
    assert parse_yaml(to_yaml({"a": text}), Path("a.yaml")) == {"a": text}


@pytest.mark.parametrize("text", ["1e400", "1e5", "-.5e-3", "2E+7", "1e-5"])
def test_text_that_looks_like_a_number_stays_text(text: str) -> None:
    assert parse_yaml(to_yaml({"a": text, text: 1}), Path("a.yaml")) == {"a": text, text: 1}

"""Files that somebody made up, fed to every reader: a value or an error of ours, within seconds.

The targets and what counts as an answer are in `fuzzing.py`; `benchmarks/fuzz.py` runs them for hours, guided by
coverage. What it found once is in `corpus/`, in the form of files and changes that a person can read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hezar_train import TrainerConfig
from hezar_train.errors import ConfigError, HubError
from tests.security.fuzzing import TARGETS, CheckpointTarget, HubTarget, SlowError, answers, command, judged, quiet

CORPUS = Path(__file__).parent / "corpus"
NUM_EXAMPLES = {"checkpoint": 60, "config": 80, "hub": 30, "ledger": 150, "manifest": 150, "run_folder": 20}
MORE = 25


class DrawnChoices:
    """Choices that hypothesis makes, and makes smaller where something is found."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def number(self, most: int) -> int:
        found: int = self._draw(st.integers(0, most))
        return found

    def raw(self) -> bytes:
        found: bytes = self._draw(st.binary(max_size=80))
        return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """The target of a name, built once."""
    targets: dict[str, Any] = {}

    def build(name: str) -> Any:
        if name not in targets:
            targets[name] = TARGETS[name](tmp_path_factory.mktemp(name))
        return targets[name]

    yield build
    if "hub" in targets:
        targets["hub"].close()


def feed(target: Callable[[Any], None], num_examples: int) -> None:
    every = list(HealthCheck)

    @settings(max_examples=num_examples, derandomize=True, deadline=None, database=None, suppress_health_check=every)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        judged(target, DrawnChoices(data.draw))

    one()


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_files_say_every_reader_answers(built: Callable[[str], Any], name: str) -> None:
    feed(built(name), NUM_EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_files_say_every_reader_answers_for_longer(built: Callable[[str], Any], name: str) -> None:
    feed(built(name), NUM_EXAMPLES[name] * MORE)


def test_what_is_no_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> None:
        raise KeyError("position")

    with pytest.raises(KeyError):
        feed(fails, 1)
    monkeypatch.setattr("tests.security.fuzzing.MOST_SECONDS", 0.0)
    with pytest.raises(SlowError):
        feed(lambda _: None, 1)


CHANGED_CHECKPOINTS = json.loads((CORPUS / "checkpoint.json").read_text())


@pytest.mark.parametrize("case", CHANGED_CHECKPOINTS, ids=[case["name"] for case in CHANGED_CHECKPOINTS])
def test_a_checkpoint_that_was_found_is_answered(built: Callable[[str], Any], case: dict[str, Any]) -> None:
    target: CheckpointTarget = built("checkpoint")
    with quiet():
        target.try_edits(case["kind"], case["edits"])


@pytest.mark.parametrize("kind", ["plain", "cycle", "plateau", "curves", "stream", "hooks", "shards"])
def test_a_checkpoint_that_says_what_was_saved_is_resumed_to_the_end(built: Callable[[str], Any], kind: str) -> None:
    target: CheckpointTarget = built("checkpoint")
    with quiet():
        assert target.resumed(kind).state.global_step == 12


ANSWERS_OF_SERVERS = json.loads((CORPUS / "hub.json").read_text())


@pytest.mark.parametrize("case", ANSWERS_OF_SERVERS, ids=[case["name"] for case in ANSWERS_OF_SERVERS])
def test_an_answer_of_a_server_that_was_found_is_refused(built: Callable[[str], Any], case: dict[str, Any]) -> None:
    target: HubTarget = built("hub")
    with quiet(), pytest.raises(HubError):
        target.try_info(case["info"])


@pytest.mark.parametrize("path", sorted((CORPUS / "config").iterdir()), ids=lambda path: path.stem)
def test_a_config_that_was_found_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError):
        TrainerConfig.load(path)
    with quiet(), answers():
        command("config", "validate", path)

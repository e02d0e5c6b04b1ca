"""`benchmarks/pace.py` judges as its page says, and a library that is not installed stops nobody."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which lies beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("pace")


def measured(pace: ModuleType, trainer: float, again: float = 1.0, workload: str = "tiny") -> Any:
    """What a bare loop of one second, the same once more, and the trainer would have been measured as."""
    seconds = {pace.FLOOR: [1.5, 1.0], pace.FLOOR_AGAIN: [again], pace.TRAINER: [9.0, trainer]}
    return pace.Measured(workload, seconds)


def test_the_page_has_every_workload_with_its_limit(pace: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text(encoding="utf-8").split("\n## Pace\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert {name: float(limit) for name, limit in rows} == {
        name: workload.limit for name, workload in pace.WORKLOADS.items()
    }
    assert "|".join([*pace.WORKLOADS, "all"]) in page
    assert [name for name in pace.CONTESTANTS if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize("workload", ["tiny", "ordinary", "workers", "accumulation", "small", "large"])
def test_the_trainer_passes_at_its_limit_and_fails_above_it(
    workload: str, pace: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = pace.WORKLOADS[workload].limit
    assert pace.judge(measured(pace, limit, workload=workload))
    assert not pace.judge(measured(pace, limit + 0.01, workload=workload))
    assert capsys.readouterr().out.endswith("FAIL\n")


def test_what_the_bare_loop_differs_from_itself_by_is_added_to_the_limit(
    pace: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pace.judge(measured(pace, 1.12, again=1.03))
    assert not pace.judge(measured(pace, 1.14, again=1.03))
    assert "limit 1.10 + 0.030 = 1.130" in capsys.readouterr().out


@pytest.mark.parametrize("again", [0.5, 2.0])
def test_ratios_are_to_the_faster_of_the_two_bare_loops(again: float, pace: ModuleType) -> None:
    assert measured(pace, 1.0, again=again).ratios[pace.TRAINER] == 1.0 / min(again, 1.0)


def test_a_library_that_is_not_installed_is_told_with_its_command_and_the_others_go_on(
    pace: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lightning.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{BENCHMARKS.parent}")
    found = pace.compare("tiny", ["lightning", pace.FLOOR], 1)
    assert list(found.seconds) == [pace.FLOOR]
    assert found.seconds[pace.FLOOR][0] > 0
    told = "lightning is left out (No module named 'no_such_library'): pip install lightning"
    assert told in capsys.readouterr().err


def test_an_import_that_fails_in_the_trainer_itself_is_an_error(
    pace: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hezar_train.py").write_text("import no_such_library\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"hezar_train did not finish 'tiny'[\s\S]*no_such_library"):
        pace.compare("tiny", [pace.TRAINER], 1)


def test_seconds_are_written_and_ratios_drawn(pace: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = [measured(pace, 0.5), measured(pace, 2.0, workload="large")]
    pace.write_json(both, tmp_path / "pace.json")
    written = json.loads((tmp_path / "pace.json").read_text(encoding="utf-8"))
    assert written["workloads"]["large"]["seconds"][pace.TRAINER] == [9.0, 2.0]
    assert written["workloads"]["tiny"]["ratios"][pace.TRAINER] == 0.5
    assert {"torch", "hezar-train"} == set(written["versions"])
    pace.plot(both, tmp_path / "pace.svg")
    drawn = (tmp_path / "pace.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in (">0.50<", ">2.00<", ">tiny: ", ">large: ", f">{pace.TRAINER}<"))

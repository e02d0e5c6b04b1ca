"""`hezar-train report`, `push` and `reproduce`, against a Hub on this machine."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hezar_train.errors import ConfigError
from hezar_train.recipes import recipe_of_hash
from hezar_train.recipes.recipe import hash_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.hub.server import LoopbackHub  # noqa: E402

Invoke = Callable[..., Result]


def test_a_report_is_written_into_the_run_and_a_comparison_where_it_is_asked_for(
    invoke: Invoke, trained: Path, tmp_path: Path
) -> None:
    assert invoke("report", "runs/sums").stdout == "Open it in a browser: runs/sums/report.html\n"
    assert "<html" in (trained / "report.html").read_text(encoding="utf-8").lower()
    assert invoke("report", "runs/sums", "runs/sums", "--out", "both.html").exit_code == 0
    assert (tmp_path / "both.html").is_file()


def test_a_folder_that_only_has_logs_is_no_run_and_nothing_is_written_into_it(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "site/logs/today").mkdir(parents=True)
    done = invoke("report", "site")
    assert done.exit_code == 2
    assert "site is not the folder of a run: it has none of train_config.yaml, plan.json," in done.stderr
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["logs"]
    (tmp_path / "site/logs/today/metrics.json").write_text('{"step": 1, "train.loss": 1.0}\n')
    assert invoke("report", "site").exit_code == 0


def test_a_run_without_a_repository_is_not_pushed_anywhere(invoke: Invoke, trained: Path) -> None:
    done = invoke("push", "runs/sums")
    assert (done.exit_code, "Name one: --repo OWNER/NAME" in done.stderr) == (2, True)


def test_a_pushed_run_is_reproduced_with_the_recipe_of_this_machine(
    trained: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    with LoopbackHub(tmp_path / "hub") as hub:
        place = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path / "home")}

        def call(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "hezar_train", *arguments]
            variables = {**environment, **place, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
            return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)

        place["HF_TOKEN"] = "wrong"
        refused = call("push", "runs/sums", "--repo", "me/sums")
        assert (refused.returncode, refused.stderr.startswith("error: ")) == (75, True), refused.stderr
        place["HF_TOKEN"] = hub.token
        pushed = call("push", "runs/sums", "--repo", "me/sums")
        assert pushed.returncode == 0, pushed.stderr
        again = call("reproduce", "me/sums", "output_dir=runs/again")
        assert again.returncode == 0, again.stderr
        saved = "checkpoints/00000006/model.safetensors"
        assert (tmp_path / "runs/again" / saved).read_bytes() == (trained / saved).read_bytes()


def test_a_pushed_run_whose_recipe_is_not_here_is_refused(invoke: Invoke, trained: Path) -> None:
    fields = {"output_dir": "runs/again"}
    here = recipe_of_hash(hash_of(Path("recipes/sums")), fields, {"width": 3}, ["seed=1"])
    assert (here.folder, here.options, here.config.seed) == (Path("recipes/sums"), {"width": 3}, 1)
    source = hashlib.sha256(Path("recipes/sums/recipe.py").read_bytes()).hexdigest()  # what was once recorded
    assert recipe_of_hash(source, fields, {}).folder == Path("recipes/sums")
    with pytest.raises(ConfigError, match="no recipe on this machine has the SHA-256 0000"):
        recipe_of_hash("0" * 64, fields, {})

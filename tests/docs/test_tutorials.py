"""The commands of a tutorial work as they are written, one after the other, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BIN = str(Path(sys.executable).parent)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_first_run_work(tmp_path: Path) -> None:
    script = "".join(COMMANDS.findall((TUTORIALS / "first_run.md").read_text(encoding="utf-8")))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming from runs/broken/checkpoints/" in done.stdout + done.stderr
    assert re.search(r"broken +image_classification.*interrupted", done.stdout)
    assert "Every sample was trained exactly once per epoch." in done.stdout
    assert (tmp_path / "comparison.html").exists()

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hezar_train.loop import Hook
from hezar_train.recipes import build_trainer, load_recipe
from hezar_train.report import write_report
from tests.report.runs import finished_run

Open = Callable[..., Any]

SMOKE = Path(__file__).parents[2] / "recipes" / "image_classification" / "smoke.yaml"


class _Crash(Hook):
    def after_step(self) -> None:
        if self.trainer.state.global_step == 8:
            raise KeyboardInterrupt


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train digits for 12 steps, killed in step 8 and resumed from the checkpoint of step 6."""
    root = tmp_path_factory.mktemp("report") / "digits"
    overrides = [f"output_dir={root}", "log_steps=1", "eval_steps=3"]
    first = build_trainer(load_recipe(SMOKE, overrides))
    first.register_hooks([_Crash()])
    with pytest.raises(KeyboardInterrupt):
        first.train()
    time.sleep(1.1)  # the names of TensorBoard's files, which tell starts apart, count seconds
    build_trainer(load_recipe(SMOKE, overrides)).train()
    return root


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Open a file in a page that fails the test if it complains or asks for anything."""
    complaints: list[str] = []
    contexts = []

    def opened(path: Path, width: int = 1280, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if _leaves(request.url, path) else None)
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []


def _leaves(url: str, path: Path) -> bool:
    return url.split("#", maxsplit=1)[0] != path.as_uri() and not url.startswith("data:")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a run with everything."""
    return write_report([finished_run(tmp_path_factory.mktemp("browser") / "plates").root])

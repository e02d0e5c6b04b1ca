from __future__ import annotations

import time
from pathlib import Path

import pytest

from hezar_train.launch import build_trainer, load_recipe
from hezar_train.loop import Hook

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

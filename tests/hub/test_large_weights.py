"""Weights in several files on the Hub fill a model that was built without values, share by share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # before the forks: it takes seconds
from huggingface_hub import HfApi
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from cases import distance, points
from ranks import on_ranks
from spread import SETTINGS

from hezar_train import Trainer, TrainerConfig, without_weights
from hezar_train.checkpoint.split_files import write_split_tensors
from tests.hub.server import LoopbackHub

REPO = "tester/large"


class Large(nn.Module):
    """Blocks and a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(4, 3)
        self.register_buffer("steps", torch.arange(4.0), persistent=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + self.steps
        logits: torch.Tensor = self.last(x)
        return logits


@pytest.mark.parametrize("count", [2, 4])
def test_a_large_model_is_filled_from_the_hub(
    count: int, hub: LoopbackHub, without_xet: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    torch.manual_seed(5)
    model = Large()
    write_split_tensors(tmp_path / "weights", model.state_dict(), 200)
    assert len(list((tmp_path / "weights").iterdir())) > 3
    api = HfApi(endpoint=hub.url, token=hub.token)
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=tmp_path / "weights")

    def work() -> Any:
        config = TrainerConfig(tmp_path / "run", **SETTINGS | {"init_weights_from": REPO})
        trainer = Trainer(config, without_weights(Large), points(24), points(13))
        before = trainer.get_model_para()
        trainer.train()
        return before, trainer.model.steps.tolist(), trainer.state.update_step

    for weights, steps, updates in on_ranks(count, work):
        assert distance(weights, model.state_dict()) == 0.0
        assert steps == [0.0, 1.0, 2.0, 3.0]
        assert updates == 4

"""A recipe that trains a line through zeros in a moment, as texts."""

from __future__ import annotations

RECIPE = """\
import random

import numpy as np
import torch

from hezar_train import Recipe

drawn = []


def build(width: int = 2, rate: float = 0.0, names: list | None = None) -> Recipe:
    drawn.append((random.random(), np.random.random()))
    data = torch.utils.data.TensorDataset(torch.zeros(6, width), torch.zeros(6, 1))
    return Recipe(model=torch.nn.Linear(width, 1), train_dataset=data)
"""
CONFIG = """\
recipe:
  width: 3
trainer:
  output_dir: run
  batch_size: 2
  criterion: MSELoss
  resume_from_checkpoint: true
"""

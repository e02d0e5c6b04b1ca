"""The lazy config of `train_net.py`: a small classifier of handwritten digits, over LiBai's defaults."""

from __future__ import annotations

import digits
import torch
from torch import nn
from torch.utils.data import Dataset

from hezar_train.compat.libai.config import LazyCall, get_config
from hezar_train.compat.libai.data import (
    DistTensorData,
    Instance,
    build_image_test_loader,
    build_image_train_loader,
)


class Digits(Dataset[Instance]):
    """The digits, to train on or held out."""

    def __init__(self, train: bool = True) -> None:
        self.pixels, self.labels = digits.labelled()[0 if train else 1].tensors

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Instance:
        return Instance(images=DistTensorData(self.pixels[index]), labels=DistTensorData(self.labels[index]))


class Classifier(nn.Module):
    """Losses by name in training, scores otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(digits.NUM_PIXELS, width), nn.ReLU(), nn.Linear(width, digits.NUM_CLASSES)
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(images)
        if not self.training:
            return {"prediction_scores": scores}
        return {"cls_loss": nn.functional.cross_entropy(scores, labels)}


train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph

train.output_dir = "runs/train_net"
train.train_micro_batch_size = 32
train.train_iter = 400
train.warmup_ratio = 0.1
train.evaluation.eval_period = 100
train.checkpointer.period = 100
optim.lr = 0.003
graph.enabled = False

model = LazyCall(Classifier)(width=64)
dataloader = {
    "train": LazyCall(build_image_train_loader)(dataset=[LazyCall(Digits)(train=True)], num_workers=0),
    "test": [LazyCall(build_image_test_loader)(dataset=LazyCall(Digits)(train=False), num_workers=0)],
}

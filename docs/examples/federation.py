"""Rounds of federated learning, simulated in one process: a server's model and clients that are ordinary trainers.

Killed anywhere, it goes on: the server's file says which round is done, and each client's checkpoint which one it has
begun, with the weights that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hezar_train import Trainer
from hezar_train.checkpoint import load_round, save_round

__all__ = ["Federation", "make_classifier"]


def make_classifier(num_pixels: int, num_classes: int) -> nn.Module:
    """Build a small network whose weights are the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(num_pixels, 32), nn.ReLU(), nn.Linear(32, num_classes))


class Federation:
    """Train clients in rounds; after each round the server's model is the mean of theirs."""

    def __init__(
        self, folder: Path, server: nn.Module, clients: Sequence[Trainer], num_rounds: int, *, resume: bool
    ) -> None:
        self.server, self.clients, self._num_rounds = server, clients, num_rounds
        self._file = Path(folder) / "server.safetensors"
        self.round = load_round(self._file, server) if resume and self._file.exists() else 0
        self.drifts: list[float] = []

    def train(self) -> None:
        """Do the rounds that are left."""
        for client in self.clients:
            if client.call_is_open:  # a kill broke it off
                client.train()
        while self.round < self._num_rounds:
            for client in self.clients:
                self._let_take_part(client, self.round + 1)
            self.drifts.append(sum(map(self._drift_of, self.clients)) / len(self.clients))
            self.server.load_state_dict(self._average())
            self.round += 1
            save_round(self._file, self.server, self.round)

    def accuracy(self) -> float:
        """Return the share of right answers of the server's model, as the mean over the clients' held-out digits."""
        found = []
        for pixels, labels in (client.eval_dataset.tensors for client in self.clients):
            with torch.no_grad():
                found.append(float((self.server(pixels).argmax(1) == labels).float().mean()))
        return sum(found) / len(found)

    def _let_take_part(self, client: Trainer, number: int) -> None:
        if client.state.hooks.get("round", 0) < number:  # else it was done before a kill
            client.update(self.server.state_dict())
            client.state.hooks["round"] = number
            client.train()

    def _average(self) -> dict[str, torch.Tensor]:
        """Weigh each client by its samples; a round is whole epochs, so what train() counts is in the same ratio."""
        sizes = [len(client.train_dataset) for client in self.clients]
        given = [client.get_model_para() for client in self.clients]
        pairs = list(zip(sizes, given, strict=True))
        return {name: sum(size * one[name] for size, one in pairs) / sum(sizes) for name in given[0]}

    def _drift_of(self, client: Trainer) -> float:
        """Return how far a client's weights have gone from those that it was given."""
        start, given = self.server.state_dict(), client.get_model_para()
        return float(torch.stack([(given[name] - start[name]).norm() for name in given]).norm())

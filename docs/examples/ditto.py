"""Ditto: clients with different digits train one model together, and each a personal one that is drawn to it.

    python docs/examples/ditto.py [--output runs/ditto] [--resume]

A `DittoTrainer` holds both models. In each call of `train()` the personal one learns first, with a hook that pulls it
to the common one, then the common one, which alone is exchanged. `evaluate()` shows what the personal one can do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command import run
from digits import NUM_CLASSES, NUM_PIXELS, by_owner
from federation import Federation, make_classifier

from hezar_train import TrainerConfig
from hezar_train.federated.ditto import DittoTrainer

NUM_CLIENTS = 4


class Client(DittoTrainer):
    """A trainer that does not show its facts in every round."""

    def print_info(self) -> None:
        """Say nothing."""


def build(
    output_dir: Path, *, regular_weight: float = 0.1, personal_steps: int = 2, num_rounds: int = 8, **overrides: Any
) -> Federation:
    """Build the federation; overrides are config fields of the clients."""
    settings = {
        "task": "image_classification",
        "local_update_steps": 3,
        "batch_or_epoch": "epoch",
        "batch_size": 32,
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "criterion": "CrossEntropyLoss",
        "save_total_limit": 2,
        "do_evaluate": False,
    }
    clients = []
    for number, (train, test) in enumerate(by_owner(NUM_CLIENTS)):
        config = TrainerConfig(Path(output_dir) / f"client{number}", **settings | overrides)
        model = make_classifier(NUM_PIXELS, NUM_CLASSES)
        ditto = {"regular_weight": regular_weight, "personal_steps": personal_steps}
        clients.append(Client(config, model, train, test, **ditto))
    server = make_classifier(NUM_PIXELS, NUM_CLASSES)
    resume = bool(overrides.get("resume_from_checkpoint"))
    return Federation(output_dir, server, clients, num_rounds, resume=resume)


def measure(federation: Federation) -> float:
    """Return the accuracy of the personal models, each on its own client's held-out digits."""
    found = [client.evaluate()["accuracy"] for client in federation.clients]
    return sum(found) / len(found)


if __name__ == "__main__":
    run("ditto", build, measure, "accuracy of personal models on held-out digits")

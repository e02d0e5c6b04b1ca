"""FedProx: clients with different digits train one model together; a hook keeps each from going its own way.

    python docs/examples/fedprox.py [--output runs/fedprox] [--resume]

One call of `train()` is a client's part of a round: `local_update_steps` epochs. `wrap_fedprox_trainer` adds the hook.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command import run
from digits import NUM_CLASSES, NUM_PIXELS, by_owner
from federation import Federation, make_classifier

from hezar_train import Trainer, TrainerConfig
from hezar_train.federated import wrap_fedprox_trainer

NUM_CLIENTS = 4


class Client(Trainer):
    """A trainer that does not show its facts in every round."""

    def print_info(self) -> None:
        """Say nothing."""


def build(output_dir: Path, *, mu: float = 0.1, num_rounds: int = 15, **overrides: Any) -> Federation:
    """Build the federation; overrides are config fields of the clients."""
    settings = {
        "task": "image_classification",
        "local_update_steps": 5,
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
        client = Client(config, make_classifier(NUM_PIXELS, NUM_CLASSES), train, test)
        clients.append(wrap_fedprox_trainer(client, mu))
    server = make_classifier(NUM_PIXELS, NUM_CLASSES)
    resume = bool(overrides.get("resume_from_checkpoint"))
    return Federation(output_dir, server, clients, num_rounds, resume=resume)


def measure(federation: Federation) -> float:
    """Return the accuracy of the common model, as the mean over the clients' held-out digits."""
    return federation.accuracy()


if __name__ == "__main__":
    run("fedprox", build, measure, "accuracy on the clients' held-out digits")

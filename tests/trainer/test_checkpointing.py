"""What a checkpoint holds beside model and optimizer, and that all of it comes back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from hezar_train import Trainer
from hezar_train.checkpoint import CheckpointStore

Build = Callable[..., Trainer]
SETTINGS: dict[str, Any] = {"lr_scheduler": "cosine_annealing", "early_stopping_patience": 3, "num_epochs": 2}


def states_of(trainer: Trainer) -> dict[str, Any]:
    """Return the state of each row of the table, as it is now."""
    table = trainer.parts.checkpointing._stateful()
    return {name: copy.deepcopy(one.state_dict()) for name, (_, one) in table.items() if one is not None}


def test_every_row_of_the_table_is_saved_and_comes_back(toy: Build, with_scaler: Any, rows: Any) -> None:
    first = toy(accelerator=with_scaler(), eval_dataset=rows(4), **SETTINGS)
    built = states_of(first)
    saved: list[dict[str, Any]] = []
    first.register_hook_in_train(lambda _: saved.append(states_of(first)), "on_epoch_end")  # right before the save
    first.train()
    assert saved[-1].keys() == {"schedule", "scaler", "stopping"}
    assert all(saved[-1][name] != built[name] for name in built)
    resumed = toy(accelerator=with_scaler(), eval_dataset=rows(4), resume_from_checkpoint=True, **SETTINGS)
    assert states_of(resumed) == saved[-1]


@pytest.mark.parametrize("name", ["scaler", "stopping"])
def test_what_an_earlier_version_did_not_save_stays_as_it_was_built(
    name: str, toy: Build, with_scaler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = toy(accelerator=with_scaler(), max_steps=5, **SETTINGS)
    built = states_of(first)
    contents = first.parts.checkpointing._contents

    def without(*given: Any) -> dict[str, Any]:
        found = contents(*given)
        del found["extra"][name]
        return found

    monkeypatch.setattr(first.parts.checkpointing, "_contents", without)
    first.train()
    resumed = toy(accelerator=with_scaler(), resume_from_checkpoint=True, accept_changes=True, **SETTINGS)
    assert states_of(resumed)[name] == built[name]
    assert states_of(resumed)["schedule"] != built["schedule"]


def test_the_names_in_a_checkpoint_are_those_of_earlier_versions(toy: Build) -> None:
    trainer = toy()
    trainer.train()
    extra = CheckpointStore(trainer.folder.checkpoints).open(trainer.folder.checkpoints / "00000005").extra()
    assert extra.keys() == {"plan", "facts", "schedule", "scaler", "hooks", "stopping", "data", "measured"}
    assert extra["scaler"] is None

"""The fields of the Hub check themselves; none of them is a token."""

from __future__ import annotations

from typing import Any

import pytest

from hezar_train.config.fields import HubFields


def problems(**given: Any) -> list[str]:
    return list(HubFields(**given).problems())


def test_the_defaults_and_a_full_set_have_no_problem() -> None:
    assert problems() == []
    card = {"language": "fa", "license": "apache-2.0", "datasets": ["a/b"], "base_model": "c/d", "tags": ["x"]}
    given = {"hub_strategy": "every_save", "hub_private": True, "hub_revision": "dev", "hub_wait_seconds": 0.5}
    assert problems(push_to_hub=True, hub_model_id="me/model", hub_card=card, **given) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"push_to_hub": True}, "push_to_hub=True needs hub_model_id"),
        ({"hub_model_id": "model"}, "hub_model_id='model' is no repository: expected 'owner/name'"),
        ({"hub_model_id": 3}, "hub_model_id: expected a repository"),
        ({"hub_strategy": "ends"}, "Did you mean 'end'?"),
        ({"hub_private": "yes"}, "hub_private: expected True or False"),
        ({"hub_revision": ""}, "hub_revision must not be empty"),
        ({"hub_wait_seconds": -1}, "hub_wait_seconds=-1 must not be negative"),
        ({"hub_card": {"licence": "mit"}}, "Did you mean 'license'?"),
        ({"hub_card": "mit"}, "hub_card: expected a mapping"),
    ],
)
def test_a_mistake_is_told(given: dict[str, Any], words: str) -> None:
    (problem,) = problems(**given)
    assert words in problem

"""Fields of the Hugging Face Hub: whether, where and when the run is pushed. Tokens are never a field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hezar_train.config.checks import flag, keywords, number, one_of, text, wrong_type

__all__ = ["HUB_CARD_KEYS", "HUB_STRATEGIES", "HubFields"]

HUB_STRATEGIES = ("end", "best", "every_save", "all_checkpoints")
HUB_CARD_KEYS = ("base_model", "datasets", "language", "license", "license_link", "license_name", "tags")
REPO_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(kw_only=True)
class HubFields:
    push_to_hub: bool = False
    """Push the run to the Hub in the background. The token comes from the environment or `hf auth login`."""

    hub_model_id: str | None = None
    """Repository to push to, as "owner/name"; it is made if it does not exist."""

    hub_strategy: str = "end"
    """When to push: "end", "best" (each new best one), "every_save" or "all_checkpoints"; the end is always pushed."""

    hub_private: bool | None = None
    """Make the repository private, if it has to be made. None: as the account's settings say."""

    hub_revision: str | None = None
    """Branch to push to, made if need be. None: the main branch."""

    hub_wait_seconds: int | float = 300
    """How long the end of `train()` waits for pushes; training itself never does."""

    hub_card: dict[str, Any] | None = None
    """What a run cannot know for its model card: base_model, datasets, language, license, tags."""

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each mistake in these fields."""
        yield from flag("push_to_hub", self.push_to_hub)
        yield from self._problems_of_model_id()
        if self.push_to_hub is True and getattr(self, "save_enabled", True) is False:
            yield "push_to_hub=True pushes what was saved, but save_enabled=False. Change one of them."
        yield from one_of("hub_strategy", self.hub_strategy, HUB_STRATEGIES, optional=False)
        yield from flag("hub_private", self.hub_private, optional=True)
        if self.hub_revision is not None:
            yield from text("hub_revision", self.hub_revision)
        yield from number("hub_wait_seconds", self.hub_wait_seconds)
        yield from self._problems_of_card()

    def _problems_of_model_id(self) -> Iterator[str]:
        given = self.hub_model_id
        if given is None:
            if self.push_to_hub is True:
                yield "push_to_hub=True needs hub_model_id: name the repository, for example hub_model_id='owner/name'"
        elif not isinstance(given, str):
            yield wrong_type("hub_model_id", given, "a repository, 'owner/name' (str)")
        elif not REPO_ID.fullmatch(given):
            yield f"hub_model_id={given!r} is no repository: expected 'owner/name'"

    def _problems_of_card(self) -> Iterator[str]:
        yield from keywords("hub_card", self.hub_card)
        if isinstance(self.hub_card, dict):
            for key in self.hub_card:
                yield from one_of("a key of hub_card", key, HUB_CARD_KEYS, optional=False)

"""`RUN/hub.json`: what became of every push, true whatever happens.

    {"format": 1, "pushes": [{"step", "reason", "repo_id", "revision", "strategy", "outcome", "commit", "url", "error",
                              "attempts", "files", "bytes", "checkpoints", "queued", "began", "ended"}, ...]}

Times are seconds since 1970. An outcome is "done", "failed" (the error says why), "superseded" (a newer push took its
place), or "unfinished" (the program stopped waiting for it). The file is written whole at each entry; nothing in it can
hold a token.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hezar_train.config.files import write_atomically
from hezar_train.hub.redaction import redact

__all__ = ["DONE", "FAILED", "SUPERSEDED", "UNFINISHED", "HubRecord", "PushOutcome"]

FORMAT = 1
DONE, FAILED, SUPERSEDED, UNFINISHED = "done", "failed", "superseded", "unfinished"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushOutcome:
    """What became of one push."""

    step: int
    reason: str
    """Why it was pushed: "save", "best", "end", "asked"."""
    repo_id: str
    revision: str | None
    strategy: str
    outcome: str
    commit: str | None = None
    url: str | None = None
    error: str | None = None
    attempts: int = 0
    files: int = 0
    bytes: int = 0
    checkpoints: list[int] = field(default_factory=list)
    """Steps whose whole checkpoints the commit holds under their own names."""
    queued: float = 0.0
    began: float | None = None
    ended: float | None = None

    @property
    def oid(self) -> str | None:
        """The commit's id, under the client's name for it."""
        return self.commit

    def __str__(self) -> str:
        words = f"step {self.step} ({self.reason}) to {self.repo_id}: {self.outcome}"
        if self.outcome == DONE:
            return f"{words}, commit {self.commit}, {self.bytes / 1e6:.1f} MB"
        return f"{words} after {self.attempts} attempts: {self.error}" if self.error else words


class HubRecord:
    """Append to the record of a run; several threads may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, *outcomes: PushOutcome) -> None:
        """Add entries; a disk that does not take them is told and no more."""
        new = [json.loads(redact(json.dumps(dataclasses.asdict(outcome)))) for outcome in outcomes]
        with self._lock:
            content = {"format": FORMAT, "pushes": [*self.entries(), *new]}
            try:
                write_atomically(self.path, json.dumps(content, indent=1) + "\n")
            except OSError as error:
                missing = "; ".join(map(str, outcomes))
                logger.warning("%s was not written: %s. This is missing in it: %s", self.path, error, missing)

    def entries(self) -> list[dict[str, Any]]:
        """Return all entries; none where the file is missing or cannot be read."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return [dict(one) for one in content["pushes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def done(self, repo_id: str, revision: str | None) -> list[list[int]]:
        """Return the steps of the checkpoints in each finished push to a place."""
        found = [one for one in self.entries() if one.get("outcome") == DONE]
        here = [one for one in found if (one.get("repo_id"), one.get("revision")) == (repo_id, revision)]
        return [list(one.get("checkpoints") or []) for one in here]

    def is_uploaded(self, step: int) -> bool:
        """Tell whether the last word on a step, or on one after it, is that it was pushed."""
        last = [one for one in self.entries() if one.get("step", -1) >= step and one.get("outcome") != SUPERSEDED]
        return bool(last) and last[-1].get("outcome") == DONE

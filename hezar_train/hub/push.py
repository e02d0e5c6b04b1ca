"""Push a run to the Hub: one checkpoint, staged once from the run's folder, in one commit, tried as often as need be.

An attempt begins with the repository as it is now: it commits on top of that very commit, so an answer that was lost, a
second pusher or an attempt that comes late can neither double nor turn back what is there. `push_run` waits until it is
done; `Pusher` does the same in the background.

`RUN/hub.json` (`HubRecord`) says what became of every push, true whatever happens:

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
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hezar_train.checkpoint.manifest import read_manifest, remove_folder
from hezar_train.config.fields import HUB_STRATEGIES
from hezar_train.config.files import write_atomically
from hezar_train.errors import CheckpointError, ConfigError, HubError, choices, suggestion
from hezar_train.hub.card import RunFacts, render_card
from hezar_train.hub.client import Commit, Head, HubUnreachableError, Pace, Repository, parse_repo_id, redact
from hezar_train.hub.pushed_files import (
    CARD_FILE,
    CHECKPOINTS_FOLDER,
    LAST,
    PushNames,
    SavedRun,
    Staged,
    remove_leftovers,
    stage,
)
from hezar_train.run_folder import read_file
from hezar_train.run_layout import MANIFEST_FILE, step_name, step_of

__all__ = [
    "DONE",
    "FAILED",
    "SUPERSEDED",
    "UNFINISHED",
    "HubRecord",
    "Push",
    "PushOutcome",
    "PushTarget",
    "push_files",
    "push_run",
]

FORMAT = 1
DONE, FAILED, SUPERSEDED, UNFINISHED = "done", "failed", "superseded", "unfinished"
ATTEMPTS = 6
T = TypeVar("T")
MESSAGES = {
    "asked": "Step {step}",
    "save": "Step {step}",
    "best": "Best so far: step {step}",
    "end": "End of training: step {step}",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PushTarget:
    """Where to push, and what."""

    repo_id: str
    revision: str | None = None
    private: bool | None = None
    strategy: str = "end"
    names: PushNames = field(default_factory=PushNames)
    extra_folder: Path | None = None
    """Files to add at the repository's root as they are."""
    metadata: Mapping[str, Any] | None = None
    """What the card says that a run cannot know."""

    def __post_init__(self) -> None:
        parse_repo_id(self.repo_id)
        if self.strategy not in HUB_STRATEGIES:
            known = choices(HUB_STRATEGIES)
            raise ConfigError(
                f"strategy={self.strategy!r} is not known. Choose from: {known}."
                f"{suggestion(self.strategy, HUB_STRATEGIES)}"
            )


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


class Push:
    """One checkpoint on its way to the Hub."""

    def __init__(
        self,
        run: SavedRun,
        target: PushTarget,
        step: int,
        reason: str,
        message: str | None = None,
        queued: float | None = None,
    ) -> None:
        self._run, self._target = run, target
        self.step, self.reason = step, reason
        self.message = message or MESSAGES[reason].format(step=step)
        self.attempts = 0
        self._began = time.time()
        self._queued = self._began if queued is None else queued
        self._staged: Staged | None = None

    def stage(self, *, verified: bool) -> None:
        """Put the files aside, so that nothing that happens in the run's folder matters any more."""
        target = self._target
        self._staged = stage(
            self._run, self.step, target.strategy, target.names, target.extra_folder, verified=verified
        )

    @property
    def staged(self) -> Staged:
        """The files at rest."""
        if self._staged is None:
            raise CheckpointError("this push was not staged")
        return self._staged

    def attempt(self) -> Commit:
        """Try once, from the beginning; what is there already is not sent again."""
        self.attempts += 1
        repository = Repository(self._target.repo_id, self._target.revision)
        repository.ensure(self._target.private)
        head = repository.head()
        card = self._card(repository, head)
        files: dict[str, Path | bytes] = {**self._missing(head), CARD_FILE: card.encode("utf-8")}
        return repository.commit(files, self._stale(repository, head), self.message, head.oid)

    def discard(self) -> None:
        """Remove the staged files."""
        if self._staged is not None:
            self._staged.discard()

    def outcome(self, outcome: str, commit: Commit | None = None, error: str | None = None) -> PushOutcome:
        """Say what became of this push."""
        files = {} if self._staged is None else self._staged.files
        return PushOutcome(
            self.step, self.reason, self._target.repo_id, self._target.revision, self._target.strategy, outcome,
            commit=None if commit is None else commit.oid,
            url=None if commit is None else commit.url,
            error=error,
            attempts=self.attempts,
            files=len(files),
            bytes=self._nbytes(),
            checkpoints=sorted(self._checkpoint_steps()) if outcome == DONE else [],
            queued=self._queued,
            began=self._began,
            ended=time.time(),
        )  # fmt: skip

    def _nbytes(self) -> int:
        try:
            return 0 if self._staged is None else self._staged.nbytes
        except FileNotFoundError:  # discarded meanwhile
            return 0

    def _checkpoint_steps(self) -> set[int]:
        folders = {Path(name).parts[1] for name in self.staged.files if name.startswith(f"{CHECKPOINTS_FOLDER}/")}
        return {step for folder in folders if (step := step_of(folder)) is not None}

    def _missing(self, head: Head) -> dict[str, Path]:
        """Leave out older checkpoints that this run has pushed and that are there: their hashes need no second look."""
        record = HubRecord(self._run.layout.hub)
        pushed = {step for one in record.done(self._target.repo_id, self._target.revision) for step in one}
        folders = [f"{CHECKPOINTS_FOLDER}/{step_name(step)}/" for step in pushed - {self.step}]
        there = tuple(folder for folder in folders if folder + MANIFEST_FILE in head.files)
        return {name: path for name, path in self.staged.files.items() if not (there and name.startswith(there))}

    def _stale(self, repository: Repository, head: Head) -> list[str]:
        """List the files of the last checkpoint there that are not of this one; only those that its manifest names."""
        own = self.staged.files
        others = {name for name in head.files if name.startswith(f"{LAST}/")} - own.keys()
        if self._target.strategy != "every_save" or not others or f"{LAST}/{MANIFEST_FILE}" not in head.files:
            return []
        folder = self.staged.folder / "before"
        try:
            repository.download(f"{LAST}/{MANIFEST_FILE}", folder, head.oid)
            listed = {f"{LAST}/{name}" for name in read_manifest(folder / LAST).files}
        except CheckpointError:
            return []  # not ours: nothing is deleted
        finally:
            remove_folder(folder)
        return sorted(others & listed)

    def _card(self, repository: Repository, head: Head) -> str:
        existing = None
        if CARD_FILE in head.files:
            folder = self.staged.folder / "card"
            try:
                existing = repository.download(CARD_FILE, folder, head.oid).read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                raise HubError(f"{CARD_FILE} of {self._target.repo_id} is no UTF-8 text: mend it first") from None
            finally:
                remove_folder(folder)
        facts = RunFacts(self._run, self.step)
        return render_card(facts, self._target.repo_id, self.staged.files, existing, self._target.metadata)


def push_run(
    run_folder: str | os.PathLike[str],
    repo_id: str | None = None,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    strategy: str | None = None,
    names: PushNames | None = None,
    extra_folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_attempts: int = ATTEMPTS,
    pace: Pace | None = None,
) -> PushOutcome:
    """Push a run from its folder alone and wait for it; what is not given is as the run's config says."""
    run = SavedRun(Path(run_folder))
    remove_leftovers(run)
    hub = {key: value for key, value in run.settings.items() if key.startswith("hub_")}
    if (repo := repo_id or hub.get("hub_model_id")) is None:
        raise ConfigError(f"the config in {run.layout.root} has no hub_model_id: name the repository, 'owner/name'")
    target = PushTarget(
        str(repo), revision or hub.get("hub_revision"), hub.get("hub_private") if private is None else private,
        str(strategy or hub.get("hub_strategy") or "end"), names or PushNames(), extra_folder,
        hub.get("hub_card") if metadata is None else metadata,
    )  # fmt: skip
    step = run.best_step() if target.strategy == "best" else run.newest_step()
    push = Push(run, target, step, "asked", commit_message)
    try:
        push.stage(verified=False)
        return _push_and_record(push, HubRecord(run.layout.hub), max_attempts, pace or Pace())
    finally:
        push.discard()


def push_files(
    files: Mapping[str, Path | bytes],
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    revision: str | None = None,
    repo_type: str = "model",
    max_attempts: int = ATTEMPTS,
    pace: Pace | None = None,
) -> Commit:
    """Put a few files, such as a config, into a repository in one commit, which is made if need be."""

    def attempt() -> Commit:
        repository = Repository(parse_repo_id(repo_id), revision, repo_type)
        repository.ensure(private)
        return repository.commit(files, [], commit_message, repository.head().oid)

    return _try_often(attempt, max_attempts, pace or Pace())


def _push_and_record(push: Push, record: HubRecord, max_attempts: int, pace: Pace) -> PushOutcome:
    """Try until it is done, hopeless, or has been tried often enough; write down what became of it."""
    try:
        done = push.outcome(DONE, _try_often(push.attempt, max_attempts, pace))
    except HubError as error:
        record.append(push.outcome(FAILED, error=str(error)))
        raise
    record.append(done)
    return done


def _try_often(attempt: Callable[[], T], max_attempts: int, pace: Pace) -> T:
    for number in range(1, max_attempts):
        try:
            return attempt()
        except HubUnreachableError as error:
            wait = pace.delay_seconds(min(number, pace.breaker_failures - 1), error.retry_after_seconds)
            logger.warning("%s Trying again in %.0f seconds.", error, wait)
            time.sleep(wait)
    return attempt()


def _entry(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the record; the steps in it are numbers, or are left out."""
    steps = [step for step in found.get("checkpoints") or [] if type(step) is int]
    step = found.get("step")
    return {**found, "checkpoints": steps, "step": step if type(step) is int else -1}


def _redacted(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Return an outcome whose texts hold no secrets; each by itself, for a text of JSON has quotes of its own."""
    return {name: redact(value) if isinstance(value, str) else value for name, value in outcome.items()}


class HubRecord:
    """Append to the record of a run; several threads may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def append(self, *outcomes: PushOutcome) -> None:
        """Add entries; a disk that does not take them is told and no more."""
        new = [_redacted(dataclasses.asdict(outcome)) for outcome in outcomes]
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
            content = json.loads(read_file(self.path))
            return [_entry(one) for one in content["pushes"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
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

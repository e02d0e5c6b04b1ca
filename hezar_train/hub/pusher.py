"""Push in the background: the training thread leaves a request and goes on, whatever the network does.

One thread pushes. One request can wait, and the newest wins: what it replaces is recorded as superseded. An attempt
that fails is repeated after a wait that grows, with jitter; after many failures in a row the breaker opens and the
waits are minutes. Each attempt has a thread of its own, because a server that never answers would hold it for ever.
Nothing here knows a trainer: everything is read from finished checkpoints and records in the run's folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from hezar_train.errors import HezarTrainError, HubError
from hezar_train.hub.client import HubUnreachableError, Pace, Repository, redact
from hezar_train.hub.push import DONE, FAILED, SUPERSEDED, UNFINISHED, HubRecord, Push, PushOutcome, PushTarget
from hezar_train.hub.pushed_files import SavedRun, SupersededError, remove_leftovers
from hezar_train.run_layout import HUB_FILE

if TYPE_CHECKING:
    from hezar_train.config import TrainerConfig

__all__ = ["Pusher"]

GRACE_SECONDS = 0.5  # for the thread to write down that its time is up
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Request:
    """What the training thread asks for; None as the step means the one that the strategy names when its turn comes."""

    step: int | None
    reason: str
    queued: float = field(default_factory=time.time)


class Pusher:
    """Push a run's checkpoints as its strategy says, until it is closed."""

    def __init__(self, run_folder: str | os.PathLike[str], target: PushTarget, pace: Pace | None = None) -> None:
        self.target = target
        self.outcomes: list[PushOutcome] = []
        self._root, self._pace = Path(run_folder), pace or Pace()
        self._record = HubRecord(self._root / HUB_FILE)
        self._condition = threading.Condition()
        self._pending: _Request | None = None
        self._replaced: list[_Request] = []
        self._active: Push | None = None
        self._saved: set[int] = set()
        self._best: int | None = None
        self._failures = 0
        self._not_before = self._closing_turn = 0.0
        self._deadline: float | None = None
        self._is_open = True
        self._is_finished = False
        self._thread = threading.Thread(target=self._run, name="hub-pusher", daemon=True)

    @classmethod
    def started(cls, config: TrainerConfig, run_folder: Path) -> Self | None:
        """Return what pushes a run as its config says, started; None if it does not ask for it."""
        if not config.push_to_hub:
            return None
        target = PushTarget(
            str(config.hub_model_id), config.hub_revision, config.hub_private, config.hub_strategy,
            metadata=config.hub_card,
        )  # fmt: skip
        pusher = cls(run_folder, target)
        pusher.start()
        return pusher

    def start(self) -> None:
        """Start the thread, which makes the repository first: a Hub that does not answer now is a warning."""
        self._thread.start()

    def note_saved(self, step: int) -> None:
        """Say that the checkpoint of a step is on disk, whole; costs the caller microseconds."""
        with self._condition:
            self._saved.add(step)
            if self.target.strategy in {"every_save", "all_checkpoints"}:
                self._enqueue(_Request(step, "save"))
            elif self.target.strategy == "best" and step == self._best:
                self._enqueue(_Request(step, "best"))

    def note_best(self, step: int) -> None:
        """Say that a checkpoint, on disk or still being written, is the best so far; costs the caller microseconds."""
        with self._condition:
            if self.target.strategy == "best" and step != self._best:
                self._best = step
                if step in self._saved:
                    self._enqueue(_Request(step, "best"))

    def close(self, wait_seconds: float) -> bool:
        """Push the end of the run, wait so long for all pushes, and say whether the end is on the Hub."""
        with self._condition:
            if self._is_open:
                self._enqueue(_Request(None, "end"))
                self._end_by(time.monotonic() + wait_seconds)
        if self._thread.ident is not None:
            self._thread.join(wait_seconds + GRACE_SECONDS)
        return self._finish()

    def abandon(self) -> None:
        """End without a last push and without waiting; what was not finished is recorded as such."""
        with self._condition:
            if self._is_open:
                self._end_by(time.monotonic())
        self._finish()

    def summary(self) -> str:
        """Tell what became of all pushes, in a few lines."""
        counts = {kind: sum(one.outcome == kind for one in self.outcomes) for kind in (DONE, SUPERSEDED)}
        lines = [f"pushed to {self.target.repo_id}: {counts[DONE]} times, {counts[SUPERSEDED]} superseded"]
        lines += [str(one) for one in self.outcomes if one.outcome in {FAILED, UNFINISHED}]
        finished = [one for one in self.outcomes if one.outcome == DONE]
        return "\n  ".join([*lines, *([f"last: {finished[-1]} {finished[-1].url}"] if finished else [])])

    def _enqueue(self, request: _Request) -> None:
        if not self._is_open:
            return
        if self._pending is not None:
            self._replaced.append(self._pending)
        self._pending = request
        self._condition.notify_all()

    def _end_by(self, deadline: float) -> None:
        self._is_open, self._deadline = False, deadline
        self._condition.notify_all()

    def _finish(self) -> bool:
        """Record what is left, and say whether the last push is done."""
        with self._condition:
            active, pending, self._pending = self._active, self._pending, None
        self._record_replaced()
        if self._thread.is_alive() and active is not None:
            self._record_outcomes(active.outcome(UNFINISHED, error="the program stopped waiting for it"))
        if pending is not None:
            self._record_outcomes(self._unstarted(pending, UNFINISHED, "the program stopped waiting for it"))
        self._is_finished = True
        ends = [one for one in self.outcomes if one.reason == "end"]
        return bool(ends) and ends[-1].outcome == DONE

    def _run(self) -> None:
        try:
            self._prepare()
            while (request := self._next()) is not None:
                self._record_replaced()
                self._push(request)
                with self._condition:
                    self._active = None
            self._record_replaced()
        except BaseException as error:  # noqa: BLE001 - a thread has no caller, and training must not notice
            logger.error("the thread that pushes to the Hub ended: %s", redact(repr(error)))  # noqa: TRY400 - redacted

    def _prepare(self) -> None:
        try:
            run = SavedRun(self._root)
            remove_leftovers(run)
            with self._condition:
                self._saved.update(run.store.steps())
                if self.target.strategy == "best" and self._best in self._saved:
                    self._enqueue(_Request(self._best, "best"))
            self._with_limit(lambda: Repository(self.target.repo_id, self.target.revision).ensure(self.target.private))
        except (HezarTrainError, OSError) as error:
            logger.warning("%s Training goes on; pushes will be tried when they are due.", redact(str(error)))

    def _next(self) -> _Request | None:
        with self._condition:
            while self._pending is None and self._is_open:
                self._condition.wait()
            request, self._pending = self._pending, None
            return request

    def _push(self, request: _Request) -> None:
        """Push one request to whatever end it comes, and record that."""
        push = None
        try:
            push = self._staged(request)
            self._record_outcomes(self._try_until_done(push))
        except SupersededError as error:
            self._record_outcomes(self._unstarted(request, SUPERSEDED, str(error)))
        except (HezarTrainError, OSError) as error:
            self._record_outcomes(self._unstarted(request, FAILED, str(error)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the next push may do better
            self._record_outcomes(self._unstarted(request, FAILED, repr(error)))
        finally:
            if push is not None:
                push.discard()

    def _staged(self, request: _Request) -> Push:
        run = SavedRun(self._root)
        step = request.step
        if step is None:
            step = run.best_step() if self.target.strategy == "best" else run.newest_step()
        push = Push(run, self.target, step, request.reason, queued=request.queued)
        push.stage(verified=True)  # the writer has read it back
        with self._condition:
            self._active = push
        return push

    def _try_until_done(self, push: Push) -> PushOutcome:
        """Try until it is done, hopeless, superseded, or time is up."""
        last_error: str | None = None
        limit = self._pace.attempt_limit_seconds(push.staged.nbytes)
        while self._wait_for_turn():
            if push.attempts and self._has_newer():
                return push.outcome(SUPERSEDED, error=last_error)
            try:
                commit = self._with_limit(push.attempt, limit)
            except HubError as error:
                last_error = redact(str(error))
                self._note_failure(error)
                if not isinstance(error, HubUnreachableError):
                    return push.outcome(FAILED, error=last_error)
                continue
            self._failures = 0
            return push.outcome(DONE, commit)
        return push.outcome(UNFINISHED, error=last_error or "the time to wait was over")

    def _with_limit(self, job: Callable[[], T], limit_seconds: float | None = None) -> T:
        """Do a job in a thread of its own, and leave it behind if the server never answers."""
        found: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                found.append(job())
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        limit = self._pace.attempt_limit_seconds(0) if limit_seconds is None else limit_seconds
        worker = threading.Thread(target=work, name="hub-attempt", daemon=True)
        worker.start()
        worker.join(limit)
        if errors:
            raise errors[0]
        if not found:
            raise HubUnreachableError(f"the Hub has not answered for {limit:.0f} seconds")
        return found[0]

    def _wait_for_turn(self) -> bool:
        """Wait until the next attempt is due; return False once the time of a pusher that was closed is up."""
        with self._condition:
            while True:
                now = time.monotonic()
                if self._deadline is not None and now >= self._deadline:
                    return False
                until = self._not_before
                if self._deadline is not None:
                    until = min(until, self._closing_turn, self._deadline)
                if now >= until:
                    return True
                self._condition.wait(until - now)

    def _has_newer(self) -> bool:
        with self._condition:
            return self._pending is not None

    def _note_failure(self, error: HubError) -> None:
        self._failures += 1
        asked = getattr(error, "retry_after_seconds", 0.0)
        wait = self._pace.delay_seconds(self._failures, asked)
        now = time.monotonic()
        self._not_before = now + wait
        self._closing_turn = now + min(wait, self._pace.closing_seconds)
        if self._failures == self._pace.breaker_failures:
            words = "failed %d times in a row; only the newest push is kept, and tried about every %.0f seconds"
            logger.warning(f"the Hub has {words}. %s", self._failures, self._pace.breaker_seconds, error)
        elif not self._pace.is_open(self._failures):
            logger.warning("%s Trying again in %.0f seconds; training goes on.", redact(str(error)), wait)

    def _record_replaced(self) -> None:
        with self._condition:
            replaced, self._replaced = self._replaced, []
        if replaced:
            self._record_outcomes(*(self._unstarted(request, SUPERSEDED, None) for request in replaced))

    def _unstarted(self, request: _Request, outcome: str, error: str | None) -> PushOutcome:
        target = self.target
        step = max(self._saved, default=0) if request.step is None else request.step
        return PushOutcome(
            step, request.reason, target.repo_id, target.revision, target.strategy, outcome,
            error=None if error is None else redact(error), queued=request.queued, ended=time.time(),
        )  # fmt: skip

    def _record_outcomes(self, *outcomes: PushOutcome) -> None:
        """Record outcomes and log them; after the end, only that something was done after all."""
        news = [one for one in outcomes if not self._is_finished or one.outcome == DONE]
        if not news:
            return
        self._record.append(*news)
        self.outcomes += news
        for one in news:
            logger.log(logging.WARNING if one.outcome in {FAILED, UNFINISHED} else logging.INFO, "push of %s", one)

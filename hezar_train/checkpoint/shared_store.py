"""One folder of checkpoints that all processes of a run write into together.

This module owns the order of such a save:

    the main process            makes the hidden folder and names it to the others
    every process               writes its own files there, durably, and reports their hashes, or what went wrong
    the main process            seals the manifest of all files, renames the folder, and says how it ended

A process that fails says so like one that succeeds, so none waits for it, and all raise. One that dies breaks the
channel, which raises in the others at once. The checkpoint has no name before the last step, so whoever dies when, the
checkpoints that were there stay as they were.

What the processes say is JSON, on a channel of its own: a thread may save while the main thread trains.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Collection
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hezar_train.checkpoint.disk import FileRecord, is_disk_full
from hezar_train.checkpoint.draft import Draft
from hezar_train.checkpoint.store import CheckpointStore
from hezar_train.errors import CheckpointError

__all__ = ["SavingGroup", "SharedStore"]

Fill = Callable[[Draft], None]


class SavingGroup:
    """The processes that save together, and this one's number among them; only one thread of each may use it."""

    def __init__(self, rank: int = 0, count: int = 1, channel: Any = None) -> None:
        self.rank, self.count, self._channel = rank, count, channel

    @classmethod
    def form(cls, timeout: timedelta | None = None) -> SavingGroup:
        """Open a channel between all processes of the run; all of them call this, once, at the same place."""
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        # Gloo, whatever the run computes on: these messages must not queue behind kernels.
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=timeout))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gave, in the order of their numbers."""
        if self.count == 1:
            return [value]
        text = json.dumps(value).encode("utf-8")
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._channel)
        room = max(int(size) for size in sizes)
        texts = [torch.empty(room, dtype=torch.uint8) for _ in sizes]
        padded = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
        dist.all_gather(texts, padded, group=self._channel)
        return [json.loads(one.numpy().tobytes()) for one in texts]

    def share(self, value: Any = None) -> Any:
        """Return what the main process gave."""
        return self.gather(value if self.is_main else None)[0]


class SharedStore(CheckpointStore):
    """A store whose `publish` all processes call together; the main process alone does all else that changes it."""

    def __init__(self, root: str | os.PathLike[str], group: SavingGroup) -> None:
        super().__init__(root)
        self._group = group

    def publish(self, step: int, fill: Fill, before_commit: Callable[[], None] | None = None) -> Path:
        """Let every process fill its draft of one checkpoint; it appears whole, or no process returns."""
        if not self._group.is_main:
            return self._follow(step, fill)
        try:
            path = super().publish(step, functools.partial(self._lead, step, fill), before_commit)
        except BaseException as error:
            self._group.share(_words(error))
            raise
        self._group.share({"name": path.name})
        return path

    def confirm(self, path: Path) -> None:
        """Verify a checkpoint on the main process, for all of them."""
        if not self._group.is_main:
            if "error" in (word := self._group.share()):
                raise self._failure(word["error"], word["is_full"])
            return
        try:
            super().confirm(path)
        except BaseException as error:
            self._group.share(_words(error))
            raise
        self._group.share({})

    def prune(self, keep: int | None, protect: Collection[int] = ()) -> list[int]:
        """Delete as `CheckpointStore.prune` does, on the main process; the others return nothing deleted."""
        return super().prune(keep, protect) if self._group.is_main else []

    def _lead(self, step: int, fill: Fill, draft: Draft) -> None:
        self._group.share({"folder": draft.folder.name, "step": step})
        error = _attempt(fill, draft)
        outcomes = self._group.gather(_outcome(draft, error))
        failed = {rank: one for rank, one in enumerate(outcomes) if "error" in one}
        if failed:
            texts = "; ".join(f"process {rank}: {one['error']}" for rank, one in failed.items())
            raise self._failure(texts, all(one["is_full"] for one in failed.values())) from error
        for one in outcomes:
            draft.take_in({name: FileRecord(**record) for name, record in one["records"].items()})

    def _follow(self, step: int, fill: Fill) -> Path:
        word, error = self._group.share(), None
        if "folder" in word:
            draft = Draft(self.root / word["folder"])
            # The shards of two steps make a model that never was: a process that missed a save must not join the next.
            error = _attempt(fill, draft) if word["step"] == step else _out_of_step(step, word["step"])
            self._group.gather(_outcome(draft, error))
            word = self._group.share()
        if "name" in word:
            return self.root / str(word["name"])
        raise self._failure(word["error"], word["is_full"]) from error

    def _failure(self, text: str, is_full: bool) -> Exception:
        if is_full:
            return OSError(errno.ENOSPC, text, str(self.root))
        return CheckpointError(f"the checkpoint could not be saved. {text}")


def _attempt(fill: Fill, draft: Draft) -> BaseException | None:
    if not draft.folder.is_dir():
        return CheckpointError(f"{draft.folder} is not there: all processes must see the same folder of checkpoints")
    try:
        fill(draft)
    except BaseException as error:  # noqa: BLE001 - raised again once the other processes know
        return error
    return None


def _out_of_step(step: int, main_step: int) -> CheckpointError:
    return CheckpointError(f"this process saves step {step} while the main process saves step {main_step}")


def _outcome(draft: Draft, error: BaseException | None) -> dict[str, Any]:
    if error is not None:
        return _words(error)
    return {"records": {name: asdict(record) for name, record in draft.records.items()}}


def _words(error: BaseException) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}", "is_full": is_disk_full(error)}

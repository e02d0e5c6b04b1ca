"""What goes wrong on purpose: one programmed fault per route, taken by the requests that arrive there."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["ANY_ROUTE", "ROUTES", "Fault", "Faults"]

ROUTES = (
    "whoami", "create", "delete", "info", "refs", "commits", "tree", "paths_info", "branch", "tag", "validate_yaml",
    "preupload", "lfs_batch", "lfs_put", "lfs_complete", "lfs_verify", "lfs_get", "xet_token", "commit", "resolve",
    "other",
)  # fmt: skip
ANY_ROUTE = "*"
CARRY_FILES = ("lfs_put", "lfs_get", "resolve")
Moment = Literal["before", "after", "body"]


@dataclass
class Fault:
    """One way to fail, for the next `times` requests of `method` (None: for all)."""

    kind: int | str
    times: int | None = None
    method: str | None = None
    retry_after: int | None = None
    """Seconds that a 429 or 503 asks the client to wait."""
    seconds: float = 1.0
    """How long "slow" waits before it answers as usual."""
    when: Moment = "before"
    """A connection is cut before the request is read, after it was carried out, or within the answer's body."""

    def __post_init__(self) -> None:
        if isinstance(self.kind, str) and self.kind.isdigit():
            self.kind = int(self.kind)
        if not isinstance(self.kind, int) and self.kind not in {"cut", "slow", "wrong_hash"}:
            raise ValueError(f"kind={self.kind!r} is not a fault: use an HTTP status, 'cut', 'slow' or 'wrong_hash'")
        if self.when not in get_args(Moment):
            raise ValueError(f"when={self.when!r} is not a moment of a cut: use one of {get_args(Moment)}")
        self.times = float("inf") if self.times is None else self.times
        if self.kind == 429 and self.retry_after is None:
            self.retry_after = 1

    def concerns(self, method: str) -> bool:
        """Tell whether a request of this method fails now; bytes can be damaged only where there are some."""
        if self.kind == "wrong_hash" and method not in {"GET", "PUT"}:
            return False
        return self.times > 0 and self.method in {None, method}


class Faults:
    """The faults of a hub; tests change them while it runs."""

    def __init__(self) -> None:
        self._faults: dict[str, Fault] = {}
        self._lock = threading.Lock()

    def set(self, route: str, kind: int | str, times: int | None = None, **details: object) -> None:
        """Let the next `times` requests (None: all) of a route, or of "*", fail; replace what was set there."""
        if route not in {*ROUTES, ANY_ROUTE}:
            raise ValueError(f"route={route!r} is not a route: use one of {', '.join(ROUTES)} or {ANY_ROUTE!r}")
        if kind == "wrong_hash" and route not in CARRY_FILES:
            raise ValueError(f"route {route!r} carries no files to damage: use one of {', '.join(CARRY_FILES)}")
        with self._lock:
            self._faults[route] = Fault(kind, times, **details)

    def clear(self, route: str | None = None) -> None:
        """Let a route, or all of them, work again."""
        with self._lock:
            if route is None:
                self._faults.clear()
            else:
                self._faults.pop(route, None)

    def take(self, route: str, method: str) -> Fault | None:
        """Return the fault that this request meets, if any, and count it."""
        with self._lock:
            for name in (route, ANY_ROUTE):
                fault = self._faults.get(name)
                if fault is not None and fault.concerns(method):
                    fault.times -= 1
                    return fault
        return None

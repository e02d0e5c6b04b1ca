"""A Hub on 127.0.0.1 that the unmodified client believes in, and that fails when a test wants it to."""

from __future__ import annotations

import threading
from pathlib import Path

from .connection import Connections, Request
from .faults import Faults
from .repositories import Commit, Repositories, Repository
from .routes import find_route

__all__ = ["LoopbackHub"]

POLL_SECONDS = 0.02


class LoopbackHub:
    """A server whose repositories are in `folder`; use it as a context, or `start` and `stop` it as often as you like.

    `faults` says what goes wrong, `requests` lists what arrived, `part_bytes` is the size above which a large file is
    uploaded in parts. All of it may be changed while the server runs.
    """

    user = "tester"
    token = f"hf_{'Loopback' * 4}Ok"

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.repositories = Repositories(Path(folder).resolve())
        self.faults = Faults()
        self.requests: list[Request] = []
        self.parts: dict[tuple[str, int], bytes] = {}
        self.part_bytes = 64 * 1024 * 1024
        self.port = port
        self.is_stopping = threading.Event()
        self._life = threading.Lock()
        self._server: Connections | None = None

    def __enter__(self) -> LoopbackHub:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_url(self) -> str:
        """Where large files are: another host for the client, which must not get its token."""
        return f"http://localhost:{self.port}/storage"

    def start(self) -> None:
        """Listen; after a stop, at the same port and with the same repositories."""
        with self._life:
            if self._server is not None:
                return
            self.is_stopping.clear()
            self._server = Connections(self, self.port, find_route)
            self.port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, args=[POLL_SECONDS], daemon=True).start()

    def stop(self) -> None:
        """Die: refuse new connections, cut those that are open, lose nothing that was committed."""
        with self._life:
            if self._server is None:
                return
            self.is_stopping.set()
            self._server.shutdown()
            self._server.cut_all()
            self._server = None

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        """Return the content of every file but `.gitattributes`, which the hub itself wrote."""
        files = self._find(repo_id, repo_type).at(revision).files
        paths = {path: self.repositories.path_of(file) for path, file in sorted(files.items())}
        return {path: where.read_bytes() for path, where in paths.items() if path != ".gitattributes"}

    def commits(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> list[Commit]:
        """Return the commits of a branch, newest first; the last one is the hub's own."""
        return self._find(repo_id, repo_type).log(revision)

    def _find(self, repo_id: str, repo_type: str) -> Repository:
        repository = self.repositories.find(f"{repo_type}s", repo_id)
        if repository is None:
            raise KeyError(f"no {repo_type} repository {repo_id!r} here")
        return repository

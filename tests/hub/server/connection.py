"""HTTP connections: read requests, let faults happen, send answers."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import Fault
from .repositories import Commit, Refusal, Repositories, Repository

if TYPE_CHECKING:
    from .loopback_hub import LoopbackHub

__all__ = ["Answer", "Call", "Connections", "Request"]


class Request(NamedTuple):
    """One line of the hub's log: what arrived, and what went wrong on purpose."""

    method: str
    path: str
    route: str
    fault: int | str | None
    has_token: bool


@dataclass
class Answer:
    """What is sent back: bytes, or something to be written as JSON."""

    content: object = b""
    status: int = 200
    headers: dict[str, object] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()


@dataclass
class Call:
    """A request as a route's function sees it."""

    hub: LoopbackHub
    method: str
    names: dict[str, str]
    headers: Message
    query: dict[str, list[str]]
    body: bytes
    is_member: bool = False

    @property
    def json(self) -> dict:
        return json.loads(self.body or b"{}")

    @property
    def store(self) -> Repositories:
        return self.hub.repositories

    @property
    def repository(self) -> Repository:
        """The repository of the address, unless the caller may not know that it exists."""
        kind, repo_id = self.names.get("kind") or "models", f"{self.names['owner']}/{self.names['name']}"
        repository = self.store.find(kind, repo_id)
        if repository is None or (repository.is_private and not self.is_member):
            raise Refusal(404 if self.is_member else 401, "Repository not found", "RepoNotFound")
        return repository

    @property
    def commit(self) -> Commit:
        return self.repository.at(self.names.get("revision") or "main")


class Connection(BaseHTTPRequestHandler):
    """One client's connection, which carries any number of requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Connections

    def _serve(self) -> None:
        hub, url = self.server.hub, urlsplit(self.path)
        route, names = self.server.find_route(self.command, url.path)
        fault = hub.faults.take(route.name, self.command)
        kind = fault.kind if fault else None
        hub.requests.append(Request(self.command, self.path, route.name, kind, "Authorization" in self.headers))
        if kind == "cut" and fault.when == "before":
            return self._cut()
        body = self._read_body()
        if kind == "slow" and hub.is_stopping.wait(fault.seconds):
            return self._cut()
        if kind == "wrong_hash":
            body = _damaged(body)
        names = {name: unquote(value) for name, value in names.items() if value}
        call = Call(hub, self.command, names, self.headers, parse_qs(url.query), body)
        answer = self._fail(fault) if isinstance(kind, int) else self._answer(route, call)
        if kind == "wrong_hash" and self.command == "GET":
            answer.content = _damaged(answer.body)
        if kind == "cut" and (fault.when == "after" or not answer.body or self.command == "HEAD"):
            return self._cut()
        return self._send(answer, is_cut=kind == "cut")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _answer(self, route: object, call: Call) -> Answer:
        try:
            return route.call(call)
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal), **refusal.headers}
            return Answer({"error": str(refusal)}, refusal.status, headers)

    def _fail(self, fault: Fault) -> Answer:
        return Answer({"error": "injected"}, fault.kind, {"Retry-After": fault.retry_after})

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return b"".join(self._chunks())
        return self._read(int(self.headers.get("Content-Length", 0)))

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline() or b"0", 16):
            yield self._read(size)
            self.rfile.readline()
        if not self.rfile.readline():
            raise ConnectionAbortedError("the client left within a request")

    def _read(self, size: int) -> bytes:
        content = self.rfile.read(size)
        if len(content) < size:
            raise ConnectionAbortedError("the client left within a request")
        return content

    def _send(self, answer: Answer, is_cut: bool) -> None:
        self.send_response(answer.status)
        for name, value in {"Content-Length": len(answer.body), **answer.headers}.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if is_cut else answer.body)
        if is_cut:
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        self.server.shutdown_request(self.connection)

    def log_message(self, *args: object) -> None:
        """Write nothing: the hub keeps the log."""


class Connections(ThreadingMixIn, TCPServer):
    """The listening socket and every open connection, each with a thread."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, hub: LoopbackHub, port: int, find_route: object) -> None:
        self.hub, self.find_route = hub, find_route
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Connection)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: socket.socket, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def cut_all(self) -> None:
        """End every connection, whatever it is doing, and wait for the threads."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


def _damaged(content: bytes) -> bytes:
    return bytes([content[0] ^ 0xFF]) + content[1:] if content else content

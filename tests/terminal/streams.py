"""Streams to write to: one that counts, and a real terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading


class CountingStream(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self.num_flushes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)

    def flush(self) -> None:
        self.num_flushes += 1


class Terminal:
    """A real pseudo-terminal; `stream` is the program's side of it, `text` what a person's side received."""

    def __init__(self, columns: int = 120) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding="utf-8")
        self._received: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self._received.append(data)
        except OSError:
            return  # how Linux says that the other side closed

    def text(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._received).decode()


def without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)

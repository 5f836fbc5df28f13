"""What comes out of an agent: into its log, by lines, and no faster than everything else here can bear."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

LONGEST_LINE: Final = 64 * 1024
MOST_BYTES_A_SECOND: Final = 2_000_000
LOG_BYTES: Final = 5_000_000
LOG_FILES: Final = 3


class Output(asyncio.SubprocessProtocol):
    """What comes out of the process, by lines, into its log; standard output also to `heard`.

    `exited` is set at the end of the process, even while something that it has started still holds its pipes open.
    """

    def __init__(self, log: Path, heard: Callable[[list[bytes]], None]) -> None:
        self.exited, self.closed = asyncio.Event(), asyncio.Event()
        self._path, self._heard = log, heard
        self._log: RotatingFileHandler | None = None
        self._rest, self._open = {1: b"", 2: b""}, {1, 2}
        self._second, self._bytes = 0.0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = (self._rest[fd] + data).split(b"\n")
        if len(rest) >= LONGEST_LINE:  # without an end it is cut where it becomes too long to keep in memory
            lines.append(rest)
            rest = b""
        self._rest[fd] = rest
        self._note(fd, lines)
        self._slow_down(fd, len(data))

    def _slow_down(self, fd: int, read: int) -> None:
        """Lets an agent that prints without end wait: renewals and stops come before what it says."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._second >= 1:
            self._second, self._bytes = loop.time(), 0
        self._bytes += read
        pipe = self._transport.get_pipe_transport(fd)
        if (
            self._bytes > MOST_BYTES_A_SECOND
            and isinstance(pipe, asyncio.ReadTransport)
            and pipe.is_reading()
        ):
            pipe.pause_reading()
            loop.call_later(max(0.0, self._second + 1 - loop.time()), _resume, pipe)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol asks for it
        self._open.discard(fd)
        if not self._open:
            self.closed.set()

    def process_exited(self) -> None:
        self.exited.set()

    def finish(self) -> None:
        """Notes what came without an end of line."""
        for fd, rest in self._rest.items():
            self._note(fd, [rest] if rest else [])
        self._rest = {1: b"", 2: b""}
        if self._log is not None:
            with suppress(OSError):
                self._log.close()

    def _note(self, fd: int, lines: list[bytes]) -> None:
        if not lines:
            return
        label = "" if fd == 1 else "stderr: "
        text = "\n".join(label + line.decode(errors="replace").rstrip("\r") for line in lines)
        with suppress(OSError):  # a full disk costs the log, not the work
            if self._log is None:
                self._log = _log(self._path)
            self._log.emit(logging.makeLogRecord({"msg": text}))
        if fd == 1:
            self._heard(lines)


def _resume(pipe: asyncio.ReadTransport) -> None:
    if not pipe.is_closing():
        pipe.resume_reading()


class _Log(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Not to standard error, as logging would, with the agent's words: those stay in this file or nowhere."""


def _log(path: Path) -> RotatingFileHandler:
    path.touch(mode=0o600)
    handler = _Log(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8", errors="replace")
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler

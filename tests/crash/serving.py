"""The functions as real processes, which a test may kill, freeze and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import httpx

from tests.crash.calls import Answer, Call, over_http

ROOT = Path(__file__).resolve().parents[2]
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")


def environment_for(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings and nothing else of ours: a stray variable of the shell would change the test."""
    return {**{name: os.environ[name] for name in INHERITED if name in os.environ}, **settings}


class Functions:
    """A server with one instance (its worker process). The listening socket is ours and survives: requests that come while nobody
    lives wait for the next instance, as in a cloud.

    Args:
        settings: environment variables.
        point: `MODULE:FUNCTION before|after`, where the instance is struck once `arm` was called.
        how: SIGKILL, after which the server starts a new instance; or SIGSTOP.
        fuse: a file that does not exist yet.
    """

    def __init__(
        self,
        settings: Mapping[str, str],
        *,
        fuse: Path,
        point: str | None = None,
        how: signal.Signals = signal.SIGKILL,
        threads: int = 4,
    ) -> None:
        self._environment, self._fuse, self._threads = environment_for(settings), fuse, str(threads)
        self._point = [*point.split(), how.name, str(fuse)] if point else []
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        self._until_it_answers()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._socket.close()

    def start(self) -> None:
        """Starts it; a request that is sent now waits until it listens."""
        descriptor = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.victim", str(descriptor), self._threads, *self._point],
            cwd=ROOT,
            env=self._environment,
            pass_fds=[descriptor],
            start_new_session=True,
        )

    def kill(self) -> None:
        """SIGKILL to the whole group: master and instance."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP to the whole group; returns when its master has stopped."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT to the whole group."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def arm(self) -> None:
        """From now on the point is deadly."""
        self._fuse.touch()

    @property
    def has_struck(self) -> bool:
        """Whether the point was reached since then."""
        return not self._fuse.exists()

    def ask(self, call: Call) -> Answer:
        """Sends a call. Raises httpx.TransportError when the instance dies over it."""
        return over_http(self.url)(call)

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, "the functions did not start; their output says why"
            try:
                httpx.get(self.url, timeout=1)
            except httpx.TransportError:
                continue
            return
        raise AssertionError("the functions do not answer after 30 s")

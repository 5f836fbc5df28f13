"""The server as a process: nobody but us ends it, and it never outlives us."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from shared.errors import Conflict, DatabaseUnavailable

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 60  # after a crash of a busy database recovery comes first
STOP_SECONDS: Final = 30

PR_SET_PDEATHSIG: Final = 1
STATUS_LINE: Final = 7  # of postmaster.pid, counted from 0; pg_ctl waits for the same word


def locked(file: Path) -> TextIO:
    """Takes the folder for this launch, until the returned file is closed; the kernel closes it for a process that is killed.

    Raises Conflict that names the process which has it.
    """
    lock = file.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        lock.close()
        raise Conflict(
            f"{file.parent} is in use by process {holder or 'unknown'}: stop that one, or take another folder"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def dying_with_the_parent() -> Callable[[], None] | None:
    """What the child has to do before it becomes the server, so that even kill -9 of the parent ends it (in 0.1 s); None where
    only Linux has that: there the next start ends what is left."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:  # it died before we had asked
            os._exit(1)

    return arrange


def wait_until_ready(process: subprocess.Popen[bytes], cluster: Path) -> None:
    """Returns when the server accepts connections.

    Raises DatabaseUnavailable if it exits instead, or takes longer than a minute.
    """
    deadline, pause = time.monotonic() + START_SECONDS, 0.005
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DatabaseUnavailable(f"the database did not start (exit code {process.returncode})")
        lines = _pid_file(cluster)
        # The process id tells our server's file from one that a crash has left.
        if len(lines) > STATUS_LINE and lines[0] == str(process.pid) and lines[STATUS_LINE] == "ready":
            return
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    raise DatabaseUnavailable(f"the database did not accept connections within {START_SECONDS} s")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server: in order (SIGINT ends its clients' sessions too), else at once; recovery then does the rest."""
    for how, patience in ((signal.SIGINT, STOP_SECONDS), (signal.SIGQUIT, 5), (signal.SIGKILL, None)):
        if process.poll() is None:
            process.send_signal(how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
            return


def end_a_leftover(cluster: Path) -> None:
    """Ends the server of a launch that was killed, and forgets the mark of one that has gone.

    Only called with the folder's lock held, so no launch can be using it. Postgres would refuse to start for any live process with
    the id in its file; in a restarted container that is regularly some other program.
    """
    lines = _pid_file(cluster)
    if not lines or not lines[0].isdecimal():
        return
    pid, deadline, pause = int(lines[0]), time.monotonic() + STOP_SECONDS, 0.005
    if str(cluster) in _command_line(pid):
        os.kill(pid, signal.SIGINT)
    while str(cluster) in _command_line(pid):
        if time.monotonic() > deadline:
            raise Conflict(f"{cluster} is in use by process {pid}, which does not end: stop that one first")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    (cluster / "postmaster.pid").unlink(missing_ok=True)


def _pid_file(cluster: Path) -> list[str]:
    try:
        return [line.strip() for line in (cluster / "postmaster.pid").read_text().splitlines()]
    except FileNotFoundError:
        return []


def _command_line(pid: int) -> str:
    if sys.platform != "linux":
        asked = ["/bin/ps", "-p", str(pid), "-o", "command="]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    try:  # not by ps, which a slim container has not
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""

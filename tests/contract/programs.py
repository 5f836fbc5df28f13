"""The orchestrator as its owner runs it: a process of its own, with a state folder, an agent, and a terminal that the test reads."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[2]
AGENT = Path(__file__).with_name("agent.py")
PATIENCE = 30.0


class Noted(NamedTuple):
    """A line of the agents' record."""

    dispatch_id: str
    attempt: int
    process: int
    what: str
    rest: str


class Program:
    """`with Program(...) as program`. Killed at the end, with all that it has started."""

    def __init__(
        self, folder: Path, url: str, token: str, *options: str, command: str = "connect", **more: str
    ) -> None:
        self.folder, self.record = folder, folder / "record"
        folder.mkdir(exist_ok=True)
        self._program, self._words = ["-m", "orchestrator"], [command, *options]
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "ORCHESTRATOR_URL": url,
            "ORCHESTRATOR_TOKEN": token,
            "ORCHESTRATOR_STATE": str(folder / "state"),
            "ORCHESTRATOR_REPOS": "acme/api",
            "ORCHESTRATOR_PATIENCE": "1",
            "ORCHESTRATOR_EXEC": f"{sys.executable} -S {AGENT} {self.record}",
            **more,
        }
        self.lines: list[str] = []
        self._said = threading.Condition()

    def starts_as(self, *program: str) -> None:
        """Puts another program in the orchestrator's place, which gets the same words."""
        self._program = list(program)

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, *self._program, *self._words],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for noted in self.noted():
            for process in (
                noted.process,
                *[int(word) for word in noted.rest.split() if noted.what == "began"],
            ):
                if _is_our_agent(process):
                    os.kill(process, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._said:
                    self.lines.append(line.rstrip("\n"))
                    self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def said(self, pattern: str, times: int = 1) -> list[str]:
        """Waits until that many lines match. Returns them."""
        deadline = monotonic() + PATIENCE
        with self._said:
            while len(found := [line for line in self.lines if re.search(pattern, line)]) < times:
                waiting = self._reader.is_alive() and monotonic() < deadline
                assert waiting, f"never said {pattern!r}:\n" + "\n".join(self.lines)
                self._said.wait(0.2)
        return found

    def noted(self, what: str | None = None) -> list[Noted]:
        """What the agents have written down."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        split = [line.split(" ", 4) for line in lines]
        found = [
            Noted(words[0], int(words[1]), int(words[2]), words[3], " ".join(words[4:])) for words in split
        ]
        return [noted for noted in found if what in (None, noted.what)]

    def until_noted(self, what: str, times: int = 1) -> list[Noted]:
        until(lambda: len(self.noted(what)) >= times, f"agents that {what}")
        return self.noted(what)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the program alone: its agents live on, as after a crash."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def ends(self) -> int:
        """Waits for its end. Returns the exit code."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code


def until(found: Callable[[], Any], what: str) -> Any:
    """The first result that is not None or false. Reads a state again and again: nobody tells when a file or a row changes."""
    deadline = monotonic() + PATIENCE
    pause = threading.Event()
    while not (result := found()):
        assert monotonic() < deadline, f"waited for {what}, in vain"
        pause.wait(0.02)
    return result


def runs(process: int) -> bool:
    """Whether that process is alive (a zombie is not)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _is_our_agent(process: int) -> bool:
    try:
        words: Sequence[bytes] = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(AGENT).encode() in words or words[:2] == [b"/bin/sleep", b"1000"]

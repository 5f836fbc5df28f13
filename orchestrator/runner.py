"""One run of the owner's command for one claim: how it is started, what it is given, what it says, how it is ended.

It gets the work as one line of JSON on its standard input and in files, never as words of a command line; no shell reads any of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import termios
from array import array
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator import processes
from orchestrator.output import Output
from orchestrator.prompt import prompt_text
from orchestrator.result import Progress, facts_in, last_object, progress_in
from orchestrator.wire import Completion, Message, Release

# The agent's process exists before it runs: it waits for a line, which is only written once the journal knows its number. When this
# program dies in between, the line never comes, and the process ends without having done anything.
GATE: Final = 'IFS= read -r go || exit 125; exec "$@"'
TRY_AGAIN: Final = 75  # EX_TEMPFAIL of sysexits.h
TAIL: Final = 256 * 1024
LAST_WORDS_SECONDS: Final = 2.0
_REPO: Final = re.compile(r"(?!\.\.?/)[A-Za-z0-9._-]+/(?!\.\.?$)[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Command:
    """What the owner wants to be run.

    Args:
        argv: the command and its words.
        environment: the variables that it may see; those of the dispatch are added.
        directory: where it runs; may hold `{repo}`, `{owner}` and `{name}`. None: in a folder of the session's own.
        interactive: whether follow-ups reach it while it runs, as lines on its standard input, which then stays open.
        timeout: seconds that it may take.
        patience: seconds between SIGTERM and SIGKILL.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None = None
    interactive: bool = False
    timeout: float = 7200.0
    patience: float = 10.0


class Ending(NamedTuple):
    """How a run ended: its exit status (negative: the signal), what it said about it, and how many follow-ups it had not read."""

    status: int
    facts: dict[str, Any]
    odd: list[str]
    unread: int = 0

    def outcome(self) -> Completion | Release:
        """What it means: 0 is complete, 75 asks for another attempt, anything else failed."""
        if self.status == 0:
            return Completion(success=True, facts=self.facts)
        said = self.facts.get("errorMessage")
        if self.status == TRY_AGAIN:
            return Release(said or f"the agent asked for another attempt (exit status {TRY_AGAIN})")
        how = (
            f"ended with exit status {self.status}"
            if self.status > 0
            else f"was ended by signal {-self.status}"
        )
        return Completion(success=False, facts={**self.facts, "errorMessage": said or f"the agent {how}"})


class Run:
    """`start`, then `let_go`, then `ended`; `stop` or `kill` at any time."""

    def __init__(self, command: Command, folder: Path, on_progress: Callable[[Progress], None]) -> None:
        """`folder`: the session's own, for its files and its log."""
        self._command, self._folder, self._on_progress = command, folder, on_progress
        self._transport: asyncio.SubprocessTransport | None = None
        self._output = Output(folder / "output.log", self._heard)
        self._tail = b""
        self._said: list[int] = []  # the follow-ups' lengths in bytes, as they went out
        self._pipe: int | None = None

    async def start(self, message: Message, attempt: int | None) -> int:
        """Makes the process, which waits at the gate. Returns its number, which is also its group's.

        Raises OSError where it cannot be: no such folder, no more processes.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        prompt = prompt_text(message)
        self._line = json.dumps({**message.fields, "attempt": attempt, "prompt": prompt})
        _write(self._folder / "message.json", self._line)
        _write(self._folder / "prompt.md", prompt)
        self._transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: self._output,
            "/bin/sh",
            "-c",
            GATE,
            "dispatch",
            *self._command.argv,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=self._directory(message.repo),
            env={**self._command.environment, **self._variables(message, attempt)},
            start_new_session=True,
        )
        return self._transport.get_pid()

    def _directory(self, repo: str) -> Path:
        if self._command.directory is None:
            own = self._folder / "work"
            own.mkdir(exist_ok=True)
            return own
        if "{" in self._command.directory and not _REPO.fullmatch(repo):
            raise OSError(f"the repository's name {repo!r} is no safe name for a folder")
        owner, _, name = repo.partition("/")
        path = (
            self._command.directory.replace("{repo}", repo).replace("{owner}", owner).replace("{name}", name)
        )
        return Path(path).expanduser()

    def _variables(self, message: Message, attempt: int | None) -> dict[str, str]:
        found = {
            "DISPATCH_ID": message.queue_id,
            "DISPATCH_ATTEMPT": "" if attempt is None else str(attempt),
            "DISPATCH_SESSION_ID": message.session_id,
            "DISPATCH_ISSUE": message.identifier,
            "DISPATCH_REPO": message.repo,
            "DISPATCH_MESSAGE_FILE": str(self._folder / "message.json"),
            "DISPATCH_PROMPT_FILE": str(self._folder / "prompt.md"),
            "DISPATCH_LOG_FILE": str(self._folder / "output.log"),
        }
        for variable, field in (("DISPATCH_ISSUE_URL", "url"), ("TRACEPARENT", "traceparent")):
            if isinstance(value := message.fields.get(field), str):
                found[variable] = value
        return {name: value.replace("\x00", "") for name, value in found.items()}

    def let_go(self) -> None:
        """Opens the gate and hands over the work. A command that does not read its input is no error, and is not waited for."""
        self._stdin().write(f"\n{self._line}\n".encode())
        if self._command.interactive:
            # Kept open beside the transport's own, which closes when nobody reads: what was not read can be counted then.
            self._pipe = os.dup(self._stdin().get_extra_info("pipe").fileno())
        else:
            self._stdin().close()

    def say(self, prompt: Mapping[str, Any]) -> bool:
        """One follow-up, as a line of JSON on the standard input of an interactive run. False when nobody reads there any more."""
        line = (json.dumps({"type": "prompt", **prompt}) + "\n").encode()
        if self._stdin().is_closing():
            return False
        self._stdin().write(line)
        self._said.append(len(line))
        return True

    def _unread(self) -> int:
        """How many of the follow-ups the agent had not read when it ended: they lie in the pipe, or did not fit into it."""
        if not self._said or self._pipe is None:
            return 0
        left = array("i", [0])
        with suppress(OSError):
            fcntl.ioctl(self._pipe, termios.FIONREAD, left)
        waiting = left[0] + self._stdin().get_write_buffer_size()
        unread = 0
        for length in reversed(self._said):
            if waiting <= 0:
                break
            waiting -= length
            unread += 1
        return unread

    def _stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        pipe = self._transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport)
        return pipe

    async def ended(self) -> Ending:
        """Waits for the end of the command, then ends whatever it has left behind in its group."""
        assert self._transport is not None
        unread = 0
        try:
            await self._output.exited.wait()
            unread = self._unread()
            await processes.end(self._transport.get_pid(), self._command.patience)
            # A process that has left the group may hold the pipe open: the agent is over all the same.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._output.closed.wait(), LAST_WORDS_SECONDS)
        finally:
            self._transport.close()
            self._output.finish()
            if self._pipe is not None:
                os.close(self._pipe)
        status = self._transport.get_returncode()
        assert status is not None
        facts, odd = facts_in(last_object(self._tail.decode(errors="replace")))
        return Ending(status, facts, odd, unread)

    async def stop(self) -> None:
        """Ends the command and all that it has started."""
        if self._transport is not None:
            await processes.end(self._transport.get_pid(), self._command.patience)

    def kill(self) -> None:
        """Ends them without asking."""
        if self._transport is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)

    def _heard(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.lstrip().startswith(b"::progress") and (
                progress := progress_in(line.decode(errors="replace"))
            ):
                self._on_progress(progress)
        self._tail = (self._tail + b"\n".join(lines) + b"\n")[-TAIL:]


def _write(path: Path, text: str) -> None:
    """For the owner's eyes: what is in it may be confidential."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)

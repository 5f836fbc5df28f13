"""What the owner sees: a line per event, and on a terminal a line per running job below them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

PLAIN_WORD: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@+,%")


class Line(NamedTuple):
    """A running job. `seconds` since it was claimed."""

    identifier: str
    title: str
    repo: str
    attempt: int | None
    seconds: float
    percent: int | None
    note: str | None


class Screen(Protocol):
    """Where events go. Never a token, a description, a prompt or an agent's output."""

    def event(self, name: str, **facts: Any) -> None:
        """One thing that happened."""

    def show(self, jobs: Callable[[], Sequence[Line]]) -> None:
        """From now on, these are the running jobs."""

    def tick(self) -> None:
        """A second has passed while jobs run."""

    def close(self) -> None:
        """Leaves the terminal as it was."""


class Plain:
    """For a file, a journal, a pipe: `time event name=value …`."""

    def event(self, name: str, **facts: Any) -> None:
        words = [f"{key}={_word(value)}" for key, value in facts.items() if value is not None]
        with suppress(OSError):  # whoever read it has gone; the work has not
            print(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), name, *words, flush=True)

    def show(self, jobs: Callable[[], Sequence[Line]]) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


class Terminal:
    """The events scroll by; below them one line for each job, with how long it runs and how far it is."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415 - 9 MB that a service never needs
        from rich.live import Live  # noqa: PLC0415

        self._jobs: Callable[[], Sequence[Line]] = list
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._table)
        self._live.start()

    def event(self, name: str, **facts: Any) -> None:
        from rich.text import Text  # noqa: PLC0415

        line = Text(time.strftime("%H:%M:%S "), style="dim")
        line.append(f"{name:12}", style="bold")
        for key, value in facts.items():
            if value is not None:
                line.append(f" {key}=", style="dim")
                line.append(_word(value))
        self._console.print(line, soft_wrap=True)
        self._live.refresh()

    def show(self, jobs: Callable[[], Sequence[Line]]) -> None:
        self._jobs = jobs

    def tick(self) -> None:
        self._live.refresh()

    def close(self) -> None:
        self._jobs = list
        self._live.refresh()
        self._live.stop()

    def _table(self) -> Any:
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table.grid(padding=(0, 1), expand=False)
        for job in self._jobs():
            minutes, seconds = divmod(int(job.seconds), 60)
            done = round((job.percent or 0) / 10)
            attempt = "" if job.attempt in (None, 1) else f"attempt {job.attempt}"
            table.add_row(
                Text(printable(job.identifier), style="bold"),
                Text(f"{minutes:3d}:{seconds:02d}"),
                Text("█" * done + "·" * (10 - done)),
                Text("" if job.percent is None else f"{job.percent:3d} %"),
                Text(attempt, style="yellow"),
                Text(printable(job.note or job.title)[:80], no_wrap=True, overflow="ellipsis"),
                Text(printable(job.repo), style="dim"),
            )
        return table


def screen_for(stream: Any = None) -> Screen:
    """A Terminal where there is one and rich is installed, else Plain."""
    if not (stream or sys.stdout).isatty():
        return Plain()
    try:
        return Terminal()
    except ImportError:
        return Plain()


def printable(text: str) -> str:
    """Text of strangers without what moves a cursor or turns a line around."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def _word(value: Any) -> str:
    text = printable(str(value))
    return text if text and PLAIN_WORD.issuperset(text) else json.dumps(text, ensure_ascii=False)

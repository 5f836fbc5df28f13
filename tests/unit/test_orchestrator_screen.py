"""What the owner sees is one line for each event, and nothing that a stranger wrote moves the cursor or turns a line around."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.screen import Line, Plain, Screen, printable, screen_for

HOSTILE = [
    "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;https://evil.example\x1b\\", "\x9b2J", "\r", "\n", "\x08" * 9, "\x00", "\x7f",
    "\u202e", "\u2066", "\u200f", "\u061c", "\u200b", "\u2028", "\u2029", "\x85", "\ufeff", "\ud800", "\U000e0041",
]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], name: str, **facts: Any) -> str:
    Plain().event(name, **facts)
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    when, _, rest = out[:-1].partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", when)
    return rest


# -- plain lines --------------------------------------------------------------------------------------------------------


def test_an_event_is_one_line_of_its_time_its_name_and_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        said(capsys, "claimed", issue="ENG-1", attempt=2, repo="a/b")
        == "claimed issue=ENG-1 attempt=2 repo=a/b"
    )


def test_what_is_not_known_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "completed", pr=None, issue="ENG-1") == "completed issue=ENG-1"
    assert said(capsys, "started", attempt=0) == "started attempt=0"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("https://x/a-b_c.d:1@2+3,4%", "https://x/a-b_c.d:1@2+3,4%"),
        ("two words", '"two words"'),
        ("", '""'),
        ('say "hi"', '"say \\"hi\\""'),
        ("a=b", '"a=b"'),
        ("back\\slash", '"back\\\\slash"'),
        ("ü 漢字 🎉", '"ü 漢字 🎉"'),
        ("$(x)", '"$(x)"'),
    ],
)
def test_a_value_that_is_no_plain_word_is_quoted(
    value: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "x", why=value) == f"x why={word}"


def test_nobody_can_forge_another_event_or_another_fact(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, "x", why='done"\n2026-01-01T00:00:00Z completed issue="ENG-1')
    assert json.loads(line.removeprefix("x why=")) == 'done"\ufffd2026-01-01T00:00:00Z completed issue="ENG-1'


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_what_moves_a_cursor_or_turns_a_line_is_made_visible(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, "x", why=f"a{text}b")
    assert line.isprintable()
    assert "\ufffd" in line
    assert re.fullmatch(r'x why="a.*b"', line)


@given(st.text(st.characters()))
def test_whatever_is_said_is_printable_and_of_the_same_length(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(
        before in (after, before if after == "\ufffd" else after)
        for before, after in zip(text, shown, strict=True)
    )


def test_plain_shows_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Plain()
    screen.show(lambda: [JOB])
    screen.tick()
    screen.close()
    assert capsys.readouterr().out == ""


class _Stream(io.StringIO):
    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_a_pipe_gets_plain_lines() -> None:
    assert isinstance(screen_for(_Stream(terminal=False)), Plain)


def test_so_does_a_terminal_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    assert isinstance(screen_for(_Stream(terminal=True)), Plain)


# -- a terminal ---------------------------------------------------------------------------------------------------------

JOB = Line("ENG-1", "Fix it", "a/b", 1, 75.0, 40, "reading the code")
Made = tuple[Screen, Callable[[], str]]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Made:
    """A screen on a terminal of 120 columns, and what was written to it since the last question, without rich's own codes."""
    console = pytest.importorskip("rich.console")
    written = io.StringIO()
    made = functools.partial(
        console.Console,
        file=written,
        force_terminal=True,
        width=120,
        height=30,
        color_system=None,
        legacy_windows=False,
    )
    monkeypatch.setattr(console, "Console", made)

    def since() -> str:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue())
        written.seek(0)
        written.truncate()
        return text

    return screen_for(_Stream(terminal=True)), since


def test_a_terminal_shows_each_job_with_its_time_and_how_far_it_is(terminal: Made) -> None:
    screen, since = terminal
    screen.show(
        lambda: [JOB, JOB._replace(identifier="ENG-2", attempt=3, seconds=3600, percent=None, note=None)]
    )
    since()
    screen.tick()
    first, second = since().splitlines()
    assert first.split() == ["ENG-1", "1:15", "████······", "40", "%", "reading", "the", "code", "a/b"]
    assert second.split() == ["ENG-2", "60:00", "··········", "attempt", "3", "Fix", "it", "a/b"]
    screen.close()


def test_a_terminal_shows_events_above_the_jobs(terminal: Made) -> None:
    screen, since = terminal
    screen.show(lambda: [JOB])
    since()
    screen.event("claimed", issue="ENG-1", attempt=None, repo="two words")
    assert re.search(r"\d\d:\d\d:\d\d claimed +issue=ENG-1 repo=\"two words\"", since())
    screen.close()


def test_when_it_is_closed_no_job_is_left_and_the_cursor_is_back(terminal: Made) -> None:
    screen, since = terminal
    screen.show(lambda: [JOB])
    screen.tick()
    since()
    screen.close()
    assert "ENG-1" not in since()


@pytest.mark.parametrize(
    "text", [*HOSTILE, "[red]x[/red]", "[/]", "[link=https://evil.example]x[/link]"], ids=ascii
)
def test_on_a_terminal_too_text_is_only_text(text: str, terminal: Made) -> None:
    screen, since = terminal
    job = Line(f"ENG{text}", f"T{text}", f"r{text}", 1, 1.0, 5, None)
    screen.show(lambda: [job, job._replace(note=f"n{text}")])
    screen.tick()
    screen.event("claimed", issue=f"a{text}b", why=text)
    screen.close()
    shown = since().replace("\r", "").replace("\n", "")  # rich's own, at the ends of its lines
    assert shown.isprintable()
    assert printable(f"a{text}b").replace("\\", "\\\\") in shown


def test_a_long_note_does_not_break_the_table(terminal: Made) -> None:
    screen, since = terminal
    screen.show(lambda: [JOB._replace(note="many words " * 500)])
    since()
    screen.tick()
    (line,) = since().splitlines()
    assert len(line) <= 120
    screen.close()


def test_a_reader_that_has_gone_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """`connect | head`: what cannot be said is not said, and renewals go on."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    Plain().event("unheard", why="the server answers 503")

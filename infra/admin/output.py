"""What the operator sees: plain tables for people, `--json` with stable keys for programs.

Titles, names and errors are written by strangers. In a table nothing of them reaches the terminal that it would obey, and no cell is
wider than its column; JSON carries them whole, escaped to ASCII.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

from shared.messages import timestamp

CELL: Final = 60  # the widest cell, in characters; an id has 36
LAST: Final = 100  # of the last column, which moves nothing else
FACT: Final = 300  # of a line of its own
SENTENCE: Final = 600  # of one that is ours: its end is what to do about it
# What follows must look like the rest of a credential: after a mere prefix the sentence goes on.
_CREDENTIAL: Final = re.compile(
    r"(dp_orch_[\w-]{4})[\w-]+|(lin_(?:api|oauth|wh)_)\w[^@\s'\"]*|(://[^:/@\s]*:)[^@\s'\"]+"
)


def printable(text: str) -> str:
    """`text` on one line without controls, escapes and marks that change direction: each becomes a replacement character."""
    shown = []
    for character in text:
        kind = unicodedata.category(character)
        # C: controls, format characters (the bidirectional ones among them), surrogates. Z: separators, newlines of Unicode too.
        shown.append("\N{REPLACEMENT CHARACTER}" if kind[0] == "C" and character not in "\n\t" else character)
    return " ".join("".join(shown).split())


def withheld(text: str) -> str:
    """`text` without what looks like a credential: an error may quote what was pasted into the wrong place."""
    return _CREDENTIAL.sub(r"\1\2\3…", text)


def cell(value: object, widest: int = CELL) -> str:
    """One value as a table shows it, cut to `widest` characters."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return timestamp(value)[:19].replace("T", " ")
    if isinstance(value, (list, tuple)):
        value = ", ".join(str(each) for each in value)
    text = printable(str(value)[: 2 * SENTENCE])
    return text if len(text) <= widest else text[: widest - 1] + "…"


def counted(number: int, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def and_to_be_stopped(state: str, *, stop_requested: bool, wanted_again: bool) -> str:
    """A state, with what was asked of the machine that has it."""
    if wanted_again:
        return f"{state}, to be stopped, wanted again"
    return f"{state}, to be stopped" if stop_requested else state


def duration(seconds: float | None) -> str:
    """A length of time in its two largest units."""
    if seconds is None:
        return "-"
    if 0 < seconds < 1:
        return f"{seconds:.3f} s"
    whole = int(seconds)
    for size, name, smaller, smaller_name in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {smaller_name}"
    return f"{whole} s"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one is not padded, so that a strange title in it moves nothing else."""
    widths = [max(map(_width, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for row in (headings, *rows):
        padded = [text + " " * (width - _width(text)) for text, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*padded, row[-1]]).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


class Printer(NamedTuple):
    """Writes a command's result; the one place that knows whether a person or a program reads it."""

    as_json: bool

    def rows(
        self, rows: Sequence[Any], columns: Mapping[str, str], *, nothing: str, last: int = LAST
    ) -> None:
        """A list of named tuples.

        Args:
            columns: heading -> field, for the table; a field `…_seconds` is shown as a duration. JSON has all fields.
            nothing: what an empty list means.
            last: the widest cell of the last column.
        """
        if self.as_json:
            self.json([row._asdict() for row in rows])
        elif not rows:
            print(nothing)
        else:
            *fields, final = columns.values()
            shown = [
                [
                    *(_shown(field, getattr(row, field), CELL) for field in fields),
                    _shown(final, getattr(row, final), last),
                ]
                for row in rows
            ]
            print(table(list(columns), shown))

    def facts(self, facts: Mapping[str, Any]) -> None:
        """One thing: a line for each of its fields that has a value."""
        if self.as_json:
            self.json(facts)
            return
        shown = {
            name.removesuffix("_seconds").replace("_", " "): _shown(name, value, FACT)
            for name, value in facts.items()
            if value is not None
        }
        width = max(map(len, shown), default=0)
        for name, text in shown.items():
            print(f"{name:{width}}  {text}")

    def said(self, sentence: str, **facts: Any) -> None:
        """What a command has done: a sentence, or the facts in it."""
        if self.as_json:
            self.json(facts)
        else:
            print(printable(sentence))

    def hint(self, sentence: str) -> None:
        """What a person may want to know besides; on standard error, programs read the other one."""
        if not self.as_json:
            print(printable(sentence), file=sys.stderr)

    def json(self, value: Any) -> None:
        """A result for programs: one JSON text, ASCII only."""
        print(json.dumps(value, default=_plain, indent=2))


def _shown(field: str, value: Any, widest: int) -> str:
    return duration(value) if field.endswith("_seconds") else cell(value, widest)


def _plain(value: object) -> Any:
    if isinstance(value, datetime):
        return timestamp(value)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form here")

"""What an agent says on its standard output: progress while it works, and a JSON object at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

MOST_STARTS: Final = 200
"""Of lines that could begin the object: an agent may print anything, and each is read to where it breaks."""
LONGEST_TEXT: Final = 10_000
LONGEST_NOTE: Final = 2_000
LONGEST_URL: Final = 2_000
MOST_TOKENS: Final = 2**53
MOST_DOLLARS: Final = 1_000_000.0

_PROGRESS: Final = re.compile(r"::progress\s+(\d{1,3})(?:\.\d+)?%?(?:\s+(.*))?")


class Progress(NamedTuple):
    """How far it is, in percent, and what it is doing."""

    percent: int
    note: str | None


def progress_in(line: str) -> Progress | None:
    """The report in a line of output: `::progress 40 reading the code`; None for any other line."""
    found = _PROGRESS.fullmatch(line.strip())
    if found is None or int(found[1]) > 100:
        return None
    note = _cut(storable(found[2] or ""), LONGEST_NOTE).strip()
    return Progress(int(found[1]), note or None)


def last_object(text: str) -> Mapping[str, Any]:
    """The last JSON object that begins a line of `text`, on one line or several; empty when there is none."""
    decoder = json.JSONDecoder()
    starts = [found.start() for found in re.finditer(r"^[ \t]*\{", text, re.MULTILINE)]
    for start in reversed(starts[-MOST_STARTS:]):
        try:
            value, end = decoder.raw_decode(text, text.index("{", start))
        except (ValueError, RecursionError):
            continue
        # An inner object of a pretty-printed one begins a line too; what follows it tells them apart.
        if isinstance(value, dict) and text[end:].lstrip()[:1] not in ("}", "]", ","):
            return value
    return {}


def facts_in(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of an agent's result the server will take, and the names of what it would not: one odd field must not lose the rest."""
    facts: dict[str, Any] = {}
    refused = []
    for name, read in _READERS.items():
        if value.get(name) is None:
            continue
        fact = read(value[name])
        if fact is None:
            refused.append(name)
        else:
            facts[name] = fact
    return facts, refused


def storable(text: str) -> str:
    """Without what a database cannot hold: NUL and halves of surrogate pairs."""
    return text.replace("\x00", "").encode("utf-8", "replace").decode()


def _text(value: Any) -> str | None:
    return _cut(storable(value), LONGEST_TEXT) if isinstance(value, str) else None


def _cut(text: str, most: int) -> str:
    """As a server counts that is written in JavaScript, in UTF-16; none counts more. No sign is halved."""
    return text.encode("utf-16-le")[: 2 * most].decode("utf-16-le", "ignore")


def _url(value: Any) -> str | None:
    if not isinstance(value, str) or len(value) > LONGEST_URL or not value.isprintable():
        return None
    value = value.strip()  # urlsplit overlooks what the server does not
    try:
        parts = urlsplit(value)
        port = parts.port  # an odd one is only noticed when it is asked for
    except ValueError:
        return None
    good = parts.scheme.lower() in ("http", "https") and parts.hostname and port != 0 and " " not in value
    return value if good else None


def _tokens(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def _dollars(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_DOLLARS:
        return None
    return float(value)


_READERS: Final = {
    "prUrl": _url,
    "summary": _text,
    "tokensUsed": _tokens,
    "costUsd": _dollars,
    "errorMessage": _text,
}

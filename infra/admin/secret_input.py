"""Secrets come from standard input or a file, never from the command line: other users see that, and the shell remembers it."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Final

from shared.errors import InvalidRequest

LONGEST: Final = 4096
SHORTEST: Final = 16  # below that it can be guessed, and an empty one would let everybody sign


def read_secret(source: str, *, what: str, field: str) -> str:
    """The secret: the only line of a file, or the next line of standard input (asked for, unseen, at a terminal).

    Args:
        source: a path, or `-` for standard input.
        what: what is asked for.
        field: the option that named the source.

    Raises InvalidRequest, which repeats nothing of it, when it cannot be read or is none.
    """
    if source != "-":
        text = _from_file(Path(source), field)
    elif sys.stdin.isatty():
        text = getpass.getpass(f"{what}: ")
    else:
        text = sys.stdin.readline(LONGEST + 2)
    secret = text.strip()
    if not secret:
        where = "on standard input" if source == "-" else "in that file"
        raise InvalidRequest(f"{field}: there is no {what} {where}", field=field)
    if (
        not (SHORTEST <= len(secret) <= LONGEST and secret.isascii() and secret.isprintable())
        or " " in secret
    ):
        raise InvalidRequest(
            f"{field}: the {what} must be one line of {SHORTEST} to {LONGEST} printable characters without spaces",
            field=field,
        )
    return secret


def only_one_from_standard_input(*sources: str | None) -> None:
    """Raises InvalidRequest when two secrets are to come through one pipe. A person at a terminal is asked for each."""
    if sources.count("-") > 1 and not sys.stdin.isatty():
        raise InvalidRequest(
            "only one can be standard input: give a file for --secret-file or for --token-file",
            field="--token-file",
        )


def _from_file(path: Path, field: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST + 2)
    except (OSError, ValueError) as error:
        # Not the path: whoever mistakes the option for the secret itself must not find it in a log.
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidRequest(f"{field}: that file cannot be read: {reason}", field=field) from None

"""The owner's options, each with what it takes; an odd value is refused with the option's name and what it may be."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

PREFIX: Final = "ORCHESTRATOR_"
HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Option(NamedTuple):
    """One value: how to read it, what it is when nobody says, and what the owner reads about it."""

    read: Callable[[Any], Any]
    default: Any
    help: str
    metavar: str = ""


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("must be text")
    return value.strip()


def _name(value: Any) -> str:
    if len(_text(value)) > 120:
        raise ValueError("must be at most 120 characters")
    return _text(value)


def address(value: Any) -> str:
    """A server's URL without a slash at its end. Raises ValueError."""
    text = _text(value)
    try:
        parts = urlsplit(text)
        port = parts.port  # an odd one is only noticed when it is asked for
    except ValueError:
        raise ValueError("must be an address like https://host/path") from None
    if (
        not parts.hostname
        or port == 0
        or parts.scheme not in ("http", "https")
        or "@" in parts.netloc
        or parts.query
        or parts.fragment
    ):
        raise ValueError("must be an address like https://host/path")
    if parts.scheme == "http" and parts.hostname not in HERE:
        raise ValueError(
            "must begin with https://: the token would be readable on the way (http only to this machine)"
        )
    return text.rstrip("/")


def _token(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._~+/-]{16,4096}=*", value.strip()):
        raise ValueError("is no token; it looks like dp_orch_ and 43 characters")
    return value.strip()


def _words(value: Any) -> list[str]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("must be words separated by commas")
    return [word.strip() for word in words if word.strip()]


def _repos(value: Any) -> list[str]:
    for repo in _words(value):
        if not re.fullmatch(r"[^/\s]{1,100}/[^/\s]{1,100}", repo):
            raise ValueError(f"{repo!r} is not owner/name")
    return _words(value)


def _variables(value: Any) -> list[str]:
    for name in _words(value):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(
                f"{name!r} is no name of a variable (its value is taken from the environment, not from here)"
            )
        if name.startswith(PREFIX):
            raise ValueError(f"{name} is not passed on: the agent must not have this program's token")
    return _words(value)


def _command(value: Any) -> list[str]:
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {error}") from None
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) and "\x00" not in word for word in words)
    ):
        raise ValueError("must be a command and its words")
    return words


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if (
            isinstance(value, bool)
            or not re.fullmatch(r"\d{1,9}", str(value).strip())
            or not low <= int(value) <= high
        ):
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return read


def _choice(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return read


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("must be true or false")
    return str(value).strip().lower() in ("true", "1", "yes")


OPTIONS: Final[dict[str, Option]] = {
    "url": Option(address, None, "where the server is", "URL"),
    "token": Option(_token, None, "this machine's token; better in the file or the environment than in a flag", "TOKEN"),
    "name": Option(_name, None, "the machine's name (default: made once from the host's name, and kept)", "NAME"),
    "repos": Option(_repos, [], "the repositories whose work it takes, owner/name, separated by commas", "A/B,C/D"),
    "max_jobs": Option(_whole(1, 64), 4, "how many agents may run at once (default 4)", "N"),
    "transport": Option(
        _choice("poll", "listen", "realtime"), "listen", "how it learns of work: poll, listen (default) or realtime", "HOW"
    ),
    "exec": Option(_command, None, "the command that does the work; no shell reads it", "COMMAND"),
    "directory": Option(
        _text, None, "where it runs; {repo}, {owner} and {name} are replaced (default: a folder for each session)", "FOLDER"
    ),
    "interactive": Option(_flag, default=False, help="follow-ups reach the running command, as lines on its standard input"),
    "env": Option(_variables, [], "variables that the command may see besides the usual ones, separated by commas", "NAMES"),
    "timeout": Option(_whole(1, 7 * 86_400), 7200, "seconds that one run of the command may take (default 7200)", "SECONDS"),
    "patience": Option(_whole(0, 600), 10, "seconds between SIGTERM and SIGKILL for a command (default 10)", "SECONDS"),
    "grace": Option(_whole(0, 86_400), 30, "seconds that running work gets when this program is told to end (default 30)", "SECONDS"),
    "keep_days": Option(_whole(0, 3650), 14, "how long files and logs of a session are kept (default 14)", "DAYS"),
    "state": Option(_text, None, "the folder for the journal and the sessions' files", "FOLDER"),
}  # fmt: skip

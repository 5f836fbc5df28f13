"""The command line: groups, commands, and the kinds of words that they take."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Self

PROGRAM: Final = "python -m infra.admin"

ORG_HELP: Final = "the organization's name or id, needed where there are several"

REPO: Final = re.compile(r"[^/\s]{1,100}/[^/\s]{1,100}")


class UsageError(Exception):
    """The command line cannot be read."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.message = message
        self.usage = usage


class Parser(argparse.ArgumentParser):
    """Argparse without abbreviations and without repeating what it could not read: it may be a secret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, self.format_usage())

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override] # one overload is enough
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            names = [word.split("=", 1)[0] for word in unknown if word.startswith("-")]
            self.error(f"unknown: {', '.join(names)}" if names else f"{len(unknown)} words too many")
        return parsed


class Group:
    """Commands under one word, e.g. `workspace`."""

    def __init__(self, parser: argparse.ArgumentParser, common: Parser) -> None:
        self._commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
        self._common = common

    def group(self, name: str, about: str) -> Self:
        """A group in this one."""
        return type(self)(self._commands.add_parser(name, help=about, description=about), self._common)

    def command(
        self, name: str, run: Callable[[Any], int], about: str, *, of_everything: bool = False
    ) -> Command:
        """A command; `run` gets a Console and returns the exit code.

        Args:
            of_everything: it works on all organizations alike, so that an `--org` would be obeyed by nobody: it is refused.
        """
        parser = self._commands.add_parser(name, help=about, description=about, parents=[self._common])
        parser.set_defaults(run=run, refuse=parser.error, takes_org=not of_everything)
        # Read even where it is refused, wherever it stands: the reason says more than "unknown".
        parser.add_argument(
            "--org",
            type=word,
            default=argparse.SUPPRESS,  # or it would undo what stands before the command
            metavar="NAME",
            help=argparse.SUPPRESS if of_everything else ORG_HELP,
        )
        return Command(parser)


class Command:
    """One command's words; each method adds one and returns the command."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def takes(self, *names: str, **options: Any) -> Self:
        """An argument, as argparse's `add_argument`."""
        self._parser.add_argument(*names, **options)
        return self

    def switch(self, name: str, *, on: str, off: str) -> Self:
        """`--NAME` and `--no-NAME`, of which one may be given; None where neither is."""
        either = self._parser.add_mutually_exclusive_group()
        field = name.replace("-", "_")
        either.add_argument(f"--{name}", action="store_true", default=None, help=on)
        either.add_argument(f"--no-{name}", action="store_false", default=None, dest=field, help=off)
        return self

    def limited(self, default: int = 100) -> Self:
        """`--limit`."""
        return self.takes(
            "--limit",
            type=between(1, 10_000),
            default=default,
            metavar="N",
            help=f"at most N rows (default {default})",
        )

    def in_workspace(self) -> Self:
        """`--workspace`."""
        return self.takes(
            "--workspace", type=word, metavar="NAME", help="its name or id, needed where there are several"
        )

    def secret(self, name: str, about: str, *, default: str | None) -> Self:
        """`--NAME-file`, and a `--NAME` that is refused."""
        self.takes(f"--{name}", type=_refusing(f"--{name}"), help=argparse.SUPPRESS)
        return self.takes(
            f"--{name}-file",
            metavar="FILE",
            default=default,
            help=f"the file with {about}; - is standard input",
        )


def _refusing(option: str) -> Callable[[str], NoReturn]:
    def refuse(_: str) -> NoReturn:
        raise argparse.ArgumentTypeError(
            "every user of this machine can read a command line, and the shell keeps it: "
            f"give {option}-file FILE, or {option}-file - for standard input"
        )

    return refuse


def word(text: str) -> str:
    """A name or an id: 1 to 200 characters of one line."""
    if not 1 <= len(text) <= 200 or not text.isprintable() or text != text.strip():
        raise argparse.ArgumentTypeError("takes 1 to 200 printable characters")
    return text


def name(text: str) -> str:
    """A name of up to 120 characters, as the schema allows."""
    if len(word(text)) > 120:
        raise argparse.ArgumentTypeError("takes at most 120 characters")
    return text


def linear_id(text: str) -> str:
    """An id of Linear: up to 64 characters."""
    if len(word(text)) > 64:
        raise argparse.ArgumentTypeError("takes at most 64 characters")
    return text


def repo(text: str) -> str:
    """`owner/name`."""
    if not REPO.fullmatch(word(text)):
        raise argparse.ArgumentTypeError("takes owner/name")
    return text


def between(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def number(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"takes a whole number from {least} to {most}")
        return int(text)

    return number

"""`python -m orchestrator connect|once|status|doctor|service`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from orchestrator.config import Misconfigured, load
from orchestrator.journal import Busy, Unwritable
from orchestrator.options import OPTIONS, PREFIX

PROGRAM: Final = "orchestrator"
COMMANDS: Final = {
    "connect": "takes work until it is told to end",
    "once": "takes the work that is there, finishes it and ends",
    "status": "whether it runs here, and what it has not finished",
    "doctor": "checks the configuration, the server, the token and the command",
    "service": "prints a service description for systemd or launchd",
}
EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 something went wrong; 2 the configuration is wrong; 3 the server refused the token"
    " or the registration; 4 another orchestrator runs with the same state folder."
)
SOURCES: Final = (
    f"Each option can also stand in the environment ({PREFIX}MAX_JOBS) or in the file (max_jobs);"
    " flags win, then the environment."
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, epilog=f"{SOURCES} {EXIT_CODES}", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        command = commands.add_parser(
            name, help=about, description=about, epilog=f"{SOURCES} {EXIT_CODES}", allow_abbrev=False
        )
        command.add_argument("--config", metavar="FILE", help="the file; mode 0600")
        if name == "service":
            command.add_argument("kind", choices=["systemd", "launchd"])
        if name in ("status", "doctor"):
            command.add_argument("--json", action="store_true", help="for programs")
        for key, option in OPTIONS.items():
            flag = "--" + key.replace("_", "-")
            if option.metavar:
                command.add_argument(flag, dest=key, metavar=option.metavar, help=option.help)
            else:
                command.add_argument(flag, dest=key, action="store_const", const=True, help=option.help)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode is no reason to end
    given: dict[str, Any] = vars(parser().parse_args(arguments))
    command, file = given["command"], given["config"] or os.environ.get(PREFIX + "CONFIG")
    path = Path(file).expanduser() if file else None
    flags = {name: given[name] for name in OPTIONS}
    from orchestrator import commands  # noqa: PLC0415 - `--help` does not wait for the HTTP client

    try:
        if command == "service":
            return commands.service(given["kind"], path)
        config = load(flags, os.environ, path)
        if command == "status":
            return commands.status(config, as_json=given["json"])
        if command == "doctor":
            return commands.doctor(config, as_json=given["json"])
        return commands.work(config, once=command == "once")
    except (Misconfigured, Unwritable) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except Busy as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())

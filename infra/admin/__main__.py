"""`dispatchctl`: the operator's commands, `python -m infra.admin`.

Exit codes: 0 done; 1 something is wrong, not there or in conflict; 2 the command line or the settings; 3 the database cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from infra.admin import doctor, history, listen, machines, realtime, routes, schema, tenants, work
from infra.admin.arguments import ORG_HELP, PROGRAM, Group, Parser, UsageError, word
from infra.admin.console import Console
from infra.admin.failures import USAGE, exit_code, explained
from infra.admin.output import Printer, printable, withheld
from shared.db import engine_for
from shared.settings import Settings

INTERRUPTED: Final = 130  # as a shell reports SIGINT
PIPE_CLOSED: Final = 1  # the reader, e.g. `head`, had enough


def parser() -> Parser:
    """All commands. `--org` (of those that take it) and `--json` may stand before or after them."""
    top = Parser(prog=PROGRAM, description="dispatchctl: the operator's commands of DevPilot dispatch")
    top.add_argument(
        "--org", type=word, metavar="NAME", help=f"{ORG_HELP}; not for what works on all of them"
    )
    _add_json(top, default=False)
    common = Parser(add_help=False)
    # Suppressed where it is not given, or the command's default would undo what stands before it.
    _add_json(common, default=argparse.SUPPRESS)
    commands = Group(top, common)
    for module in (schema, tenants, routes, machines, history, work, listen, realtime, doctor):
        module.add_to(commands)
    return top


def _add_json(to: Parser, *, default: bool | str) -> None:
    to.add_argument(
        "--json",
        action="store_true",
        dest="as_json",
        default=default,
        help="for programs: JSON with stable keys",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: its words; those of this process if None.

    Returns the exit code.
    """
    settings = None
    try:
        options = parser().parse_args(argv)
        if options.org is not None and not options.takes_org:
            options.refuse("this works on all organizations: it takes no --org")
        settings = Settings.from_environment()
        engine = engine_for(settings)
        try:
            code: int = options.run(Console(options, settings, engine, Printer(options.as_json)))
            sys.stdout.flush()
        finally:
            engine.dispose()
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    except UsageError as error:
        _complain(error.message)
        print(error.usage.strip(), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whatever is still buffered would fail again, noisily, when the interpreter closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001 - the last resort: no traceback reaches an operator, it may quote a secret
        _complain(explained(error, settings))
        return exit_code(error)
    return code


def _complain(message: str) -> None:
    print(printable(withheld(message)), file=sys.stderr)


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a title still shows the rest
    sys.exit(main())

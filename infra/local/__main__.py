"""`make serve`: keeps the local stack up until Ctrl-C, and says what to try."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

from infra.local.operator_environment import kept
from infra.local.stack import ROOT, Cron, Stack, running
from shared.errors import DispatchError

EXAMPLES = """
ready. Another terminal can play Linear, a machine, the scheduler and the operator:

  a signed webhook   {python} -m infra.local.linear {url} {secret}
  a machine          curl -s {url}/api/orchestrators/register -H 'Authorization: Bearer {token}' \\
                       -d '{{"name": "laptop", "repos": ["quartz/payments"]}}'
                     curl -s {url}/api/dispatch/poll -H 'Authorization: Bearer {token}'
                     curl -s -X POST {url}/api/dispatch/QUEUE_ID/claim -H 'Authorization: Bearer {token}'
  the scheduler      curl -s -X POST {url}/sweep -H 'Authorization: Bearer {cron}'
  the operator       (set -a; . {environment}; {python} -m infra.admin sessions list)

register the machine first: work for a repository that no machine serves ends as an error, and says so.
Ctrl-C stops everything; the data stays in {data}.
"""
STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


def say_what_to_try(stack: Stack, data: Path, environment: Path) -> None:
    """Prints commands that work as they stand."""
    print(
        EXAMPLES.format(
            python=_from_here(Path(sys.executable)),
            url=stack.url,
            secret=stack.demo.webhook_secret,
            token=stack.demo.tokens["laptop"],
            cron=stack.environment["CRON_SECRET"],
            environment=_from_here(environment),
            data=data,
        ),
        flush=True,
    )


def _from_here(path: Path) -> str:
    """As a shell in this folder names it; never a bare word, which `.` would look for elsewhere."""
    path = path.absolute()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path) if len(path.parts) > 1 else f"./{path}")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError("takes a number from 0 to 65535")
    return int(text)


def _stop(*_: object) -> NoReturn:
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)  # the end is under way: asking again must not interrupt it
    raise KeyboardInterrupt


def main() -> int:
    """Runs the stack. Returns the exit code: 0 when it was stopped, 1 when it could not start."""
    parser = argparse.ArgumentParser(prog="make serve", description="run the whole product on this machine")
    parser.add_argument(
        "--port", type=_port, default=8080, help="where to listen (default 8080; 0 takes a free one)"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / ".local", help="where the data stays (default .local)"
    )
    parser.add_argument("--cron-seconds", type=float, default=60, help="how often to sweep (default 60)")
    options = parser.parse_args()
    # SIGINT too: a script starts what it puts into the background deaf to it.
    for number in STOPPING:
        signal.signal(number, _stop)
    try:
        with (
            running(options.data, port=options.port) as stack,
            kept(stack.environment, options.data / "operator.env") as environment,
            Cron(stack, options.cron_seconds),
        ):
            say_what_to_try(stack, options.data, environment)
            signal.pause()
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running")
    except DispatchError as error:
        print(f"make serve: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"make serve: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

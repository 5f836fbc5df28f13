"""`make serve`: keeps the local stack up until Ctrl-C, and says what to try."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from infra.local.stack import ROOT, Cron, Stack, running

EXAMPLES = """
ready. Another terminal can play Linear, a machine, the scheduler and the operator:

  a signed webhook   .venv/bin/python -m infra.local.linear {url} {secret}
  a machine          curl -s {url}/api/orchestrators/register -H 'Authorization: Bearer {token}' \\
                       -d '{{"name": "laptop", "repos": ["quartz/payments"]}}'
                     curl -s {url}/api/dispatch/poll -H 'Authorization: Bearer {token}'
                     curl -s -X POST {url}/api/dispatch/QUEUE_ID/claim -H 'Authorization: Bearer {token}'
  the scheduler      curl -s -X POST {url}/sweep -H 'Authorization: Bearer {cron}'
  the operator       DATABASE_URL='{database}' DATABASE_TLS=off .venv/bin/python -m infra.admin sessions list

register the machine first: work for a repository that no machine serves ends as an error, and says so.
Ctrl-C stops everything; the data stays in {data}.
"""


def say_what_to_try(stack: Stack, data: Path) -> None:
    """Prints commands that work as they stand."""
    environment, demo = stack.environment, stack.demo
    print(
        EXAMPLES.format(
            url=stack.url,
            secret=demo.webhook_secret,
            token=demo.tokens["laptop"],
            cron=environment["CRON_SECRET"],
            database=environment["DATABASE_URL"],
            data=data,
        ),
        flush=True,
    )


def main() -> None:
    """Runs the stack."""
    parser = argparse.ArgumentParser(prog="make serve", description="run the whole product on this machine")
    parser.add_argument(
        "--port", type=int, default=8080, help="where to listen (default 8080; 0 takes a free one)"
    )
    parser.add_argument(
        "--data", type=Path, default=ROOT / ".local", help="where the data stays (default .local)"
    )
    parser.add_argument("--cron-seconds", type=float, default=60, help="how often to sweep (default 60)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running(options.data, port=options.port) as stack, Cron(stack, options.cron_seconds):
            say_what_to_try(stack, options.data)
            signal.pause()
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running")


if __name__ == "__main__":
    main()

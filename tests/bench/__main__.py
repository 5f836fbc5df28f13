"""`make bench`: runs the cases on a Postgres of its own and prints one table; `--json FILE` keeps it.

Durable settings: fsync and synchronous_commit are on, as in production.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path

from infra.admin.migrate import migrate
from infra.local.postgres import LocalPostgres, find_binaries
from tests.bench import cases, orchestrator
from tests.bench.harness import Bench, Row

CASES = (*cases.CASES, *orchestrator.CASES)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", help=f"which: {', '.join(case.__name__ for case in CASES)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each side")
    parser.add_argument("--seconds", type=float, default=2, help="how long one side of a round runs")
    parser.add_argument(
        "--many", type=int, default=200_000, help="how many rows stand beside the measured ones"
    )
    parser.add_argument("--expired", type=int, default=50_000, help="how many expired claims the sweep finds")
    parser.add_argument("--held-seconds", type=float, default=30, help="how long the old snapshot is held")
    parser.add_argument("--json", type=Path, help="write the figures, round by round")
    options = parser.parse_args()
    binaries = find_binaries(os.environ)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="dispatch-bench-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with LocalPostgres(Path(folder) / "postgres", binaries=binaries) as postgres:
            url = postgres.create_database("bench")
            migrate(url, tls="off")
            bench = Bench(
                url,
                Path(binaries),
                options.rounds,
                options.seconds,
                options.many,
                options.expired,
                options.held_seconds,
            )
            print(f"{'':52} {'ours':>10} {'raw':>10} {'ours/raw':>9}  target")
            for case in CASES:
                if options.cases and case.__name__ not in options.cases:
                    continue
                for row in case(bench):
                    rows.append(row)
                    raw = "" if row.raw is None else f"{row.raw:10,.2f}"
                    ratio = "" if row.ratio is None else f"{row.ratio:9.2f}"
                    print(
                        f"{row.case:40} {row.unit:>11} {row.ours:10,.2f} {raw:>10} {ratio:>9}  {row.target}",
                        flush=True,
                    )
    if options.json:
        about = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
        options.json.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()

"""How the cases are measured: interleaved rounds, medians, ratios; clients are processes, as they are in production.

Absolute figures drift with the machine by a third within half an hour, so only a ratio of two figures of one run means anything.
"""

from __future__ import annotations

import base64
import multiprocessing
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from shared.db import engine_for
from shared.settings import Settings

FORK = multiprocessing.get_context("fork")


@dataclass
class Row:
    """One line of the table. `ours` and `raw` in `unit`; `ratio` as the target states it."""

    case: str
    unit: str
    ours: float
    raw: float | None
    target: str
    ratio: float | None = None
    rounds: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where the cases run."""

    url: str
    bin: Path
    rounds: int
    seconds: float
    many: int
    expired: int
    held_seconds: float

    def settings(self) -> Settings:
        """The product's own settings, on this database."""
        return Settings.from_environment(
            {
                "DATABASE_URL": self.url,
                "DATABASE_TLS": "off",
                "DATABASE_POOL_SIZE": "1",
                "BRIDGE_ENCRYPTION_KEY": base64.b64encode(bytes(32)).decode(),
            }
        )

    def engine(self) -> Engine:
        """An engine of its own for the process that asks."""
        return engine_for(self.settings())

    def interleaved(self, *sides: Callable[[], float]) -> list[list[float]]:
        """Runs the sides in turn, round by round, so that a change of the machine's speed hits all of them."""
        results: list[list[float]] = [[] for _ in sides]
        for _ in range(self.rounds):
            for side, found in zip(sides, results, strict=True):
                found.append(side())
        return results

    def throughput(self, clients: int, work: Callable[[Engine, int], Callable[[], int]]) -> float:
        """Units a second over all clients. `work(engine, client)` prepares one client and returns its step, which returns its units."""
        barrier, results = FORK.Barrier(clients + 1), FORK.Queue()

        def client(number: int) -> None:
            step = work(self.engine(), number)
            step()
            barrier.wait()
            done, began = 0, time.perf_counter()
            while time.perf_counter() - began < self.seconds:
                units = step()
                if units == 0:
                    break
                done += units
            results.put((done, time.perf_counter() - began))

        processes = [FORK.Process(target=client, args=(number,)) for number in range(clients)]
        for process in processes:
            process.start()
        barrier.wait()
        found: list[tuple[int, float]] = [results.get(timeout=self.seconds + 60) for _ in processes]
        for process in processes:
            process.join()
        return sum(done / took for done, took in found)

    def pgbench(self, clients: int, script: str, *, units: int = 1) -> float:
        """Units a second of a pgbench script: the server's own C client, which waits for nobody's Python."""
        url = make_url(self.url)
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(script)
            file.flush()
            command = [
                str(self.bin / "pgbench"),
                "-n",
                "-M",
                "prepared",
                "-c",
                str(clients),
                "-j",
                str(min(clients, 2)),
            ]
            command += ["-T", str(max(1, round(self.seconds))), "-f", file.name]
            command += ["-h", str(url.host), "-p", str(url.port), "-U", str(url.username), str(url.database)]
            environment = {**os.environ, "PGPASSWORD": str(url.password)}
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = re.search(r"tps = ([0-9.]+)", ran.stdout)
        assert found is not None, ran.stdout
        return float(found.group(1)) * units


def p50(step: Callable[[], Any], times: int) -> float:
    """The median duration of a step in milliseconds."""
    step()
    took = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * 1000)
    return statistics.median(took)

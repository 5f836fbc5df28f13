"""A tenant, two machines and the functions in a process of their own, for tests in which something dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from sqlalchemy import Engine

from infra.local import linear
from infra.local.seed import Demo
from shared.db import OPERATOR, sql, transaction

ROOT = Path(__file__).resolve().parents[2]
CRON_SECRET = "the-cron-of-the-tests"

HISTORY = sql("""
    select queue_id, attempt, count(*) from session_events where type = 'claimed' group by queue_id, attempt order by queue_id, attempt
""")
SESSIONS = sql("select status, count(*) from dispatch_sessions group by status")
COUNTS = sql("select (select count(*) from dispatch_sessions), (select count(*) from dispatch_queue)")
VIOLATIONS = sql("select violation from dispatch_invariants")
AGE = sql("""
    update dispatch_queue set claimed_at = claimed_at - interval '1 day', available_at = available_at - interval '1 day'
""")


@dataclass
class World:
    """What a test acts on. `environment` is what the functions are started with."""

    engine: Engine
    demo: Demo
    environment: dict[str, str]
    log: Path

    @contextmanager
    def serving(self, *die_at: str) -> Iterator[Functions]:
        """The functions, in a process that dies at the chosen places."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.victim", str(port), *die_at],
                cwd=ROOT,
                env={"PATH": os.environ["PATH"], **self.environment},
                stdout=output,
                stderr=output,
            )
        functions = Functions(f"http://127.0.0.1:{port}", process, self.demo)
        try:
            until("the functions to answer", functions.answers)
            yield functions
        finally:
            process.kill()
            process.wait()

    def age_everything(self) -> None:
        """As if a day had passed since every claim and every backoff began."""
        with transaction(self.engine, OPERATOR) as tx:
            tx.run(AGE)

    def claims(self) -> list[tuple[UUID, int, int]]:
        """Each (queue id, attempt) that was ever claimed, and how often."""
        with transaction(self.engine, OPERATOR) as tx:
            return [tuple(row) for row in tx.all(HISTORY)]

    def statuses(self) -> dict[str, int]:
        """How many sessions are in which status."""
        with transaction(self.engine, OPERATOR) as tx:
            return {row[0]: row[1] for row in tx.all(SESSIONS)}

    def sessions_and_rows(self) -> tuple[int, int]:
        """How many sessions and queue rows there are."""
        with transaction(self.engine, OPERATOR) as tx:
            row = tx.first(COUNTS)
        assert row is not None
        return row[0], row[1]

    def nothing_contradicts_the_guarantee(self) -> bool:
        """Whether dispatch_invariants is empty."""
        with transaction(self.engine, OPERATOR) as tx:
            return tx.all(VIOLATIONS) == []


class Functions:
    """The functions over HTTP, as Linear, a machine and the scheduler call them."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], demo: Demo) -> None:
        self.url, self.process, self.demo = url, process, demo

    def answers(self) -> bool:
        """Whether anybody listens."""
        assert self.process.poll() is None, "the functions did not start"
        try:
            httpx.get(self.url, timeout=1)
        except httpx.TransportError:
            return False
        return True

    def deliver(self, event: dict[str, Any]) -> httpx.Response:
        """One delivery of a webhook."""
        return linear.send(self.url, event, self.demo.webhook_secret)

    def call(
        self, machine: str, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        """One request of a machine."""
        headers = {"Authorization": f"Bearer {self.demo.tokens[machine]}", "Content-Type": "application/json"}
        content = b"" if body is None else json.dumps(body).encode()
        return httpx.request(method, self.url + path, headers=headers, content=content, timeout=10)

    def tick(self) -> httpx.Response:
        """One tick of the scheduler."""
        return httpx.post(f"{self.url}/sweep", headers={"Authorization": f"Bearer {CRON_SECRET}"}, timeout=40)

    def register(self, *machines: str) -> None:
        """Machines that serve the demo's repository."""
        for name in machines:
            body = {"name": name, "repos": ["quartz/payments"], "maxConcurrentJobs": 64}
            self.call(name, "POST", "/api/orchestrators/register", body).raise_for_status()

    def messages(self, machine: str) -> list[dict[str, Any]]:
        """What waits for a machine."""
        found: list[dict[str, Any]] = (
            self.call(machine, "GET", "/api/dispatch/poll").raise_for_status().json()["messages"]
        )
        return found

    def work_off(self, *machines: str) -> list[int]:
        """Every waiting piece of work claimed and completed; returns the attempts."""
        attempts = []
        for machine in machines:
            for message in self.messages(machine):
                claim = (
                    self.call(machine, "POST", f"/api/dispatch/{message['queueId']}/claim")
                    .raise_for_status()
                    .json()
                )
                done = {"success": True, "attempt": claim["attempt"]}
                self.call(
                    machine, "POST", f"/api/sessions/{message['sessionId']}/complete", done
                ).raise_for_status()
                attempts.append(claim["attempt"])
        return attempts

    def dies_during(self, request: Callable[[], object]) -> bool:
        """Whether the request found its death: no answer, and a process that was killed."""
        try:
            request()
        except httpx.TransportError:
            until("the process to be gone", lambda: self.process.poll() is not None)
            return self.process.returncode == -signal.SIGKILL
        return False


def until(what: str, reached: Callable[[], bool], seconds: float = 20) -> None:
    """Waits for a state of another process."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        time.sleep(0.01)

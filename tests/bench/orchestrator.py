"""The orchestrator on its owner's machine: what it takes while nothing is to be done, and how soon it claims."""

from __future__ import annotations

import base64
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sqlalchemy import Engine

from infra.admin import listen
from infra.admin.realtime import set_on
from shared.db import OPERATOR, sql, transaction
from tests.bench.cases import emptied
from tests.bench.harness import Bench, Row
from tests.contract.programs import Program, until
from tests.contract.supabase_realtime import ANON_KEY, JWT_SECRET, SupabaseRealtime
from tests.crash.serving import Functions
from tests.given import Machine, Tenant, a_machine, work
from tests.supabase import becomes_supabase

IDLE_SECONDS = 20
CLAIMS = {"listen": 20, "realtime": 20, "poll": 4}
"""How many are measured: a poll that finds nothing comes back after a second or more."""

SETTLED_SECONDS = 5
QUIET_SECONDS = 1.5
"""Between two pieces of work: a machine that has just looked does not look again for a second."""
TO_CLAIM = sql("""
    select extract(epoch from claimed.created_at - created.created_at) * 1000
      from session_events created
      join session_events claimed
        on claimed.org_id = created.org_id and claimed.session_id = created.session_id and claimed.type = 'claimed'
     where created.org_id = :org_id and created.session_id = :session_id and created.type = 'created'
""")
OVER = sql("select ended_at is not null from dispatch_sessions where org_id = :org_id and id = :session_id")


class Scene(NamedTuple):
    """A registered orchestrator, the functions that it asks, and for `realtime` a Supabase."""

    program: Program
    engine: Engine
    tenant: Tenant
    machine: Machine
    supabase: SupabaseRealtime | None


@contextmanager
def running(bench: Bench, transport: str) -> Iterator[Scene]:
    """Everything up, and waiting for work."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dispatch-bench-")))
        tenant, engine = stack.enter_context(emptied(bench))
        with transaction(engine, OPERATOR) as tx:
            listen.set_to(tx, wanted=True)
        settings = {
            "DATABASE_URL": bench.url,
            "DATABASE_TLS": "off",
            "DATABASE_LISTEN_URL": bench.url,
            "BRIDGE_ENCRYPTION_KEY": base64.b64encode(bytes(32)).decode(),
            "CRON_SECRET": "the-cron-of-the-bench",
            "LOG_LEVEL": "ERROR",
        }
        supabase = stack.enter_context(SupabaseRealtime(bench.url)) if transport == "realtime" else None
        if supabase is not None:
            becomes_supabase(engine)
            with transaction(engine, OPERATOR) as tx:
                set_on(tx)
            settings |= {
                "SUPABASE_URL": supabase.url,
                "SUPABASE_ANON_KEY": ANON_KEY,
                "SUPABASE_JWT_SECRET": JWT_SECRET,
            }
        functions = stack.enter_context(Functions(settings, fuse=folder / "fuse", threads=8))
        machine = a_machine(engine, tenant, name="idle")
        program = stack.enter_context(
            Program(
                folder / "home",
                functions.url,
                machine.token,
                "--name",
                "idle",
                "--transport",
                transport,
                "--exec",
                "/bin/true",
            )
        )
        program.said("registered")
        if supabase is not None:
            supabase.until(lambda server: server.subscribed)
        yield Scene(program, engine, tenant, machine, supabase)
        with transaction(engine, OPERATOR) as tx:
            listen.set_to(tx, wanted=False)


def idle_orchestrator(bench: Bench) -> Iterator[Row]:
    """Memory and processor time while nothing waits, from the process's own figures."""
    if not sys.platform.startswith("linux"):
        return
    for transport in ("listen", "poll"):
        with running(bench, transport) as scene:
            program = scene.program
            time.sleep(SETTLED_SECONDS)
            before = _cpu_seconds(program.process.pid)
            time.sleep(IDLE_SECONDS)
            used = (_cpu_seconds(program.process.pid) - before) / IDLE_SECONDS * 100
            resident = _resident_mb(program.process.pid)
        yield Row(f"orchestrator, idle, {transport}: memory", "MB", resident, None, "≤ 60")
        yield Row(f"orchestrator, idle, {transport}: processor", "%", used, None, "≤ 1")


def commit_to_claim(bench: Bench) -> Iterator[Row]:
    """From the enqueue to the claim of a real orchestrator over HTTP, by the database's clock."""
    for transport, claims in CLAIMS.items():
        with running(bench, transport) as scene:
            found = [_claimed_after(scene) for _ in range(claims)]
        target = {"listen": "≤ 50", "realtime": "≤ 100"}.get(transport, "")
        yield Row(f"enqueue to claim, {transport}", "ms p50", median(found), None, target)


def _claimed_after(scene: Scene) -> float:
    engine = scene.engine
    time.sleep(QUIET_SECONDS)
    queued = work(engine, scene.tenant, scene.machine)
    if scene.supabase is not None:
        scene.supabase.committed("INSERT", "dispatch_queue", org_id=queued.org_id, id=queued.queue_id)
    names: dict[str, Any] = {"org_id": queued.org_id, "session_id": queued.session_id}

    def over() -> bool:
        with transaction(engine) as tx:
            row = tx.first(OVER, **names)
        return row is not None and bool(row[0])

    until(over, "the work to be over")
    with transaction(engine) as tx:
        row = tx.first(TO_CLAIM, **names)
    assert row is not None
    return float(row[0])


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1_000_000


CASES = (idle_orchestrator, commit_to_claim)

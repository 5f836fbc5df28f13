"""The cases. `raw` is what the best SQL costs that does the same work and keeps none of the promises: no fence, no history, no limit."""

from __future__ import annotations

import hashlib
import hmac
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import Engine, text

from functions import claim as claim_function
from functions import webhook as webhook_function
from functions.app import App
from functions.web import Request
from infra.admin import listen
from infra.local import linear
from infra.local.seed import seed
from shared import dispatch_queue, sessions
from shared.db import OPERATOR, Tx, sql, transaction
from shared.log import log_from
from shared.sessions import Result
from shared.sweep import sweep_once
from tests.bench.harness import Bench, Row, p50
from tests.given import POLICY, Machine, Tenant, a_machine, a_message, a_session, a_tenant, work

ROOT = Path(__file__).resolve().parents[2]
KILOBYTE = "x" * 900
Message = dict[str, Any]

FILL = sql("""
    with s as (
      insert into dispatch_sessions (org_id, id, workspace_id, orchestrator_id, linear_issue_id, linear_identifier, team_id, title, repo)
      select :org_id, gen_random_uuid(), :workspace_id, :orchestrator_id, gen_random_uuid()::text, 'PAY-1', 'team', 'bench', 'acme/api'
        from generate_series(1, :rows)
      returning org_id, id
    )
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload, available_at)
    select org_id, gen_random_uuid(), :orchestrator_id, id, cast(:payload as jsonb),
           now() - interval '1 hour' + random() * interval '1 minute'
      from s
""")
CLAIM_ALL = sql("""
    with c as (
      update dispatch_queue set claimed_at = now() - interval '1 day', claimed_by = orchestrator_id, attempts = 1
       where org_id = :org_id and orchestrator_id = :orchestrator_id returning org_id, session_id, id, orchestrator_id
    ), s as (
      update dispatch_sessions s set status = 'dispatched' from c where s.org_id = c.org_id and s.id = c.session_id
    )
    insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt)
    select org_id, session_id, 'claimed', orchestrator_id, id, 1 from c
""")
# Deferred checks of rows that are right by construction would only make the filling slow; the triggers stay on for what is measured.
QUIET = text("set local session_replication_role = replica")


def fill(bench: Bench, tenant: Tenant, machine: Machine, rows: int) -> None:
    """Waiting rows for a machine, and statistics about them."""
    engine = bench.engine()
    with engine.connect() as connection:
        for start in range(0, rows, 50_000):
            connection.execute(QUIET)
            connection.execute(
                FILL,
                {
                    "org_id": tenant.org_id,
                    "workspace_id": tenant.workspace_id,
                    "orchestrator_id": machine.id,
                    "rows": min(50_000, rows - start),
                    "payload": json.dumps(a_message(description=KILOBYTE)),
                },
            )
            connection.commit()
        for table in ("dispatch_sessions", "dispatch_queue", "session_events", "orchestrators", "workspaces"):
            connection.exec_driver_sql(f"analyze {table}")
        connection.commit()
    engine.dispose()


@contextmanager
def emptied(bench: Bench) -> Iterator[tuple[Tenant, Engine]]:
    """An empty database with one tenant."""
    engine = bench.engine()
    with engine.connect() as connection:
        connection.exec_driver_sql("truncate organizations cascade")
        connection.commit()
    # A table that has never been analysed is planned as if it were empty; one minute after the first rows that is over in production.
    other = a_tenant(engine)
    fill(bench, other, a_machine(engine, other), 2_000)
    try:
        yield a_tenant(engine), engine
    finally:
        engine.dispose()


# -- the bare side ------------------------------------------------------------------------------------------------------

# Three tables with the same columns and the indexes that the same work needs; nothing that keeps a promise.
BARE = """
    drop schema if exists bare cascade;
    create schema bare;
    create table bare.sessions (id uuid primary key, issue uuid, title text, status text default 'pending',
                                created_at timestamptz default now());
    create table bare.events (session_id uuid, id bigint generated always as identity, type text, created_at timestamptz default now(),
                              primary key (session_id, id));
    create table bare.queue (id uuid primary key, machine integer, session_id uuid unique, payload jsonb, attempts integer default 0,
                             available_at timestamptz default now(), claimed_at timestamptz, created_at timestamptz default now());
    create index on bare.queue (machine, available_at, id) where claimed_at is null;
"""
BARE_FILL = """
    insert into bare.queue (id, machine, session_id, payload)
    select gen_random_uuid(), {machine}, gen_random_uuid(), '{payload}' from generate_series(1, {rows})
"""
BARE_CYCLE = """
    with c as materialized (
      select id from bare.queue where machine = :client_id and claimed_at is null and available_at <= now()
       order by available_at, id limit 1 for update skip locked)
    update bare.queue q set claimed_at = now(), attempts = attempts + 1 from c where q.id = c.id and q.claimed_at is null
    returning q.id \\gset
    delete from bare.queue where id = cast(:id as uuid);
"""
BARE_CLAIM = """
    with c as materialized (
      select id from bare.queue where machine = :client_id and claimed_at is null and available_at <= now()
       order by available_at, id limit {batch} for update skip locked)
    update bare.queue q set claimed_at = now(), attempts = attempts + 1 from c where q.id = c.id and q.claimed_at is null
    returning q.id, q.payload;
"""
BARE_ENQUEUE = """
    \\set n random(1, 9000000000000000000)
    begin;
    insert into bare.sessions (id, issue, title) values (md5(:n::text)::uuid, md5(:n::text)::uuid, 'bench');
    insert into bare.events (session_id, type) values (md5(:n::text)::uuid, 'created');
    insert into bare.queue (id, machine, session_id, payload) values (gen_random_uuid(), 0, md5(:n::text)::uuid, '{payload}');
    commit;
"""
PAYLOAD = json.dumps(a_message(description=KILOBYTE))


def bare(engine: Engine, rows: int = 0, machines: int = 1) -> None:
    """The bare tables, with waiting rows for each machine."""
    with engine.connect() as connection:
        connection.exec_driver_sql(BARE)
        for machine in range(machines if rows else 0):
            connection.exec_driver_sql(BARE_FILL.format(machine=machine, payload=PAYLOAD, rows=rows))
        connection.exec_driver_sql("analyze bare.queue")
        connection.commit()


# -- enqueue ------------------------------------------------------------------------------------------------------------


def enqueue(bench: Bench) -> Iterator[Row]:
    """Session, event and row, committed together."""
    for clients, target in ((1, ".70"), (8, ".50")):
        with emptied(bench) as (tenant, engine):
            machine = a_machine(engine, tenant)
            message = a_message(description=KILOBYTE)
            bare(engine)

            def client(
                own: Engine,
                _: int,
                tenant: Tenant = tenant,
                machine: Machine = machine,
                message: Message = message,
            ) -> Callable[[], int]:
                def step() -> int:
                    with transaction(own) as tx:
                        session_id = a_session(tx, tenant, machine)
                        dispatch_queue.enqueue_dispatch(
                            tx,
                            org_id=tenant.org_id,
                            orchestrator_id=machine.id,
                            session_id=session_id,
                            message=message,
                        )
                    return 1

                return step

            ours, raw = bench.interleaved(
                partial(bench.throughput, clients, client),
                partial(bench.pgbench, clients, BARE_ENQUEUE.format(payload=PAYLOAD)),
            )
            yield row(f"enqueue, {_clients(clients)}", "per s", ours, raw, f"≥ {target}")


def _clients(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


# -- claim and settle ---------------------------------------------------------------------------------------------------


def claim_and_settle(bench: Bench) -> Iterator[Row]:
    """One piece of work claimed and completed: two commits on both sides; ours with fence, limit, session and history."""
    for clients, target in ((1, ".60"), (8, ".45")):
        with emptied(bench) as (tenant, engine):
            machines = _filled(
                bench,
                tenant,
                engine,
                clients,
                rows=int((bench.seconds + 1) * bench.rounds * 1500 / clients**0.5),
            )
            bare(engine, int((bench.seconds + 1) * bench.rounds * 3500 / clients**0.5), clients)

            def client(
                own: Engine, number: int, tenant: Tenant = tenant, machines: list[Machine] = machines
            ) -> Callable[[], int]:
                def step() -> int:
                    machine = machines[number]
                    with transaction(own) as tx:
                        got = dispatch_queue.claim_many(
                            tx,
                            org_id=tenant.org_id,
                            orchestrator_id=machine.id,
                            limit=1,
                            concurrency_limit=64,
                        )
                    with transaction(own) as tx:
                        _settle(tx, tenant, machine, got[0])
                    return 1

                return step

            ours, raw = bench.interleaved(
                partial(bench.throughput, clients, client), partial(bench.pgbench, clients, BARE_CYCLE)
            )
            yield row(f"claim + settle one, {_clients(clients)}", "per s", ours, raw, f"≥ {target}")


def claim_several(bench: Bench) -> Iterator[Row]:
    """Several claims in one statement. There is no bulk completion: each piece of work ends when its agent does."""
    for batch, target in ((10, ".45"), (60, ".45")):
        with emptied(bench) as (tenant, engine):
            needed = int((bench.seconds + 1) * bench.rounds * 5000)
            machines = _filled(bench, tenant, engine, 2, rows=needed)
            bare(engine, needed * 3, 2)

            def client(
                own: Engine,
                number: int,
                tenant: Tenant = tenant,
                machines: list[Machine] = machines,
                batch: int = batch,
            ) -> Callable[[], int]:
                def step() -> int:
                    with transaction(own) as tx:
                        got = dispatch_queue.claim_many(
                            tx,
                            org_id=tenant.org_id,
                            orchestrator_id=machines[number].id,
                            limit=batch,
                            concurrency_limit=10**9,
                        )
                    return len(got)

                return step

            ours, raw = bench.interleaved(
                partial(bench.throughput, 2, client),
                partial(bench.pgbench, 2, BARE_CLAIM.format(batch=batch), units=batch),
            )
            yield row(f"claim {batch} at once, 2 clients", "rows per s", ours, raw, f"≥ {target}")


def _filled(bench: Bench, tenant: Tenant, engine: Engine, machines: int, *, rows: int) -> list[Machine]:
    made = [a_machine(engine, tenant) for _ in range(machines)]
    for machine in made:
        fill(bench, tenant, machine, rows)
    return made


def _settle(tx: Tx, tenant: Tenant, machine: Machine, work: dispatch_queue.Work) -> None:
    settled = dispatch_queue.settle(
        tx,
        org_id=tenant.org_id,
        orchestrator_id=machine.id,
        session_id=work.session_id,
        attempt=work.attempts,
    )
    assert settled is not None
    sessions.close_session(
        tx,
        org_id=tenant.org_id,
        session_id=work.session_id,
        result=Result("complete"),
        orchestrator_id=machine.id,
        queue_id=settled.queue_id,
        attempt=settled.attempt,
    )


# -- flat in table size -------------------------------------------------------------------------------------------------


def beside_many(bench: Bench) -> Iterator[Row]:
    """Poll and claim of a machine with a few rows, beside many rows of another machine; and with many rows of its own."""
    for whose in ("others", "its own"):
        measured: dict[str, list[list[float]]] = {"poll": [], "claim": []}
        for size in (1_000, bench.many):
            with emptied(bench) as (tenant, engine):
                mine, other = a_machine(engine, tenant), a_machine(engine, tenant)
                fill(bench, tenant, other if whose == "others" else mine, size)
                if whose == "others":
                    fill(bench, tenant, mine, 2_000)
                one = bench.engine()
                measured["poll"].append([p50(partial(_poll, one, mine), 200) for _ in range(bench.rounds)])
                measured["claim"].append(
                    [p50(partial(_claim_one, one, mine), 60) for _ in range(bench.rounds)]
                )
                one.dispose()
        for what, (few, many) in measured.items():
            yield row(f"{what} beside {bench.many:,} rows ({whose})", "ms p50", many, few, "≤ 1.25")


def _poll(engine: Engine, machine: Machine) -> None:
    with transaction(engine) as tx:
        dispatch_queue.poll(tx, token=machine.token, limit=16)


def _claim_one(engine: Engine, machine: Machine) -> None:
    with transaction(engine) as tx:
        got = dispatch_queue.claim_many(
            tx, org_id=machine.org_id, orchestrator_id=machine.id, limit=1, concurrency_limit=10**9
        )
    assert len(got) == 1


def held_snapshot(bench: Bench) -> Iterator[Row]:
    """Enqueue, claim, settle in a loop while an old snapshot keeps every dead row: the last quarter beside the first."""
    with emptied(bench) as (tenant, engine):
        machine, one, holder = a_machine(engine, tenant), bench.engine(), bench.engine()
        with holder.connect() as old:
            old.exec_driver_sql("set transaction isolation level repeatable read")
            old.exec_driver_sql("select count(*) from dispatch_queue")
            began, durations = time.perf_counter(), list[float]()
            while time.perf_counter() - began < bench.held_seconds:
                at = time.perf_counter()
                work(one, tenant, machine)
                with transaction(one) as tx:
                    got = dispatch_queue.claim_many(
                        tx, org_id=tenant.org_id, orchestrator_id=machine.id, limit=1, concurrency_limit=64
                    )
                with transaction(one) as tx:
                    _settle(tx, tenant, machine, got[0])
                durations.append((time.perf_counter() - at) * 1000)
        one.dispose()
        holder.dispose()
    quarter = len(durations) // 4
    first, last = median(durations[:quarter]), median(durations[-quarter:])
    yield Row(
        f"cycle beside a snapshot held {bench.held_seconds:g} s",
        "ms p50",
        last,
        first,
        "≤ 1.25",
        last / first,
    )


# -- sweep --------------------------------------------------------------------------------------------------------------

BARE_SWEEP = """
    update bare.queue set claimed_at = null, available_at = now() + interval '60 s'
     where id in (select id from bare.queue
                   where claimed_at < now() - interval '30 min' order by claimed_at limit 5000 for update skip locked)
"""


def sweep(bench: Bench) -> Iterator[Row]:
    """Many expired claims given back with history, against a bare update of as many rows; and a tick that finds nothing to do."""
    rows, ours, raw, idle = bench.expired, [], [], []
    for _ in range(max(1, bench.rounds // 2)):
        with emptied(bench) as (tenant, engine):
            machine = a_machine(engine, tenant)
            fill(bench, tenant, machine, rows)
            bare(engine, rows)
            with engine.connect() as connection:
                connection.execute(CLAIM_ALL, {"org_id": tenant.org_id, "orchestrator_id": machine.id})
                connection.exec_driver_sql("update bare.queue set claimed_at = now() - interval '1 day'")
                connection.exec_driver_sql(
                    "create index on bare.queue (claimed_at) where claimed_at is not null"
                )
                connection.commit()
                connection.exec_driver_sql("analyze dispatch_queue")
                connection.exec_driver_sql("analyze bare.queue")
                connection.commit()
            began = time.perf_counter()
            report = sweep_once(
                engine, policy=POLICY, retention_hours=72, batch_rows=5000, budget_seconds=600
            )
            ours.append((time.perf_counter() - began) * 1e6 / rows)
            assert report.released == rows, report
            began = time.perf_counter()
            with engine.connect() as connection:
                while connection.exec_driver_sql(BARE_SWEEP).rowcount:
                    connection.commit()
            raw.append((time.perf_counter() - began) * 1e6 / rows)
            tick = partial(
                sweep_once, engine, policy=POLICY, retention_hours=72, batch_rows=500, budget_seconds=50
            )
            idle.append(p50(tick, 30))
    yield row(f"sweep of {rows:,} expired claims", "µs a row", ours, raw, "≤ 4")
    yield Row(f"idle tick beside {rows:,} rows", "ms p50", median(idle), None, "≤ 6 ms", None, {"ours": idle})


# -- over the functions -------------------------------------------------------------------------------------------------


def requests(bench: Bench) -> Iterator[Row]:
    """The functions' own cost: a signed webhook and a poll through the handlers, beside the same work called directly."""
    with emptied(bench) as (_, engine):
        settings = bench.settings()
        with tempfile.TemporaryDirectory() as folder:
            demo = seed(engine, settings, Path(folder) / "demo.json")
        app = App(settings, engine)
        log_from("CRITICAL")
        token = {"authorization": f"Bearer {demo.tokens['laptop']}"}
        registration = json.dumps({"name": "laptop", "repos": ["quartz/payments"]}).encode()
        claim_function.handle(app, Request("POST", "/api/orchestrators/register", {}, token, registration))
        tenant = Tenant(uuid.UUID(demo.org_id), uuid.UUID(int=0))
        with transaction(engine, OPERATOR) as tx:
            first = tx.first(WORKSPACE_OF, org_id=tenant.org_id)
            machine_row = tx.first(MACHINE_OF, org_id=tenant.org_id)
        assert first is not None
        assert machine_row is not None
        tenant = Tenant(tenant.org_id, first[0])
        machine = Machine(tenant.org_id, machine_row[0], demo.tokens["laptop"], uuid.UUID(int=0))

        def delivery() -> None:
            body = json.dumps(linear.delegated("bench", 1)).encode()
            signature = hmac.new(demo.webhook_secret.encode(), body, hashlib.sha256).hexdigest()
            answer = webhook_function.handle(
                app, Request("POST", "/", {}, {"linear-signature": signature}, body)
            )
            assert answer.body is not None
            assert answer.body["outcome"] == "started", answer.body

        def directly() -> None:
            with transaction(engine) as tx:
                session_id = a_session(tx, tenant, machine)
                dispatch_queue.enqueue_dispatch(
                    tx,
                    org_id=tenant.org_id,
                    orchestrator_id=machine.id,
                    session_id=session_id,
                    message=a_message(description=KILOBYTE),
                )

        ours, raw = bench.interleaved(partial(p50, delivery, 100), partial(p50, directly, 100))
        yield row("webhook, signed, beside open + enqueue", "ms p50", ours, raw, "≤ 3")
    with emptied(bench) as (tenant, engine):
        machine, app = a_machine(engine, tenant), App(bench.settings(), engine)
        request = Request("GET", "/api/dispatch/poll", {}, {"authorization": f"Bearer {machine.token}"})
        ours, raw = bench.interleaved(
            partial(p50, partial(claim_function.handle, app, request), 300),
            partial(p50, partial(_select, engine), 300),
        )
        yield row("poll, empty, beside select 1", "ms p50", ours, raw, "≤ 3")


WORKSPACE_OF = sql("select id from workspaces where org_id = :org_id")
MACHINE_OF = sql("select id from orchestrators where org_id = :org_id")
ONE = sql("select 1")


def _select(engine: Engine) -> None:
    with transaction(engine) as tx:
        tx.first(ONE)


def wake_up(bench: Bench) -> Iterator[Row]:
    """From the end of a COMMIT to the answer of the poll that waited for it, beside a poll that is asked at that moment; in one process."""
    log_from("CRITICAL")
    settings = bench.settings().model_copy(update={"database_listen_url": bench.settings().database_url})
    with emptied(bench) as (tenant, engine), ThreadPoolExecutor(1) as threads:
        with transaction(engine, OPERATOR) as tx:
            listen.set_to(tx, wanted=True)
        app = App(settings, bench.engine())

        def asked(machine: Machine, seconds: int) -> float:
            headers = {"authorization": f"Bearer {machine.token}"}
            request = Request("GET", "/api/dispatch/poll", {"waitSeconds": str(seconds)}, headers)
            answer = claim_function.handle(app, request)
            assert answer.body is not None
            assert len(answer.body["messages"]) == 1, answer.body
            return time.perf_counter()

        def woken() -> float:
            machine = a_machine(engine, tenant)
            answer = threads.submit(asked, machine, 60)
            while not app.listening.waiting:
                time.sleep(0.001)
            work(engine, tenant, machine)
            committed = time.perf_counter()
            return (answer.result() - committed) * 1000

        def polled() -> float:
            machine = a_machine(engine, tenant)
            work(engine, tenant, machine)
            began = time.perf_counter()
            return (asked(machine, 0) - began) * 1000

        ours, raw = bench.interleaved(
            lambda: median(woken() for _ in range(50)), lambda: median(polled() for _ in range(50))
        )
        app.listening.close()
        app.engine.dispose()
        with transaction(engine, OPERATOR) as tx:
            listen.set_to(tx, wanted=False)
    yield row("commit to a waiting poll's answer, beside a poll", "ms p50", ours, raw, "≤ 50 ms")


# -- cold start ---------------------------------------------------------------------------------------------------------


def cold_start(bench: Bench) -> Iterator[Row]:
    """What an instance imports before its first request, beside what SQLAlchemy and the driver alone cost."""
    floor = "import sqlalchemy.dialects.postgresql.pg8000, pg8000"
    for function in ("webhook", "claim", "sweep"):
        ours, raw = bench.interleaved(
            partial(_import_ms, f"import functions.app, functions.{function}"), partial(_import_ms, floor)
        )
        yield row(f"cold start: import of {function}", "ms", ours, raw, "≤ 1.5")


def _import_ms(statement: str) -> float:
    """Inside the process, so that the interpreter's own start does not count."""
    code = (
        f"import time; began = time.perf_counter(); {statement}; print((time.perf_counter() - began) * 1000)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(ran.stdout)


def row(case: str, unit: str, ours: list[float], raw: list[float], target: str) -> Row:
    """A line of the table. The ratio is the median of the rounds' ratios: both sides of a round met the same machine."""
    ratio = median(mine / theirs for mine, theirs in zip(ours, raw, strict=True))
    return Row(case, unit, median(ours), median(raw), target, ratio, {"ours": ours, "raw": raw})


CASES = (
    enqueue,
    claim_and_settle,
    claim_several,
    beside_many,
    held_snapshot,
    sweep,
    requests,
    wake_up,
    cold_start,
)

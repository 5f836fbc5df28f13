"""One suite for all transports: whatever happens to what they hear, the same work arrives, the same number of times.

The real functions, the real client, the real transports; only how long they wait at most is shorter here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from sqlalchemy import Engine

from infra.admin.listen import set_to
from infra.admin.realtime import set_on
from orchestrator.client import ClaimLost, Client, TryLater
from orchestrator.pace import Pace
from orchestrator.transports import Transport, listen, realtime
from orchestrator.transports.listen import Listen
from orchestrator.transports.poll import Poll
from orchestrator.transports.realtime import Realtime
from orchestrator.wire import Completion, Held, Registration
from shared.db import OPERATOR, sql, transaction
from tests.contract.conftest import serving
from tests.contract.supabase_realtime import ANON_KEY, JWT_SECRET, SupabaseRealtime
from tests.databases import Databases
from tests.given import REPO, Machine, Queued, Tenant, a_machine, a_tenant, session_of, violations, work
from tests.roundtrips import Proxy, counting_proxy
from tests.supabase import becomes_supabase

# The realtime library's way to say that a connection broke is to read what websockets deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:ConnectionClosed:DeprecationWarning")

PATIENCE = 20
LONGEST = 1
"""Seconds that a transport, or this suite's loop, waits at most when it hears nothing."""

MAKE: dict[str, Callable[[Client, Pace, Registration], Transport]] = {
    "poll": lambda _, pace, __: Poll(pace),
    "listen": lambda client, pace, _: Listen(client, pace),
    "realtime": lambda client, pace, registration: Realtime(client, pace, registration.realtime or {}),
}
NOTIFY = sql("select pg_notify('dispatch_queue', :machine)")
NOT_DUE = sql("update dispatch_queue set available_at = now() + interval '1 day' where org_id = :org_id")
DEAF = sql("""
    select pg_terminate_backend(pid) from pg_stat_activity
     where datname = current_database() and application_name = 'devpilot-dispatch listen'
""")


@pytest.fixture(scope="module")
def supabase(
    postgres: Databases, migrated: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any], SupabaseRealtime]]:
    """The functions, and a Supabase that shows what is in their database."""
    log = tmp_path_factory.mktemp("served") / "functions.log"
    with postgres.fresh(migrated) as url, SupabaseRealtime(url) as server:
        settings = {
            "DATABASE_URL": url,
            "DATABASE_LISTEN_URL": url,
            "SUPABASE_URL": server.url,
            "SUPABASE_ANON_KEY": ANON_KEY,
            "SUPABASE_JWT_SECRET": JWT_SECRET,
        }
        with serving(postgres, migrated, log, **settings) as served:
            becomes_supabase(served["engine"])
            with transaction(served["engine"], OPERATOR) as tx:
                set_on(tx)
            yield served, server


@dataclass
class Scene:
    """A machine with one transport, and who tells it."""

    name: str
    engine: Engine
    server: SupabaseRealtime
    network: Proxy
    tenant: Tenant
    machine: Machine
    later: Queued
    taken: Counter[str] = field(default_factory=Counter)
    polls: int = 0

    def tells(self, times: int) -> None:
        """What the transport hears when a row was written, that many times; a poll hears nothing.

        It is told of a row that is not due: a server shows no row that is gone already, and which one it is does not matter.
        """
        if self.name == "realtime":
            for _ in range(times):
                self.server.committed(
                    "INSERT", "dispatch_queue", org_id=self.later.org_id, id=self.later.queue_id
                )
        if self.name == "listen":
            with self.engine.connect() as connection:
                for _ in range(times):
                    connection.execute(NOTIFY, {"machine": str(self.machine.id)})
                    connection.commit()

    def work(self, *, told: int = 1) -> Queued:
        """Commits work; how often that is told, and whether at all, is the test's to say."""
        with transaction(self.engine, OPERATOR) as tx:
            set_to(tx, wanted=False)
        queued = work(self.engine, self.tenant, self.machine)
        self.tells(told)
        return queued

    def breaks(self) -> None:
        """What it hears by breaks, without a word."""
        self.server.cut()
        with transaction(self.engine, OPERATOR) as tx:
            tx.all(DEAF)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The machine takes whatever comes: waits, looks, claims, completes."""
        loop = asyncio.create_task(self._loop())
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    async def _loop(self) -> None:
        client, pace = Client(self.network.url, self.machine.token), Pace()
        registration = await client.register(
            name=f"machine {self.machine.token_id}", repos=[REPO], max_jobs=4
        )
        transport = MAKE[self.name](client, pace, registration)
        try:
            while True:
                await transport.wait()
                try:
                    await self._look(client, pace)
                except TryLater:
                    pace.failed(None)
        finally:
            await transport.aclose()
            await client.aclose()

    async def _look(self, client: Client, pace: Pace) -> None:
        polled = await client.poll()
        self.polls += 1
        for message in polled.messages:
            try:
                claim = await client.claim(message.queue_id)
            except ClaimLost:
                continue
            self.taken[message.queue_id] += 1
            held = Held(message.queue_id, message.session_id, message.identifier, claim.attempt)
            await client.complete(held, Completion(success=True, facts={}))
        pace.looked(found=bool(polled.messages), poll_after=min(polled.poll_after or 0, LONGEST))

    async def until_done(self, *rows: Queued) -> None:
        """Returns when that work is complete."""
        async with asyncio.timeout(PATIENCE):
            for queued in rows:
                while (await asyncio.to_thread(session_of, self.engine, queued)).status != "complete":  # noqa: ASYNC110 - a row tells nobody
                    await asyncio.sleep(0.01)


@pytest.fixture(params=list(MAKE))
def scene(
    request: pytest.FixtureRequest,
    supabase: tuple[dict[str, Any], SupabaseRealtime],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:
    served, server = supabase
    monkeypatch.setattr(listen, "WAIT_SECONDS", LONGEST)
    monkeypatch.setattr(realtime, "LONGEST_SECONDS", LONGEST)
    monkeypatch.setattr(realtime, "RETRY_SECONDS", 0.05)
    engine = served["engine"]
    tenant = a_tenant(engine)
    machine = a_machine(engine, tenant)
    later = work(engine, tenant, machine)
    with transaction(engine, OPERATOR) as tx:
        tx.run(NOT_DUE, org_id=later.org_id)
    with counting_proxy(served["url"]) as network:
        yield Scene(request.param, engine, server, network, tenant, machine, later)
    assert violations(engine) == []


def test_work_that_is_told_of_arrives_once(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            for _ in range(3):
                await scene.until_done(await asyncio.to_thread(scene.work))

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1, 1]


def test_work_that_nobody_tells_of_arrives_once(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            rows = [await asyncio.to_thread(scene.work, told=0) for _ in range(3)]
            await scene.until_done(*rows)

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1, 1]


def test_work_that_is_told_of_many_times_arrives_once_and_is_not_looked_for_as_often(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            queued = await asyncio.to_thread(scene.work, told=100)
            await scene.until_done(queued)
            await asyncio.to_thread(scene.tells, 100)
            await scene.until_done(await asyncio.to_thread(scene.work))

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1]
    assert scene.polls < 20


def test_what_is_told_late_brings_nothing_a_second_time(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            queued = await asyncio.to_thread(scene.work, told=0)
            await scene.until_done(queued)
            await asyncio.to_thread(scene.tells, 1)
            await scene.until_done(await asyncio.to_thread(scene.work))

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1]


def test_work_arrives_once_when_the_connection_that_tells_of_it_breaks(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            await scene.until_done(await asyncio.to_thread(scene.work))
            await asyncio.to_thread(scene.breaks)
            rows = [await asyncio.to_thread(scene.work, told=0) for _ in range(2)]
            await scene.until_done(*rows)

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1, 1]


def test_work_arrives_once_when_the_whole_network_was_away(scene: Scene) -> None:
    async def story() -> None:
        async with scene.at_work():
            await scene.until_done(await asyncio.to_thread(scene.work))
            scene.network.down()
            await asyncio.to_thread(scene.breaks)
            rows = [await asyncio.to_thread(scene.work) for _ in range(2)]
            scene.network.up()
            await scene.until_done(*rows)

    asyncio.run(story())
    assert list(scene.taken.values()) == [1, 1, 1]

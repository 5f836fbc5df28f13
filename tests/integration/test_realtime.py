"""The transport `realtime` with its real library, the real functions, real policies, and a server that speaks as Supabase's does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from sqlalchemy import Engine

import functions.realtime
from functions import claim
from functions.app import App
from functions.web import Request
from infra.admin.realtime import set_off, set_on
from orchestrator.client import Client, TokenRefused
from orchestrator.pace import Pace
from orchestrator.transports import realtime
from orchestrator.transports.realtime import Realtime
from shared import orchestrators
from shared.db import OPERATOR, sql, transaction
from shared.settings import Settings
from tests.contract.supabase_realtime import ANON_KEY, JWT_SECRET, SupabaseRealtime
from tests.given import Machine, Queued, Tenant, a_machine, a_tenant, claimed, work
from tests.supabase import becomes_supabase

# Its way to say that a connection broke is to read what websockets deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:ConnectionClosed:DeprecationWarning")

PATIENCE = 15
HOUR = 3600
QUEUE = "dispatch_queue"


@pytest.fixture
def server(engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupabaseRealtime]:
    becomes_supabase(engine)
    with transaction(engine, OPERATOR) as tx:
        set_on(tx)
    for name, seconds in (("SHORTEST_SECONDS", 0.01), ("RETRY_SECONDS", 0.01), ("ANSWER_SECONDS", 0.5)):
        monkeypatch.setattr(realtime, name, seconds)
    with SupabaseRealtime(settings.database_url.get_secret_value()) as running:
        yield running


class Heard(asyncio.Event):
    """Counts how often something was heard, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self._more = asyncio.Event()

    def set(self) -> None:
        self.times += 1
        self._more.set()
        super().set()

    async def reach(self, times: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.times < times:
                self._more.clear()
                await self._more.wait()


class Scene:
    """A machine with the transport under test, and the functions that it talks to."""

    transport: Realtime
    pace: Pace
    heard: Heard

    def __init__(
        self, engine: Engine, settings: Settings, server: SupabaseRealtime, secret: str = JWT_SECRET
    ) -> None:
        self.engine, self.server, self.down = engine, server, False
        self.tenant: Tenant = a_tenant(engine)
        self.machine: Machine = a_machine(engine, self.tenant)
        supabase = {
            "supabase_url": server.url,
            "supabase_anon_key": SecretStr(ANON_KEY),
            "supabase_jwt_secret": SecretStr(secret),
        }
        self.app = App(settings.model_copy(update=supabase), engine)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("nobody there")
        asked = Request(
            request.method, request.url.path, dict(request.url.params), dict(request.headers), request.content
        )
        response = claim.handle(self.app, asked)
        body, headers = response.encoded()
        return httpx.Response(response.status, content=body, headers=headers)

    def run(self, use: Callable[[], Awaitable[None]]) -> None:
        """Registers the machine and runs `use` with the transport."""

        async def use_it() -> None:
            client = Client(
                "http://dispatch.example", self.machine.token, transport=httpx.MockTransport(self.answer)
            )
            registered = await client.register(name="mine", repos=["acme/api"], max_jobs=4)
            assert registered.realtime is not None
            self.pace = Pace()
            self.transport = Realtime(client, self.pace, registered.realtime)
            self.heard = self.transport._news = Heard()
            try:
                await use()
            finally:
                await self.transport.aclose()
                await client.aclose()

        asyncio.run(use_it())

    async def until(self, happened: Callable[[SupabaseRealtime], Any]) -> None:
        await asyncio.to_thread(self.server.until, happened)

    async def looks(self, *, told: bool = True) -> None:
        """Waits for the next look, finds nothing, and is told to come back much later, or soon."""
        async with asyncio.timeout(PATIENCE):
            await self.transport.wait()
        self.pace.looked(found=False, poll_after=30 if told else 0.02)

    async def keeps_looking(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                await self.looks()

    async def subscribed(self) -> None:
        """Returns when the machine is told of changes and has looked since."""
        await self.looks()
        await self.heard.reach(2)  # the answer to the join, and that Postgres is listened to
        await self.looks()
        assert self.server.subscribed == 1

    def enqueued(self) -> Queued:
        return work(self.engine, self.tenant, self.machine)

    def commits(self, action: str, queued: Queued) -> int:
        return self.server.committed(action, QUEUE, org_id=queued.org_id, id=queued.queue_id)

    def changes(self, queued: Queued, assignment: str) -> int:
        with transaction(self.engine, OPERATOR) as tx:
            tx.run(sql(f"update dispatch_queue set {assignment} where id = :id"), id=queued.queue_id)
        return self.commits("UPDATE", queued)


@pytest.fixture
def scene(engine: Engine, settings: Settings, server: SupabaseRealtime) -> Scene:
    return Scene(engine, settings, server)


# -- events -------------------------------------------------------------------------------------------------------------


def test_an_insert_makes_it_look(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.looks()

    scene.run(use)


@pytest.mark.parametrize(
    "assignment",
    [
        "available_at = now() + interval '1 minute', claimed_at = null",
        "cancel_requested_at = now()",
    ],
)
def test_a_row_that_is_free_again_or_to_be_stopped_makes_it_look(scene: Scene, assignment: str) -> None:
    async def use() -> None:
        queued = scene.enqueued()
        claimed(scene.engine, scene.machine, queued)
        await scene.subscribed()
        assert scene.changes(queued, assignment) == 1
        await scene.looks()

    scene.run(use)


def test_that_it_claims_and_renews_is_no_news(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        queued, before = scene.enqueued(), scene.heard.times
        claimed(scene.engine, scene.machine, queued)
        for _ in range(3):
            assert scene.changes(queued, "claimed_at = now()") == 1
        assert scene.commits("INSERT", scene.enqueued()) == 1  # comes after them on the same connection
        await scene.heard.reach(before + 1)
        assert scene.heard.times == before + 1

    scene.run(use)


def test_events_that_are_doubled_are_one_look(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        queued, before = scene.enqueued(), scene.heard.times
        for _ in range(20):
            assert scene.commits("INSERT", queued) == 1
        await scene.heard.reach(before + 20)
        await scene.looks()
        assert not scene.heard.is_set()

    scene.run(use)


def test_an_event_that_is_late_is_a_look_at_nothing(scene: Scene) -> None:
    async def use() -> None:
        queued = scene.enqueued()
        claimed(scene.engine, scene.machine, queued)
        await scene.subscribed()
        scene.changes(queued, "claimed_at = null")
        await scene.looks()

    scene.run(use)


def test_an_event_that_is_lost_costs_until_the_next_poll(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        scene.enqueued()
        scene.pace.looked(found=False, poll_after=0.02)
        await scene.looks()

    scene.run(use)


def test_the_rows_of_others_are_not_told(scene: Scene) -> None:
    others = [a_machine(scene.engine, tenant) for tenant in (scene.tenant, a_tenant(scene.engine))]
    rows = [
        work(scene.engine, scene.tenant, others[0]),
        work(scene.engine, Tenant(others[1].org_id, _workspace(scene.engine, others[1])), others[1]),
    ]

    async def use() -> None:
        await scene.subscribed()
        assert [scene.commits("INSERT", row) for row in rows] == [0, 0]
        for channel in scene.server.channels:  # and not because of the filter, which a client can leave away
            for wanted, row in zip(channel.wanted, rows, strict=True):
                wanted["event"], wanted["filter"] = "*", f"id=eq.{row.queue_id}"
        assert [scene.commits("INSERT", row) for row in rows] == [0, 0]

    scene.run(use)


def _workspace(engine: Engine, machine: Machine) -> Any:
    with transaction(engine) as tx:
        row = tx.first(sql("select id from workspaces where org_id = :org_id"), org_id=machine.org_id)
    assert row is not None
    return row[0]


def test_it_is_told_no_payload(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads: list[Any] = []
    hear = Realtime._heard

    def keep(transport: Realtime, payload: Any) -> None:
        payloads.append(payload)
        hear(transport, payload)

    monkeypatch.setattr(Realtime, "_heard", keep)

    async def use() -> None:
        await scene.subscribed()
        queued = scene.enqueued()
        before = scene.heard.times
        scene.commits("INSERT", queued)
        await scene.heard.reach(before + 1)

    scene.run(use)
    record = payloads[0]["data"]["record"]
    assert record.keys() == {
        "org_id", "id", "orchestrator_id", "available_at", "claimed_at", "cancel_requested_at",
    }  # fmt: skip


# -- the connection -----------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_a_look_and_is_made_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        await scene.subscribed()
        tokens_last(monkeypatch, 2)  # another token would be another one
        for times in (2, 3, 4):
            scene.server.cut()
            await scene.looks()
            await scene.until(partial(_has_come_back, times))
            await scene.looks()
            assert scene.commits("INSERT", scene.enqueued()) == 1
            await scene.looks()
        assert len(set(scene.server.joins)) == 1  # a network that breaks is no reason for another token

    scene.run(use)


def _has_come_back(times: int, server: SupabaseRealtime) -> bool:
    return len(server.joins) == times and server.subscribed == 1


def test_a_message_that_nobody_can_read_ends_the_connection_and_not_the_hearing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError

    async def use() -> None:
        with monkeypatch.context() as once:
            once.setattr(Realtime, "_heard", fails)
            await scene.subscribed()
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.looks()
        await scene.until(partial(_has_come_back, 2))
        await scene.looks()
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.looks()

    scene.run(use)


def test_while_there_is_no_connection_it_polls(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        scene.server.open = False
        scene.server.cut()
        for _ in range(20):
            await scene.looks(told=False)
        scene.server.open = True
        await scene.until(lambda server: server.subscribed)
        await scene.looks()

    scene.run(use)


@pytest.mark.parametrize("way", ["refuses connections", "does not answer joins", "signs otherwise", "is off"])
def test_a_server_that_does_not_let_it_in_leaves_it_polling_and_finds_it_waiting(
    engine: Engine, settings: Settings, server: SupabaseRealtime, way: str
) -> None:
    scene = Scene(
        engine, settings, server, "another-secret-0123456789" if way == "signs otherwise" else JWT_SECRET
    )
    server.open, server.answers = way != "refuses connections", way != "does not answer joins"
    if way == "is off":
        with transaction(engine, OPERATOR) as tx:
            set_off(tx)

    async def use() -> None:
        for _ in range(20):
            await scene.looks(told=False)
        if way != "refuses connections":
            await scene.until(lambda server: len(server.joins) > 1)
        assert server.subscribed == 0
        server.open = server.answers = True
        with transaction(engine, OPERATOR) as tx:
            set_on(tx)
        if way == "signs otherwise":
            return
        await scene.until(lambda server: server.subscribed)
        await scene.looks()
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.looks()

    scene.run(use)


def test_credentials_that_make_no_sense_leave_it_polling(scene: Scene) -> None:
    async def use() -> None:
        senseless: list[dict[str, Any]] = [
            {},
            {"supabaseUrl": 7, "anonKey": None, "jwt": [], "channel": None, "table": {}},
        ]
        for credentials in senseless:
            transport = Realtime(scene.transport._client, Pace(), credentials)
            transport._pace.looked(found=False, poll_after=0.02)
            for _ in range(5):
                async with asyncio.timeout(PATIENCE):
                    await transport.wait()
            await transport.aclose()

    scene.run(use)


def test_its_end_is_the_connections_end(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()

    scene.run(use)
    scene.server.until(lambda server: not server.channels)


# -- the token ----------------------------------------------------------------------------------------------------------


def tokens_last(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    monkeypatch.setattr(functions.realtime, "LIFETIME", timedelta(hours=hours))


def test_its_token_is_changed_before_it_expires_on_the_same_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "LIFETIME_SECONDS", 0.4)

    async def use() -> None:
        tokens_last(monkeypatch, 2)
        await scene.subscribed()
        await scene.until(lambda server: server.refreshes)
        await scene.until(lambda server: server.channels[0].token != server.joins[0])
        scene.server.later(HOUR + 60)
        assert (scene.server.subscribed, len(scene.server.joins)) == (1, 1)
        before = scene.heard.times
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.heard.reach(before + 1)
        await scene.looks()

    scene.run(use)


def test_a_token_that_has_expired_is_a_look_and_another_token(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use() -> None:
        await scene.subscribed()
        tokens_last(monkeypatch, 3)
        scene.server.later(HOUR + 60)  # the machine slept, or its clock is wrong
        assert scene.server.subscribed == 0
        await scene.looks()
        await scene.until(lambda server: server.subscribed)
        assert scene.server.joins[-1] != scene.server.joins[0]
        await scene.looks()
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.looks()

    scene.run(use)


def test_while_nobody_gives_it_another_token_it_keeps_its_connection(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realtime, "LIFETIME_SECONDS", 0.1)

    async def use() -> None:
        await scene.subscribed()
        scene.down = True
        scene.pace.looked(found=False, poll_after=0.02)
        for _ in range(20):
            await scene.looks(told=False)
        assert (scene.server.subscribed, len(scene.server.joins)) == (1, 1)
        before = scene.heard.times
        assert scene.commits("INSERT", scene.enqueued()) == 1
        await scene.heard.reach(before + 1)
        tokens_last(monkeypatch, 2)
        scene.down = False
        await scene.until(lambda server: server.channels[0].token != server.joins[0])

    scene.run(use)


def test_a_machine_whose_token_was_revoked_is_told(scene: Scene) -> None:
    async def use() -> None:
        await scene.subscribed()
        with transaction(scene.engine, OPERATOR) as tx:
            orchestrators.revoke_token(tx, org_id=scene.tenant.org_id, token_id=scene.machine.token_id)
        scene.server.later(HOUR + 60)
        for _ in range(2):
            with pytest.raises(TokenRefused):
                await scene.keeps_looking()

    scene.run(use)

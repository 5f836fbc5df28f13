"""`realtime on`, and what it makes of the rights in a database of Supabase's: each machine its own rows, nobody anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from functions import claim
from functions.app import App
from functions.web import Request
from infra.admin import realtime, realtime_views
from infra.admin.__main__ import main
from infra.admin.migrate import migrate
from shared.db import OPERATOR, Tx, engine_for, sql, transaction
from shared.ids import new_id
from shared.settings import Settings
from tests.databases import Databases
from tests.given import Machine, a_machine, a_tenant, claimed, violations, work
from tests.supabase import ROLE, becomes_supabase

DENIED = "42501"


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def dispatchctl(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv("DATABASE_URL", settings.database_url.get_secret_value())
    monkeypatch.setenv("DATABASE_TLS", "off")

    def run(*words: str) -> Answer:
        capsys.readouterr()
        return Answer(main(words), *capsys.readouterr())

    return run


@pytest.fixture
def supabase(engine: Engine) -> Engine:
    """The test's database as one of Supabase's, with realtime off."""
    becomes_supabase(engine)
    return engine


@pytest.fixture
def on(supabase: Engine) -> Engine:
    """The same with realtime on."""
    with transaction(supabase, OPERATOR) as tx:
        assert realtime.set_on(tx)
    return supabase


class Scene:
    """Two machines of one organization and one of another, with a row each; the first one's is claimed."""

    def __init__(self, engine: Engine) -> None:
        tenant, other = a_tenant(engine), a_tenant(engine)
        self.mine, self.neighbour = a_machine(engine, tenant), a_machine(engine, tenant)
        self.stranger = a_machine(engine, other)
        self.row = work(engine, tenant, self.mine)
        self.rows = [
            self.row,
            work(engine, tenant, self.neighbour),
            work(engine, other, self.stranger),
        ]
        claimed(engine, self.mine, self.row)


@pytest.fixture
def scene(on: Engine) -> Scene:
    return Scene(on)


SET = sql("select set_config('role', :role, true), set_config('request.jwt.claims', :claims, true)")


def claims_of(machine: Machine) -> dict[str, str]:
    return {"role": "authenticated", "org_id": str(machine.org_id), "orchestrator_id": str(machine.id)}


@contextmanager
def as_role(engine: Engine, claims: Any, role: str = "authenticated") -> Iterator[Tx]:
    """A transaction as Supabase makes it for a request with a token of these claims."""
    with transaction(engine, OPERATOR) as tx:
        tx.all(SET, role=role, claims=claims if isinstance(claims, str) else json.dumps(claims))
        yield tx


def seen(engine: Engine, claims: Any, table: str = "dispatch_queue") -> set[UUID]:
    with as_role(engine, claims) as tx:
        return {row[0] for row in tx.all(sql(f"select id from {table}"))}


def refused(engine: Engine, claims: Any, statement: str, role: str = "authenticated") -> bool:
    """Whether the database says that this role has no right to it."""
    with pytest.raises(DBAPIError) as raised, as_role(engine, claims, role) as tx:
        tx.run(sql(statement))
    code: str = raised.value.orig.args[0]["C"]  # type: ignore[union-attr] # it is the driver's
    return code == DENIED


# -- who sees what ------------------------------------------------------------------------------------------------------


def test_a_machine_sees_its_own_rows_and_no_neighbours_nor_strangers(on: Engine, scene: Scene) -> None:
    for machine, queued in zip((scene.mine, scene.neighbour, scene.stranger), scene.rows, strict=True):
        assert seen(on, claims_of(machine)) == {queued.queue_id}
        assert seen(on, claims_of(machine), "dispatch_sessions") == {queued.session_id}


def test_both_claims_are_asked_for(on: Engine, scene: Scene) -> None:
    mine, stranger = claims_of(scene.mine), claims_of(scene.stranger)
    for table in ("dispatch_queue", "dispatch_sessions"):
        assert seen(on, {**mine, "org_id": stranger["org_id"]}, table) == set()
        assert seen(
            on, {**mine, "orchestrator_id": claims_of(scene.neighbour)["orchestrator_id"]}, table
        ) == {scene.rows[1].queue_id if table == "dispatch_queue" else scene.rows[1].session_id}


@pytest.mark.parametrize(
    "claims",
    ["", "{}", "null", "[]", '"x"', '{"org_id": null, "orchestrator_id": null}', '{"org_id": "org_2abc", "orchestrator_id": 7}',
     '{"sub": "6f6c2f61-9f7c-4a3c-8c2e-5d0c4c3a1b2d", "role": "authenticated"}'],
)  # fmt: skip
def test_a_token_that_is_no_machines_is_shown_nothing_and_breaks_nothing(
    on: Engine, scene: Scene, claims: str
) -> None:
    assert seen(on, claims) == seen(on, claims, "dispatch_sessions") == set()


def test_no_machine_sees_what_the_work_is_about(on: Engine, scene: Scene) -> None:
    hidden = {
        "dispatch_queue": ("payload", "last_error", "session_id", "*"),
        "dispatch_sessions": ("title", "summary", "linear_issue_id", "*"),
    }
    for table, columns in hidden.items():
        for column in columns:
            assert refused(on, claims_of(scene.mine), f"select {column} from {table}")


@pytest.mark.parametrize(
    "statement",
    [
        "insert into dispatch_queue select * from dispatch_queue",
        "insert into dispatch_queue (org_id, id) values (gen_random_uuid(), gen_random_uuid())",
        "update dispatch_queue set claimed_at = null",
        "update dispatch_queue set orchestrator_id = orchestrator_id where id = id",
        "delete from dispatch_queue",
        "truncate dispatch_queue",
        "select id from dispatch_queue for update",
        "insert into dispatch_sessions (org_id, id) values (gen_random_uuid(), gen_random_uuid())",
        "update dispatch_sessions set status = 'cancelled'",
        "delete from dispatch_sessions",
        "create policy mine on dispatch_queue using (true)",
        "alter table dispatch_queue disable row level security",
    ],
)
def test_a_machine_cannot_write(on: Engine, scene: Scene, statement: str) -> None:
    assert refused(on, claims_of(scene.mine), statement)


RELATIONS = sql("""
    select relname, relrowsecurity from pg_class where relnamespace = cast('public' as regnamespace) and relkind in ('r', 'v', 'p', 'm')
""")


def relations(engine: Engine) -> dict[str, bool]:
    """Tables and views by name, and whether row-level security is on."""
    with transaction(engine, OPERATOR) as tx:
        return {row[0]: row[1] for row in tx.all(RELATIONS)}


def test_the_command_knows_every_table_and_view_that_the_migrations_make(engine: Engine) -> None:
    assert relations(engine).keys() == set(realtime_views.OURS)


@pytest.mark.parametrize("role", ["anon", "authenticated"])
def test_the_projects_public_key_opens_nothing_else(on: Engine, scene: Scene, role: str) -> None:
    for name in relations(on).keys() - (set(realtime_views.SHOWN) if role == "authenticated" else set()):
        assert refused(on, claims_of(scene.mine), f"select count(*) from {name}", role)


def test_without_the_command_it_opens_everything(supabase: Engine) -> None:
    Scene(supabase)
    with as_role(supabase, {}, "anon") as tx:
        assert tx.first(sql("select count(*) from dispatch_queue")) == (3,)


# -- what is published --------------------------------------------------------------------------------------------------

PUBLICATION = sql("""
    select pubinsert, pubupdate, pubdelete, pubtruncate,
           array(select tablename from pg_publication_tables t where t.pubname = p.pubname order by 1)
      from pg_publication p where pubname = 'supabase_realtime'
""")


def published(engine: Engine) -> Any:
    with transaction(engine, OPERATOR) as tx:
        return tx.first(PUBLICATION)


def test_the_publication_holds_the_two_tables_and_what_is_written_to_them(on: Engine) -> None:
    assert published(on) == (True, True, False, False, ["dispatch_queue", "dispatch_sessions"])


def test_a_publication_that_is_not_there_is_made(supabase: Engine, dispatchctl: Run) -> None:
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("drop publication supabase_realtime"))
    assert dispatchctl("realtime", "on").code == 0
    assert published(supabase)[4] == ["dispatch_queue", "dispatch_sessions"]


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("alter publication supabase_realtime add table todos", "public.todos"),
        ("alter publication supabase_realtime add tables in schema public", "public.organizations"),
        ("create policy everybody on dispatch_queue for select using (true)", "policy everybody"),
    ],
)
def test_what_machines_would_be_shown_besides_is_refused_by_name_and_left_alone(
    supabase: Engine, dispatchctl: Run, statement: str, named: str
) -> None:
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("create table todos (id integer primary key)"))
        tx.run(sql(statement))
    before = published(supabase)
    answer = dispatchctl("realtime", "on")
    assert (answer.code, named in answer.err) == (1, True)
    assert published(supabase) == before


# -- the command --------------------------------------------------------------------------------------------------------


def test_it_is_off_until_it_is_turned_on_and_off_undoes_it(supabase: Engine, dispatchctl: Run) -> None:
    off = dispatchctl("realtime", "status")
    assert (off.code, off.out[:3]) == (1, "off")
    assert "anon has rights to orchestrator_tokens" in off.out
    on = dispatchctl("realtime", "on")
    assert (on.code, on.out) == (0, "on now\n")
    assert "SUPABASE_" in on.err
    assert dispatchctl("realtime", "status", "--json").json == {"state": "on", "amiss": []}
    assert dispatchctl("realtime", "on", "--json").json == {"state": "on", "changed": False}
    assert dispatchctl("realtime", "off").out == "off now\n"
    assert dispatchctl("realtime", "off").out == "off already\n"
    assert dispatchctl("realtime", "status") == (0, "off\n", "")
    assert published(supabase) == (True, True, True, True, [])
    assert dispatchctl("realtime", "on").out == "on now\n"


def test_turned_off_it_shows_nothing_to_anybody(on: Engine, dispatchctl: Run, scene: Scene) -> None:
    assert dispatchctl("realtime", "off").code == 0
    for role in ("anon", "authenticated"):
        for name in relations(on):
            assert refused(on, claims_of(scene.mine), f"select count(*) from {name}", role)
    with transaction(on, OPERATOR) as tx:
        assert tx.first(sql("select count(*) from pg_policy")) == (0,)
    assert not any(relations(on).values())


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("alter table dispatch_queue disable row level security", "row-level security of dispatch_queue"),
        ("drop policy a_machine_sees_its_own on dispatch_sessions", "the policy of dispatch_sessions"),
        ("grant select (payload) on dispatch_queue to authenticated", "the columns of dispatch_queue"),
        ("revoke select (id) on dispatch_queue from authenticated", "the columns of dispatch_queue"),
        ("grant insert on dispatch_queue to authenticated", "authenticated has rights to dispatch_queue"),
        ("grant update (claimed_at) on dispatch_queue to authenticated", "authenticated has rights to dispatch_queue"),
        ("grant select on workspaces to anon", "anon has rights to workspaces"),
        ("grant select (token_hash) on orchestrator_tokens to authenticated", "authenticated has rights to orchestrator_tokens"),
        ("alter publication supabase_realtime drop table dispatch_queue", "dispatch_queue in the publication"),
        ("alter publication supabase_realtime set (publish = 'insert, update, delete')", "the publication's events"),
    ],
)  # fmt: skip
def test_what_was_changed_by_hand_is_named_and_mended(
    on: Engine, dispatchctl: Run, statement: str, named: str
) -> None:
    with transaction(on, OPERATOR) as tx:
        tx.run(sql(statement))
    found = dispatchctl("realtime", "status")
    assert (found.code, found.out[:7], named in found.out) == (1, "in part", True)
    assert dispatchctl("realtime", "on").out == "on now\n"
    assert dispatchctl("realtime", "status").out == "on\n"


def test_rights_that_it_cannot_take_away_are_named(supabase: Engine, dispatchctl: Run) -> None:
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("grant select on workspaces to public"))
    answer = dispatchctl("realtime", "on")
    assert (answer.code, "anon has rights to workspaces" in answer.err) == (1, True)
    assert published(supabase)[4] == []


def test_a_role_that_would_find_nothing_any_more_is_named(supabase: Engine, dispatchctl: Run) -> None:
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql(ROLE.format("a_dashboard")))
        tx.run(sql("grant select on dispatch_queue to a_dashboard"))
    assert "a_dashboard" in dispatchctl("realtime", "on").err
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("revoke all on dispatch_queue from a_dashboard"))


def test_a_database_that_is_not_supabases_is_said_to_be_none(
    engine: Engine, dispatchctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (realtime, realtime_views):
        monkeypatch.setattr(module, "MACHINES", "nobody_has_made_this_role")
    answer = dispatchctl("realtime", "on")
    assert (answer.code, "has no roles `nobody_has_made_this_role`" in answer.err) == (1, True)
    assert dispatchctl("realtime", "off").out == "off already\n"
    assert dispatchctl("realtime", "status").code == 0


def test_it_needs_the_migrations(supabase: Engine, dispatchctl: Run) -> None:
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("alter table dispatch_queue rename to gone"))
    for word in ("on", "off", "status"):
        answer = dispatchctl("realtime", word)
        assert (answer.code, "run `migrate`" in answer.err) == (1, True)


def test_the_doctor_finds_what_is_open_and_which_half_is_missing(
    supabase: Engine, dispatchctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finds() -> list[tuple[str, str]]:
        rows = dispatchctl("doctor", "--json").json
        return [(row["state"], row["detail"]) for row in rows if row["check"] == "realtime"]

    ((state, detail),) = finds()
    assert (state, "anon has rights to orchestrator_tokens" in detail) == ("wrong", True)
    dispatchctl("realtime", "on")
    assert [state for state, _ in finds()] == ["note"]
    dispatchctl("realtime", "off")
    assert finds() == []
    for name in ("SUPABASE_URL", "SUPABASE_ANON_KEY", "SUPABASE_JWT_SECRET"):
        monkeypatch.setenv(name, "https://x.example/0123456789")
    assert [state for state, _ in finds()] == ["wrong"]
    dispatchctl("realtime", "on")
    assert [state for state, _ in finds()] == ["ok"]
    with transaction(supabase, OPERATOR) as tx:
        tx.run(sql("alter publication supabase_realtime drop table dispatch_queue"))
    assert finds() == [("wrong", "missing: dispatch_queue in the publication")]


# -- the functions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def owned(postgres: Databases, settings: Settings) -> Iterator[Settings]:
    """A database whose owner, as whom the functions work, is nothing more than that: a superuser is above every policy."""
    name = f"owner_{new_id().hex}"
    server = engine_for(settings)
    with postgres.fresh() as url:
        with transaction(server, OPERATOR) as tx:
            tx.run(sql(f"create role {name} login password 'owner'"))
            tx.run(sql(f"alter database {make_url(url).database} owner to {name}"))
        as_owner = make_url(url).set(username=name, password="owner").render_as_string(hide_password=False)
        migrate(as_owner, tls="off")
        yield settings.model_copy(update={"database_url": type(settings.database_url)(as_owner)})
        with transaction(server, OPERATOR) as tx:
            tx.run(sql(f"alter database {make_url(url).database} owner to current_user"))
    server.dispose()


def test_the_functions_work_as_before_with_realtime_on(owned: Settings, supabase: Engine) -> None:
    engine = engine_for(owned)
    with transaction(engine, OPERATOR) as tx:
        tx.run(sql("grant all on all tables in schema public to anon, authenticated"))
        assert realtime.set_on(tx)
    tenant = a_tenant(engine)
    machine = a_machine(engine, tenant)
    queued = work(engine, tenant, machine)
    app = App(owned, engine)

    def ask(method: str, path: str, **body: Any) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {machine.token}"}
        response = claim.handle(app, Request(method, path, {}, headers, json.dumps(body).encode()))
        assert response.status == 200
        return response.body or {}

    assert [each["queueId"] for each in ask("GET", "/api/dispatch/poll")["messages"]] == [
        str(queued.queue_id)
    ]
    held = ask("POST", f"/api/dispatch/{queued.queue_id}/claim")
    ask("POST", f"/api/dispatch/{queued.queue_id}/renew", attempt=held["attempt"])
    ask("POST", f"/api/sessions/{queued.session_id}/status", status="running", attempt=held["attempt"])
    ask("POST", f"/api/sessions/{queued.session_id}/complete", success=True, attempt=held["attempt"])
    assert ask("GET", f"/api/sessions/{queued.session_id}")["session"]["status"] == "complete"
    assert violations(engine) == []
    engine.dispose()


def test_a_queue_row_is_found_by_its_index_under_the_policy(on: Engine, scene: Scene) -> None:
    with transaction(on, OPERATOR) as tx:
        tx.run(sql("set local enable_seqscan = off"))
        tx.all(SET, role="authenticated", claims=json.dumps(claims_of(scene.mine)))
        plan = "\n".join(row[0] for row in tx.all(sql("explain select id from dispatch_queue")))
    assert re.search(r"Index Cond: \(+org_id = ", plan)

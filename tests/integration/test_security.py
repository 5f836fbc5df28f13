"""Who may do what, and what becomes of everything that nobody should ever send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from functions import claim
from functions.app import App
from functions.web import Request, Response
from shared import orchestrators
from shared.db import OPERATOR, sql, transaction
from shared.settings import Settings
from tests.given import Machine, Queued, Tenant, a_machine, a_tenant, claimed, work
from tests.leaks import leaks_in
from tests.linear_given import a_linear, happened
from tests.linear_samples import DELEGATED

TABLES = "organizations workspaces team_routes orchestrators repo_routes dispatch_sessions session_events dispatch_queue webhook_deliveries"
DUMP = sql(
    " union all ".join(
        f"select '{table}', md5(coalesce(string_agg(t::text, '|' order by t::text), '')) from {table} t".replace(
            "::text", "\\:\\:text"
        )
        for table in TABLES.split()
    )
)
TOKENS = sql("select id, orchestrator_id, revoked_at from orchestrator_tokens order by id")
EXPIRE = sql("update orchestrator_tokens set expires_at = now() - interval '1 second' where id = :id")

BODIES: dict[str, dict[str, Any]] = {
    "register": {"name": "taken over", "repos": ["a/b"], "maxConcurrentJobs": 2},
    "claim_many": {"limit": 1},
    "renew": {"attempt": 1},
    "release": {"error": "x", "attempt": 1},
    "status": {"status": "running", "attempt": 1},
    "complete": {"success": True, "attempt": 1},
}
ROUTES = {route.handler.__name__: route for route in claim.ROUTES}


class Scene:
    """A machine at work, a second machine of its organization, and one of another organization."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.app = engine, App(settings, engine)
        self.tenant: Tenant = a_tenant(engine)
        self.machine = a_machine(engine, self.tenant)
        self.queued: Queued = work(engine, self.tenant, self.machine)
        claimed(engine, self.machine, self.queued)
        self.neighbour = a_machine(engine, self.tenant, repos=["n/n"])
        self.stranger = a_machine(engine, a_tenant(engine))

    def ask(self, name: str, authorization: str | None, body: Any = None) -> Response:
        ids = {
            "orchestrator_id": self.machine.id,
            "queue_id": self.queued.queue_id,
            "session_id": self.queued.session_id,
        }
        path = ROUTES[name].path.format(**ids)
        content = (
            body
            if isinstance(body, bytes)
            else json.dumps(BODIES.get(name, {}) if body is None else body).encode()
        )
        headers = {} if authorization is None else {"authorization": authorization}
        return claim.handle(self.app, Request(ROUTES[name].method, path, {}, headers, content))

    def dump(self) -> list[Any]:
        """Everything that is stored, in short."""
        with transaction(self.engine, OPERATOR) as tx:
            return [*tx.all(DUMP), *tx.all(TOKENS)]

    def token(self, *, revoked: bool = False, expired: bool = False) -> str:
        with transaction(self.engine, OPERATOR) as tx:
            token_id, token = orchestrators.mint_token(tx, org_id=self.tenant.org_id)
            if revoked:
                orchestrators.revoke_token(tx, org_id=self.tenant.org_id, token_id=token_id)
            if expired:
                tx.run(EXPIRE, id=token_id)
        return token


@pytest.fixture
def scene(engine: Engine, settings: Settings) -> Scene:
    return Scene(engine, settings)


MALFORMED = [
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic eDp5",
    "Bearer \x00",
    "Bearer a b",
    "Bearer " + "x" * 5000,
    "dp_orch_x",
    "Bearer é",
]


@pytest.mark.parametrize("name", ROUTES)
def test_without_a_valid_credential_every_route_is_401_and_changes_nothing(scene: Scene, name: str) -> None:
    unknown = "Bearer dp_orch_" + "A" * 43
    credentials = [
        *MALFORMED,
        unknown,
        f"Bearer {scene.token(revoked=True)}",
        f"Bearer {scene.token(expired=True)}",
    ]
    before = scene.dump()
    for credential in credentials:
        answer = scene.ask(name, credential)
        assert answer.status == 401, credential
        assert answer.body is not None
        assert answer.body["error"]["code"] == "unauthenticated"
    assert scene.dump() == before


@pytest.mark.parametrize("name", [name for name in ROUTES if name != "register"])
def test_a_token_that_no_machine_has_registered_with_is_403(scene: Scene, name: str) -> None:
    token = scene.token()
    before = scene.dump()
    assert scene.ask(name, f"Bearer {token}").status == 403
    assert scene.dump() == before


FOREIGN = [name for name, route in ROUTES.items() if "{" in route.path]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("whose", ["neighbour", "stranger"])
def test_what_belongs_to_another_machine_or_organization_does_not_exist(
    scene: Scene, name: str, whose: str
) -> None:
    other: Machine = getattr(scene, whose)
    before = scene.dump()
    answer = scene.ask(name, f"Bearer {other.token}")
    assert (answer.status, (answer.body or {})["error"]["code"]) == (404, "not_found")
    assert scene.dump() == before


@pytest.mark.parametrize("whose", ["neighbour", "stranger"])
def test_others_neither_see_nor_claim_a_machines_work(scene: Scene, whose: str) -> None:
    work(scene.engine, scene.tenant, scene.machine)
    other: Machine = getattr(scene, whose)
    poll, several = (
        scene.ask("poll", f"Bearer {other.token}"),
        scene.ask("claim_many", f"Bearer {other.token}"),
    )
    assert (poll.body or {})["messages"] == []
    assert (several.body or {})["claims"] == []


@pytest.mark.parametrize(
    "identifier",
    [
        "nonsense",
        "0",
        "%00",
        "..",
        "01a22f85-3491-74cf-ad17-066ab19a58b2",
        "'; drop table dispatch_queue; --",
    ],
)
def test_ids_that_do_not_exist_are_404(scene: Scene, identifier: str) -> None:
    for name in FOREIGN:
        path = ROUTES[name].path.format(
            orchestrator_id=identifier, queue_id=identifier, session_id=identifier
        )
        headers = {"authorization": f"Bearer {scene.machine.token}"}
        request = Request(ROUTES[name].method, path, {}, headers, json.dumps(BODIES.get(name, {})).encode())
        assert claim.handle(scene.app, request).status == 404


def test_a_revoked_token_ends_at_once(scene: Scene) -> None:
    assert scene.ask("poll", f"Bearer {scene.machine.token}").status == 200
    with transaction(scene.engine, OPERATOR) as tx:
        orchestrators.revoke_token(tx, org_id=scene.tenant.org_id, token_id=scene.machine.token_id)
    assert scene.ask("poll", f"Bearer {scene.machine.token}").status == 401


# -- bodies -------------------------------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=40)
    | st.sampled_from(
        ["\x00", "\ud800", "x" * 20_000, "true", "1", "http://x", "javascript:alert(1)", 1e308, -1, 0, 2**63]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
WITH_BODY = list(BODIES)
FIELDS = {
    "register": ["name", "repos", "maxConcurrentJobs"],
    "claim_many": ["limit"],
    "renew": ["attempt", "promptsSeen"],
    "release": ["error", "attempt"],
    "status": ["status", "progressPercent", "message", "attempt", "queueId", "promptsSeen"],
    "complete": [
        "success",
        "prUrl",
        "summary",
        "tokensUsed",
        "costUsd",
        "errorMessage",
        "attempt",
        "queueId",
        "promptsSeen",
    ],
}


@pytest.mark.parametrize("name", WITH_BODY)
@hypothesis_settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_body_is_a_500_and_a_refused_one_names_its_field_and_changes_nothing(
    scene: Scene, name: str, data: st.DataObject
) -> None:
    body = dict(BODIES[name])
    for field in data.draw(st.lists(st.sampled_from(FIELDS[name]), min_size=1, max_size=2)):
        body[field] = data.draw(ANYTHING)
    encoded = json.dumps(body).encode("utf-8", "surrogatepass")
    before = scene.dump()
    answer = scene.ask(name, f"Bearer {scene.machine.token}", encoded)
    assert answer.status in (200, 400, 409), (body, answer.body)
    if answer.status == 400:
        assert answer.body is not None
        assert (
            answer.body["error"]["details"]["field"] in answer.body["error"]["message"]
            or "body" in answer.body["error"]["message"]
        )
        assert scene.dump() == before


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"x"',
        b"{",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
        b'{"a": "\\u0000"}',
        b'{"a": "\\ud800"}',
        b'{"a": 1e999}',
    ],
    ids=lambda body: body[:16].decode("latin-1"),
)
def test_bodies_that_are_no_json_object_are_400_and_say_where(scene: Scene, body: bytes) -> None:
    before = scene.dump()
    for name in WITH_BODY:
        answer = scene.ask(name, f"Bearer {scene.machine.token}", body)
        assert answer.status == 400, (name, answer.body)
        assert (answer.body or {})["error"]["details"]["field"]
    assert scene.dump() == before


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("register", {"name": ""}, "name"),
        ("register", {"name": "x" * 121}, "name"),
        ("register", {"repos": ["no-slash"]}, "repos[0]"),
        ("register", {"maxConcurrentJobs": 0}, "maxConcurrentJobs"),
        ("register", {"maxConcurrentJobs": 65}, "maxConcurrentJobs"),
        ("register", {"maxConcurrentJobs": True}, "maxConcurrentJobs"),
        ("register", {"maxConcurrentJobs": 1.5}, "maxConcurrentJobs"),
        ("claim_many", {"limit": 65}, "limit"),
        ("renew", {"attempt": 0}, "attempt"),
        ("renew", {"attempt": "1"}, "attempt"),
        ("release", {"error": "x" * 10_001}, "error"),
        ("status", {"status": "asleep"}, "status"),
        ("status", {"progressPercent": 101}, "progressPercent"),
        ("status", {"message": "x" * 2_001}, "message"),
        ("complete", {"success": "yes"}, "success"),
        ("complete", {"prUrl": "javascript:alert(1)"}, "prUrl"),
        ("complete", {"summary": "x" * 10_001}, "summary"),
        ("complete", {"tokensUsed": -1}, "tokensUsed"),
        ("complete", {"costUsd": -0.01}, "costUsd"),
    ],
)
def test_a_wrong_field_is_400_and_named(scene: Scene, name: str, change: dict[str, Any], field: str) -> None:
    before = scene.dump()
    answer = scene.ask(name, f"Bearer {scene.machine.token}", BODIES[name] | change)
    assert (answer.status, (answer.body or {})["error"]["details"]["field"]) == (400, field)
    assert scene.dump() == before


@pytest.mark.parametrize("limit", ["0", "65", "x", "1.5", "-1", "9" * 30, ""])
def test_a_poll_with_a_wrong_limit_is_400(scene: Scene, limit: str) -> None:
    request = Request(
        "GET", "/api/dispatch/poll", {"limit": limit}, {"authorization": f"Bearer {scene.machine.token}"}
    )
    answer = claim.handle(scene.app, request)
    assert (answer.status, (answer.body or {})["error"]["details"]["field"]) == (400, "limit")


# -- what is never said -------------------------------------------------------------------------------------------------


def test_neither_log_nor_answer_holds_a_token_a_secret_or_a_payload_when_a_statement_fails(
    engine: Engine, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database error's text holds the binds: the payload among them."""
    linear = a_linear(engine, settings)
    with engine.connect() as connection:
        connection.exec_driver_sql("""
            create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused: %', new.payload; end $$;
            create trigger refuse before insert on dispatch_queue for each row execute function refuse()
        """)
        connection.commit()
    answer = linear.send(happened(DELEGATED))
    assert answer.status == 500
    said = capsys.readouterr().out + json.dumps(answer.body)
    assert '"sqlstate": "P0001"' in said
    assert "Rounding" not in said
    assert leaks_in(said) == []


def test_a_failing_statement_of_a_machine_says_nothing_of_its_token(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        raise RuntimeError(f"secret {scene.machine.token}")

    event.listen(scene.engine, "before_cursor_execute", breaks)
    answer = scene.ask("poll", f"Bearer {scene.machine.token}")
    event.remove(scene.engine, "before_cursor_execute", breaks)
    said = capsys.readouterr().out + json.dumps(answer.body)
    assert answer.status == 500
    assert scene.machine.token not in said

"""The cron tick over its handler: who may call it, what it answers, and what it writes into the log."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from sqlalchemy import Engine

from functions import oidc, sweep
from functions.app import App
from functions.web import Request, Response
from shared.settings import Settings
from shared.sweep import sweep_once
from tests.given import (
    POLICY,
    Machine,
    Queued,
    a_machine,
    a_tenant,
    claimed,
    history_of,
    the_claim_is_older_by,
    violations,
    work,
)

COUNTS = {"released", "rerouted", "dropped", "cancelled", "purged", "depth", "oldest_claimable_age_seconds"}


def tick(app: App, credential: str | None = "the-cron-of-the-tests", method: str = "POST") -> Response:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    return sweep.handle(app, Request(method, "/", {}, headers))


def test_a_tick_answers_its_counts_and_writes_them_in_one_line(
    engine: Engine, settings: Settings, machine: Machine, queued: Queued, capsys: pytest.CaptureFixture[str]
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 3600)
    capsys.readouterr()
    answer = tick(App(settings, engine))
    assert answer.status == 200
    assert answer.body is not None
    assert answer.body.keys() >= COUNTS
    assert (answer.body["released"], answer.body["dropped"], answer.body["depth"]) == (1, 0, 1)
    [line] = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"swept"' in line]
    assert {name: line[name] for name in COUNTS} == {name: answer.body[name] for name in COUNTS}
    assert violations(engine) == []


@pytest.mark.parametrize(
    "credential", [None, "wrong", "", "the-cron-of-the-test", "the-cron-of-the-tests-and-more"]
)
def test_without_the_cron_secret_a_tick_is_401_and_does_nothing(
    engine: Engine, settings: Settings, machine: Machine, queued: Queued, credential: str | None
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 3600)
    assert tick(App(settings, engine), credential).status == 401
    assert history_of(engine, queued) == ["created", "claimed"]


def test_only_post_is_a_tick(engine: Engine, settings: Settings) -> None:
    answer = tick(App(settings, engine), method="GET")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_a_tick_without_time_begins_no_batch_and_says_so(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 3600)
    report = sweep_once(engine, policy=POLICY, retention_hours=72, batch_rows=500, budget_seconds=0)
    assert (report.released, report.finished) == (0, False)
    assert history_of(engine, queued) == ["created", "claimed"]


def test_a_machine_whose_batch_is_refused_does_not_stop_the_others(engine: Engine) -> None:
    tenant = a_tenant(engine)
    broken, sound = a_machine(engine, tenant, repos=["a/b"]), a_machine(engine, tenant, repos=["c/d"])
    rows = [work(engine, tenant, machine) for machine in (broken, sound)]
    for machine, row in zip((broken, sound), rows, strict=True):
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, 3600)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"""
            create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;
            create trigger refuse before update on dispatch_queue
              for each row when (old.id = '{rows[0].queue_id}') execute function refuse()
        """)
        connection.commit()
    report = sweep_once(engine, policy=POLICY, retention_hours=72, batch_rows=500, budget_seconds=50)
    assert (report.failed, report.released) == (1, 1)


def test_ticks_at_the_same_moment_release_each_claim_once(engine: Engine, settings: Settings) -> None:
    tenant = a_tenant(engine)
    machine = a_machine(engine, tenant)
    rows = [work(engine, tenant, machine) for _ in range(10)]
    for row in rows:
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, 3600)
    bodies: list[dict[str, Any]] = []
    app = App(settings, engine)
    threads = [threading.Thread(target=lambda: bodies.append(tick(app).body or {})) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(body["released"] for body in bodies) == 10
    assert all(history_of(engine, row).count("released") == 1 for row in rows)


def test_old_deliveries_and_tombstones_are_forgotten(engine: Engine, settings: Settings) -> None:
    tenant = a_tenant(engine)
    with engine.connect() as connection:
        for age in ("1 hour", "100 hours"):
            connection.exec_driver_sql(f"""
                insert into webhook_deliveries (org_id, workspace_id, content_key, event, outcome, received_at)
                values ('{tenant.org_id}', '{tenant.workspace_id}', '{age}', 'e', 'o', now() - interval '{age}')
            """)
            connection.exec_driver_sql(f"""
                insert into stop_tombstones (org_id, workspace_id, subject, stopped_at, received_at)
                values ('{tenant.org_id}', '{tenant.workspace_id}', '{age}', now(), now() - interval '{age}')
            """)
        connection.commit()
    body = tick(App(settings, engine)).body
    assert body is not None
    assert body["purged"] == 2


# -- the platform's identity token --------------------------------------------------------------------------------------

AUDIENCE, SCHEDULER = "https://sweep.example.test", "scheduler@example.iam.gserviceaccount.com"
KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _number(value: int) -> str:
    return base64.urlsafe_b64encode(value.to_bytes((value.bit_length() + 7) // 8)).rstrip(b"=").decode()


@pytest.fixture
def signed_ticks(engine: Engine, settings: Settings) -> Iterator[App]:
    """A deployment whose scheduler signs, with its published keys on this machine."""
    numbers = KEY.public_key().public_numbers()
    keys = {
        "keys": [
            {
                "kty": "RSA",
                "kid": "one",
                "use": "sig",
                "alg": "RS256",
                "n": _number(numbers.n),
                "e": _number(numbers.e),
            }
        ]
    }

    class Published(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(keys).encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    oidc._keys.cache_clear()
    with HTTPServer(("127.0.0.1", 0), Published) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        changed = settings.model_copy(
            update={
                "scheduler_oidc_audience": AUDIENCE,
                "scheduler_oidc_email": SCHEDULER,
                "scheduler_oidc_jwks_url": f"http://127.0.0.1:{server.server_port}/",
            }
        )
        yield App(changed, engine)
        server.shutdown()
        thread.join()


def token(key: Any = KEY, algorithm: str = "RS256", **changes: Any) -> str:
    claims = {
        "iss": "https://accounts.google.com",
        "aud": AUDIENCE,
        "email": SCHEDULER,
        "email_verified": True,
        "iat": int(time.time()) - 10,
        "exp": int(time.time()) + 600,
    } | changes
    return jwt.encode(
        {name: value for name, value in claims.items() if value is not None},
        key,
        algorithm,
        headers={"kid": "one"},
    )


def test_a_token_that_the_platform_signed_for_our_scheduler_is_a_tick(signed_ticks: App) -> None:
    assert tick(signed_ticks, token()).status == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1_700_000_000},
        {"exp": None},
        {"aud": "https://elsewhere.example.test"},
        {"aud": None},
        {"iss": "https://evil.example.test"},
        {"email": "somebody@example.test"},
        {"email": None},
        {"email_verified": False},
        {"email_verified": "true"},
    ],
    ids=str,
)
def test_a_token_with_one_wrong_claim_is_401(signed_ticks: App, changes: dict[str, Any]) -> None:
    assert tick(signed_ticks, token(**changes)).status == 401


def test_a_token_that_somebody_else_signed_is_401(signed_ticks: App) -> None:
    assert tick(signed_ticks, token(STRANGER)).status == 401
    assert tick(signed_ticks, token("x" * 32, "HS256")).status == 401
    assert tick(signed_ticks, token(None, "none")).status == 401
    assert tick(signed_ticks, "eyJ.not.a-token").status == 401

"""The entry points under the real functions-framework: what arrives at the handlers, and what stops a start."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask
import pytest
from flask.testing import FlaskClient
from functions_framework import create_app

from functions import claim
from functions.app import App, app
from functions.web import Request, Response
from shared.settings import OWN_PREFIXES

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(ROOT / "functions" / "gcp.py")
# Nothing listens on port 9 of this machine.
ENVIRONMENT = {"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:9/d", "DATABASE_TLS": "off"}


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """What reached the handler of `claim`."""
    requests: list[Request] = []

    def handle(one: App, request: Request) -> Response:
        requests.append(request)
        return Response(200, {"ok": True}, {"x-answer": "yes"})

    for name in [name for name in os.environ if name.startswith(OWN_PREFIXES)]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # The framework writes these; the fixture puts them back.
    for name in ("FUNCTION_TARGET", "FUNCTION_SIGNATURE_TYPE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(claim, "handle", handle)
    app.cache_clear()
    yield requests
    app.cache_clear()


@pytest.fixture
def client(received: list[Request]) -> FlaskClient:
    served = create_app("claim", SOURCE)
    assert isinstance(served, flask.Flask)
    return served.test_client()


def test_the_bytes_arrive_as_they_were_sent(client: FlaskClient, received: list[Request]) -> None:
    body = b'{"a":  "\xf0\x9f\x94\x91"}\n'
    answer = client.post(
        "/api/x/?limit=3&limit=4",
        data=body,
        headers={"Linear-Signature": "AbC", "Content-Type": "application/json"},
    )
    (request,) = received
    assert (request.method, request.path, request.query["limit"], request.body) == (
        "POST",
        "/api/x/",
        "3",
        body,
    )
    assert request.headers["linear-signature"] == "AbC"
    assert (answer.status_code, answer.json, answer.headers["X-Answer"]) == (200, {"ok": True}, "yes")
    assert answer.headers["Content-Type"] == "application/json"


def test_a_form_is_bytes_too(client: FlaskClient, received: list[Request]) -> None:
    client.post("/", data="a=1", content_type="application/x-www-form-urlencoded")
    assert received[0].body == b"a=1"


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_other_methods_reach_the_handler(method: str, client: FlaskClient, received: list[Request]) -> None:
    answer = client.open("/", method=method)
    assert received[0].method == method
    assert (answer.data == b"") == (method == "HEAD")


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_beyond_every_limit_is_not_taken(
    announced: bool, client: FlaskClient, received: list[Request]
) -> None:
    body = b" " * (5 * 1024 * 1024 + 64 * 1024 + 1)
    if announced:
        answer = client.post("/", data=body)
    else:
        chunked: dict[str, Any] = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
        answer = client.post("/", input_stream=io.BytesIO(body), environ_overrides=chunked)
    assert answer.status_code == 413
    assert answer.json is not None
    assert answer.json["error"]["code"] == "invalid_request"
    assert not received


def test_half_a_body_is_not_taken_for_one(client: FlaskClient, received: list[Request]) -> None:
    answer = client.post(
        "/",
        input_stream=io.BytesIO(b"{}"),
        environ_overrides={"CONTENT_LENGTH": "20", "wsgi.input_terminated": True},
    )
    assert (answer.status_code, received) == (400, [])


def test_a_chunked_body_is_read(client: FlaskClient, received: list[Request]) -> None:
    chunked: dict[str, Any] = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
    client.post("/", input_stream=io.BytesIO(b"{}"), environ_overrides=chunked)
    assert received[0].body == b"{}"


KEY = base64.b64encode(b"k" * 32).decode()


def start(target: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Starts one function in a process of its own, away from the repository's folder, as a cloud does."""
    code = "import sys, functions_framework as f; f.create_app(*sys.argv[1:]); print(*sorted(sys.modules))"
    return subprocess.run(
        [sys.executable, "-c", code, target, SOURCE],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("target", "environment", "named"),
    [
        ("claim", {}, "DATABASE_URL is missing"),
        ("claim", {**ENVIRONMENT, "DISPATCH_X": "1"}, "DISPATCH_X is not a setting"),
        ("webhook", ENVIRONMENT, "BRIDGE_ENCRYPTION_KEY is missing"),
        ("sweep", ENVIRONMENT, "CRON_SECRET or SCHEDULER_OIDC_AUDIENCE is missing"),
    ],
)
def test_a_wrong_configuration_stops_the_start_by_name(
    target: str, environment: dict[str, str], named: str
) -> None:
    started = start(target, **environment)
    assert started.returncode != 0
    event = json.loads(started.stdout)
    assert (event["severity"], event["target"], event["configuration"]) == ("CRITICAL", target, named)
    assert "hunter2" not in started.stdout + started.stderr


@pytest.mark.parametrize(
    ("target", "more", "foreign"),
    [
        (
            "webhook",
            {"BRIDGE_ENCRYPTION_KEY": KEY},
            {"functions.claim", "functions.sweep", "jwt", "alembic", "google.auth"},
        ),
        (
            "claim",
            {},
            {
                "functions.webhook",
                "functions.sweep",
                "shared.linear",
                "cryptography",
                "jwt",
                "alembic",
                "google.auth",
            },
        ),
        (
            "sweep",
            {"CRON_SECRET": "0123456789abcdef"},
            {"functions.webhook", "functions.claim", "cryptography", "jwt", "alembic"},
        ),
    ],
)
def test_a_cold_start_imports_what_its_function_needs(
    target: str, more: dict[str, str], foreign: set[str]
) -> None:
    started = start(target, **ENVIRONMENT, **more)
    assert started.returncode == 0, started.stderr
    modules = set(started.stdout.split())
    assert f"functions.{target}" in modules
    assert modules & foreign == set()

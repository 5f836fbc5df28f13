"""Requests as Linear, machines and the scheduler send them, and the two ways to send one: over HTTP, or straight into a handler.

A call is made once and sent as often as its sender would: a retry has the same bytes.
"""

from __future__ import annotations

import hmac
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import httpx

from functions import claim, sweep, webhook
from functions.app import App
from functions.web import Request, Response
from infra.local.linear import delegated
from tests.given import Machine

CRON_SECRET = "the-cron-of-the-tests"
HANDLERS: dict[str, Callable[[App, Request], Response]] = {
    "/linear": webhook.handle,
    "/api": claim.handle,
    "/sweep": sweep.handle,
}


@dataclass(frozen=True)
class Call:
    """A request to one of the functions, which is named by its `mount` on the local server."""

    mount: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def asks_to_come_again(self) -> bool:
        """503 with Retry-After: nobody has to guess what to do next."""
        return self.status == 503 and int(self.headers["retry-after"]) >= 1


Ask = Callable[[Call], Answer]


def in_process(app: App) -> Ask:
    """Hands calls to the handlers themselves."""

    def ask(call: Call) -> Answer:
        path, _, query = call.path.partition("?")
        parameters = dict(pair.split("=") for pair in query.split("&") if pair)
        response = HANDLERS[call.mount](app, Request(call.method, path, parameters, call.headers, call.body))
        return Answer(response.status, response.body or {}, response.headers)

    return ask


def over_http(url: str, *, patience: float = 20) -> Ask:
    """Sends calls to a server, each on a connection of its own. Raises httpx.TransportError when nobody answers."""

    def ask(call: Call) -> Answer:
        path = call.path if call.mount == "/api" else call.mount
        # An empty context: nothing here is encrypted, and reading the system's certificates would take longer than the request.
        with httpx.Client(
            timeout=patience, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ) as http:
            got = http.request(call.method, url + path, headers=dict(call.headers), content=call.body)
        return Answer(got.status_code, got.json(), got.headers)

    return ask


def delivery(secret: str, linear_organization_id: str, title: str = "Fix the rounding") -> Call:
    """Linear's signed webhook: somebody delegates a new issue to the agent."""
    event = {**delegated(title, 1), "organizationId": linear_organization_id}
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    headers = {
        "content-type": "application/json; charset=utf-8",
        "linear-delivery": str(uuid4()),
        "linear-signature": hmac.digest(secret.encode(), body, "sha256").hex(),
    }
    return Call("/linear", "POST", "/", headers, body)


def tick() -> Call:
    """The scheduler's."""
    return Call("/sweep", "POST", "/", {"authorization": f"Bearer {CRON_SECRET}"})


def by(machine: Machine | str, method: str, path: str, **body: Any) -> Call:
    """A machine's request; `machine` may be its token alone."""
    token = machine if isinstance(machine, str) else machine.token
    content = json.dumps(body).encode() if body else b""
    return Call(
        "/api",
        method,
        path,
        {"authorization": f"Bearer {token}", "content-type": "application/json"},
        content,
    )


def polling(machine: Machine | str, limit: int = 64) -> Call:
    return by(machine, "GET", f"/api/dispatch/poll?limit={limit}")


def claiming(machine: Machine | str, queue_id: UUID | str) -> Call:
    return by(machine, "POST", f"/api/dispatch/{queue_id}/claim")


def claiming_many(machine: Machine | str, limit: int) -> Call:
    return by(machine, "POST", "/api/dispatch/claim", limit=limit)


def renewing(machine: Machine | str, queue_id: UUID | str, attempt: int) -> Call:
    return by(machine, "POST", f"/api/dispatch/{queue_id}/renew", attempt=attempt)


def releasing(machine: Machine | str, queue_id: UUID | str, attempt: int) -> Call:
    return by(machine, "POST", f"/api/dispatch/{queue_id}/release", attempt=attempt, error="exit status 1")


def reporting(machine: Machine | str, session_id: UUID | str, attempt: int) -> Call:
    return by(machine, "POST", f"/api/sessions/{session_id}/status", attempt=attempt, status="running")


def completing(machine: Machine | str, session_id: UUID | str, attempt: int) -> Call:
    return by(machine, "POST", f"/api/sessions/{session_id}/complete", attempt=attempt, success=True)

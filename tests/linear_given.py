"""A connected Linear workspace whose events go through the webhook's own handler."""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine

from functions import claim, webhook
from functions.app import App
from functions.web import Request, Response
from infra.local.seed import REPO, TEAM, TEAM_ROUTE
from shared.crypto import KeyRing
from shared.db import OPERATOR, Statement, sql, transaction
from shared.settings import Settings
from tests.given import Machine, Tenant, a_machine, a_tenant
from tests.linear_samples import US, sample

SECRET = "lin_wh_of_the_webhook_tests"
OTHER_TEAM = "60fc6939-52fe-407a-b320-1ea0c0b4e53a"
ORGANIZATION = "9d62b5b1-b138-49e2-882f-8c502d869d12"
APP_USER = sql("update workspaces set app_user_id = :us where org_id = :org_id")


@dataclass(frozen=True)
class Linear:
    """A workspace, its team with a default repository, and a machine that serves it."""

    app: App
    engine: Engine
    tenant: Tenant
    machine: Machine

    def send(
        self,
        event: dict[str, Any],
        *,
        delivery: str | None = "",
        secret: str = SECRET,
        signature: str | None = None,
    ) -> Response:
        """One delivery of these bytes; a new delivery id unless one (or None) is given."""
        body = json.dumps(event, ensure_ascii=False).encode()
        headers = {"linear-signature": signature or hmac.digest(secret.encode(), body, "sha256").hex()}
        if delivery is not None:
            headers["linear-delivery"] = delivery or str(uuid4())
        return webhook.handle(self.app, Request("POST", "/", {}, headers, body))

    def hears(self, event: dict[str, Any], **options: Any) -> str:
        """The outcome of a delivery that is answered with 200."""
        answer = self.send(event, **options)
        assert answer.status == 200, answer.body
        assert answer.body is not None
        outcome: str = answer.body["outcome"]
        return outcome

    def machine_asks(
        self, method: str, path: str, body: dict[str, Any] | None = None, by: Machine | None = None
    ) -> Response:
        """A request of the machine (or of another)."""
        headers = {"authorization": f"Bearer {(by or self.machine).token}"}
        content = b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        parameters = dict(pair.split("=") for pair in query.split("&") if pair)
        return claim.handle(self.app, Request(method, path, parameters, headers, content))

    def claimed(self, by: Machine | None = None) -> dict[str, Any]:
        """The one piece of work that waits, claimed."""
        answer = self.machine_asks("POST", "/api/dispatch/claim", {"limit": 64}, by)
        assert answer.body is not None
        [claim] = answer.body["claims"]
        found: dict[str, Any] = claim
        return found

    def completes(self, claim: dict[str, Any], *, success: bool = True) -> None:
        """The machine's end of it."""
        path = f"/api/sessions/{claim['message']['sessionId']}/complete"
        assert (
            self.machine_asks("POST", path, {"success": success, "attempt": claim["attempt"]}).status == 200
        )

    def all(self, statement: str, **binds: Any) -> list[Any]:
        """Rows, for what a test wants to see."""
        with transaction(self.engine, OPERATOR) as tx:
            return list(tx.all(sql(statement), org_id=self.tenant.org_id, **binds))

    def run(self, statement: Statement, **binds: Any) -> None:
        """A change that a test starts from."""
        with transaction(self.engine, OPERATOR) as tx:
            tx.run(statement, org_id=self.tenant.org_id, workspace_id=self.tenant.workspace_id, **binds)

    def sessions(self) -> list[tuple[str, str | None]]:
        """Status and error code of each session, oldest first."""
        rows = self.all("select status, error_code from dispatch_sessions where org_id = :org_id order by id")
        return [(row[0], row[1]) for row in rows]

    def rows(self) -> int:
        """How many queue rows there are."""
        count: int = self.all("select count(*) from dispatch_queue where org_id = :org_id")[0][0]
        return count


def a_linear(engine: Engine, settings: Settings, *, machines: bool = True) -> Linear:
    """A workspace as the operator connects it."""
    sealed = KeyRing.of(settings).seal(SECRET)
    tenant = a_tenant(engine, linear_organization_id=ORGANIZATION, webhook_secret=sealed)
    with transaction(engine, OPERATOR) as tx:
        tx.run(APP_USER, us=US, org_id=tenant.org_id)
        tx.run(TEAM_ROUTE, org_id=tenant.org_id, workspace_id=tenant.workspace_id, team=TEAM, repo=REPO)
    machine = a_machine(engine, tenant, repos=[REPO] if machines else ["nobody/else"])
    return Linear(App(settings, engine), engine, tenant, machine)


def happened(name: str, seconds_ago: float = 0, **changes: Any) -> dict[str, Any]:
    """A sample event as if it had happened that long ago in Linear and were sent now."""
    event, now = sample(name, **changes), datetime.now(UTC)
    event["webhookTimestamp"] = int(now.timestamp() * 1000)
    event["createdAt"] = (
        (now - timedelta(seconds=seconds_ago)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
    return event


def session_id_of(answer: Response) -> UUID:
    """The session that a delivery concerned."""
    assert answer.body is not None
    return UUID(answer.body["sessionId"])

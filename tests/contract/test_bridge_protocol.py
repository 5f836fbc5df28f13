"""The published bridge protocol, played as its original client plays it, over real HTTP through the real framework.

What an answer must look like is written down here from the protocol, not taken from our code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from shared import dispatch_queue, orchestrators
from shared.db import OPERATOR, transaction
from shared.ids import new_id
from tests.contract.conftest import CRON_SECRET
from tests.given import Machine as Registered
from tests.given import Queued, Tenant, a_session, a_tenant

ISO_Z = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
REQUIRED = (
    "messageId sessionId queueId orgId workspaceId linearIssueId linearIdentifier title teamId repo "
    "targetOrchestratorId dispatchedAt"
)
CODES = {
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "rate_limited": 429,
    "internal": 500,
    "service_unavailable": 503,
}


def check_message(message: dict[str, Any]) -> None:
    """As the original client's schema does."""
    for name in REQUIRED.split():
        assert isinstance(message[name], str), name
        assert message[name] != "", name
    assert ISO_Z.fullmatch(message["dispatchedAt"])
    for name in ("messageId", "sessionId", "queueId"):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", message[name]), "ids go into paths unencoded"
    assert message.get("priority", 0) in range(5)
    assert all(isinstance(label, str) for label in message.get("labels", []))


def no_nulls(value: Any, path: str = "") -> None:
    """Absent, never null; the exception is named in the protocol."""
    if isinstance(value, dict):
        for name, member in value.items():
            if (path, name) != ("", "realtime"):
                no_nulls(member, f"{path}.{name}")
    elif isinstance(value, list):
        for member in value:
            no_nulls(member, path)
    else:
        assert value is not None, path


class Client:
    """The original client: JSON as content type on everything, a body or not, and never an attempt."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=20,
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        answer = self._http.request(method, path, content=b"" if body is None else json.dumps(body).encode())
        if 200 <= answer.status_code < 300:
            no_nulls(answer.json())
        else:
            error = answer.json()["error"]
            assert error.keys() <= {"code", "message", "details"}
            assert error["message"]
            assert CODES.get(error["code"], 400) == answer.status_code or answer.status_code in (405, 413)
        return answer

    def close(self) -> None:
        self._http.close()


class Bridge(Client):
    """A registered client and its tenant."""

    def __init__(self, url: str, engine: Engine, tenant: Tenant, **registration: Any) -> None:
        with transaction(engine, OPERATOR) as tx:
            self.token_id, token = orchestrators.mint_token(tx, org_id=tenant.org_id)
        super().__init__(url, token)
        self.engine, self.tenant, self.token = engine, tenant, token
        body = {"name": f"laptop {self.token_id}", "repos": ["acme/api"], **registration}
        self.registered = self.ask("POST", "/api/orchestrators/register", body).json()
        self.id = self.registered["orchestratorId"]

    def work(self, **changes: Any) -> Queued:
        """A session and its row, with a complete message."""
        machine = Registered(self.tenant.org_id, UUID(self.id), self.token, self.token_id)
        message = {
            "workspaceId": str(self.tenant.workspace_id),
            "linearIssueId": str(new_id()),
            "linearIdentifier": "PAY-1",
            "title": "Split refunds",
            "teamId": "team",
            "repo": "acme/api",
            "priority": 2,
            "labels": ["Bug"],
            **changes,
        }
        with transaction(self.engine, OPERATOR) as tx:
            session_id = a_session(tx, self.tenant, machine)
            queue_id = dispatch_queue.enqueue_dispatch(
                tx,
                org_id=self.tenant.org_id,
                orchestrator_id=machine.id,
                session_id=session_id,
                message=message,
            )
        return Queued(self.tenant.org_id, session_id, queue_id)

    def poll(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/api/dispatch/poll").json()
        return found


@pytest.fixture
def bridge(url: str, engine: Engine) -> Iterator[Bridge]:
    made = Bridge(url, engine, a_tenant(engine))
    yield made
    made.close()


def test_registering_answers_who_one_is_and_that_there_is_no_realtime(bridge: Bridge) -> None:
    assert bridge.registered.keys() == {"orchestratorId", "orgId", "realtime"}
    assert bridge.registered["realtime"] is None


def test_registering_again_is_the_same_machine_and_another_name_renames_it(bridge: Bridge) -> None:
    again = bridge.ask(
        "POST", "/api/orchestrators/register", {"name": "renamed", "repos": [], "maxConcurrentJobs": 64}
    )
    assert again.json()["orchestratorId"] == bridge.id


def test_a_name_that_another_machine_has_is_a_conflict_and_takes_nothing_over(
    bridge: Bridge, url: str, engine: Engine
) -> None:
    other = Bridge(url, engine, bridge.tenant, name="desktop")
    answer = bridge.ask("POST", "/api/orchestrators/register", {"name": "desktop", "repos": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    other.close()


def test_heartbeats_come_with_and_without_a_body(bridge: Bridge) -> None:
    for body in (None, {}, {"activeJobs": 3}):
        assert bridge.ask("POST", f"/api/orchestrators/{bridge.id}/heartbeat", body).status_code == 200


def test_the_realtime_token_is_503_where_realtime_is_not_configured(bridge: Bridge) -> None:
    answer = bridge.ask("POST", "/api/orchestrators/token")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


def test_the_clients_whole_day_polled_claimed_reported_completed(bridge: Bridge) -> None:
    queued = bridge.work()
    [message] = bridge.poll()["messages"]
    check_message(message)
    assert message["queueId"] == str(queued.queue_id)
    claim = bridge.ask("POST", f"/api/dispatch/{message['queueId']}/claim")
    assert claim.status_code == 200
    check_message(claim.json()["message"])
    assert bridge.poll()["messages"] == []
    report = {"status": "running", "progressPercent": 40, "message": "reading"}
    assert bridge.ask("POST", f"/api/sessions/{message['sessionId']}/status", report).status_code == 200
    done = {
        "success": True,
        "prUrl": "https://github.com/a/b/pull/1",
        "summary": "done",
        "tokensUsed": 12,
        "costUsd": 0.25,
    }
    for _ in range(2):
        answer = bridge.ask("POST", f"/api/sessions/{message['sessionId']}/complete", done)
        assert (answer.status_code, answer.json()["status"]) == (200, "completed")
        assert isinstance(answer.json()["linearSynced"], bool)
    seen = bridge.ask("GET", f"/api/sessions/{message['sessionId']}").json()
    assert (seen["session"]["status"], seen["session"]["costUsd"], seen["session"]["tokensUsed"]) == (
        "complete",
        0.25,
        12,
    )
    assert [event["type"] for event in seen["events"]] == ["created", "claimed", "progress", "complete"]
    assert all(ISO_Z.fullmatch(event["createdAt"]) for event in seen["events"])


def test_a_lost_race_is_409(bridge: Bridge) -> None:
    queued = bridge.work()
    claim = f"/api/dispatch/{queued.queue_id}/claim"
    assert [bridge.ask("POST", claim).status_code for _ in range(2)] == [200, 409]


def test_a_throwing_handler_reports_error_then_releases_and_the_work_waits_again(bridge: Bridge) -> None:
    queued = bridge.work()
    bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/claim")
    error = {"status": "error", "progressPercent": 0, "message": "it threw"}
    assert bridge.ask("POST", f"/api/sessions/{queued.session_id}/status", error).status_code == 200
    assert (
        bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/release", {"error": "it threw"}).status_code
        == 200
    )
    seen = bridge.ask("GET", f"/api/sessions/{queued.session_id}").json()
    assert seen["session"]["status"] == "pending"
    assert [event["type"] for event in seen["events"]] == ["created", "claimed", "error", "released"]


def test_the_release_after_a_reported_failure_is_answered_without_harm(bridge: Bridge) -> None:
    queued = bridge.work()
    bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/claim")
    failed = {"success": False, "errorMessage": "tests fail"}
    assert bridge.ask("POST", f"/api/sessions/{queued.session_id}/complete", failed).status_code == 200
    assert (
        bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/release", {"error": "tests fail"}).status_code
        == 200
    )
    seen = bridge.ask("GET", f"/api/sessions/{queued.session_id}").json()["session"]
    assert (seen["status"], seen["errorMessage"]) == ("error", "tests fail")


def test_reports_after_the_end_are_200_and_change_nothing(bridge: Bridge) -> None:
    queued = bridge.work()
    bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/claim")
    bridge.ask("POST", f"/api/sessions/{queued.session_id}/complete", {"success": True})
    before = bridge.ask("GET", f"/api/sessions/{queued.session_id}").json()
    for path, body in (
        (f"/api/sessions/{queued.session_id}/status", {"status": "running", "progressPercent": 1}),
        (f"/api/sessions/{queued.session_id}/complete", {"success": False, "errorMessage": "late"}),
    ):
        assert bridge.ask("POST", path, body).status_code == 200
    assert bridge.ask("GET", f"/api/sessions/{queued.session_id}").json() == before


# -- ours ---------------------------------------------------------------------------------------------------------------


def test_several_are_claimed_at_once_with_attempt_and_lease(bridge: Bridge) -> None:
    for _ in range(3):
        bridge.work()
    claims = bridge.ask("POST", "/api/dispatch/claim", {"limit": 2}).json()["claims"]
    assert [(claim["attempt"], claim["leaseSeconds"]) for claim in claims] == [(1, 600), (1, 600)]
    for claim in claims:
        check_message(claim["message"])


def test_no_more_are_claimed_than_the_machine_has_places_for(url: str, engine: Engine) -> None:
    bridge = Bridge(url, engine, a_tenant(engine), maxConcurrentJobs=1)
    first, second = bridge.work(), bridge.work()
    assert len(bridge.ask("POST", "/api/dispatch/claim", {"limit": 64}).json()["claims"]) == 1
    refused = bridge.ask("POST", f"/api/dispatch/{second.queue_id}/claim")
    assert (refused.status_code, first.queue_id == second.queue_id) == (409, False)
    bridge.close()


def test_a_stale_attempt_is_409_everywhere(bridge: Bridge) -> None:
    queued = bridge.work()
    bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/claim")
    for path in (
        f"dispatch/{queued.queue_id}/renew",
        f"dispatch/{queued.queue_id}/release",
        f"sessions/{queued.session_id}/complete",
    ):
        body = {"attempt": 2, "success": True, "error": "x"}
        assert bridge.ask("POST", f"/api/{path}", body).status_code == 409
    assert (
        bridge.ask("POST", f"/api/dispatch/{queued.queue_id}/renew", {"attempt": 1}).json()["leaseSeconds"]
        == 600
    )


def test_the_hint_when_to_poll_again_grows_while_nothing_waits_and_is_short_after_work(
    bridge: Bridge,
) -> None:
    hints = [bridge.poll()["pollAfterMs"] for _ in range(4)]
    assert hints == sorted(hints)
    assert hints[0] < hints[-1] <= 30_000
    bridge.work()
    assert bridge.poll()["pollAfterMs"] == hints[0]


def test_a_tick_over_http_answers_its_counts(url: str) -> None:
    answer = httpx.post(f"{url}/sweep", headers={"Authorization": f"Bearer {CRON_SECRET}"}, timeout=60)
    assert answer.status_code == 200
    assert answer.json().keys() >= {
        "released",
        "rerouted",
        "dropped",
        "cancelled",
        "purged",
        "depth",
        "oldest_claimable_age_seconds",
    }
    assert httpx.post(f"{url}/sweep", timeout=60).status_code == 401

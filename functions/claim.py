"""The orchestrator API: register, heartbeat, poll, claim, renew, release, status, complete.

Each route is one transaction, and its boundary stands here. What a machine may not see does not exist for it (404).
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NoReturn
from uuid import UUID

from functions import session_reports
from functions.app import App
from functions.session_view import news
from functions.web import Request, Response, Route, bearer_token, body_of, dispatch, integer_parameter
from shared import dispatch_queue, orchestrators, session_history
from shared.db import CLAIM, Tx, transaction
from shared.errors import ClaimLost, DispatchError, MachineFull, NotFound
from shared.ids import parse_id
from shared.messages import (
    ClaimManyRequest,
    HeartbeatRequest,
    RegisterRequest,
    ReleaseRequest,
    RenewRequest,
    dispatch_message,
)

POLL_LIMIT = 64
LONGEST_WAIT_SECONDS = 60


def handle(app: App, request: Request) -> Response:
    """Answers one request of a machine."""
    return dispatch(ROUTES, app, request)


# -- the machine itself -------------------------------------------------------------------------------------------------


def register(app: App, request: Request) -> Response:
    """`POST /api/orchestrators/register`"""
    body = body_of(RegisterRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        orchestrator_id = orchestrators.register(
            tx, machine, name=body.name, repos=body.repos, concurrency_limit=body.maxConcurrentJobs
        )
    realtime = app.realtime_credentials(machine.org_id, orchestrator_id)
    return Response(
        200, {"orchestratorId": str(orchestrator_id), "orgId": str(machine.org_id), "realtime": realtime}
    )


def heartbeat(app: App, request: Request, orchestrator_id: str) -> Response:
    """`POST /api/orchestrators/:id/heartbeat`"""
    body = body_of(HeartbeatRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        if parse_id(orchestrator_id, "orchestrator") != me:
            raise NotFound(f"no orchestrator {orchestrator_id}")
        orchestrators.heartbeat(tx, org_id=machine.org_id, orchestrator_id=me, active_jobs=body.activeJobs)
    return Response(200, {"status": "ok"})


def realtime_token(app: App, request: Request) -> Response:
    """`POST /api/orchestrators/token`"""
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
    credentials = app.realtime_credentials(machine.org_id, me)
    if credentials is None:
        return Response.error(503, "service_unavailable", "realtime is not configured here: poll instead")
    return Response(200, {"jwt": credentials["jwt"], "expiresAt": credentials["expiresAt"]})


# -- the row ------------------------------------------------------------------------------------------------------------


def poll(app: App, request: Request) -> Response:
    """`GET /api/dispatch/poll`. A first-class route: with every notification lost, this alone delivers the work."""
    limit = integer_parameter(request, "limit", default=16, minimum=1, maximum=POLL_LIMIT)
    seconds = integer_parameter(request, "waitSeconds", default=0, minimum=0, maximum=LONGEST_WAIT_SECONDS)
    until, waited = monotonic() + seconds, False
    polled = _look(app, request, limit)
    if seconds and not _found(polled):
        polled, waited = _wait(app, request, limit, polled, until)
    machine, me = polled.machine, polled.machine.registered()
    answer = {
        "messages": [_message(machine.org_id, me, work) for work in polled.work],
        "pollAfterMs": 0
        if waited
        else app.pacing.after_poll(me, found=bool(polled.work), next_due_ms=polled.next_due_ms),
    }
    if polled.stop_requests:
        answer["cancelled"] = [str(queue_id) for queue_id in polled.stop_requests]
    return Response(200, answer)


def _look(app: App, request: Request, limit: int) -> dispatch_queue.Polled:
    with transaction(app.engine, CLAIM) as tx:
        return dispatch_queue.poll(tx, token=bearer_token(request), limit=limit)


def _found(polled: dispatch_queue.Polled) -> bool:
    return bool(polled.work or polled.stop_requests)


def _wait(
    app: App, request: Request, limit: int, polled: dispatch_queue.Polled, until: float
) -> tuple[dispatch_queue.Polled, bool]:
    """Looks again whenever there may be something, with no transaction and no connection of the pool in between.

    Listening comes before the look that decides to wait: a commit is either seen by that look, or heard after it.

    Returns what was seen last, and whether the whole time was waited for.
    """
    with app.listening.place_for(polled.machine.registered()) as place:
        while place is not None:
            polled = _look(app, request, limit)
            left = until - monotonic()
            if _found(polled) or left <= 0:
                return polled, not _found(polled)
            due = left if polled.next_due_ms is None else (polled.next_due_ms + 1) / 1000
            if not place.wait(min(left, due)):
                break
    return polled, False


def _message(org_id: UUID, orchestrator_id: UUID, work: dispatch_queue.Work) -> dict[str, Any]:
    return dispatch_message(
        work.payload,
        org_id=org_id,
        orchestrator_id=orchestrator_id,
        queue_id=work.queue_id,
        session_id=work.session_id,
        created_at=work.created_at,
    )


def claim(app: App, request: Request, queue_id: str) -> Response:
    """`POST /api/dispatch/:queueId/claim`"""
    row_id = parse_id(queue_id)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        room = orchestrators.lock_machine(tx, org_id=machine.org_id, orchestrator_id=me)
        work = dispatch_queue.claim(
            tx, org_id=machine.org_id, orchestrator_id=me, queue_id=row_id, concurrency_limit=room
        )
        if work is None:
            row = dispatch_queue.standing(tx, org_id=machine.org_id, queue_id=row_id)
            if row is not None and row.orchestrator_id == me and row.claimable:
                raise MachineFull
            _explain(tx, machine.org_id, me, row_id)
    return Response(200, _claim_answer(app, machine.org_id, me, work))


def _claim_answer(app: App, org_id: UUID, me: UUID, work: dispatch_queue.Work) -> dict[str, Any]:
    return {
        "message": _message(org_id, me, work),
        "attempt": work.attempts,
        "leaseSeconds": app.policy.claim_timeout,
    }


def claim_many(app: App, request: Request) -> Response:
    """`POST /api/dispatch/claim`"""
    body = body_of(ClaimManyRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        room = orchestrators.lock_machine(tx, org_id=machine.org_id, orchestrator_id=me)
        claimed = dispatch_queue.claim_many(
            tx, org_id=machine.org_id, orchestrator_id=me, limit=body.limit, concurrency_limit=room
        )
    return Response(200, {"claims": [_claim_answer(app, machine.org_id, me, work) for work in claimed]})


def renew(app: App, request: Request, queue_id: str) -> Response:
    """`POST /api/dispatch/:queueId/renew`"""
    row_id, body = parse_id(queue_id), body_of(RenewRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        renewal = dispatch_queue.renew(
            tx, org_id=machine.org_id, orchestrator_id=me, queue_id=row_id, attempt=body.attempt
        )
        if renewal is None:
            _explain(tx, machine.org_id, me, row_id)
    return Response(200, {"leaseSeconds": app.policy.claim_timeout, **news(renewal, body.promptsSeen)})


def release(app: App, request: Request, queue_id: str) -> Response:
    """`POST /api/dispatch/:queueId/release`"""
    row_id, body = parse_id(queue_id), body_of(ReleaseRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        given_up = dispatch_queue.release(
            tx,
            org_id=machine.org_id,
            orchestrator_id=me,
            queue_id=row_id,
            attempt=body.attempt,
            error=body.error,
            policy=app.policy,
        )
        if given_up is None:
            _excuse(tx, machine.org_id, me, row_id)
            return Response(200, {"status": "over"})
        if given_up.outcome == "released":
            dispatch_queue.reroute(
                tx,
                org_id=machine.org_id,
                orchestrator_id=me,
                limit=1,
                policy=app.policy,
                queue_ids=[row_id],
            )
    return Response(200, {"status": given_up.outcome})


def _explain(tx: Tx, org_id: UUID, me: UUID, queue_id: UUID) -> NoReturn:
    """Zero rows were changed: says why, as far as this machine may know."""
    raise _reason(tx, org_id, me, queue_id)


def _excuse(tx: Tx, org_id: UUID, me: UUID, queue_id: UUID) -> None:
    """Lets a release pass that comes after the session's end: the original client sends one after each failed completion."""
    session_id = session_history.session_once_claimed(
        tx, org_id=org_id, queue_id=queue_id, orchestrator_id=me
    )
    row = dispatch_queue.standing(tx, org_id=org_id, queue_id=queue_id)
    if session_id is None or row is not None:
        raise _reason(tx, org_id, me, queue_id)


def _reason(tx: Tx, org_id: UUID, me: UUID, queue_id: UUID) -> DispatchError:
    row = dispatch_queue.standing(tx, org_id=org_id, queue_id=queue_id)
    if row is None:
        known = session_history.session_once_claimed(tx, org_id=org_id, queue_id=queue_id, orchestrator_id=me)
        return (
            NotFound(f"no dispatch queue row {queue_id}") if known is None else ClaimLost("this work is over")
        )
    if me not in (row.orchestrator_id, row.claimed_by):
        return NotFound(f"no dispatch queue row {queue_id}")
    return ClaimLost(attempts=row.attempts)


ROUTES = [
    Route("POST", "/api/orchestrators/register", register),
    Route("POST", "/api/orchestrators/token", realtime_token),
    Route("POST", "/api/orchestrators/{orchestrator_id}/heartbeat", heartbeat),
    Route("GET", "/api/dispatch/poll", poll),
    Route("POST", "/api/dispatch/claim", claim_many),
    Route("POST", "/api/dispatch/{queue_id}/claim", claim),
    Route("POST", "/api/dispatch/{queue_id}/renew", renew),
    Route("POST", "/api/dispatch/{queue_id}/release", release),
    Route("POST", "/api/sessions/{session_id}/status", session_reports.status),
    Route("POST", "/api/sessions/{session_id}/complete", session_reports.complete),
    Route("GET", "/api/sessions/{session_id}", session_reports.session),
]

"""The orchestrator API: register, heartbeat, poll, claim, renew, release, status, complete.

Each route is one transaction, and its boundary stands here. What a machine may not see does not exist for it (404).
"""

from __future__ import annotations

from decimal import Decimal
from time import monotonic
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from pydantic import BaseModel

from functions.app import App
from functions.session_view import event_view, session_view
from functions.web import Request, Response, Route, bearer_token, dispatch, integer_parameter, read_json
from shared import dispatch_queue, orchestrators, session_history, sessions
from shared.db import CLAIM, Tx, transaction
from shared.errors import ClaimLost, DispatchError, MachineFull, NotFound
from shared.ids import parse_id
from shared.messages import (
    ClaimManyRequest,
    CompleteRequest,
    HeartbeatRequest,
    RegisterRequest,
    ReleaseRequest,
    RenewRequest,
    StatusRequest,
    dispatch_message,
)
from shared.reopening import begin_again

BODY_LIMIT = 256 * 1024
POLL_LIMIT = 64
COMPLETED = {"status": "completed", "linearSynced": False}
LONGEST_WAIT_SECONDS = 60

Body = TypeVar("Body", bound=BaseModel)


def handle(app: App, request: Request) -> Response:
    """Answers one request of a machine."""
    return dispatch(ROUTES, app, request)


def _body(model: type[Body], request: Request) -> Body:
    return model.model_validate(read_json(request, BODY_LIMIT))


# -- the machine itself -------------------------------------------------------------------------------------------------


def register(app: App, request: Request) -> Response:
    """`POST /api/orchestrators/register`"""
    body = _body(RegisterRequest, request)
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
    body = _body(HeartbeatRequest, request)
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
    body = _body(ClaimManyRequest, request)
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
    row_id, body = parse_id(queue_id), _body(RenewRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        renewal = dispatch_queue.renew(
            tx, org_id=machine.org_id, orchestrator_id=me, queue_id=row_id, attempt=body.attempt
        )
        if renewal is None:
            _explain(tx, machine.org_id, me, row_id)
    return Response(200, {"leaseSeconds": app.policy.claim_timeout, **_news(renewal, body.promptsSeen)})


def _news(renewal: dispatch_queue.Renewal, prompts_seen: int) -> dict[str, Any]:
    """What the machine must hear while it works: a request to stop, and follow-ups that it has not seen."""
    news: dict[str, Any] = {"cancelRequested": renewal.cancel_requested}
    if prompts := renewal.prompts[prompts_seen:]:
        news["prompts"] = prompts
    return news


def release(app: App, request: Request, queue_id: str) -> Response:
    """`POST /api/dispatch/:queueId/release`"""
    row_id, body = parse_id(queue_id), _body(ReleaseRequest, request)
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


# -- the session --------------------------------------------------------------------------------------------------------


def status(app: App, request: Request, session_id: str) -> Response:
    """`POST /api/sessions/:id/status`. Proof of life for the claim, whatever it says; never the end of it."""
    id_, body = parse_id(session_id, "session"), _body(StatusRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        renewal = dispatch_queue.renew(
            tx,
            org_id=machine.org_id,
            orchestrator_id=me,
            session_id=id_,
            queue_id=_named(body.queueId),
            attempt=body.attempt,
        )
        if renewal is None:
            _require_over(tx, machine.org_id, me, id_, _named(body.queueId))
            return Response(200, {"status": "over", "cancelRequested": False})
        sessions.report(
            tx,
            org_id=machine.org_id,
            session_id=id_,
            orchestrator_id=me,
            queue_id=renewal.queue_id,
            attempt=renewal.attempt,
            status=body.status,
            progress_percent=None if body.progressPercent is None else round(body.progressPercent),
            message=body.message,
        )
    return Response(200, {"status": "ok", **_news(renewal, body.promptsSeen)})


def _require_over(tx: Tx, org_id: UUID, me: UUID, session_id: UUID, queue_id: UUID | None) -> None:
    """A report about a claim that is not held: harmless when what was claimed is over, a lost claim when it goes on elsewhere.

    A session may have begun anew since, with another row: what was said of the old one is said to nobody.
    """
    session = session_history.session_of_machine(tx, org_id=org_id, session_id=session_id, orchestrator_id=me)
    if session is None:
        raise NotFound(f"no session {session_id}")
    if session.is_over:
        return
    if queue_id is not None and dispatch_queue.standing(tx, org_id=org_id, queue_id=queue_id) is None:
        held = session_history.session_once_claimed(tx, org_id=org_id, queue_id=queue_id, orchestrator_id=me)
        if held == session_id:
            return
    raise ClaimLost


def complete(app: App, request: Request, session_id: str) -> Response:
    """`POST /api/sessions/:id/complete`. Settles the row and closes the session in one transaction; repeating it changes nothing.

    Follow-ups that came in too late for the agent begin the session anew, in the same transaction.
    """
    id_, body = parse_id(session_id, "session"), _body(CompleteRequest, request)
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        settled = dispatch_queue.settle(
            tx,
            org_id=machine.org_id,
            orchestrator_id=me,
            session_id=id_,
            queue_id=_named(body.queueId),
            attempt=body.attempt,
            prompts_seen=body.promptsSeen,
        )
        if settled is None:
            _require_over(tx, machine.org_id, me, id_, _named(body.queueId))
            return Response(200, COMPLETED)
        sessions.close_session(
            tx,
            org_id=machine.org_id,
            session_id=id_,
            result=_result(body, settled),
            orchestrator_id=me,
            queue_id=settled.queue_id,
            attempt=settled.attempt,
        )
        if (left := settled.left_to_do(success=body.success)) is not None:
            begin_again(
                tx,
                org_id=machine.org_id,
                session_id=id_,
                message=left,
                offline_after=app.policy.offline_after,
                preferred=me,
            )
    return Response(200, COMPLETED)


def _named(queue_id: str | None) -> UUID | None:
    return None if queue_id is None else UUID(queue_id)


def _result(body: CompleteRequest, settled: dispatch_queue.Settled) -> sessions.Result:
    """A machine that was asked to stop and did not finish has stopped; one that finished all the same has finished."""
    failure = "cancelled" if settled.cancel_requested else "error"
    return sessions.Result(
        status="complete" if body.success else failure,  # type: ignore[arg-type]  # mypy widens the conditional's literals
        pr_url=body.prUrl,
        summary=body.summary,
        tokens_used=body.tokensUsed,
        cost_usd=None if body.costUsd is None else Decimal(str(body.costUsd)),
        error_message=None
        if body.success
        else (body.errorMessage or "the machine reported a failure without a reason"),
    )


def session(app: App, request: Request, session_id: str) -> Response:
    """`GET /api/sessions/:id`"""
    id_ = parse_id(session_id, "session")
    with transaction(app.engine, CLAIM) as tx:
        machine = orchestrators.authenticate(tx, bearer_token(request))
        me = machine.registered()
        found = session_history.session_of_machine(
            tx, org_id=machine.org_id, session_id=id_, orchestrator_id=me
        )
        if found is None:
            raise NotFound(f"no session {session_id}")
        events = session_history.timeline(tx, org_id=machine.org_id, session_id=id_)
    return Response(200, {"session": session_view(found), "events": [event_view(event) for event in events]})


ROUTES = [
    Route("POST", "/api/orchestrators/register", register),
    Route("POST", "/api/orchestrators/token", realtime_token),
    Route("POST", "/api/orchestrators/{orchestrator_id}/heartbeat", heartbeat),
    Route("GET", "/api/dispatch/poll", poll),
    Route("POST", "/api/dispatch/claim", claim_many),
    Route("POST", "/api/dispatch/{queue_id}/claim", claim),
    Route("POST", "/api/dispatch/{queue_id}/renew", renew),
    Route("POST", "/api/dispatch/{queue_id}/release", release),
    Route("POST", "/api/sessions/{session_id}/status", status),
    Route("POST", "/api/sessions/{session_id}/complete", complete),
    Route("GET", "/api/sessions/{session_id}", session),
]

"""What a machine says of a session, progress and the end, and what it may read of it: a part of the orchestrator API of `claim.py`."""

from __future__ import annotations

from decimal import Decimal
from uuid import UUID

from functions.app import App
from functions.session_view import event_view, news, session_view
from functions.web import Request, Response, bearer_token, body_of
from shared import dispatch_queue, orchestrators, session_history, sessions
from shared.db import CLAIM, Tx, transaction
from shared.errors import ClaimLost, NotFound
from shared.ids import parse_id
from shared.messages import CompleteRequest, StatusRequest
from shared.reopening import begin_again

COMPLETED = {"status": "completed", "linearSynced": False}


def status(app: App, request: Request, session_id: str) -> Response:
    """`POST /api/sessions/:id/status`. Proof of life for the claim, whatever it says; never the end of it."""
    id_, body = parse_id(session_id, "session"), body_of(StatusRequest, request)
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
    return Response(200, {"status": "ok", **news(renewal, body.promptsSeen)})


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
    id_, body = parse_id(session_id, "session"), body_of(CompleteRequest, request)
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

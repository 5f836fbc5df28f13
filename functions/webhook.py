"""Linear's signed event becomes a session and its queue row, in one transaction.

Nothing is written before the signature is verified, nothing leaves the machine before the answer, and only a committed transaction is
answered with 200: on anything else Linear sends the event again.
"""

from __future__ import annotations

import hashlib
import time

from functions.app import App
from functions.web import Request, Response, Route, dispatch, read_event
from shared import deliveries, intake, routing
from shared.db import WEBHOOK, Tx, transaction
from shared.errors import ConfigurationError, Unauthenticated
from shared.heard import IGNORED, STARTED, Heard, Outcome
from shared.linear import OLD_AFTER_SECONDS, age_of, envelope, verify
from shared.linear_decisions import Ignored
from shared.linear_events import decide
from shared.log import log, log_exception
from shared.routing import Workspace

BODY_LIMIT = 5 * 1024 * 1024


def handle(app: App, request: Request) -> Response:
    """Answers one delivery."""
    return dispatch(ROUTES, app, request)


def receive(app: App, request: Request) -> Response:
    """`POST /` or `POST /webhook`"""
    event = read_event(request, BODY_LIMIT)
    outside = envelope(event)
    age = age_of(event, now_ms=time.time() * 1000, max_age_seconds=app.settings.webhook_max_age_seconds)
    content_key = hashlib.sha256(request.body).hexdigest()
    with transaction(app.engine, WEBHOOK) as tx:
        workspace = _verified(app, tx, request, outside.linear_organization_id)
        us = workspace.app_user_id or outside.app_user_id
        decision = decide(event, us)
        expected = Outcome(IGNORED, why=decision.why) if isinstance(decision, Ignored) else Outcome(STARTED)
        new = deliveries.remember(
            tx,
            org_id=workspace.org_id,
            workspace_id=workspace.id,
            content_key=content_key,
            delivery_id=_delivery_id(request),
            event=f"{outside.type} {outside.action}",
            subject=intake.subject_of(decision) or content_key,
            outcome=str(expected),
        )
        if not new:
            return _answer(Outcome("heard_before"))
        if workspace.app_user_id is None and us is not None:
            routing.learn_app_user(tx, org_id=workspace.org_id, workspace_id=workspace.id, app_user_id=us)
        heard = Heard(
            workspace, outside.event_time, app.policy.offline_after, request.headers.get("traceparent")
        )
        outcome = intake.act(tx, heard, decision)
        if str(outcome) != str(expected):
            deliveries.conclude(tx, org_id=workspace.org_id, content_key=content_key, outcome=str(outcome))
    log(
        "INFO",
        "webhook heard",
        event=outside.type,
        action=outside.action,
        outcome=outcome.word,
        session_id=outcome.session_id,
        org_id=workspace.org_id,
        age_seconds=round(age, 3),
        signed_but_old=age > OLD_AFTER_SECONDS,
    )
    return _answer(outcome)


def _verified(app: App, tx: Tx, request: Request, linear_organization_id: str | None) -> Workspace:
    """The workspace whose secret signed these bytes: several tenants may have connected one Linear organization.

    Raises Unauthenticated when there is none; nothing has been written by then.
    """
    signature = request.headers.get("linear-signature")
    if linear_organization_id is not None and signature:
        for workspace in routing.workspaces_of(tx, linear_organization_id=linear_organization_id):
            if verify(request.body, signature, _secrets(app, workspace)):
                return workspace
    raise Unauthenticated("the signature is missing or not that of a connected workspace")


def _secrets(app: App, workspace: Workspace) -> list[str]:
    """The workspace's webhook secrets. One that no key opens is no secret: other tenants of the same Linear must still be heard."""
    found = []
    for sealed in filter(None, (workspace.webhook_secret, workspace.webhook_secret_previous)):
        try:
            found.append(app.keys.open(sealed))
        except ConfigurationError as error:
            log_exception(
                "a webhook secret cannot be opened", error, org_id=workspace.org_id, workspace_id=workspace.id
            )
    return found


def _delivery_id(request: Request) -> str | None:
    """The header, unless it is empty or no id: it is not signed, and helps only to recognise a repetition."""
    given = request.headers.get("linear-delivery", "").strip()
    return given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else None


def _answer(outcome: Outcome) -> Response:
    body = {"outcome": outcome.word}
    if outcome.why is not None:
        body["why"] = outcome.why
    if outcome.session_id is not None:
        body["sessionId"] = str(outcome.session_id)
    return Response(200, body)


ROUTES = [Route("POST", "/", receive), Route("POST", "/webhook", receive)]

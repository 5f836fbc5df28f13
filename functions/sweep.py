"""The cron tick: `POST /`, answered with what it did. Overlapping, repeated and missed ticks are all harmless."""

from __future__ import annotations

import hmac
from typing import Any

from functions.app import App
from functions.web import Request, Response, Route, bearer_token, dispatch
from shared.errors import Unauthenticated
from shared.log import log
from shared.sweep import sweep_once


def handle(app: App, request: Request) -> Response:
    """Answers one tick."""
    return dispatch(ROUTES, app, request)


def tick(app: App, request: Request) -> Response:
    """`POST /`"""
    _require_scheduler(app, request)
    settings = app.settings
    report = sweep_once(
        app.engine,
        policy=app.policy,
        retention_hours=settings.webhook_delivery_retention_hours,
        batch_rows=settings.sweep_batch_rows,
        budget_seconds=settings.sweep_budget_seconds,
    )
    counts: dict[str, Any] = report.as_dict()
    log("WARNING" if report.failed or not report.finished else "INFO", "swept", **counts)
    return Response(200, counts)


def _require_scheduler(app: App, request: Request) -> None:
    """Lets only the scheduler pass: by the shared cron secret, or by the identity token that the platform's scheduler signs."""
    credential = bearer_token(request)
    secret = app.settings.cron_secret
    if secret is not None and hmac.compare_digest(credential.encode(), secret.get_secret_value().encode()):
        return
    if app.settings.scheduler_oidc_audience is not None:
        from functions.oidc import verify_scheduler_token  # noqa: PLC0415 - only where the platform signs: 60 ms of import

        verify_scheduler_token(credential, app.settings)
        return
    raise Unauthenticated("the tick carries neither the cron secret nor a scheduler's identity token")


ROUTES = [Route("POST", "/", tick)]

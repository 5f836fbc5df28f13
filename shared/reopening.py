"""An ended session begins anew: somebody said more, or wanted the work again while it was being stopped."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from shared.db import Tx
from shared.dead_letters import bury_undeliverable
from shared.dispatch_queue import enqueue_dispatch
from shared.orchestrators import route
from shared.routing import repos_served
from shared.sessions import end_undelivered, reopen


def begin_again(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    message: dict[str, Any],
    offline_after: int,
    preferred: UUID | None,
    requested_at: datetime | None = None,
) -> Literal["begun_anew", "no_orchestrator", "open_already"]:
    """Opens the session again with a new row, which starts at attempt 1.

    Where no machine serves its repository any more, the session is an error and the message a dead letter: what was asked for is kept.

    Args:
        message: the issue's part of the message, with `repo` and the follow-ups that are to be read.
        preferred: the machine that has the checkout.
        requested_at: when it was asked for, by Linear's clock; None: before, and only now is its turn.
    """
    repo = message["repo"]
    orchestrator_id = route(tx, org_id=org_id, repo=repo, offline_after=offline_after, preferred=preferred)
    if orchestrator_id is None:
        error = f"no machine serves {repo}"
        if not end_undelivered(
            tx, org_id=org_id, session_id=session_id, error_code="no_orchestrator", error=error
        ):
            return "open_already"
        bury_undeliverable(
            tx,
            org_id=org_id,
            session_id=session_id,
            reason="no_orchestrator",
            error=error,
            payload=message,
            candidates=repos_served(tx, org_id=org_id),
        )
        return "no_orchestrator"
    if not reopen(
        tx,
        org_id=org_id,
        session_id=session_id,
        orchestrator_id=orchestrator_id,
        repo=repo,
        requested_at=requested_at,
    ):
        return "open_already"
    enqueue_dispatch(
        tx, org_id=org_id, orchestrator_id=orchestrator_id, session_id=session_id, message=message
    )
    return "begun_anew"

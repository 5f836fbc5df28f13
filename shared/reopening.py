"""An ended session begins anew: somebody said more, or wanted the work again while it was being stopped, or the operator redrives it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from shared.db import Tx, sql
from shared.dead_letters import bury_undeliverable
from shared.dispatch_queue import enqueue_dispatch
from shared.errors import Conflict, NotFound
from shared.orchestrators import repos_served, route
from shared.sessions import record_event

# Reopening waits for whoever is ending or reopening the session now, and then looks again: two prompts make one new row.
REOPEN = sql("""
    update dispatch_sessions
       set status = 'pending', ended_at = null, error_code = null, error_message = null, progress_percent = null,
           orchestrator_id = :orchestrator_id, repo = :repo, updated_at = now(),
           requested_at = greatest(requested_at, cast(:requested_at as timestamptz))
     where org_id = :org_id and id = :session_id and ended_at is not null
       and not exists (select from dispatch_sessions other
                        where other.org_id = dispatch_sessions.org_id and other.workspace_id = dispatch_sessions.workspace_id
                          and other.linear_issue_id = dispatch_sessions.linear_issue_id and other.ended_at is null)
    returning id
""")


def reopen(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    orchestrator_id: UUID,
    repo: str,
    requested_at: datetime | None = None,
) -> bool:
    """Makes an ended session deliverable again; the caller enqueues it in the same transaction. False: it or another of its issue is open.

    Args:
        requested_at: when this was asked for, by Linear's clock: an older stop is not meant for it.

    Raises IntegrityError when another session of the issue is opened at this very moment.
    """
    row = tx.first(
        REOPEN,
        org_id=org_id,
        session_id=session_id,
        orchestrator_id=orchestrator_id,
        repo=repo,
        requested_at=requested_at,
    )
    return row is not None


UNDELIVERED = sql("""
    update dispatch_sessions
       set status = 'error', error_code = :error_code, error_message = :error, ended_at = now(), updated_at = now()
     where org_id = :org_id and id = :session_id and ended_at is not null
    returning id
""")


def end_undelivered(tx: Tx, *, org_id: UUID, session_id: UUID, error_code: str, error: str) -> bool:
    """What was asked for after a session's end cannot be delivered: whatever its end was, it is an error now. False: it is open."""
    return (
        tx.first(UNDELIVERED, org_id=org_id, session_id=session_id, error_code=error_code, error=error)
        is not None
    )


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
        return _bury(tx, org_id, session_id, message)
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


def _bury(
    tx: Tx, org_id: UUID, session_id: UUID, message: dict[str, Any]
) -> Literal["no_orchestrator", "open_already"]:
    error = f"no machine serves {message['repo']}"
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


# -- redrive --------------------------------------------------------------------------------------------------------------

LAST = sql("""
    select s.repo, s.status, e.data -> 'payload' as payload, s.status = 'error' and s.error_code <> 'failed' as is_dead_letter
      from dispatch_sessions s
      left join lateral (
        select data from session_events
         where org_id = s.org_id and session_id = s.id and type = 'dead_lettered'
         order by id desc limit 1) e on true
     where s.org_id = :org_id and s.id = :session_id
       for update of s
""")


def redrive(tx: Tx, *, org_id: UUID, session_id: UUID, offline_after: int, repo: str | None = None) -> UUID:
    """Sends a dead letter again: the session is open once more, with a new row that starts at attempt 1.

    Args:
        repo: names the repository where routing had found none.

    Returns the id of the new row.
    Raises NotFound (no such session), Conflict (not a dead letter; its issue has another open session; no machine serves its repository).
    """
    row = tx.first(LAST, org_id=org_id, session_id=session_id)
    if row is None:
        raise NotFound(f"no session {session_id}")
    if row.payload is None or not row.is_dead_letter:
        raise Conflict(f"session {session_id} is no dead letter: its status is {row.status}")
    repo = repo or row.repo
    if repo is None:
        raise Conflict(f"session {session_id} has no repository: name one")
    orchestrator_id = route(tx, org_id=org_id, repo=repo, offline_after=offline_after)
    if orchestrator_id is None:
        raise Conflict(f"no machine serves {repo}: register one, or add a route")
    if not reopen(tx, org_id=org_id, session_id=session_id, orchestrator_id=orchestrator_id, repo=repo):
        raise Conflict(f"the issue of session {session_id} has another open session")
    message = {**row.payload, "repo": repo}
    queue_id = enqueue_dispatch(
        tx, org_id=org_id, orchestrator_id=orchestrator_id, session_id=session_id, message=message
    )
    record_event(
        tx,
        org_id=org_id,
        session_id=session_id,
        type="redriven",
        orchestrator_id=orchestrator_id,
        queue_id=queue_id,
        data={},
    )
    return queue_id

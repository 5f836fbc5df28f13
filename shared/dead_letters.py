"""Dead letters: work that was given up, kept with its payload and its error so that it can be sent again."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from shared.db import Tx, sql
from shared.sessions import record_event


class DeadLetter(NamedTuple):
    """A session that ended in error with its message kept. `attempts` is how often it had been claimed."""

    session_id: UUID
    linear_identifier: str
    title: str
    repo: str | None
    attempts: int | None
    reason: str
    error: str | None
    died_at: datetime


# A session that was redriven and then failed at its machine's own word (`failed`) was delivered: its old letter is settled.
# Reading newest first stops after `limit` rows.
LISTED = sql("""
    select s.id, s.linear_identifier, s.title, s.repo, e.attempt, e.data ->> 'reason', e.data ->> 'error', e.created_at
      from session_events e
      join dispatch_sessions s on s.org_id = e.org_id and s.id = e.session_id
     where e.org_id = :org_id and e.type = 'dead_lettered' and s.status = 'error' and s.error_code <> 'failed'
       and e.id = (select max(last.id) from session_events last
                    where last.org_id = e.org_id and last.session_id = e.session_id and last.type = 'dead_lettered')
     order by e.id desc
     limit :limit
""")


def dead_letters(tx: Tx, *, org_id: UUID, limit: int = 100) -> list[DeadLetter]:
    """What was given up and not sent again, newest first."""
    return [DeadLetter(*row) for row in tx.all(LISTED, org_id=org_id, limit=limit)]


def bury_undeliverable(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    reason: str,
    error: str,
    payload: dict[str, Any],
    candidates: Sequence[str],
) -> None:
    """Keeps the message of a session that ended before it had a row, e.g. because no machine serves its repository.

    Args:
        candidates: repositories that could be meant, for the question that the person in Linear is asked.
    """
    data = {"reason": reason, "error": error, "payload": payload, "candidates": list(candidates)}
    record_event(tx, org_id=org_id, session_id=session_id, type="dead_lettered", data=data)


UNDELIVERED = sql("""
    select e.data -> 'payload' as payload
      from dispatch_sessions s
      join session_events e on e.org_id = s.org_id and e.session_id = s.id and e.type = 'dead_lettered'
     where s.org_id = :org_id and s.id = :session_id and s.status = 'error' and s.error_code <> 'failed'
     order by e.id desc
     limit 1
""")


def undelivered(tx: Tx, *, org_id: UUID, session_id: UUID) -> dict[str, Any] | None:
    """The message of a session that ended without anybody having done it; None for any other."""
    row = tx.first(UNDELIVERED, org_id=org_id, session_id=session_id)
    return None if row is None else row[0]

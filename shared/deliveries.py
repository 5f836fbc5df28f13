"""What has already been heard from Linear: deliveries that were acted on, and stops that came before their start."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from shared.db import Tx, sql

# Only the body is signed, so the delivery id alone would let a replay with a new id through, and the content alone would not know a
# re-sent event whose timestamp was refreshed: either one found means "heard before". A parallel delivery waits here for the first.
REMEMBER = sql("""
    insert into webhook_deliveries (org_id, workspace_id, content_key, delivery_id, event, outcome)
    values (:org_id, :workspace_id, :content_key, :delivery_id, :event, 'received')
    on conflict do nothing
    returning content_key
""")


def remember(tx: Tx, *, org_id: UUID, workspace_id: UUID, content_key: str, delivery_id: str | None, event: str) -> bool:
    """Takes a delivery, in the transaction that acts on it; False when it was taken before.

    Args:
        content_key: SHA-256 (hex) of the signed bytes.
        delivery_id: the header's value; None when absent or empty.
    """
    row = tx.first(
        REMEMBER, org_id=org_id, workspace_id=workspace_id, content_key=content_key, delivery_id=delivery_id, event=event
    )
    return row is not None


CONCLUDE = sql("""
    update webhook_deliveries set outcome = :outcome, session_id = :session_id
     where org_id = :org_id and content_key = :content_key
""")


def conclude(tx: Tx, *, org_id: UUID, content_key: str, outcome: str, session_id: UUID | None) -> None:
    """Notes what was decided, for the operator who asks why an event did nothing."""
    tx.run(CONCLUDE, org_id=org_id, content_key=content_key, outcome=outcome, session_id=session_id)


BURY = sql("""
    insert into stop_tombstones (org_id, workspace_id, subject, stopped_at)
    values (:org_id, :workspace_id, :subject, :stopped_at)
    on conflict (org_id, workspace_id, subject) do update
       set stopped_at = greatest(stop_tombstones.stopped_at, excluded.stopped_at), received_at = now()
""")


def bury(tx: Tx, *, org_id: UUID, workspace_id: UUID, subject: str, stopped_at: datetime) -> None:
    """Remembers a stop for something that is not known yet: webhooks overtake each other.

    Args:
        subject: Linear's agent session id or issue id.
        stopped_at: the event's own time.
    """
    tx.run(BURY, org_id=org_id, workspace_id=workspace_id, subject=subject, stopped_at=stopped_at)


# An agent session that was stopped stays stopped: its id is never used for another delegation. An issue may be delegated again later.
BURIED = sql("""
    select exists (select from stop_tombstones
                    where org_id = :org_id and workspace_id = :workspace_id
                      and (subject = :agent_session_id or (subject = :issue_id and stopped_at >= :started_at)))
""")


def is_buried(
    tx: Tx, *, org_id: UUID, workspace_id: UUID, issue_id: str, agent_session_id: str | None, started_at: datetime
) -> bool:
    """Whether a stop has come before this start."""
    row = tx.first(
        BURIED,
        org_id=org_id,
        workspace_id=workspace_id,
        issue_id=issue_id,
        agent_session_id=agent_session_id or "",
        started_at=started_at,
    )
    return bool(row and row[0])


PURGE_DELIVERIES = sql("""
    delete from webhook_deliveries
     where (org_id, content_key) in (
       select org_id, content_key from webhook_deliveries
        where received_at < now() - make_interval(hours => :hours) order by received_at limit :limit for update skip locked)
""")
PURGE_TOMBSTONES = sql("""
    delete from stop_tombstones
     where (org_id, workspace_id, subject) in (
       select org_id, workspace_id, subject from stop_tombstones
        where received_at < now() - make_interval(hours => :hours) order by received_at limit :limit for update skip locked)
""")


def purge(tx: Tx, *, retention_hours: int, limit: int) -> int:
    """Forgets up to `limit` deliveries and as many tombstones that are older than the retention; returns how many."""
    return sum(tx.run(statement, hours=retention_hours, limit=limit) for statement in (PURGE_DELIVERIES, PURGE_TOMBSTONES))

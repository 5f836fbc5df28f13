"""What has already been heard from Linear: deliveries that were acted on, and stops that came before their start."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from shared.db import Tx, sql

# Only the body is signed, so the delivery id alone would let a replay with a new id through, and the content alone would not know a
# re-sent event whose timestamp was refreshed: either one found means "heard before". A parallel delivery waits here for the first.
# The lock makes the webhooks about one issue pass one by one (each later statement sees what the one before has committed), so that a stop
# and a start, or the three webhooks of one delegation, cannot slip past each other. It ends with the transaction.
REMEMBER = sql("""
    with alone as materialized (
      select pg_advisory_xact_lock(hashtextextended(cast(cast(:org_id as uuid) as text) || :subject, 0))
    )
    insert into webhook_deliveries (org_id, workspace_id, content_key, delivery_id, event, outcome)
    select :org_id, :workspace_id, :content_key, :delivery_id, :event, :outcome from alone
    on conflict do nothing
    returning content_key
""")


def remember(
    tx: Tx,
    *,
    org_id: UUID,
    workspace_id: UUID,
    content_key: str,
    delivery_id: str | None,
    event: str,
    subject: str,
    outcome: str,
) -> bool:
    """Takes a delivery, in the transaction that acts on it; False when it was taken before.

    Args:
        content_key: SHA-256 (hex) of the signed bytes.
        delivery_id: the header's value; None when absent or empty.
        subject: what the event is about (Linear's issue id): others about the same wait until this transaction has ended.
        outcome: what will come of it, as far as is known by now; `conclude` corrects it.
    """
    row = tx.first(
        REMEMBER,
        org_id=org_id,
        workspace_id=workspace_id,
        content_key=content_key,
        delivery_id=delivery_id,
        event=event,
        subject=subject,
        outcome=outcome,
    )
    return row is not None


CONCLUDE = sql("""
    update webhook_deliveries set outcome = :outcome where org_id = :org_id and content_key = :content_key
""")


def conclude(tx: Tx, *, org_id: UUID, content_key: str, outcome: str) -> None:
    """Notes what has come of a delivery, for the operator who asks why an event did nothing."""
    tx.run(CONCLUDE, org_id=org_id, content_key=content_key, outcome=outcome)


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


# MATERIALIZED: evaluated again inside a join, the LIMIT would no longer bound the batch.
PURGE_DELIVERIES = sql("""
    with old as materialized (
      select org_id, content_key from webhook_deliveries
       where received_at < now() - make_interval(hours => :hours)
       order by received_at
       limit :limit
         for update skip locked)
    delete from webhook_deliveries d using old where d.org_id = old.org_id and d.content_key = old.content_key
""")
PURGE_TOMBSTONES = sql("""
    with old as materialized (
      select org_id, workspace_id, subject from stop_tombstones
       where received_at < now() - make_interval(hours => :hours)
       order by received_at
       limit :limit
         for update skip locked)
    delete from stop_tombstones t using old
     where t.org_id = old.org_id and t.workspace_id = old.workspace_id and t.subject = old.subject
""")


def purge(tx: Tx, *, retention_hours: int, limit: int) -> int:
    """Forgets up to `limit` deliveries and as many tombstones that are older than the retention; returns how many."""
    return sum(
        tx.run(statement, hours=retention_hours, limit=limit)
        for statement in (PURGE_DELIVERIES, PURGE_TOMBSTONES)
    )

"""What `queue` shows: the rows that are still to be delivered. Read only, bounded by `limit`, ages by the database's clock."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql


class Row(NamedTuple):
    """A queue row. `state`: claimed, waiting (could be claimed now) or backing off; ages in seconds.

    `stop_requested`: its machine is to stop. `wanted_again`: what was stopped has been asked for again since.
    """

    queue_id: UUID
    session_id: UUID
    linear_identifier: str
    machine: str
    state: str
    stop_requested: bool
    wanted_again: bool
    attempts: int
    age_seconds: float
    claim_age_seconds: float | None
    next_attempt_in_seconds: float | None
    last_error: str | None
    title: str


_ROW = """
    select q.id, q.session_id, s.linear_identifier, o.name,
           case when q.claimed_at is not null then 'claimed' when q.available_at <= now() then 'waiting' else 'backing off' end,
           q.cancel_requested_at is not null, q.wanted_again, q.attempts,
           cast(extract(epoch from now() - q.created_at) as double precision),
           cast(extract(epoch from now() - q.claimed_at) as double precision),
           case when q.claimed_at is null then cast(greatest(extract(epoch from q.available_at - now()), 0) as double precision) end,
           q.last_error, s.title"""

# Machine by machine along the queue's two indexes: no machine's backlog is read further than `limit` rows.
QUEUE = sql(f"""{_ROW}
      from orchestrators o
      cross join lateral (
        (select * from dispatch_queue c
          where c.org_id = o.org_id and c.orchestrator_id = o.id and c.claimed_at is not null and :claimed
          order by c.claimed_at
          limit :limit)
        union all
        (select * from dispatch_queue w
          where w.org_id = o.org_id and w.orchestrator_id = o.id and w.claimed_at is null and :waiting
          order by w.available_at, w.id
          limit :limit)) q
      join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
     where o.org_id = :org_id and (cast(:orchestrator_id as uuid) is null or o.id = cast(:orchestrator_id as uuid))
     order by q.created_at, q.id
     limit :limit
""")


def queue(
    tx: Tx,
    *,
    org_id: UUID,
    limit: int,
    claimed: bool = True,
    waiting: bool = True,
    orchestrator_id: UUID | None = None,
) -> list[Row]:
    """The organization's queue rows, oldest first."""
    rows = tx.all(
        QUEUE, org_id=org_id, limit=limit, claimed=claimed, waiting=waiting, orchestrator_id=orchestrator_id
    )
    return [Row(*row) for row in rows]


ROW_OF = sql(f"""{_ROW}
      from dispatch_queue q
      join orchestrators o on o.org_id = q.org_id and o.id = q.orchestrator_id
      join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
     where q.org_id = :org_id and q.session_id = :session_id
""")


def row_of(tx: Tx, *, org_id: UUID, session_id: UUID) -> Row | None:
    """The queue row of a session; None once it is over."""
    row = tx.first(ROW_OF, org_id=org_id, session_id=session_id)
    return None if row is None else Row(*row)


UNSERVED = sql("""
    select distinct s.repo
      from dispatch_queue q
      join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
     where q.org_id = :org_id and q.orchestrator_id = :orchestrator_id and s.repo is not null
       and not exists (select from repo_routes r
                        where r.org_id = q.org_id and r.repo = s.repo and r.orchestrator_id <> q.orchestrator_id)
     order by s.repo
     limit 20
""")


def served_by_nobody_else(tx: Tx, *, org_id: UUID, orchestrator_id: UUID) -> list[str]:
    """The repositories of a machine's rows that no other machine serves, online or not."""
    return [row[0] for row in tx.all(UNSERVED, org_id=org_id, orchestrator_id=orchestrator_id)]

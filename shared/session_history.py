"""What is known of sessions: their rows and their history, as machines, the webhook and the operator read them. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from shared.db import Tx, sql


class Session(NamedTuple):
    """A row of `dispatch_sessions`."""

    id: UUID
    org_id: UUID
    workspace_id: UUID
    orchestrator_id: UUID | None
    linear_issue_id: str
    linear_identifier: str
    linear_agent_session_id: str | None
    team_id: str
    title: str
    url: str | None
    repo: str | None
    status: str
    progress_percent: int | None
    pr_url: str | None
    summary: str | None
    tokens_used: int | None
    cost_usd: Decimal | None
    error_code: str | None
    error_message: str | None
    repo_was_said: bool
    requested_at: datetime
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None
    ended_at: datetime | None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is to be delivered any more."""
        return self.ended_at is not None


_COLUMNS = ", ".join(f"s.{name}" for name in Session._fields)

GET = sql(f"select {_COLUMNS} from dispatch_sessions s where s.org_id = :org_id and s.id = :session_id")


def get_session(tx: Tx, *, org_id: UUID, session_id: UUID) -> Session | None:
    """One session of the organization."""
    row = tx.first(GET, org_id=org_id, session_id=session_id)
    return None if row is None else Session(*row)


# A machine sees what is meant for it and what it has ever claimed; everything else does not exist for it.
OF_MACHINE = sql(f"""
    select {_COLUMNS} from dispatch_sessions s
     where s.org_id = :org_id and s.id = :session_id
       and (s.orchestrator_id = :orchestrator_id
            or exists (select from session_events e where e.org_id = s.org_id and e.session_id = s.id and e.type = 'claimed'
                          and e.orchestrator_id = :orchestrator_id))
""")


def session_of_machine(tx: Tx, *, org_id: UUID, session_id: UUID, orchestrator_id: UUID) -> Session | None:
    """The session, if this machine has or had to do with it."""
    row = tx.first(OF_MACHINE, org_id=org_id, session_id=session_id, orchestrator_id=orchestrator_id)
    return None if row is None else Session(*row)


# The open one first: of the ended ones the last by the database's clock, since ids are made by the functions' own.
_LATEST = "order by (s.ended_at is null) desc, s.created_at desc, s.id desc limit 1"

LATEST_OF_ISSUE = sql(f"""
    select {_COLUMNS} from dispatch_sessions s
     where s.org_id = :org_id and s.workspace_id = :workspace_id and s.linear_issue_id = :linear_issue_id
     {_LATEST}
""")


def latest_of_issue(tx: Tx, *, org_id: UUID, workspace_id: UUID, linear_issue_id: str) -> Session | None:
    """The open session of an issue, or else its last one."""
    row = tx.first(LATEST_OF_ISSUE, org_id=org_id, workspace_id=workspace_id, linear_issue_id=linear_issue_id)
    return None if row is None else Session(*row)


OF_AGENT_SESSION = sql(f"""
    select {_COLUMNS} from dispatch_sessions s
     where s.org_id = :org_id
       and s.id in (select own.id from dispatch_sessions own
                     where own.org_id = :org_id and own.workspace_id = :workspace_id
                       and own.linear_agent_session_id = :agent_session_id
                    union all
                    select j.session_id from joined_agent_sessions j
                     where j.org_id = :org_id and j.workspace_id = :workspace_id and j.agent_session_id = :agent_session_id)
     {_LATEST}
""")


def of_agent_session(tx: Tx, *, org_id: UUID, workspace_id: UUID, agent_session_id: str) -> Session | None:
    """The session that Linear's agent session stands for, as its own or as one that joined it."""
    row = tx.first(
        OF_AGENT_SESSION, org_id=org_id, workspace_id=workspace_id, agent_session_id=agent_session_id
    )
    return None if row is None else Session(*row)


# Held at all when the row is gone? The index `one_claim_per_attempt` answers by queue id.
CLAIMED_BEFORE = sql("""
    select session_id from session_events
     where org_id = :org_id and queue_id = :queue_id and type = 'claimed' and orchestrator_id = :orchestrator_id
     limit 1
""")


def session_once_claimed(tx: Tx, *, org_id: UUID, queue_id: UUID, orchestrator_id: UUID) -> UUID | None:
    """The session of a queue row that this machine has held at some time, whether or not the row still exists."""
    row = tx.first(CLAIMED_BEFORE, org_id=org_id, queue_id=queue_id, orchestrator_id=orchestrator_id)
    return None if row is None else row[0]


class Listed(NamedTuple):
    """A session in a list. `attempts`: how often it was claimed since it was last enqueued; ages in seconds, by the database's clock.

    `stop_requested`: its machine is to stop. `wanted_again`: what was stopped has been asked for again since.
    """

    id: UUID
    linear_identifier: str
    status: str
    stop_requested: bool
    wanted_again: bool
    error_code: str | None
    repo: str | None
    orchestrator_id: UUID | None
    machine: str | None
    attempts: int
    progress_percent: int | None
    age_seconds: float
    created_at: datetime
    ended_at: datetime | None
    pr_url: str | None
    title: str


# Newest first along the primary key, until `limit` rows have matched: a rare filter reads the organization's history once, at most.
# The attempts of a row that is gone are those of the last queue row that was claimed.
LISTED = sql("""
    select s.id, s.linear_identifier, s.status, q.cancel_requested_at is not null, coalesce(q.wanted_again, false),
           s.error_code, s.repo, s.orchestrator_id, o.name,
           coalesce(q.attempts,
                    (select e.attempt from session_events e
                      where e.org_id = s.org_id and e.session_id = s.id and e.type = 'claimed' order by e.id desc limit 1), 0),
           s.progress_percent, cast(extract(epoch from now() - s.created_at) as double precision), s.created_at, s.ended_at,
           s.pr_url, s.title
      from (select * from dispatch_sessions
             where org_id = :org_id
               and (cast(:statuses as text[]) is null or status = any (cast(:statuses as text[])))
               and (cast(:identifier as text) is null or linear_identifier = cast(:identifier as text))
               and (cast(:orchestrator_id as uuid) is null or orchestrator_id = cast(:orchestrator_id as uuid))
             order by id desc
             limit :limit) s
      left join dispatch_queue q on q.org_id = s.org_id and q.session_id = s.id
      left join orchestrators o on o.org_id = s.org_id and o.id = s.orchestrator_id
     order by s.id desc
""")


def listed(
    tx: Tx,
    *,
    org_id: UUID,
    limit: int,
    statuses: Sequence[str] | None = None,
    identifier: str | None = None,
    orchestrator_id: UUID | None = None,
) -> list[Listed]:
    """The organization's sessions, newest first; each filter that is given must match."""
    rows = tx.all(
        LISTED,
        org_id=org_id,
        limit=limit,
        statuses=None if statuses is None else list(statuses),
        identifier=identifier,
        orchestrator_id=orchestrator_id,
    )
    return [Listed(*row) for row in rows]


class Event(NamedTuple):
    """One entry of a session's history."""

    id: int
    type: str
    orchestrator_id: UUID | None
    queue_id: UUID | None
    attempt: int | None
    data: dict[str, Any] | None
    created_at: datetime


TIMELINE = sql("""
    select id, type, orchestrator_id, queue_id, attempt, data, created_at
      from session_events
     where org_id = :org_id and session_id = :session_id
     order by id
     limit :limit
""")


def timeline(tx: Tx, *, org_id: UUID, session_id: UUID, limit: int = 1000) -> list[Event]:
    """The history of a session, oldest first."""
    return [Event(*row) for row in tx.all(TIMELINE, org_id=org_id, session_id=session_id, limit=limit)]

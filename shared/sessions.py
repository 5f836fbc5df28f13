"""Sessions: one attempt to get one Linear issue done, and its append-only history.

`open_session` and `close_session` are the two ends; what happens to the queue row in between mirrors itself into the session in the
statements of `dispatch_queue`, so that the two cannot disagree.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from shared.db import Tx, sql
from shared.ids import new_id


@dataclass(frozen=True, slots=True)
class NewSession:
    """What is known when work starts. `repo` and `orchestrator_id` are None when it could not be routed."""

    org_id: UUID
    workspace_id: UUID
    linear_issue_id: str
    linear_identifier: str
    team_id: str
    title: str
    url: str | None = None
    linear_agent_session_id: str | None = None
    repo: str | None = None
    orchestrator_id: UUID | None = None
    traceparent: str | None = None
    requested_at: datetime | None = None
    repo_was_said: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a session is over before it began, e.g. `Ended("error", "no_orchestrator", "no machine serves acme/api")`."""

    status: Literal["error", "cancelled"]
    error_code: str | None
    message: str


# A start that was asked for before the issue's last session ended is an echo of that session (one delegation sends up to three webhooks,
# hours apart if they are retried). An agent session that the last session knows nothing of is no echo: somebody mentioned the agent
# again, and the event was late. The unique index catches two starts at the same moment.
OPEN = sql("""
    with opened as (
      insert into dispatch_sessions (org_id, id, workspace_id, orchestrator_id, linear_issue_id, linear_identifier,
                                     linear_agent_session_id, team_id, title, url, repo, repo_was_said, traceparent, requested_at,
                                     status, error_code, error_message, ended_at)
      select :org_id, :session_id, :workspace_id, :orchestrator_id, :linear_issue_id, :linear_identifier,
             :linear_agent_session_id, :team_id, :title, :url, :repo, :repo_was_said, :traceparent, asked.at,
             :status, :error_code, :error_message, case when cast(:ended as boolean) then now() end
        from (select coalesce(cast(:requested_at as timestamptz), now()) as at) asked
       where not exists (select from dispatch_sessions known
                          where known.org_id = :org_id and known.workspace_id = :workspace_id
                            and known.linear_issue_id = :linear_issue_id
                            and (known.ended_at is null
                                 or (known.ended_at >= asked.at
                                     and (coalesce(known.linear_agent_session_id, :linear_agent_session_id)
                                            is not distinct from coalesce(:linear_agent_session_id, known.linear_agent_session_id)
                                          or exists (select from joined_agent_sessions j
                                                      where j.org_id = known.org_id and j.workspace_id = known.workspace_id
                                                        and j.agent_session_id = :linear_agent_session_id
                                                        and j.session_id = known.id)))))
      on conflict (org_id, workspace_id, linear_issue_id) where ended_at is null do nothing
      returning id
    )
    insert into session_events (org_id, session_id, type, orchestrator_id, data)
    select :org_id, id, 'created', cast(:orchestrator_id as uuid), cast(:facts as jsonb) from opened
    returning session_id
""")


def open_session(
    tx: Tx, new: NewSession, *, ended: Ended | None = None, facts: dict[str, Any] | None = None
) -> UUID | None:
    """Opens the session of an issue; the caller enqueues it in the same transaction, or the COMMIT is refused.

    Args:
        ended: given when the work cannot be delivered: the session is recorded as over, and gets no queue row.
        facts: kept with the `created` event (what started it, who asked).

    Returns the session's id, or None when the issue has an open session already, or its last one ended after this was asked for.
    """
    row = tx.first(
        OPEN,
        org_id=new.org_id,
        session_id=new_id(),
        workspace_id=new.workspace_id,
        orchestrator_id=new.orchestrator_id,
        linear_issue_id=new.linear_issue_id,
        linear_identifier=new.linear_identifier,
        linear_agent_session_id=new.linear_agent_session_id,
        team_id=new.team_id,
        title=new.title,
        url=new.url,
        repo=new.repo,
        repo_was_said=new.repo_was_said,
        traceparent=new.traceparent,
        requested_at=new.requested_at,
        status="pending" if ended is None else ended.status,
        error_code=None if ended is None else ended.error_code,
        error_message=None if ended is None or ended.status == "cancelled" else ended.message,
        ended=ended is not None,
        facts=json.dumps(facts or {}),
    )
    return None if row is None else row[0]


@dataclass(frozen=True, slots=True)
class Result:
    """How a session ended, as the machine reports it. `cost_usd` in US dollars."""

    status: Literal["complete", "error", "cancelled"]
    pr_url: str | None = None
    summary: str | None = None
    tokens_used: int | None = None
    cost_usd: Decimal | None = None
    error_message: str | None = None


CLOSE = sql("""
    with closed as (
      update dispatch_sessions
         set status = :status, ended_at = now(), updated_at = now(),
             pr_url = coalesce(:pr_url, pr_url), summary = coalesce(:summary, summary),
             tokens_used = coalesce(cast(:tokens_used as bigint), tokens_used),
             cost_usd = coalesce(cast(:cost_usd as numeric), cost_usd),
             error_code = case when :status = 'error' then 'failed' end, error_message = :error_message,
             progress_percent = case when :status = 'complete' then 100 else progress_percent end
       where org_id = :org_id and id = :session_id and ended_at is null
      returning id, pr_url
    )
    insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
    select :org_id, id, :status, cast(:orchestrator_id as uuid), cast(:queue_id as uuid), cast(:attempt as integer),
           jsonb_strip_nulls(jsonb_build_object('prUrl', pr_url, 'error', cast(:error_message as text)))
      from closed
    returning session_id
""")


def close_session(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    result: Result,
    orchestrator_id: UUID,
    queue_id: UUID,
    attempt: int,
) -> bool:
    """Ends a session whose row the caller has settled in the same transaction. False when it had ended before: nothing changes."""
    row = tx.first(
        CLOSE,
        org_id=org_id,
        session_id=session_id,
        status=result.status,
        pr_url=result.pr_url,
        summary=result.summary,
        tokens_used=result.tokens_used,
        cost_usd=result.cost_usd,
        error_message=result.error_message,
        orchestrator_id=orchestrator_id,
        queue_id=queue_id,
        attempt=attempt,
    )
    return row is not None


# A report of `error` is not the end while the row exists: the original client reports it and then releases, and the release decides.
REPORT = sql("""
    with reported as (
      update dispatch_sessions
         set status = 'running', progress_percent = coalesce(cast(:progress as integer), progress_percent), updated_at = now()
       where org_id = :org_id and id = :session_id and ended_at is null
      returning id
    )
    insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
    select :org_id, id, :type, cast(:orchestrator_id as uuid), cast(:queue_id as uuid), cast(:attempt as integer),
           jsonb_strip_nulls(jsonb_build_object('status', cast(:status as text), 'progressPercent', cast(:progress as integer),
                                                'message', cast(:message as text)))
      from reported
    returning session_id
""")


def report(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    orchestrator_id: UUID,
    queue_id: UUID,
    attempt: int,
    status: str,
    progress_percent: int | None,
    message: str | None,
) -> bool:
    """Notes what the machine says of a claim that it holds. False when the session is over: nothing changes."""
    row = tx.first(
        REPORT,
        org_id=org_id,
        session_id=session_id,
        type={"error": "error", "dispatched": "dispatched"}.get(status, "progress"),
        orchestrator_id=orchestrator_id,
        queue_id=queue_id,
        attempt=attempt,
        status=status,
        progress=progress_percent,
        message=message,
    )
    return row is not None


RECORD = sql("""
    insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
    values (:org_id, :session_id, :type, :orchestrator_id, :queue_id, :attempt, cast(:data as jsonb))
    on conflict do nothing
    returning id
""")


def record_event(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    type: str,  # noqa: A002 - the column's name
    data: dict[str, Any],
    orchestrator_id: UUID | None = None,
    queue_id: UUID | None = None,
    attempt: int | None = None,
) -> bool:
    """Appends to the history. False when it says the same already (a prompt's activity that was delivered before)."""
    row = tx.first(
        RECORD,
        org_id=org_id,
        session_id=session_id,
        type=type,
        orchestrator_id=orchestrator_id,
        queue_id=queue_id,
        attempt=attempt,
        data=json.dumps(data),
    )
    return row is not None

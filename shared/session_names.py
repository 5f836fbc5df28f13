"""What Linear calls a session: its agent sessions, and the issue's names, which change when it moves to another team."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from shared.db import Tx, sql

IDENTIFY = sql("""
    update dispatch_sessions
       set linear_agent_session_id = coalesce(:agent_session_id, linear_agent_session_id),
           linear_identifier = coalesce(:identifier, linear_identifier), url = coalesce(:url, url),
           team_id = coalesce(:team_id, team_id), title = coalesce(:title, title),
           requested_at = greatest(requested_at, cast(:requested_at as timestamptz)), updated_at = now()
     where org_id = :org_id and id = :session_id
""")


def identify(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    agent_session_id: str | None = None,
    identifier: str | None = None,
    url: str | None = None,
    team_id: str | None = None,
    title: str | None = None,
    requested_at: datetime | None = None,
) -> None:
    """Notes what Linear calls the session now (its agent session, the issue's names after a move), and that it was asked for again."""
    tx.run(
        IDENTIFY,
        org_id=org_id,
        session_id=session_id,
        agent_session_id=agent_session_id,
        identifier=identifier,
        url=url,
        team_id=team_id,
        title=title,
        requested_at=requested_at,
    )


JOIN = sql("""
    insert into joined_agent_sessions (org_id, workspace_id, agent_session_id, session_id)
    values (:org_id, :workspace_id, :agent_session_id, :session_id)
    on conflict (org_id, workspace_id, agent_session_id) do update set session_id = excluded.session_id
""")


def join_agent_session(
    tx: Tx, *, org_id: UUID, workspace_id: UUID, session_id: UUID, agent_session_id: str
) -> None:
    """Notes one more agent session of Linear that stands for this work: a stop or a prompt in it is meant for it."""
    tx.run(
        JOIN,
        org_id=org_id,
        workspace_id=workspace_id,
        session_id=session_id,
        agent_session_id=agent_session_id,
    )

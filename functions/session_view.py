"""A session and its history as machines see them: absent where there is no value, never null."""

from __future__ import annotations

from typing import Any

from shared.dispatch_queue import Renewal
from shared.messages import timestamp
from shared.session_history import Event, Session


def session_view(found: Session) -> dict[str, Any]:
    """The session itself; `costUsd` in US dollars, times in ISO 8601 with `Z`."""
    view = {
        "id": str(found.id),
        "orgId": str(found.org_id),
        "workspaceId": str(found.workspace_id),
        "orchestratorId": None if found.orchestrator_id is None else str(found.orchestrator_id),
        "linearIssueId": found.linear_issue_id,
        "linearIdentifier": found.linear_identifier,
        "agentSessionId": found.linear_agent_session_id,
        "teamId": found.team_id,
        "title": found.title,
        "url": found.url,
        "repo": found.repo,
        "status": found.status,
        "progressPercent": found.progress_percent,
        "prUrl": found.pr_url,
        "summary": found.summary,
        "tokensUsed": found.tokens_used,
        "costUsd": None if found.cost_usd is None else float(found.cost_usd),
        "errorCode": found.error_code,
        "errorMessage": found.error_message,
        "createdAt": timestamp(found.created_at),
        "updatedAt": timestamp(found.updated_at),
        "startedAt": None if found.started_at is None else timestamp(found.started_at),
        "endedAt": None if found.ended_at is None else timestamp(found.ended_at),
    }
    return {name: value for name, value in view.items() if value is not None}


def event_view(event: Event) -> dict[str, Any]:
    """One entry of its history."""
    view = {
        "type": event.type,
        "orchestratorId": None if event.orchestrator_id is None else str(event.orchestrator_id),
        "queueId": None if event.queue_id is None else str(event.queue_id),
        "attempt": event.attempt,
        # A dead letter keeps the whole message; the machine has had it.
        "data": None if event.data is None else {k: v for k, v in event.data.items() if k != "payload"},
        "createdAt": timestamp(event.created_at),
    }
    return {name: value for name, value in view.items() if value is not None}


def news(renewal: Renewal, prompts_seen: int) -> dict[str, Any]:
    """What the machine must hear while it works: a request to stop, and follow-ups that it has not seen."""
    told: dict[str, Any] = {"cancelRequested": renewal.cancel_requested}
    if prompts := renewal.prompts[prompts_seen:]:
        told["prompts"] = prompts
    return told

"""What Linear changes under work that is there: a stop, and an issue's move to another team."""

from __future__ import annotations

from shared import deliveries, dispatch_queue, routing, session_history, session_names
from shared.db import Tx
from shared.heard import IGNORED, Heard, Outcome
from shared.linear_decisions import Start, Stop
from shared.linear_issue import Issue
from shared.session_history import Session


def stop(tx: Tx, heard: Heard, stop: Stop) -> Outcome:
    """Ends what is under way; a stop for something unknown is kept for the start that it has overtaken."""
    place = {"org_id": heard.org_id, "workspace_id": heard.workspace.id}
    session = None
    if stop.agent_session_id is not None:
        session = session_history.of_agent_session(tx, **place, agent_session_id=stop.agent_session_id)
    if session is None and stop.issue_id is not None:
        session = session_history.latest_of_issue(tx, **place, linear_issue_id=stop.issue_id)
        other = session is not None and session.linear_agent_session_id not in (None, stop.agent_session_id)
        if stop.agent_session_id is not None and other:
            session = None
    if session is not None and session.requested_at > heard.at:
        return Outcome(IGNORED, session.id, "the work was asked for after this stop")
    if session is None or (session.is_over and session.requested_at < heard.at):
        for subject in filter(None, (stop.agent_session_id, stop.issue_id)):
            deliveries.bury(tx, **place, subject=subject, stopped_at=heard.at)
    if session is None:
        return Outcome("stopped_before_it_started")
    done = dispatch_queue.cancel(
        tx, org_id=heard.org_id, session_id=session.id, reason=stop.reason, at=heard.at
    )
    return Outcome(done or "already_over", session.id)


def move(tx: Tx, heard: Heard, issue: Issue) -> Outcome:
    """Follows an issue to its new names; to another repository only while nobody is at work on it."""
    session = session_history.latest_of_issue(
        tx, org_id=heard.org_id, workspace_id=heard.workspace.id, linear_issue_id=issue.id
    )
    if session is None or session.is_over:
        return Outcome(IGNORED, why="nothing is under way on the issue")
    names = {
        "linearIdentifier": issue.identifier,
        "teamId": issue.team_id,
        "title": issue.title,
        "url": issue.url,
    }
    changes = {name: value for name, value in names.items() if value is not None}
    dispatch_queue.amend(tx, org_id=heard.org_id, session_id=session.id, changes=changes)
    session_names.identify(
        tx,
        org_id=heard.org_id,
        session_id=session.id,
        identifier=issue.identifier,
        url=issue.url,
        team_id=issue.team_id,
        title=issue.title,
    )
    if session.repo_was_said:
        return Outcome("moved", session.id, "a person named the repository")
    return _route_again(tx, heard, session, issue)


def _route_again(tx: Tx, heard: Heard, session: Session, issue: Issue) -> Outcome:
    """Where its new team's work goes, while nobody is at work on it."""
    start = Start(issue)
    routed = routing.route_issue(
        tx,
        org_id=heard.org_id,
        workspace_id=heard.workspace.id,
        issue=issue,
        directive=start.directive,
        agent_session_id=None,
        requested_at=heard.at,
        offline_after=heard.offline_after,
        preferred=session.orchestrator_id,
    )
    if routed.repo in (None, session.repo) or routed.orchestrator_id is None:
        return Outcome("moved", session.id)
    moved = dispatch_queue.redirect(
        tx,
        org_id=heard.org_id,
        session_id=session.id,
        orchestrator_id=routed.orchestrator_id,
        repo=str(routed.repo),
    )
    return Outcome("moved", session.id, "routed again" if moved else "a machine is at work on it already")

"""What Linear asks for becomes sessions and queue rows: one function per decision, all in the webhook's transaction."""

from __future__ import annotations

from uuid import UUID

from shared import (
    dead_letters,
    dispatch_queue,
    orchestrators,
    routing,
    session_history,
    session_names,
    sessions,
)
from shared.db import Tx
from shared.dead_letters import bury_undeliverable
from shared.dispatch_queue import enqueue_dispatch
from shared.heard import IGNORED, STARTED, Heard, Outcome
from shared.intake_changes import move, stop
from shared.linear_decisions import Decision, Ignored, Moved, Prompt, Revoked, Start, Stop
from shared.linear_issue import Input, Issue, issue_message
from shared.reopening import begin_again
from shared.routing import Routed
from shared.session_history import Session
from shared.sessions import Ended, NewSession, open_session


def subject_of(decision: Decision) -> str:
    """What events have to be about to be heard one by one: the issue, or the agent session where only that is known."""
    match decision:
        case Start(issue=issue) | Moved(issue=issue):
            return issue.id
        case Prompt() | Stop():
            return decision.issue_id or decision.agent_session_id or ""
        case Revoked() | Ignored():
            return ""


def act(tx: Tx, heard: Heard, decision: Decision) -> Outcome:
    """Carries out a decision."""
    match decision:
        case Start():
            return _start(tx, heard, decision)
        case Prompt():
            return _prompt(tx, heard, decision)
        case Stop():
            return stop(tx, heard, decision)
        case Moved():
            return move(tx, heard, decision.issue)
        case Revoked():
            routing.mark_revoked(
                tx, org_id=heard.org_id, workspace_id=heard.workspace.id, reason=decision.reason
            )
            return Outcome("revoked", why=decision.reason)
        case Ignored():
            return Outcome(IGNORED, why=decision.why)


# -- start --------------------------------------------------------------------------------------------------------------


def _start(tx: Tx, heard: Heard, start: Start) -> Outcome:
    """Opens a session and enqueues it: both are committed, or neither is."""
    routed = routing.route_issue(
        tx,
        org_id=heard.org_id,
        workspace_id=heard.workspace.id,
        issue=start.issue,
        directive=start.directive,
        agent_session_id=start.agent_session_id,
        requested_at=heard.at,
        offline_after=heard.offline_after,
    )
    if not routed.auto_dispatch:
        return Outcome(IGNORED, why="auto-dispatch is switched off for the team")
    new = _new_session(heard, start, routed)
    ended = _cannot_be_delivered(start, routed)
    message = issue_message(
        start.issue,
        workspace_id=str(heard.workspace.id),
        repo=routed.repo or "unknown/unknown",
        agent_session_id=start.agent_session_id,
        prompt_context=start.prompt_context,
        guidance=start.guidance,
        prompts=() if start.said is None else (start.said,),
    )
    if new.traceparent is not None:
        message["traceparent"] = new.traceparent
    session_id = open_session(tx, new, ended=ended, facts=_facts(start))
    if session_id is None:
        return _join(tx, heard, start)
    if ended is None:
        assert routed.orchestrator_id is not None
        enqueue_dispatch(
            tx,
            org_id=heard.org_id,
            orchestrator_id=routed.orchestrator_id,
            session_id=session_id,
            message=message,
        )
        return Outcome(STARTED, session_id)
    if ended.error_code is not None:
        bury_undeliverable(
            tx,
            org_id=heard.org_id,
            session_id=session_id,
            reason=ended.error_code,
            error=ended.message,
            payload=message,
            candidates=routed.candidates or orchestrators.repos_served(tx, org_id=heard.org_id),
        )
    return Outcome(ended.error_code or "stopped_before_it_started", session_id)


def _new_session(heard: Heard, start: Start, routed: Routed) -> NewSession:
    issue = start.issue
    return NewSession(
        org_id=heard.org_id,
        workspace_id=heard.workspace.id,
        linear_issue_id=issue.id,
        linear_identifier=issue.identifier,
        linear_agent_session_id=start.agent_session_id,
        team_id=issue.team_id,
        title=issue.title,
        url=issue.url,
        repo=routed.repo,
        orchestrator_id=routed.orchestrator_id,
        traceparent=heard.traceparent,
        requested_at=heard.at,
        repo_was_said=start.directive is not None,
    )


def _cannot_be_delivered(start: Start, routed: Routed) -> Ended | None:
    """Why there is nothing to enqueue. The session is recorded all the same: nobody is left with an issue on which nothing happens."""
    if routed.stopped:
        return Ended("cancelled", None, "stopped before it started")
    if routed.repo is None and routed.candidates:
        return Ended(
            "error", "no_route", f"it could be about {' or '.join(routed.candidates)}: say [repo=owner/name]"
        )
    if routed.repo is None:
        return Ended(
            "error",
            "no_route",
            f"no repository is set for {start.issue.identifier}'s team: say [repo=owner/name]",
        )
    if routed.orchestrator_id is None:
        return Ended("error", "no_orchestrator", f"no machine serves {routed.repo}")
    return None


def _facts(start: Start) -> dict[str, object]:
    facts = {
        "by": "mention" if start.mention else "agent session" if start.agent_session_id else "assignment",
        "askedBy": start.asked_by,
        "agentSessionId": start.agent_session_id,
        "said": None if start.said is None else start.said.as_dict(),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _join(tx: Tx, heard: Heard, start: Start) -> Outcome:
    """Another webhook of the same delegation was first, or somebody wants the same again: what this one knows besides is added."""
    known = session_history.latest_of_issue(
        tx, org_id=heard.org_id, workspace_id=heard.workspace.id, linear_issue_id=start.issue.id
    )
    if known is None:
        return Outcome(IGNORED, why="it was asked for before the issue's last session ended")
    changes: dict[str, str | None] = {}
    if start.agent_session_id is not None and known.linear_agent_session_id is None:
        changes = {
            "agentSessionId": start.agent_session_id,
            "promptContext": start.prompt_context,
            "guidance": start.guidance,
        }
    said = start.said
    if said is not None and (known.is_over or not _note_prompt(tx, heard, known.id, said)):
        said = None
    # The echo of a delegation, which is most of what comes here, says nothing new and changes nothing.
    if changes or said is not None or heard.at > known.requested_at:
        _add(tx, heard, known.id, changes, said)
    if (
        start.agent_session_id is not None
        and start.agent_session_id != known.linear_agent_session_id
        and not changes
    ):
        session_names.join_agent_session(
            tx,
            org_id=heard.org_id,
            workspace_id=heard.workspace.id,
            session_id=known.id,
            agent_session_id=start.agent_session_id,
        )
    return Outcome("joined", known.id)


def _add(tx: Tx, heard: Heard, session_id: UUID, changes: dict[str, str | None], said: Input | None) -> None:
    """Row first, then session, as everywhere."""
    dispatch_queue.amend(
        tx,
        org_id=heard.org_id,
        session_id=session_id,
        changes={name: value for name, value in changes.items() if value is not None},
        prompt=None if said is None else said.as_dict(),
        asked_at=heard.at,
    )
    session_names.identify(
        tx,
        org_id=heard.org_id,
        session_id=session_id,
        agent_session_id=changes.get("agentSessionId"),
        requested_at=heard.at,
    )


def _note_prompt(tx: Tx, heard: Heard, session_id: UUID, said: Input) -> bool:
    """False when this activity was noted before."""
    return sessions.record_event(
        tx, org_id=heard.org_id, session_id=session_id, type="prompted", data=said.as_dict()
    )


# -- prompt -------------------------------------------------------------------------------------------------------------


def _prompt(tx: Tx, heard: Heard, prompt: Prompt) -> Outcome:
    """Hands a follow-up to whoever is at work; if nobody is, the session begins anew with it."""
    session = session_history.of_agent_session(
        tx, org_id=heard.org_id, workspace_id=heard.workspace.id, agent_session_id=prompt.agent_session_id
    )
    if session is None:
        if prompt.issue is None:
            return Outcome(
                IGNORED, why="a prompt in an unknown session, on an issue that it does not describe"
            )
        start = Start(prompt.issue, prompt.agent_session_id, said=prompt.said, asked_by=prompt.asked_by)
        return _start(tx, heard, start)
    if session.is_over:
        latest = session_history.latest_of_issue(
            tx, org_id=heard.org_id, workspace_id=heard.workspace.id, linear_issue_id=session.linear_issue_id
        )
        session = latest if latest is not None and not latest.is_over else session
    if not _note_prompt(tx, heard, session.id, prompt.said):
        return Outcome("heard_before", session.id)
    amended = dispatch_queue.amend(
        tx,
        org_id=heard.org_id,
        session_id=session.id,
        prompt=prompt.said.as_dict(),
        asked_at=heard.at,
    )
    if amended is None:
        return _begin_anew(tx, heard, prompt, session)
    session_names.identify(tx, org_id=heard.org_id, session_id=session.id, requested_at=heard.at)
    return Outcome("prompted", session.id)


def _begin_anew(tx: Tx, heard: Heard, prompt: Prompt, session: Session) -> Outcome:
    """The session is over: it begins again, with what was said; after an end without delivery also with what had not been delivered."""
    repo = prompt.directive or session.repo
    if repo is None:
        return Outcome("no_route", session.id)
    kept = dead_letters.undelivered(tx, org_id=heard.org_id, session_id=session.id)
    if kept is not None:
        message = {**kept, "repo": repo, "prompts": [*kept.get("prompts", []), prompt.said.as_dict()]}
    else:
        issue = prompt.issue or Issue(
            session.linear_issue_id,
            session.linear_identifier,
            session.title,
            session.team_id,
            url=session.url,
        )
        message = issue_message(
            issue,
            workspace_id=str(heard.workspace.id),
            repo=repo,
            agent_session_id=prompt.agent_session_id,
            prompts=(prompt.said,),
        )
    begun = begin_again(
        tx,
        org_id=heard.org_id,
        session_id=session.id,
        message=message,
        offline_after=heard.offline_after,
        preferred=session.orchestrator_id,
        requested_at=heard.at,
    )
    if begun == "open_already":
        return Outcome(IGNORED, session.id, "the session was reopened meanwhile")
    return Outcome(begun, session.id)

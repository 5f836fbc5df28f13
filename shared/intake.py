"""What Linear asks for becomes sessions and queue rows: one function per decision, all in the webhook's transaction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from shared import dead_letters, deliveries, dispatch_queue, orchestrators, routing, session_history, sessions
from shared.db import Tx
from shared.dead_letters import bury_undeliverable
from shared.dispatch_queue import enqueue_dispatch
from shared.linear_decisions import Decision, Ignored, Moved, Prompt, Revoked, Start, Stop
from shared.linear_issue import Input, Issue, issue_message
from shared.reopening import begin_again
from shared.routing import Routed, Workspace
from shared.session_history import Session
from shared.sessions import Ended, NewSession, open_session


@dataclass(frozen=True, slots=True)
class Heard:
    """The circumstances of a verified event: whose it is, when it happened in Linear, and how long a machine may be silent (seconds)."""

    workspace: Workspace
    at: datetime
    offline_after: int
    traceparent: str | None = None

    @property
    def org_id(self) -> UUID:
        """The tenant."""
        return self.workspace.org_id


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of an event, the session that it concerned, and for whoever asks: why."""

    word: str
    session_id: UUID | None = None
    why: str | None = None

    def __str__(self) -> str:
        return self.word if self.why is None else f"{self.word}: {self.why}"


STARTED = "started"
IGNORED = "ignored"


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
            return _stop(tx, heard, decision)
        case Moved():
            return _move(tx, heard, decision.issue)
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
    dispatch_queue.amend(
        tx,
        org_id=heard.org_id,
        session_id=known.id,
        changes={name: value for name, value in changes.items() if value is not None},
        prompt=None if said is None else said.as_dict(),
        asked_at=heard.at,
    )
    sessions.identify(
        tx,
        org_id=heard.org_id,
        session_id=known.id,
        agent_session_id=changes.get("agentSessionId"),
        requested_at=heard.at,
    )
    if start.agent_session_id not in (None, known.linear_agent_session_id) and not changes:
        assert start.agent_session_id is not None
        sessions.join_agent_session(
            tx,
            org_id=heard.org_id,
            workspace_id=heard.workspace.id,
            session_id=known.id,
            agent_session_id=start.agent_session_id,
        )
    return Outcome("joined", known.id)


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
    sessions.identify(tx, org_id=heard.org_id, session_id=session.id, requested_at=heard.at)
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


# -- stop and move ------------------------------------------------------------------------------------------------------


def _stop(tx: Tx, heard: Heard, stop: Stop) -> Outcome:
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


def _move(tx: Tx, heard: Heard, issue: Issue) -> Outcome:
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
    sessions.identify(
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

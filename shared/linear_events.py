"""What an event of Linear asks for: one decision of a small closed set.

`decide` reads tolerantly and never raises. It decides from the event alone; what is already known (an open
session, an earlier stop, the same text delivered before) is the caller's to compare, inside its transaction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shared.linear_decisions import Decision, Ignored, Moved, Prompt, Revoked, Start, Stop
from shared.linear_fields import ident, name, record, records, text
from shared.linear_issue import (
    TEXT_LIMIT,
    Incomplete,
    Input,
    read_guidance,
    read_issue,
    reference,
)

Fields = Mapping[str, object]

OURS: Final = Ignored("our own action")
DELETED: Final = "the issue was deleted"
TAKEN: Final = "the issue was taken from the agent"


def decide(event: object, app_user_id: str | None) -> Decision:
    """What a verified event asks for.

    Args:
        event: the parsed body, whatever JSON it is.
        app_user_id: the agent's own user in this workspace; None while it is not known, and then an
            assignment cannot be told from anybody else's.
    """
    fields = record(event)
    match fields.get("type"), fields.get("action"):
        case "Issue", "create" | "update" | "remove":
            return _issue_event(fields, app_user_id)
        case "AgentSessionEvent", "created" | "prompted":
            return _agent_session_event(fields, app_user_id)
        case "AppUserNotification", "issueUnassignedFromYou":
            return _unassigned(fields, app_user_id)
        case "AppUserNotification", "issueAssignedToYou":
            # One of three webhooks of one delegation. It has no labels and no project: starting from it would
            # route the same issue differently depending on which of the three arrives first.
            return Ignored("the assignment is read from the issue and the agent session")
        case "AppUserNotification", _:
            return Ignored("a notification that changes no work")
        case "Comment", _:
            # What a comment asks of the agent arrives as an agent session's event; heeding both would ask
            # twice.
            return Ignored("comments are read from the agent session")
        case "OAuthApp", "revoked":
            return Revoked("the app was removed from the Linear workspace")
        case "PermissionChange", _:
            return _permission_change(fields)
    return Ignored("an event of no interest")


# -- issues --------------------------------------------------------------------------------------------------

# Linear has a state type of its own for duplicates; nobody is to work on such an issue either.
_CLOSED: Final = ("completed", "canceled", "duplicate")


def _issue_event(event: Fields, app_user_id: str | None) -> Decision:
    data, actor = record(event.get("data")), record(event.get("actor"))
    updated_from = record(event.get("updatedFrom")) if event["action"] == "update" else {}
    issue_id = ident(data.get("id"))
    if issue_id is None:
        return Ignored("an issue without an id")
    if app_user_id is not None and ident(actor.get("id")) == app_user_id:
        return OURS
    if event["action"] != "create":
        over = DELETED if event["action"] == "remove" else _over(data, updated_from, actor, app_user_id)
        if over is not None:
            return Stop(over, issue_id=issue_id)
    gained = app_user_id is not None and app_user_id in _new_owners(event, data, updated_from, app_user_id)
    moved = "teamId" in updated_from
    if not gained and not moved:
        return Ignored("nothing in it changes the agent's work")
    issue = read_issue(data)
    if isinstance(issue, Incomplete):
        return Ignored(f"an issue without {' and '.join(issue.missing)}")
    return Start(issue, asked_by=name(actor.get("name"))) if gained else Moved(issue)


def _new_owners(event: Fields, data: Fields, updated_from: Fields, app_user_id: str) -> set[str | None]:
    """Whom the event made assignee or delegate.

    What an update changed are the members of `updatedFrom`: the old value is often null, and asking for a
    truthy one would miss exactly the assignment of an issue that nobody had.
    """
    changed = [
        field
        for field in ("assignee", "delegate")
        if event["action"] == "create"
        or (f"{field}Id" in updated_from and ident(updated_from.get(f"{field}Id")) != app_user_id)
    ]
    return {reference(data, field) for field in changed}


def _over(data: Fields, updated_from: Fields, actor: Fields, app_user_id: str | None) -> str | None:
    """Why an updated issue is not to be worked on, or None."""
    if data.get("trashed") is True:
        return "the issue is in the trash"
    if text(data.get("archivedAt")) is not None:
        return "the issue was archived"
    owners = {reference(data, "assignee"), reference(data, "delegate")}
    before = {ident(updated_from.get("assigneeId")), ident(updated_from.get("delegateId"))}
    if app_user_id is not None and app_user_id in before - owners:
        return TAKEN
    # Only as a change: an issue that is done already can be delegated again, and editing it later must not
    # stop that work. Only by a human: an integration closes the issue when the agent's own pull request is
    # merged, before the agent has reported.
    state = text(record(data.get("state")).get("type"))
    by_human = bool(actor) and text(actor.get("type")) in ("user", None)
    if state in _CLOSED and "stateId" in updated_from and by_human:
        return f"the issue was marked {state}"
    return None


# -- agent sessions ------------------------------------------------------------------------------------------

# Linear opens the thread of a delegation with a comment that nobody wrote. As a prompt it would be an
# instruction without content.
_STUB = "This thread is for an agent session"
_STUB_IN_CONTEXT = re.compile(rf"<comment\b[^<>]*>\s*{_STUB}[^<]*</comment>\s*", re.IGNORECASE)
_EMPTY_THREAD = re.compile(r"<primary-directive-thread\b[^<>]*>\s*</primary-directive-thread>\s*")

# Signals that accompany a person's text; `stop` is the one that replaces it. An unknown one changes what the
# text means.
_SIGNALS_OF_TEXT: Final = (None, "continue", "select", "auth")


def _agent_session_event(event: Fields, app_user_id: str | None) -> Decision:
    session, activity = record(event.get("agentSession")), record(event.get("agentActivity"))
    addressee = ident(event.get("appUserId")) or ident(session.get("appUserId"))
    if app_user_id is not None and addressee is not None and addressee != app_user_id:
        return Ignored("it is addressed to another agent")
    session_id = ident(session.get("id")) or ident(activity.get("agentSessionId"))
    if session_id is None:
        return Ignored("an agent session without an id")
    us = app_user_id or addressee
    if event["action"] == "created":
        return _created(event, session, session_id, us)
    return _prompted(session, activity, session_id, us)


def _created(event: Fields, session: Fields, session_id: str, us: str | None) -> Decision:
    if us is not None and reference(session, "creator") == us:
        return OURS
    context = text(event.get("promptContext"), TEXT_LIMIT)
    issue = read_issue(record(session.get("issue")), context)
    if isinstance(issue, Incomplete):
        # Also a session on a document or a project: no machine could be told what to work on.
        return Ignored(f"an agent session on an issue without {' and '.join(issue.missing)}")
    mention = text(record(session.get("sourceMetadata")).get("type")) == "comment"
    return Start(
        issue,
        agent_session_id=session_id,
        mention=mention,
        said=_said_first(event, session, mention=mention),
        prompt_context=context and _without_stub(context),
        guidance=read_guidance(event.get("guidance")),
        asked_by=name(record(session.get("creator")).get("name")),
    )


def _said_first(event: Fields, session: Fields, *, mention: bool) -> Input | None:
    """What was said as the session began: the activity's text, or the comment that the session comes from."""
    activity = record(event.get("agentActivity"))
    comments = [record(session.get("comment")), *records(event.get("previousComments"))]
    source = ident(session.get("sourceCommentId"))
    comment = next(
        (item for item in comments if source is not None and ident(item.get("id")) == source), comments[0]
    )
    said = _input(activity.get("id"), record(activity.get("content")).get("body"))
    # A comment without an author that is no mention is Linear's own, whatever its wording has become.
    if said is None and (mention or ident(comment.get("userId")) is not None):
        said = _input(comment.get("id"), comment.get("body"))
    return said


def _input(activity_id: object, body: object) -> Input | None:
    known_id, written = ident(activity_id), text(body, TEXT_LIMIT)
    if known_id is None or written is None or written.lstrip().lower().startswith(_STUB.lower()):
        return None
    return Input(known_id, written)


def _without_stub(context: str) -> str | None:
    return _EMPTY_THREAD.sub("", _STUB_IN_CONTEXT.sub("", context)).strip() or None


def _prompted(session: Fields, activity: Fields, session_id: str, us: str | None) -> Decision:
    if us is not None and reference(activity, "user") == us:
        return OURS
    issue_id = reference(session, "issue")
    signal = text(activity.get("signal"))
    if signal == "stop":
        return Stop("stopped in Linear", issue_id=issue_id, agent_session_id=session_id)
    if signal not in _SIGNALS_OF_TEXT:
        return Ignored("a prompt with an unknown signal")
    said = _input(activity.get("id"), record(activity.get("content")).get("body"))
    if said is None:
        return Ignored("a prompt without an id or a text")
    issue = read_issue(record(session.get("issue")))
    return Prompt(
        session_id,
        said,
        issue_id=issue_id,
        issue=None if isinstance(issue, Incomplete) else issue,
        asked_by=name(record(activity.get("user")).get("name")),
    )


# -- the agent's own user ------------------------------------------------------------------------------------


def _unassigned(event: Fields, app_user_id: str | None) -> Decision:
    notification = record(event.get("notification"))
    addressee = ident(event.get("appUserId")) or ident(notification.get("userId"))
    if app_user_id is not None and addressee is not None and addressee != app_user_id:
        return Ignored("it is addressed to another agent")
    us = app_user_id or addressee
    if us is not None and reference(notification, "actor") == us:
        return OURS
    issue_id = reference(notification, "issue")
    if issue_id is None:
        return Ignored("an unassignment without an issue")
    return Stop(TAKEN, issue_id=issue_id)


def _permission_change(event: Fields) -> Decision:
    added, removed = event.get("addedTeamIds"), event.get("removedTeamIds")
    if isinstance(added, list) and added and not removed:
        return Ignored("the app may see more teams than before")
    count = len(removed) if isinstance(removed, list) else 0
    lost = f": {count} of its teams removed" if count else ""
    return Revoked(f"the app's access to teams was changed in Linear{lost}")

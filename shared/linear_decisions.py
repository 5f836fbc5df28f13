"""What an event of Linear leads to: `linear_events.decide` decides, the webhook carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from shared.linear_issue import Input, Issue, repo_directive


@dataclass(frozen=True, slots=True)
class Start:
    """Work on an issue is wanted: it was assigned or delegated to the agent, or a comment mentioned it.

    `said` is the text of the mention; `asked_by` the name of the person, where Linear gives one.
    """

    issue: Issue
    agent_session_id: str | None = None
    mention: bool = False
    said: Input | None = None
    prompt_context: str | None = None
    guidance: str | None = None
    asked_by: str | None = None

    @property
    def directive(self) -> str | None:
        """The repository named by `[repo=…]`: in what was said now, or else in the description."""
        return repo_directive(self.said.body if self.said else None) or repo_directive(self.issue.description)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A follow-up in an agent session. `issue` is None where the event does not describe it wholly."""

    agent_session_id: str
    said: Input
    issue_id: str | None
    issue: Issue | None = None
    asked_by: str | None = None

    @property
    def directive(self) -> str | None:
        """As of a Start: the answer to "which repository?" may be one."""
        return repo_directive(self.said.body) or repo_directive(
            self.issue.description if self.issue else None
        )


@dataclass(frozen=True, slots=True)
class Stop:
    """The work is not wanted any more. At least one of the ids is known.

    With `agent_session_id` it is that session which stops; the issue's id is for a session that has not yet
    been told its agent session, because another webhook of the same delegation opened it.
    """

    reason: str
    issue_id: str | None = None
    agent_session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """The issue is in another team now and has other names. Its id is the same."""

    issue: Issue


@dataclass(frozen=True, slots=True)
class Revoked:
    """The app lost access to the workspace or to a part of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing is to be done, and `why`: kept with the delivery for whoever asks why an event did nothing."""

    why: str


Decision = Start | Prompt | Stop | Moved | Revoked | Ignored

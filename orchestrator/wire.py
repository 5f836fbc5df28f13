"""What the server says, as far as this program reads it; `docs/protocol.md` has the whole.

Read by hand, not by pydantic: the program has to run from one file on any machine with Python, so nothing in it is compiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

REQUIRED: Final = (
    "messageId",
    "sessionId",
    "queueId",
    "orgId",
    "workspaceId",
    "linearIssueId",
    "linearIdentifier",
    "title",
    "teamId",
    "repo",
    "targetOrchestratorId",
    "dispatchedAt",
)
"""The published protocol's required fields of a message: strings that are not empty."""

PATH_SAFE: Final = re.compile(r"(?!\.\.?$)[A-Za-z0-9._~-]{1,200}")


class Unreadable(Exception):
    """The server's answer is not what the protocol says; names the field."""


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of work. `fields` is the whole message as received, with what this program does not know."""

    fields: Mapping[str, Any]
    queue_id: str
    session_id: str
    identifier: str
    title: str
    repo: str

    @classmethod
    def read(cls, value: Any) -> Self:
        """Raises Unreadable for a message without its required fields, or whose ids could change a path."""
        if not isinstance(value, dict):
            raise Unreadable("message: is not an object")
        for name in REQUIRED:
            if not isinstance(value.get(name), str) or not value[name]:
                raise Unreadable(f"message.{name}: is not a string with something in it")
            if not value[name].isascii() and value[name] != value[name].encode("utf-8", "replace").decode():
                raise Unreadable(f"message.{name}: is not Unicode")
        for name in ("queueId", "sessionId"):
            if not PATH_SAFE.fullmatch(value[name]):
                raise Unreadable(f"message.{name}: is not an id")
        return cls(
            value,
            value["queueId"],
            value["sessionId"],
            value["linearIdentifier"],
            value["title"],
            value["repo"],
        )

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The follow-ups so far, oldest first."""
        found = self.fields.get("prompts")
        return [prompt for prompt in found if isinstance(prompt, dict)] if isinstance(found, list) else []


class Held(NamedTuple):
    """A claim by its names: `(queue_id, attempt)` is what the server fences by; the others are for paths and people."""

    queue_id: str
    session_id: str
    identifier: str
    attempt: int | None


class Claim(NamedTuple):
    """A message that is this machine's now. A server of the original protocol says neither attempt nor lease (seconds)."""

    message: Message
    attempt: int | None
    lease: float | None

    @property
    def held(self) -> Held:
        """Its names."""
        return Held(self.message.queue_id, self.message.session_id, self.message.identifier, self.attempt)


class Polled(NamedTuple):
    """What waits, when to look again (seconds; None: the server has no opinion), and the claims to stop, by queue id."""

    messages: list[Message]
    poll_after: float | None
    stop: frozenset[str]


class News(NamedTuple):
    """What the server says to a renewal or a report: whether to stop, and the follow-ups that were not seen yet."""

    stop: bool
    prompts: list[dict[str, Any]]


class Registration(NamedTuple):
    """Who this machine is. `realtime`: the credentials for wake-ups, where the server has any."""

    orchestrator_id: str
    realtime: Mapping[str, Any] | None


class Completion(NamedTuple):
    """How the work ended, with the names of the protocol: `success` and any of `prUrl summary tokensUsed costUsd errorMessage`.

    `prompts_seen`: how many follow-ups the agent was given; what came in besides begins the session anew.
    """

    success: bool
    facts: Mapping[str, Any]
    prompts_seen: int = 0


class Release(NamedTuple):
    """The work goes back to the queue, for this reason."""

    error: str


def number(value: Any) -> float | None:
    """A JSON number that is not negative, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None  # Python's json reads NaN, too

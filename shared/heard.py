"""An event of Linear on its way through the webhook: its circumstances, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from shared.routing import Workspace


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

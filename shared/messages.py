"""The wire between functions and orchestrators: DevPilot's published bridge protocol, and what we add to it (always optional).

Models of requests refuse wrong types and sizes with the field's name and ignore fields they do not know: clients of other versions
must keep working. Answers carry no null and no field without a value.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

MAX_JOBS = 64


def _repo(value: str) -> str:
    owner, slash, name = value.partition("/")
    if not (slash and owner and name) or "/" in name or any(part.isspace() for part in value):
        raise ValueError("must be owner/name")
    return value


def _http_url(value: str) -> str:
    if not value.lower().startswith(("http://", "https://")):
        raise ValueError("must be an http or https URL")
    return value


Repo = Annotated[str, StringConstraints(max_length=200), AfterValidator(_repo)]
Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]
Attempt = Annotated[int, Field(ge=1, le=1_000_000)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class RegisterRequest(_Request):
    """`POST /api/orchestrators/register`"""

    name: Annotated[str, StringConstraints(min_length=1, max_length=120, strip_whitespace=True)]
    repos: Annotated[list[Repo], Field(max_length=1000)]
    maxConcurrentJobs: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 4


class HeartbeatRequest(_Request):
    """`POST /api/orchestrators/:id/heartbeat`"""

    activeJobs: Annotated[int, Field(ge=0, le=10_000)] | None = None


class ClaimManyRequest(_Request):
    """`POST /api/dispatch/claim`"""

    limit: Annotated[int, Field(ge=1, le=MAX_JOBS)] = 1


class RenewRequest(_Request):
    """`POST /api/dispatch/:queueId/renew`. `promptsSeen`: how many follow-ups of this message the machine has already."""

    attempt: Attempt | None = None
    promptsSeen: Annotated[int, Field(ge=0, le=100_000)] = 0


class ReleaseRequest(_Request):
    """`POST /api/dispatch/:queueId/release`"""

    error: Annotated[str, StringConstraints(max_length=10_000)] = "released without a reason"
    attempt: Attempt | None = None


class StatusRequest(_Request):
    """`POST /api/sessions/:id/status`"""

    status: Literal["pending", "dispatched", "running", "complete", "error", "cancelled"]
    progressPercent: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    message: Annotated[str, StringConstraints(max_length=2_000)] | None = None
    attempt: Attempt | None = None
    queueId: Id | None = None
    promptsSeen: Annotated[int, Field(ge=0, le=100_000)] = 0


class CompleteRequest(_Request):
    """`POST /api/sessions/:id/complete`. `costUsd` in US dollars. `promptsSeen`: how many follow-ups the agent was given."""

    success: bool
    prUrl: Annotated[str, StringConstraints(max_length=2_000), AfterValidator(_http_url)] | None = None
    summary: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    tokensUsed: Annotated[int, Field(ge=0, le=2**53)] | None = None
    costUsd: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] | None = None
    errorMessage: Annotated[str, StringConstraints(max_length=10_000)] | None = None
    attempt: Attempt | None = None
    queueId: Id | None = None
    promptsSeen: Annotated[int, Field(ge=0, le=100_000)] | None = None


def timestamp(moment: datetime) -> str:
    """ISO 8601 in UTC, milliseconds, ending in `Z`: the published client refuses `+00:00`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def dispatch_message(
    payload: dict[str, Any],
    *,
    org_id: UUID,
    orchestrator_id: UUID,
    queue_id: UUID,
    session_id: UUID,
    created_at: datetime,
) -> dict[str, Any]:
    """The wire message of a queue row: the issue's part, and the ids and times that only the row knows.

    The machine's id comes from the row, so that the message follows a re-routing; the message's id is the row's, so that every
    delivery of one row is recognisably the same message.
    """
    return {
        **payload,
        "messageId": str(queue_id),
        "queueId": str(queue_id),
        "sessionId": str(session_id),
        "orgId": str(org_id),
        "targetOrchestratorId": str(orchestrator_id),
        "dispatchedAt": timestamp(created_at),
    }

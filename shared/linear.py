"""The door for Linear's webhooks: is it signed, is it fresh, whom does it concern, when did it happen.

Pure: no database, no HTTP. What an event asks for is in `linear_events`, the issue itself in `linear_issue`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from shared.errors import Unauthenticated
from shared.linear_fields import ident, name, record

FUTURE_BOUND_SECONDS: Final = 60
OLD_AFTER_SECONDS: Final = 60
"""Older is not a first delivery on a healthy day: accepted if never heard before, and counted in the log."""

# Epoch milliseconds between 2001 and 5138. Epoch seconds fall below, and so no setting of the past bound can
# let them in.
_EARLIEST_MS, _LATEST_MS = 10**12, 10**14

# Lowercase as Linear writes it: one spelling of a signature, not 2^n of them.
_SIGNATURE = re.compile(r"(?:sha256=)?([0-9a-f]{64})")


def verify(body: bytes, signature: str | None, secrets: Sequence[str]) -> bool:
    """Whether one of the secrets signed exactly these bytes.

    Args:
        body: as received. Parsed and serialised again, the same event has other bytes.
        signature: the `Linear-Signature` header: HMAC-SHA256 in lowercase hex, with or without `sha256=` in
            front.
        secrets: two while a rotation is under way. An empty one signs nothing: anybody could have used it.
    """
    given = _SIGNATURE.fullmatch(signature or "")
    if given is None:
        return False
    verified = False
    for secret in filter(None, secrets):
        # Every secret is tried and every comparison takes the same time: the answer's delay tells neither
        # which one nor how much matched.
        verified |= hmac.compare_digest(hmac.digest(secret.encode(), body, "sha256").hex(), given[1])
    return verified


def age_of(event: object, *, now_ms: float, max_age_seconds: float) -> float:
    """How long ago the event was signed, in seconds; negative if the sender's clock is ahead.

    The age is read from the signed `webhookTimestamp`: the timestamp header can be forged. `now_ms` (epoch
    milliseconds) is the application's clock, here alone: a replay has to be refused before the database is
    touched.

    Raises Unauthenticated when the timestamp is not a finite number of epoch milliseconds, is more than 60 s
    ahead, or is older than `max_age_seconds`.
    """
    sent = record(event).get("webhookTimestamp")
    # The comparison is false for NaN and for true (an int to Python), and works for an integer too large for
    # a float.
    if not isinstance(sent, int | float) or not _EARLIEST_MS <= sent <= _LATEST_MS:
        raise Unauthenticated("webhookTimestamp must be a number of epoch milliseconds")
    age = (now_ms - sent) / 1000
    if age < -FUTURE_BOUND_SECONDS:
        raise Unauthenticated("webhookTimestamp lies in the future")
    if age > max_age_seconds:
        raise Unauthenticated("webhookTimestamp is too old")
    return age


class Envelope(NamedTuple):
    """What every event says of itself. `app_user_id`: the agent's own user, in events addressed to it."""

    type: str
    action: str
    linear_organization_id: str | None
    app_user_id: str | None
    event_time: datetime


def envelope(event: object) -> Envelope:
    """Reads the outside of an event; unknown types and actions are as good as known ones here."""
    fields = record(event)
    return Envelope(
        type=name(fields.get("type")) or "unknown",
        action=name(fields.get("action")) or "unknown",
        linear_organization_id=ident(fields.get("organizationId")),
        app_user_id=ident(fields.get("appUserId")),
        event_time=_event_time(fields.get("createdAt"), fields.get("webhookTimestamp")),
    )


def _event_time(created_at: object, sent: object) -> datetime:
    """When it happened in Linear: a stop and a start are ordered by this, however they arrive."""
    if isinstance(created_at, str):
        try:
            moment = datetime.fromisoformat(created_at)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    if isinstance(sent, int | float) and _EARLIEST_MS <= sent <= _LATEST_MS:
        return datetime.fromtimestamp(sent / 1000, UTC)
    # An event that does not say when it happened overrules none that does.
    return datetime.fromtimestamp(0, UTC)

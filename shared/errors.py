"""One class per decision a caller makes. The class's docstring is the message that the user reads.

`functions/web.py` holds the one table that turns these into HTTP answers; `infra/admin` turns them into exit codes.
"""

from __future__ import annotations

from typing import Any


class DispatchError(Exception):
    """Something went wrong in dispatch."""

    def __init__(self, message: str | None = None, **details: Any) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        self.message: str = self.args[0]
        self.details: dict[str, Any] = details


class Unauthenticated(DispatchError):
    """The credential is missing, malformed, unknown, expired or revoked."""


class Forbidden(DispatchError):
    """The credential is valid, but not for this."""


class NotFound(DispatchError):
    """There is no such thing here."""


class InvalidRequest(DispatchError):
    """The request cannot be read; `field` names the part that is wrong."""

    def __init__(self, message: str, *, field: str, **details: Any) -> None:
        super().__init__(message, field=field, **details)


class BodyTooLarge(DispatchError):
    """The body is larger than this route accepts."""


class MethodNotAllowed(DispatchError):
    """The route does not answer this method."""


class ClaimLost(DispatchError):
    """The claim is not held any more: another attempt started, it was released, or another machine was faster."""


class MachineFull(DispatchError):
    """The machine already holds as many claims as its concurrency limit allows."""


class Conflict(DispatchError):
    """The request contradicts what is already there."""


class RateLimited(DispatchError):
    """Too many requests."""


class DatabaseUnavailable(DispatchError):
    """The database cannot be reached or gave up; nothing was changed, try again."""


class SchemaOutdated(DispatchError):
    """The database's schema is older than this code."""


class ConfigurationError(DispatchError):
    """A setting is unknown, missing or malformed; the message names the variable."""

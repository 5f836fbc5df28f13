"""What the functions know of HTTP: requests and answers without a cloud, and the one table that turns errors into answers.

Errors: `{"error": {"code", "message", "details"?}}`. The codes are the published bridge protocol's; a client drops any other.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from functions.json_body import parse_object, path_text
from shared.db import SCHEMA_REVISION, schema_revision, transaction
from shared.errors import (
    BodyTooLarge,
    ClaimLost,
    Conflict,
    DatabaseUnavailable,
    DispatchError,
    Forbidden,
    InvalidRequest,
    MachineFull,
    MethodNotAllowed,
    NotFound,
    RateLimited,
    SchemaOutdated,
    Unauthenticated,
)
from shared.log import log, log_exception, log_request
from shared.one_flight import error_code, is_connection_failure

if TYPE_CHECKING:
    from functions.app import App

ANSWERS: Final[dict[type[DispatchError], tuple[int, str]]] = {
    Unauthenticated: (401, "unauthenticated"),
    Forbidden: (403, "forbidden"),
    NotFound: (404, "not_found"),
    InvalidRequest: (400, "invalid_request"),
    BodyTooLarge: (413, "invalid_request"),
    MethodNotAllowed: (405, "invalid_request"),
    ClaimLost: (409, "conflict"),
    MachineFull: (409, "conflict"),
    Conflict: (409, "conflict"),
    RateLimited: (429, "rate_limited"),
    DatabaseUnavailable: (503, "service_unavailable"),
    SchemaOutdated: (503, "service_unavailable"),
}
"""The table. What is not in it is our mistake: 500 `internal`, without a word about it outside of the log."""

RETRY_AFTER: Final[dict[type[DispatchError], int]] = {
    DatabaseUnavailable: 5,
    SchemaOutdated: 30,
    RateLimited: 30,
}
"""Seconds, unless the error knows better."""

# Cancelled by a timeout, lock not available, serialization failure, deadlock: rolled back, and right as soon as others are done.
CONTENTION: Final = frozenset({"57014", "55P03", "40001", "40P01"})
# No such table, column or function: what code meets that is newer than its database.
UNKNOWN_TO_THE_DATABASE: Final = frozenset({"42P01", "42703", "42883"})


@dataclass(frozen=True, slots=True)
class Request:
    """A request. Header names in lower case; `body` as received."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; a `body` of None has no bytes (204)."""

    status: int
    body: dict[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def error(
        cls,
        status: int,
        code: str,
        message: str,
        details: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The envelope of every answer that is not a success."""
        body: dict[str, Any] = {"code": code, "message": message}
        if details:
            body["details"] = dict(details)
        return cls(status, {"error": body}, headers or {})

    def encoded(self) -> tuple[bytes, dict[str, str]]:
        """Bytes and headers for the cloud's own response."""
        headers = {"cache-control": "no-store", **self.headers}
        if self.body is None:
            return b"", headers
        headers["content-type"] = "application/json"
        return json.dumps(self.body, separators=(",", ":"), allow_nan=False, default=str).encode(), headers


@dataclass(frozen=True, slots=True)
class Route:
    """`path` may hold `{names}`; they reach the handler as keyword arguments: `handler(app, request, **names)`."""

    method: str
    path: str
    handler: Callable[..., Response]
    pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)))


def match(routes: Sequence[Route], request: Request) -> tuple[Route, dict[str, str]]:
    """The route of a request and the names in its path. A trailing slash is the same path, HEAD the same as GET.

    Raises NotFound, or MethodNotAllowed with the methods that the path does answer.
    """
    path = request.path.removesuffix("/") or "/"
    method = "GET" if request.method == "HEAD" else request.method
    others = set()
    for route in routes:
        if found := route.pattern.fullmatch(path):
            if route.method == method:
                return route, found.groupdict()
            others.add(route.method)
    if others:
        raise MethodNotAllowed(f"this path answers {', '.join(sorted(others))} only", allow=sorted(others))
    raise NotFound("no such route")


def bearer_token(request: Request) -> str:
    """The credential of `Authorization: Bearer …`. Raises Unauthenticated without one."""
    scheme, _, token = request.headers.get("authorization", "").strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated("the request carries no bearer token")
    # RFC 6750 section 2.1; and what is longer or contains anything else was never issued.
    if len(token) > 4096 or not re.fullmatch(r"[A-Za-z0-9._~+/-]+=*", token):
        raise Unauthenticated("the bearer token is malformed")
    return token


def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body's JSON object; `{}` for an empty body, because the published client labels body-less requests as JSON too.

    Args:
        limit: bytes.

    Raises BodyTooLarge, or InvalidRequest that names the field (`body` for the whole).
    """
    if len(request.body) > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes", field="body", limitBytes=limit)
    return parse_object(request.body)


def read_event(request: Request, limit: int) -> dict[str, Any]:
    """A signed event's JSON object. Only what is no JSON at all is refused: the sender repeats what was refused, and cannot mend it, so
    the reader of its fields is the one that is strict.

    Args:
        limit: bytes.

    Raises BodyTooLarge, or InvalidRequest.
    """
    if len(request.body) > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes", field="body", limitBytes=limit)
    return parse_object(request.body, storable=False)


BODY_LIMIT: Final = 256 * 1024
"""Bytes: of what a machine sends."""

Body = TypeVar("Body", bound=BaseModel)


def body_of(model: type[Body], request: Request) -> Body:
    """What a machine has sent, checked. Raises BodyTooLarge, InvalidRequest, ValidationError."""
    return model.model_validate(read_json(request, BODY_LIMIT))


def integer_parameter(request: Request, name: str, *, default: int, minimum: int, maximum: int) -> int:
    """An integer of the query string. Raises InvalidRequest when it is none or out of range."""
    text = request.query.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,18}", text) or not minimum <= int(text) <= maximum:
        raise InvalidRequest(f"{name} must be an integer from {minimum} to {maximum}", field=name)
    return int(text)


def dispatch(routes: Sequence[Route], app: App, request: Request) -> Response:
    """Answers a request by its route; whatever happens becomes an answer and one line in the log."""
    started = time.perf_counter()
    with log_request(request.headers.get("traceparent")):
        route: Route | None = None
        try:
            route, names = match(routes, request)
            response = route.handler(app, request, **names)
        except Exception as error:  # noqa: BLE001 - the last line of defence: whoever called is owed an answer in the envelope
            response = _failure(app, error)
        log(
            "INFO" if response.status < 500 else "WARNING" if response.status == 503 else "ERROR",
            "answered",
            method=request.method,
            route=None if route is None else route.path,
            status=response.status,
            code=None if response.status < 400 or response.body is None else response.body["error"]["code"],
            duration_ms=round((time.perf_counter() - started) * 1000, 1),
        )
    return response


def _failure(app: App, error: Exception) -> Response:
    if isinstance(error, DispatchError):
        return error_response(error)
    if isinstance(error, ValidationError):
        return error_response(_invalid(error))
    if isinstance(error, PoolTimeout):
        return error_response(DatabaseUnavailable("all connections are busy, try again", retryAfterSeconds=1))
    if is_connection_failure(error):
        log_exception("the database cannot be reached", error, severity="WARNING")
        # Not "nothing was changed": when it went away during COMMIT, nobody knows.
        return error_response(DatabaseUnavailable("the database cannot be reached, try again"))
    code = error_code(error)
    if code in CONTENTION:
        log_exception("the database gave up on a statement", error, severity="WARNING")
        return error_response(
            DatabaseUnavailable("the database is busy; nothing was changed, try again", retryAfterSeconds=1)
        )
    if code in UNKNOWN_TO_THE_DATABASE and (outdated := _outdated(app)) is not None:
        log_exception("the schema is older than the code", error)
        return error_response(outdated)
    return error_response(error)


def error_response(error: Exception) -> Response:
    """The table applied: an error's status, code, text and headers."""
    known = ANSWERS.get(type(error)) if isinstance(error, DispatchError) else None
    if known is None or not isinstance(error, DispatchError):
        log_exception("a request failed", error)
        return Response.error(
            500, "internal", "something is wrong here, not with the request; it has been noted"
        )
    (status, code), details, headers = known, dict(error.details), {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if "allow" in details:
        headers["allow"] = ", ".join(details["allow"])
    if (seconds := details.get("retryAfterSeconds", RETRY_AFTER.get(type(error)))) is not None:
        headers["retry-after"] = str(seconds)
    return Response.error(status, code, error.message, details, headers)


def _invalid(error: ValidationError) -> InvalidRequest:
    """Which field and why; never the value, which may be anything."""
    first, *more = error.errors(include_url=False, include_context=False, include_input=False)
    name, reason = path_text(first["loc"]), first["msg"].removeprefix("Value error, ")
    others = {"others": [path_text(each["loc"]) for each in more[:9]]} if more else {}
    return InvalidRequest(f"{name}: {reason}", field=name, reason=reason, **others)


def _outdated(app: App) -> SchemaOutdated | None:
    try:
        with transaction(app.engine) as tx:
            found = schema_revision(tx)
    except (SQLAlchemyError, OSError) as error:
        if not isinstance(error, DBAPIError) or error_code(error) not in UNKNOWN_TO_THE_DATABASE:
            return None
        found = None
    if found is not None and found >= SCHEMA_REVISION:
        return None
    return SchemaOutdated(
        f"the database is at migration {found or 'none'}, this code needs {SCHEMA_REVISION}: run `python -m infra.admin migrate`",
        found=found or "none",
        needed=SCHEMA_REVISION,
    )

"""One JSON line per event on standard output, in the form that Cloud Logging and CloudWatch read.

What may be written is a closed list of names, each with its type: a payload, a token or a secret has no name here, so it cannot be
passed. Exceptions are written by class, SQLSTATE and our own frames, never by their text: a database error's text holds the binds.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, LiteralString
from uuid import UUID

from shared.errors import ConfigurationError

Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]

_RANK: Final = {"DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3, "CRITICAL": 4}
_ROOT: Final = str(Path(__file__).resolve().parent.parent) + "/"
_FRAMES: Final = (
    12  # the innermost ones: enough to find the place, and the line stays below any platform's limit
)

_Types = tuple[type, ...]
_ID: Final[_Types] = (UUID,)
_WORD: Final[_Types] = (str,)
_COUNT: Final[_Types] = (int,)
_NUMBER: Final[_Types] = (int, float)
_FLAG: Final[_Types] = (bool,)

FIELDS: Final[dict[str, _Types]] = {
    # whose, and which
    "org_id": _ID,
    "workspace_id": _ID,
    "orchestrator_id": _ID,
    "from_orchestrator_id": _ID,
    "session_id": _ID,
    "queue_id": _ID,
    "token_id": _ID,
    "attempt": _COUNT,
    "attempts": _COUNT,
    # a request
    "method": _WORD,
    "route": _WORD,
    "status": _COUNT,
    "duration_ms": _NUMBER,
    "code": _WORD,
    # a delivery
    "delivery_id": _WORD,
    "event": _WORD,
    "action": _WORD,
    "outcome": _WORD,
    "reason": _WORD,
    "age_seconds": _NUMBER,
    "signed_but_old": _FLAG,
    "size_bytes": _COUNT,
    # a tick of the sweep
    "released": _COUNT,
    "rerouted": _COUNT,
    "dropped": _COUNT,
    "cancelled": _COUNT,
    "purged": _COUNT,
    "failed": _COUNT,
    "depth": _COUNT,
    "oldest_claimable_age_seconds": _NUMBER,
    "finished": _FLAG,
    # the process
    "target": _WORD,
    "revision": _WORD,
    "expected_revision": _WORD,
    "count": _COUNT,
}
"""What an event may say besides its message. Words are short and plain: names of ours, never text of a user."""

_A_WORD: Final = re.compile(r"[A-Za-z0-9_.:/{}+ -]{0,128}")
_CREDENTIAL: Final = re.compile(r"dp_orch_|lin_(api|oauth|wh)_|^eyJ|^Bearer", re.IGNORECASE)
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

_lowest = _RANK["INFO"]
_request: ContextVar[dict[str, Any] | None] = ContextVar("request", default=None)


def log_from(severity: Severity) -> None:
    """Writes nothing below `severity` from now on."""
    global _lowest  # noqa: PLW0603 - one level for the process, set once at its start
    _lowest = _RANK[severity]


def log(severity: Severity, message: LiteralString, /, **fields: Any) -> None:
    """Writes one event.

    Args:
        message: what happened, a constant: whatever varies is a field.
        fields: see `FIELDS`; None is left out.

    Raises TypeError for a field that is not in the list or has another type: a mistake of the caller, found by the first test.
    """
    checked = _checked(fields)
    if _RANK[severity] >= _lowest:
        _write(severity, message, checked)


def log_exception(
    message: LiteralString, error: BaseException, /, *, severity: Severity = "ERROR", **fields: Any
) -> None:
    """Writes that something failed: the error's class, those of its causes, SQLSTATE and where in our code, never its text.

    A ConfigurationError's text is ours, holds no secret, and is what the operator needs: it is the one that is written.
    """
    checked = _checked(fields)
    checked["error"] = _class_name(error)
    if causes := [_class_name(cause) for cause in _causes(error)]:
        checked["causes"] = causes
    if sqlstate := _sqlstate(error):
        checked["sqlstate"] = sqlstate
    if isinstance(error, ConfigurationError):
        checked["configuration"] = error.message
    checked["stack"] = list(_own_frames(error.__traceback__))[-_FRAMES:]
    if _RANK[severity] >= _lowest:
        _write(severity, message, checked)


@contextmanager
def log_request(traceparent: str | None) -> Iterator[dict[str, Any]]:
    """Everything written inside carries the request's trace and what `note` has learnt; yields that.

    Args:
        traceparent: the W3C header; one of another form is not passed on.
    """
    match = _TRACEPARENT.fullmatch(traceparent or "")
    known: dict[str, Any] = {"trace": match[1], "traceparent": match[0]} if match else {}
    token = _request.set(known)
    try:
        yield known
    finally:
        _request.reset(token)


def note(**fields: Any) -> None:
    """Adds what became known (whose request this is) to every later line of this request. Outside of one it does nothing."""
    known = _request.get()
    if known is not None:
        known.update(_checked(fields))


def _checked(fields: dict[str, Any]) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            raise TypeError(f"{name!r} is not a field of the log")
        if value is None:
            continue
        # bool is an int to isinstance; a float may arrive as one of the driver's decimals only by mistake.
        if type(value) not in FIELDS[name]:
            raise TypeError(f"the log's field {name!r} does not take a {type(value).__name__}")
        if isinstance(value, str):
            checked[name] = (
                value if _A_WORD.fullmatch(value) and not _CREDENTIAL.search(value) else "(withheld)"
            )
        else:
            checked[name] = str(value) if isinstance(value, UUID) else value
    return checked


def _write(severity: str, message: str, fields: dict[str, Any]) -> None:
    line = json.dumps({"severity": severity, "message": message, **(_request.get() or {}), **fields})
    # One call: lines of parallel requests must not mix. Flushed: an instance may be frozen before the next line.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _class_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ in {"builtins", "shared.errors"}
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _sqlstate(error: BaseException) -> str | None:
    # Not at the top: a process that never fails need not load the driver to write a line.
    from shared.one_flight import error_code  # noqa: PLC0415

    return error_code(error)


def _own_frames(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(_ROOT) and "site-packages" not in code.co_filename:
            yield f"{code.co_filename.removeprefix(_ROOT)}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next

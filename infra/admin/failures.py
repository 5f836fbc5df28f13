"""What went wrong, in one sentence and an exit code: no traceback, no secret."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from shared.db import SCHEMA_REVISION
from shared.errors import ConfigurationError, DatabaseUnavailable, DispatchError, InvalidRequest
from shared.one_flight import error_code, is_connection_failure
from shared.settings import Settings

WRONG: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3

# 28: the credentials, 3D: no such database, 53: no room for another connection.
_REFUSED: Final = ("28", "3D", "53")
# A table, a column or a function that this code expects is not there.
_OLD_SCHEMA: Final = ("42P01", "42703", "42883")


def is_unreachable(error: BaseException) -> bool:
    """Whether the database could not be used at all, rather than one statement."""
    return is_connection_failure(error) or (error_code(error) or "").startswith(_REFUSED)


def exit_code(error: Exception) -> int:
    """1: something is wrong, not there or in conflict; 2: the words or the settings; 3: the database."""
    if isinstance(error, (ConfigurationError, InvalidRequest)):
        return USAGE
    if isinstance(error, DatabaseUnavailable) or (
        isinstance(error, (SQLAlchemyError, OSError)) and is_unreachable(error)
    ):
        return UNREACHABLE
    return WRONG


def explained(error: Exception, settings: Settings | None) -> str:
    """The sentence for an error.

    Args:
        settings: None while they are not known yet.
    """
    if isinstance(error, DispatchError):
        return error.message
    if isinstance(error, (SQLAlchemyError, OSError)) and settings is not None:
        return _of_the_database(error, settings)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"an error that should not happen: {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}; please report it"


def cannot_be_used(database_url: str, reason: str) -> str:
    """The sentence for a database that answers nothing, whoever finds out."""
    return f"the database at {_where(database_url)} cannot be used: {reason}"


def network_reason(cause: BaseException) -> str:
    """The innermost cause says what the network did; the outer ones say that it failed."""
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


def _of_the_database(error: Exception, settings: Settings) -> str:
    code = error_code(error)
    cause = getattr(error, "orig", None) or error
    details = cause.args[0] if cause.args and isinstance(cause.args[0], dict) else {}
    reason = details.get("M") or network_reason(cause)
    if is_unreachable(error):
        return cannot_be_used(settings.database_url.get_secret_value(), reason)
    if code in _OLD_SCHEMA:
        return f"the database's schema is missing or older than migration {SCHEMA_REVISION}: run `migrate` ({reason})"
    if not isinstance(error, DBAPIError):
        return f"the database at {_where(settings.database_url.get_secret_value())}: {type(error).__name__}"
    return f"the database refused this: {reason} ({code})"


def _where(database_url: str) -> str:
    url = make_url(database_url)
    return f"{url.host}:{url.port or 5432}"

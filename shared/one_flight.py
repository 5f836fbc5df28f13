"""One network flight per statement: a small subclass of the driver's connection.

pg8000 sends Parse, Bind and Execute in Sync cycles of their own: three round trips a statement, and behind a transaction-mode pooler a
chance for another client's statement in between. Here they travel together, BEGIN in front of the first statement, COMMIT as one simple
query. It leans on internals, so the driver's version is pinned and checked.
"""

from __future__ import annotations

import select
import time
from typing import Any, Final

import pg8000
import pg8000.legacy
from pg8000.core import EXECUTE_MSG, NULL_BYTE, SYNC_MSG, Context, make_params
from pg8000.exceptions import DatabaseError, InterfaceError
from pg8000.legacy import IntegrityError, ProgrammingError

WRITTEN_FOR: Final = "1.31.6"
if pg8000.__version__ != WRITTEN_FOR:
    raise ImportError(
        f"pg8000 {pg8000.__version__} is installed, but this code leans on the internals of {WRITTEN_FOR}"
    )

IDLE_SECONDS: Final = 30
PROBE_SECONDS: Final = 1.0


PARAMSTYLE: Final = "numeric_dollar"
"""What the engine must be told: statements arrive with `$1` already. The driver's own conversion looks at every character in Python,
0.4 ms for a long statement, on every execution."""


class Cursor(pg8000.legacy.Cursor):
    """A cursor that takes `$1` statements as they are."""

    _c: Connection
    _input_oids: Any

    def execute(self, operation: str, args: Any = (), stream: Any = None) -> Cursor:
        if not args or stream is not None:
            super().execute(operation, args, stream)
            return self
        if not self._c.in_transaction and not self._c.autocommit:
            self._c.execute_simple("begin transaction")
        try:
            self._context = self._c.execute_unnamed(operation, vals=args, oids=self._input_oids)
        except DatabaseError as error:
            details = error.args[0]
            code = details.get("C") if isinstance(details, dict) else None
            raise (IntegrityError if code == "23505" else ProgrammingError)(details) from None
        self._row_iter = iter(self._context.rows or [])
        self._input_oids = ()
        self.input_types: list[Any] = []
        return self


class Connection(pg8000.legacy.Connection):
    """A connection whose statements take one round trip each."""

    def __init__(self, *, timeout: float | None = None, **options: Any) -> None:
        self._begin = "begin"
        self._pending: list[str] = []
        self._broken = False
        self._timeout = timeout
        self._used = time.time()
        super().__init__(timeout=timeout, **options)

    def cursor(self) -> Cursor:
        return Cursor(self)

    @property
    def in_transaction(self) -> bool:
        """What the server said last."""
        return bool(self._in_transaction)

    def begin_with(self, text: str) -> None:
        """The next statement opens its transaction with these parameterless statements, separated by `; `, in the same flight."""
        self._begin = text

    def execute_simple(self, statement: str) -> Context:
        if statement == "begin transaction":
            self._pending, self._begin = self._begin.split("; "), "begin"
            return Context(statement)
        if self._pending and ";" not in statement.rstrip("; \n"):
            return self.execute_unnamed(statement)
        if self._pending:
            self.execute_unnamed(self._pending.pop())
        return self._guarded(self._simple, statement)

    def _simple(self, statement: str) -> Context:
        return super().execute_simple(statement)

    def execute_unnamed(self, statement: str, vals: Any = (), oids: Any = (), stream: Any = None) -> Context:
        if stream is not None:
            raise InterfaceError("COPY does not go through this connection")
        return self._guarded(self._flight, statement, vals, oids)

    def _flight(self, statement: str, vals: Any, oids: Any) -> Context:
        """Everything before one Sync: the server skips whatever follows an error, so a statement never runs outside its transaction."""
        context = Context(statement)
        params = make_params(self.py_types, vals)
        before, self._pending = self._pending, []
        for text in before:
            self.send_PARSE(NULL_BYTE, text)
            self.send_BIND(NULL_BYTE, ())
            self._sock.write(EXECUTE_MSG)
        self.send_PARSE(NULL_BYTE, statement, oids)
        self.send_BIND(NULL_BYTE, params)
        self._send_message(b"D", b"P" + NULL_BYTE)
        self._sock.write(EXECUTE_MSG)
        self._sock.write(SYNC_MSG)
        self._sock.flush()
        self.handle_messages(context)
        return context

    def _guarded(self, step: Any, *args: Any) -> Context:
        if self._broken:
            raise InterfaceError("connection is closed")
        try:
            context: Context = step(*args)
        except DatabaseError:
            raise
        except (OSError, InterfaceError, AttributeError, ValueError) as error:
            if isinstance(error, InterfaceError) and "failed transaction" in str(error):
                raise
            self._broken = True
            raise InterfaceError("network error") from error
        finally:
            self._used = time.time()
        return context

    def commit(self) -> None:
        if self._pending:
            self._pending = []
        elif self._in_transaction:
            self.execute_simple("commit")

    def rollback(self) -> None:
        self._pending = []
        if self._in_transaction and not self._broken:
            self.execute_simple("rollback")

    def usable(self) -> bool:
        """Whether the connection is worth trying: nothing unread on its socket, and after a long pause one answered probe."""
        if self._broken or self._usock is None or select.select([self._usock], [], [], 0)[0]:
            return False
        if abs(time.time() - self._used) < IDLE_SECONDS:
            return True
        self._usock.settimeout(PROBE_SECONDS)
        try:
            self.execute_simple("")
        except (InterfaceError, DatabaseError):
            return False
        self._usock.settimeout(self._timeout)
        return True


def connect(**options: Any) -> Connection:
    """A new connection."""
    return Connection(**options)


def error_code(error: BaseException) -> str | None:
    """The SQLSTATE in a database error, or None."""
    cause = getattr(error, "orig", None) or error
    details = cause.args[0] if cause.args else None
    return details.get("C") if isinstance(details, dict) else None


def is_connection_failure(error: BaseException) -> bool:
    """Whether the connection failed, and not the statement."""
    cause = getattr(error, "orig", None) or error
    code = error_code(error)
    if code is not None:
        return code.startswith("08") or code in ("57P01", "57P02", "57P03", "53300")
    return isinstance(cause, OSError | InterfaceError)

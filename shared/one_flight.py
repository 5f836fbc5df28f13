"""One network flight per statement: a small subclass of the driver's connection.

pg8000 sends Parse, Bind and Execute in Sync cycles of their own: three round trips a statement, and behind a transaction-mode pooler a
chance for another client's statement in between. Here they travel together, BEGIN in front of the first statement, COMMIT as one simple
query. No Flush in between either: with one after each message the server answers in as many packets, and a transaction of one statement
costs the client 0.40 ms of CPU instead of 0.19. It leans on internals, so the driver's version is pinned and checked.
"""

from __future__ import annotations

import select
import ssl
import struct
import time
from functools import lru_cache
from typing import Any, Final

import pg8000
import pg8000.legacy
from pg8000.core import EXECUTE_MSG, READY_FOR_QUERY, SYNC_MSG, Context, make_params
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


DESCRIBE_PORTAL: Final = b"D" + struct.pack("!i", 6) + b"P\0"


@lru_cache(maxsize=256)
def _parse(statement: str) -> bytes:
    """The Parse message of an unnamed statement; the server infers the parameters' types. Ours are constants: encoded once."""
    body = b"\0" + statement.encode() + b"\0\0\0"
    return b"P" + struct.pack("!i", len(body) + 4) + body


def _bind(params: list[str | None]) -> bytes:
    """The Bind message: values as text, in the unnamed portal."""
    body = bytearray(struct.pack("!bbhh", 0, 0, 0, len(params)))
    for value in params:
        if value is None:
            body += b"\xff\xff\xff\xff"
        else:
            encoded = value.encode()
            body += struct.pack("!i", len(encoded)) + encoded
    body += b"\0\0"
    return b"B" + struct.pack("!i", len(body) + 4) + bytes(body)


@lru_cache(maxsize=16)
def _opening(statements: tuple[str, ...]) -> bytes:
    """Parse, Bind and Execute of parameterless statements whose results nobody reads."""
    return b"".join(_parse(statement) + _bind([]) + EXECUTE_MSG for statement in statements)


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

    def __init__(self, **options: Any) -> None:
        self._begin = "begin"
        self._pending: list[str] = []
        self._left = b""
        self._notified: set[str] = set()
        self._broken = False
        self._used = time.time()
        super().__init__(**options)

    def cursor(self) -> Cursor:
        return Cursor(self)

    @property
    def in_transaction(self) -> bool:
        """What the server said last."""
        return bool(self._in_transaction)

    def begin_with(self, text: str, *, patience: float) -> None:
        """The next statement opens its transaction with these parameterless statements, separated by `; `, in the same flight.

        Args:
            patience: seconds to wait for each answer; a little more than the server's own limit, so that it is the server that gives up.
        """
        self._begin = text
        self._usock.settimeout(patience)

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
        if stream is not None or any(oids):
            raise InterfaceError("neither COPY nor declared types go through this connection")
        params = make_params(self.py_types, vals)
        return self._guarded(self._flight, statement, params)

    def _flight(self, statement: str, params: list[str | None]) -> Context:
        """Everything before one Sync: the server skips whatever follows an error, so a statement never runs outside its transaction."""
        context = Context(statement)
        before, self._pending = self._pending, []
        messages = [
            _opening(tuple(before)),
            _parse(statement),
            _bind(params),
            DESCRIBE_PORTAL,
            EXECUTE_MSG,
            SYNC_MSG,
        ]
        self._sock.write(b"".join(messages))
        self._sock.flush()
        self.handle_messages(context)
        return context

    def handle_messages(self, context: Context) -> None:
        """Reads to the next ReadyForQuery. The driver's own loop asks its buffer twice for each message; this one takes what has come."""
        received, at, code = self._left, 0, None
        while code != READY_FOR_QUERY:
            while len(received) < at + 5 or len(received) < at + 1 + int.from_bytes(
                received[at + 1 : at + 5]
            ):
                more = self._sock.read1(65536)
                if not more:
                    raise InterfaceError("network error")
                received, at = received[at:] + more, 0
            code, length = received[at : at + 1], int.from_bytes(received[at + 1 : at + 5])
            self.message_types[code](received[at + 5 : at + 1 + length], context)
            at += 1 + length
        self._left = received[at:]  # a notification may follow at once
        if context.error is not None:
            raise context.error

    def _guarded(self, step: Any, *args: Any) -> Context:
        """Runs one exchange. If it does not end in ReadyForQuery, what is still under way would be taken for the next answer."""
        if self._broken:
            raise InterfaceError("connection is closed")
        self._broken = True
        try:
            context: Context = step(*args)
        except DatabaseError:
            self._broken = False
            raise
        except (OSError, InterfaceError, AttributeError, ValueError) as error:
            if isinstance(error, InterfaceError) and "failed transaction" in str(error):
                self._broken = False
                raise
            raise InterfaceError("network error") from error
        self._broken, self._used = False, time.time()
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
        if self._broken or self._usock is None or self._left or select.select([self._usock], [], [], 0)[0]:
            return False
        return self.answers()

    @property
    def silent_seconds(self) -> float:
        """How long ago the server last answered. By the wall clock, which goes on while an instance is frozen."""
        return abs(time.time() - self._used)

    def answers(self) -> bool:
        """Whether the server is there, as far as one can know: asked by one probe if its last answer is long ago."""
        if self.silent_seconds < IDLE_SECONDS:
            return True
        self._usock.settimeout(PROBE_SECONDS)
        try:
            self.execute_simple("")
        except (InterfaceError, DatabaseError):
            return False
        return True

    def handle_NOTIFICATION_RESPONSE(self, data: bytes, context: Context) -> None:  # noqa: ARG002, N802 - the driver's
        """Keeps the payload, once. The driver's own keeps the last hundred: whoever is named in the one before them would not be told."""
        _channel, payload, _ = data[4:].split(b"\0")
        self._notified.add(payload.decode())

    def notified(self, patience: float) -> set[str]:
        """The payloads of the notifications that have come since the last call; waits up to `patience` seconds for the first one.

        Raises InterfaceError when the connection has ended.
        """
        if self._broken:
            raise InterfaceError("connection is closed")
        self._broken = True
        try:
            self._receive()
            if not self._notified and select.select([self._usock], [], [], patience)[0]:
                self._receive()
        except (OSError, ValueError) as error:
            raise InterfaceError("network error") from error
        self._broken = False
        told, self._notified = self._notified, set()
        return told

    def _receive(self) -> None:
        """Takes what has come without waiting: to the end, because select does not see what TLS has already decrypted."""
        self._usock.settimeout(0)
        while True:
            self._take()
            try:
                more = self._usock.recv(65536)
            except (BlockingIOError, ssl.SSLWantReadError):
                return
            if not more:
                raise InterfaceError("the server has gone")
            self._left += more

    def _take(self) -> None:
        """Handles the whole messages of what has been read; part of one stays."""
        context, at, had = Context(None), 0, self._left
        while len(had) >= at + 5 and len(had) > at + (length := int.from_bytes(had[at + 1 : at + 5])):
            self.message_types[had[at : at + 1]](had[at + 5 : at + 1 + length], context)
            at += 1 + length
        self._left = had[at:]
        if context.error is not None:
            raise InterfaceError("the server has ended the connection") from context.error


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

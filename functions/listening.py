"""Waiting for a commit: one listening connection for all requests of an instance that wait.

There is no thread of its own for it, an instance is frozen between requests: of those who wait, one reads and wakes the others, and hands
that on when it leaves. Nobody waits, nobody reads. Whatever goes wrong here costs a machine its wake-up, never its answer: it is told to
poll, as if there were nothing to listen to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock
from time import monotonic
from typing import Final
from uuid import UUID

from shared.log import log_exception
from shared.one_flight import Connection

REPLACED_AFTER_SECONDS: Final = 240
"""A connection that has said nothing for this long is not asked whether it lives: at 300 the server ends it."""

RETRY_SECONDS: Final = 10
"""After an attempt to connect that failed: each may take as long as a connection may, and every poll would pay for it."""


class Listening:
    """Safe to share between threads; opens nothing before somebody waits.

    Args:
        connect: opens a connection that listens already; None where there is none to be had.
        places: how many may wait at once.
    """

    def __init__(self, connect: Callable[[], Connection] | None, places: int) -> None:
        self._connect, self._places = connect, places
        self._lock = Lock()
        self._ready = Condition(self._lock)
        self._waiters: list[Waiter] = []
        # Whoever is `_busy` has the connection to itself, outside of the lock. `_connection` is None while it is being opened or checked:
        # so where it is not None, nothing that is committed from now on will be missed.
        self._busy: Waiter | None = None
        self._connection: Connection | None = None
        self._not_before = 0.0

    @contextmanager
    def place_for(self, orchestrator_id: UUID) -> Iterator[Waiter | None]:
        """A place to wait in, for the block. Every commit that concerns the machine, from the block's first line on, ends a wait.

        None: all places are taken, or there is nothing to listen to.
        """
        waiter = Waiter(self, str(orchestrator_id), Condition(self._lock))
        if not self._enter(waiter):
            yield None
            return
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)

    @property
    def waiting(self) -> int:
        """How many wait at this moment."""
        with self._lock:
            return sum(waiter.waits for waiter in self._waiters)

    def close(self) -> None:
        """Closes the connection; whoever waits is told to poll."""
        with self._lock:
            self._lost(None)

    def _enter(self, waiter: Waiter) -> bool:
        with self._lock:
            if self._connect is None or len(self._waiters) >= self._places:
                return False
            if self._connection is None and self._busy is None and monotonic() < self._not_before:
                return False
            self._waiters.append(waiter)
            if self._busy is not None:
                while self._connection is None and self._busy is not None:
                    self._ready.wait()
                return self._let_in(waiter)
            self._busy = waiter
            connection, self._connection = self._connection, None
        usable = None
        try:
            usable = self._checked(connection) or self._opened()
        finally:
            with self._lock:
                self._busy, self._connection = None, usable
                if usable is None:
                    self._not_before = monotonic() + RETRY_SECONDS
                    self._lost(None)
                elif usable is not connection:
                    # What was said between the two connections, nobody has heard: everybody looks once more.
                    self._wake(self._waiters)
                listens = self._let_in(waiter)
                self._ready.notify_all()
                self._hand_on()
        return listens

    def _let_in(self, waiter: Waiter) -> bool:
        """What was said before a waiter's first look is not news to it."""
        waiter.woken = waiter.deaf = False
        if self._connection is None:
            self._waiters.remove(waiter)
        return self._connection is not None

    def _checked(self, connection: Connection | None) -> Connection | None:
        """The connection if it still hears, having read what has come in the meantime."""
        if connection is None:
            return None
        if connection.silent_seconds < REPLACED_AFTER_SECONDS:
            with suppress(Exception):  # it died while nobody waited, as in an instance that was frozen
                self._hear(connection, 0)
                return connection
        _close(connection)
        return None

    def _opened(self) -> Connection | None:
        assert self._connect is not None
        try:
            return self._connect()
        except Exception as error:  # noqa: BLE001 - whatever it is, the machine polls instead
            log_exception("the listening connection cannot be opened", error, severity="WARNING")
            return None

    def _hear(self, connection: Connection, patience: float) -> None:
        """Wakes whom the connection names. Raises when it has died, which after a long silence takes a probe to know."""
        if not connection.answers():
            raise ConnectionError("the server does not answer")
        named = connection.notified(patience)
        with self._lock:
            self._wake([waiter for waiter in self._waiters if waiter.machine in named])

    def _wait(self, waiter: Waiter, seconds: float) -> None:
        """Returns when the waiter was woken, or after that time."""
        until = monotonic() + seconds
        while True:
            with self._lock:
                waiter.waits = True
                while (left := waiter.patience(until)) > 0 and self._busy is not None:
                    waiter.bell.wait(left)
                if left <= 0:
                    waiter.waits = False
                    self._hand_on()
                    return
                self._busy, connection = waiter, self._connection
            assert connection is not None  # whoever loses it tells everybody who waits
            self._read(connection, waiter, until)

    def _read(self, connection: Connection, waiter: Waiter, until: float) -> None:
        """Reads for everybody, until it is this one that is woken."""
        broken = False
        try:
            while (left := waiter.patience(until)) > 0:
                self._hear(connection, left)
        except Exception as error:  # noqa: BLE001 - as in _opened
            log_exception("the listening connection broke", error, severity="WARNING")
            broken = True
        finally:
            with self._lock:
                self._busy = None
                if broken:
                    self._lost(connection)

    def _wake(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            waiter.woken = True
            waiter.bell.notify()

    def _hand_on(self) -> None:
        """Nobody reads: the next one who waits does."""
        if self._busy is None:
            for waiter in self._waiters:
                if waiter.waits and not waiter.woken:
                    waiter.bell.notify()
                    return

    def _lost(self, connection: Connection | None) -> None:
        connection = connection or self._connection
        self._connection = None
        for waiter in self._waiters:
            waiter.deaf = True
        self._wake(self._waiters)
        self._ready.notify_all()
        if connection is not None:
            _close(connection)


class Waiter:
    """One request that waits for its machine to be named. `deaf`: the connection is lost, and waiting would be for nothing."""

    def __init__(self, listening: Listening, machine: str, bell: Condition) -> None:
        self._listening = listening
        self.machine, self.bell = machine, bell
        self.woken = self.deaf = self.waits = False

    def wait(self, seconds: float) -> bool:
        """Returns True when there may be something to look at or the time has passed; False when there is nothing to wait for any more."""
        self._listening._wait(self, seconds)  # noqa: SLF001 - the two halves of one thing
        self.woken = False  # whoever called looks now
        return not self.deaf

    def patience(self, until: float) -> float:
        """The seconds that are left to wait; 0 once woken."""
        return 0.0 if self.woken or self.deaf else max(0.0, until - monotonic())


def _close(connection: Connection) -> None:
    with suppress(Exception):  # it may be dead
        connection.close()

"""What this machine has taken on and not yet finished, on disk before the deed: after a crash the next start knows what it left behind.

SQLite, synchronous: each call has reached the disk when it returns. One process owns the folder at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from orchestrator.wire import Claim, Completion, Message, Release, Unreadable

TABLE: Final = """
    create table if not exists claims (
      queue_id    text primary key,
      session_id  text not null,
      identifier  text not null,
      attempt     integer,        -- null: the server of the original protocol does not say, or has not answered yet
      state       text not null check (state in (
                    'asked',      -- the claim was asked for; whether it was granted is not known
                    'claimed',    -- it was; the agent has not been started
                    'started',    -- the agent was let go as process `pid`
                    'ended')),    -- it is over, and the server has not confirmed `outcome` yet
      pid         integer,
      birth       text,           -- of that process: a number alone may since name another
      message     text,
      outcome     text,
      since       real not null   -- seconds since 1970, for people to read
    )
"""


class Busy(Exception):
    """Another orchestrator runs with this state folder."""


class Unwritable(Exception):
    """The journal cannot be read or written: the disk is full, or the folder is not what it was."""


class Entry(NamedTuple):
    """One piece of work that is not finished; see TABLE."""

    queue_id: str
    session_id: str
    identifier: str
    attempt: int | None
    state: str
    pid: int | None
    birth: str | None
    message: Message | None
    outcome: Completion | Release | None
    since: float


class Journal:
    """Opened once per process."""

    def __init__(self, folder: Path) -> None:
        """Raises Busy when another process has it open, Unwritable when it cannot be used."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unwritable(f"the state folder {folder} cannot be used: {error.strerror}") from None
        if not _locked(self._lock):
            owner = os.pread(self._lock, 20, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise Busy(
                f"another orchestrator (process {owner or 'unknown'}) runs with the state folder {folder}; give this one its own"
                " with --state"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        try:
            self._db = _open(folder / "journal.db")
            self._db.execute(TABLE)
            self.unfinished()
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise Unwritable(
                f"{folder / 'journal.db'} is no journal ({error}); move it away, and what it held is given back after its timeout"
            ) from None

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise Unwritable(f"the journal cannot be written ({error})") from None

    def asked(self, message: Message) -> None:
        """The claim of this message is about to be asked for."""
        self._write(
            "insert or replace into claims (queue_id, session_id, identifier, state, since) values (?, ?, ?, 'asked', ?)",
            (message.queue_id, message.session_id, message.identifier, time.time()),
        )

    def claimed(self, claim: Claim) -> None:
        """It was granted."""
        self._write(
            "update claims set state = 'claimed', attempt = ?, message = ? where queue_id = ?",
            (claim.attempt, json.dumps(claim.message.fields), claim.message.queue_id),
        )

    def started(self, queue_id: str, pid: int, birth: str | None) -> None:
        """The agent exists, and is about to be let go."""
        self._write(
            "update claims set state = 'started', pid = ?, birth = ? where queue_id = ?",
            (pid, birth, queue_id),
        )

    def ended(self, queue_id: str, outcome: Completion | Release) -> None:
        """The agent is gone; the server is to be told this, now or after a restart."""
        self._write(
            "update claims set state = 'ended', outcome = ? where queue_id = ?", (_written(outcome), queue_id)
        )

    def forget(self, queue_id: str) -> None:
        """Nothing is left to do about it. What stays in a journal that cannot be written is told to the server once more at the next
        start, which is harmless."""
        with suppress(Unwritable):
            self._write("delete from claims where queue_id = ?", (queue_id,))

    def unfinished(self) -> list[Entry]:
        """Everything that is in it, oldest first."""
        return _entries(self._db)

    def close(self) -> None:
        """Lets go of the folder."""
        self._db.close()
        os.close(self._lock)


def _locked(descriptor: int) -> bool:
    """Takes the lock. `status`, which looks whether it is free, may have it for a moment."""
    for _ in range(3):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def look_into(folder: Path) -> tuple[int | None, list[Entry]]:
    """Which process has the folder open (None: nobody), and what its journal holds. Changes nothing."""
    if not (folder / "journal.db").exists():
        return None, []
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = None
    except OSError:
        text = os.pread(lock, 20, 0).decode(errors="replace").strip()
        owner = int(text) if text.isdigit() else 0
    finally:
        os.close(lock)
    db = _open(folder / "journal.db")
    try:
        return owner, _entries(db)
    finally:
        db.close()


def _open(path: Path) -> sqlite3.Connection:
    path.touch(mode=0o600)
    db = sqlite3.connect(path, isolation_level=None, timeout=5)  # each statement commits by itself
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")  # in this mode one fsync for each commit
    return db


def _entries(db: sqlite3.Connection) -> list[Entry]:
    rows = db.execute(
        "select queue_id, session_id, identifier, attempt, state, pid, birth, message, outcome, since from claims"
        " order by since, queue_id"
    ).fetchall()
    return [Entry._make((*row[:7], _message(row[7]), _outcome(row[8]), row[9])) for row in rows]


def _written(outcome: Completion | Release) -> str:
    if isinstance(outcome, Release):
        return json.dumps({"release": outcome.error})
    return json.dumps(
        {"success": outcome.success, "facts": dict(outcome.facts), "seen": outcome.prompts_seen}
    )


def _message(text: str | None) -> Message | None:
    try:
        return None if text is None else Message.read(json.loads(text))
    except (ValueError, Unreadable):
        return None  # it is given back like one that was never begun


def _outcome(text: str | None) -> Completion | Release | None:
    if text is None:
        return None
    try:
        value: dict[str, Any] = json.loads(text)
        if "release" in value:
            return Release(str(value["release"]))
        return Completion(
            success=bool(value["success"]), facts=dict(value["facts"]), prompts_seen=int(value.get("seen", 0))
        )
    except (ValueError, KeyError, TypeError):
        return None

"""The journal outlives the process that wrote it, whatever ended that, and belongs to one process at a time."""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from orchestrator.journal import Busy, Entry, Journal, Unwritable, look_into
from orchestrator.wire import REQUIRED, Claim, Completion, Message, Release

ROOT = Path(__file__).resolve().parents[2]


def message(number: int = 1) -> Message:
    return Message.read(
        {name: f"{name}-{number}" for name in REQUIRED} | {"description": "ü\x00\n", "more": [1]}
    )


def reopened(folder: Path) -> list[Entry]:
    with closing(Journal(folder)) as journal:
        return journal.unfinished()


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


# -- what it keeps ------------------------------------------------------------------------------------------------------


def test_each_state_survives_reopening(tmp_path: Path) -> None:
    one, before = message(), time.time()
    with closing(Journal(tmp_path)) as journal:
        journal.asked(one)
    (entry,) = reopened(tmp_path)
    since = entry.since
    assert before <= since <= time.time()
    names = ("queueId-1", "sessionId-1", "linearIdentifier-1")
    assert entry[:-1] == (*names, None, "asked", None, None, None, None)

    with closing(Journal(tmp_path)) as journal:
        journal.claimed(Claim(one, 3, 90.0))
    (entry,) = reopened(tmp_path)
    assert entry[:-1] == (*names, 3, "claimed", None, None, one, None)

    with closing(Journal(tmp_path)) as journal:
        journal.started(one.queue_id, 4711, "boot 5")
    (entry,) = reopened(tmp_path)
    assert entry[:-1] == (*names, 3, "started", 4711, "boot 5", one, None)

    with closing(Journal(tmp_path)) as journal:
        journal.ended(one.queue_id, Release("why"))
    (entry,) = reopened(tmp_path)
    assert entry == (*names, 3, "ended", 4711, "boot 5", one, Release("why"), since)

    with closing(Journal(tmp_path)) as journal:
        journal.forget(one.queue_id)
    assert reopened(tmp_path) == []


@pytest.mark.parametrize(
    "outcome",
    [
        Completion(success=True, facts={"prUrl": "https://x/1", "costUsd": 0.5, "tokensUsed": 2**53, "summary": "ü\n"}),
        Completion(success=False, facts={"errorMessage": "release"}),
        Completion(success=True, facts={}, prompts_seen=3),
        Release(""),
        Release("the agent asked for another attempt"),
    ],
)  # fmt: skip
def test_an_outcome_comes_back_as_it_was(outcome: Completion | Release, tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
        journal.ended("queueId-1", outcome)
    (entry,) = reopened(tmp_path)
    assert entry.outcome == outcome


def test_a_claim_of_a_server_without_attempts_has_none(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
        journal.claimed(Claim(message(), None, None))
    (entry,) = reopened(tmp_path)
    assert (entry.state, entry.attempt, entry.message) == ("claimed", None, message())


def test_the_oldest_is_first_and_each_is_changed_alone(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for number in (3, 1, 2):
            journal.asked(message(number))
        journal.forget("queueId-1")
        journal.started("queueId-2", 1, None)
        found = [(entry.queue_id, entry.state) for entry in journal.unfinished()]
    assert found == [("queueId-3", "asked"), ("queueId-2", "started")]


def test_asking_again_for_the_same_begins_anew(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
        journal.claimed(Claim(message(), 1, None))
        journal.started("queueId-1", 4711, "b")
        journal.asked(message())
        (entry,) = journal.unfinished()
    assert (entry.state, entry.attempt, entry.pid, entry.birth) == ("asked", None, None, None)


def test_a_state_that_is_none_is_not_taken(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
        with pytest.raises(Exception, match="CHECK constraint failed"):
            journal._db.execute("update claims set state = 'done'")


def test_what_is_recorded_has_reached_the_disk(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert journal._db.execute("pragma synchronous").fetchone() == (2,)  # full
        assert journal._db.execute("pragma journal_mode").fetchone() == ("wal",)
        journal.asked(message())
        assert not journal._db.in_transaction


def test_its_files_are_the_owners_alone_whatever_the_mask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(Journal(tmp_path / "state")) as journal:
            journal.asked(message())
            look_into(tmp_path / "state")
            found = modes(tmp_path / "state")
    finally:
        os.umask(before)
    assert found == dict.fromkeys(("lock", "journal.db", "journal.db-wal", "journal.db-shm"), 0o600)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


# -- one process at a time ----------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from orchestrator.journal import Journal, Unwritable
from orchestrator.wire import REQUIRED, Claim, Message, Release
def message(number):
    return Message.read({name: f"{name}-{number}" for name in REQUIRED} | {"description": "\\xfc\\0\\n", "more": [1]})
journal = Journal(Path(sys.argv[1]))
for number in range(1, 5):
    journal.asked(message(number))
for number in range(1, 4):
    journal.claimed(Claim(message(number), number, 60.0))
for number in range(1, 3):
    journal.started(f"queueId-{number}", 4711, "b")
journal.ended("queueId-1", Release("why"))
print("recorded", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has recorded and goes on, until it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "recorded\n"
            yield process
        finally:
            process.kill()


def test_a_killed_writer_leaves_what_it_has_recorded_and_the_folder_to_the_next(tmp_path: Path) -> None:
    with a_writer(tmp_path) as writer:
        with pytest.raises(Busy) as busy:
            Journal(tmp_path)
        assert f"process {writer.pid}" in str(busy.value)
        assert str(tmp_path) in str(busy.value)
        owner, entries = look_into(tmp_path)
        assert owner == writer.pid
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
    assert [(entry.queue_id, entry.state, entry.attempt) for entry in entries] == [
        ("queueId-1", "ended", 1),
        ("queueId-2", "started", 2),
        ("queueId-3", "claimed", 3),
        ("queueId-4", "asked", None),
    ]
    assert entries[0].outcome == Release("why")
    assert entries[2].message == message(3)
    assert look_into(tmp_path) == (None, entries)
    assert reopened(tmp_path) == entries


def test_a_folder_is_free_again_when_its_journal_is_closed(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("9" * 15)  # of one before, with a longer number
    first = Journal(tmp_path)
    with pytest.raises(Busy, match=rf"\(process {os.getpid()}\)"):
        Journal(tmp_path)
    first.asked(message())  # the one that was refused has taken nothing from it
    first.close()
    assert len(reopened(tmp_path)) == 1


def test_a_lock_that_names_nobody_is_still_a_lock(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        (tmp_path / "lock").write_text("")
        with pytest.raises(Busy, match=r"process unknown"):
            Journal(tmp_path)
        assert look_into(tmp_path)[0] == 0
        journal.asked(message())


def test_an_agent_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        assert fcntl.fcntl(journal._lock, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


# -- looking into it ----------------------------------------------------------------------------------------------------


def test_looking_into_a_folder_that_is_not_there_does_not_make_it(tmp_path: Path) -> None:
    assert look_into(tmp_path / "none") == (None, [])
    assert look_into(tmp_path) == (None, [])
    assert list(tmp_path.iterdir()) == []


def test_looking_changes_nothing(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
        before = {
            path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "journal.db-shm"
        }
        assert look_into(tmp_path)[0] == os.getpid()
        after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != "journal.db-shm"}
        assert after == before
        journal.claimed(Claim(message(), 2, None))
        assert look_into(tmp_path)[1] == journal.unfinished()


def test_looking_into_a_closed_one_changes_nothing_and_holds_nothing(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    owner, entries = look_into(tmp_path)
    assert (owner, len(entries)) == (None, 1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert reopened(tmp_path) == entries


@pytest.mark.parametrize("column", ["message", "outcome"])
def test_an_entry_that_cannot_be_read_is_given_back_like_one_that_was_never_begun(
    tmp_path: Path, column: str
) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.asked(message())
    with closing(sqlite3.connect(tmp_path / "journal.db")) as db:
        db.execute(f"update claims set state = 'ended', {column} = '{{\"half'")
        db.commit()
    with closing(Journal(tmp_path)) as journal:
        [entry] = journal.unfinished()
    assert (entry.message, entry.outcome) == (None, None)


def test_a_folder_that_cannot_be_one_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match="cannot be used"):
        Journal(tmp_path / "file")
    (tmp_path / "folder" / "journal.db").mkdir(parents=True)
    with pytest.raises(Unwritable, match="is no journal"):
        Journal(tmp_path / "folder")

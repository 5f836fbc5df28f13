"""What the loop does with what it hears, without a server and without a process: the rest is in tests/contract and tests/crash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import loop
from orchestrator.client import ClaimLost, NotRegistered, TokenRefused
from orchestrator.delivery import Desk
from orchestrator.journal import Journal, Unwritable
from orchestrator.loop import Machine, Orchestrator
from orchestrator.runner import Command
from orchestrator.screen import Plain
from orchestrator.wire import REQUIRED, Message, Polled, Registration

REGISTRATION = Registration("me", None)


class Server:
    """A client whose answers are given; keeps what was asked."""

    def __init__(self, *polls: Polled, heartbeats: list[Exception | None] | None = None) -> None:
        self.asked: list[str] = []
        self._polls, self._heartbeats = list(polls), heartbeats or []

    async def poll(self) -> Polled:
        self.asked.append("poll")
        return self._polls.pop(0)

    async def claim(self, queue_id: str) -> None:
        raise AssertionError(f"{queue_id} is not to be claimed")

    async def register(self, **_: object) -> Registration:
        self.asked.append("register")
        return REGISTRATION

    async def heartbeat(self, orchestrator_id: str, active_jobs: int) -> None:
        self.asked.append(f"heartbeat {active_jobs}")
        if self._heartbeats and (error := self._heartbeats.pop(0)) is not None:
            raise error

    async def reconnect(self) -> None:
        self.asked.append("reconnect")


class Running:
    """A job that only writes down what it is told."""

    def __init__(self, queue_id: str) -> None:
        self.told: list[str] = []
        self.session_id = f"session-of-{queue_id}"

    def halt(self, why: str) -> None:
        self.told.append(why)

    def check(self) -> None:
        self.told.append("check")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    yield made
    made.close()


@pytest.fixture
def orchestrator(journal: Journal, tmp_path: Path) -> Callable[[Server], Orchestrator]:
    def make(server: Server) -> Orchestrator:
        def desk(**parts: Any) -> Desk:
            return Desk(screen=Plain(), sessions=tmp_path / "sessions", **parts)

        machine = Machine("laptop", ["acme/api"], max_jobs=4, grace=0)
        return Orchestrator(machine, server, journal, Command(["true"], {}), desk)  # type: ignore[arg-type]  # a stand-in

    return make


def message(queue_id: str) -> Message:
    return Message.read(
        {**dict.fromkeys(REQUIRED, "x"), "queueId": queue_id, "sessionId": f"session-of-{queue_id}"}
    )


def with_job(made: Orchestrator, queue_id: str) -> Running:
    job = Running(queue_id)
    made._places.jobs[queue_id] = job  # type: ignore[assignment]  # a stand-in
    return job


def test_work_that_waits_again_while_it_runs_here_is_lost_and_not_claimed_before_the_run_has_ended(
    orchestrator: Callable[[Server], Orchestrator],
) -> None:
    made = orchestrator(Server(Polled([message("q1")], 1, frozenset())))
    job = with_job(made, "q1")
    assert not asyncio.run(made.looking.look())
    assert job.told == ["lost"]


def test_a_session_that_waits_on_a_new_row_ends_the_run_of_the_old_one_first(
    orchestrator: Callable[[Server], Orchestrator],
) -> None:
    """The old row was dropped while the machine slept, and redriven."""
    again = Message.read({**message("q1").fields, "queueId": "q2"})
    made = orchestrator(Server(Polled([again], 1, frozenset())))
    job = with_job(made, "q1")
    assert not asyncio.run(made.looking.look())
    assert job.told == ["lost"]


def test_a_stop_that_a_poll_brings_does_not_wait_for_the_next_renewal(
    orchestrator: Callable[[Server], Orchestrator],
) -> None:
    made = orchestrator(Server(Polled([], 1, frozenset({"q1", "of-another-start"}))))
    job = with_job(made, "q1")
    asyncio.run(made.looking.look())
    assert job.told == ["stop"]


async def for_a_moment(*work: Coroutine[Any, Any, None], until: Callable[[], bool]) -> None:
    tasks = [asyncio.create_task(each) for each in work]
    async with asyncio.timeout(5):
        while not until() and not any(task.done() for task in tasks):  # noqa: ASYNC110 - lets the others run
            await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_is_taken_for_a_sleep_connections_are_new_claims_are_checked_and_it_looks_at_once(
    orchestrator: Callable[[Server], Orchestrator], monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    server = Server()
    made = orchestrator(server)
    job = with_job(made, "q1")
    times = iter([1000.0, *[1000.0 + jump] * 2])
    monkeypatch.setattr(loop, "CLOCK_SECONDS", 0.0)
    monkeypatch.setattr("orchestrator.loop.time.time", lambda: next(times, 1000.0 + jump))
    made.pace.looked(found=False, poll_after=30)

    async def scene() -> None:
        await for_a_moment(made._watch(), until=lambda: bool(job.told))
        async with asyncio.timeout(5):
            await made.pace.until_due()

    asyncio.run(scene())
    assert (server.asked, job.told) == (["reconnect"], ["check"])


def test_a_clock_that_runs_evenly_is_no_sleep(
    orchestrator: Callable[[Server], Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    made = orchestrator(server)
    ticks = [0]

    def evenly() -> float:
        ticks[0] += 1
        return 1000.0 + ticks[0] / 2

    monkeypatch.setattr(loop, "CLOCK_SECONDS", 0.0)
    monkeypatch.setattr("orchestrator.loop.time.time", evenly)
    asyncio.run(for_a_moment(made._watch(), until=lambda: ticks[0] > 20))
    assert server.asked == []


def test_a_machine_that_the_server_has_forgotten_registers_again(
    orchestrator: Callable[[Server], Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(heartbeats=[NotRegistered("never heard of it"), None])
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.0)
    made = orchestrator(server)
    asyncio.run(for_a_moment(made._heartbeats(REGISTRATION), until=lambda: len(server.asked) >= 3))
    assert server.asked[:3] == ["heartbeat 0", "register", "heartbeat 0"]


def test_a_token_that_is_refused_while_it_waits_ends_the_program(
    orchestrator: Callable[[Server], Orchestrator],
) -> None:
    class Refusing:
        async def wait(self) -> None:
            raise TokenRefused("revoked")

        async def aclose(self) -> None: ...

    made = orchestrator(Server())
    asyncio.run(made._claiming(Refusing(), once=False))
    assert made._end().code == 3


def test_a_server_that_refuses_every_claim_is_asked_ever_more_seldom(
    orchestrator: Callable[[Server], Orchestrator],
) -> None:
    class Full(Server):
        async def claim(self, queue_id: str) -> None:
            raise ClaimLost(f"no place for {queue_id}")

    polls = [Polled([message("q1"), message("q2")], 1, frozenset()) for _ in range(6)]
    made = orchestrator(Full(*polls))
    for _ in range(6):
        asyncio.run(made.looking.look())
    assert made.pace._delay > 10
    assert made._journal.unfinished() == []


def test_nothing_is_claimed_while_the_journal_cannot_be_written(
    orchestrator: Callable[[Server], Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not written down would be run again, or not given back, after a crash."""

    def full(_: object) -> None:
        raise Unwritable("database or disk is full")

    made = orchestrator(Server(Polled([message("q1")], 1, frozenset())))
    monkeypatch.setattr(made._journal, "asked", full)
    assert not asyncio.run(made.looking.look())


def test_a_refused_token_ends_the_program(
    orchestrator: Callable[[Server], Orchestrator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.0)
    made = orchestrator(Server(heartbeats=[TokenRefused("revoked")]))
    asyncio.run(for_a_moment(made._heartbeats(REGISTRATION), until=made._ending.is_set))
    assert made._end().code == 3

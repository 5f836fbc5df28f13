"""When the machine looks next, on a clock that jumps: at once after success, by the server's hint, ever later while nobody answers."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from orchestrator.client import ClaimLost, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.pace import LONGEST_SECONDS, UNTOLD_SECONDS, Pace
from orchestrator.transports.listen import WAIT_SECONDS, Listen
from orchestrator.transports.poll import Poll
from orchestrator.wire import REQUIRED, Message, Polled, Unreadable

Result = TypeVar("Result")
TIMES = 50  # a wait has a random part


class _Jumping(selectors.SelectSelector):
    """Nobody waits for time to pass: it is moved to when something is due."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(timeout, 0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(use: Callable[[], Awaitable[Result]]) -> Result:
    async def awaited() -> Result:
        return await use()

    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(awaited())


def now() -> float:
    return asyncio.get_running_loop().time()


async def waited(pace: Pace) -> float:
    """The seconds until the next look is due."""
    before = now()
    await pace.until_due()
    return now() - before


def waits(prepare: Callable[[Pace], None]) -> list[float]:
    """What a Pace that has been prepared waits, many times."""

    async def use() -> list[float]:
        found = []
        for _ in range(TIMES):
            pace = Pace()
            prepare(pace)
            found.append(await waited(pace))
        return found

    return run(use)


# -- the pace -----------------------------------------------------------------------------------------------------------


def test_the_first_look_is_due_at_once() -> None:
    assert max(waits(lambda pace: None)) == 0


@pytest.mark.parametrize("hint", [None, 0.0, 5.0, 600.0])
def test_after_something_was_found_the_next_look_is_due_at_once(hint: float | None) -> None:
    assert max(waits(lambda pace: pace.looked(found=True, poll_after=hint))) == 0


@pytest.mark.parametrize(
    ("hint", "wanted"), [(0.5, 0.5), (1, 1), (30, 30), (600, LONGEST_SECONDS), (None, UNTOLD_SECONDS)]
)
def test_a_hint_is_obeyed_with_at_most_a_tenth_more_and_not_always_the_same(
    hint: float | None, wanted: float
) -> None:
    found = waits(lambda pace: pace.looked(found=False, poll_after=hint))
    assert min(found) >= wanted - 1e-6
    assert max(found) <= wanted * 1.1 + 1e-6
    assert len({round(each, 6) for each in found}) > TIMES / 2


def test_failures_grow_to_a_minute_and_half_of_each_wait_is_random() -> None:
    for failures, longest in enumerate([1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60], 1):

        def fail(pace: Pace, times: int = failures) -> None:
            for _ in range(times):
                pace.failed(None)

        found = waits(fail)
        assert longest / 2 - 1e-6 <= min(found) < max(found) <= longest + 1e-6


def test_very_many_failures_are_no_more_than_many() -> None:
    def prepare(pace: Pace) -> None:
        for _ in range(2000):
            pace.failed(None)

    assert max(waits(prepare)) <= LONGEST_SECONDS + 1e-6


@pytest.mark.parametrize("retry_after", [0.0, 0.2, 7.0, 120.0, 3600.0])
def test_a_look_is_never_sooner_than_the_server_asks_for(retry_after: float) -> None:
    found = waits(lambda pace: pace.failed(retry_after))
    assert min(found) >= max(retry_after, 0.5) - 1e-6
    assert max(found) <= max(retry_after * 1.1, 1) + 1e-6


def test_an_answer_ends_the_row_of_failures() -> None:
    def prepare(pace: Pace) -> None:
        for _ in range(9):
            pace.failed(None)
        pace.looked(found=False, poll_after=1)
        pace.failed(None)

    assert max(waits(prepare)) <= 1 + 1e-6


def test_a_hurry_ends_a_wait_and_is_over_then() -> None:
    async def use() -> tuple[float, float]:
        pace = Pace()
        pace.looked(found=False, poll_after=30)
        asyncio.get_running_loop().call_later(3, pace.hurry)
        first = await waited(pace)
        pace.looked(found=False, poll_after=30)
        return first, await waited(pace)

    first, second = run(use)
    assert first == pytest.approx(3)
    assert second >= 30 - 1e-6


def test_a_hurry_before_the_wait_is_not_forgotten() -> None:
    async def use() -> float:
        pace = Pace()
        pace.looked(found=False, poll_after=30)
        pace.hurry()
        return await waited(pace)

    assert run(use) == 0


def test_who_waits_again_without_having_looked_does_not_spin() -> None:
    async def use() -> list[float]:
        pace = Pace()
        pace.looked(found=True, poll_after=None)
        return [await waited(pace) for _ in range(4)]

    assert run(use) == pytest.approx([0, 1, 1, 1])


def test_a_wait_that_is_given_up_leaves_the_next_as_it_was() -> None:
    async def use() -> float:
        pace = Pace()
        pace.looked(found=False, poll_after=10)
        waiting = asyncio.create_task(pace.until_due())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return await waited(pace)

    assert run(use) >= 10 - 1e-6


# -- polling and listening ----------------------------------------------------------------------------------------------

NOTHING = Polled([], 0.0, frozenset())
WORK = Polled([Message.read({name: name for name in REQUIRED})], 0.0, frozenset())
Answer = tuple[float, Polled | Exception]


class Server:
    """Stands for a Client: answers each waiting poll after some seconds, and notes when it was asked."""

    def __init__(self, *answers: Answer, extended: bool = True) -> None:
        self.extended = extended
        self.asked: list[float] = []
        self._answers = list(answers)

    async def poll(self, *, wait: int = 0) -> Polled:
        assert wait == WAIT_SECONDS
        self.asked.append(now())
        seconds, answer = self._answers.pop(0)
        await asyncio.sleep(seconds)
        if isinstance(answer, Exception):
            raise answer
        return answer


def listening(server: Server, pace: Pace | None = None) -> float:
    """When `wait` returned."""

    async def use() -> float:
        client: Any = server
        listen = Listen(client, pace or Pace())
        await listen.wait()
        await listen.aclose()
        return now()

    return run(use)


def test_listening_returns_as_soon_as_there_is_something() -> None:
    assert listening(Server((3, WORK))) == pytest.approx(3)
    assert listening(Server((3, Polled([], 0.0, frozenset({"q-1"}))))) == pytest.approx(3)


def test_after_a_wait_that_brought_nothing_it_asks_again_at_once() -> None:
    server = Server((25, NOTHING), (25, NOTHING), (4, WORK))
    assert listening(server) == pytest.approx(54)
    assert server.asked == pytest.approx([0, 25, 50])


def test_at_once_is_right_only_after_a_wait() -> None:
    server = Server((0, NOTHING), (0.2, NOTHING), (0.2, NOTHING), (25, NOTHING), (0, WORK))
    listening(server)
    pauses = [later - earlier for earlier, later in zip(server.asked, server.asked[1:], strict=False)]
    assert all(1 <= pause <= 1.3 + 1e-6 for pause in pauses[:3])
    assert pauses[3] == pytest.approx(25)


def test_a_server_that_answers_at_once_is_asked_when_it_says() -> None:
    server = Server((0, Polled([], 30.0, frozenset())), (0, Polled([], None, frozenset())), (0, WORK))
    listening(server)
    first, second = (later - earlier for earlier, later in zip(server.asked, server.asked[1:], strict=False))
    assert 30 - 1e-6 <= first <= 33 + 1e-6
    assert UNTOLD_SECONDS - 1e-6 <= second <= UNTOLD_SECONDS * 1.1 + 1e-6


def test_where_a_server_cannot_wait_the_loops_own_look_is_the_poll() -> None:
    server = Server(extended=False)
    pace = Pace()
    pace.looked(found=False, poll_after=10)
    assert 10 - 1e-6 <= listening(server, pace) <= 11 + 1e-6
    assert server.asked == []


def test_errors_back_off_and_nobody_is_told() -> None:
    failures: list[Answer] = [(0, TryLater("x")) for _ in range(8)]
    server = Server(*failures, (0, WORK))
    listening(server)
    pauses = [later - earlier for earlier, later in zip(server.asked, server.asked[1:], strict=False)]
    for pause, longest in zip(pauses, [1, 2, 4, 8, 16, 32, 60, 60], strict=True):
        assert longest / 2 - 1e-6 <= pause <= longest + 1e-6


def test_it_comes_back_no_sooner_than_the_server_asks_for() -> None:
    server = Server((0, TryLater("x", 90)), (0, WORK))
    assert listening(server) >= 90 - 1e-6


@pytest.mark.parametrize("kind", [NotRegistered, ClaimLost, Refused, Unreadable])
def test_an_odd_answer_is_left_to_the_loops_own_look(kind: type[Exception]) -> None:
    assert listening(Server((2, kind("x")))) == pytest.approx(2)


def test_a_token_that_is_refused_is_said() -> None:
    with pytest.raises(TokenRefused):
        listening(Server((0, TokenRefused("x"))))


def test_a_server_that_always_has_something_unclaimable_is_not_asked_without_a_pause() -> None:
    async def use() -> float:
        client: Any = Server((0, WORK), (0, WORK), (0, WORK))
        listen = Listen(client, Pace())
        for _ in range(3):
            await listen.wait()
        return now()

    assert run(use) >= 2


def test_polling_is_waiting() -> None:
    async def use() -> float:
        pace = Pace()
        pace.looked(found=False, poll_after=7)
        poll = Poll(pace)
        await poll.wait()
        await poll.aclose()
        return now()

    assert 7 - 1e-6 <= run(use) <= 7.7 + 1e-6

"""When the transport `realtime` looks, connects and asks for tokens, on a clock that jumps; and that nothing else needs its library."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.client import Client, NotRegistered, TokenRefused, TryLater
from orchestrator.pace import LONGEST_SECONDS, SHORTEST_SECONDS, UNTOLD_SECONDS, Pace
from orchestrator.transports import realtime
from orchestrator.transports.realtime import Realtime
from tests.unit.test_orchestrator_pace import now, run, waits

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "http://127.0.0.1:1"


class Tokens(Client):
    """Answers each request for a token with the next of these, the last one again and again."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[float] = []

    async def realtime_token(self) -> dict[str, Any]:
        self.asked.append(now())
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Scene:
    """A transport whose connection is what a test makes of it."""

    def __init__(
        self, connection: Callable[[], Awaitable[None]], *answers: dict[str, Any] | Exception
    ) -> None:
        self.pace, self.tokens = Pace(), Tokens(*(answers or ({"jwt": "j"},)))
        self.transport = Realtime(self.tokens, self.pace, {"jwt": "first"})
        self.connections: list[float] = []

        async def connect() -> None:
            self.connections.append(now())
            await connection()

        self.transport._connection = connect  # type: ignore[method-assign]

    async def waited(self) -> float:
        before = now()
        await self.transport.wait()
        return now() - before

    async def close(self) -> None:
        await self.transport.aclose()


def of_scene(use: Callable[[Scene], Awaitable[Any]], connection: Callable[[], Awaitable[None]]) -> Any:
    async def in_loop() -> Any:
        scene = Scene(connection)
        try:
            return await use(scene)
        finally:
            await scene.close()

    return run(in_loop)


async def silence() -> None:
    await asyncio.Event().wait()


async def breaks() -> None:
    raise OSError("broken")


@pytest.fixture(autouse=True)
def _one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realtime, "_clock", now)


# -- looks --------------------------------------------------------------------------------------------------------------


def test_the_first_look_and_the_one_after_a_find_are_due_at_once() -> None:
    async def use(scene: Scene) -> list[float]:
        first = await scene.waited()
        scene.pace.looked(found=True, poll_after=30)
        return [first, await scene.waited()]

    assert of_scene(use, silence) == [0, 0]


def test_a_storm_of_events_is_one_look_a_second() -> None:
    async def use(scene: Scene) -> int:
        async def storm() -> None:
            while True:
                scene.transport._heard({"data": {"record": {}}})
                await asyncio.sleep(0.001)

        storming, looks, end = asyncio.create_task(storm()), 0, now() + 60
        while now() < end:
            await scene.waited()
            scene.pace.looked(found=False, poll_after=30)
            looks += 1
        storming.cancel()
        return looks

    assert 55 <= of_scene(use, silence) <= 62


def test_an_event_that_comes_while_it_waits_is_looked_at_at_once() -> None:
    async def use(scene: Scene) -> float:
        scene.pace.looked(found=False, poll_after=30)
        asyncio.get_running_loop().call_later(7, scene.transport._heard, {"data": {}})
        return await scene.waited()

    assert of_scene(use, silence) == pytest.approx(7)


def test_in_silence_it_looks_as_the_server_says_and_after_half_a_minute_whatever_it_says() -> None:
    async def use(scene: Scene) -> list[float]:
        found = []
        for hint in (2.0, 30.0, 600.0, None):
            scene.pace.looked(found=False, poll_after=hint)
            found.append(await scene.waited())
        return found

    short, usual, long, none = of_scene(use, silence)
    assert 2 - 1e-6 <= short <= 2.2 + 1e-6
    assert [usual, long] == pytest.approx([30, 30])
    assert UNTOLD_SECONDS <= none <= UNTOLD_SECONDS * 1.1


def test_what_happens_here_is_looked_at_at_once() -> None:
    async def use(scene: Scene) -> float:
        scene.pace.looked(found=False, poll_after=30)
        scene.pace.hurry()
        return await scene.waited()

    assert of_scene(use, silence) == 0


def test_no_event_asks_a_server_that_wants_to_be_left_alone() -> None:
    async def use(scene: Scene) -> list[float]:
        found = []
        for retry_after in (None, 300.0):
            scene.transport._heard({"data": {}})
            scene.pace.failed(retry_after)
            scene.pace.failed(retry_after)
            found.append(await scene.waited())
        scene.pace.looked(found=False, poll_after=30)
        return [*found, await scene.waited()]

    backoff, asked_for, event = of_scene(use, silence)
    assert 1 <= backoff <= 2
    assert asked_for >= 300
    assert event == pytest.approx(SHORTEST_SECONDS)  # it was not forgotten meanwhile


@pytest.mark.parametrize(
    ("record", "news"),
    [
        ({}, True),
        (None, True),
        ({"claimed_at": None}, True),
        ({"claimed_at": "2026-12-01T00:00:00Z"}, False),
        ({"claimed_at": "2026-12-01T00:00:00Z", "cancel_requested_at": None}, False),
        ({"claimed_at": "2026-12-01T00:00:00Z", "cancel_requested_at": "2026-12-01T00:00:00Z"}, True),
    ],
)
def test_only_what_this_machine_does_itself_is_no_news(record: Any, news: bool) -> None:
    async def use(scene: Scene) -> bool:
        scene.transport._heard({"data": {"record": record}})
        return scene.transport._news.is_set()

    assert of_scene(use, silence) == news


def test_a_server_without_hints_is_polled_less_while_changes_are_heard() -> None:
    def told(pace: Pace) -> None:
        pace.untold = 30
        pace.looked(found=False, poll_after=None)

    assert 30 - 1e-6 <= min(waits(told)) < max(waits(told)) <= 33 + 1e-6

    async def use(scene: Scene) -> float:
        scene.pace.untold = 30
        await scene.waited()
        await asyncio.sleep(0)
        return scene.pace.untold

    assert of_scene(use, breaks) == UNTOLD_SECONDS


def test_a_pace_is_failing_until_somebody_answers() -> None:
    pace = Pace()
    found = [pace.failing]
    pace.failed(None)
    found.append(pace.failing)
    pace.looked(found=False, poll_after=LONGEST_SECONDS)
    assert [*found, pace.failing] == [False, True, False]


# -- the connection -----------------------------------------------------------------------------------------------------


def test_a_connection_that_always_breaks_is_tried_ever_later() -> None:
    async def use(scene: Scene) -> list[float]:
        await scene.waited()
        await asyncio.sleep(600)
        return scene.connections

    made: list[float] = of_scene(use, breaks)
    gaps = [after - before for before, after in pairwise(made)]
    assert [round(gap, 3) for gap in gaps[:3]] == sorted(round(gap, 3) for gap in gaps[:3])
    assert 0.5 <= gaps[0] <= 1
    assert max(gaps) <= 60
    assert len(made) <= 6 + 600 / 30


def test_a_connection_that_lasted_is_made_again_soon() -> None:
    async def lasts() -> None:
        await asyncio.sleep(61)

    async def use(scene: Scene) -> list[float]:
        await scene.waited()
        await asyncio.sleep(600)
        return scene.connections

    made: list[float] = of_scene(use, lasts)
    assert all(61.5 <= after - before <= 62 for before, after in pairwise(made))


def test_each_break_is_a_look() -> None:
    async def use(scene: Scene) -> float:
        scene.pace.looked(found=False, poll_after=30)
        return await scene.waited()

    assert of_scene(use, breaks) == pytest.approx(SHORTEST_SECONDS)


# -- the token ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        (3600, 2700),
        (1200, 900),
        (90_000, 2700),  # the clock here is a day late
        (30, 2700),  # or nearly an hour early
        (-5000, 2700),
    ],
)
def test_a_token_is_exchanged_after_three_quarters_of_what_it_is_good_for(left: float, wanted: float) -> None:
    expires_at = (datetime.now(UTC) + timedelta(seconds=left)).isoformat().replace("+00:00", "Z")
    assert wanted - 60 <= realtime._good_for(expires_at) <= wanted


@pytest.mark.parametrize("expires_at", [None, "soon", 7, "9999-12-31T23:59:59", "0001-01-01T00:00:00"])
def test_a_token_that_does_not_say_how_long_is_good_for_an_hour(expires_at: Any) -> None:
    assert realtime._good_for(expires_at) == 2700


class Connected:
    """In the place of the library's client."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    async def set_auth(self, jwt: Any) -> None:
        self.given.append((now(), jwt))


def stays(seconds: float, *answers: dict[str, Any] | Exception) -> tuple[list[float], list[Any]]:
    """When a connection that lasts so long has asked for tokens, and which ones it was given."""

    async def use() -> tuple[list[float], list[Any]]:
        scene, socket, over = Scene(silence, *answers), Connected(), asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        await scene.transport._stay(socket, over)  # type: ignore[arg-type]
        return scene.tokens.asked, socket.given

    return run(use)


def test_an_open_connection_is_given_a_token_each_three_quarters_of_an_hour() -> None:
    asked, given = stays(4 * 3600, {"jwt": "second"}, {"jwt": "third"})
    assert asked == pytest.approx([2700 * times for times in (1, 2, 3, 4, 5)])
    assert [jwt for _, jwt in given] == ["second", "third", "third", "third", "third"]


@pytest.mark.parametrize("answer", [TryLater("busy"), NotRegistered("gone"), {"jwt": None}, {}])
def test_a_token_that_is_not_to_be_had_is_asked_for_ever_later(answer: dict[str, Any] | Exception) -> None:
    asked, given = stays(3600, answer)
    assert asked[0] == pytest.approx(2700)
    assert 5 <= len(asked) <= 6 + 900 / 30
    assert given == []


def test_a_refused_token_of_the_machine_ends_it() -> None:
    with pytest.raises(TokenRefused):
        stays(3600, TokenRefused("revoked"))

    async def refused() -> None:
        raise TokenRefused("revoked")

    async def use(scene: Scene) -> None:
        for _ in range(2):
            scene.pace.looked(found=False, poll_after=30)
            with pytest.raises(TokenRefused):
                await scene.waited()

    of_scene(use, refused)


# -- the library --------------------------------------------------------------------------------------------------------


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_program_starts_without_the_library() -> None:
    code = """
import sys
sys.modules["realtime"] = sys.modules["websockets"] = None
import orchestrator.__main__, orchestrator.commands, orchestrator.loop
assert "orchestrator.transports.realtime" not in sys.modules
"""
    done = in_a_process(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_library_writes_nothing_on_the_owners_screen() -> None:
    code = f"""
import asyncio
from orchestrator.pace import Pace
from orchestrator.transports import realtime
async def main():
    credentials = {{"supabaseUrl": {NOBODY!r}, "anonKey": "k", "jwt": "j", "channel": "dispatch:o", "table": "t"}}
    transport = realtime.Realtime(None, Pace(), credentials)
    transport._pace.looked(found=False, poll_after=30)
    await transport.wait()
    await transport.aclose()
asyncio.run(main())
"""
    done = in_a_process(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

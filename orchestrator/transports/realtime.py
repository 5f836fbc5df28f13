"""Supabase Realtime: its server says over a websocket that a row for this machine was written. Needs the package `realtime`.

What it says is never read for more than "look now", and it is never relied on: underneath, the server is polled as without it. So a lost,
late, doubled or invented event costs a poll at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from realtime import AsyncRealtimeChannel, AsyncRealtimeClient, RealtimeSubscribeStates
from realtime.types import RealtimePostgresChangesListenEvent as Change
from websockets.exceptions import ConnectionClosed

from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.pace import SHORTEST_SECONDS, UNTOLD_SECONDS, Pace
from orchestrator.wire import Unreadable

LONGEST_SECONDS: Final = 30.0
"""Between two looks while the server answers, whatever was or was not heard."""
LIFETIME_SECONDS: Final = 3600.0
"""A token's, where its `expiresAt` cannot be believed."""
SHORTEST_LIFETIME_SECONDS: Final = 60.0
REFRESHED_AFTER: Final = 0.75
"""Of the lifetime: leaves a quarter of an hour for a server that does not answer."""
RETRY_SECONDS: Final = 1.0
LONGEST_RETRY_SECONDS: Final = 60.0
STEADY_SECONDS: Final = 60.0
"""A connection that lasted this long ends the row of failures."""
ANSWER_SECONDS: Final = 10
OPENING_SECONDS: Final = 30.0
CLOSING_SECONDS: Final = 2.0


class _Socket(AsyncRealtimeClient):
    """One connection. The library's own way to connect again gives up after some attempts, and comes back with the first token."""

    def __init__(self, over: asyncio.Event, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._over = over

    async def _listen(self) -> None:
        """Whatever ends the reading of messages, the library's own mistakes included, ends the connection: nobody would hear of it."""
        with contextlib.suppress(Exception):
            await super()._listen()
        self._over.set()


class Realtime:
    """Polls, and looks sooner when it is told to. `credentials`: the `realtime` object of the registration's answer."""

    def __init__(self, client: Client, pace: Pace, credentials: Mapping[str, Any]) -> None:
        self._client, self._pace, self._credentials = client, pace, credentials
        self._news = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._jwt = credentials.get("jwt")
        self._refresh_at = _clock() + _good_for(credentials.get("expiresAt"))

    async def wait(self) -> None:
        """Returns when the next poll is due or something was heard, but after a second at the least if nobody here is in a hurry."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        due, told = asyncio.create_task(self._pace.until_due()), asyncio.create_task(self._told())
        try:
            await asyncio.wait([due, told, self._keeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            due.cancel()
            told.cancel()
            await asyncio.gather(due, told, return_exceptions=True)
        if self._keeping.done():
            self._keeping.result()

    async def aclose(self) -> None:
        """Closes the connection; the network gets two seconds for it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _told(self) -> None:
        """Returns when something was heard since the last time, whatever number of times."""
        if self._pace.failing:
            await asyncio.get_running_loop().create_future()  # not before the server wants to be asked again
        await asyncio.sleep(SHORTEST_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_SECONDS - SHORTEST_SECONDS):
                await self._news.wait()
        self._news.clear()

    # -- the connection -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Connects again whenever there is something wrong, ever later. Ends only by TokenRefused."""
        failures = 0
        while True:
            began = _clock()
            try:
                await self._connection()
            except TokenRefused:
                raise
            except Exception:  # noqa: BLE001, S110 - the network, the server and the library have many ways to fail, and one consequence
                pass
            self._pace.untold = UNTOLD_SECONDS
            self._news.set()
            failures = 1 if _clock() - began > STEADY_SECONDS else failures + 1
            await asyncio.sleep(_backoff(failures))

    async def _connection(self) -> None:
        """One connection from beginning to end. Returns when it is broken, closed, or in any doubt."""
        if self._jwt is None or _clock() >= self._refresh_at:
            await self._refresh()
        over = asyncio.Event()

        def said(state: RealtimeSubscribeStates, error: Exception | None) -> None:
            if state is RealtimeSubscribeStates.SUBSCRIBED:
                self._pace.untold = LONGEST_SECONDS
                self._news.set()
                return
            if not isinstance(error, ConnectionClosed):
                self._jwt = None  # it may be the token that the server does not like, or like any more
            over.set()

        url, key = f"{self._credentials['supabaseUrl']}/realtime/v1", self._credentials["anonKey"]
        socket = _Socket(over, url, token=key, auto_reconnect=False, timeout=ANSWER_SECONDS)
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                await socket.set_auth(self._jwt)
                await socket.connect()
                await self._channel(socket).subscribe(said)
            await self._stay(socket, over)
        finally:
            await _close(socket)

    def _channel(self, socket: AsyncRealtimeClient) -> AsyncRealtimeChannel:
        name, table = self._credentials["channel"], self._credentials["table"]
        channel = socket.channel(name)
        for change in (Change.Insert, Change.Update):
            channel.on_postgres_changes(
                change,
                self._heard,
                table=table,
                schema="public",
                filter=f"orchestrator_id=eq.{name.partition(':')[2]}",
            )
        # Between the answer to the subscription and this message nothing is heard yet.
        return channel.on_system(lambda _: self._news.set())

    def _heard(self, payload: Mapping[str, Any]) -> None:
        """A row was written. That it is claimed, renewed or reported on is no news: this machine did it."""
        record = payload["data"].get("record") or {}
        if record.get("claimed_at") is None or record.get("cancel_requested_at") is not None:
            self._news.set()

    # -- the token ------------------------------------------------------------------------------------------------------

    async def _stay(self, socket: AsyncRealtimeClient, over: asyncio.Event) -> None:
        """Returns when it is over. Until then the connection never has a token that has expired."""
        failures = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    max(self._refresh_at - _clock(), _backoff(failures) if failures else 0)
                ):
                    await over.wait()
                    return
            try:
                await self._refresh()
            except (ClaimLost, NotRegistered, Refused, TryLater, Unreadable):
                failures += 1
            else:
                failures = 0
                await socket.set_auth(self._jwt)

    async def _refresh(self) -> None:
        answer = await self._client.realtime_token()
        jwt = answer.get("jwt")
        if not isinstance(jwt, str):
            raise Unreadable("jwt: is not a string")
        self._jwt, self._refresh_at = jwt, _clock() + _good_for(answer.get("expiresAt"))


def _good_for(expires_at: Any) -> float:
    """Seconds after which a token that has just come is exchanged. The clock on the wall, which may be wrong, can only shorten it."""
    try:
        lifetime: float = datetime.fromisoformat(expires_at).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        lifetime = math.inf
    if lifetime < SHORTEST_LIFETIME_SECONDS:
        lifetime = LIFETIME_SECONDS
    return min(lifetime, LIFETIME_SECONDS) * REFRESHED_AFTER


def _backoff(failures: int) -> float:
    """Seconds: 1, 2, 4 … 60, half of it at random, so that machines whom a restart has thrown out do not come back together."""
    longest = min(RETRY_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_RETRY_SECONDS)
    return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads load, guards nothing


async def _close(socket: AsyncRealtimeClient) -> None:
    for channel in socket.get_channels():
        channel.rejoin_timer.reset()
        channel.join_push.destroy()
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CLOSING_SECONDS):
            await socket.close()


_clock = time.monotonic

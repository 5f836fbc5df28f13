"""A long poll: the server answers as soon as a row for this machine is committed."""

from __future__ import annotations

import asyncio
from typing import Final

from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TryLater
from orchestrator.pace import SHORTEST_SECONDS, Pace
from orchestrator.wire import Unreadable

WAIT_SECONDS: Final = 25
"""Below the half minute after which gateways and proxies close a connection that says nothing."""


class Listen:
    """Falls back to polling by itself: a server that cannot wait answers at once and says when to come again."""

    def __init__(self, client: Client, pace: Pace) -> None:
        self._client, self._pace = client, pace

    async def wait(self) -> None:
        """Returns when the server says that there is something, or when a server that cannot wait is due for a poll."""
        while True:
            await self._pace.until_due()
            if not self._client.extended:
                return
            clock = asyncio.get_running_loop().time
            asked = clock()
            try:
                polled = await self._client.poll(wait=WAIT_SECONDS)
            except TryLater as error:
                self._pace.failed(error.retry_after)
                continue
            except (ClaimLost, NotRegistered, Refused, Unreadable):
                return  # the loop's own look says what to make of it
            if polled.messages or polled.stop:
                return
            hint = polled.poll_after
            if hint is not None and clock() - asked < SHORTEST_SECONDS:
                hint = max(hint, SHORTEST_SECONDS)  # "ask again at once" is right only after a wait
            self._pace.looked(found=False, poll_after=hint)

    async def aclose(self) -> None:
        """Holds nothing."""

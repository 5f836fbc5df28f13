"""When to look next: at once after success, by the server's hint while there is nothing, ever later while nobody answers."""

from __future__ import annotations

import asyncio
import random
from typing import Final

UNTOLD_SECONDS: Final = 5.0
"""What the original client waits between two polls; for servers without a hint of their own."""
LONGEST_SECONDS: Final = 60.0
SHORTEST_SECONDS: Final = 1.0


class Pace:
    """Told by the loop how each look went; asked by a transport when the next one is due.

    Waits are stretched by up to a tenth, at random: machines that a server's restart has brought together drift apart again.
    """

    def __init__(self) -> None:
        self._delay = 0.0
        self._failures = 0
        self._hurry = asyncio.Event()
        self.untold = UNTOLD_SECONDS
        """What stands for the hint of a server that gives none; more while a transport hears of changes by itself."""

    @property
    def failing(self) -> bool:
        """Whether the last look was not answered: whoever else says that there is something, the server is left alone until it is due."""
        return self._failures > 0

    def looked(self, *, found: bool, poll_after: float | None) -> None:
        """A look was answered. `poll_after`: the server's hint in seconds."""
        self._failures = 0
        wanted = self.untold if poll_after is None else min(poll_after, LONGEST_SECONDS)
        self._delay = 0.0 if found else wanted * random.uniform(1, 1.1)  # noqa: S311 - spreads load, guards nothing

    def failed(self, retry_after: float | None) -> None:
        """Nobody answered: 1, 2, 4 … 60 s, half of it at random; never before the server asks for it."""
        self._failures = min(self._failures + 1, 10)
        backoff = min(SHORTEST_SECONDS * 2 ** (self._failures - 1), LONGEST_SECONDS)
        self._delay = max(backoff * random.uniform(0.5, 1), (retry_after or 0) * random.uniform(1, 1.1))  # noqa: S311

    def hurry(self) -> None:
        """Something has changed here (a job ended, the machine woke up): the next look is due now."""
        self._hurry.set()

    async def until_due(self) -> None:
        """Waits until the next look is due."""
        try:
            async with asyncio.timeout(self._delay):
                await self._hurry.wait()
        except TimeoutError:
            pass
        self._hurry.clear()
        self._delay = SHORTEST_SECONDS  # whoever waits again without having looked does not spin

"""Short polls: the loop's own look is the poll, so that there is nothing to do here but to wait until it is due."""

from __future__ import annotations

from orchestrator.pace import Pace


class Poll:
    """Needs nothing but the server, from behind any firewall."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def wait(self) -> None:
        """Returns when the next poll is due."""
        await self._pace.until_due()

    async def aclose(self) -> None:
        """Holds nothing."""

"""How the machine learns that it should look. Whatever a transport misses, the next look finds: it is latency, never the work."""

from __future__ import annotations

from typing import Protocol


class Transport(Protocol):
    """Made when the machine has registered, closed when it stops; between the two the loop waits, looks, and waits again."""

    async def wait(self) -> None:
        """Returns when it is worth looking; says nothing about what there is.

        Returns too in every doubt, but not sooner than the loop's Pace allows. What the network does is no error here.
        Raises TokenRefused.
        """

    async def aclose(self) -> None:
        """Ends it."""

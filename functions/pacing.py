"""How soon a machine should look again: soon while there is work, seldom while there is none."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final
from uuid import UUID

SHORTEST_MS: Final = 1_000
LONGEST_MS: Final = 30_000
_MACHINES: Final = 10_000  # about 1 MB; whoever falls out is told to come back soon, nothing else


class Pacing:
    """Doubles from one second to thirty with each poll that finds nothing.

    A hint, kept in this instance's memory: another instance, or the next cold start, begins again at one second. No row waits longer
    than `LONGEST_MS` for being looked at, and one that is known to become due is looked at when it does.
    """

    def __init__(self) -> None:
        self._hints: OrderedDict[UUID, int] = OrderedDict()
        self._lock = Lock()

    def after_poll(self, orchestrator_id: UUID, *, found: bool, next_due_ms: int | None) -> int:
        """The milliseconds until the next poll is worth it.

        Args:
            found: whether this poll found work.
            next_due_ms: in how many milliseconds the machine's next row becomes claimable, where that is known.
        """
        with self._lock:
            last = self._hints.pop(orchestrator_id, 0)
            hint = SHORTEST_MS if found else min(max(2 * last, SHORTEST_MS), LONGEST_MS)
            self._hints[orchestrator_id] = 0 if found else hint
            if len(self._hints) > _MACHINES:
                self._hints.popitem(last=False)
        return hint if next_due_ms is None else min(hint, max(next_due_ms, SHORTEST_MS))

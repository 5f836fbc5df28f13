"""The places of this machine, one for each piece of work that it holds: what runs, and what is only given back or reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from orchestrator.job import Job


class Places:
    """As many as may be held at once. `ended` is called when one is free again, with the error if the work broke."""

    def __init__(self, most: int, ended: Callable[[BaseException | None], None]) -> None:
        self.jobs: dict[str, Job] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._most, self._ended, self._free = most, ended, asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether nothing more could be started."""
        return len(self.tasks) >= self._most

    def hold(self, queue_id: str, work: Coroutine[Any, Any, None], job: Job | None = None) -> None:
        """Gives a place to `work`, until it has ended."""
        task = self.tasks[queue_id] = asyncio.create_task(work)
        if job is not None:
            self.jobs[queue_id] = job

        def ended(_: asyncio.Task[None]) -> None:
            del self.tasks[queue_id]
            self.jobs.pop(queue_id, None)
            self._free.set()
            self._ended(None if task.cancelled() else task.exception())

        task.add_done_callback(ended)

    async def until_one_is_free(self) -> None:
        """Waits for the end of anything that holds a place."""
        self._free.clear()
        await self._free.wait()

"""One look: what waits for this machine, what of it should stop, and a claim for whatever there is a place for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from orchestrator.client import ClaimLost, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.delivery import Desk, deliver
from orchestrator.job import Job
from orchestrator.journal import Unwritable
from orchestrator.pace import SHORTEST_SECONDS, Pace
from orchestrator.places import Places
from orchestrator.recovery import UNANSWERED, give_back
from orchestrator.wire import Claim, Message, Release, Unreadable

AGAIN_SECONDS: Final = 60.0
"""Before the same row is taken again from a server of the original protocol, which may offer what was given back at once."""


class Looking:
    """`unanswered`: why the last look was not answered; None when it was."""

    def __init__(self, desk: Desk, places: Places, pace: Pace) -> None:
        self._desk, self._places, self._pace = desk, places, pace
        self.unanswered: str | None = None
        # When, by the loop's clock; only what a server without attempts has given.
        self._taken: dict[str, float] = {}

    async def look(self) -> bool:
        """One poll, and a claim for each message that there is a place for. Returns whether anything was claimed."""
        try:
            polled = await self._desk.client.poll()
        except TokenRefused as error:
            self._desk.refused(str(error))
            return False
        except (TryLater, NotRegistered, ClaimLost, Refused, Unreadable) as error:
            self._pace.failed(error.retry_after if isinstance(error, TryLater) else None)
            self._desk.screen.event("waiting", why=str(error))
            self.unanswered = str(error)
            return False
        self.unanswered = None
        for queue_id in polled.stop & self._places.jobs.keys():
            self._places.jobs[queue_id].halt("stop")
        found, refused = await self._take(polled.messages)
        if refused and not found:  # full for a reason that lies elsewhere: it is not asked again every second
            self._pace.failed(None)
        else:
            # "At once" is right after a wait at the server, and this was none.
            hint = (
                polled.poll_after if polled.poll_after is None else max(polled.poll_after, SHORTEST_SECONDS)
            )
            self._pace.looked(found=found, poll_after=hint)
        return found

    async def _take(self, messages: Sequence[Message]) -> tuple[bool, bool]:
        """Claims what there is a place for. Returns whether anything was claimed, and whether anything was refused."""
        sessions = {job.session_id: job for job in self._places.jobs.values()}
        found = refused = False
        for message in messages:
            if message.session_id in sessions:
                # Its work waits again, on this row or on a new one: this machine's claim is lost, and what runs is ended first.
                sessions[message.session_id].halt("lost")
            elif (
                message.queue_id in self._places.tasks
                or self._too_soon(message.queue_id)
                or self._places.full
            ):
                continue
            else:
                claimed = await self._claim(message)
                found, refused = found or claimed is True, refused or claimed is None
        return found, refused

    async def _claim(self, message: Message) -> bool | None:
        """Whether it was claimed; None when the server or this machine's disk refuses."""
        try:
            self._desk.journal.asked(message)
        except Unwritable as error:
            self._desk.screen.event("waiting", issue=message.identifier, why=str(error))
            return None
        try:
            claim = await self._desk.client.claim(message.queue_id)
        except TokenRefused as error:
            self._desk.journal.forget(message.queue_id)
            self._desk.refused(str(error))
        except (ClaimLost, Refused, NotRegistered) as error:
            self._desk.journal.forget(message.queue_id)
            self._desk.screen.event("not claimed", issue=message.identifier, why=str(error))
            return None
        except (TryLater, Unreadable) as error:
            # It may have been granted all the same. Given back it is somebody's in a minute, not after the claim's timeout.
            self._desk.screen.event("unheard", issue=message.identifier, why=str(error))
            asked = next(
                each for each in self._desk.journal.unfinished() if each.queue_id == message.queue_id
            )
            self._places.hold(message.queue_id, give_back(self._desk, asked, UNANSWERED))
        else:
            return self._begin(claim)
        return False

    def _begin(self, claim: Claim) -> bool | None:
        message = claim.message
        try:
            self._desk.journal.claimed(claim)
        except Unwritable as error:
            self._places.hold(message.queue_id, deliver(self._desk, claim.held, Release(str(error))))
            return None
        self._desk.screen.event(
            "claimed",
            issue=message.identifier,
            attempt=claim.attempt,
            repo=message.repo,
            session=message.session_id,
        )
        job = Job(self._desk, claim)
        self._places.hold(message.queue_id, job.run(), job)
        if claim.attempt is None:
            self._taken[message.queue_id] = asyncio.get_running_loop().time()
        return True

    def _too_soon(self, queue_id: str) -> bool:
        """Whether it was taken less than a minute ago. A server of ours counts attempts and waits by itself."""
        since = asyncio.get_running_loop().time() - AGAIN_SECONDS
        self._taken = {taken: at for taken, at in self._taken.items() if at > since}
        return queue_id in self._taken

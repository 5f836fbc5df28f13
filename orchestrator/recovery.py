"""What an earlier start of the program has left, by the journal's word: nothing of it waits for the claim's timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from orchestrator import processes
from orchestrator.client import ClaimLost, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.delivery import Desk, deliver
from orchestrator.job import Job
from orchestrator.journal import Entry
from orchestrator.pace import Pace
from orchestrator.wire import Held, Release, Unreadable

RESTARTED: Final = "the orchestrator was restarted while the work was under way"
UNANSWERED: Final = "the answer to the claim never arrived"


def held(entry: Entry) -> Held:
    """The claim that the entry is about."""
    return Held(entry.queue_id, entry.session_id, entry.identifier, entry.attempt)


async def resume(desk: Desk, entry: Entry, job: Job) -> None:
    """Runs what was claimed and not begun, if the claim is still held."""
    pace = Pace()
    while True:
        try:
            await desk.client.renew(held(entry), 0)
        except TryLater as error:
            pace.failed(error.retry_after)
            await pace.until_due()
        except (ClaimLost, Refused, NotRegistered, Unreadable) as error:
            desk.screen.event("lost", issue=entry.identifier, attempt=entry.attempt, why=str(error))
            desk.journal.forget(entry.queue_id)
            return
        except TokenRefused as error:
            desk.refused(str(error))
            return
        else:
            break
    await job.run()


async def end_orphans(desk: Desk, entries: Sequence[Entry]) -> None:
    """Ends the agents that were left behind, whether or not a server answers: their claims may be somebody else's by now."""
    left = [
        (entry, entry.pid)
        for entry in entries
        if entry.pid is not None and processes.is_ours(entry.pid, entry.birth)
    ]
    for entry, process in left:
        desk.screen.event("orphan", issue=entry.identifier, process=process)
    await asyncio.gather(*(processes.end(process, desk.command.patience) for _, process in left))


async def give_back(desk: Desk, entry: Entry, why: str) -> None:
    """Releases the claim, if it was granted."""
    await deliver(desk, held(entry), Release(why))

"""Telling the server how a claim ended, until it has answered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.journal import Journal
from orchestrator.runner import Command
from orchestrator.screen import Screen
from orchestrator.wire import Completion, Held, Release, Unreadable

LONGEST_PAUSE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Desk:
    """What all jobs share."""

    client: Client
    journal: Journal
    screen: Screen
    command: Command
    sessions: Path
    refused: Callable[[str], None]


async def deliver(desk: Desk, held: Held, outcome: Completion | Release) -> None:
    """Tells the server how it ended until it has answered, then forgets the work."""
    failures = 0

    def event(name: str, **facts: Any) -> None:
        desk.screen.event(name, issue=held.identifier, attempt=held.attempt, **facts)

    while True:
        try:
            if isinstance(outcome, Release):
                await desk.client.release(held, outcome.error)
            else:
                await desk.client.complete(held, outcome)
        except TryLater as error:
            failures += 1
            pause = min(2.0 ** min(failures, 6), LONGEST_PAUSE_SECONDS)
            event("waiting", why=str(error), again_in=f"{pause:g}s")
            await asyncio.sleep(max(error.retry_after or 0, pause * random.uniform(0.5, 1)))  # noqa: S311
        except ClaimLost as error:
            event("lost", why=str(error))
            desk.journal.forget(held.queue_id)
            return
        except (TokenRefused, NotRegistered) as error:
            desk.refused(str(error))  # it stays in the journal: the next start may have a token
            return
        except (Refused, Unreadable) as error:
            event("refused", why=str(error))
            if isinstance(outcome, Release):
                desk.journal.forget(held.queue_id)
                return
            # That it is over counts more than what was said about it.
            bare = outcome._replace(facts={})
            outcome = bare if outcome.facts else Release(f"the server did not take the result: {error}")
        else:
            desk.journal.forget(held.queue_id)
            _announce(event, outcome)
            return


def _announce(event: Callable[..., None], outcome: Completion | Release) -> None:
    if isinstance(outcome, Release):
        event("released", why=outcome.error)
    elif outcome.success:
        event("completed", pr=outcome.facts.get("prUrl"))
    else:
        event("failed", why=outcome.facts.get("errorMessage"))

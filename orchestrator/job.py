"""One claim from the moment it is held until the server has confirmed its end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from orchestrator import processes
from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.journal import Journal
from orchestrator.result import Progress
from orchestrator.runner import Command, Ending, Run
from orchestrator.screen import Line, Screen
from orchestrator.wire import Claim, Completion, News, Release, Unreadable

RENEW_SECONDS: Final = 15.0
"""At most: a renewal also brings requests to stop and follow-ups, and a person waits for those."""
REPORT_SECONDS: Final = 5.0
"""Between two progress reports of a job; what comes in between is merged."""
UNTOLD_LEASE_SECONDS: Final = 600.0
"""Where the server does not say how long a claim lasts: a third of it is often enough for any that has a timeout of minutes."""
LONGEST_PAUSE_SECONDS: Final = 60.0

Halt = Literal["stop", "lost", "shutdown"]
SHUTDOWN: Final = "the orchestrator was stopped before the work was done"


@dataclass(frozen=True, slots=True)
class Desk:
    """What all jobs share."""

    client: Client
    journal: Journal
    screen: Screen
    command: Command
    sessions: Path
    refused: Callable[[str], None]


class Held(NamedTuple):
    """A claim by its names."""

    queue_id: str
    session_id: str
    identifier: str
    attempt: int | None


class Job:
    """`run` does all of it; `halt` and `check` are said to it from outside while it runs."""

    def __init__(self, desk: Desk, claim: Claim) -> None:
        self._desk, self._claim, self._message = desk, claim, claim.message
        self._held = Held(
            claim.message.queue_id, claim.message.session_id, claim.message.identifier, claim.attempt
        )
        self._prompts: list[dict[str, Any]] = claim.message.prompts
        self._unheard = 0  # how many of them, the last ones, no run has been given
        self._halted: Halt | None = None
        self._halt, self._check, self._reports = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._progress: Progress | None = None
        self._run: Run | None = None
        self._since = asyncio.get_running_loop().time()

    def line(self) -> Line:
        """For the screen."""
        percent, note = self._progress or (None, None)
        seconds = asyncio.get_running_loop().time() - self._since
        message = self._message
        return Line(
            message.identifier, message.title, message.repo, self._held.attempt, seconds, percent, note
        )

    def halt(self, why: Halt) -> None:
        """Ends the agent. `stop`: asked for by somebody; `lost`: the claim is not ours any more; `shutdown`: this program ends."""
        if self._halted is None or why == "lost":
            self._halted = why
        self._halt.set()

    def kill(self) -> None:
        """Ends the agent at once, as `shutdown`."""
        self.halt("shutdown")
        if self._run is not None:
            self._run.kill()

    def check(self) -> None:
        """Something may have happened meanwhile (the machine was asleep): renews at once."""
        self._check.set()

    async def run(self) -> None:
        """Works, and sees to it that the server learns of the end."""
        keeping = [asyncio.create_task(self._keep()), asyncio.create_task(self._report())]
        try:
            while True:
                outcome = await self._work()
                if outcome is None or self._halted == "lost":
                    self._desk.journal.forget(self._held.queue_id)
                    self._event("lost", why="the claim is not held any more")
                    return
                self._desk.journal.ended(self._held.queue_id, outcome)
                if await self._deliver(outcome):
                    return
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    # -- the work -------------------------------------------------------------------------------------------------------

    async def _work(self) -> Completion | Release | None:
        """Runs the command, again for follow-ups that came too late for it. None: the claim is lost, nobody asks any more."""
        while self._halted is None:
            new, self._unheard = self._prompts[len(self._prompts) - self._unheard :], 0
            run = self._run = Run(self._desk.command, self._folder, self._heard_progress)
            try:
                await self._start(run, new)
            except OSError as error:
                return Completion(
                    success=False,
                    facts={"errorMessage": f"the agent cannot be started: {error.strerror or error}"},
                )
            ending = await self._until_it_ends(run)
            self._run = None
            if ending is None:
                break
            for name in ending.odd:
                self._event("ignored", field=name, why="not what the protocol takes")
            if ending.status != 0 or not self._unheard:
                return ending.outcome()
            self._event("again", follow_ups=self._unheard)
        return self._forced()

    def _forced(self) -> Completion | Release | None:
        if self._halted == "lost":
            return None
        if self._halted == "shutdown":
            return Release(SHUTDOWN)
        limit = f"the agent did not finish within {self._desk.command.timeout:g} s"
        return Completion(
            success=False, facts={"errorMessage": limit if self._halted is None else "stopped on request"}
        )

    async def _start(self, run: Run, new: Sequence[dict[str, Any]]) -> None:
        message = self._message
        if self._prompts != message.prompts:
            message = type(message).read({**message.fields, "prompts": self._prompts})
        pid = await run.start(message, self._held.attempt, new)
        self._desk.journal.started(self._held.queue_id, pid, processes.birth(pid))
        run.let_go()

    async def _until_it_ends(self, run: Run) -> Ending | None:
        """How it ended by itself; None when it had to be ended: it was halted, or took too long."""
        ended, halt = asyncio.create_task(run.ended()), asyncio.create_task(self._halt.wait())
        try:
            await asyncio.wait(
                [ended, halt], timeout=self._desk.command.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done() and self._halted is None:
                return ended.result()
            await run.stop()
            await ended
        finally:
            halt.cancel()
        return None

    @property
    def _folder(self) -> Path:
        return self._desk.sessions / self._held.session_id

    # -- while it works -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renews the claim at a third of its lease, sooner when told to check."""
        lease = self._claim.lease or UNTOLD_LEASE_SECONDS
        pause = min(lease / 3, RENEW_SECONDS if self._held.attempt is not None else lease)
        while self._halted != "lost":
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._check.wait()
            self._check.clear()
            await self._tell(self._renew())

    async def _renew(self) -> News:
        if (
            self._held.attempt is None
        ):  # the original protocol knows no renewal; a report is proof of life too
            return await self._desk.client.report(self._held.session_id, None, percent=self._percent)
        return await self._desk.client.renew(self._held.queue_id, self._held.attempt, len(self._prompts))

    async def _report(self) -> None:
        """The first report says that the work has begun; the others carry what the agent says, a few seconds apart."""
        while True:
            progress = self._progress
            await self._tell(
                self._desk.client.report(
                    self._held.session_id,
                    self._held.attempt,
                    percent=self._percent,
                    message=None if progress is None else progress.note,
                    prompts_seen=len(self._prompts),
                )
            )
            await asyncio.sleep(REPORT_SECONDS)
            await self._reports.wait()
            self._reports.clear()

    @property
    def _percent(self) -> int:
        return 0 if self._progress is None else self._progress.percent

    async def _tell(self, request: Any) -> None:
        """One renewal or report. One that fails is not repeated: the next one says more."""
        try:
            news: News = await request
        except ClaimLost:
            if self._halted is None:
                self.halt("lost")
        except TokenRefused as error:
            self._desk.refused(str(error))
        except (TryLater, Refused, NotRegistered, Unreadable) as error:
            self._event("unheard", why=str(error))
        else:
            self._hear(news)

    def _hear(self, news: News) -> None:
        for prompt in news.prompts:
            if prompt in self._prompts:
                continue  # a renewal and a report were under way at once
            self._prompts.append(prompt)
            if self._desk.command.interactive and self._run is not None:
                self._run.say(prompt)
            else:
                self._unheard += 1
            self._event("prompted", follow_up=len(self._prompts))
        if news.stop and self._halted is None:
            self._event("stopping", why="somebody asked for it")
            self.halt("stop")

    def _heard_progress(self, progress: Progress) -> None:
        self._progress = progress
        self._reports.set()
        self._desk.screen.tick()

    # -- the end --------------------------------------------------------------------------------------------------------

    async def _deliver(self, outcome: Completion | Release) -> bool:
        """Tells the server. False: follow-ups have come in that the agent has not seen, and the work goes on."""
        seen = len(self._prompts) if isinstance(outcome, Completion) and outcome.success else None
        news = await deliver(self._desk, self._held, outcome, prompts_seen=seen)
        if news is None:
            return True
        self._hear(news)
        return False

    def _event(self, name: str, **facts: Any) -> None:
        self._desk.screen.event(name, issue=self._held.identifier, attempt=self._held.attempt, **facts)


async def deliver(
    desk: Desk, held: Held, outcome: Completion | Release, *, prompts_seen: int | None = None
) -> News | None:
    """Tells the server how it ended until it has answered, then forgets the work.

    Returns follow-ups that the agent has not seen, which only a server of ours says: then the work is not over.
    """
    failures = 0

    def event(name: str, **facts: Any) -> None:
        desk.screen.event(name, issue=held.identifier, attempt=held.attempt, **facts)

    while True:
        try:
            news = None
            if isinstance(outcome, Release):
                await desk.client.release(held.queue_id, held.attempt, outcome.error)
            else:
                news = await desk.client.complete(held.session_id, held.attempt, outcome, prompts_seen)
        except TryLater as error:
            failures += 1
            pause = min(2.0 ** min(failures, 6), LONGEST_PAUSE_SECONDS)
            event("waiting", why=str(error), again_in=f"{pause:g}s")
            await asyncio.sleep(max(error.retry_after or 0, pause * random.uniform(0.5, 1)))  # noqa: S311
        except ClaimLost as error:
            event("lost", why=str(error))
            desk.journal.forget(held.queue_id)
            return None
        except (TokenRefused, NotRegistered) as error:
            desk.refused(str(error))  # it stays in the journal: the next start may have a token
            return None
        except (Refused, Unreadable) as error:
            event("refused", why=str(error))
            if isinstance(outcome, Release):
                desk.journal.forget(held.queue_id)
                return None
            outcome = Release(f"the server did not take the result: {error}")
        else:
            if news is not None:
                return news
            desk.journal.forget(held.queue_id)
            _announce(event, outcome)
            return None


def _announce(event: Callable[..., None], outcome: Completion | Release) -> None:
    if isinstance(outcome, Release):
        event("released", why=outcome.error)
    elif outcome.success:
        event("completed", pr=outcome.facts.get("prUrl"))
    else:
        event("failed", why=outcome.facts.get("errorMessage"))

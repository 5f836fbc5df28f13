"""One claim from the moment it is held until the server has confirmed its end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final, Literal

from orchestrator import processes
from orchestrator.client import ClaimLost, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.delivery import Desk, deliver
from orchestrator.journal import Unwritable
from orchestrator.result import Progress
from orchestrator.runner import Ending, Run
from orchestrator.screen import Line
from orchestrator.wire import Claim, Completion, News, Release, Unreadable

RENEW_SECONDS: Final = 15.0
"""At most: a renewal also brings requests to stop and follow-ups, and a person waits for those."""
REPORT_SECONDS: Final = 5.0
"""Between two progress reports of a job; what comes in between is merged."""
UNTOLD_LEASE_SECONDS: Final = 600.0
"""Where the server does not say how long a claim lasts: a third of it is often enough for any that has a timeout of minutes."""
LAST_REPORT_SECONDS: Final = 3.0
"""For a report that is under way when the work ends."""

Halt = Literal["stop", "lost", "shutdown"]
SHUTDOWN: Final = "the orchestrator was stopped before the work was done"


class Job:
    """`run` does all of it; `halt` and `check` are said to it from outside while it runs."""

    def __init__(self, desk: Desk, claim: Claim) -> None:
        self._desk, self._claim, self._message = desk, claim, claim.message
        self._held = claim.held
        self._follow_ups: list[dict[str, Any]] = []  # those that came while it worked
        self._given = len(claim.message.prompts)  # how many of all, the first ones, the agent was given
        self._halted: Halt | None = None
        self._halt, self._check, self._reports = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._saying = asyncio.Lock()
        self._progress: Progress | None = None
        self._run: Run | None = None
        self._since = asyncio.get_running_loop().time()

    @property
    def session_id(self) -> str:
        """Whose work it is."""
        return self._held.session_id

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
            outcome = await self._work()
            if outcome is None or self._halted == "lost":
                self._desk.journal.forget(self._held.queue_id)
                self._event("lost", why="the claim is not held any more")
            else:
                with suppress(Unwritable):  # the server is told all the same
                    self._desk.journal.ended(self._held.queue_id, outcome)
                if self._held.attempt is None:
                    await self._silence(keeping)
                await deliver(self._desk, self._held, outcome)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    # -- the work -------------------------------------------------------------------------------------------------------

    async def _work(self) -> Completion | Release | None:
        """Runs the command. None: the claim is lost, nobody asks any more."""
        if self._halted is not None:
            return self._forced()
        run = Run(self._desk.command, self._desk.sessions / self._held.session_id, self._heard_progress)
        try:
            pid = await run.start(self._message, self._held.attempt)
        except (OSError, ValueError) as error:
            # That is this machine's fault, not the work's: another attempt, here or elsewhere, may do it.
            return Release(f"the agent cannot be started: {getattr(error, 'strerror', None) or error}")
        try:
            self._desk.journal.started(self._held.queue_id, pid, processes.birth(pid))
        except Unwritable as error:
            run.kill()
            await run.ended()
            return Release(f"the agent cannot be started: {error}")
        self._run = run
        run.let_go()
        ending = await self._until_it_ends(run)
        self._run = None
        if ending is None:
            return self._forced()
        self._given -= ending.unread
        for name in ending.odd:
            self._event("ignored", field=name, why="not what the protocol takes")
        outcome = ending.outcome()
        return outcome if isinstance(outcome, Release) else outcome._replace(prompts_seen=self._given)

    def _forced(self) -> Completion | Release | None:
        if self._halted == "lost":
            return None
        if self._halted == "shutdown":
            return Release(SHUTDOWN)
        if self._halted == "stop":
            return self._failed("stopped on request")
        return self._failed(f"the agent did not finish within {self._desk.command.timeout:g} s")

    def _failed(self, why: str) -> Completion:
        return Completion(success=False, facts={"errorMessage": why}, prompts_seen=self._given)

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
            return await self._say()
        return await self._desk.client.renew(self._held, self._heard)

    async def _report(self) -> None:
        """The first report says that the work has begun; the others carry what the agent says, a few seconds apart."""
        while True:
            note = None if self._progress is None else self._progress.note
            await self._tell(self._say(note))
            await asyncio.sleep(REPORT_SECONDS)
            await self._reports.wait()
            self._reports.clear()

    async def _say(self, note: str | None = None) -> News:
        async with self._saying:
            percent = 0 if self._progress is None else self._progress.percent
            return await self._desk.client.report(
                self._held, percent=percent, message=note, prompts_seen=self._heard
            )

    async def _silence(self, keeping: list[asyncio.Task[None]]) -> None:
        """Ends the reports. Without an attempt the server cannot know that one is old: arriving after the end, it would say that the
        work runs.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORT_SECONDS):
                await self._saying.acquire()
        for task in keeping:
            task.cancel()

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
        """A follow-up goes to an interactive run; for any other the server keeps it: the session begins anew with it."""
        for prompt in news.prompts:
            if prompt in self._follow_ups:
                continue  # a renewal and a report were under way at once
            self._follow_ups.append(prompt)
            at_once = (
                self._desk.command.interactive and self._run is not None and self._given == self._heard - 1
            )
            if at_once and self._run is not None and (at_once := self._run.say(prompt)):
                self._given += 1
            self._event("prompted", follow_up=self._heard, when="now" if at_once else "with the next run")
        if news.stop and self._halted is None:
            self._event("stopping", why="somebody asked for it")
            self.halt("stop")

    @property
    def _heard(self) -> int:
        """How many follow-ups there are, as far as this machine knows."""
        return len(self._message.prompts) + len(self._follow_ups)

    def _heard_progress(self, progress: Progress) -> None:
        self._progress = progress
        self._reports.set()
        self._desk.screen.tick()

    def _event(self, name: str, **facts: Any) -> None:
        self._desk.screen.event(name, issue=self._held.identifier, attempt=self._held.attempt, **facts)

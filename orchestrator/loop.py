"""The loop: wait, look, claim what can be started; and what surrounds it: recovery, heartbeats, sleep, the end.

Whatever stops it, the next start knows from the journal what was left, and the server gets an answer at once instead of after the
claim's timeout.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.delivery import Desk, deliver
from orchestrator.job import Job
from orchestrator.journal import Journal
from orchestrator.looking import Looking
from orchestrator.pace import Pace
from orchestrator.places import Places
from orchestrator.recovery import RESTARTED, UNANSWERED, end_orphans, give_back, held, resume
from orchestrator.runner import Command
from orchestrator.screen import Line
from orchestrator.transports import Transport
from orchestrator.wire import Claim, Registration, Unreadable

HEARTBEAT_SECONDS: Final = 30.0
CLOCK_SECONDS: Final = 5.0
ASLEEP_SECONDS: Final = 10.0
"""The clock on the wall is off by this much after a short nap of ours: the machine was asleep, or the clock was set, which costs one
renewal of each claim."""
LAST_WORD_SECONDS: Final = 10.0
"""At the end, for telling the server; what it does not take by then is in the journal."""

Result = TypeVar("Result")
MakeTransport = Callable[[Registration], Transport]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the server is told of this machine. `grace`: seconds that running work gets when the program is asked to end."""

    name: str
    repos: Sequence[str]
    max_jobs: int
    grace: float


class End(NamedTuple):
    """Why the program ended, as its exit code and in words: told to, or done (0); no answer (1); refused (3)."""

    code: int
    why: str | None = None


class Orchestrator:
    """One run of the program."""

    def __init__(
        self,
        machine: Machine,
        client: Client,
        journal: Journal,
        command: Command,
        desk_of: Callable[..., Desk],
    ) -> None:
        self._machine, self._client, self._journal = machine, client, journal
        self.pace = Pace()
        self._places = Places(machine.max_jobs, self._place_is_free)
        self._ending = asyncio.Event()
        self._signals = 0
        self._refusal: str | None = None
        self._unanswered: str | None = None
        self._broken: BaseException | None = None
        self._desk = desk_of(client=client, journal=journal, command=command, refused=self._refused)
        self._screen = self._desk.screen
        self._screen.show(self._lines)
        self.looking = Looking(self._desk, self._places, self.pace)

    async def run(self, make_transport: MakeTransport, *, once: bool = False) -> End:
        """Works until it is told to end (SIGTERM, SIGINT), the token is refused, or, with `once`, nothing waits any more."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        await end_orphans(self._desk, self._journal.unfinished())
        registration = await self._unless_ending(self._register(patient=not once))
        if registration is None:
            return self._end(self._unanswered)
        self._recover()
        transport = make_transport(registration)
        around = [
            self._claiming(transport, once=once),
            self._heartbeats(registration),
            self._watch(),
            self._ticks(),
        ]
        tasks = [asyncio.create_task(each) for each in around]
        end = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([*tasks, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*tasks, end):
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await transport.aclose()
            await self._finish()
        for broken in (*results, self._broken):
            if isinstance(broken, Exception):
                raise broken
        return self._end(self.looking.unanswered if once else None)

    def _end(self, unanswered: str | None = None) -> End:
        if self._refusal is not None:
            return End(3, self._refusal)
        return End(0) if unanswered is None else End(1, unanswered)

    # -- being told to end ----------------------------------------------------------------------------------------------

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1 and self._places.tasks:
            self._screen.event(
                "ending",
                running=len(self._places.tasks),
                grace=f"{self._machine.grace:g}s",
                again="ends at once",
            )
        self._ending.set()
        if self._signals > 1:
            for job in self._places.jobs.values():
                job.kill()

    def _refused(self, why: str) -> None:
        if self._refusal is None:
            self._refusal = why
            self._screen.event("refused", why=why)
        self._ending.set()

    def _place_is_free(self, broken: BaseException | None) -> None:
        if broken is not None:
            self._broken = broken
            self._ending.set()
        self.pace.hurry()

    async def _unless_ending(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """What `work` returns; None when the program is told to end before."""
        doing, end = asyncio.create_task(work), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([doing, end], return_when=asyncio.FIRST_COMPLETED)
            return doing.result() if doing.done() else None
        finally:
            doing.cancel()
            end.cancel()
            await asyncio.gather(doing, end, return_exceptions=True)

    async def _finish(self) -> None:
        """Lets running work end by itself for a while, ends what is left, and tells the server."""
        for entry in self._journal.unfinished():
            # Cut off between the question and the answer.
            if entry.state == "asked" and entry.queue_id not in self._places.tasks:
                self._places.hold(entry.queue_id, give_back(self._desk, entry, UNANSWERED))
        running = list(self._places.tasks.values())
        if not running:
            return
        if self._refusal is None and self._signals == 1:
            await asyncio.wait(running, timeout=self._machine.grace)
        for job in self._places.jobs.values():
            job.halt("shutdown")
        _, left = await asyncio.wait(running, timeout=self._desk.command.patience + LAST_WORD_SECONDS)
        for task in left:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # -- the machine ----------------------------------------------------------------------------------------------------

    async def _register(self, *, patient: bool = True) -> Registration | None:
        """None when it is refused; or when nobody answers, and that is not to be waited for."""
        pace = Pace()
        while True:
            try:
                registration = await self._client.register(
                    name=self._machine.name, repos=list(self._machine.repos), max_jobs=self._machine.max_jobs
                )
            except (TryLater, Unreadable) as error:  # a portal's page is not what the server says
                self._unanswered = str(error)
                if not patient:
                    return None
                pace.failed(error.retry_after if isinstance(error, TryLater) else None)
                self._screen.event("waiting", why=str(error))
                await pace.until_due()
            except (TokenRefused, NotRegistered, ClaimLost, Refused) as error:
                self._refused(str(error))
                return None
            else:
                self._unanswered = None
                self._screen.event("registered", machine=self._machine.name, id=registration.orchestrator_id)
                return registration

    async def _heartbeats(self, registration: Registration) -> None:
        """Says that the machine lives: at once, then every half a minute."""
        while True:
            try:
                await self._client.heartbeat(registration.orchestrator_id, len(self._places.jobs))
            except TokenRefused as error:
                self._refused(str(error))
            except NotRegistered:
                await self._register()
            except (TryLater, Refused, Unreadable) as error:
                self._screen.event("unheard", why=str(error))
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _watch(self) -> None:
        """Notices that the machine was asleep: connections are dead, claims may be lost, work may be waiting."""
        before = time.time()
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            late, before = time.time() - before - CLOCK_SECONDS, time.time()
            if abs(late) > ASLEEP_SECONDS:
                self._screen.event("awake", after=f"{late:.0f}s")
                await self._client.reconnect()
                for job in self._places.jobs.values():
                    job.check()
                self.pace.hurry()

    async def _ticks(self) -> None:
        """Moves the clocks on the screen while there are any."""
        while True:
            await asyncio.sleep(1)
            if self._places.jobs:
                self._screen.tick()

    def _lines(self) -> list[Line]:
        return [job.line() for job in self._places.jobs.values()]

    # -- what was left by the run before --------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Takes up what the journal holds: nothing of it waits for the claim's timeout."""
        for entry in self._journal.unfinished():
            self._screen.event("found", issue=entry.identifier, attempt=entry.attempt, state=entry.state)
            if entry.state == "ended" and entry.outcome is not None:
                self._places.hold(entry.queue_id, deliver(self._desk, held(entry), entry.outcome))
            elif entry.state == "claimed" and entry.attempt is not None and entry.message is not None:
                job = Job(self._desk, Claim(entry.message, entry.attempt, None))
                self._places.hold(entry.queue_id, resume(self._desk, entry, job), job)
            else:
                self._places.hold(entry.queue_id, give_back(self._desk, entry, RESTARTED))

    # -- looking --------------------------------------------------------------------------------------------------------

    async def _claiming(self, transport: Transport, *, once: bool) -> None:
        """Looks only when something could be started; with `once`, until a look finds nothing and everything has ended."""
        while not self._ending.is_set():
            if self._places.full:
                await self._places.until_one_is_free()
                continue
            if not once:
                try:
                    await transport.wait()
                except TokenRefused as error:
                    self._refused(str(error))
                    return
            found = await self.looking.look()
            if once and not found:
                if not self._places.tasks:
                    return
                await self._places.until_one_is_free()

"""What the queue should do, in plain Python: small enough to be believed by reading it.

Names instead of ids, and facts instead of times: a row is due or not, a claim has expired or not. Where the product may choose a
machine, the model is told the choice and checks that it was allowed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

OFFLINE_AFTER, REROUTE_AFTER = 90, 300


@dataclass
class MachineModel:
    name: str
    limit: int
    repos: frozenset[str]
    silent_for: int = 0

    @property
    def online(self) -> bool:
        return self.silent_for < OFFLINE_AFTER

    @property
    def away(self) -> bool:
        return self.silent_for > REROUTE_AFTER


@dataclass
class Row:
    machine: str
    prompts: int = 0
    attempts: int = 0
    claimed: bool = False
    claimed_by: str | None = None
    due: bool = True
    expired: bool = False
    stop: bool = False
    wanted_again: bool = False
    told: int = 0
    """How many of the follow-ups the message held when it was claimed."""
    backoff: tuple[float, float] | None = None
    """Seconds between which the wait must lie that the last give-up set; None when it was set otherwise."""


@dataclass
class SessionModel:
    name: str
    issue: str
    repo: str
    machine: str
    status: str = "pending"
    error_code: str | None = None
    row: Row | None = None
    letter_prompts: int | None = None
    """Follow-ups in the dead letter's message; None while it never was one."""

    @property
    def is_dead_letter(self) -> bool:
        return self.status == "error" and self.error_code in ("attempts_exhausted", "no_orchestrator")


@dataclass
class Queue:
    max_attempts: int = 3
    machines: dict[str, MachineModel] = field(default_factory=dict)
    sessions: dict[str, SessionModel] = field(default_factory=dict)

    # -- questions ------------------------------------------------------------------------------------------------------

    def rows_of(self, machine: str) -> list[SessionModel]:
        return [s for s in self.sessions.values() if s.row is not None and s.row.machine == machine]

    def claims_of(self, machine: str) -> list[SessionModel]:
        return [s for s in self.rows_of(machine) if s.row is not None and s.row.claimed]

    def due_for(self, machine: str) -> list[SessionModel]:
        return [s for s in self.rows_of(machine) if s.row is not None and not s.row.claimed and s.row.due]

    def is_open(self, issue: str) -> bool:
        return any(s.issue == issue and s.row is not None for s in self.sessions.values())

    def places(self, machine: str) -> int:
        """What the machine could still claim."""
        return max(0, self.machines[machine].limit - len(self.claims_of(machine)))

    def candidates(self, session: SessionModel) -> list[MachineModel]:
        """Where a waiting row could be re-routed to."""
        assert session.row is not None
        return [
            m
            for m in self.machines.values()
            if m.name != session.row.machine
            and m.online
            and session.repo in m.repos
            and len(self.rows_of(m.name)) < m.limit
        ]

    def held(self, machine: str, session: str, attempt: int | None) -> Row | None:
        """The row, if this machine holds the claim that is meant."""
        row = self.attempted(machine, session, attempt)
        return row if row is not None and row.claimed else None

    def attempted(self, machine: str, session: str, attempt: int | None) -> Row | None:
        """The row, if this machine's attempt is its last."""
        row = self.sessions[session].row
        return (
            row if row is not None and row.claimed_by == machine and attempt in (None, row.attempts) else None
        )

    # -- transitions ----------------------------------------------------------------------------------------------------

    def enqueue(self, session: SessionModel, machine: str, *, prompts: int = 0) -> None:
        session.row, session.machine = Row(machine, prompts), machine
        session.status, session.error_code = "pending", None

    def claim(self, machine: str, session: str) -> int | None:
        found = self.sessions[session]
        if found not in self.due_for(machine) or self.places(machine) == 0:
            return None
        assert found.row is not None
        found.row.claimed, found.row.claimed_by, found.row.expired, found.row.backoff = (
            True,
            machine,
            False,
            None,
        )
        found.row.attempts += 1
        found.row.told = found.row.prompts
        found.status = "dispatched"
        return found.row.attempts

    def renew(self, machine: str, session: str, attempt: int | None) -> bool:
        row = self.held(machine, session, attempt)
        if row is not None:
            row.expired = False
        return row is not None

    def end(self, session: SessionModel, status: str, error_code: str | None = None) -> None:
        session.row, session.status, session.error_code = None, status, error_code

    def follow_up(self, row: Row) -> None:
        """Somebody says more; while a stop is pending, that is to want the work again."""
        row.prompts += 1
        row.wanted_again = row.stop

    def left(self, row: Row, *, success: bool) -> int | None:
        """With how many follow-ups the session begins anew when this claim ends so; None: it does not."""
        if row.stop and not row.wanted_again:
            return None
        if row.wanted_again and not success:
            return row.prompts
        return row.prompts - row.told or None

    def give_up(self, session: SessionModel, *, jitter: float) -> str:
        """A release or an expiry."""
        row = session.row
        assert row is not None
        if row.stop and not row.wanted_again:
            self.end(session, "cancelled")
            return "cancelled"
        if row.attempts >= self.max_attempts:
            session.letter_prompts = row.prompts
            self.end(session, "error", "attempts_exhausted")
            return "dropped"
        row.stop = row.wanted_again = False
        wait = min(row.attempts**2 * 60, 900)
        row.claimed, row.due, row.expired, row.backoff = False, False, False, (wait, wait * (1 + jitter))
        session.status = "pending"
        return "released"

    def move(self, session: SessionModel, to: str) -> None:
        """A re-route to a machine that the product has chosen."""
        assert to in [m.name for m in self.candidates(session)], f"{session.name} may not go to {to}: {self}"
        assert session.row is not None
        session.row.machine = session.machine = to

    def emptiest(self, candidates: list[MachineModel]) -> float:
        return min(len(self.rows_of(m.name)) / m.limit for m in candidates)

    def cancel(self, session: str) -> str | None:
        found = self.sessions[session]
        if found.row is None:
            return None
        if found.row.claimed:
            found.row.stop, found.row.wanted_again = True, False
            return "stop_requested"
        self.end(found, "cancelled")
        return "cancelled"

    def tick(self, order: list[str], seen: Mapping[str, str]) -> Counter[str]:
        """One sweep over everything. `order`: the machines as the sweep visits them; `seen`: where each session is afterwards."""
        counts: Counter[str] = Counter()
        stranded = {
            name
            for name in order
            if self.machines[name].away and any(s not in self.claims_of(name) for s in self.rows_of(name))
        }
        for name in order:
            released = []
            for session in self.claims_of(name):
                if session.row is not None and session.row.expired:
                    outcome = self.give_up(session, jitter=0.1)
                    counts[outcome] += 1
                    released += [session] if outcome == "released" else []
            counts["rerouted"] += self._follow(released, seen, one_pass=True)
            if name in stranded:
                waiting = [s for s in self.rows_of(name) if s not in self.claims_of(name)]
                counts["rerouted"] += self._follow(waiting, seen, one_pass=False)
        return counts

    def _follow(self, batch: list[SessionModel], seen: Mapping[str, str], *, one_pass: bool) -> int:
        """Moves what was moved, and checks that nothing stayed that had a place."""
        moved = [s for s in batch if seen[s.name] != s.machine]
        for session in moved:
            self.move(session, seen[session.name])
            if not one_pass and session.row is not None:
                session.row.backoff = None
        for session in batch:
            # Rows of two repositories may have wanted one place: whoever did not get it is dealt again with the next tick.
            excused = one_pass and len({s.repo for s in batch}) > 1
            assert session in moved or excused or not self.candidates(session), (
                f"{session.name} should have moved: {self}"
            )
        return len(moved)

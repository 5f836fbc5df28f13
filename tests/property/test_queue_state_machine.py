"""Every operation in any order against a model of thirty facts: rows, sessions and attempts agree after each step.

A counterexample is a short program in the words of the domain: `state.claim(machine='m1', session='s2')`.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine

from shared import dispatch_queue, sessions
from shared.db import transaction
from shared.sessions import Result
from shared.sweep import sweep_once
from tests.given import (
    the_backoff_has_passed,
    the_claim_is_older_by,
)
from tests.property.arrivals import Arrivals, machines
from tests.property.world import STANDING
from tests.steps import claim, claim_many, committed, complete, polled, release, renew, reroute

attempts = st.sampled_from(["current", "current", "stale", "not sent"])
# Mostly the machine that it concerns: most of what any other one could say is refused for the same reason.
actors = st.sampled_from(["its machine"] * 4 + ["the one before", "another"])


class QueueMachine(Arrivals):
    """What machines do with the work, and what time does."""

    # -- a machine works ------------------------------------------------------------------------------------------------

    @rule(machine=machines)
    def poll(self, machine: str) -> None:
        shown = committed(self.engine, polled, self.ours[machine])
        assert sorted(shown) == sorted(self.work[s.name].queue_id for s in self.model.due_for(machine))

    @rule(session=Arrivals.sessions, by=actors, patient=st.sampled_from([True, True, True, False]))
    def claim(self, session: str, by: str, patient: bool) -> None:
        """`patient`: the machine waits for the backoff to pass."""
        session = self._nearest(session, lambda s: s.row is not None and not s.row.claimed)
        machine = self._actor(session, by)
        if patient:
            self._the_backoff_passes(session)
        limit = self.model.machines[machine].limit
        got = committed(self.engine, claim, self.ours[machine], self.work[session], room=limit)
        assert (got and got.attempts) == self.model.claim(machine, session)

    @rule(machine=machines, limit=st.integers(1, 4))
    def claim_several(self, machine: str, limit: int) -> None:
        could = {self.work[s.name].queue_id: s.name for s in self.model.due_for(machine)}
        expected = min(limit, self.model.places(machine), len(could))
        got = committed(
            self.engine, claim_many, self.ours[machine], limit, room=self.model.machines[machine].limit
        )
        assert len(got) == expected
        for queue_id in got:
            assert self.model.claim(machine, could[queue_id]) is not None

    def _subject(self, session: str, by: str) -> str:
        """A claimed session, claimed now if need be; or for the one before, one that it has lost."""
        if by == "the one before":
            return self._nearest(
                session, lambda s: s.row is not None and not s.row.claimed and s.row.attempts > 0
            )
        found = self._nearest(session, lambda s: s.row is not None and s.row.claimed)
        row = self.model.sessions[found].row
        if row is None or not row.claimed:
            self.claim(found, by="its machine", patient=True)
        return found

    def _actor(self, session: str, by: str) -> str:
        row, machine = self.model.sessions[session].row, self.model.sessions[session].machine
        if by == "the one before" and row is not None and row.claimed_by is not None:
            return row.claimed_by
        others = [name for name in self.ours if name != machine]
        return others[0] if by == "another" and others else machine

    def _attempt(self, session: str, which: str) -> int | None:
        row = self.model.sessions[session].row
        current = row.attempts if row is not None and row.attempts else 1
        return {"current": current, "stale": current - 1, "not sent": None}[which]

    @rule(session=Arrivals.sessions, by=actors, attempt=attempts)
    def renew(self, session: str, by: str, attempt: str) -> None:
        session = self._subject(session, by)
        machine, number = self._actor(session, by), self._attempt(session, attempt)
        renewal = committed(self.engine, renew, self.ours[machine], self.work[session], number)
        assert (renewal is not None) == self.model.renew(machine, session, number)
        row = self.model.sessions[session].row
        if renewal is not None and row is not None:
            assert (renewal.attempt, renewal.cancel_requested) == (row.attempts, row.stop)
            assert len(renewal.prompts) == row.prompts

    @rule(
        session=Arrivals.sessions,
        by=actors,
        attempt=attempts,
        status=st.sampled_from(["running", "error", "complete"]),
    )
    def report(self, session: str, by: str, attempt: str, status: str) -> None:
        """A progress report renews; whatever it says, it is not the end."""
        session = self._subject(session, by)
        machine, number = self._actor(session, by), self._attempt(session, attempt)
        mine, queued = self.ours[machine], self.work[session]
        with transaction(self.engine) as tx:
            renewal = dispatch_queue.renew(
                tx, org_id=mine.org_id, orchestrator_id=mine.id, session_id=queued.session_id, attempt=number
            )
            if renewal is not None:
                assert sessions.report(
                    tx,
                    org_id=mine.org_id,
                    session_id=queued.session_id,
                    orchestrator_id=mine.id,
                    queue_id=renewal.queue_id,
                    attempt=renewal.attempt,
                    status=status,
                    progress_percent=50,
                    message=None,
                )
        assert (renewal is not None) == self.model.renew(machine, session, number)
        if renewal is not None:
            self.model.sessions[session].status = "running"

    @rule(session=Arrivals.sessions, by=actors, attempt=attempts)
    def release(self, session: str, by: str, attempt: str) -> None:
        """The row waits for another machine if there is one: the emptiest."""
        session = self._subject(session, by)
        machine, number = self._actor(session, by), self._attempt(session, attempt)
        mine, queued, model = self.ours[machine], self.work[session], self.model.sessions[session]
        held = self.model.held(machine, session, number)
        with transaction(self.engine) as tx:
            given_up = release(tx, mine, queued, number, policy=self.policy)
            moved = reroute(tx, mine, limit=1, queue_ids=[queued.queue_id]) if given_up else {}
        assert (given_up is None) == (held is None)
        if given_up is None:
            return
        assert given_up.outcome == self.model.give_up(model, jitter=0)
        candidates = self.model.candidates(model) if model.row is not None else []
        assert bool(moved) == bool(candidates)
        if moved:
            to = self.name_of(moved[queued.queue_id])
            assert to is not None
            [chosen] = [m for m in candidates if m.name == to]
            assert self.model.emptiest([chosen]) == self.model.emptiest(candidates)
            self.model.move(model, to)

    @rule(session=Arrivals.sessions, by=actors, attempt=attempts, success=st.booleans())
    def complete(self, session: str, by: str, attempt: str, success: bool) -> None:
        session = self._subject(session, by)
        machine, number = self._actor(session, by), self._attempt(session, attempt)
        model = self.model.sessions[session]
        row = self.model.attempted(machine, session, number)
        result = Result("complete") if success else Result("cancelled" if row and row.stop else "error")
        settled = committed(
            self.engine, complete, self.ours[machine], self.work[session], number, result=result
        )
        assert (settled is None) == (row is None)
        if row is not None:
            self.model.end(model, result.status, "failed" if result.status == "error" else None)

    # -- time and the tick ----------------------------------------------------------------------------------------------

    @rule(session=Arrivals.sessions)
    def the_claim_grows_old(self, session: str) -> None:
        the_claim_is_older_by(self.engine, self.work[session], 1801)
        row = self.model.sessions[session].row
        if row is not None and row.claimed:
            row.expired = True

    def _the_backoff_passes(self, session: str) -> None:
        the_backoff_has_passed(self.engine, self.work[session])
        row = self.model.sessions[session].row
        if row is not None:
            row.due, row.backoff = True, None

    @rule(
        batch_rows=st.integers(1, 2),
        after_half_an_hour=st.booleans(),
        away=st.none() | st.sampled_from(["m1", "m2"]),
    )
    def tick(self, batch_rows: int, after_half_an_hour: bool, away: str | None) -> None:
        """The sweep; after half an hour in which no machine has renewed, or one of them was not heard at all."""
        for session in self.work if after_half_an_hour else ():
            self.the_claim_grows_old(session)
        if away is not None:
            self.the_machine_is_silent_for(away, 400)
        report = sweep_once(
            self.engine, policy=self.policy, retention_hours=72, batch_rows=batch_rows, budget_seconds=20
        )
        order = sorted(self.ours, key=lambda name: self.ours[name].id)
        with transaction(self.engine) as tx:
            seen = {str(self.name_of(row[0])): str(self.name_of(row[1])) for row in tx.all(STANDING)}
        counts = self.model.tick(order, seen)
        told = {
            "released": report.released,
            "rerouted": report.rerouted,
            "dropped": report.dropped,
            "cancelled": report.cancelled,
        }
        assert told == {word: counts[word] for word in told}
        assert (report.finished, report.failed) == (True, 0)
        assert report.depth == sum(s.row is not None for s in self.model.sessions.values())


def test_any_sequence_of_operations_agrees_with_the_model(
    engine: Engine, request: pytest.FixtureRequest
) -> None:
    profile = request.config.getoption("--hypothesis-profile") or "short"

    class OnThisDatabase(QueueMachine):
        def __init__(self) -> None:
            super().__init__(engine)

    run_state_machine_as_test(OnThisDatabase, settings=settings.get_profile(profile))

"""Every operation in any order against a model of thirty facts: rows, sessions and attempts agree after each step.

A counterexample is a short program in the words of the domain: `state.claim(machine='m1', session='s2')`.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine

from shared import dispatch_queue, sessions
from shared.db import Tx, sql, transaction
from shared.reopening import begin_again
from shared.sessions import Result
from shared.sweep import sweep_once
from tests.given import (
    Queued,
    the_backoff_has_passed,
    the_claim_is_older_by,
)
from tests.property.arrivals import Arrivals, machines
from tests.property.world import STANDING
from tests.steps import claim, claim_many, committed, polled, release, renew, reroute

NEW_ROW = sql(
    "select id, orchestrator_id from dispatch_queue where org_id = :org_id and session_id = :session_id"
)
attempts = st.sampled_from(["current", "current", "stale", "not sent"])
# Mostly the machine that it concerns: most of what any other one could say is refused for the same reason.
actors = st.sampled_from(["its machine"] * 4 + ["the one before", "another"])


class QueueMachine(Arrivals):
    """What machines do with the work, and what time does."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.over: list[tuple[str, str, UUID, int]] = []

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
        """What was asked for too late for the agent begins the session anew."""
        session = self._subject(session, by)
        machine, number = self._actor(session, by), self._attempt(session, attempt)
        mine, queued, model = self.ours[machine], self.work[session], self.model.sessions[session]
        row = self.model.attempted(machine, session, number)
        result = Result("complete") if success else Result("cancelled" if row and row.stop else "error")
        with transaction(self.engine) as tx:
            settled = dispatch_queue.settle(
                tx,
                org_id=mine.org_id,
                orchestrator_id=mine.id,
                session_id=queued.session_id,
                attempt=number,
            )
            assert (settled is None) == (row is None)
            if settled is None or row is None:
                return
            assert sessions.close_session(
                tx,
                org_id=mine.org_id,
                session_id=queued.session_id,
                result=result,
                orchestrator_id=mine.id,
                queue_id=settled.queue_id,
                attempt=settled.attempt,
            )
            self.over.append((session, machine, settled.queue_id, settled.attempt))
            self.model.end(model, result.status, "failed" if result.status == "error" else None)
            expected, left = self.model.left(row, success=success), settled.left_to_do(success=success)
            assert (None if left is None else len(left["prompts"])) == expected
            if left is not None:
                self._begin_again(tx, session, left, mine.id)

    def _begin_again(self, tx: Tx, session: str, left: dict[str, Any], preferred: UUID) -> None:
        queued, model = self.work[session], self.model.sessions[session]
        begun = begin_again(
            tx,
            org_id=queued.org_id,
            session_id=queued.session_id,
            message=left,
            offline_after=self.policy.offline_after,
            preferred=preferred,
        )
        row = tx.first(NEW_ROW, org_id=queued.org_id, session_id=queued.session_id)
        assert begun == ("no_orchestrator" if row is None else "begun_anew")
        if row is None:
            assert not [m for m in self.model.machines.values() if model.repo in m.repos]
            model.letter_prompts = len(left["prompts"])
            self.model.end(model, "error", "no_orchestrator")
        else:
            machine = self.name_of(row[1])
            assert machine is not None
            self.work[session] = Queued(queued.org_id, queued.session_id, row[0])
            self.model.enqueue(model, machine, prompts=len(left["prompts"]))

    @rule(data=st.data())
    def an_old_end_is_reported_again(self, data: st.DataObject) -> None:
        """The machine did not hear the answer: whatever the session is doing now, nothing of it is settled."""
        if self.over:
            session, machine, queue_id, attempt = data.draw(st.sampled_from(self.over))
            mine, queued = self.ours[machine], self.work[session]
            with transaction(self.engine) as tx:
                named: Any = {
                    "org_id": mine.org_id,
                    "orchestrator_id": mine.id,
                    "session_id": queued.session_id,
                }
                assert dispatch_queue.settle(tx, **named, queue_id=queue_id, attempt=attempt) is None
                assert dispatch_queue.renew(tx, **named, queue_id=queue_id, attempt=attempt) is None

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

"""Half of what can happen: machines come and go, work arrives, people ask."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, initialize, multiple, rule

from shared import dispatch_queue, orchestrators, reopening, sessions
from shared.db import Tx, sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import Conflict
from shared.ids import new_id
from shared.sessions import NewSession
from tests.given import Queued, a_message, the_machine_was_last_heard
from tests.property.model import MachineModel, Row, SessionModel
from tests.property.world import REPOS, World
from tests.steps import cancel, committed

some_repos = st.sets(st.sampled_from(REPOS), min_size=1).map(frozenset)
machines = st.sampled_from(["m1", "m2", "m3"])


class Arrivals(World):
    """What happens around the machines' work."""

    sessions: Bundle[str] = Bundle("sessions")

    # -- machines -------------------------------------------------------------------------------------------------------

    @rule(machine=machines, limit=st.integers(1, 3), repos=some_repos)
    def it_registers_again(self, machine: str, limit: int, repos: frozenset[str]) -> None:
        with transaction(self.engine) as tx:
            known = orchestrators.authenticate(tx, self.ours[machine].token)
            orchestrators.register(tx, known, name=machine, repos=sorted(repos), concurrency_limit=limit)
        self.model.machines[machine] = MachineModel(machine, limit, repos)

    @rule(machine=machines, seconds=st.sampled_from([0, 100, 400]))
    def the_machine_is_silent_for(self, machine: str, seconds: int) -> None:
        """0: a heartbeat. Over 90: nothing is re-routed to it. Over 300: what waits for it is handed on."""
        mine = self.ours[machine]
        if seconds == 0:
            with transaction(self.engine) as tx:
                assert orchestrators.heartbeat(
                    tx, org_id=mine.org_id, orchestrator_id=mine.id, active_jobs=None
                )
            self.model.machines[machine].silent_for = 0
        else:
            the_machine_was_last_heard(self.engine, mine, seconds)
            self.model.machines[machine].silent_for += seconds

    # -- work arrives ---------------------------------------------------------------------------------------------------

    @initialize(target=sessions, max_attempts=st.integers(1, 3))
    def the_first_work_arrives(self, max_attempts: int) -> Any:
        self.policy, self.model.max_attempts = RetryPolicy(max_attempts=max_attempts), max_attempts
        first = (("m1", REPOS[0]), ("m1", REPOS[0]), ("m1", REPOS[1]), ("m2", REPOS[0]))
        return multiple(*(self.work_arrives(m, repo, f"i{n}") for n, (m, repo) in enumerate(first, start=1)))

    @rule(
        target=sessions,
        machine=machines,
        repo=st.sampled_from(REPOS),
        issue=st.sampled_from(["i1", "i2", "i3", "i4"]),
    )
    def work_arrives(self, machine: str, repo: str, issue: str) -> Any:
        mine = self.ours[machine]
        new = NewSession(
            self.tenant.org_id,
            self.tenant.workspace_id,
            issue,
            "PAY-1",
            "team",
            "T",
            repo=repo,
            orchestrator_id=mine.id,
        )
        with transaction(self.engine) as tx:
            session_id = sessions.open_session(tx, new)
            assert (session_id is None) == self.model.is_open(issue)
            if session_id is None:
                return multiple()
            queue_id = self._enqueue(tx, session_id, mine.id, a_message(repo=repo))
        name = f"s{len(self.work) + 1}"
        self.work[name] = Queued(self.tenant.org_id, session_id, queue_id)
        self.model.sessions[name] = SessionModel(name, issue, repo, machine, row=Row(machine))
        return name

    def _enqueue(self, tx: Tx, session_id: UUID, machine_id: UUID, message: dict[str, Any]) -> UUID:
        return dispatch_queue.enqueue_dispatch(
            tx, org_id=self.tenant.org_id, orchestrator_id=machine_id, session_id=session_id, message=message
        )

    # A cancel ends what could still become interesting.
    @rule(session=sessions, what=st.sampled_from(["follow up", "follow up", "cancel"]))
    def somebody_asks(self, session: str, what: str) -> None:
        {"follow up": self._follow_up, "cancel": self._cancel}[what](session)

    def _follow_up(self, session: str) -> None:
        """Reaches whoever is at work, or begins the session anew."""
        queued, model = self.work[session], self.model.sessions[session]
        prompt = {"activityId": str(new_id()), "body": "and the tests"}
        with transaction(self.engine) as tx:
            now = tx.first(sql("select clock_timestamp()"))
            assert now is not None
            amended = dispatch_queue.amend(
                tx, org_id=queued.org_id, session_id=queued.session_id, prompt=prompt, asked_at=now[0]
            )
        if model.row is not None:
            assert amended == (queued.queue_id, model.row.claimed)
            self.model.follow_up(model.row)
            return
        assert amended is None
        with transaction(self.engine) as tx:
            chosen = orchestrators.route(
                tx,
                org_id=queued.org_id,
                repo=model.repo,
                offline_after=self.policy.offline_after,
                preferred=self.ours[model.machine].id,
            )
            machine = self._allowed_route(model, chosen)
            if machine is None:
                return
            assert chosen is not None
            reopened = reopening.reopen(
                tx,
                org_id=queued.org_id,
                session_id=queued.session_id,
                orchestrator_id=chosen,
                repo=model.repo,
            )
            assert reopened != self.model.is_open(model.issue)
            if reopened:
                queue_id = self._enqueue(
                    tx, queued.session_id, chosen, a_message(repo=model.repo, prompts=[prompt])
                )
                self.work[session] = Queued(queued.org_id, queued.session_id, queue_id)
                self.model.enqueue(model, machine, prompts=1)

    def _allowed_route(self, session: SessionModel, chosen: UUID | None) -> str | None:
        serving = [m for m in self.model.machines.values() if session.repo in m.repos]
        online = [m.name for m in serving if m.online]
        machine = self.name_of(chosen)
        assert machine in (online or [m.name for m in serving]) or (machine is None and not serving)
        if session.machine in online:
            assert machine == session.machine, "the machine that worked on it before has the checkout"
        return machine

    def _cancel(self, session: str) -> None:
        session = self._nearest(session, lambda s: s.row is not None and s.row.claimed)
        assert committed(self.engine, cancel, self.work[session]) == self.model.cancel(session)

    @rule(session=sessions)
    def redrive(self, session: str) -> None:
        session = self._nearest(session, lambda s: s.is_dead_letter)
        queued, model = self.work[session], self.model.sessions[session]
        serving = [m for m in self.model.machines.values() if model.repo in m.repos]
        possible = model.is_dead_letter and bool(serving) and not self.model.is_open(model.issue)
        try:
            with transaction(self.engine) as tx:
                queue_id = reopening.redrive(
                    tx,
                    org_id=queued.org_id,
                    session_id=queued.session_id,
                    offline_after=self.policy.offline_after,
                )
                row = tx.first(sql("select orchestrator_id from dispatch_queue where id = :id"), id=queue_id)
        except Conflict:
            assert not possible
            return
        assert possible
        assert row is not None
        machine = self.name_of(row[0])
        assert machine in ([m.name for m in serving if m.online] or [m.name for m in serving])
        assert model.letter_prompts is not None
        self.work[session] = Queued(queued.org_id, queued.session_id, queue_id)
        self.model.enqueue(model, machine, prompts=model.letter_prompts)

"""The product beside the model: the same start for both, and the comparison after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant
from sqlalchemy import Engine

from shared.db import OPERATOR, sql, transaction
from shared.dispatch_queue import RetryPolicy
from tests.given import VIOLATIONS, Machine, Queued, a_machine, a_tenant
from tests.property.model import MachineModel, Queue, Row, SessionModel

REPOS = ("acme/api", "acme/web")

EMPTY = sql("truncate organizations cascade")
STANDING = sql("""
    select s.id, s.orchestrator_id, s.status, s.error_code, q.id as row, q.orchestrator_id as row_machine, q.attempts,
           q.claimed_at is not null as claimed, q.claimed_by, q.available_at <= now() as due,
           coalesce(q.claimed_at < now() - interval '1800 seconds', false) as expired,
           q.cancel_requested_at is not null as stop, q.wanted_again, q.prompts_told,
           coalesce(jsonb_array_length(q.payload -> 'prompts'), 0) as prompts,
           cast(extract(epoch from q.available_at - s.updated_at) as float) as wait
      from dispatch_sessions s
      left join dispatch_queue q on q.org_id = s.org_id and q.session_id = s.id
""")


class World(RuleBasedStateMachine):
    """Names to ids, and what has to hold after every step."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine, self.model, self.policy = engine, Queue(), RetryPolicy()
        with transaction(engine, OPERATOR) as tx:
            tx.run(EMPTY)
        self.tenant = a_tenant(engine)
        self.ours: dict[str, Machine] = {}
        self.work: dict[str, Queued] = {}
        for name, limit, repos in (("m1", 1, REPOS), ("m2", 2, REPOS), ("m3", 1, REPOS[1:])):
            self.ours[name] = a_machine(engine, self.tenant, repos=repos, max_jobs=limit, name=name)
            self.model.machines[name] = MachineModel(name, limit, frozenset(repos))

    def name_of(self, id_: UUID | None) -> str | None:
        """m1 or s1 instead of a UUID."""
        known = {m.id: name for name, m in self.ours.items()} | {
            q.session_id: name for name, q in self.work.items()
        }
        return None if id_ is None else known[id_]

    def _nearest(self, session: str, condition: Callable[[SessionModel], bool]) -> str:
        """This session, or the next of which something can be said: a step that concerns nothing proves little."""
        names = list(self.work)
        start = names.index(session)
        order = names[start:] + names[:start]
        found = next((name for name in order if condition(self.model.sessions[name])), session)
        if found != session:
            note(f"# rather {found} than {session}")
        return found

    # -- after each step ------------------------------------------------------------------------------------------------

    @invariant()
    def product_and_model_agree(self) -> None:
        with transaction(self.engine) as tx:
            found = {str(self.name_of(row.id)): row for row in tx.all(STANDING)}
            assert tx.all(VIOLATIONS) == []
        assert found.keys() == self.model.sessions.keys()
        for name, row in found.items():
            assert self._seen(row) == self._expected(self.model.sessions[name]), (
                f"{name}: {self.model.sessions[name]}"
            )
            model = self.model.sessions[name].row
            if model is not None and model.backoff is not None:
                low, high = model.backoff
                assert low <= row.wait <= high, f"{name} waits {row.wait} s instead of {low} to {high}"

    def _seen(self, row: Any) -> dict[str, Any]:
        seen = {
            "machine": self.name_of(row.orchestrator_id),
            "status": row.status,
            "error_code": row.error_code,
        }
        if row.row is None:
            return {**seen, "row": None}
        return {
            **seen,
            "row": Row(
                machine=str(self.name_of(row.row_machine)),
                prompts=row.prompts,
                attempts=row.attempts,
                claimed=row.claimed,
                claimed_by=self.name_of(row.claimed_by),
                due=row.due,
                expired=row.expired,
                stop=row.stop,
                wanted_again=row.wanted_again,
                told=row.prompts_told,
            ),
        }

    def _expected(self, session: SessionModel) -> dict[str, Any]:
        row = None if session.row is None else Row(**{**vars(session.row), "backoff": None})
        return {
            "machine": session.machine,
            "status": session.status,
            "error_code": session.error_code,
            "row": row,
        }

    def teardown(self) -> None:
        note(f"the model at the end: {self.model}")

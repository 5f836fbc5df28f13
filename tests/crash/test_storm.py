"""Eight machines, four thousand pieces of work, and everything dies at random; the recorded history has to add up all the same."""

from __future__ import annotations

import random
import threading

import httpx
from sqlalchemy import Engine

from functions.app import App
from infra.local.seed import REPO
from shared.db import OPERATOR, engine_for, sql, transaction
from shared.settings import Settings
from tests.crash.calls import (
    Ask,
    by,
    claiming,
    claiming_many,
    completing,
    in_process,
    polling,
    releasing,
    tick,
)
from tests.crash.conftest import Scene, Serve
from tests.crash.history import attempts_of, check, counts, time_passes
from tests.given import Machine, a_machine

MACHINES, ROWS_EACH = 8, 500
FILL = sql("""
    with s as (
      insert into dispatch_sessions (org_id, id, workspace_id, orchestrator_id, linear_issue_id, linear_identifier, team_id, title, repo)
      select :org_id, gen_random_uuid(), :workspace_id, :orchestrator_id, gen_random_uuid()::text, 'PAY-1', 'team', 'storm', :repo
        from generate_series(1, :rows)
      returning org_id, id, orchestrator_id
    ), e as (
      insert into session_events (org_id, session_id, type) select org_id, id, 'created' from s
    )
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload)
    select org_id, gen_random_uuid(), orchestrator_id, id, '{"title": "storm"}' from s
""")


class Storm:
    """Machines that claim, work, fail, hang, die and speak again about claims that they lost."""

    def __init__(self, ask: Ask, seed: int) -> None:
        self._ask, self._chance = ask, random.Random(seed)
        self.late: list[tuple[str, int]] = []

    def turn(self, machine: Machine) -> bool:
        """One poll and what comes of it. False when nothing waited, or nobody answered."""
        try:
            claims = self._claims(machine)
            for claim in claims:
                self._end(machine, claim["message"], claim["attempt"])
            if self.late and self._chance.random() < 0.2:
                session_id, attempt = self.late.pop(self._chance.randrange(len(self.late)))
                self._ask(completing(machine, session_id, attempt))
        except httpx.TransportError:
            return False
        return bool(claims)

    def _claims(self, machine: Machine) -> list[dict]:  # type: ignore[type-arg]
        if self._chance.random() < 0.8:
            answer = self._ask(claiming_many(machine, self._chance.choice([1, 10, 60])))
            return list(answer.body.get("claims", []))
        messages = self._ask(polling(machine, 2)).body.get("messages", [])
        answers = [self._ask(claiming(machine, message["queueId"])) for message in messages]
        return [answer.body for answer in answers if answer.status == 200]

    def _end(self, machine: Machine, message: dict, attempt: int) -> None:  # type: ignore[type-arg]
        fate = self._chance.random()
        if fate < 0.70:
            self._ask(completing(machine, message["sessionId"], attempt))
        elif fate < 0.80:
            self._ask(releasing(machine, message["queueId"], attempt))
        elif fate < 0.82:
            self._ask(by(machine, "POST", f"/api/sessions/{message['sessionId']}/complete", success=False))
        elif fate < 0.90:
            self.late.append((message["sessionId"], attempt))


def fill(engine: Engine, scene: Scene, machine: Machine) -> None:
    with transaction(engine, OPERATOR) as tx:
        tx.run(
            FILL,
            org_id=scene.tenant.org_id,
            workspace_id=scene.tenant.workspace_id,
            orchestrator_id=machine.id,
            repo=REPO,
            rows=ROWS_EACH,
        )


def test_eight_machines_with_random_deaths_deliver_every_row_to_its_end_and_no_attempt_twice(
    serve: Serve, scene: Scene, settings: Settings
) -> None:
    machines = [a_machine(scene.engine, scene.tenant, repos=[REPO]) for _ in range(MACHINES)]
    for machine in machines:
        fill(scene.engine, scene, machine)
    instance = serve(threads=8)
    stop = threading.Event()

    def run(machine: Machine, number: int) -> None:
        # Two machines speak HTTP with an instance that is killed under them, six call the handlers: the same work, more of it.
        own = engine_for(settings)
        ask = instance.ask if number < 2 else in_process(App(settings, own))
        storm = Storm(ask, seed=number)
        while not stop.is_set():
            if not storm.turn(machine) and counts(own)[1] == 0:
                break
        own.dispose()

    threads = [
        threading.Thread(target=run, args=(machine, number)) for number, machine in enumerate(machines)
    ]
    for thread in threads:
        thread.start()
    ticker = in_process(App(settings, scene.engine))
    rounds = 0
    while counts(scene.engine)[1] and rounds < 400:
        rounds += 1
        time_passes(scene.engine)
        assert ticker(tick()).status in (200, 503)
        if rounds % 10 == 3:
            instance.kill()
            instance.start()
    stop.set()
    for thread in threads:
        thread.join()
    assert counts(scene.engine)[:2] == (MACHINES * ROWS_EACH, 0)
    check(scene.engine)
    assert max(attempts_of(scene.engine)) > 1, "nothing was ever delivered again: the storm was none"

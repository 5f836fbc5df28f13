"""Eight machines, four thousand pieces of work, and everything dies at random; the recorded history has to add up all the same."""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess as SpawnedProcess
from typing import Any

import httpx
from sqlalchemy import Engine

from functions.app import App
from infra.local.seed import REPO
from shared.db import OPERATOR, engine_for, sql, transaction
from shared.log import log_from
from shared.settings import Settings
from tests.crash.calls import (
    Ask,
    by,
    claiming,
    claiming_many,
    completing,
    in_process,
    over_http,
    polling,
    releasing,
    tick,
)
from tests.crash.conftest import Scene, Serve
from tests.crash.history import attempts_of, check, counts, time_passes
from tests.given import Machine, a_machine

MACHINES, ROWS_EACH = 8, 500
FORK = multiprocessing.get_context("fork")
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
        self._ask, self._chance = ask, random.Random(seed)  # noqa: S311 - chance that can be repeated, no secret
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

    def _claims(self, machine: Machine) -> list[dict[str, Any]]:
        if self._chance.random() < 0.8:
            answer = self._ask(claiming_many(machine, self._chance.choice([1, 5, 20])))
            return list(answer.body.get("claims", []))
        messages = self._ask(polling(machine, 2)).body.get("messages", [])
        answers = [self._ask(claiming(machine, message["queueId"])) for message in messages]
        return [answer.body for answer in answers if answer.status == 200]

    def _end(self, machine: Machine, message: dict[str, Any], attempt: int) -> None:
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


def live(machine: Machine, seed: int, settings: Settings, url: str | None) -> None:
    """A machine's life in a process of its own: over HTTP, or straight into the handlers, which is the same work and more of it."""
    log_from("CRITICAL")
    engine = engine_for(settings)
    storm = Storm(over_http(url) if url else in_process(App(settings, engine)), seed)
    while True:
        if not storm.turn(machine):
            time.sleep(
                0.05
            )  # as a machine does between two polls; eight that do not would leave the two cores to nobody else


def test_eight_machines_that_are_killed_at_random_bring_every_row_to_its_end_and_deliver_no_attempt_twice(
    serve: Serve, scene: Scene, settings: Settings
) -> None:
    more = [a_machine(scene.engine, scene.tenant, repos=[REPO]) for _ in range(MACHINES - 2)]
    machines = [*scene.machines, *more]
    for machine in machines:
        fill(scene.engine, scene, machine)
    instance, ticker = serve(threads=8), in_process(App(settings, scene.engine))
    scene.engine.dispose()  # an open connection would be the children's too
    chance, lives = random.Random(1), 0  # noqa: S311 - as above

    def born(number: int) -> SpawnedProcess:
        url = instance.url if number == 0 else None
        process = FORK.Process(target=live, args=(machines[number], 100 * lives + number, settings, url))
        process.start()
        return process

    processes = [born(number) for number in range(MACHINES)]
    deadline = time.monotonic() + 60
    try:
        while left := counts(scene.engine)[1]:
            assert time.monotonic() < deadline, f"{left} rows are left"
            victim = chance.randrange(MACHINES)
            processes[victim].join(timeout=0.5)
            processes[victim].kill()
            processes[victim].join()
            lives += 1
            if lives % 25 == 10:
                instance.kill()
                instance.start()
            if lives % 4 == 0 or left < ROWS_EACH:
                time_passes(scene.engine)
                assert ticker(tick()).status == 200
            processes[victim] = born(victim)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert counts(scene.engine)[:2] == (MACHINES * ROWS_EACH, 0)
    check(scene.engine)
    assert max(attempts_of(scene.engine)) > 1, "nothing was ever delivered again: the storm was none"

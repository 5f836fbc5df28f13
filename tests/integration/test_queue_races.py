"""Two or more at one row: the WHERE clauses decide, whichever way the locks interleave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from uuid import UUID

import pytest
from sqlalchemy import Engine

from shared import dispatch_queue, orchestrators
from shared.db import OPERATOR, Statement, Tx, engine_for, sql, transaction
from shared.errors import Conflict
from shared.settings import Settings
from tests.given import (
    Machine,
    Queued,
    Tenant,
    claimed,
    history_of,
    row_of,
    session_of,
    the_backoff_has_passed,
    the_claim_is_older_by,
    violations,
    work,
)
from tests.steps import cancel, claim, claim_many, committed, complete, meanwhile, release, renew, sweep

RACERS = 16
LOCK_ROW = sql("select id from dispatch_queue where id = :id for update")


@contextmanager
def racing(settings: Settings, racers: int) -> Iterator[list[Engine]]:
    """An engine for each racer, and so a connection, already open."""
    engines = [engine_for(settings) for _ in range(racers)]
    try:
        for engine in engines:
            engine.connect().close()
        yield engines
    finally:
        for engine in engines:
            engine.dispose()


def without(statement: Statement, part: str) -> Statement:
    """The statement with a part of its text taken away."""
    assert part in statement.text
    return sql(statement.text.replace(part, ""))


# -- racing claims ------------------------------------------------------------------------------------------------------


def winners_of(engine: Engine, settings: Settings, machine: Machine, queued: Queued) -> int:
    """How many racers got the one row; all of them stand at its lock before the first may pass."""
    with racing(settings, RACERS) as engines:
        with transaction(engine) as tx:
            tx.all(LOCK_ROW, id=queued.queue_id)
            runs = meanwhile(
                engine, *(lambda own=own: committed(own, claim, machine, queued) for own in engines)
            )
        return sum(run.result(timeout=10) is not None for run in runs)


def test_of_sixteen_racers_for_one_row_exactly_one_wins(
    engine: Engine, settings: Settings, machine: Machine, queued: Queued
) -> None:
    assert winners_of(engine, settings, machine, queued) == 1
    assert row_of(engine, queued).attempts == 1
    assert history_of(engine, queued) == ["created", "claimed"]
    assert violations(engine) == []


def test_it_is_the_condition_on_claimed_at_that_stops_the_others(
    engine: Engine, settings: Settings, machine: Machine, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_queue, "CLAIM", without(dispatch_queue.CLAIM, "and claimed_at is null"))
    assert winners_of(engine, settings, machine, queued) == RACERS


def claims_of_racers(engines: list[Engine], machine: Machine) -> list[list[UUID]]:
    """What each racer gets that asks for three rows, all at once."""
    start = Barrier(len(engines))

    def race(own: Engine) -> list[UUID]:
        with transaction(own, OPERATOR) as tx:
            tx.all(sql("select 1"))
            start.wait(timeout=10)
            return claim_many(tx, machine, 3)

    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(race, engines))


def test_sixteen_racers_for_any_row_share_the_rows(
    engine: Engine, settings: Settings, tenant: Tenant, machine: Machine
) -> None:
    for _ in range(40):
        work(engine, tenant, machine)
    with racing(settings, RACERS) as engines:
        got = claims_of_racers(engines, machine)
    assert max(len(claims) for claims in got) <= 3
    assert max(Counter(row for claims in got for row in claims).values()) == 1
    assert violations(engine) == []


def test_without_skip_locked_they_share_all_of_them(
    engine: Engine, settings: Settings, tenant: Tenant, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_queue, "CLAIM_MANY", without(dispatch_queue.CLAIM_MANY, "skip locked"))
    rows = [work(engine, tenant, machine).queue_id for _ in range(40)]
    with racing(settings, RACERS) as engines:
        got = claims_of_racers(engines, machine)
    assert max(len(claims) for claims in got) <= 3
    assert sorted(row for claims in got for row in claims) == sorted(rows)
    assert violations(engine) == []


def test_a_claim_of_several_passes_by_the_rows_that_somebody_is_claiming(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    rows = [work(engine, tenant, machine).queue_id for _ in range(5)]
    with transaction(engine) as first, transaction(engine) as second:
        assert claim_many(first, machine, 2) == rows[:2]
        assert claim_many(second, machine, 2) == rows[2:4]
    assert violations(engine) == []


def test_without_skip_locked_a_claim_of_several_waits_and_is_still_right(
    engine: Engine, tenant: Tenant, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_queue, "CLAIM_MANY", without(dispatch_queue.CLAIM_MANY, "skip locked"))
    rows = [work(engine, tenant, machine).queue_id for _ in range(5)]
    with transaction(engine) as tx:
        assert claim_many(tx, machine, 2) == rows[:2]
        [second] = meanwhile(engine, lambda: committed(engine, claim_many, machine, 2))
    assert second.result(timeout=5) == rows[2:4]
    assert violations(engine) == []


def test_two_requests_of_one_machine_do_not_both_take_its_last_place(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    first, second, third = (work(engine, tenant, machine) for _ in range(3))

    def lock(tx: Tx) -> None:
        orchestrators.lock_machine(tx, org_id=machine.org_id, orchestrator_id=machine.id)

    def claims(row: Queued) -> bool:
        with transaction(engine) as tx:
            lock(tx)
            return claim(tx, machine, row, room=1) is not None

    def claims_several() -> bool:
        with transaction(engine) as tx:
            lock(tx)
            return claim_many(tx, machine, 3, room=1) != []

    with transaction(engine) as tx:
        lock(tx)
        assert claim(tx, machine, first, room=1) is not None
        others = meanwhile(engine, lambda: claims(second), claims_several)
    assert [other.result(timeout=5) for other in others] == [False, False]
    assert row_of(engine, third).claimed_at is None
    assert violations(engine) == []


# -- sweep --------------------------------------------------------------------------------------------------------------


def expired_claims(engine: Engine, tenant: Tenant, machine: Machine, rows: int) -> list[Queued]:
    made = [work(engine, tenant, machine) for _ in range(rows)]
    for row in made:
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, 1801)
    return made


def test_overlapping_sweeps_share_the_work_and_neither_waits(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    rows = expired_claims(engine, tenant, machine, 3)
    with transaction(engine) as first, transaction(engine) as second:
        swept = [
            sweep(first, machine, limit=2),
            sweep(second, machine, limit=2),
            sweep(second, machine, limit=2),
        ]
    assert [len(batch) for batch in swept] == [2, 1, 0]
    assert {given.queue_id for batch in swept for given in batch} == {row.queue_id for row in rows}
    assert all(history_of(engine, row) == ["created", "claimed", "released"] for row in rows)
    assert violations(engine) == []


def test_a_claim_renewed_after_the_sweep_began_is_left_alone(
    engine: Engine, machine: Machine, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    # The sweep stops after it has taken its snapshot and before it reads the first row.
    paused = dispatch_queue.SWEEP.text.replace(
        "and claimed_at <", "and (select pg_advisory_xact_lock_shared(1)) is not null and claimed_at <"
    )
    monkeypatch.setattr(dispatch_queue, "SWEEP", sql(paused))
    with transaction(engine) as gate:
        gate.all(sql("select pg_advisory_xact_lock(1)"))
        [swept] = meanwhile(engine, lambda: committed(engine, sweep, machine))
        assert committed(engine, renew, machine, queued, 1) is not None
    assert swept.result(timeout=5) == []
    assert row_of(engine, queued).claimed_at is not None
    assert violations(engine) == []


def test_a_stop_requested_after_the_sweep_began_is_honoured(
    engine: Engine, machine: Machine, queued: Queued, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    monkeypatch.setattr(dispatch_queue, "SWEEP", without(dispatch_queue.SWEEP, "skip locked"))
    with transaction(engine) as tx:
        assert cancel(tx, queued) == "stop_requested"
        [swept] = meanwhile(engine, lambda: committed(engine, sweep, machine))
    assert [given.outcome for given in swept.result(timeout=5)] == ["cancelled"]
    assert session_of(engine, queued).status == "cancelled"
    assert violations(engine) == []


def test_a_renewal_that_waits_for_the_sweep_finds_its_claim_lost(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    with transaction(engine) as tx:
        assert len(sweep(tx, machine)) == 1
        [renewal] = meanwhile(engine, lambda: committed(engine, renew, machine, queued, 1))
    assert renewal.result(timeout=5) is None
    assert violations(engine) == []


def test_a_completion_that_waits_for_the_sweep_is_still_accepted(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    with transaction(engine) as tx:
        assert len(sweep(tx, machine)) == 1
        [settled] = meanwhile(engine, lambda: committed(engine, complete, machine, queued, 1))
    assert settled.result(timeout=5) == (queued.queue_id, 1, False)
    assert session_of(engine, queued).status == "complete"
    assert violations(engine) == []


def test_a_completion_that_waits_for_the_next_claim_is_refused(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, release, machine, queued)
    the_backoff_has_passed(engine, queued)
    with transaction(engine) as tx:
        assert claim(tx, machine, queued) is not None
        [settled] = meanwhile(engine, lambda: committed(engine, complete, machine, queued, 1))
    assert settled.result(timeout=5) is None
    assert row_of(engine, queued).attempts == 2


def test_of_two_completions_one_settles_and_the_other_matches_zero_rows(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        assert complete(tx, machine, queued, 1) is not None
        [second] = meanwhile(engine, lambda: committed(engine, complete, machine, queued, 1))
    assert second.result(timeout=5) is None
    assert history_of(engine, queued) == ["created", "claimed", "complete"]
    assert violations(engine) == []


# -- cancel -------------------------------------------------------------------------------------------------------------


def test_a_cancel_that_waits_for_a_claim_becomes_a_stop_request(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    with transaction(engine) as tx:
        assert claim(tx, machine, queued) is not None
        [cancelled] = meanwhile(engine, lambda: committed(engine, cancel, queued))
    assert cancelled.result(timeout=5) == "stop_requested"
    assert row_of(engine, queued).cancel_requested_at is not None
    assert session_of(engine, queued).status == "dispatched"
    assert violations(engine) == []


def test_a_claim_that_waits_for_a_cancel_finds_nothing(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    with transaction(engine) as tx:
        assert cancel(tx, queued) == "cancelled"
        [got] = meanwhile(engine, lambda: committed(engine, claim, machine, queued))
    assert got.result(timeout=5) is None
    assert session_of(engine, queued).status == "cancelled"
    assert violations(engine) == []


def test_a_cancel_that_waits_for_a_release_ends_the_session(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        assert release(tx, machine, queued) is not None
        [cancelled] = meanwhile(engine, lambda: committed(engine, cancel, queued))
    assert cancelled.result(timeout=5) == "cancelled"
    assert row_of(engine, queued) is None
    assert violations(engine) == []


def test_a_cancel_that_waits_for_a_completion_finds_it_over(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        assert complete(tx, machine, queued) is not None
        [cancelled] = meanwhile(engine, lambda: committed(engine, cancel, queued))
    assert cancelled.result(timeout=5) is None
    assert session_of(engine, queued).status == "complete"
    assert violations(engine) == []


def test_a_release_that_waits_for_a_stop_request_ends_as_cancelled(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        assert cancel(tx, queued) == "stop_requested"
        [given_up] = meanwhile(engine, lambda: committed(engine, release, machine, queued, 1))
    assert given_up.result(timeout=5) == (queued.queue_id, queued.session_id, 1, "cancelled")
    assert violations(engine) == []


# -- racing registrations -----------------------------------------------------------------------------------------------


def test_two_machines_that_take_the_same_name_at_once_are_one_machine_and_one_conflict(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    """A renamed machine and a new one: the unique name is one of theirs, and the other is told so."""
    with transaction(engine, OPERATOR) as tx:
        _, token = orchestrators.mint_token(tx, org_id=tenant.org_id)
    with transaction(engine) as tx:
        new = orchestrators.authenticate(tx, token)
        orchestrators.register(tx, new, name="the laptop", repos=[], concurrency_limit=1)
        [renamed] = meanwhile(engine, lambda: committed(engine, registered_as, machine, "the laptop"))
    with pytest.raises(Conflict, match="the laptop"):
        renamed.result(timeout=5)


def registered_as(tx: Tx, machine: Machine, name: str) -> UUID:
    known = orchestrators.authenticate(tx, machine.token)
    return orchestrators.register(tx, known, name=name, repos=[], concurrency_limit=1)

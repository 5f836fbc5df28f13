"""Work that one machine cannot do goes to another that can; without one it waits, and nothing is lost."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from shared import dispatch_queue
from shared.db import transaction
from shared.dispatch_queue import MachineToSweep
from tests.given import (
    POLICY,
    Machine,
    Queued,
    Tenant,
    a_machine,
    a_tenant,
    claimed,
    history_of,
    row_of,
    session_of,
    the_backoff_has_passed,
    the_claim_is_older_by,
    the_machine_was_last_heard,
    violations,
    work,
)
from tests.steps import claim, committed, complete, meanwhile, polled, release, reroute, sweep


def machines_to_sweep(engine: Engine) -> list[MachineToSweep]:
    with transaction(engine) as tx:
        return dispatch_queue.machines_to_sweep(tx, policy=POLICY)


def test_a_released_row_goes_to_another_machine_and_the_message_follows(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other = a_machine(engine, tenant)
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        release(tx, machine, queued)
        assert reroute(tx, machine, limit=1, queue_ids=[queued.queue_id]) == {queued.queue_id: other.id}
    row = row_of(engine, queued)
    assert (row.orchestrator_id, row.claimed_by, row.attempts) == (other.id, machine.id, 1)
    assert session_of(engine, queued).orchestrator_id == other.id
    assert history_of(engine, queued) == ["created", "claimed", "released", "rerouted"]
    assert committed(engine, polled, other) == [], "the backoff goes with the row"
    the_backoff_has_passed(engine, queued)
    assert committed(engine, polled, other) == [queued.queue_id]
    assert committed(engine, claim, machine, queued) is None
    assert violations(engine) == []


def test_a_swept_row_can_be_rerouted_too(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other = a_machine(engine, tenant)
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    with transaction(engine) as tx:
        swept = [given.queue_id for given in sweep(tx, machine)]
        assert reroute(tx, machine, queue_ids=swept) == {queued.queue_id: other.id}
    assert violations(engine) == []


def test_only_the_named_rows_move(engine: Engine, tenant: Tenant, machine: Machine, queued: Queued) -> None:
    other, waiting = a_machine(engine, tenant), work(engine, tenant, machine)
    assert committed(engine, reroute, machine, queue_ids=[queued.queue_id]) == {queued.queue_id: other.id}
    assert row_of(engine, waiting).orchestrator_id == machine.id


def test_without_candidates_the_row_waits_where_it_is(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    a_machine(engine, tenant, repos=["acme/web"])
    a_machine(engine, a_tenant(engine))
    the_machine_was_last_heard(engine, a_machine(engine, tenant), seconds_ago=91)
    full = a_machine(engine, tenant, max_jobs=1)
    work(engine, tenant, full)
    assert committed(engine, reroute, machine) == {}
    assert row_of(engine, queued).orchestrator_id == machine.id
    assert history_of(engine, queued) == ["created"]
    assert violations(engine) == []


@pytest.mark.parametrize("held", ["waiting", "claimed"])
def test_room_is_what_neither_waits_for_the_machine_nor_is_claimed_by_it(
    engine: Engine, tenant: Tenant, machine: Machine, held: str
) -> None:
    other = a_machine(engine, tenant, max_jobs=3)
    first = work(engine, tenant, other)
    if held == "claimed":
        claimed(engine, other, first)
    rows = [work(engine, tenant, machine).queue_id for _ in range(4)]
    assert committed(engine, reroute, machine) == dict.fromkeys(rows[:2], other.id)
    assert committed(engine, reroute, machine) == {}
    assert violations(engine) == []


def test_rows_are_dealt_to_the_emptiest_machines_first(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    busy = a_machine(engine, tenant, max_jobs=4)
    for _ in range(2):
        work(engine, tenant, busy)
    idle = a_machine(engine, tenant, max_jobs=4)
    rows = [work(engine, tenant, machine).queue_id for _ in range(4)]
    moved = committed(engine, reroute, machine)
    assert [moved[row] for row in rows[:2]] == [idle.id, idle.id]
    assert sorted(moved[row] for row in rows[2:]) == sorted([busy.id, idle.id])


def test_a_place_is_given_once_even_if_rows_of_two_repositories_want_it(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    other = a_machine(engine, tenant, repos=["acme/api", "acme/web"], max_jobs=1)
    older = work(engine, tenant, machine, repo="acme/web")
    younger = work(engine, tenant, machine, repo="acme/api")
    assert committed(engine, reroute, machine) == {older.queue_id: other.id}
    assert row_of(engine, younger).orchestrator_id == machine.id


def test_rows_that_nobody_can_take_do_not_hide_those_behind_them(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    other = a_machine(engine, tenant, repos=["acme/web"])
    for _ in range(3):
        work(engine, tenant, machine, repo="acme/api")
    behind = work(engine, tenant, machine, repo="acme/web")
    assert committed(engine, reroute, machine, limit=2) == {behind.queue_id: other.id}


def test_rows_of_a_machine_that_stays_away_are_found_even_if_never_claimed(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other = a_machine(engine, tenant)
    the_machine_was_last_heard(engine, machine, seconds_ago=299)
    assert machines_to_sweep(engine) == []
    the_machine_was_last_heard(engine, machine, seconds_ago=2)
    assert machines_to_sweep(engine) == [(tenant.org_id, machine.id, False, True)]
    assert committed(engine, reroute, machine) == {queued.queue_id: other.id}
    assert machines_to_sweep(engine) == []


def test_an_absent_machine_without_waiting_rows_is_not_looked_at(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    the_machine_was_last_heard(engine, machine, seconds_ago=9000)
    assert machines_to_sweep(engine) == []
    the_claim_is_older_by(engine, queued, 1801)
    assert machines_to_sweep(engine) == [(tenant.org_id, machine.id, True, False)]


def test_the_old_machine_may_finish_until_the_new_one_has_started(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    other = a_machine(engine, tenant)
    finished, taken = work(engine, tenant, machine), work(engine, tenant, machine)
    for row in (finished, taken):
        claimed(engine, machine, row)
        with transaction(engine) as tx:
            release(tx, machine, row)
            assert reroute(tx, machine, queue_ids=[row.queue_id])
        the_backoff_has_passed(engine, row)
    claimed(engine, other, taken)
    assert committed(engine, complete, machine, taken, 1) is None
    assert committed(engine, complete, machine, taken) is None
    assert committed(engine, complete, machine, finished, 1) == (finished.queue_id, 1, False)
    assert violations(engine) == []


def test_a_row_that_is_being_claimed_is_passed_by(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    a_machine(engine, tenant)
    with transaction(engine) as claiming, transaction(engine) as rerouting:
        assert claim(claiming, machine, queued) is not None
        assert reroute(rerouting, machine) == {}
    assert row_of(engine, queued).claimed_by == machine.id
    assert violations(engine) == []


def test_a_claim_that_waits_for_the_reroute_finds_the_row_gone_elsewhere(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other = a_machine(engine, tenant)
    with transaction(engine) as tx:
        assert reroute(tx, machine) == {queued.queue_id: other.id}
        [got] = meanwhile(engine, lambda: committed(engine, claim, machine, queued))
    assert got.result(timeout=5) is None
    assert committed(engine, claim, other, queued) is not None
    assert violations(engine) == []

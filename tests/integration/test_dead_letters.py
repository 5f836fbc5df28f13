"""Work that was given up is kept, shown and can be sent again."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from shared import dead_letters, dispatch_queue, reopening
from shared.db import transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import Conflict, NotFound
from shared.ids import new_id
from shared.sessions import Result
from tests.given import (
    REPO,
    Machine,
    Queued,
    Tenant,
    a_machine,
    claimed,
    history_of,
    row_of,
    session_of,
    the_machine_was_last_heard,
    violations,
    work,
)
from tests.steps import cancel, claim, committed, complete, meanwhile, release

IMPATIENT = RetryPolicy(max_attempts=1)


def dropped(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    given_up = committed(engine, release, machine, queued, error="disk full", policy=IMPATIENT)
    assert given_up is not None
    assert given_up.outcome == "dropped"


def listed(engine: Engine, tenant: Tenant) -> list[dead_letters.DeadLetter]:
    with transaction(engine) as tx:
        return dead_letters.dead_letters(tx, org_id=tenant.org_id)


def redriven(engine: Engine, queued: Queued, *, repo: str | None = None) -> Queued:
    with transaction(engine) as tx:
        row = reopening.redrive(
            tx, org_id=queued.org_id, session_id=queued.session_id, offline_after=90, repo=repo
        )
    return Queued(queued.org_id, queued.session_id, row)


def test_a_dropped_row_is_listed_with_its_error_newest_first(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    second = work(engine, tenant, machine)
    dropped(engine, machine, queued)
    dropped(engine, machine, second)
    letters = listed(engine, tenant)
    assert [letter.session_id for letter in letters] == [second.session_id, queued.session_id]
    assert (letters[0].attempts, letters[0].reason, letters[0].error) == (
        1,
        "attempts_exhausted",
        "disk full",
    )
    assert letters[0].repo == REPO


def test_a_redrive_makes_a_new_row_with_the_old_message_and_starts_at_attempt_one(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    payload = row_of(engine, queued).payload
    dropped(engine, machine, queued)
    again = redriven(engine, queued)
    assert again.queue_id != queued.queue_id
    row = row_of(engine, again)
    assert (row.payload, row.attempts, row.claimed_by) == (payload, 0, None)
    session = session_of(engine, again)
    assert (session.status, session.ended_at, session.error_code, session.error_message) == (
        "pending",
        None,
        None,
        None,
    )
    assert history_of(engine, again) == ["created", "claimed", "dead_lettered", "redriven"]
    assert listed(engine, tenant) == []
    got = committed(engine, claim, machine, again)
    assert got is not None
    assert got.attempts == 1
    assert violations(engine) == []


def test_a_redrive_chooses_a_machine_that_is_online_now(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    dropped(engine, machine, queued)
    the_machine_was_last_heard(engine, machine, seconds_ago=91)
    other = a_machine(engine, tenant)
    assert row_of(engine, redriven(engine, queued)).orchestrator_id == other.id
    assert violations(engine) == []


def test_a_redriven_row_can_die_again_and_is_listed_once(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    dropped(engine, machine, queued)
    dropped(engine, machine, redriven(engine, queued))
    assert [letter.session_id for letter in listed(engine, tenant)] == [queued.session_id]
    redriven(engine, queued)
    assert listed(engine, tenant) == []
    assert violations(engine) == []


def test_what_failed_at_its_machines_own_word_is_no_dead_letter_even_if_it_was_one_before(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    dropped(engine, machine, queued)
    again = redriven(engine, queued)
    claimed(engine, machine, again)
    committed(engine, complete, machine, again, 1, result=Result("error", error_message="tests fail"))
    assert listed(engine, tenant) == []
    with pytest.raises(Conflict, match="no dead letter"):
        redriven(engine, queued)


def test_only_a_dead_letter_can_be_redriven(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    with pytest.raises(Conflict, match="its status is pending"):
        redriven(engine, queued)
    committed(engine, cancel, queued)
    with pytest.raises(Conflict, match="its status is cancelled"):
        redriven(engine, queued)
    with pytest.raises(NotFound):
        redriven(engine, Queued(tenant.org_id, new_id(), new_id()))


def test_a_redrive_is_refused_while_the_issue_has_another_open_session(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    first = work(engine, tenant, machine, issue_id="issue")
    dropped(engine, machine, first)
    second = work(engine, tenant, machine, issue_id="issue")
    with pytest.raises(Conflict, match="another open session"):
        redriven(engine, first)
    committed(engine, cancel, second)
    redriven(engine, first)
    assert violations(engine) == []


def test_a_redrive_needs_a_machine_that_serves_the_repository(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    dropped(engine, machine, queued)
    with pytest.raises(Conflict, match="no machine serves acme/nowhere"):
        redriven(engine, queued, repo="acme/nowhere")
    assert session_of(engine, queued).status == "error"


def test_of_two_redrives_at_once_one_makes_the_row(engine: Engine, machine: Machine, queued: Queued) -> None:
    dropped(engine, machine, queued)
    with transaction(engine) as tx:
        reopening.redrive(tx, org_id=queued.org_id, session_id=queued.session_id, offline_after=90)
        [second] = meanwhile(engine, lambda: redriven(engine, queued))
    with pytest.raises(Conflict, match="its status is pending"):
        second.result(timeout=5)
    with transaction(engine) as tx:
        assert dispatch_queue.depth(tx).rows == 1
    assert violations(engine) == []

"""A row's life, rule by rule, for one actor at a time; who wins when two act at once is in test_queue_races.py."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from shared import dispatch_queue, orchestrators, session_history
from shared.db import sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import Unauthenticated
from shared.sessions import Result
from tests.given import (
    REPO,
    Machine,
    Queued,
    Tenant,
    a_machine,
    a_message,
    a_session,
    a_tenant,
    claimed,
    history_of,
    row_of,
    session_of,
    the_backoff_has_passed,
    the_claim_is_older_by,
    violations,
    work,
)
from tests.steps import cancel, claim, claim_many, committed, complete, polled, release, renew, sweep

PATIENT = RetryPolicy(max_attempts=1_000_000)


# -- enqueue and poll ---------------------------------------------------------------------------------------------------


def test_a_session_has_one_row_at_a_time(engine: Engine, machine: Machine, queued: Queued) -> None:
    with pytest.raises(DBAPIError, match="one_row_per_session"), transaction(engine) as tx:
        dispatch_queue.enqueue_dispatch(
            tx, org_id=queued.org_id, orchestrator_id=machine.id, session_id=queued.session_id, message={}
        )


def test_an_issue_has_one_open_session_and_a_new_one_after_its_end(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    first = work(engine, tenant, machine, issue_id="issue")
    with pytest.raises(AssertionError), transaction(engine) as tx:
        a_session(tx, tenant, machine, issue_id="issue")
    committed(engine, cancel, first)
    assert work(engine, tenant, machine, issue_id="issue").session_id != first.session_id


def test_a_poll_shows_the_oldest_rows_first_and_as_many_as_asked_for(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    rows = [work(engine, tenant, machine) for _ in range(4)]
    the_backoff_has_passed(engine, rows[2])
    oldest_first = [rows[i].queue_id for i in (2, 0, 1, 3)]
    assert committed(engine, polled, machine) == oldest_first
    assert committed(engine, polled, machine, limit=2) == oldest_first[:2]


def test_a_poll_shows_only_the_callers_own_unclaimed_rows(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    other_machine = a_machine(engine, tenant)
    stranger = a_machine(engine, a_tenant(engine))
    assert committed(engine, polled, other_machine) == []
    assert committed(engine, polled, stranger) == []
    claimed(engine, machine, queued)
    assert committed(engine, polled, machine) == []


def test_a_poll_hides_a_row_in_backoff_and_says_when_it_is_due(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        release(tx, machine, queued)
        answer = dispatch_queue.poll(tx, token=machine.token, limit=1)
    assert (answer.work, answer.next_due_ms) == ([], 60_000)
    the_backoff_has_passed(engine, queued)
    assert committed(engine, polled, machine) == [queued.queue_id]


def test_a_poll_names_the_claims_that_should_stop(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    committed(engine, cancel, queued)
    with transaction(engine) as tx:
        assert dispatch_queue.poll(tx, token=machine.token, limit=1).stop_requests == [queued.queue_id]


@pytest.mark.parametrize("token", ["", "dp_orch_unknown", "Bearer \u00e9"])
def test_a_poll_without_a_known_token_is_refused(engine: Engine, token: str) -> None:
    with pytest.raises(Unauthenticated), transaction(engine) as tx:
        dispatch_queue.poll(tx, token=token, limit=1)


def test_a_revoked_token_is_refused_by_the_next_poll(engine: Engine, machine: Machine) -> None:
    with transaction(engine) as tx:
        assert orchestrators.revoke_token(tx, org_id=machine.org_id, token_id=machine.token_id)
    with pytest.raises(Unauthenticated):
        committed(engine, polled, machine)


# -- claim --------------------------------------------------------------------------------------------------------------


def test_a_claim_takes_the_row_counts_the_attempt_and_marks_the_session(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    got = committed(engine, claim, machine, queued)
    assert got is not None
    assert (got.queue_id, got.session_id, got.attempts) == (queued.queue_id, queued.session_id, 1)
    row, session = row_of(engine, queued), session_of(engine, queued)
    assert (row.attempts, row.claimed_by, row.claimed_at is None) == (1, machine.id, False)
    assert (session.status, session.started_at is None) == ("dispatched", False)
    assert history_of(engine, queued) == ["created", "claimed"]
    assert violations(engine) == []


def test_a_row_that_is_claimed_in_backoff_or_foreign_is_not_to_be_had(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    assert committed(engine, claim, a_machine(engine, tenant), queued) is None
    assert committed(engine, claim, a_machine(engine, a_tenant(engine)), queued) is None
    claimed(engine, machine, queued)
    assert committed(engine, claim, machine, queued) is None
    committed(engine, release, machine, queued)
    assert committed(engine, claim, machine, queued) is None
    assert row_of(engine, queued).attempts == 1


def test_a_claim_respects_the_machines_limit(engine: Engine, tenant: Tenant, machine: Machine) -> None:
    first, second = work(engine, tenant, machine), work(engine, tenant, machine)
    assert committed(engine, claim, machine, first, room=1) is not None
    assert committed(engine, claim, machine, second, room=1) is None
    committed(engine, complete, machine, first)
    assert committed(engine, claim, machine, second, room=1) is not None


def test_claiming_several_takes_the_oldest_and_never_more_than_there_is_room_for(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    rows = [work(engine, tenant, machine).queue_id for _ in range(6)]
    assert committed(engine, claim_many, machine, 2, room=5) == rows[:2]
    assert committed(engine, claim_many, machine, 9, room=5) == rows[2:5]
    assert committed(engine, claim_many, machine, 9, room=5) == []
    assert violations(engine) == []


def test_a_lowered_limit_below_what_is_held_claims_nothing(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    for _ in range(3):
        work(engine, tenant, machine)
    assert len(committed(engine, claim_many, machine, 2)) == 2
    assert committed(engine, claim_many, machine, 2, room=1) == []


# -- renew --------------------------------------------------------------------------------------------------------------


def test_a_renewal_starts_the_timeout_anew_by_row_or_by_session(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    for named in ({"queue_id": queued.queue_id}, {"session_id": queued.session_id}):
        the_claim_is_older_by(engine, queued, 1801)
        with transaction(engine) as tx:
            renewal = dispatch_queue.renew(
                tx, org_id=machine.org_id, orchestrator_id=machine.id, attempt=1, **named
            )
        assert renewal == (queued.queue_id, 1, False, [])
        assert committed(engine, sweep, machine) == []
    assert row_of(engine, queued).attempts == 1


def test_a_heartbeat_does_not_renew_a_claim(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    with transaction(engine) as tx:
        assert orchestrators.heartbeat(tx, org_id=machine.org_id, orchestrator_id=machine.id, active_jobs=1)
    assert [given.outcome for given in committed(engine, sweep, machine)] == ["released"]


# -- release, backoff, drop ---------------------------------------------------------------------------------------------

WAIT = sql(
    "select extract(epoch from available_at - now()) from dispatch_queue where org_id = :org_id and id = :id"
)


def backoff_after_release(engine: Engine, machine: Machine, queued: Queued) -> float:
    """Seconds until the row is due, exact: read in the transaction that released it."""
    with transaction(engine) as tx:
        assert release(tx, machine, queued, policy=PATIENT) is not None
        row = tx.first(WAIT, org_id=queued.org_id, id=queued.queue_id)
        assert row is not None
        return float(row[0])


def test_the_backoff_is_the_square_of_the_attempts_in_minutes_up_to_fifteen(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    waits = []
    for _ in range(5):
        claimed(engine, machine, queued)
        waits.append(backoff_after_release(engine, machine, queued))
        the_backoff_has_passed(engine, queued)
    assert waits == [60, 240, 540, 900, 900]


def test_the_backoff_stays_at_the_cap_however_often_a_row_has_failed(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    with transaction(engine) as tx:
        tx.run(sql("update dispatch_queue set attempts = 50000"))
    assert backoff_after_release(engine, machine, queued) == 900


def test_a_release_frees_the_row_and_keeps_the_error_and_the_attempts(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    given_up = committed(engine, release, machine, queued, 1, error="disk full")
    assert given_up == (queued.queue_id, queued.session_id, 1, "released")
    row, session = row_of(engine, queued), session_of(engine, queued)
    assert (row.claimed_at, row.last_error, row.attempts) == (None, "disk full", 1)
    assert (session.status, session.ended_at) == ("pending", None)
    assert history_of(engine, queued) == ["created", "claimed", "released"]
    assert violations(engine) == []


def test_a_row_is_dropped_at_the_attempt_limit_and_its_session_fails_with_the_last_error(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    payload = row_of(engine, queued).payload
    outcomes = []
    for _ in range(5):
        claimed(engine, machine, queued)
        given_up = committed(engine, release, machine, queued, error="disk full")
        assert given_up is not None
        outcomes.append(given_up.outcome)
        the_backoff_has_passed(engine, queued)
    assert outcomes == ["released"] * 4 + ["dropped"]
    assert row_of(engine, queued) is None
    session = session_of(engine, queued)
    assert (session.status, session.error_code, session.error_message) == (
        "error",
        "attempts_exhausted",
        "disk full",
    )
    with transaction(engine) as tx:
        last = session_history.timeline(tx, org_id=queued.org_id, session_id=queued.session_id)[-1]
    assert (last.type, last.attempt) == ("dead_lettered", 5)
    assert last.data == {"error": "disk full", "reason": "attempts_exhausted", "payload": payload}
    assert violations(engine) == []


# -- fencing ------------------------------------------------------------------------------------------------------------


def a_second_attempt(engine: Engine, machine: Machine, queued: Queued) -> None:
    """The first claim was swept, and the same machine has claimed the row again."""
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    committed(engine, sweep, machine)
    the_backoff_has_passed(engine, queued)
    claimed(engine, machine, queued)


@pytest.mark.parametrize("step", [renew, release, complete], ids=lambda step: str(step.__name__))
def test_a_stale_attempt_matches_zero_rows(
    engine: Engine, machine: Machine, queued: Queued, step: object
) -> None:
    a_second_attempt(engine, machine, queued)
    before = row_of(engine, queued)
    assert callable(step)
    assert committed(engine, step, machine, queued, 1) is None
    assert committed(engine, step, machine, queued, 3) is None
    assert row_of(engine, queued) == before
    assert committed(engine, step, machine, queued, 2) is not None


@pytest.mark.parametrize("step", [renew, release, complete], ids=lambda step: str(step.__name__))
def test_without_an_attempt_the_callers_current_claim_is_meant(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued, step: object
) -> None:
    a_second_attempt(engine, machine, queued)
    assert callable(step)
    assert committed(engine, step, a_machine(engine, tenant), queued) is None
    assert committed(engine, step, machine, queued) is not None


@pytest.mark.parametrize("attempt", [1, None])
def test_a_late_completion_after_the_sweep_is_accepted_while_nobody_else_has_started(
    engine: Engine, machine: Machine, queued: Queued, attempt: int | None
) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    committed(engine, sweep, machine)
    assert committed(engine, complete, machine, queued, attempt) == (queued.queue_id, 1, False)
    assert session_of(engine, queued).status == "complete"
    assert violations(engine) == []


def test_a_row_that_was_never_claimed_cannot_be_settled_renewed_or_released(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    for step in (renew, release, complete):
        assert committed(engine, step, machine, queued) is None
    assert row_of(engine, queued) is not None


def test_a_failed_completion_ends_the_session_with_the_machines_reason(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, complete, machine, queued, 1, result=Result("error", error_message="tests fail"))
    session = session_of(engine, queued)
    assert (session.status, session.error_code, session.error_message) == ("error", "failed", "tests fail")
    assert row_of(engine, queued) is None
    assert violations(engine) == []


# -- sweep --------------------------------------------------------------------------------------------------------------


def test_the_sweep_takes_claims_past_the_timeout_and_leaves_the_others(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    expired, in_time, waiting = (work(engine, tenant, machine) for _ in range(3))
    for row, age in ((expired, 1801), (in_time, 1700)):
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, age)
    assert committed(engine, sweep, machine) == [(expired.queue_id, expired.session_id, 1, "released")]
    assert row_of(engine, expired).last_error == "claim expired"
    assert row_of(engine, in_time).claimed_at is not None
    assert row_of(engine, waiting).last_error is None
    assert committed(engine, sweep, machine) == []
    assert violations(engine) == []


def test_the_sweep_is_bounded_and_takes_the_oldest_first(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    rows = [work(engine, tenant, machine) for _ in range(3)]
    for age, row in enumerate(rows):
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, 1801 + age)
    swept = [committed(engine, sweep, machine, limit=2) for _ in range(2)]
    assert [{given.queue_id for given in batch} for batch in swept] == [
        {rows[2].queue_id, rows[1].queue_id},
        {rows[0].queue_id},
    ]


def test_a_swept_row_waits_as_if_released_and_up_to_a_tenth_longer(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    for _ in range(20):
        row = work(engine, tenant, machine)
        claimed(engine, machine, row)
        the_claim_is_older_by(engine, row, 1801)
    with transaction(engine) as tx:
        assert len(sweep(tx, machine)) == 20
        waits = [
            float(row[0])
            for row in tx.all(sql("select extract(epoch from available_at - now()) from dispatch_queue"))
        ]
    assert all(60 <= wait < 66 for wait in waits)
    assert len(set(waits)) > 1, "a stalled fleet would return in one instant"


def test_the_sweep_drops_at_the_attempt_limit(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    the_claim_is_older_by(engine, queued, 1801)
    assert [g.outcome for g in committed(engine, sweep, machine, policy=RetryPolicy(max_attempts=1))] == [
        "dropped"
    ]
    assert session_of(engine, queued).error_message == "claim expired"
    assert history_of(engine, queued)[-1] == "dead_lettered"
    assert violations(engine) == []


# -- depth and amend ----------------------------------------------------------------------------------------------------


def test_depth_counts_all_rows_and_ages_only_what_could_be_claimed(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    with transaction(engine) as tx:
        assert dispatch_queue.depth(tx) == (0, 0.0)
    held, waiting = work(engine, tenant, machine), work(engine, tenant, machine)
    the_backoff_has_passed(engine, held)
    claimed(engine, machine, held)
    with transaction(engine) as tx:
        rows, age = dispatch_queue.depth(tx)
    assert rows == 2
    assert age < 60, "the claimed row is older, and not claimable"
    the_backoff_has_passed(engine, waiting)
    with transaction(engine) as tx:
        assert 3600 <= dispatch_queue.depth(tx).oldest_claimable_age_seconds < 3660


def test_amending_changes_the_message_and_appends_follow_ups(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    def amend(**what: object) -> dispatch_queue.Amended | None:
        with transaction(engine) as tx:
            return dispatch_queue.amend(tx, org_id=queued.org_id, session_id=queued.session_id, **what)  # type: ignore[arg-type]  # one of the two

    assert amend(changes={"title": "New"}) == (queued.queue_id, False)
    claimed(engine, machine, queued)
    assert amend(prompt={"activityId": "1", "body": "and the tests"}) == (queued.queue_id, True)
    amend(prompt={"activityId": "2", "body": "please"})
    renewal = committed(engine, renew, machine, queued)
    assert renewal is not None
    assert [prompt["activityId"] for prompt in renewal.prompts] == ["1", "2"]
    payload = row_of(engine, queued).payload
    assert (payload["title"], payload["repo"]) == ("New", REPO)
    committed(engine, complete, machine, queued)
    assert amend(changes={"title": "Late"}) is None


def test_the_message_is_kept_as_it_was_given(engine: Engine, tenant: Tenant, machine: Machine) -> None:
    message = a_message("\u00fcber :colons and %s and 'quotes'", nested={"deep": [1, 2.5, None, True]})
    with transaction(engine) as tx:
        session_id = a_session(tx, tenant, machine)
        dispatch_queue.enqueue_dispatch(
            tx, org_id=tenant.org_id, orchestrator_id=machine.id, session_id=session_id, message=message
        )
    with transaction(engine) as tx:
        assert dispatch_queue.poll(tx, token=machine.token, limit=1).work[0].payload == message

"""Stopping work: at once while nobody has it, through its machine once somebody has."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from shared.dispatch_queue import RetryPolicy
from shared.sessions import Result
from tests.given import (
    Machine,
    Queued,
    claimed,
    history_of,
    row_of,
    session_of,
    the_backoff_has_passed,
    the_claim_is_older_by,
    violations,
)
from tests.steps import cancel, claim, committed, complete, release, renew, sweep


def test_queued_work_is_cancelled_at_once(engine: Engine, machine: Machine, queued: Queued) -> None:
    assert committed(engine, cancel, queued) == "cancelled"
    assert row_of(engine, queued) is None
    session = session_of(engine, queued)
    assert (session.status, session.error_code, session.ended_at is None) == ("cancelled", None, False)
    assert history_of(engine, queued) == ["created", "cancelled"]
    assert committed(engine, claim, machine, queued) is None
    assert violations(engine) == []


def test_work_in_backoff_is_cancelled_at_once(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    committed(engine, release, machine, queued)
    assert committed(engine, cancel, queued) == "cancelled"
    assert committed(engine, complete, machine, queued, 1) is None, "a cancelled session stays cancelled"
    assert violations(engine) == []


def test_claimed_work_keeps_its_row_and_the_machine_is_asked_to_stop(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    assert committed(engine, cancel, queued) == "stop_requested"
    assert session_of(engine, queued).status == "dispatched"
    renewal = committed(engine, renew, machine, queued)
    assert renewal is not None
    assert renewal.cancel_requested
    assert history_of(engine, queued) == ["created", "claimed", "stop_requested"]
    assert violations(engine) == []


def test_asking_twice_is_asking_once(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    committed(engine, cancel, queued)
    assert committed(engine, cancel, queued) == "stop_requested"
    assert history_of(engine, queued).count("stop_requested") == 1


def test_the_machine_completes_a_stopped_claim_as_cancelled(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, cancel, queued)
    settled = committed(engine, complete, machine, queued, 1, result=Result("cancelled"))
    assert settled == (queued.queue_id, 1, True)
    assert session_of(engine, queued).status == "cancelled"
    assert violations(engine) == []


@pytest.mark.parametrize("max_attempts", [1, 5])
def test_a_machine_that_never_answers_a_stop_is_swept_and_the_row_is_not_redelivered(
    engine: Engine, machine: Machine, queued: Queued, max_attempts: int
) -> None:
    claimed(engine, machine, queued)
    committed(engine, cancel, queued)
    the_claim_is_older_by(engine, queued, 1801)
    swept = committed(engine, sweep, machine, policy=RetryPolicy(max_attempts=max_attempts))
    assert [given.outcome for given in swept] == ["cancelled"]
    assert row_of(engine, queued) is None
    session = session_of(engine, queued)
    assert (session.status, session.error_code, session.error_message) == ("cancelled", None, None)
    assert history_of(engine, queued)[-1] == "cancelled"
    assert violations(engine) == []


def test_a_claim_given_back_after_a_stop_is_not_redelivered(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, cancel, queued)
    given_up = committed(engine, release, machine, queued, 1)
    assert given_up is not None
    assert given_up.outcome == "cancelled"
    assert violations(engine) == []


def test_what_is_over_cannot_be_cancelled(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    committed(engine, complete, machine, queued)
    assert committed(engine, cancel, queued) is None
    assert session_of(engine, queued).status == "complete"


def test_a_stop_request_belongs_to_its_claim_and_does_not_outlive_it(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    committed(engine, release, machine, queued)
    the_backoff_has_passed(engine, queued)
    claimed(engine, machine, queued)
    renewal = committed(engine, renew, machine, queued)
    assert renewal is not None
    assert not renewal.cancel_requested

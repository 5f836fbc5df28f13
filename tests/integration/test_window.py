"""There is no moment at which a session is to be delivered and nothing delivers it: refused at run time and by the database.

The third enforcement, by types, is in tests/typing.
"""

from __future__ import annotations

from collections.abc import Callable

import pg8000.native
import pytest
from sqlalchemy import Engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from shared import dispatch_queue, reopening, sessions
from shared.db import Tx, sql, transaction
from shared.sessions import Ended, NewSession, Result
from tests.given import (
    Machine,
    Queued,
    Tenant,
    a_machine,
    a_message,
    a_session,
    claimed,
    session_of,
    violations,
    work,
)
from tests.steps import cancel, committed, release, renew

ONE = sql("select 1")

# -- at run time: a Tx is an open transaction and nothing else is one ---------------------------------------------------


def test_a_tx_cannot_be_made(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(TypeError, match="not made, it is received"):
        Tx(connection, object())


def test_a_tx_cannot_be_subclassed() -> None:
    with pytest.raises(TypeError, match="final"):
        type("Pretender", (Tx,), {})


def test_a_tx_has_no_room_for_anything_else(engine: Engine) -> None:
    with transaction(engine) as tx, pytest.raises(AttributeError):
        tx.connection = None  # type: ignore[attr-defined]  # the point


@pytest.mark.parametrize("use", [Tx.all, Tx.first, Tx.run], ids=lambda use: str(use.__name__))
def test_a_finished_tx_refuses_to_work(engine: Engine, use: Callable[..., object]) -> None:
    with transaction(engine) as committed_tx:
        use(committed_tx, ONE)
    with pytest.raises(ZeroDivisionError), transaction(engine) as failed_tx:
        raise ZeroDivisionError
    for tx in (committed_tx, failed_tx):
        with pytest.raises(RuntimeError, match="this transaction is over"):
            use(tx, ONE)


def test_work_cannot_be_enqueued_after_the_transaction_of_its_session(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    with pytest.raises(DBAPIError, match="DQ001"), transaction(engine) as tx:
        session_id = a_session(tx, tenant, machine)
    with pytest.raises(RuntimeError, match="this transaction is over"):
        dispatch_queue.enqueue_dispatch(
            tx, org_id=tenant.org_id, orchestrator_id=machine.id, session_id=session_id, message={}
        )


def test_an_engine_whose_statements_commit_one_by_one_is_refused(engine: Engine) -> None:
    with (
        pytest.raises(TypeError, match="AUTOCOMMIT"),
        transaction(engine.execution_options(isolation_level="AUTOCOMMIT")),
    ):
        pass


def test_a_driver_whose_statements_commit_one_by_one_is_refused(engine: Engine) -> None:
    def autocommit(driver: pg8000.dbapi.Connection, *_: object) -> None:
        driver.autocommit = True

    engine.dispose()
    event.listen(engine, "connect", autocommit)
    with pytest.raises(TypeError, match="AUTOCOMMIT"), transaction(engine):
        pass


def test_an_exception_takes_everything_back(engine: Engine, tenant: Tenant, machine: Machine) -> None:
    def die_before_the_commit(tx: Tx) -> None:
        session_id = a_session(tx, tenant, machine)
        dispatch_queue.enqueue_dispatch(
            tx, org_id=tenant.org_id, orchestrator_id=machine.id, session_id=session_id, message=a_message()
        )
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        committed(engine, die_before_the_commit)
    with transaction(engine) as tx:
        assert tx.all(sql("select id from dispatch_sessions union all select id from dispatch_queue")) == []


# -- in the database: half of a pair does not commit, whoever writes it -------------------------------------------------


def test_a_session_that_cannot_be_delivered_commits_without_a_row_and_not_with_one(
    engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    new = NewSession(tenant.org_id, tenant.workspace_id, "issue", "PAY-1", "team", "Fix the rounding")
    with transaction(engine) as tx:
        over = sessions.open_session(
            tx, new, ended=Ended("error", "no_orchestrator", "no machine serves acme/api")
        )
    assert over is not None
    with pytest.raises(DBAPIError, match="DQ002"), transaction(engine) as tx:
        dispatch_queue.enqueue_dispatch(
            tx, org_id=tenant.org_id, orchestrator_id=machine.id, session_id=over, message={}
        )
    assert violations(engine) == []


def test_settling_without_closing_does_not_commit(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    with pytest.raises(DBAPIError, match="DQ001"), transaction(engine) as tx:
        assert dispatch_queue.settle(
            tx, org_id=machine.org_id, orchestrator_id=machine.id, session_id=queued.session_id, attempt=1
        )
    assert committed(engine, renew, machine, queued, 1) is not None


def test_closing_without_settling_does_not_commit(engine: Engine, machine: Machine, queued: Queued) -> None:
    claimed(engine, machine, queued)
    with pytest.raises(DBAPIError, match="DQ002"), transaction(engine) as tx:
        assert sessions.close_session(
            tx,
            org_id=machine.org_id,
            session_id=queued.session_id,
            result=Result("complete"),
            orchestrator_id=machine.id,
            queue_id=queued.queue_id,
            attempt=1,
        )
    assert session_of(engine, queued).status == "dispatched"


def test_reopening_without_enqueueing_does_not_commit(
    engine: Engine, machine: Machine, queued: Queued
) -> None:
    committed(engine, cancel, queued)
    with pytest.raises(DBAPIError, match="DQ001"), transaction(engine) as tx:
        assert reopening.reopen(
            tx,
            org_id=queued.org_id,
            session_id=queued.session_id,
            orchestrator_id=machine.id,
            repo="acme/api",
        )
    assert session_of(engine, queued).status == "cancelled"


OPENED = """
    insert into dispatch_sessions (org_id, id, workspace_id, linear_issue_id, linear_identifier, team_id, title)
    select org_id, gen_random_uuid(), id, 'issue', 'PAY-1', 'team', 'By hand' from workspaces
"""
ROW_DELETED = "delete from dispatch_queue"
ENDED = "update dispatch_sessions set status = 'complete', ended_at = now()"
ENQUEUED_AFTER_THE_END = """
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload)
    select org_id, gen_random_uuid(), orchestrator_id, id, '{}' from dispatch_sessions where ended_at is not null
"""
REOPENED = "update dispatch_sessions set status = 'pending', ended_at = null where ended_at is not null"
HALVES = {
    "a session without a row": (OPENED, "DQ001"),
    "a row deleted under its session": (ROW_DELETED, "DQ001"),
    "a session reopened without a row": (REOPENED, "DQ001"),
    "a session ended over its row": (ENDED, "DQ002"),
    "a row for a session that is over": (ENQUEUED_AFTER_THE_END, "DQ002"),
}


@pytest.fixture
def by_hand(
    database_url: str, engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> Callable[..., None]:
    """Runs statements in one transaction, past all of our code, beside one open and one ended session."""
    committed(engine, cancel, work(engine, tenant, machine))
    url = make_url(database_url)

    def run(*statements: str) -> None:
        connection = pg8000.native.Connection(
            url.username or "",
            host=url.host or "",
            port=url.port or 5432,
            database=url.database,
            password=url.password,
        )
        try:
            for statement in ("begin", *statements, "commit"):
                connection.run(statement)
        finally:
            connection.close()

    return run


def refused_with(by_hand: Callable[..., None], *statements: str) -> str | None:
    """The code with which the database refuses, None when it commits."""
    try:
        by_hand(*statements)
    except pg8000.native.DatabaseError as error:
        return str(error.args[0]["C"])
    return None


@pytest.mark.parametrize(("half", "code"), HALVES.values(), ids=HALVES.keys())
def test_half_of_a_pair_is_refused_even_by_hand(
    engine: Engine, by_hand: Callable[..., None], half: str, code: str
) -> None:
    assert refused_with(by_hand, half) == code
    assert violations(engine) == []


@pytest.mark.parametrize(("half", "code"), HALVES.values(), ids=HALVES.keys())
def test_it_is_the_deferred_trigger_that_refuses_it(
    engine: Engine, by_hand: Callable[..., None], half: str, code: str
) -> None:
    by_hand("drop function refuse_the_window() cascade")
    assert refused_with(by_hand, half) is None
    assert len(violations(engine)) == 1


def test_both_halves_commit_in_either_order(engine: Engine, by_hand: Callable[..., None]) -> None:
    by_hand(ROW_DELETED, ENDED)
    by_hand(REOPENED, ENQUEUED_AFTER_THE_END.replace("is not null", "is null"))
    by_hand(ENDED, ROW_DELETED)
    assert violations(engine) == []


# -- the view that shows what must not be -------------------------------------------------------------------------------

CONTRADICTIONS = {
    "no row": (ROW_DELETED, "a session to be delivered has no queue row"),
    "over, with a row": (ENDED, "a session that is over still has a queue row"),
    "claimed, but said to wait": (
        "update dispatch_sessions set status = 'pending'",
        "the session says pending, but its row is claimed",
    ),
    "waiting, but said to run": (
        "update dispatch_queue set claimed_at = null",
        "the session says dispatched, but its row is waiting",
    ),
    "another machine": (
        "update dispatch_queue set orchestrator_id = gen_random_uuid()",
        "the session and its row name different machines",
    ),
    "an attempt that no claim made": (
        "update dispatch_queue set attempts = 2",
        "the row counts 2 attempts, the history 1",
    ),
    "a claim without its event": (
        "delete from session_events where type = 'claimed'",
        "the row counts 1 attempts, the history 0",
    ),
}


@pytest.mark.parametrize(("sabotage", "violation"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_the_view_reports_each_contradiction(
    engine: Engine, machine: Machine, queued: Queued, sabotage: str, violation: str
) -> None:
    claimed(engine, machine, queued)
    assert violations(engine) == []
    with transaction(engine) as tx:
        tx.run(sql("set local session_replication_role = replica"))
        tx.run(sql(sabotage))
    assert violations(engine) == [violation]


def test_the_view_is_empty_beside_work_in_every_state(
    engine: Engine, tenant: Tenant, machine: Machine, queued: Queued
) -> None:
    for row in (work(engine, tenant, machine), work(engine, tenant, a_machine(engine, tenant))):
        committed(engine, cancel, row)
    released, running = work(engine, tenant, machine), work(engine, tenant, machine)
    for row in (released, running):
        claimed(engine, machine, row)
    committed(engine, release, machine, released)
    assert violations(engine) == []

"""Calls that must not type-check. Each marked line is an error that mypy has to report, and no other line may have one.

The guarantee rests on the first one: work cannot be enqueued outside the transaction that made its session.
"""

from uuid import UUID

from sqlalchemy import Connection, Engine

from shared.db import Tx, sql, transaction
from shared.dispatch_queue import claim, enqueue_dispatch
from shared.sessions import NewSession, open_session


def without_a_transaction(org: UUID, machine: UUID, session: UUID) -> None:
    enqueue_dispatch(org_id=org, orchestrator_id=machine, session_id=session, message={})  # error: call-arg


def with_an_engine(engine: Engine, org: UUID, machine: UUID, session: UUID) -> None:
    enqueue_dispatch(engine, org_id=org, orchestrator_id=machine, session_id=session, message={})  # error: arg-type


def with_a_connection(connection: Connection, org: UUID, machine: UUID, session: UUID) -> None:
    enqueue_dispatch(connection, org_id=org, orchestrator_id=machine, session_id=session, message={})  # error: arg-type


def with_nothing(org: UUID, machine: UUID, session: UUID) -> None:
    enqueue_dispatch(None, org_id=org, orchestrator_id=machine, session_id=session, message={})  # error: arg-type


def with_the_unopened_block(engine: Engine, org: UUID, machine: UUID, session: UUID) -> None:
    enqueue_dispatch(transaction(engine), org_id=org, orchestrator_id=machine, session_id=session, message={})  # error: arg-type


def a_session_with_a_connection(connection: Connection, new: NewSession) -> None:
    open_session(connection, new)  # error: arg-type


class Pretender(Tx):  # error: misc
    pass


def a_homemade_transaction(connection: Connection) -> None:
    Tx(connection)  # error: call-arg


def a_string_as_statement(engine: Engine) -> None:
    with transaction(engine) as tx:
        tx.run("delete from dispatch_queue")  # error: arg-type
        tx.run(sql("select 1"))


def a_lost_race_that_is_not_looked_at(tx: Tx, org: UUID, machine: UUID, row: UUID) -> None:
    claim(tx, org_id=org, orchestrator_id=machine, queue_id=row, concurrency_limit=1).session_id  # error: union-attr

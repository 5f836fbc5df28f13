"""What machines, people and the tick do to a row, in a test's words: `committed(engine, claim, machine, queued)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic
from typing import Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy import Engine

from shared import dispatch_queue, sessions
from shared.db import OPERATOR, Tx, sql, transaction
from shared.dispatch_queue import GivenUp, Renewal, RetryPolicy, Work
from shared.sessions import Result
from tests.given import POLICY, Machine, Queued

P = ParamSpec("P")
T = TypeVar("T")


def committed(
    engine: Engine, step: Callable[Concatenate[Tx, P], T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """The step in a transaction of its own, with patience for a lock that a busy test machine holds for long."""
    with transaction(engine, OPERATOR) as tx:
        return step(tx, *args, **kwargs)


def claim(tx: Tx, machine: Machine, queued: Queued, *, room: int = 64) -> Work | None:
    return dispatch_queue.claim(
        tx,
        org_id=machine.org_id,
        orchestrator_id=machine.id,
        queue_id=queued.queue_id,
        concurrency_limit=room,
    )


def claim_many(tx: Tx, machine: Machine, limit: int, *, room: int = 64) -> list[UUID]:
    works = dispatch_queue.claim_many(
        tx, org_id=machine.org_id, orchestrator_id=machine.id, limit=limit, concurrency_limit=room
    )
    return [work.queue_id for work in works]


def renew(tx: Tx, machine: Machine, queued: Queued, attempt: int | None = None) -> Renewal | None:
    return dispatch_queue.renew(
        tx, org_id=machine.org_id, orchestrator_id=machine.id, queue_id=queued.queue_id, attempt=attempt
    )


def release(
    tx: Tx,
    machine: Machine,
    queued: Queued,
    attempt: int | None = None,
    *,
    error: str = "exit status 1",
    policy: RetryPolicy = POLICY,
) -> GivenUp | None:
    return dispatch_queue.release(
        tx,
        org_id=machine.org_id,
        orchestrator_id=machine.id,
        queue_id=queued.queue_id,
        attempt=attempt,
        error=error,
        policy=policy,
    )


def complete(
    tx: Tx, machine: Machine, queued: Queued, attempt: int | None = None, *, result: Result | None = None
) -> tuple[UUID, int, bool] | None:
    """Settles the row and closes the session, as the machine's last report does. Queue id, attempt, and whether it was asked to stop."""
    settled = dispatch_queue.settle(
        tx, org_id=machine.org_id, orchestrator_id=machine.id, session_id=queued.session_id, attempt=attempt
    )
    if settled is not None:
        assert sessions.close_session(
            tx,
            org_id=machine.org_id,
            session_id=queued.session_id,
            result=result or Result("complete"),
            orchestrator_id=machine.id,
            queue_id=settled.queue_id,
            attempt=settled.attempt,
        )
    return None if settled is None else settled[:3]


def sweep(tx: Tx, machine: Machine, *, limit: int = 100, policy: RetryPolicy = POLICY) -> list[GivenUp]:
    return dispatch_queue.sweep(
        tx, org_id=machine.org_id, orchestrator_id=machine.id, limit=limit, policy=policy
    )


def reroute(
    tx: Tx, machine: Machine, *, limit: int = 100, queue_ids: Sequence[UUID] | None = None
) -> dict[UUID, UUID]:
    return dispatch_queue.reroute(
        tx, org_id=machine.org_id, orchestrator_id=machine.id, limit=limit, policy=POLICY, queue_ids=queue_ids
    )


def cancel(tx: Tx, queued: Queued, *, reason: str = "unassigned") -> str | None:
    return dispatch_queue.cancel(tx, org_id=queued.org_id, session_id=queued.session_id, reason=reason)


def polled(tx: Tx, machine: Machine, *, limit: int = 64) -> list[UUID]:
    """The ids of the rows that a poll shows."""
    return [work.queue_id for work in dispatch_queue.poll(tx, token=machine.token, limit=limit).work]


# -- two at once: interleaved by their locks, so that nothing sleeps and nothing depends on luck -------------------------

BLOCKED = sql("""
    select count(*) from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0
""")


def meanwhile(engine: Engine, *works: Callable[[], T]) -> list[Future[T]]:
    """Starts each of `works` in a thread of its own and returns when all of them wait for somebody's lock."""
    threads = ThreadPoolExecutor(len(works))
    started = [threads.submit(work) for work in works]
    threads.shutdown(wait=False)
    deadline = monotonic() + 10
    while monotonic() < deadline:
        done, _ = wait(started, timeout=0.002)
        assert not done, (
            f"did not wait for a lock: {[future.exception() or future.result() for future in done]}"
        )
        with transaction(engine) as tx:
            row = tx.first(BLOCKED)
        if row is not None and row[0] == len(works):
            return started
    raise AssertionError("the other transactions do not wait for a lock")

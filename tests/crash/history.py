"""What the recorded history has to show after any crash: each attempt was delivered once, and nothing went on after its end."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Engine

from shared.db import OPERATOR, sql, transaction
from tests.crash.calls import Ask, claiming, completing, polling, tick
from tests.given import Machine, violations

SESSIONS = sql("select id, status, ended_at is not null as is_over from dispatch_sessions")
# A reported `error` says which status was reported, the one that ends a session does not.
EVENTS = sql("""
    select session_id, case when type = 'error' and data ->> 'status' is null then 'failed' else type end as type, queue_id, attempt
      from session_events
     order by id
""")
COUNTS = sql(
    "select (select count(*) from dispatch_sessions), (select count(*) from dispatch_queue), (select count(*) from webhook_deliveries)"
)
TIME_PASSES = sql("""
    update dispatch_queue set claimed_at = claimed_at - interval '1 hour', available_at = available_at - interval '1 hour'
""")
ENDS = {"complete", "failed", "cancelled", "dead_lettered"}


def counts(engine: Engine) -> tuple[int, int, int]:
    """How many sessions, queue rows and remembered deliveries are committed."""
    with transaction(engine) as tx:
        row = tx.first(COUNTS)
    assert row is not None
    return row[0], row[1], row[2]


def time_passes(engine: Engine) -> None:
    """As if an hour had passed: every claim has expired, every backoff is over."""
    with transaction(engine, OPERATOR) as tx:
        tx.run(TIME_PASSES)


def recovered(engine: Engine, ask: Ask, *machines: Machine) -> None:
    """Lets the product recover as it does in production, by ticks and by machines that poll, claim and complete, until nothing is left;
    then checks the history."""
    for _ in range(5):
        time_passes(engine)
        assert ask(tick()).status == 200
        time_passes(engine)
        for machine in machines:
            for message in ask(polling(machine)).body["messages"]:
                claim = ask(claiming(machine, message["queueId"]))
                assert claim.status == 200, claim
                done = ask(completing(machine, message["sessionId"], claim.body["attempt"]))
                assert done.status == 200, done
        if counts(engine)[1] == 0:
            break
    check(engine)


def check(engine: Engine) -> list[Any]:
    """Fails unless every session is over, each (queue id, attempt) was claimed once, attempts count from 1 without a gap, and nothing was
    delivered after the end. Returns the events."""
    assert violations(engine) == []
    with transaction(engine, OPERATOR) as tx:
        sessions, events = tx.all(SESSIONS), list(tx.all(EVENTS))
    assert [session for session in sessions if not session.is_over] == []
    claims, ended = defaultdict(list), dict[Any, str]()
    for event in events:
        if event.type == "claimed":
            assert event.session_id not in ended, "delivered after its end"
            claims[event.queue_id].append(event.attempt)
        elif event.type in ENDS:
            assert event.session_id not in ended, "ended twice"
            ended[event.session_id] = event.type
    for queue_id, attempts in claims.items():
        assert attempts == list(range(1, len(attempts) + 1)), (queue_id, attempts)
    assert ended.keys() == {session.id for session in sessions}
    return events


def attempts_of(engine: Engine) -> list[int]:
    """The attempts that were delivered, in order."""
    with transaction(engine) as tx:
        return [event.attempt for event in tx.all(EVENTS) if event.type == "claimed"]

"""A poll that waits, through the real framework and its real server."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import monotonic

import httpx
from sqlalchemy import Engine

from shared.db import sql, transaction
from tests.given import Machine, a_machine, a_tenant, work

LONG = 40
PATIENCE = 15
"""Much more than an answer takes, less than `LONG`: what is answered within it was woken."""

LISTENERS = sql("""
    select count(*) from pg_stat_activity where datname = current_database() and application_name = 'devpilot-dispatch listen'
""")


def asks(url: str, machine: Machine, seconds: int) -> httpx.Response:
    return httpx.get(
        f"{url}/api/dispatch/poll",
        params={"waitSeconds": seconds} if seconds else {},
        headers={"Authorization": f"Bearer {machine.token}"},
        timeout=LONG + 20,
    )


def listens(engine: Engine, asked: Future[httpx.Response]) -> None:
    """Returns when the server listens, for a request that has no answer yet."""
    deadline = monotonic() + PATIENCE
    while True:
        with transaction(engine) as tx:
            row = tx.first(LISTENERS)
        assert row is not None
        if row[0]:
            return
        assert not wait([asked], timeout=0.01).done
        assert monotonic() < deadline


def test_it_is_answered_when_its_work_is_committed(url: str, engine: Engine) -> None:
    tenant = a_tenant(engine)
    machine = a_machine(engine, tenant)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(asks, url, machine, LONG)
        listens(engine, asked)
        queued = work(engine, tenant, machine)
        answer = asked.result(PATIENCE).json()
    assert [message["queueId"] for message in answer["messages"]] == [str(queued.queue_id)]
    assert answer["pollAfterMs"] == 1000


def test_eight_wait_on_one_connection_while_others_are_served(url: str, engine: Engine) -> None:
    tenant = a_tenant(engine)
    *waiting, other = [a_machine(engine, tenant) for _ in range(9)]
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(asks, url, machine, LONG) for machine in waiting]
        listens(engine, asked[0])
        for _ in range(5):
            assert asks(url, other, 0).json()["messages"] == []
        assert not wait(asked, timeout=0).done
        with transaction(engine) as tx:
            assert tx.first(LISTENERS) == (1,)
        queued = [work(engine, tenant, machine) for machine in waiting]
        for one, row in zip(asked, queued, strict=True):
            answer = one.result(PATIENCE).json()
            assert [message["queueId"] for message in answer["messages"]] == [str(row.queue_id)]


def test_an_empty_answer_after_the_wait_says_to_ask_again_at_once(url: str, engine: Engine) -> None:
    machine = a_machine(engine, a_tenant(engine))
    assert asks(url, machine, 1).json() == {"messages": [], "pollAfterMs": 0}
    refused = asks(url, machine, 61)
    assert (refused.status_code, refused.json()["error"]["details"]["field"]) == (400, "waitSeconds")

"""How often a request crosses the network to its database: that does not depend on the machine, so it is asserted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, event

from functions.app import App
from shared.db import engine_for
from shared.settings import Settings
from tests.linear_given import Linear, a_linear, happened
from tests.linear_samples import DELEGATED, RELEASED
from tests.roundtrips import Proxy, counting_proxy


@pytest.fixture
def counted(engine: Engine, settings: Settings, database_url: str) -> Iterator[tuple[Linear, Proxy]]:
    """A workspace whose functions reach the database through a counting proxy, over a connection that is open already."""
    given = a_linear(engine, settings)
    with counting_proxy(database_url) as proxy:
        far = settings.model_copy(update={"database_url": SecretStr(proxy.url)})
        own = engine_for(far)
        linear = Linear(App(far, own), engine, given.tenant, given.machine)
        assert linear.machine_asks("GET", "/api/dispatch/poll").status == 200
        yield linear, proxy
        own.dispose()


def test_a_webhook_that_starts_work_takes_six_round_trips(counted: tuple[Linear, Proxy]) -> None:
    linear, proxy = counted
    with proxy.counted() as round_trips:
        assert linear.hears(happened(DELEGATED)) == "started"
    assert round_trips == [6]


def test_a_webhook_that_was_heard_before_takes_three(counted: tuple[Linear, Proxy]) -> None:
    linear, proxy = counted
    event_ = happened(DELEGATED)
    linear.hears(event_)
    with proxy.counted() as round_trips:
        assert linear.hears(event_) == "heard_before"
    assert round_trips == [3]


def test_a_webhook_that_stops_work_takes_seven(
    counted: tuple[Linear, Proxy],
) -> None:
    linear, proxy = counted
    linear.hears(happened(DELEGATED, seconds_ago=60))
    with proxy.counted() as round_trips:
        assert linear.hears(happened(RELEASED)) == "cancelled"
    assert round_trips == [7]


@pytest.mark.parametrize("waiting", [False, True], ids=["empty", "with work"])
def test_a_poll_is_one_statement_and_two_round_trips(counted: tuple[Linear, Proxy], waiting: bool) -> None:
    linear, proxy = counted
    if waiting:
        linear.hears(happened(DELEGATED))
    statements: list[str] = []
    event.listen(
        linear.app.engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2])
    )
    with proxy.counted() as round_trips:
        answer = linear.machine_asks("GET", "/api/dispatch/poll")
    assert answer.body is not None
    assert len(answer.body["messages"]) == waiting
    assert (len(statements), round_trips) == (1, [2])


def test_a_claim_takes_four_round_trips(counted: tuple[Linear, Proxy]) -> None:
    linear, proxy = counted
    linear.hears(happened(DELEGATED))
    with proxy.counted() as round_trips:
        assert linear.claimed()["attempt"] == 1
    assert round_trips == [4]


def test_a_completion_takes_four_round_trips(counted: tuple[Linear, Proxy]) -> None:
    linear, proxy = counted
    linear.hears(happened(DELEGATED))
    claim = linear.claimed()
    with proxy.counted() as round_trips:
        linear.completes(claim)
    assert round_trips == [4]


def test_a_renewal_takes_three_round_trips(counted: tuple[Linear, Proxy]) -> None:
    linear, proxy = counted
    linear.hears(happened(DELEGATED))
    claim = linear.claimed()
    with proxy.counted() as round_trips:
        linear.machine_asks("POST", f"/api/dispatch/{claim['message']['queueId']}/renew", {"attempt": 1})
    assert round_trips == [3]

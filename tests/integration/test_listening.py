"""A poll that waits is answered as soon as a row for its machine is committed, and never later or worse than one that does not wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, event

from functions import claim, listening
from functions.app import App
from functions.listening import Listening, Waiter
from functions.web import Request, Response
from infra.admin import listen
from shared import orchestrators
from shared.db import OPERATOR, engine_for, sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.settings import Settings
from tests import steps
from tests.given import (
    Machine,
    Queued,
    Tenant,
    a_machine,
    claimed,
    the_machine_was_last_heard,
    work,
)
from tests.roundtrips import counting_proxy
from tests.steps import committed

LONG = 60
PATIENCE = 10
"""Much more than an answer takes, much less than `LONG`: what is answered within it was woken."""

LISTENERS = sql("""
    select pid from pg_stat_activity where datname = current_database() and application_name = 'devpilot-dispatch listen'
""")
END_LISTENERS = sql("""
    select pg_terminate_backend(pid, 5000)
      from pg_stat_activity where datname = current_database() and application_name = 'devpilot-dispatch listen'
""")
OPEN_TRANSACTIONS = sql("""
    select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null
""")


class Instance:
    """One instance of the function `claim`, its requests in threads of their own. Counts its polls."""

    def __init__(self, settings: Settings, operator: Engine, tenant: Tenant) -> None:
        self.operator, self.tenant = operator, tenant
        self.app = App(settings, engine_for(settings))
        self.polls = 0
        self._threads = ThreadPoolExecutor(32)
        event.listen(self.app.engine, "before_cursor_execute", self._count)

    def _count(self, *arguments: Any) -> None:
        self.polls += "with machine as" in arguments[2]

    def work(self, machine: Machine) -> Queued:
        """Somebody commits work for the machine."""
        return work(self.operator, self.tenant, machine)

    def ask(self, machine: Machine, seconds: object = LONG) -> Response:
        """A poll of the machine; returns with its answer."""
        headers = {"authorization": f"Bearer {machine.token}"}
        return claim.handle(
            self.app, Request("GET", "/api/dispatch/poll", {"waitSeconds": str(seconds)}, headers)
        )

    def waits(self, *machines: Machine, seconds: int = LONG) -> list[Future[Response]]:
        """A poll of each machine; returns when all of them wait."""
        before = self.app.listening.waiting
        asked = [self._threads.submit(self.ask, machine, seconds) for machine in machines]
        self.until(lambda: self.app.listening.waiting == before + len(asked), asked)
        return asked

    def until(self, so: Callable[[], bool], asked: list[Future[Response]]) -> None:
        """Returns when it is so; none of the requests may have been answered before."""
        deadline = monotonic() + PATIENCE
        while not so():
            done, _ = wait(asked, timeout=0.002)
            assert not done, [future.result().body for future in done]
            assert monotonic() < deadline

    def close(self) -> None:
        ended(self.operator)
        self._threads.shutdown()
        self.app.listening.close()
        self.app.engine.dispose()


class Given(NamedTuple):
    """What an instance is started with."""

    settings: Settings
    engine: Engine
    tenant: Tenant


@pytest.fixture
def given(settings: Settings, engine: Engine, tenant: Tenant) -> Given:
    """A listening connection, and a database where commits say whom they concern."""
    with transaction(engine, OPERATOR) as tx:
        assert listen.set_to(tx, wanted=True)
    listens = {"database_listen_url": settings.database_url, "listen_max_waiters": 8}
    return Given(settings.model_copy(update=listens), engine, tenant)


@contextmanager
def an_instance(given: Given, **changes: Any) -> Iterator[Instance]:
    one = Instance(given.settings.model_copy(update=changes), given.engine, given.tenant)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def instance(given: Given) -> Iterator[Instance]:
    with an_instance(given) as one:
        yield one


@pytest.fixture
def other(engine: Engine, tenant: Tenant) -> Machine:
    return a_machine(engine, tenant)


def listeners(engine: Engine) -> list[int]:
    with transaction(engine) as tx:
        return [row[0] for row in tx.all(LISTENERS)]


def ended(engine: Engine) -> None:
    """Ends every listening connection, from the server's side."""
    with transaction(engine) as tx:
        tx.all(END_LISTENERS)


def told(answer: Response) -> list[UUID]:
    """The queue ids in an answer of 200."""
    assert answer.status == 200, answer.body
    assert answer.body is not None
    return [UUID(message["queueId"]) for message in answer.body["messages"]]


def answered(future: Future[Response]) -> Response:
    return future.result(PATIENCE)


def nothing(after_ms: int) -> dict[str, Any]:
    return {"messages": [], "pollAfterMs": after_ms}


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if '"WARNING"' in line]


# -- what ends a wait ---------------------------------------------------------------------------------------------------


def test_a_waiting_poll_is_answered_when_work_is_committed(instance: Instance, machine: Machine) -> None:
    [asked] = instance.waits(machine)
    queued = instance.work(machine)
    answer = answered(asked)
    assert told(answer) == [queued.queue_id]
    assert answer.body is not None
    assert answer.body["pollAfterMs"] == 1000


def test_a_wake_up_that_leads_to_nothing_does_not_end_the_wait(
    instance: Instance, engine: Engine, machine: Machine
) -> None:
    [asked] = instance.waits(machine)
    with transaction(engine, OPERATOR) as tx:
        tx.all(sql("select pg_notify('dispatch_queue', :machine)"), machine=str(machine.id))
    instance.until(lambda: instance.polls == 3, [asked])
    queued = instance.work(machine)
    assert told(answered(asked)) == [queued.queue_id]


def test_a_waiting_poll_is_answered_when_work_is_rerouted_to_its_machine(
    instance: Instance, engine: Engine, machine: Machine, other: Machine, queued: Queued
) -> None:
    [asked] = instance.waits(other)
    the_machine_was_last_heard(engine, machine, 3600)
    assert committed(engine, steps.reroute, machine) == {queued.queue_id: other.id}
    assert told(answered(asked)) == [queued.queue_id]


def test_a_waiting_poll_is_answered_when_its_machine_is_to_stop_something(
    instance: Instance, engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    [asked] = instance.waits(machine)
    assert committed(engine, steps.cancel, queued) == "stop_requested"
    assert answered(asked).body == {**nothing(1000), "cancelled": [str(queued.queue_id)]}


def test_a_waiting_poll_is_answered_when_a_row_that_was_given_back_is_due(
    instance: Instance, engine: Engine, machine: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    [asked] = instance.waits(machine)
    given_back = committed(engine, steps.release, machine, queued, policy=RetryPolicy(backoff_base=1))
    assert given_back is not None
    instance.until(lambda: instance.polls == 3, [asked])
    assert told(answered(asked)) == [queued.queue_id]
    assert instance.polls == 4, "it looked when the row was due, and not in between"


def test_an_empty_answer_after_the_whole_time_says_to_ask_again_at_once(
    instance: Instance, machine: Machine
) -> None:
    began = monotonic()
    assert instance.ask(machine, 1).body == nothing(0)
    assert 1 <= monotonic() - began < PATIENCE
    assert instance.polls == 3


def test_a_token_that_is_revoked_meanwhile_is_refused(
    instance: Instance, engine: Engine, tenant: Tenant, machine: Machine
) -> None:
    [asked] = instance.waits(machine)
    with transaction(engine, OPERATOR) as tx:
        assert orchestrators.revoke_token(tx, org_id=tenant.org_id, token_id=machine.token_id)
    instance.work(machine)
    assert answered(asked).status == 401
    assert instance.app.listening.waiting == 0


def test_while_commits_say_nothing_the_wait_just_lasts(
    instance: Instance, engine: Engine, machine: Machine
) -> None:
    with transaction(engine, OPERATOR) as tx:
        assert listen.set_to(tx, wanted=False)
    began = monotonic()
    [asked] = instance.waits(machine, seconds=2)
    queued = instance.work(machine)
    assert told(answered(asked)) == [queued.queue_id]
    assert monotonic() - began >= 2
    assert instance.polls == 3


# -- what does not ------------------------------------------------------------------------------------------------------


def test_rows_of_other_machines_and_the_claims_of_its_own_wake_nobody(
    instance: Instance, engine: Engine, machine: Machine, other: Machine, queued: Queued
) -> None:
    claimed(engine, machine, queued)
    asked, witness = instance.waits(machine, other)
    for _ in range(3):
        instance.work(a_machine(engine, instance.tenant))
    assert committed(engine, steps.renew, machine, queued)
    instance.work(other)
    answered(witness)
    assert instance.polls == 2 + 3, (
        "the witness was told last: whoever else was named would have looked by now"
    )
    instance.work(machine)
    assert len(told(answered(asked))) == 1
    assert instance.polls == 2 + 3 + 1


def test_waiting_holds_no_transaction_and_no_connection_of_the_pool(
    instance: Instance, engine: Engine, machine: Machine, other: Machine
) -> None:
    instance.waits(machine, other)
    assert instance.app.engine.pool.checkedout() == 0  # type: ignore[attr-defined] # of the pool that the engine has
    with transaction(engine) as tx:
        assert tx.all(OPEN_TRANSACTIONS) == [(0,)]


# -- nothing is missed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step"),
    [(Listening, "place_for"), (Waiter, "wait")],
    ids=["before it listens", "between the look that decides to wait and the wait"],
)
def test_a_commit_before_the_wait_is_not_missed(
    instance: Instance, machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: type, step: str
) -> None:
    real, queued = getattr(kind, step), list[Queued]()

    def with_a_commit_before_it(*arguments: Any) -> Any:
        if not queued:
            queued.append(instance.work(machine))
        return real(*arguments)

    monkeypatch.setattr(kind, step, with_a_commit_before_it)
    began = monotonic()
    assert told(instance.ask(machine)) == [queued[0].queue_id]
    assert monotonic() - began < PATIENCE


def test_a_commit_between_a_dead_connection_and_the_next_one_is_not_missed(
    instance: Instance,
    engine: Engine,
    machine: Machine,
    other: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, others = Waiter.wait, list[Future[Response]]()

    def on_another_connection(waiter: Waiter, seconds: float) -> bool:
        if not others and waiter.machine == str(machine.id):
            ended(engine)
            instance.work(machine)
            others.extend(instance.waits(other))
        return real(waiter, seconds)

    monkeypatch.setattr(Waiter, "wait", on_another_connection)
    began = monotonic()
    assert len(told(instance.ask(machine))) == 1
    assert monotonic() - began < PATIENCE


def test_work_that_is_there_already_is_told_without_listening(
    instance: Instance, engine: Engine, machine: Machine, queued: Queued
) -> None:
    assert told(instance.ask(machine)) == [queued.queue_id]
    assert (instance.polls, listeners(engine)) == (1, [])


# -- one connection for all ---------------------------------------------------------------------------------------------


def test_eight_machines_wait_on_one_connection_and_each_is_answered(
    instance: Instance, engine: Engine, tenant: Tenant
) -> None:
    machines = [a_machine(engine, tenant) for _ in range(8)]
    asked = instance.waits(*machines)
    listener = listeners(engine)
    assert len(listener) == 1
    # From both ends: the one that reads is among the first to leave, and so is its successor.
    for index in (0, 7, 1, 6, 2, 5, 3, 4):
        queued = instance.work(machines[index])
        assert told(answered(asked[index])) == [queued.queue_id]
        assert listeners(engine) == listener
    assert instance.polls == 3 * 8


def test_who_leaves_because_its_time_is_over_hands_the_reading_on(
    instance: Instance, machine: Machine, other: Machine
) -> None:
    [leaves] = instance.waits(machine, seconds=2)
    [stays] = instance.waits(other)
    assert answered(leaves).body == nothing(0)
    instance.work(other)
    assert len(told(answered(stays))) == 1


def test_the_connection_stays_for_the_next_request(
    instance: Instance, engine: Engine, machine: Machine, other: Machine
) -> None:
    found = []
    for one in (machine, other):
        [asked] = instance.waits(one)
        found.append(listeners(engine))
        instance.work(one)
        answered(asked)
    assert found[0] == found[1]


def test_who_finds_all_places_taken_is_answered_at_once(
    given: Given, machine: Machine, other: Machine
) -> None:
    with an_instance(given, listen_max_waiters=1) as instance:
        [asked] = instance.waits(machine)
        assert instance.ask(other).body == nothing(1000)
        instance.work(machine)
        answered(asked)
        instance.waits(other)


def test_without_a_listening_connection_the_answer_comes_at_once_as_it_always_did(
    given: Given, machine: Machine
) -> None:
    with an_instance(given, database_listen_url=None) as instance:
        assert [instance.ask(machine).body for _ in range(2)] == [nothing(1000), nothing(2000)]
        assert instance.polls == 2


@pytest.mark.parametrize("seconds", ["-1", "61", "1.5", "", "soon", "1e1", "٣"])
def test_a_wait_that_is_no_number_of_seconds_up_to_sixty_is_refused_by_its_name(
    instance: Instance, machine: Machine, seconds: str
) -> None:
    answer = instance.ask(machine, seconds)
    assert answer.body is not None
    assert (answer.status, answer.body["error"]["details"]["field"]) == (400, "waitSeconds")
    assert instance.polls == 0


# -- the connection fails -----------------------------------------------------------------------------------------------


def test_when_the_connection_is_ended_all_who_wait_are_told_to_poll_and_the_next_one_listens_again(
    instance: Instance, engine: Engine, machine: Machine, other: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    both = instance.waits(machine, other)
    ended(engine)
    for asked in both:
        answer = answered(asked)
        assert (answer.status, answer.body) == (200, nothing(1000))
    assert len(warnings(capsys)) == 1
    [asked] = instance.waits(machine)
    queued = instance.work(machine)
    assert told(answered(asked)) == [queued.queue_id]
    assert warnings(capsys) == []


def test_a_connection_that_died_while_nobody_waited_is_replaced_without_a_word(
    instance: Instance, engine: Engine, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        [asked] = instance.waits(machine)
        queued = instance.work(machine)
        assert told(answered(asked)) == [queued.queue_id]
        claimed(engine, machine, queued)
        ended(engine)
    assert warnings(capsys) == []


def test_a_connection_that_nobody_has_used_for_long_is_replaced(
    instance: Instance, engine: Engine, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert instance.ask(machine, 1).status == 200
    old = listeners(engine)
    monkeypatch.setattr(listening, "REPLACED_AFTER_SECONDS", 0)
    instance.waits(machine)
    # The server takes a moment to notice that the old one was closed.
    instance.until(lambda: len(listeners(engine)) == 1, [])
    assert listeners(engine) != old


def test_a_connection_that_has_silently_gone_is_noticed_by_a_probe_and_replaced(
    given: Given, machine: Machine, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway forgets the connection and tells nobody."""
    monkeypatch.setattr("shared.one_flight.IDLE_SECONDS", 0)
    monkeypatch.setattr("shared.one_flight.PROBE_SECONDS", 0.2)
    with (
        counting_proxy(database_url) as proxy,
        an_instance(given, database_listen_url=SecretStr(proxy.url)) as instance,
    ):
        assert instance.ask(machine, 1).status == 200
        proxy.forget()
        [asked] = instance.waits(machine)
        assert proxy.connections == 2
        queued = instance.work(machine)
        assert told(answered(asked)) == [queued.queue_id]


def test_a_database_that_cannot_be_listened_to_costs_the_wake_up_and_not_the_answer(
    given: Given, machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = SecretStr("postgresql://u:p@127.0.0.1:1/d")
    with an_instance(given, database_listen_url=nobody) as instance:
        answers = [instance.ask(machine) for _ in range(3)]
        assert [answer.body for answer in answers] == [nothing(1000), nothing(2000), nothing(4000)]
        assert len(warnings(capsys)) == 1, "it is not tried again for every poll"
        monkeypatch.setattr(instance.app.listening, "_not_before", 0)
        assert instance.ask(machine).status == 200
        assert len(warnings(capsys)) == 1, "but later it is"


def test_a_database_that_never_answers_the_listener_is_given_up(
    given: Given, machine: Machine, other: Machine, database_url: str
) -> None:
    with counting_proxy(database_url) as proxy:
        proxy.freeze()
        far = {"database_listen_url": SecretStr(proxy.url), "database_connect_timeout_seconds": 1}
        with an_instance(given, **far) as instance, ThreadPoolExecutor(2) as threads:
            began = monotonic()
            answers = list(threads.map(instance.ask, (machine, other)))
            assert [answer.body for answer in answers] == [nothing(1000)] * 2
            assert monotonic() - began < PATIENCE
            assert proxy.connections == 1, "who came while it was tried shares the outcome"
            proxy.cut()

"""Instances are frozen by their cloud and thawed later; meanwhile their connections died. The first request afterwards is served."""

from __future__ import annotations

import signal
import threading
import time

import httpx
import pytest
from sqlalchemy import Engine

from shared.db import CLAIM, SWEEP, WEBHOOK, sql, transaction
from shared.settings import Settings
from tests.crash.calls import Answer, claiming, claiming_many, over_http, polling
from tests.crash.conftest import Scene, Serve
from tests.crash.history import counts, recovered
from tests.roundtrips import counting_proxy

CUT_ALL = "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"


def cut_all(engine: Engine) -> None:
    """Ends every other connection to this database."""
    with engine.connect() as connection:
        connection.exec_driver_sql(CUT_ALL)


def test_two_instances_whose_idle_connections_died_while_they_were_frozen_serve_their_first_request(
    serve: Serve, scene: Scene
) -> None:
    instances = [serve(), serve()]
    for instance in instances:
        assert instance.ask(polling(scene.laptop)).status == 200
        instance.freeze()
    cut_all(scene.engine)
    queued = scene.work()
    for instance in instances:
        instance.thaw()
    answers = [instance.ask(claiming(scene.laptop, queued.queue_id)).status for instance in instances]
    assert answers == [200, 409]
    recovered(scene.engine, instances[0].ask, scene.laptop, scene.desktop)


@pytest.mark.parametrize("point", ["shared.dispatch_queue:claim before", "shared.dispatch_queue:claim after"])
def test_an_instance_frozen_inside_a_transaction_holds_no_lock_for_ever_and_answers_503_when_it_is_thawed(
    serve: Serve, scene: Scene, point: str
) -> None:
    """The server ends a transaction that has been idle too long; here somebody else ends it, so that the test need not wait for that."""
    instance, queued = serve(point, how=signal.SIGSTOP), scene.work()
    instance.arm()
    answers: list[Answer] = []
    request = threading.Thread(
        target=lambda: answers.append(over_http(instance.url)(claiming(scene.laptop, queued.queue_id)))
    )
    request.start()
    deadline = time.monotonic() + 20
    while not instance.has_struck:
        assert time.monotonic() < deadline, "it never came to the point"
    cut_all(scene.engine)
    other = serve()
    assert other.ask(claiming(scene.laptop, queued.queue_id)).body["attempt"] == 1
    instance.thaw()
    request.join()
    assert answers[0].asks_to_come_again
    assert counts(scene.engine)[:2] == (1, 1)
    recovered(scene.engine, other.ask, scene.laptop, scene.desktop)


def test_every_transaction_of_a_function_is_ended_by_the_server_when_it_idles(
    serve: Serve, scene: Scene
) -> None:
    """What ends the transaction of an instance that is never thawed."""
    for limits in (WEBHOOK, CLAIM, SWEEP):
        with transaction(scene.engine, limits) as tx:
            row = tx.first(sql("select current_setting('idle_in_transaction_session_timeout')"))
        assert row is not None
        assert row[0] in ("5s", "10s")


def test_a_connection_that_silently_went_nowhere_is_noticed_and_the_next_request_is_served(
    serve: Serve, scene: Scene, settings: Settings
) -> None:
    """A gateway forgets the connection and tells nobody: the request in flight is 503 within its patience, the next one is served."""
    with counting_proxy(settings.database_url.get_secret_value()) as proxy:
        instance = serve(settings={"DATABASE_URL": proxy.url})
        assert instance.ask(polling(scene.laptop)).status == 200
        proxy.freeze()
        began = time.monotonic()
        assert instance.ask(claiming_many(scene.laptop, 1)).asks_to_come_again
        assert time.monotonic() - began < 5
        proxy.cut()
        proxy.thaw()
        assert instance.ask(polling(scene.laptop)).status == 200


def test_sixteen_requests_over_http_for_one_row_are_one_200_and_fifteen_409(
    serve: Serve, scene: Scene
) -> None:
    instance, queued = serve(threads=16), scene.work()
    answers: list[Answer] = []
    start = threading.Barrier(16)

    def race() -> None:
        with httpx.Client():
            start.wait()
        answers.append(instance.ask(claiming(scene.laptop, queued.queue_id)))

    racers = [threading.Thread(target=race) for _ in range(16)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(answer.status for answer in answers) == [200] + [409] * 15
    assert [answer.body["attempt"] for answer in answers if answer.status == 200] == [1]
    recovered(scene.engine, instance.ask, scene.laptop, scene.desktop)

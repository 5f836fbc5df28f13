"""The database is away, silent, back again, or was never migrated: every function says so within five seconds and loses nothing."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from pydantic import SecretStr
from sqlalchemy.engine import make_url

from functions.app import App
from infra.admin.migrate import migrate
from infra.local.postgres import LocalPostgres, find_binaries
from shared.db import SCHEMA_REVISION, engine_for
from shared.settings import Settings
from tests.conftest import a_folder_for_postgres
from tests.crash.calls import Answer, Ask, Call, claiming_many, in_process, polling, tick
from tests.crash.conftest import Scene, a_scene
from tests.crash.history import recovered
from tests.databases import Databases


def elsewhere(settings: Settings, port: int) -> Ask:
    """The functions, with their database on another port of this machine."""
    url = make_url(settings.database_url.get_secret_value()).set(host="127.0.0.1", port=port)
    moved = settings.model_copy(update={"database_url": SecretStr(url.render_as_string(hide_password=False))})
    return in_process(App(moved, engine_for(moved)))


def each_function(scene: Scene) -> list[Call]:
    return [scene.delivery(), polling(scene.laptop), claiming_many(scene.laptop, 1), tick()]


def test_a_database_that_refuses_connections_is_503_and_when_to_come_again(
    scene: Scene, settings: Settings
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    down = elsewhere(settings, port)
    for call in each_function(scene):
        answer = down(call)
        assert answer.asks_to_come_again
        assert answer.body["error"]["code"] == "service_unavailable"


def test_a_database_that_accepts_and_never_answers_is_given_up_within_five_seconds(
    scene: Scene, settings: Settings
) -> None:
    """Five seconds is what Linear waits and what users are promised; it is a limit of ours, not a measurement."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        down = elsewhere(settings, silent.getsockname()[1])
        answers: list[tuple[float, Answer]] = []

        def send(call: Call) -> None:
            began = time.monotonic()
            answer = down(call)
            answers.append((time.monotonic() - began, answer))

        threads = [threading.Thread(target=send, args=(call,)) for call in each_function(scene)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer.asks_to_come_again for _, answer in answers] == [True] * 4
    assert max(took for took, _ in answers) < 5


def test_the_functions_go_on_when_the_database_is_back_without_being_restarted(settings: Settings) -> None:
    with a_folder_for_postgres() as folder:
        data, binaries = folder / "postgres", find_binaries(os.environ)
        with LocalPostgres(data, binaries=binaries) as server:
            url = server.create_database("dispatch")
            migrate(url, tls="off")
            own = settings.model_copy(update={"database_url": SecretStr(url)})
            engine = engine_for(own)
            scene, ask = a_scene(engine, own), in_process(App(own, engine))
        call = scene.delivery()
        assert ask(call).asks_to_come_again
        with LocalPostgres(data, binaries=binaries, port=make_url(url).port):
            assert ask(call).body["outcome"] == "started"
            recovered(engine, ask, scene.laptop, scene.desktop)
            engine.dispose()


def test_a_database_that_was_never_migrated_is_503_and_names_the_migration_that_is_missing(
    postgres: Databases, settings: Settings, scene: Scene
) -> None:
    with postgres.fresh() as url:
        own = settings.model_copy(update={"database_url": SecretStr(url)})
        engine = engine_for(own)
        outdated = in_process(App(own, engine))
        for call in each_function(scene):
            answer = outdated(call)
            assert answer.asks_to_come_again
            assert SCHEMA_REVISION in answer.body["error"]["message"]
            assert "infra.admin migrate" in answer.body["error"]["message"]
        engine.dispose()


@pytest.mark.parametrize("signal", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_statement_that_is_cancelled_from_outside_is_503(
    scene: Scene, settings: Settings, signal: str
) -> None:
    """It waits for the lock that this test holds, so that there is something to cancel."""
    one = settings.model_copy(update={"database_pool_size": 1})
    engine, others = engine_for(one), engine_for(settings)
    ask, queued = in_process(App(one, engine)), scene.work()
    with scene.engine.connect() as holder:
        holder.exec_driver_sql(f"select from orchestrators where id = '{scene.laptop.id}' for update")
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(ask(claiming_many(scene.laptop, 1))))
        thread.start()
        with others.connect() as other:
            waiting = "select pid from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            deadline = time.monotonic() + 10
            while not (pids := other.exec_driver_sql(waiting).scalars().all()):
                other.rollback()
                assert time.monotonic() < deadline
            other.exec_driver_sql(f"select {signal}({pids[0]})")
            other.commit()
        thread.join()
    assert answers[0].asks_to_come_again
    assert ask(claiming_many(scene.laptop, 1)).body["claims"][0]["message"]["queueId"] == str(queued.queue_id)
    engine.dispose()
    others.dispose()

"""The connection is cut at every single statement: each time all of the request is committed or nothing, and its repetition ends right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, event

from functions.app import App
from shared.db import engine_for
from shared.settings import Settings
from tests.crash.calls import Call, claiming, claiming_many, completing, in_process, releasing, tick
from tests.crash.conftest import Scene, a_scene
from tests.crash.history import counts, recovered, time_passes
from tests.databases import Databases
from tests.given import claimed, history_of


class Guillotine:
    """Terminates the backend of the n-th statement, before the server sees it or after it has run it."""

    def __init__(self, engine: Engine, others: Engine) -> None:
        self._others, self._left, self._after = others, 0, False
        self.statements = 0
        event.listen(engine, "before_cursor_execute", self._before)
        event.listen(engine, "after_cursor_execute", self._done)

    @contextmanager
    def at(self, number: int, *, after: bool) -> Iterator[None]:
        """Cuts once, at this statement of the block."""
        self._left, self._after = number, after
        yield
        self._left = 0

    def _before(self, connection: Any, *_: Any) -> None:
        self.statements += 1
        self._left -= 1
        if self._left == 0 and not self._after:
            self._cut(connection)

    def _done(self, connection: Any, *_: Any) -> None:
        if self._left == 0 and self._after:
            self._after = False
            self._cut(connection)

    def _cut(self, connection: Any) -> None:
        pid = int.from_bytes(connection.connection.driver_connection._backend_key_data[:4])
        with self._others.connect() as other:
            other.exec_driver_sql(f"select pg_terminate_backend({pid}, 5000)")


@dataclass(frozen=True)
class Act:
    """What leads up to a request, and the sessions, rows and deliveries once it has been answered."""

    prepare: Callable[[Scene], Call]
    leaves: tuple[int, int, int]


def _one_waits(scene: Scene) -> Call:
    return claiming(scene.laptop, scene.work().queue_id)


def _two_wait(scene: Scene) -> Call:
    scene.work(), scene.work()
    return claiming_many(scene.laptop, 2)


def _nearly_done(scene: Scene) -> Call:
    queued = scene.work()
    return completing(scene.laptop, queued.session_id, claimed(scene.engine, scene.laptop, queued).attempts)


def _failing(scene: Scene) -> Call:
    queued = scene.work()
    return releasing(scene.laptop, queued.queue_id, claimed(scene.engine, scene.laptop, queued).attempts)


def _abandoned(scene: Scene) -> Call:
    claimed(scene.engine, scene.laptop, scene.work())
    time_passes(scene.engine)
    return tick()


ACTS = {
    "webhook": Act(Scene.delivery, (1, 1, 1)),
    "claim": Act(_one_waits, (1, 1, 0)),
    "claim several": Act(_two_wait, (2, 2, 0)),
    "complete": Act(_nearly_done, (1, 0, 0)),
    "release": Act(_failing, (1, 1, 0)),
    "sweep": Act(_abandoned, (1, 1, 0)),
}


@pytest.mark.parametrize("after", [False, True], ids=["before it ran", "after it ran"])
@pytest.mark.parametrize("name", ACTS)
def test_a_connection_cut_at_any_statement_is_503_and_the_same_request_then_does_it_all_once(
    name: str, after: bool, postgres: Databases, migrated: str, settings: Settings
) -> None:
    act, number, cut = ACTS[name], 1, True
    while cut:
        with postgres.fresh(migrated) as url:
            own = settings.model_copy(update={"database_url": SecretStr(url)})
            engine, others = engine_for(own), engine_for(own)
            scene, ask = a_scene(others, own), in_process(App(own, engine))
            call = act.prepare(scene)
            before = counts(others)
            guillotine = Guillotine(engine, others)
            with guillotine.at(number, after=after):
                answer = ask(call)
            cut = guillotine.statements >= number
            if cut:
                assert answer.asks_to_come_again, (number, answer)
                # A tick is several transactions: those before the cut are committed, and are not done again.
                assert name == "sweep" or counts(others) == before
                answer = ask(call)
            assert answer.status == 200, (number, answer)
            assert counts(others) == act.leaves
            recovered(others, ask, scene.laptop, scene.desktop)
            engine.dispose()
            others.dispose()
        number += 1
    assert number > 3, "it never came to a cut"


@contextmanager
def commit_cut(engine: Engine, others: Engine) -> Iterator[None]:
    """Cuts once, just before COMMIT is sent."""
    guillotine, left = Guillotine(engine, others), [True]

    def cut(connection: Any) -> None:
        if left.pop() if left else False:
            guillotine._cut(connection)

    event.listen(engine, "commit", cut)
    yield


@pytest.mark.parametrize("name", ACTS)
def test_a_connection_cut_at_the_commit_is_503_and_nothing_is_half_done(
    name: str, engine: Engine, settings: Settings
) -> None:
    others = engine_for(settings)
    scene, ask = a_scene(others, settings), in_process(App(settings, engine))
    call = ACTS[name].prepare(scene)
    before = counts(others)
    with commit_cut(engine, others):
        answer = ask(call)
    assert answer.asks_to_come_again
    assert counts(others) == before
    assert ask(call).status == 200
    assert counts(others) == ACTS[name].leaves
    recovered(others, ask, scene.laptop, scene.desktop)
    others.dispose()


def test_a_release_that_was_cut_after_its_commit_is_harmless_when_it_is_sent_again(
    scene: Scene, ask: Callable[[Call], Any]
) -> None:
    queued = scene.work()
    call = releasing(scene.laptop, queued.queue_id, claimed(scene.engine, scene.laptop, queued).attempts)
    assert ask(call).status == 200
    assert ask(call).status == 409
    assert history_of(scene.engine, queued).count("released") == 1

"""The process is killed (SIGKILL) at the worst places; what recovers it is what recovers it in production: the sender's retry, the
client's retry, the next tick."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from sqlalchemy import Engine

from tests.crash.calls import Call, claiming, claiming_many, completing, polling, releasing, tick
from tests.crash.conftest import Scene, Serve
from tests.crash.history import attempts_of, check, counts, recovered, time_passes
from tests.crash.serving import Functions
from tests.given import Queued, claimed, history_of, row_of, session_of, the_claim_is_older_by, violations

BEFORE_COMMIT = "shared.one_flight:Connection.commit before"
AFTER_COMMIT = "shared.one_flight:Connection.commit after"


def killed_by(functions: Functions, call: Call) -> None:
    """Sends the call, and the instance dies over it without an answer."""
    functions.arm()
    with pytest.raises(httpx.TransportError):
        functions.ask(call)
    assert functions.has_struck


# -- the webhook: between its two writes, and on both sides of the COMMIT -----------------------------------------------


@pytest.mark.parametrize(
    "point",
    ["shared.intake:enqueue_dispatch before", "shared.intake:enqueue_dispatch after", BEFORE_COMMIT],
)
def test_a_webhook_killed_before_its_commit_leaves_nothing_and_the_senders_retry_starts_the_work(
    serve: Serve, scene: Scene, engine: Engine, point: str
) -> None:
    functions, delivery = serve(point), scene.delivery()
    killed_by(functions, delivery)
    assert counts(engine) == (0, 0, 0)
    retried = functions.ask(delivery)
    assert (retried.status, retried.body["outcome"]) == (200, "started")
    assert counts(engine) == (1, 1, 1)
    recovered(engine, functions.ask, *scene.machines)
    assert attempts_of(engine) == [1]


def test_a_webhook_killed_between_its_commit_and_its_answer_has_started_the_work_and_the_retry_starts_nothing(
    serve: Serve, scene: Scene, engine: Engine
) -> None:
    functions, delivery = serve(AFTER_COMMIT), scene.delivery()
    killed_by(functions, delivery)
    assert counts(engine) == (1, 1, 1)
    assert violations(engine) == []
    retried = functions.ask(delivery)
    assert (retried.status, retried.body["outcome"]) == (200, "heard_before")
    assert counts(engine) == (1, 1, 1)
    recovered(engine, functions.ask, *scene.machines)
    assert attempts_of(engine) == [1]


# -- the claim ----------------------------------------------------------------------------------------------------------


def test_a_claim_killed_before_its_commit_is_none_and_the_retry_is_attempt_1(
    serve: Serve, scene: Scene, engine: Engine
) -> None:
    functions, queued = serve(BEFORE_COMMIT), scene.work()
    killed_by(functions, claiming(scene.laptop, queued.queue_id))
    assert history_of(engine, queued) == ["created"]
    assert functions.ask(claiming(scene.laptop, queued.queue_id)).body["attempt"] == 1
    assert functions.ask(completing(scene.laptop, queued.session_id, 1)).status == 200
    check(engine)


def one(scene: Scene, queued: Queued) -> Call:
    return claiming(scene.laptop, queued.queue_id)


def several(scene: Scene, queued: Queued) -> Call:
    return claiming_many(scene.laptop, 4)


@pytest.mark.parametrize("how", [one, several])
def test_a_claim_whose_answer_is_lost_is_swept_and_delivered_again_as_attempt_2(
    serve: Serve, scene: Scene, engine: Engine, how: Callable[[Scene, Queued], Call]
) -> None:
    """The machine does not know that it holds the claim: it is not told by trying again, and works on nothing."""
    functions, queued = serve(AFTER_COMMIT), scene.work()
    killed_by(functions, how(scene, queued))
    assert row_of(engine, queued).attempts == 1
    assert functions.ask(claiming(scene.laptop, queued.queue_id)).status == 409
    assert functions.ask(claiming_many(scene.laptop, 4)).body == {"claims": []}
    assert functions.ask(tick()).body["released"] == 0, "the claim is not old enough to be given up"
    the_claim_is_older_by(engine, queued, 1801)
    assert functions.ask(tick()).body["released"] == 1
    recovered(engine, functions.ask, *scene.machines)
    assert attempts_of(engine) == [1, 2]


# -- the end of the work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["shared.sessions:close_session before", BEFORE_COMMIT, AFTER_COMMIT])
def test_a_completion_killed_anywhere_is_whole_or_not_there_and_the_clients_retry_ends_the_session(
    serve: Serve, scene: Scene, engine: Engine, point: str
) -> None:
    """The first point lies between the settled row and the closed session."""
    functions, queued = serve(point), scene.work()
    claimed(engine, scene.laptop, queued)
    killed_by(functions, completing(scene.laptop, queued.session_id, 1))
    is_whole = point == AFTER_COMMIT
    assert (row_of(engine, queued) is None) == is_whole
    assert session_of(engine, queued).status == ("complete" if is_whole else "dispatched")
    assert violations(engine) == []
    retried = functions.ask(completing(scene.laptop, queued.session_id, 1))
    assert (retried.status, retried.body["status"]) == (200, "completed")
    check(engine)
    assert history_of(engine, queued) == ["created", "claimed", "complete"]


def test_a_completion_that_died_with_its_machine_is_done_again_by_another(
    serve: Serve, scene: Scene, engine: Engine
) -> None:
    """Settled but not closed, and nobody retries: the sweep finds the claim as it was."""
    functions, queued = serve("shared.sessions:close_session before"), scene.work()
    claimed(engine, scene.laptop, queued)
    killed_by(functions, completing(scene.laptop, queued.session_id, 1))
    the_claim_is_older_by(engine, queued, 1801)
    swept = functions.ask(tick()).body
    assert (swept["released"], swept["rerouted"]) == (1, 1)
    recovered(engine, functions.ask, scene.desktop)
    assert attempts_of(engine) == [1, 2]


@pytest.mark.parametrize("point", ["shared.dispatch_queue:reroute before", BEFORE_COMMIT, AFTER_COMMIT])
def test_a_release_killed_anywhere_is_whole_or_not_there(
    serve: Serve, scene: Scene, engine: Engine, point: str
) -> None:
    functions, queued = serve(point), scene.work()
    claimed(engine, scene.laptop, queued)
    killed_by(functions, releasing(scene.laptop, queued.queue_id, 1))
    released_and_rerouted = ["created", "claimed", "released", "rerouted"]
    is_whole = point == AFTER_COMMIT
    assert history_of(engine, queued) == (released_and_rerouted if is_whole else ["created", "claimed"])
    assert violations(engine) == []
    assert functions.ask(releasing(scene.laptop, queued.queue_id, 1)).status == (409 if is_whole else 200)
    assert history_of(engine, queued) == released_and_rerouted
    recovered(engine, functions.ask, *scene.machines)
    assert attempts_of(engine) == [1, 2]


# -- the sweep ----------------------------------------------------------------------------------------------------------


def two_expired_claims_each(scene: Scene) -> list[list[Queued]]:
    batches = [[scene.work(machine) for _ in range(2)] for machine in scene.machines]
    for machine, batch in zip(scene.machines, batches, strict=True):
        for queued in batch:
            claimed(scene.engine, machine, queued)
    time_passes(scene.engine)
    return batches


@pytest.mark.parametrize(
    ("point", "done"),
    [
        ("shared.sweep:_sweep_machine after", 1),
        ("shared.dispatch_queue:sweep after", 0),
        ("shared.dispatch_queue:reroute before", 0),
        ("shared.dispatch_queue:reroute after", 0),
    ],
)
def test_a_tick_killed_in_the_middle_has_done_whole_batches_and_the_next_tick_does_the_rest(
    serve: Serve, scene: Scene, engine: Engine, point: str, done: int
) -> None:
    """The first point lies between two machines' batches, the others in the transaction of the first one."""
    functions, batches = serve(point), two_expired_claims_each(scene)
    killed_by(functions, tick())
    released = [
        sum(history_of(engine, queued).count("released") for queued in batch) == 2 for batch in batches
    ]
    assert sorted(released) == [False] * (2 - done) + [True] * done
    assert violations(engine) == []
    assert functions.ask(tick()).body["released"] == 4 - 2 * done
    for queued in (queued for batch in batches for queued in batch):
        assert history_of(engine, queued).count("released") == 1
    recovered(engine, functions.ask, *scene.machines)
    assert sorted(attempts_of(engine)) == [1] * 4 + [2] * 4


def test_polling_after_a_killed_instance_shows_what_was_there(serve: Serve, scene: Scene) -> None:
    functions, queued = serve(BEFORE_COMMIT), scene.work()
    killed_by(functions, polling(scene.laptop))
    assert [message["queueId"] for message in functions.ask(polling(scene.laptop)).body["messages"]] == [
        str(queued.queue_id)
    ]

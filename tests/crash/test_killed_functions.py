"""A function's process is killed between two statements. Whatever it was doing is done wholly or not at all, and somebody goes on."""

from __future__ import annotations

import pytest

from infra.local import linear
from tests.crash.world import World


def test_killed_between_the_session_and_its_row_neither_exists_and_linears_retry_makes_both(
    world: World,
) -> None:
    event = linear.delegated("killed in between", 1)
    with world.serving("shared.intake:enqueue_dispatch:before") as functions:
        functions.register("laptop")
        assert functions.dies_during(lambda: functions.deliver(event))
    assert world.sessions_and_rows() == (0, 0)
    with world.serving() as functions:
        assert functions.deliver(event).json()["outcome"] == "started"
        assert functions.work_off("laptop") == [1]
    assert world.statuses() == {"complete": 1}
    assert world.nothing_contradicts_the_guarantee()


def test_killed_after_the_row_but_before_commit_neither_exists(world: World) -> None:
    event = linear.delegated("killed before commit", 1)
    with world.serving("shared.intake:enqueue_dispatch:after") as functions:
        functions.register("laptop")
        assert functions.dies_during(lambda: functions.deliver(event))
    assert world.sessions_and_rows() == (0, 0)


def test_killed_after_commit_before_the_answer_the_retry_is_recognised_and_the_work_exists_once(
    world: World,
) -> None:
    event = linear.delegated("killed after commit", 1)
    with world.serving("functions.webhook:_answer:before") as functions:
        functions.register("laptop")
        assert functions.dies_during(lambda: functions.deliver(event))
    assert world.sessions_and_rows() == (1, 1)
    with world.serving() as functions:
        retried = functions.deliver(event)
        assert (retried.status_code, retried.json()["outcome"]) == (200, "heard_before")
        assert world.sessions_and_rows() == (1, 1)
        assert functions.work_off("laptop") == [1]
    assert world.nothing_contradicts_the_guarantee()


def test_killed_after_a_claim_the_row_stays_claimed_until_the_sweep_hands_it_to_another_machine(
    world: World,
) -> None:
    """The machine never heard of its claim, or died with it: both look the same, and end the same."""
    with world.serving("functions.claim:_claim_answer:before") as functions:
        functions.register("laptop")
        functions.deliver(linear.delegated("claimed, not heard", 1))
        [message] = functions.messages("laptop")
        claim = f"/api/dispatch/{message['queueId']}/claim"
        assert functions.dies_during(lambda: functions.call("laptop", "POST", claim))
    with world.serving() as functions:
        functions.register("desktop")
        assert functions.call("laptop", "POST", claim).status_code == 409
        world.age_everything()
        assert functions.tick().json()["released"] == 1
        world.age_everything()
        assert functions.work_off("laptop", "desktop") == [2]
    assert [(attempt, times) for _, attempt, times in world.claims()] == [(1, 1), (2, 1)]
    assert world.nothing_contradicts_the_guarantee()


def test_killed_between_settle_and_close_the_claim_stands_and_the_retried_completion_ends_it_once(
    world: World,
) -> None:
    with world.serving("shared.sessions:close_session:before") as functions:
        functions.register("laptop")
        functions.deliver(linear.delegated("half settled", 1))
        [message] = functions.messages("laptop")
        functions.call("laptop", "POST", f"/api/dispatch/{message['queueId']}/claim").raise_for_status()
        complete = f"/api/sessions/{message['sessionId']}/complete"
        done = {"success": True, "attempt": 1}
        assert functions.dies_during(lambda: functions.call("laptop", "POST", complete, done))
    assert world.sessions_and_rows() == (1, 1)
    assert world.nothing_contradicts_the_guarantee()
    with world.serving() as functions:
        first = functions.call("laptop", "POST", complete, done)
        again = functions.call("laptop", "POST", complete, done)
    assert (first.status_code, first.json()) == (again.status_code, again.json()) == (200, first.json())
    assert world.statuses() == {"complete": 1}
    assert world.sessions_and_rows() == (1, 0)


@pytest.mark.parametrize(
    ("place", "released_before"),
    [
        ("shared.sweep:_sweep_machine:before:2", 1),
        ("shared.dispatch_queue:reroute:before", 0),
        ("shared.deliveries:purge:before", 2),
    ],
    ids=["between two machines", "inside a batch", "before the purge"],
)
def test_killed_in_the_middle_of_a_sweep_some_batches_are_done_and_the_next_tick_does_the_rest(
    world: World, place: str, released_before: int
) -> None:
    with world.serving(place) as functions:
        functions.register("laptop", "desktop")
        for number in range(2):
            functions.deliver(linear.delegated("swept", number))
        for machine in ("laptop", "desktop"):
            claimed = functions.call(machine, "POST", "/api/dispatch/claim", {"limit": 1}).json()["claims"]
            assert len(claimed) == 1
        world.age_everything()
        assert functions.dies_during(functions.tick)
    with world.serving() as functions:
        assert functions.tick().json()["released"] == 2 - released_before
        assert functions.tick().json()["released"] == 0
        world.age_everything()
        assert functions.work_off("laptop", "desktop") == [2, 2]
    assert all(times == 1 for _, _, times in world.claims())
    assert world.statuses() == {"complete": 2}
    assert world.nothing_contradicts_the_guarantee()

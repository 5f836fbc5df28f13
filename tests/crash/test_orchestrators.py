"""Orchestrators that are killed, and networks that fail: no work is lost, and each attempt has at most one run."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine

from shared import dispatch_queue
from shared.db import OPERATOR, sql, transaction
from tests.contract.programs import Program, runs, until
from tests.crash.calls import over_http, tick
from tests.crash.conftest import Scene, Serve
from tests.crash.history import check
from tests.crash.serving import Functions
from tests.given import REPO as SERVED
from tests.given import Machine, Queued, a_machine, a_message, a_session, row_of, session_of, violations
from tests.roundtrips import Proxy, counting_proxy

IMPATIENT = {
    "DISPATCH_CLAIM_TIMEOUT_SECONDS": "3",
    "DISPATCH_BACKOFF_BASE_SECONDS": "1",
    "DISPATCH_BACKOFF_CAP_SECONDS": "2",
    "DISPATCH_MAX_ATTEMPTS": "100",
}


def program(
    functions: Functions | Proxy, machine: Machine, folder: Path, *options: str, **more: str
) -> Program:
    return Program(
        folder, functions.url, machine.token, "--transport", "poll", "--name", folder.name, *options, **more
    )


def named(scene: Scene, name: str) -> Machine:
    """A machine that is registered under the name that its program will say."""
    return a_machine(scene.engine, scene.tenant, repos=[SERVED], name=name)


def titled(scene: Scene, machine: Machine, title: str) -> Queued:
    with transaction(scene.engine, OPERATOR) as tx:
        session_id = a_session(tx, scene.tenant, machine)
        queue_id = dispatch_queue.enqueue_dispatch(
            tx,
            org_id=machine.org_id,
            orchestrator_id=machine.id,
            session_id=session_id,
            message=a_message(title),
        )
    return Queued(machine.org_id, session_id, queue_id)


def is_now(scene: Scene, queued: Queued, status: str) -> Callable[[], bool]:
    return lambda: session_of(scene.engine, queued).status == status


# -- killed at a point --------------------------------------------------------------------------------------------------


@contextmanager
def killed_at(
    point: str, functions: Functions, machine: Machine, folder: Path, fuse: Path
) -> Iterator[Program]:
    """The program, which has died at that point with its first work."""
    dying = program(functions, machine, folder)
    fuse.touch()
    dying.starts_as("-m", "tests.crash.orchestrator_victim", *point.split(), str(fuse))
    with dying:
        assert dying.ends() == -signal.SIGKILL
        yield dying


@pytest.mark.parametrize(
    "point", ["orchestrator.runner:Run.start before", "orchestrator.journal:Journal.started before"]
)
def test_work_that_was_claimed_but_not_begun_is_begun_by_the_next_start_as_the_same_attempt(
    serve: Serve, scene: Scene, tmp_path: Path, point: str
) -> None:
    functions, machine = serve(settings=IMPATIENT), named(scene, "laptop-1")
    queued, folder = titled(scene, machine, "done"), tmp_path / "laptop-1"
    with (
        killed_at(point, functions, machine, folder, tmp_path / "fuse"),
        program(functions, machine, folder) as again,
    ):
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in again.noted("began")] == [1]


def test_an_agent_at_the_gate_ends_without_a_run_when_the_orchestrator_dies(
    serve: Serve, scene: Scene, tmp_path: Path
) -> None:
    functions, machine = serve(settings=IMPATIENT), named(scene, "laptop-1")
    queued, folder = titled(scene, machine, "done"), tmp_path / "laptop-1"
    point = "orchestrator.runner:Run.let_go before"
    with (
        killed_at(point, functions, machine, folder, tmp_path / "fuse"),
        program(functions, machine, folder) as again,
    ):
        again.said("released")
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in again.noted("started")] == [2]


def test_an_end_that_was_not_reported_is_reported_by_the_next_start(
    serve: Serve, scene: Scene, tmp_path: Path
) -> None:
    functions, machine = serve(settings=IMPATIENT), named(scene, "laptop-1")
    queued, folder = titled(scene, machine, "done"), tmp_path / "laptop-1"
    point = "orchestrator.journal:Journal.ended after"
    with (
        killed_at(point, functions, machine, folder, tmp_path / "fuse"),
        program(functions, machine, folder) as again,
    ):
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in again.noted("began")] == [1]
    assert session_of(scene.engine, queued).pr_url == "https://github.com/acme/api/pull/7"


def test_a_claim_whose_answer_never_came_is_given_back_at_once(
    serve: Serve, scene: Scene, tmp_path: Path
) -> None:
    functions = serve("functions.claim:_claim_answer before", settings=IMPATIENT)
    machine = named(scene, "laptop-1")
    queued = titled(scene, machine, "done")
    functions.arm()
    with program(functions, machine, tmp_path / "laptop-1") as alive:
        alive.said("unheard")
        alive.said("released")
        assert row_of(scene.engine, queued).last_error == "the answer to the claim never arrived"
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in alive.noted("began")] == [2]


# -- a network that fails -----------------------------------------------------------------------------------------------


def test_an_end_waits_for_the_network_and_a_crash_meanwhile_loses_nothing(
    serve: Serve, scene: Scene, tmp_path: Path
) -> None:
    functions, machine = serve(), named(scene, "laptop-1")
    queued, folder = titled(scene, machine, "progress 1"), tmp_path / "laptop-1"
    with counting_proxy(functions.url) as network, program(network, machine, folder) as alive:
        alive.until_noted("began")
        network.down()
        alive.until_noted("ended")
        alive.said("waiting issue")
        alive.kill()
        network.up()
        with program(network, machine, folder) as again:
            until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in again.noted("began")] == [1]


def test_work_goes_on_while_the_network_is_away_and_its_end_arrives_when_it_is_back(
    serve: Serve, scene: Scene, tmp_path: Path
) -> None:
    functions, machine = serve(), named(scene, "laptop-1")
    queued = titled(scene, machine, "progress 1")
    with counting_proxy(functions.url) as network, program(network, machine, tmp_path / "laptop-1") as alive:
        alive.until_noted("began")
        network.down()
        alive.said("waiting issue")
        network.up()
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in alive.noted("began")] == [1]


def test_a_server_that_hangs_is_waited_out(serve: Serve, scene: Scene, tmp_path: Path) -> None:
    """Nothing passes and nobody is told: what was asked stays unanswered until the network is back."""
    functions, machine = serve(), named(scene, "laptop-1")
    queued = titled(scene, machine, "progress 1")
    with counting_proxy(functions.url) as network, program(network, machine, tmp_path / "laptop-1") as alive:
        alive.until_noted("began")
        network.freeze()
        alive.until_noted("ended")
        network.thaw()
        until(is_now(scene, queued, "complete"), "the work to be complete")
    assert [noted.attempt for noted in alive.noted("began")] == [1]


def test_functions_that_die_and_come_back_are_asked_again(serve: Serve, scene: Scene, tmp_path: Path) -> None:
    functions, machine = serve(settings=IMPATIENT), named(scene, "laptop-1")
    with program(functions, machine, tmp_path / "laptop-1") as alive:
        alive.said("registered")
        functions.kill()
        functions.start()
        queued = titled(scene, machine, "done")
        until(is_now(scene, queued, "complete"), "the work to be complete")


# -- everything at once -------------------------------------------------------------------------------------------------

MACHINES, JOBS, KILLS = 5, 100, 15
OVER = sql("select count(*) from dispatch_sessions where ended_at is null")


def test_a_hundred_jobs_on_five_machines_that_are_killed_at_random_run_once_per_attempt_and_all_complete(
    serve: Serve, scene: Scene, tmp_path: Path, engine: Engine
) -> None:
    chance = random.Random(7)  # noqa: S311 - who is killed next; when, the machine's load decides
    functions = serve(settings=IMPATIENT, threads=16)
    machines = [named(scene, f"machine-{number}") for number in range(MACHINES)]
    rows = [titled(scene, machines[number % MACHINES], "done") for number in range(JOBS)]
    with ExitStack() as stack:
        stack.enter_context(ticking(functions))
        alive = [
            stack.enter_context(program(functions, machine, tmp_path / f"machine-{number}"))
            for number, machine in enumerate(machines)
        ]
        for _ in range(KILLS):
            number = chance.randrange(MACHINES)
            done = len(alive[number].noted("ended"))
            until(lambda: len(alive[number].noted("ended")) > done or is_over(engine), "some work to be done")  # noqa: B023 - called at once
            alive[number].kill()
            alive[number] = stack.enter_context(
                program(functions, machines[number], tmp_path / f"machine-{number}")
            )
        until(lambda: is_over(engine), "all work to be over")
        runs_of = Counter(
            (noted.dispatch_id, noted.attempt) for each in alive for noted in each.noted("began")
        )
        finished = {noted.dispatch_id for each in alive for noted in each.noted("ended")}
        agents = [noted.process for each in alive for noted in each.noted("began")]
    assert set(runs_of.values()) == {1}
    assert finished == {str(queued.queue_id) for queued in rows}
    assert not [process for process in agents if runs(process)]
    assert {session_of(engine, queued).status for queued in rows} == {"complete"}
    check(engine)


def is_over(engine: Engine) -> bool:
    with transaction(engine) as tx:
        row = tx.first(OVER)
    assert row is not None
    return bool(row[0] == 0)


@contextmanager
def ticking(functions: Functions) -> Iterator[None]:
    """The cron, every half second."""
    over = threading.Event()

    def ticks() -> None:
        while not over.wait(0.5):
            over_http(functions.url)(tick())

    cron = threading.Thread(target=ticks)
    cron.start()
    try:
        yield
    finally:
        over.set()
        cron.join()


@pytest.fixture(autouse=True)
def nothing_contradicts_the_guarantee(engine: Engine) -> Iterator[None]:
    yield
    assert violations(engine) == []

"""Our orchestrator, as a process of its own, at a server that has never heard of what we have added to the protocol."""

from __future__ import annotations

import json
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.original_server import Answer, OriginalServer
from tests.contract.programs import Program, runs, until

RESULT = {
    "prUrl": "https://github.com/acme/api/pull/7",
    "summary": "Split the refunds.",
    "tokensUsed": 1200,
    "costUsd": 0.25,
}
HANGS = "echo $$ > process.new; mv process.new process; exec /bin/sleep 1000"


class Machine:
    """An owner's machine: what it is asked to do is a script of a few lines."""

    def __init__(self, server: OriginalServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.script = folder / "agent.sh"

    def agent(self, *lines: str) -> None:
        self.script.write_text("\n".join([f"cd {self.folder}", "echo ran >> runs", *lines]) + "\n")

    def says(self, said: dict[str, Any]) -> None:
        self.agent(f"cat <<'END'\n{json.dumps(said, ensure_ascii=False)}\nEND")

    def program(self, command: str, *options: str, **more: str) -> Program:
        words = ("--name", "the laptop", "--exec", f"/bin/sh {self.script}", *options)
        return Program(self.folder, self.server.url, self.server.token, *words, command=command, **more)

    def once(self, *options: str) -> int:
        with self.program("once", "--transport", "poll", *options) as program:
            return program.ends()

    @property
    def runs(self) -> int:
        """How many times the agent was let go."""
        found = self.folder / "runs"
        return len(found.read_text().splitlines()) if found.exists() else 0

    def process(self) -> int:
        """Of the agent that hangs, once it does."""
        path = self.folder / "process"
        until(path.exists, "an agent that hangs")
        return int(path.read_text())


@pytest.fixture
def server() -> Iterator[OriginalServer]:
    with OriginalServer() as made:
        yield made
        assert made.violations == []


@pytest.fixture
def machine(server: OriginalServer, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(server, tmp_path)
    made.says(RESULT)
    yield made
    hanging = tmp_path / "process"
    if hanging.exists() and _sleeps(process := int(hanging.read_text())):
        os.kill(process, signal.SIGKILL)


def _sleeps(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() == b"/bin/sleep\x001000\x00"
    except OSError:
        return False


# -- the double itself: what it does not refuse, it does not prove ---------------------------------------------------------

GOOD = {"Content-Type": "application/json"}
REGISTER = "/api/orchestrators/register"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/dispatch/poll?waitSeconds=25", None),
        ("GET", "/api/dispatch/poll?limit=1", None),
        ("POST", "/api/dispatch/claim", {"limit": 1}),
        ("POST", "/api/dispatch/Queue-1/renew", {}),
        ("POST", "/api/dispatch/Queue-1/claim", {"attempt": 1}),
        ("POST", "/api/dispatch/Queue-1/release", {"error": "x", "attempt": 1}),
        ("POST", "/api/dispatch/Queue-1/release", {}),
        ("POST", "/api/dispatch/Queue-2/release", {"error": "of another"}),
        ("POST", "/api/orchestrators/another/heartbeat", {}),
        ("POST", "/api/orchestrators/machine/heartbeat", {"activeJobs": -1}),
        ("POST", "/api/sessions/session_1/status", {"status": "running"}),
        ("POST", "/api/sessions/session_1/status", {"status": "running", "progressPercent": 101}),
        ("POST", "/api/sessions/session_1/status", {"status": "running", "progressPercent": True}),
        ("POST", "/api/sessions/session_1/status", {"status": "busy", "progressPercent": 1}),
        (
            "POST",
            "/api/sessions/session_1/status",
            {"status": "error", "progressPercent": 1, "message": None},
        ),
        (
            "POST",
            "/api/sessions/session_1/status",
            {"status": "running", "progressPercent": 1, "message": "💸" * 1001},
        ),
        (
            "POST",
            "/api/sessions/session_1/status",
            {"status": "running", "progressPercent": 1, "promptsSeen": 0},
        ),
        ("POST", "/api/sessions/session_1/complete", {}),
        ("POST", "/api/sessions/session_1/complete", {"success": 1}),
        ("POST", "/api/sessions/session_1/complete", {"success": True, "prUrl": "ftp://acme/1"}),
        ("POST", "/api/sessions/session_1/complete", {"success": True, "prUrl": None}),
        ("POST", "/api/sessions/session_1/complete", {"success": True, "summary": "x" * 10_001}),
        ("POST", "/api/sessions/session_1/complete", {"success": True, "tokensUsed": -1}),
        ("POST", "/api/sessions/session_1/complete", {"success": True, "queueId": "Queue-1"}),
        ("POST", REGISTER, {"repos": []}),
        ("POST", REGISTER, {"name": "", "repos": []}),
        ("POST", REGISTER, {"name": "laptop", "repos": "acme/api"}),
        ("POST", REGISTER, {"name": "laptop", "repos": [], "maxConcurrentJobs": 65}),
        ("PUT", REGISTER, {"name": "laptop", "repos": []}),
    ],
)
def test_the_double_refuses_what_is_not_in_the_protocol(method: str, path: str, body: Any) -> None:
    with OriginalServer() as server, _client(server) as client:
        server.work()
        client.post(REGISTER, json={"name": "laptop", "repos": []})
        assert client.request(method, path, json=body).status_code == 400
        assert len(server.violations) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Authorization": "dp_orch_" + "x" * 43, **GOOD},
        {"Authorization": "Bearer x", **GOOD},
    ],
)
def test_the_double_refuses_a_request_without_its_headers(headers: dict[str, str]) -> None:
    with OriginalServer() as server, _client(server) as client:
        assert client.get("/api/dispatch/poll", headers=headers).status_code == 400
        assert len(server.violations) == 1


def _client(server: OriginalServer) -> httpx.Client:
    headers = {"Authorization": f"Bearer {server.token}", **GOOD}
    return httpx.Client(base_url=server.url, headers=headers, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


# -- a run --------------------------------------------------------------------------------------------------------------


def test_work_is_claimed_reported_and_completed(server: OriginalServer, machine: Machine) -> None:
    row = server.work(description="Refunds are one sum.", priority=2, labels=["Bug"])
    assert machine.once() == 0
    assert row.result == {"success": True, **RESULT}
    assert row.said[0] == {"status": "running", "progressPercent": 0}
    assert machine.runs == 1
    [registered] = server.so_far("register")
    assert registered.body == {"name": "the laptop", "repos": ["acme/api"], "maxConcurrentJobs": 4}


def test_what_an_agent_says_beyond_measure_is_cut_to_the_measure_of_the_protocol(
    server: OriginalServer, machine: Machine
) -> None:
    row = server.work()
    machine.says(
        {
            "prUrl": "https://git hub.example/1",
            "summary": "💸" * 10_001,
            "tokensUsed": -1,
            "costUsd": "much",
            "errorMessage": None,
            "attempt": 1,
        }
    )
    assert machine.once() == 0
    assert row.result == {"success": True, "summary": "💸" * 5_000}


def test_a_failing_agent_completes_without_success(server: OriginalServer, machine: Machine) -> None:
    row = server.work()
    machine.agent("echo no object here", "exit 3")
    assert machine.once() == 0
    assert row.result == {"success": False, "errorMessage": "the agent ended with exit status 3"}
    assert server.so_far("release") == []


def test_an_agent_that_asks_for_another_attempt_gives_the_work_back_with_its_reason(
    server: OriginalServer, machine: Machine
) -> None:
    row = server.work()
    server.gives_out_again = False
    machine.agent("""echo '{"errorMessage": "the tests are down"}'""", "exit 75")
    assert machine.once() == 0
    assert [each.body for each in server.so_far("release")] == [{"error": "the tests are down"}]
    assert row.state == "rests"
    assert server.so_far("complete") == []


def test_what_was_given_back_and_is_offered_again_at_once_is_not_taken_again_at_once(
    server: OriginalServer, machine: Machine
) -> None:
    row = server.work()
    machine.agent("test -e before || { touch before; exit 75; }")
    assert machine.once() == 0
    assert (row.state, machine.runs) == ("waits", 1)
    assert machine.once() == 0
    assert row.result == {"success": True}
    assert (len(server.so_far("claim")), len(server.so_far("release")), machine.runs) == (2, 1, 2)


def test_no_more_is_claimed_than_there_are_places_and_all_of_it_is_done(
    server: OriginalServer, machine: Machine
) -> None:
    rows = [server.work() for _ in range(3)]
    assert machine.once("--max-jobs", "1") == 0
    assert [row.state for row in rows] == ["over"] * 3
    assert (server.most_held, machine.runs) == (1, 3)
    assert server.so_far("claim", 409) == []


def test_the_end_is_not_told_while_a_report_is_under_way_that_could_arrive_after_it(
    server: OriginalServer, machine: Machine
) -> None:
    """Nothing at this server tells a late report from a new one: the session would run for ever."""
    server.work()
    overtaken: list[bool] = []
    server.hooks["status"] = lambda _: overtaken.append(server.hears("complete", 1, within=0.7))
    assert machine.once() == 0
    assert overtaken == [False]
    assert len(server.so_far("complete")) == 1


# -- the rest of a machine's life, at one that has little to do --------------------------------------------------------------


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OriginalServer]:
    """One job of a few seconds, and four places of which it takes one. Two reports are five seconds apart."""
    folder = tmp_path_factory.mktemp("day")
    with OriginalServer() as server:
        machine = Machine(server, folder)
        machine.agent(
            "echo '::progress 40 reading the code'",
            "mkfifo on",
            "read go < on",
            "echo ::progress 120 never",
        )
        row = server.work()
        with machine.program("connect", "--transport", "listen") as program:
            server.heard("status", 2)
            (folder / "on").write_text("\n")
            server.heard("complete")
            polls = len(server.so_far("poll"))
            server.heard("poll", polls + 1)  # a place is free, and it looks at once
            program.signal(signal.SIGTERM)
            assert program.ends() == 0
        assert row.result == {"success": True}
        yield server


def test_what_an_agent_says_about_its_progress_becomes_a_report(day: OriginalServer) -> None:
    assert [each.body for each in day.so_far("status")] == [
        {"status": "running", "progressPercent": 0},
        {"status": "running", "progressPercent": 40, "message": "reading the code"},
    ]


def test_listening_is_polling_at_a_server_that_cannot_wait(day: OriginalServer) -> None:
    assert day.violations == []
    assert len(day.so_far("poll")) > 2


def test_there_is_no_busy_loop_while_nothing_waits(day: OriginalServer) -> None:
    first, second = day.so_far("status")
    between = [each for each in day.requests if first.at < each.at < second.at]
    assert len(between) <= second.at - first.at, "more than one request in a second"


def test_a_heartbeat_is_sent_at_once_and_then_not_for_half_a_minute(day: OriginalServer) -> None:
    [heartbeat] = day.so_far("heartbeat")
    assert heartbeat.id == day.machine
    assert heartbeat.at < day.so_far("status")[1].at, "the first report after five seconds was sooner"


def test_nothing_was_refused_in_all_of_it(day: OriginalServer) -> None:
    assert {each.status for each in day.requests} == {200}


# -- what goes wrong ----------------------------------------------------------------------------------------------------


def test_a_lost_race_is_no_error_and_the_other_work_is_done(server: OriginalServer, machine: Machine) -> None:
    lost, won = server.work(lost="once"), server.work()
    assert machine.once() == 0
    assert (lost.state, won.state, machine.runs) == ("elsewhere", "over", 1)
    assert {each.id for each in server.requests if each.name in ("release", "status", "complete")} == {
        won.session_id
    }


def test_what_is_shown_but_never_to_be_had_is_not_asked_for_again_and_again(
    server: OriginalServer, machine: Machine
) -> None:
    server.work(lost="always")
    with machine.program("connect", "--transport", "poll") as program:
        server.heard("claim", status=409)
        assert not server.hears("claim", 3, status=409, within=1)
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    assert machine.runs == 0


def test_being_told_to_end_releases_what_runs(server: OriginalServer, machine: Machine) -> None:
    server.gives_out_again = False
    machine.agent(HANGS)
    row = server.work()
    with machine.program("connect", "--transport", "poll", "--grace", "0") as program:
        process = machine.process()
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    [released] = server.so_far("release")
    assert released.body == {"error": "the orchestrator was stopped before the work was done"}
    assert (row.state, runs(process), server.so_far("complete")) == ("rests", False, [])


def test_after_a_crash_the_agent_is_ended_and_the_work_released_once(
    server: OriginalServer, machine: Machine
) -> None:
    machine.agent(f"test -e process || {{ {HANGS}; }}")
    row = server.work()
    with machine.program("connect", "--transport", "poll") as program:
        process = machine.process()
        program.kill()
    assert runs(process), "a crash ends no agent"
    ran: list[bool] = []
    server.hooks["release"] = lambda _: ran.append(runs(process))
    with machine.program("connect", "--transport", "poll") as program:
        server.heard("complete")
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    assert ran == [False], "released once, and when the agent was gone"
    assert [each.body for each in server.so_far("release")] == [
        {"error": "the orchestrator was restarted while the work was under way"}
    ]
    assert (row.result["success"], machine.runs) == (True, 2)


def test_a_claim_whose_answer_got_lost_is_given_back_and_taken_again(
    server: OriginalServer, machine: Machine
) -> None:
    row = server.work()
    server.leaves_unanswered("claim")
    with machine.program("connect", "--transport", "poll") as program:
        server.heard("complete")
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    assert (len(server.so_far("claim")), len(server.so_far("release")), machine.runs) == (2, 1, 1)
    assert row.result == {"success": True, **RESULT}


def test_a_completion_whose_answer_got_lost_is_said_again(server: OriginalServer, machine: Machine) -> None:
    server.work()
    server.leaves_unanswered("complete")
    assert machine.once() == 0
    first, second = server.so_far("complete")
    assert (first.body, machine.runs) == (second.body, 1)


def test_a_server_that_is_away_for_a_moment_is_waited_for_as_long_as_it_says(
    server: OriginalServer, machine: Machine
) -> None:
    away = Answer.error("service_unavailable", "deploying", {"Retry-After": "1"})
    row = server.work()
    for name in ("register", "poll", "heartbeat"):
        server.fails(name, away)
    with machine.program("connect", "--transport", "poll") as program:
        server.heard("complete")
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    for name in ("register", "poll"):
        [refused], [taken, *_] = server.so_far(name, 503), server.so_far(name)
        assert taken.at - refused.at >= 1, f"{name} came back before the time"
    assert (row.result["success"], machine.runs) == (True, 1)


@pytest.mark.parametrize(
    ("status", "code"), [(500, "internal"), (429, "rate_limited"), (503, "service_unavailable")]
)
def test_a_server_that_fails_in_the_middle_of_the_work_is_told_its_end_later(
    server: OriginalServer, machine: Machine, status: int, code: str
) -> None:
    row = server.work()
    for name in ("claim", "status", "complete"):
        server.fails(name, Answer.error(code, "not now", {"Retry-After": "1"}))
    with machine.program("connect", "--transport", "poll") as program:
        server.heard("complete")
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    assert len(server.so_far("complete", status)) == 1
    assert row.result["success"]


def test_a_token_that_is_refused_ends_it(server: OriginalServer, machine: Machine) -> None:
    server.revoked = True
    with machine.program("connect", "--transport", "poll") as program:
        assert program.ends() == 3
    assert len(server.so_far("register", 401)) == 1


def test_the_doctor_finds_a_server_without_our_additions_in_order(
    server: OriginalServer, machine: Machine
) -> None:
    with machine.program("doctor", "--json") as program:
        assert program.ends() == 0
    assert json.loads("".join(program.lines))["good"]
    assert [each.name for each in server.requests] == ["poll"]

"""The orchestrator as a process of its own, against the real functions: what its owner and the person in Linear see of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine

from shared import dispatch_queue, orchestrators
from shared.db import OPERATOR, sql, transaction
from tests.contract.conftest import serving
from tests.contract.programs import Program, runs, until
from tests.databases import Databases
from tests.given import (
    Machine,
    Queued,
    Tenant,
    a_machine,
    a_message,
    a_session,
    a_tenant,
    history_of,
    session_of,
    the_claim_is_older_by,
    violations,
)
from tests.steps import cancel, committed, sweep

PROMPTED = {"activityId": "1", "body": "and the tests"}


@pytest.fixture(scope="module")
def served(
    postgres: Databases, migrated: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A claim is renewed every second, so that what a renewal brings is not waited for."""
    log = tmp_path_factory.mktemp("served") / "functions.log"
    with serving(postgres, migrated, log, DISPATCH_CLAIM_TIMEOUT_SECONDS="3") as found:
        yield found


class Owner:
    """Somebody with a token, and the server that it is for."""

    def __init__(self, url: str, engine: Engine, folder: Path) -> None:
        self.url, self.engine, self.folder = url, engine, folder
        self.tenant: Tenant = a_tenant(engine)
        self.machine: Machine = a_machine(engine, self.tenant, name="the laptop")

    def work(self, title: str, *, machine: Machine | None = None) -> Queued:
        mine = machine or self.machine
        with transaction(self.engine, OPERATOR) as tx:
            session_id = a_session(tx, self.tenant, mine)
            message = a_message(
                title, workspaceId=str(self.tenant.workspace_id), url="https://linear.app/acme/issue/PAY-1"
            )
            queue_id = dispatch_queue.enqueue_dispatch(
                tx, org_id=self.tenant.org_id, orchestrator_id=mine.id, session_id=session_id, message=message
            )
        return Queued(self.tenant.org_id, session_id, queue_id)

    def program(self, *options: str, **more: str) -> Program:
        return Program(self.folder, self.url, self.machine.token, "--name", "the laptop", *options, **more)

    def status(self, queued: Queued) -> str:
        found: str = session_of(self.engine, queued).status
        return found

    def until(self, queued: Queued, status: str) -> Any:
        until(lambda: self.status(queued) == status, f"the session to be {status}")
        return session_of(self.engine, queued)

    def says(self, queued: Queued, prompt: dict[str, str]) -> None:
        with transaction(self.engine, OPERATOR) as tx:
            assert dispatch_queue.amend(tx, org_id=queued.org_id, session_id=queued.session_id, prompt=prompt)


@pytest.fixture
def owner(url: str, engine: Engine, tmp_path: Path) -> Iterator[Owner]:
    made = Owner(url, engine, tmp_path / "laptop")
    yield made
    assert violations(engine) == []


# -- a run --------------------------------------------------------------------------------------------------------------


def test_work_is_claimed_run_and_completed_with_what_the_agent_says(owner: Owner) -> None:
    with owner.program() as program:
        program.said("registered")
        queued = owner.work("done")
        session = owner.until(queued, "complete")
    assert (session.pr_url, session.summary, session.tokens_used) == (
        "https://github.com/acme/api/pull/7",
        "Did PAY-1.",
        1200,
    )
    assert [(noted.dispatch_id, noted.attempt) for noted in program.noted("began")] == [
        (str(queued.queue_id), 1)
    ]
    log = owner.folder / "state" / "sessions" / str(queued.session_id) / "output.log"
    assert "some output" in log.read_text()
    files = [path for path in log.parent.iterdir() if path.is_file()]
    assert {path.name for path in files} == {"message.json", "prompt.md", "output.log"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}, "for the owner's eyes alone"


def test_no_token_and_no_variable_that_was_not_named_reaches_the_agent(owner: Owner) -> None:
    queued = owner.work("variables")
    with owner.program("--env", "NAMED", NAMED="1", SECRET_OF_THE_OWNER="2") as program:
        [noted] = program.until_noted("variables")
    seen = set(noted.rest.split())
    told = "ID ATTEMPT SESSION_ID ISSUE ISSUE_URL REPO MESSAGE_FILE PROMPT_FILE LOG_FILE"
    assert {"NAMED", "PATH", "HOME", *(f"DISPATCH_{name}" for name in told.split())} <= seen
    assert not [name for name in seen if name.startswith("ORCHESTRATOR_") or name == "SECRET_OF_THE_OWNER"]
    everything = "\n".join(program.lines) + "".join(
        path.read_text()
        for path in (owner.folder / "state" / "sessions" / str(queued.session_id)).glob("*.*")
    )
    assert owner.machine.token not in everything


def test_an_agent_that_fails_fails_the_session_with_its_reason(owner: Owner) -> None:
    said, silent = owner.work("exit 3 because"), owner.work("exit 4")
    with owner.program():
        assert owner.until(said, "error").error_message == "the tests do not pass"
        assert owner.until(silent, "error").error_message == "the agent ended with exit status 4"


def test_exit_75_gives_the_work_back_for_another_attempt(owner: Owner) -> None:
    queued = owner.work("exit 75 because")
    with owner.program() as program:
        program.said("released")
    assert owner.status(queued) == "pending"
    assert history_of(owner.engine, queued)[-1] == "released"


def test_progress_lines_become_reports(owner: Owner) -> None:
    queued = owner.work("progress 6")
    with owner.program():
        until(lambda: session_of(owner.engine, queued).progress_percent == 40, "the report")
    assert owner.status(queued) == "running"


def test_what_the_agent_leaves_behind_is_ended_with_it(owner: Owner) -> None:
    queued = owner.work("parent")
    with owner.program() as program:
        owner.until(queued, "complete")
        [noted] = program.noted("began")
        assert not runs(int(noted.rest))


def test_an_agent_that_takes_too_long_is_ended_and_has_failed(owner: Owner) -> None:
    queued = owner.work("hang")
    with owner.program("--timeout", "1") as program:
        assert owner.until(queued, "error").error_message == "the agent did not finish within 1 s"
        assert not runs(program.noted("began")[0].process)


def test_a_command_that_is_not_there_stops_the_start(owner: Owner) -> None:
    with owner.program("--exec", "no-such-command --now") as program:
        assert program.ends() == 2
    assert "there is no command 'no-such-command'" in program.lines[-1]


def test_it_runs_no_more_jobs_at_once_than_it_may_and_takes_the_next_at_once(owner: Owner) -> None:
    rows = [owner.work("progress 0.3") for _ in range(6)]
    with owner.program("--max-jobs", "2") as program:
        for queued in rows:
            owner.until(queued, "complete")
    running = most = 0
    for noted in program.noted():
        running += {"began": 1, "ended": -1}.get(noted.what, 0)
        most = max(most, running)
    assert most == 2


# -- stops and follow-ups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("title", ["hang", "stubborn"])
def test_a_stop_ends_the_agent_and_all_that_it_has_started(owner: Owner, title: str) -> None:
    queued = owner.work(title)
    with owner.program() as program:
        [noted] = program.until_noted("began")
        assert committed(owner.engine, cancel, queued) == "stop_requested"
        owner.until(queued, "cancelled")
        assert not [process for process in (noted.process, *map(int, noted.rest.split())) if runs(process)]


def test_a_follow_up_reaches_an_interactive_agent_while_it_runs(owner: Owner) -> None:
    queued = owner.work("listen")
    with owner.program("--interactive") as program:
        program.until_noted("began")
        owner.says(queued, PROMPTED)
        [noted] = program.until_noted("heard")
        owner.until(queued, "complete")
    assert noted.rest == "and the tests"
    assert len(program.noted("began")) == 1


def test_a_follow_up_that_an_interactive_agent_did_not_read_begins_the_session_anew(owner: Owner) -> None:
    queued = owner.work("prompts 3")
    with owner.program("--interactive") as program:
        program.until_noted("began")
        owner.says(queued, PROMPTED)
        program.said("prompted")
        first, second = program.until_noted("prompts", times=2)
        owner.until(queued, "complete")
    assert (first.rest, second.rest) == ("", "and the tests")


def test_an_agent_that_prints_without_end_can_be_stopped(owner: Owner) -> None:
    queued = owner.work("flood")
    with owner.program("--exec", "/usr/bin/yes") as program:
        program.said("claimed")
        owner.until(queued, "running")
        assert committed(owner.engine, cancel, queued) == "stop_requested"
        owner.until(queued, "cancelled")


def test_any_other_agent_gets_a_follow_up_with_its_next_run(owner: Owner) -> None:
    queued = owner.work("prompts")
    owner.work("progress 1")
    with owner.program("--max-jobs", "1", "--exec", f"/bin/sh -c 'sleep 1; exec {_agent(owner)}'") as program:
        program.said("claimed")
        owner.says(queued, PROMPTED)
        first, second = program.until_noted("prompts", times=2)
        owner.until(queued, "complete")
    assert (first.rest, second.rest) == ("", "and the tests")
    assert first.dispatch_id != second.dispatch_id


def _agent(owner: Owner) -> str:
    return owner.program()._environment["ORCHESTRATOR_EXEC"]


def test_an_agent_whose_claim_is_lost_is_ended_and_nothing_is_reported(owner: Owner) -> None:
    """The claim expired (a network that was down, a lid that was closed) and another machine has the work."""
    other = a_machine(owner.engine, owner.tenant, name="the desktop")
    queued = owner.work("hang")
    with owner.program() as program:
        [noted] = program.until_noted("began")
        with transaction(owner.engine, OPERATOR) as tx:
            tx.run(TAKEN, org_id=queued.org_id, other=other.id)
        program.said("lost")
        assert not runs(noted.process)
    assert owner.status(queued) == "running"


TAKEN = sql("""
    with taken as (update dispatch_queue set orchestrator_id = :other, claimed_by = :other where org_id = :org_id returning session_id)
    update dispatch_sessions s set orchestrator_id = :other from taken t where s.org_id = :org_id and s.id = t.session_id
""")


# -- the end of the program ---------------------------------------------------------------------------------------------


def test_told_to_end_it_lets_work_finish_within_the_grace(owner: Owner) -> None:
    queued, waiting = owner.work("progress 1"), owner.work("done")
    with owner.program("--max-jobs", "1") as program:
        program.until_noted("began")
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
    assert (owner.status(queued), owner.status(waiting)) == ("complete", "pending")


def test_what_is_not_done_after_the_grace_is_given_back_with_the_reason(owner: Owner) -> None:
    queued = owner.work("hang")
    with owner.program("--grace", "1") as program:
        [noted] = program.until_noted("began")
        program.signal(signal.SIGINT)
        assert program.ends() == 0
        assert not runs(noted.process)
    assert owner.status(queued) == "pending"
    assert "was stopped before the work was done" in _last_error(owner, queued)


def test_a_second_signal_gives_everything_back_at_once(owner: Owner) -> None:
    queued = owner.work("stubborn")
    with owner.program("--grace", "600", "--patience", "600") as program:
        program.until_noted("began")
        program.signal(signal.SIGINT)
        program.said("ending")
        program.signal(signal.SIGINT)
        assert program.ends() == 0
    assert owner.status(queued) == "pending"


def _last_error(owner: Owner, queued: Queued) -> str:
    with transaction(owner.engine) as tx:
        row = tx.first(
            sql("select last_error from dispatch_queue where org_id = :org_id and id = :id"),
            org_id=queued.org_id,
            id=queued.queue_id,
        )
    assert row is not None
    return str(row[0])


def test_a_revoked_token_ends_the_agents_and_the_program(owner: Owner) -> None:
    owner.work("hang")
    with owner.program() as program:
        [noted] = program.until_noted("began")
        with transaction(owner.engine, OPERATOR) as tx:
            assert orchestrators.revoke_token(tx, org_id=owner.tenant.org_id, token_id=owner.machine.token_id)
        assert program.ends() == 3
        assert not runs(noted.process)
    assert "token" in program.lines[-1]


def test_once_takes_what_is_there_finishes_it_and_ends(owner: Owner) -> None:
    rows = [owner.work("done") for _ in range(3)]
    with owner.program("--max-jobs", "2", command="once") as program:
        assert program.ends() == 0
    assert {owner.status(queued) for queued in rows} == {"complete"}


def test_once_without_a_server_says_so_with_its_exit_code(owner: Owner) -> None:
    with Program(owner.folder, "http://127.0.0.1:9", owner.machine.token, command="once") as program:
        assert program.ends() == 1
    assert "127.0.0.1:9 does not answer" in program.lines[-1]


def test_what_is_kept_of_a_session_goes_after_some_days_unless_it_is_unfinished(owner: Owner) -> None:
    sessions = owner.folder / "state" / "sessions"
    for name, days in (("old", 15), ("recent", 13)):
        (sessions / name).mkdir(parents=True)
        os.utime(sessions / name, (time.time() - days * 86_400,) * 2)
    (sessions / "gone").symlink_to("nowhere")
    with owner.program(command="once") as program:
        assert program.ends() == 0
    assert {path.name for path in sessions.iterdir()} == {"recent", "gone"}


def test_two_programs_do_not_share_a_state_folder(owner: Owner) -> None:
    with owner.program() as first:
        first.said("registered")
        with owner.program() as second:
            assert second.ends() == 4
    assert f"process {first.process.pid}" in second.lines[-1]


# -- after a crash ------------------------------------------------------------------------------------------------------


def test_after_a_crash_the_orphan_is_ended_and_its_work_given_back_at_once(owner: Owner) -> None:
    queued = owner.work("stubborn")
    with owner.program() as crashed:
        [noted] = crashed.until_noted("began")
        crashed.kill()
        assert runs(noted.process)
        with owner.program() as again:
            again.said("orphan")
            again.said("released")
            assert not [process for process in (noted.process, int(noted.rest)) if runs(process)]
    assert _last_error(owner, queued) == "the orchestrator was restarted while the work was under way"


def test_after_a_crash_the_orphan_is_ended_even_when_no_server_answers(owner: Owner) -> None:
    owner.work("stubborn")
    with owner.program() as crashed:
        [noted] = crashed.until_noted("began")
        crashed.kill()
        with owner.program(ORCHESTRATOR_URL="http://127.0.0.1:9"):
            until(lambda: not runs(noted.process) and not runs(int(noted.rest)), "the orphan to be gone")


def test_a_state_folder_that_holds_no_journal_is_a_clear_error(owner: Owner) -> None:
    (owner.folder / "state").mkdir(parents=True)
    (owner.folder / "state" / "journal.db").write_bytes(b"not a database at all" * 100)
    with owner.program() as program:
        assert program.ends() == 2
    assert "is no journal" in program.lines[-1]


def test_status_tells_what_a_crash_has_left_and_asks_no_server(owner: Owner) -> None:
    queued = owner.work("hang")
    with owner.program() as crashed:
        crashed.until_noted("began")
        crashed.kill()
    with owner.program("--json", command="status", ORCHESTRATOR_URL="http://127.0.0.1:9") as status:
        assert status.ends() == 0
    found = json.loads(status.lines[-1])
    assert found["process"] is None
    assert [
        (each["state"], each["attempt"], UUID(Path(each["log"]).parent.name)) for each in found["work"]
    ] == [("started", 1, queued.session_id)]


def test_the_doctor_finds_everything_right_and_says_what_is_not(owner: Owner) -> None:
    with owner.program(command="doctor") as doctor:
        assert doctor.ends() == 0
    with owner.program(
        "--exec", "no-such-command", command="doctor", ORCHESTRATOR_TOKEN="dp_orch_" + "x" * 43
    ) as doctor:
        assert doctor.ends() == 1
    assert [line[:16] for line in doctor.lines if line.startswith("FAIL")] == [
        "FAIL  command: e",
        "FAIL  token: unk",
    ]


# -- a network that fails -----------------------------------------------------------------------------------------------


def test_a_sweep_while_the_machine_was_away_does_not_make_it_run_twice_at_once(owner: Owner) -> None:
    """The claim expired and waits again for this machine: the run of the lost claim is ended before the next one begins."""
    queued = owner.work("hang")
    with owner.program() as program:
        [first] = program.until_noted("began")
        program.signal(signal.SIGSTOP)
        the_claim_is_older_by(owner.engine, queued, 1801)
        committed(owner.engine, sweep, owner.machine)
        with transaction(owner.engine, OPERATOR) as tx:
            tx.run(
                sql("update dispatch_queue set available_at = now() where org_id = :org_id"),
                org_id=queued.org_id,
            )
        program.signal(signal.SIGCONT)
        _, second = program.until_noted("began", times=2)
        assert (second.attempt, runs(first.process)) == (2, False)

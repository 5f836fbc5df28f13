"""What people ask for while a machine is at work, or after it, is done: it does not go with the row that it came too late for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from infra.local.seed import REPO
from shared.db import OPERATOR, sql, transaction
from shared.settings import Settings
from tests.given import a_machine, violations
from tests.linear_given import OTHER_TEAM, Linear, a_linear, happened
from tests.linear_samples import DELEGATED, ISSUE, MOVED, PROMPTED, RELEASED, SESSION, STOPPED
from tests.steps import meanwhile

FOLLOW_UP = "Please also cover the ¥ case 🙏"


@pytest.fixture
def linear(engine: Engine, settings: Settings) -> Iterator[Linear]:
    made = a_linear(engine, settings)
    yield made
    assert violations(engine) == []


def completes(linear: Linear, claim: dict[str, Any], **body: Any) -> int:
    path = f"/api/sessions/{claim['message']['sessionId']}/complete"
    return linear.machine_asks("POST", path, {"success": True, "attempt": claim["attempt"], **body}).status


def said(claim: dict[str, Any]) -> list[str]:
    return [prompt["body"] for prompt in claim["message"].get("prompts", [])]


def mention(text: str, agent_session: str, **options: Any) -> dict[str, Any]:
    comment = {"id": f"comment of {agent_session}", "body": text, "userId": "somebody"}
    return happened(
        SESSION,
        agentSession__id=agent_session,
        agentSession__sourceMetadata={"type": "comment"},
        agentSession__comment=comment,
        **options,
    )


# -- while it is being worked on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("success", [True, False])
def test_a_follow_up_that_came_too_late_for_the_agent_begins_the_session_anew(
    linear: Linear, success: bool
) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(PROMPTED))
    assert completes(linear, claim, success=success) == 200
    assert linear.sessions() == [("pending", None)]
    again = linear.claimed()
    assert (again["attempt"], said(again)) == (1, [FOLLOW_UP])
    assert again["message"]["queueId"] != claim["message"]["queueId"]
    linear.completes(again)
    assert linear.sessions() == [("complete", None)]


def test_a_follow_up_that_the_agent_was_given_is_done_with_its_work(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(PROMPTED))
    assert completes(linear, claim, promptsSeen=1) == 200
    assert (linear.sessions(), linear.rows()) == ([("complete", None)], 0)


def test_a_follow_up_that_was_in_the_claimed_message_is_done_with_its_work(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.hears(happened(PROMPTED))
    linear.completes(linear.claimed())
    assert (linear.sessions(), linear.rows()) == ([("complete", None)], 0)


@pytest.mark.parametrize("named", [True, False])
def test_the_end_of_an_old_row_reported_again_does_not_end_the_new_one(linear: Linear, named: bool) -> None:
    """The answer to the first completion was lost; meanwhile the session began anew, and its row's attempts count from 1 again."""
    linear.hears(happened(SESSION, seconds_ago=60))
    old = linear.claimed()
    linear.completes(old)
    linear.hears(happened(PROMPTED))
    if named:
        linear.claimed()
    assert completes(linear, old, **({"queueId": old["message"]["queueId"]} if named else {})) == (
        200 if named else 409
    )
    assert linear.rows() == 1


def test_a_report_about_an_old_row_does_not_renew_the_new_one(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    old = linear.claimed()
    linear.completes(old)
    linear.hears(happened(PROMPTED))
    linear.claimed()
    path = f"/api/sessions/{old['message']['sessionId']}/status"
    body = {"status": "running", "progressPercent": 10, "attempt": 1, "queueId": old["message"]["queueId"]}
    assert linear.machine_asks("POST", path, body).body == {"status": "over", "cancelRequested": False}
    assert linear.sessions() == [("dispatched", None)]


# -- a stop that is pending ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["complete", "release"])
@pytest.mark.parametrize("again", [DELEGATED, PROMPTED])
def test_what_is_wanted_again_while_it_is_being_stopped_begins_anew(
    linear: Linear, again: str, how: str
) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    assert linear.hears(happened(RELEASED, seconds_ago=30)) == "stop_requested"
    assert linear.hears(happened(again)) in ("joined", "prompted")
    if how == "complete":
        assert completes(linear, claim, success=False) == 200
    else:
        path = f"/api/dispatch/{claim['message']['queueId']}/release"
        answer = linear.machine_asks("POST", path, {"error": "stopped", "attempt": 1}).body
        assert answer == {"status": "released"}
    assert (linear.sessions(), linear.rows()) == ([("pending", None)], 1)


def test_a_late_echo_of_the_delegation_does_not_undo_a_stop(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(RELEASED, seconds_ago=30))
    linear.hears(happened(SESSION, seconds_ago=60))
    completes(linear, claim, success=False)
    assert (linear.sessions(), linear.rows()) == ([("cancelled", None)], 0)


def test_a_stop_after_it_was_wanted_again_stops_it(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(RELEASED, seconds_ago=40))
    linear.hears(happened(PROMPTED, seconds_ago=20))
    assert linear.hears(happened(RELEASED)) == "stop_requested"
    completes(linear, claim, success=False)
    assert (linear.sessions(), linear.rows()) == ([("cancelled", None)], 0)


def test_a_follow_up_of_before_the_stop_goes_with_it(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(PROMPTED, seconds_ago=30))
    linear.hears(happened(STOPPED))
    completes(linear, claim, success=False)
    assert (linear.sessions(), linear.rows()) == ([("cancelled", None)], 0)


@pytest.mark.parametrize("again", [DELEGATED, PROMPTED])
def test_a_stop_that_is_older_than_the_last_request_is_not_meant_for_it(linear: Linear, again: str) -> None:
    """The stop's first delivery failed; it comes a minute later, after the work was wanted again."""
    linear.hears(happened(SESSION, seconds_ago=90))
    linear.hears(happened(again))
    assert linear.hears(happened(RELEASED, seconds_ago=60)) == "ignored"
    assert linear.rows() == 1


# -- which session ------------------------------------------------------------------------------------------------------


def test_a_stop_reaches_the_open_session_of_an_issue_whichever_is_the_newest(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=90))
    first = linear.claimed()
    completes(linear, first, success=False)
    linear.hears(happened(DELEGATED, seconds_ago=-1))
    linear.completes(linear.claimed())
    reopen = happened(PROMPTED, agentSession__id="unknown", seconds_ago=-2)
    linear.run(
        sql(
            "update dispatch_sessions set linear_agent_session_id = 'unknown' where org_id = :org_id and status = 'error'"
        )
    )
    assert linear.hears(reopen) == "begun_anew"
    assert linear.hears(happened(RELEASED, seconds_ago=-3)) == "cancelled"
    assert sorted(linear.sessions()) == [("cancelled", None), ("complete", None)]


def test_a_mention_whose_webhook_is_late_is_no_echo_of_a_session_that_has_another_agent_session(
    linear: Linear,
) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.completes(linear.claimed())
    assert linear.hears(mention("and the docs", "a later one", seconds_ago=30)) == "started"
    assert said(linear.claimed()) == ["and the docs"]


def test_a_stop_in_an_agent_session_that_joined_stops_the_work(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.claimed()
    assert linear.hears(mention("and the docs", "joined", seconds_ago=30)) == "joined"
    assert linear.hears(happened(STOPPED, agentSession__id="joined")) == "stop_requested"


def test_a_prompt_in_an_agent_session_that_joined_reaches_the_work(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.hears(mention("and the docs", "joined", seconds_ago=30))
    assert linear.hears(happened(PROMPTED, agentSession__id="joined")) == "prompted"
    assert said(linear.claimed()) == ["and the docs", FOLLOW_UP]


# -- what could not be delivered ----------------------------------------------------------------------------------------

NO_DEFAULT = sql("update team_routes set default_repo = null where org_id = :org_id")
NOBODY_SERVES = sql("delete from repo_routes where org_id = :org_id")


def test_the_answer_to_which_repository_keeps_the_task_itself(linear: Linear) -> None:
    linear.run(NO_DEFAULT)
    assert linear.hears(mention("the actual task", "asked", seconds_ago=30)) == "no_route"
    answer = happened(PROMPTED, agentSession__id="asked", agentActivity__body=f"[repo={REPO}]")
    answer["agentActivity"]["content"] = {"type": "prompt", "body": f"[repo={REPO}]"}
    assert linear.hears(answer) == "begun_anew"
    claim = linear.claimed()
    assert said(claim) == ["the actual task", f"[repo={REPO}]"]
    assert "never push to main" in claim["message"]["guidance"]
    assert claim["message"]["repo"] == REPO


def test_a_prompt_that_no_machine_can_take_is_a_dead_letter_that_can_be_sent_again(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.completes(linear.claimed())
    linear.run(NOBODY_SERVES)
    assert linear.hears(happened(PROMPTED)) == "no_orchestrator"
    assert (linear.sessions(), linear.rows()) == ([("error", "no_orchestrator")], 0)
    [letter] = linear.all("""
        select data -> 'payload' -> 'prompts' -> 0 ->> 'body' from session_events where org_id = :org_id and type = 'dead_lettered'
    """)
    assert letter[0] == FOLLOW_UP


# -- moves --------------------------------------------------------------------------------------------------------------

OTHER_DEFAULT = sql("""
    insert into team_routes (org_id, workspace_id, team_id, team_key, default_repo)
    values (:org_id, :workspace_id, :team_id, 'WEB', 'acme/other')
""")


def test_a_move_to_another_team_does_not_override_the_repository_that_a_person_named(
    engine: Engine, linear: Linear
) -> None:
    a_machine(engine, linear.tenant, repos=["acme/other"])
    linear.run(OTHER_DEFAULT, team_id=OTHER_TEAM)
    linear.hears(mention(f"[repo={REPO}] please", "asked", seconds_ago=30))
    assert linear.hears(happened(MOVED, data__id=ISSUE)) == "moved"
    assert linear.claimed()["message"]["repo"] == REPO


def test_the_machine_that_had_the_work_in_the_old_repository_cannot_complete_it_in_the_new_one(
    engine: Engine, linear: Linear
) -> None:
    other = a_machine(engine, linear.tenant, repos=["acme/other"])
    linear.run(OTHER_DEFAULT, team_id=OTHER_TEAM)
    linear.hears(happened(DELEGATED, seconds_ago=60))
    claim = linear.claimed()
    path = f"/api/dispatch/{claim['message']['queueId']}/release"
    linear.machine_asks("POST", path, {"error": "exit 1", "attempt": 1})
    assert linear.hears(happened(MOVED)) == "moved"
    assert completes(linear, claim) == 409
    linear.run(sql("update dispatch_queue set available_at = now() where org_id = :org_id"))
    assert linear.claimed(by=other)["message"]["repo"] == "acme/other"


def test_a_move_waits_for_a_claim_before_it_touches_the_session(engine: Engine, linear: Linear) -> None:
    """Row first, then session, in every transaction: in the other order the two would wait for each other."""
    linear.hears(happened(DELEGATED, seconds_ago=60))
    with transaction(engine, OPERATOR) as tx:
        tx.run(
            sql("select from dispatch_queue where org_id = :org_id for update"), org_id=linear.tenant.org_id
        )
        [moving] = meanwhile(engine, lambda: linear.send(happened(MOVED)).status)
        tx.run(
            sql("update dispatch_sessions set updated_at = now() where org_id = :org_id"),
            org_id=linear.tenant.org_id,
        )
    assert moving.result(timeout=5) == 200

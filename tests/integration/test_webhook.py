"""What Linear's events do to sessions and queue rows, whatever their order and however often they come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine

from infra.local.seed import REPO, TEAM
from shared.crypto import KeyRing
from shared.db import sql
from shared.settings import Settings
from tests.given import a_machine, a_tenant, violations
from tests.linear_given import ORGANIZATION, OTHER_TEAM, SECRET, Linear, a_linear, happened
from tests.linear_samples import (
    ABSENT,
    ASSIGNED,
    ASSIGNED_NOTICE,
    BUG,
    COMMENT,
    CREATED,
    DELEGATED,
    MOVED,
    PROJECT,
    PROMPTED,
    RELEASED,
    REMOVED,
    SESSION,
    STOPPED,
    TRASHED,
    UNASSIGNED_NOTICE,
    US,
)


@pytest.fixture
def linear(engine: Engine, settings: Settings) -> Iterator[Linear]:
    made = a_linear(engine, settings)
    yield made
    assert violations(engine) == []


# -- starting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CREATED, ASSIGNED, DELEGATED, SESSION])
def test_work_starts_with_an_assignment_a_delegation_or_an_agent_session(linear: Linear, name: str) -> None:
    assert linear.hears(happened(name)) == "started"
    assert linear.sessions() == [("pending", None)]
    message = linear.claimed()["message"]
    assert (message["repo"], message["linearIdentifier"]) == (REPO, "PAY-412")


@pytest.mark.parametrize("name", [COMMENT, ASSIGNED_NOTICE])
def test_what_carries_no_work_is_answered_and_kept_with_its_reason(linear: Linear, name: str) -> None:
    assert linear.hears(happened(name)) == "ignored"
    assert linear.sessions() == []
    [outcome] = linear.all("select outcome from webhook_deliveries where org_id = :org_id")
    assert outcome[0].startswith("ignored: ")


def test_unknown_events_are_answered_with_200(linear: Linear) -> None:
    assert linear.hears(happened(CREATED, type="Galaxy")) == "ignored"
    assert linear.hears(happened(CREATED, action="exploded")) == "ignored"
    assert linear.sessions() == []


@pytest.mark.parametrize("order", list(itertools.permutations([DELEGATED, SESSION, ASSIGNED_NOTICE])))
def test_the_three_webhooks_of_one_delegation_are_one_session_in_any_order(
    linear: Linear, order: tuple[str, ...]
) -> None:
    for name in order:
        linear.hears(happened(name, seconds_ago=2))
    assert (linear.sessions(), linear.rows()) == ([("pending", None)], 1)
    message = linear.claimed()["message"]
    assert message["agentSessionId"] == "0377e9dc-aa12-433a-91b2-11b7e12111b4"
    assert "never push to main" in message["guidance"]


def test_the_three_webhooks_of_one_delegation_are_one_session_at_the_same_moment(linear: Linear) -> None:
    at_once(linear, [happened(name, seconds_ago=2) for name in (DELEGATED, SESSION, ASSIGNED_NOTICE)])
    assert (linear.sessions(), linear.rows()) == ([("pending", None)], 1)


def test_without_a_machine_they_are_one_failed_session_at_the_same_moment(
    engine: Engine, settings: Settings
) -> None:
    linear = a_linear(engine, settings, machines=False)
    at_once(linear, [happened(name, seconds_ago=2) for name in (DELEGATED, SESSION, ASSIGNED_NOTICE)])
    assert (linear.sessions(), linear.rows()) == ([("error", "no_orchestrator")], 0)


def at_once(linear: Linear, events: list[dict[str, Any]], **options: Any) -> None:
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda event=event: answers.append(linear.send(event, **options).status))
        for event in events
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * len(events)


def test_a_late_webhook_of_a_delegation_that_is_over_starts_nothing(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=60))
    linear.completes(linear.claimed())
    assert linear.hears(happened(SESSION, seconds_ago=60)) == "joined"
    assert linear.sessions() == [("complete", None)]


def test_a_later_delegation_of_the_same_issue_starts_again(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=60))
    linear.completes(linear.claimed())
    assert linear.hears(happened(DELEGATED, seconds_ago=-30)) == "started"
    assert linear.sessions() == [("complete", None), ("pending", None)]


def test_a_mention_on_an_issue_that_is_being_worked_on_reaches_the_machine(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=60))
    claim = linear.claimed()
    mention = happened(
        SESSION,
        agentSession__id="another-session",
        agentSession__sourceMetadata={"type": "comment"},
        agentSession__comment={
            "id": "comment-2",
            "body": "@coder and the docs, please",
            "userId": "somebody",
        },
    )
    assert linear.hears(mention) == "joined"
    path = f"/api/dispatch/{claim['message']['queueId']}/renew"
    answer = linear.machine_asks("POST", path, {"attempt": 1}).body
    assert answer is not None
    assert [said["body"] for said in answer["prompts"]] == ["@coder and the docs, please"]


# -- once ---------------------------------------------------------------------------------------------------------------


def test_the_same_delivery_twice_acts_once(linear: Linear) -> None:
    event = happened(DELEGATED)
    assert linear.hears(event, delivery="d-1") == "started"
    assert linear.hears(event, delivery="d-1") == "heard_before"
    assert linear.rows() == 1


def test_the_same_bytes_under_a_new_delivery_id_act_once(linear: Linear) -> None:
    event = happened(PROMPTED)
    linear.hears(event)
    assert linear.hears(event) == "heard_before"
    assert linear.rows() == 1


def test_the_same_delivery_id_with_a_refreshed_timestamp_acts_once(linear: Linear) -> None:
    event = happened(DELEGATED)
    linear.hears(event, delivery="d-1")
    assert (
        linear.hears({**event, "webhookTimestamp": event["webhookTimestamp"] + 1}, delivery="d-1")
        == "heard_before"
    )


@pytest.mark.parametrize("delivery", [None, "   "], ids=["none", "blank"])
def test_without_a_delivery_id_the_bytes_are_the_identity(linear: Linear, delivery: str | None) -> None:
    event = happened(DELEGATED)
    assert [linear.hears(event, delivery=delivery), linear.hears(event, delivery=delivery)] == [
        "started",
        "heard_before",
    ]
    assert linear.hears(happened(RELEASED, seconds_ago=-1), delivery=delivery) == "cancelled"


def test_five_deliveries_at_the_same_moment_act_once(linear: Linear) -> None:
    at_once(linear, [happened(DELEGATED)] * 5, delivery="d-1")
    assert (linear.sessions(), linear.rows()) == ([("pending", None)], 1)


# -- stopping -----------------------------------------------------------------------------------------------------------

STOPS = [RELEASED, UNASSIGNED_NOTICE, REMOVED, TRASHED, STOPPED]


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_ends_waiting_work_at_once(linear: Linear, name: str) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    assert linear.hears(happened(name)) == "cancelled"
    assert (linear.sessions(), linear.rows()) == ([("cancelled", None)], 0)


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_asks_the_machine_that_has_it_and_a_second_one_changes_nothing(
    linear: Linear, name: str
) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    assert linear.hears(happened(name)) == "stop_requested"
    linear.hears(happened(name, seconds_ago=-1))
    poll = linear.machine_asks("GET", "/api/dispatch/poll").body
    assert poll is not None
    assert poll["cancelled"] == [claim["message"]["queueId"]]
    report = linear.machine_asks(
        "POST", f"/api/sessions/{claim['message']['sessionId']}/status", {"status": "running"}
    )
    assert report.body is not None
    assert report.body["cancelRequested"] is True
    linear.completes(claim, success=False)
    assert linear.sessions() == [("cancelled", None)]
    types = [
        row[0] for row in linear.all("select type from session_events where org_id = :org_id order by id")
    ]
    assert types.count("stop_requested") == 1


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_of_what_is_over_changes_nothing(linear: Linear, name: str) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.completes(linear.claimed())
    assert linear.hears(happened(name)) == "already_over"
    assert linear.sessions() == [("complete", None)]


def test_an_issue_that_a_person_completes_is_stopped_and_one_that_an_integration_completes_is_not(
    linear: Linear,
) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=60))
    done: dict[str, Any] = {
        "data__state": {"id": "s", "name": "Done", "type": "completed"},
        "updatedFrom": {"stateId": "before"},
    }
    assert linear.hears(happened(DELEGATED, actor=None, **done)) == "ignored"
    assert linear.hears(happened(DELEGATED, **done)) == "cancelled"


@pytest.mark.parametrize("stop", [RELEASED, UNASSIGNED_NOTICE, TRASHED, STOPPED])
def test_a_stop_that_overtakes_its_start_wins(linear: Linear, stop: str) -> None:
    assert linear.hears(happened(stop, seconds_ago=1)) == "stopped_before_it_started"
    assert linear.hears(happened(SESSION, seconds_ago=5)) == "stopped_before_it_started"
    assert (linear.sessions(), linear.rows()) == ([("cancelled", None)], 0)


def test_an_issue_may_be_delegated_again_after_a_stop(linear: Linear) -> None:
    linear.hears(happened(UNASSIGNED_NOTICE, seconds_ago=5))
    assert linear.hears(happened(DELEGATED)) == "started"


def test_a_stop_that_is_older_than_the_delegation_is_not_meant_for_it(linear: Linear) -> None:
    linear.hears(happened(DELEGATED, seconds_ago=10))
    assert linear.hears(happened(RELEASED, seconds_ago=100)) == "ignored"
    assert linear.rows() == 1


def test_our_own_actions_are_ignored(linear: Linear) -> None:
    assert linear.hears(happened(DELEGATED, actor={"id": US, "type": "app"})) == "ignored"
    linear.hears(happened(DELEGATED, seconds_ago=60))
    assert linear.hears(happened(RELEASED, actor={"id": US, "type": "app"})) == "ignored"
    assert linear.rows() == 1


@pytest.mark.parametrize(
    "changes", [{"agentSession__creator": None, "agentSession__creatorId": None}, {"previousComments": None}]
)
def test_absent_people_and_comments_start_work_all_the_same(linear: Linear, changes: dict[str, Any]) -> None:
    assert linear.hears(happened(SESSION, **changes)) == "started"


def test_an_agent_session_without_an_issue_is_ignored(linear: Linear) -> None:
    assert linear.hears(happened(SESSION, agentSession__issue=None, agentSession__issueId=None)) == "ignored"


def test_an_update_that_does_not_say_what_changed_starts_nothing(linear: Linear) -> None:
    assert linear.hears(happened(DELEGATED, updatedFrom=ABSENT)) == "ignored"
    assert linear.sessions() == []


# -- prompts ------------------------------------------------------------------------------------------------------------


def prompts_of(linear: Linear, claim: dict[str, Any], seen: int = 0) -> list[str]:
    path = f"/api/dispatch/{claim['message']['queueId']}/renew"
    answer = linear.machine_asks("POST", path, {"attempt": claim["attempt"], "promptsSeen": seen}).body
    assert answer is not None
    return [said["activityId"] for said in answer.get("prompts", [])]


def test_a_prompt_reaches_the_machine_that_is_at_work_once(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    assert linear.hears(happened(PROMPTED)) == "prompted"
    assert len(prompts_of(linear, claim)) == 1
    assert prompts_of(linear, claim, seen=1) == []


def test_two_equal_texts_are_two_inputs_and_one_activity_is_one(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    claim = linear.claimed()
    linear.hears(happened(PROMPTED, agentActivity__id="one"))
    linear.hears(happened(PROMPTED, agentActivity__id="two"))
    assert linear.hears(happened(PROMPTED, seconds_ago=1, agentActivity__id="two")) == "heard_before"
    assert prompts_of(linear, claim) == ["one", "two"]


def test_a_prompt_for_waiting_work_is_part_of_its_message(linear: Linear) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    linear.hears(happened(PROMPTED))
    assert [said["body"] for said in linear.claimed()["message"]["prompts"]] == [
        "Please also cover the ¥ case 🙏"
    ]


@pytest.mark.parametrize("ended", ["complete", "failed", "stopped"])
def test_a_prompt_after_the_end_begins_the_session_anew_at_attempt_one(linear: Linear, ended: str) -> None:
    linear.hears(happened(SESSION, seconds_ago=60))
    if ended == "stopped":
        linear.hears(happened(STOPPED, seconds_ago=30))
    else:
        linear.completes(linear.claimed(), success=ended == "complete")
    assert linear.hears(happened(PROMPTED)) == "begun_anew"
    claim = linear.claimed()
    assert claim["attempt"] == 1
    assert [said["body"] for said in claim["message"]["prompts"]] == ["Please also cover the ¥ case 🙏"]
    assert linear.sessions() == [("dispatched", None)]


def test_a_prompt_in_a_session_that_was_never_heard_of_starts_it(linear: Linear) -> None:
    assert linear.hears(happened(PROMPTED)) == "started"
    assert len(linear.claimed()["message"]["prompts"]) == 1


# -- routing ------------------------------------------------------------------------------------------------------------

LABEL_ROUTE = sql("""
    insert into label_routes (org_id, workspace_id, team_id, label, repo) values (:org_id, :workspace_id, :team_id, :label, :repo)
""")
PROJECT_ROUTE = sql(
    "insert into project_routes (org_id, workspace_id, project, repo) values (:org_id, :workspace_id, :project, :repo)"
)
NO_DEFAULT = sql("update team_routes set default_repo = null where org_id = :org_id")
SWITCHED_OFF = sql("update team_routes set auto_dispatch = false where org_id = :org_id")


def the_repo_of(linear: Linear, event: dict[str, Any], *serving: str) -> str:
    a_machine(linear.engine, linear.tenant, repos=serving)
    assert linear.hears(event) == "started"
    [[repo]] = linear.all("select repo from dispatch_sessions where org_id = :org_id")
    return str(repo)


def test_a_directive_in_the_text_comes_first(linear: Linear) -> None:
    linear.run(LABEL_ROUTE, team_id="", label=BUG, repo="quartz/label")
    event = happened(DELEGATED, data__description="look at [repo=quartz/directive] please")
    assert the_repo_of(linear, event, "quartz/directive", "quartz/label") == "quartz/directive"


@pytest.mark.parametrize(
    ("team_id", "label"), [("", BUG), (TEAM, "bug")], ids=["by id", "by name in its team"]
)
def test_a_label_comes_before_the_project_and_the_team(linear: Linear, team_id: str, label: str) -> None:
    linear.run(LABEL_ROUTE, team_id=team_id, label=label, repo="quartz/label")
    linear.run(PROJECT_ROUTE, project=PROJECT, repo="quartz/project")
    assert the_repo_of(linear, happened(DELEGATED), "quartz/label", "quartz/project") == "quartz/label"


def test_a_labels_name_counts_in_its_own_team_only(linear: Linear) -> None:
    linear.run(LABEL_ROUTE, team_id=OTHER_TEAM, label="Bug", repo="quartz/label")
    assert the_repo_of(linear, happened(DELEGATED), "quartz/label") == REPO


@pytest.mark.parametrize("project", [PROJECT, "Settlement rewrite"], ids=["by id", "by name"])
def test_a_project_comes_before_the_team(linear: Linear, project: str) -> None:
    linear.run(PROJECT_ROUTE, project=project, repo="quartz/project")
    assert (
        the_repo_of(linear, happened(SESSION if project != PROJECT else DELEGATED), "quartz/project")
        == "quartz/project"
    )


def test_labels_that_name_two_repositories_are_asked_about_and_a_prompt_that_names_one_starts_the_work(
    linear: Linear,
) -> None:
    linear.run(LABEL_ROUTE, team_id="", label=BUG, repo="quartz/one")
    linear.run(LABEL_ROUTE, team_id=TEAM, label="Bug", repo="quartz/two")
    assert linear.hears(happened(DELEGATED, seconds_ago=60)) == "no_route"
    linear.hears(happened(SESSION, seconds_ago=60))
    assert (linear.sessions(), linear.rows()) == ([("error", "no_route")], 0)
    [[candidates]] = linear.all(
        "select data -> 'candidates' from session_events where org_id = :org_id and type = 'dead_lettered'"
    )
    assert candidates == ["quartz/one", "quartz/two"]
    answer = happened(PROMPTED, agentActivity__content={"type": "prompt", "body": f"[repo={REPO}]"})
    assert linear.hears(answer) == "begun_anew"
    assert linear.claimed()["message"]["repo"] == REPO


def test_without_any_route_the_session_ends_in_error_and_has_no_row(linear: Linear) -> None:
    linear.run(NO_DEFAULT)
    assert linear.hears(happened(DELEGATED)) == "no_route"
    assert (linear.sessions(), linear.rows()) == ([("error", "no_route")], 0)


def test_without_a_machine_that_serves_the_repository_the_session_ends_in_error_and_has_no_row(
    engine: Engine, settings: Settings
) -> None:
    linear = a_linear(engine, settings, machines=False)
    assert linear.hears(happened(DELEGATED)) == "no_orchestrator"
    assert (linear.sessions(), linear.rows()) == ([("error", "no_orchestrator")], 0)
    [[message]] = linear.all("select error_message from dispatch_sessions where org_id = :org_id")
    assert REPO in message


def test_a_team_whose_switch_is_off_starts_nothing_whatever_the_text_says(linear: Linear) -> None:
    linear.run(SWITCHED_OFF)
    assert linear.hears(happened(DELEGATED, data__description=f"[repo={REPO}]")) == "ignored"
    assert linear.sessions() == []


def test_a_moved_issue_takes_its_new_names_and_is_routed_again_while_nobody_has_it(linear: Linear) -> None:
    other = a_machine(linear.engine, linear.tenant, repos=["quartz/platform"])
    team = sql("""
        insert into team_routes (org_id, workspace_id, team_id, default_repo) values (:org_id, :workspace_id, :team, 'quartz/platform')
    """)
    linear.run(team, team=OTHER_TEAM)
    linear.hears(happened(DELEGATED, seconds_ago=60))
    assert linear.hears(happened(MOVED)) == "moved"
    message = linear.claimed(other)["message"]
    assert (message["linearIdentifier"], message["teamId"], message["repo"]) == (
        "PLAT-77",
        OTHER_TEAM,
        "quartz/platform",
    )


def test_a_moved_issue_stays_with_the_machine_that_is_at_work_on_it(linear: Linear) -> None:
    a_machine(linear.engine, linear.tenant, repos=["quartz/platform"])
    team = sql("""
        insert into team_routes (org_id, workspace_id, team_id, default_repo) values (:org_id, :workspace_id, :team, 'quartz/platform')
    """)
    linear.run(team, team=OTHER_TEAM)
    linear.hears(happened(DELEGATED, seconds_ago=60))
    claim = linear.claimed()
    assert linear.hears(happened(MOVED)) == "moved"
    assert [
        row[0] for row in linear.all("select linear_identifier from dispatch_sessions where org_id = :org_id")
    ] == ["PLAT-77"]
    linear.completes(claim)


# -- who may speak ------------------------------------------------------------------------------------------------------


def written(linear: Linear) -> list[Any]:
    return linear.all(
        "select (select count(*) from webhook_deliveries), (select count(*) from dispatch_sessions) where cast(:org_id as uuid) is not null"
    )


@pytest.mark.parametrize(
    "signature", ["", "0" * 64, "sha256=", "not hex"], ids=["none", "wrong", "empty", "nonsense"]
)
def test_a_signature_that_is_missing_or_wrong_is_401_and_writes_nothing(
    linear: Linear, signature: str
) -> None:
    assert linear.send(happened(DELEGATED), signature=signature or " ").status == 401
    assert written(linear) == [(0, 0)]


def test_another_tenants_secret_acts_for_that_tenant_alone(linear: Linear, settings: Settings) -> None:
    """Two tenants have connected the same Linear organization: the tenant is the one whose secret verifies."""
    sealed = KeyRing.of(settings).seal("lin_wh_of_somebody_else")
    other = a_tenant(linear.engine, linear_organization_id=ORGANIZATION, webhook_secret=sealed)
    assert linear.send(happened(SESSION), secret="lin_wh_of_somebody_else").status == 200
    assert linear.sessions() == []
    assert linear.hears(happened(DELEGATED, seconds_ago=1), secret=SECRET) == "started"
    rows = linear.all("select org_id from dispatch_sessions where org_id = :org_id or true order by id")
    assert {row[0] for row in rows} == {other.org_id, linear.tenant.org_id}


def test_a_secret_that_no_key_opens_does_not_keep_other_tenants_from_being_heard(linear: Linear) -> None:
    a_tenant(linear.engine, linear_organization_id=ORGANIZATION, webhook_secret="sealed with a lost key")
    assert linear.send(happened(DELEGATED), secret="of nobody: all secrets are tried").status == 401
    assert linear.hears(happened(DELEGATED, seconds_ago=1)) == "started"


def test_a_secret_that_nobody_has_is_401(linear: Linear) -> None:
    assert linear.send(happened(DELEGATED), secret="lin_wh_unknown").status == 401


def test_the_previous_secret_verifies_while_a_rotation_is_under_way(
    linear: Linear, settings: Settings
) -> None:
    rotate = sql(
        "update workspaces set webhook_secret_previous = webhook_secret, webhook_secret = :new where org_id = :org_id"
    )
    linear.run(rotate, new=KeyRing.of(settings).seal("lin_wh_new"))
    assert linear.hears(happened(DELEGATED), secret=SECRET) == "started"
    assert linear.hears(happened(RELEASED, seconds_ago=-1), secret="lin_wh_new") == "cancelled"


@pytest.mark.parametrize("shift_ms", [61_000, -9 * 3_600_000], ids=["61 s ahead", "9 h old"])
def test_an_event_outside_its_time_is_401_and_writes_nothing(linear: Linear, shift_ms: int) -> None:
    event = happened(DELEGATED)
    event["webhookTimestamp"] += shift_ms
    assert linear.send(event).status == 401
    assert written(linear) == [(0, 0)]


def test_an_event_that_is_seven_hours_old_and_was_never_heard_is_acted_on(linear: Linear) -> None:
    event = happened(DELEGATED)
    event["webhookTimestamp"] -= 7 * 3_600_000
    assert linear.hears(event) == "started"


def test_characters_that_a_database_refuses_do_not_lose_the_event(linear: Linear) -> None:
    assert (
        linear.hears(happened(DELEGATED, data__title="zero \x00 width", data__description="half \x00 of it"))
        == "started"
    )
    assert "\x00" not in linear.claimed()["message"]["title"]


def test_lost_access_marks_the_workspace(linear: Linear) -> None:
    event = {"type": "OAuthApp", "action": "revoked", "organizationId": happened(DELEGATED)["organizationId"]}
    event |= {key: happened(DELEGATED)[key] for key in ("webhookTimestamp", "createdAt")}
    assert linear.hears(event) == "revoked"
    assert linear.all("select status from workspaces where org_id = :org_id") == [("revoked",)]

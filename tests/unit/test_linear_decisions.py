"""What starts work, and what is of no interest."""

from __future__ import annotations

from typing import Any

import pytest

from shared.linear_decisions import Ignored, Moved, Prompt, Revoked, Start, Stop
from shared.linear_events import decide
from shared.linear_issue import Issue, Label
from tests.linear_samples import (
    ABSENT,
    ALL,
    ASSIGNED,
    ASSIGNED_NOTICE,
    BUG,
    COMMENT,
    CREATED,
    DELEGATED,
    ISSUE,
    LABELLED,
    MIRA,
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
    a,
    sample,
)

# -- the samples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (CREATED, Start),
        (ASSIGNED, Start),
        (RELEASED, Stop),
        (DELEGATED, Start),
        (LABELLED, Ignored),
        (MOVED, Moved),
        (REMOVED, Stop),
        (TRASHED, Stop),
        (COMMENT, Ignored),
        (SESSION, Start),
        (PROMPTED, Prompt),
        (STOPPED, Stop),
        (ASSIGNED_NOTICE, Ignored),
        (UNASSIGNED_NOTICE, Stop),
    ],
)
def test_each_sample_asks_for_one_thing(name: str, kind: type[Any]) -> None:
    a(kind, decide(sample(name), US))


def test_every_sample_has_its_expectation() -> None:
    assert len(ALL) == 14


# -- starts --------------------------------------------------------------------------------------------------


def test_an_assigned_issue_is_read_with_all_that_routing_and_the_machine_need() -> None:
    start = a(Start, decide(sample(CREATED), US))

    assert start.issue == Issue(
        id=ISSUE,
        identifier="PAY-412",
        title="Rounding drops a cent on split refunds – ¥/€ “edge” 🧾",
        team_id="6b180ba8-0946-4485-8132-fa1450d6d5ef",
        url="https://linear.app/quartzworks/issue/PAY-412/rounding-drops-a-cent-on-split-refunds",
        description=sample(CREATED)["data"]["description"],
        priority=2,
        labels=(Label(BUG, "Bug"),),
        projects=(PROJECT, "Settlement rewrite"),
    )
    assert (start.agent_session_id, start.said, start.mention, start.asked_by) == (
        None,
        None,
        False,
        "Mira Okonkwo",
    )


@pytest.mark.parametrize("field", ["assigneeId", "delegateId"])
def test_a_new_issue_of_the_agents_starts_work_and_one_of_somebody_elses_does_not(field: str) -> None:
    mine = sample(
        CREATED, data__assigneeId=None, data__delegateId=None, data__assignee=None, data__delegate=None
    )
    assert isinstance(decide(mine, US), Ignored)
    mine["data"][field] = US
    assert isinstance(decide(mine, US), Start)
    assert isinstance(decide(mine, MIRA), Ignored)


@pytest.mark.parametrize("name", [ASSIGNED, DELEGATED])
@pytest.mark.parametrize(
    "updated_from", [ABSENT, None, {}, [], "assigneeId", {"updatedAt": "2026-11-30T09:14:02.118Z"}]
)
def test_an_update_that_does_not_say_the_owner_changed_starts_nothing(name: str, updated_from: Any) -> None:
    assert isinstance(decide(sample(name, updatedFrom=updated_from), US), Ignored)


@pytest.mark.parametrize("old", [None, "", 0, False, MIRA])
def test_being_named_in_what_changed_counts_and_not_the_old_value(old: Any) -> None:
    assert isinstance(decide(sample(ASSIGNED, updatedFrom={"assigneeId": old}), US), Start)


def test_a_change_of_the_assignee_alone_does_not_start_what_was_delegated_before() -> None:
    reassigned = sample(DELEGATED, updatedFrom={"assigneeId": None})
    assert isinstance(decide(reassigned, US), Ignored)


def test_while_the_agents_user_is_unknown_an_assignment_is_anybodys() -> None:
    for name in (CREATED, ASSIGNED, DELEGATED, RELEASED):
        assert isinstance(decide(sample(name), None), Ignored)


def test_delegating_an_issue_that_is_done_starts_work_and_editing_it_later_does_not_stop_it() -> None:
    done = {"id": "s", "type": "completed"}
    assert isinstance(decide(sample(DELEGATED, data__state=done), US), Start)
    edited = sample(DELEGATED, data__state=done, updatedFrom={"title": "before"})
    assert isinstance(decide(edited, US), Ignored)


@pytest.mark.parametrize("part", ["id", "identifier", "title", "teamId"])
@pytest.mark.parametrize("value", [ABSENT, None, "", "   ", 412, [], {}, "\x00"])
def test_an_issue_without_what_a_message_requires_starts_nothing_and_says_what_is_missing(
    part: str, value: Any
) -> None:
    for name, place in ((CREATED, "data"), (SESSION, "agentSession__issue")):
        event = sample(name, **{f"{place}__{part}": value})
        if part == "teamId":
            *_, holder = [event["data"] if place == "data" else event["agentSession"]["issue"]]
            holder["team"] = value if value is not ABSENT else None
        why = a(Ignored, decide(event, US)).why
        assert "without" in why
        assert part.removesuffix("Id") in why


def test_the_team_is_found_in_either_place_that_linear_writes_it() -> None:
    short = a(Start, decide(sample(CREATED, data__teamId=ABSENT), US))
    assert short.issue.team_id == "6b180ba8-0946-4485-8132-fa1450d6d5ef"


@pytest.mark.parametrize(
    ("value", "priority"),
    [
        (0, 0),
        (4, 4),
        (2.0, 2),
        (5, None),
        (-1, None),
        (2.5, None),
        (True, None),
        ("2", None),
        (10**400, None),
    ],
)
def test_a_priority_is_one_of_five_numbers(value: Any, priority: int | None) -> None:
    read = a(Start, decide(sample(CREATED, data__priority=value), US)).issue.priority
    assert read == priority
    assert not isinstance(read, bool)


def test_a_label_known_only_by_its_id_can_still_be_routed_by_it() -> None:
    start = a(Start, decide(sample(CREATED, data__labels=None, data__labelIds=[BUG, 7, None]), US))
    assert start.issue.labels == (Label(BUG, ""),)


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "ftp://linear.app/x", "//linear.app", "", 7, "https://" + "x" * 2000]
)
def test_only_a_web_address_is_kept_as_the_issues_url(url: Any) -> None:
    assert a(Start, decide(sample(CREATED, data__url=url), US)).issue.url is None


# -- access, and what is of no interest ----------------------------------------------------------------------


def test_the_removal_of_the_app_is_a_loss_of_access() -> None:
    assert isinstance(decide({"type": "OAuthApp", "action": "revoked"}, US), Revoked)
    assert isinstance(decide({"type": "OAuthApp", "action": "renamed"}, US), Ignored)


@pytest.mark.parametrize(
    "lists",
    [{}, {"removedTeamIds": ["a"]}, {"addedTeamIds": ["b"], "removedTeamIds": ["a"]}, {"addedTeamIds": []}],
)
def test_a_change_of_permissions_is_one_too(lists: dict[str, Any]) -> None:
    assert isinstance(
        decide({"type": "PermissionChange", "action": "teamAccessChanged", **lists}, US), Revoked
    )


def test_unless_it_only_adds_teams() -> None:
    added = {
        "type": "PermissionChange",
        "action": "teamAccessChanged",
        "addedTeamIds": ["b"],
        "removedTeamIds": [],
    }
    assert isinstance(decide(added, US), Ignored)


@pytest.mark.parametrize("kind", [None, 7, "issue", "Project", "NextYearsEvent", [], {}])
@pytest.mark.parametrize("action", [None, 7, "create", "created", "restore", [], {}])
def test_an_unknown_type_is_ignored(kind: Any, action: Any) -> None:
    assert isinstance(decide(sample(CREATED, type=kind, action=action), US), Ignored)


@pytest.mark.parametrize("name", ALL)
def test_an_unknown_action_of_a_known_type_is_ignored(name: str) -> None:
    assert isinstance(decide(sample(name, action="somethingNew"), US), Ignored)

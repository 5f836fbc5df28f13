"""What stops work, what moves it, and what the agent does itself."""

from __future__ import annotations

from typing import Any

import pytest

from shared.linear_decisions import Ignored, Moved, Start, Stop
from shared.linear_events import OURS, decide
from tests.linear_samples import (
    ABSENT,
    ASSIGNED,
    CREATED,
    DELEGATED,
    ISSUE,
    MIRA,
    MOVED,
    PROMPTED,
    RELEASED,
    REMOVED,
    SESSION,
    TRASHED,
    UNASSIGNED_NOTICE,
    US,
    a,
    sample,
)

# -- stops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["assigneeId", "delegateId"])
def test_an_issue_taken_from_the_agent_stops(field: str) -> None:
    taken = sample(RELEASED, updatedFrom={field: US})
    assert a(Stop, decide(taken, US)) == Stop("the issue was taken from the agent", issue_id=ISSUE)


@pytest.mark.parametrize(
    "actor", [ABSENT, None, {"id": "x", "type": "integration"}, {"type": "oauthClient"}, 7]
)
def test_it_stops_whoever_took_it_except_ourselves(actor: Any) -> None:
    assert isinstance(decide(sample(RELEASED, actor=actor), US), Stop)
    assert decide(sample(RELEASED, actor={"id": US, "type": "user"}), US) == OURS


def test_an_issue_that_is_still_the_agents_in_the_other_role_goes_on() -> None:
    still_delegated = sample(RELEASED, data__delegateId=US, updatedFrom={"assigneeId": US})
    assert isinstance(decide(still_delegated, US), Ignored)


def test_an_issue_that_others_hand_around_is_no_concern_of_the_agents() -> None:
    assert isinstance(
        decide(sample(RELEASED, updatedFrom={"assigneeId": MIRA, "delegateId": None}), US), Ignored
    )


@pytest.mark.parametrize("actor", [None, {"id": MIRA, "type": "user"}, {"id": "x", "type": "integration"}])
@pytest.mark.parametrize("name", [REMOVED, TRASHED])
def test_an_issue_in_the_trash_stops_both_ways(name: str, actor: Any) -> None:
    assert a(Stop, decide(sample(name, actor=actor), US)).issue_id == ISSUE


def test_a_deleted_issue_stops_even_if_nothing_but_its_id_is_left() -> None:
    assert a(Stop, decide(sample(REMOVED, data={"id": ISSUE}), None)).issue_id == ISSUE
    assert isinstance(decide(sample(REMOVED, data={}), US), Ignored)


def test_an_archived_issue_stops_and_one_taken_out_of_the_archive_starts_nothing() -> None:
    archived = sample(TRASHED, data__trashed=None)
    assert a(Stop, decide(archived, US)).reason == "the issue was archived"
    restored = sample(
        TRASHED,
        data__trashed=None,
        data__archivedAt=None,
        updatedFrom={"trashed": True, "archivedAt": "2026-11-30T11:30:00.000Z"},
    )
    assert isinstance(decide(restored, US), Ignored)


@pytest.mark.parametrize("trashed", [False, None, "true", 1, "yes"])
def test_only_true_is_trashed(trashed: Any) -> None:
    assert isinstance(decide(sample(TRASHED, data__trashed=trashed, data__archivedAt=None), US), Ignored)


def closed(state: str, actor: Any, **changes: Any) -> dict[str, Any]:
    return sample(
        DELEGATED,
        data__state={"id": "s", "type": state},
        updatedFrom={"stateId": "before"},
        actor=actor,
        **changes,
    )


@pytest.mark.parametrize("state", ["completed", "canceled", "duplicate"])
def test_an_issue_that_a_human_closes_stops(state: str) -> None:
    human = {"id": MIRA, "type": "user"}
    assert a(Stop, decide(closed(state, human), US)).reason == f"the issue was marked {state}"
    assert isinstance(decide(closed(state, {"id": MIRA}), US), Stop)


@pytest.mark.parametrize(
    "actor", [None, {}, [], {"id": "x", "type": "integration"}, {"id": "x", "type": "oauthClient"}]
)
def test_an_issue_that_no_human_closes_goes_on(actor: Any) -> None:
    assert isinstance(decide(closed("completed", actor), US), Ignored)


@pytest.mark.parametrize("state", ["started", "unstarted", "backlog", "triage", "a type of next year"])
def test_another_state_is_not_the_end(state: str) -> None:
    assert isinstance(decide(closed(state, {"id": MIRA, "type": "user"}), US), Ignored)


def test_taking_an_issue_away_wins_over_moving_it() -> None:
    moved_away = sample(MOVED, data__delegateId=None, data__delegate=None)
    moved_away["updatedFrom"]["delegateId"] = US
    assert isinstance(decide(moved_away, US), Stop)


def test_an_unassignment_notice_stops_the_issue_it_names() -> None:
    assert a(Stop, decide(sample(UNASSIGNED_NOTICE), US)).issue_id == ISSUE
    assert a(Stop, decide(sample(UNASSIGNED_NOTICE), None)).issue_id == ISSUE
    short = sample(UNASSIGNED_NOTICE, notification__issueId=None)
    assert a(Stop, decide(short, US)).issue_id == ISSUE


def test_an_unassignment_notice_of_our_own_doing_or_for_another_agent_stops_nothing() -> None:
    assert decide(sample(UNASSIGNED_NOTICE, notification__actorId=US), US) == OURS
    assert isinstance(decide(sample(UNASSIGNED_NOTICE), "another app's user"), Ignored)
    assert isinstance(decide(sample(UNASSIGNED_NOTICE, notification=None), US), Ignored)


# -- moves ---------------------------------------------------------------------------------------------------


def test_a_move_to_another_team_brings_new_names_for_the_same_id() -> None:
    moved = a(Moved, decide(sample(MOVED), US)).issue
    assert (moved.id, moved.identifier, moved.team_id) == (
        ISSUE,
        "PLAT-77",
        "60fc6939-52fe-407a-b320-1ea0c0b4e53a",
    )
    assert moved.labels == ()


def test_a_move_that_also_delegates_starts_work_under_the_new_names() -> None:
    event = sample(MOVED)
    event["updatedFrom"]["delegateId"] = None
    assert a(Start, decide(event, US)).issue.identifier == "PLAT-77"


# -- our own actions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CREATED, ASSIGNED, RELEASED, DELEGATED, MOVED, REMOVED, TRASHED])
def test_what_the_agent_does_itself_asks_for_nothing(name: str) -> None:
    assert decide(sample(name, actor={"id": US, "type": "user"}), US) == OURS


def test_a_session_or_a_prompt_of_the_agents_own_making_asks_for_nothing() -> None:
    assert decide(sample(SESSION, agentSession__creatorId=US), US) == OURS
    assert decide(sample(SESSION, agentSession__creatorId=US), None) == OURS
    assert decide(sample(PROMPTED, agentActivity__userId=US), US) == OURS

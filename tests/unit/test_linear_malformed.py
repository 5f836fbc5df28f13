"""No event, however malformed, raises or brings forth what the database refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.linear import envelope
from shared.linear_decisions import Ignored, Moved, Prompt, Revoked, Start, Stop
from shared.linear_events import decide
from shared.linear_issue import issue_message
from tests.linear_samples import (
    ALL,
    CREATED,
    US,
    a,
    sample,
)


def values(decision: object) -> Iterator[str]:
    """Every string in a decision."""
    if isinstance(decision, str):
        yield decision
    elif isinstance(decision, tuple):
        for item in decision:
            yield from values(item)
    elif decision is not None and not isinstance(decision, int):
        for field in type(decision).__dataclass_fields__:  # type: ignore[attr-defined]
            yield from values(getattr(decision, field))


def poisoned(value: Any) -> Any:
    """The event with U+0000 and a lone surrogate after every string that is not a keyword of the protocol."""
    if isinstance(value, dict):
        return {
            key: item if key in ("type", "action", "signal") else poisoned(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poisoned(item) for item in value]
    return f"{value}\x00\ud83d" if isinstance(value, str) else value


@pytest.mark.parametrize("name", ALL)
def test_no_character_that_postgres_refuses_gets_through(name: str) -> None:
    decision = decide(poisoned(sample(name)), US + "\ufffd")
    assert type(decision) is type(decide(sample(name), US))
    for text in values(decision):
        text.encode()
        assert "\x00" not in text


def test_an_emoji_written_as_two_escapes_is_still_an_emoji() -> None:
    event = json.loads(json.dumps(sample(CREATED), ensure_ascii=True))
    assert a(Start, decide(event, US)).issue.title.endswith("🧾")


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from paths(child, (*path, key))


@pytest.mark.parametrize("name", ALL)
def test_whatever_stands_in_whichever_field_nothing_raises_and_nothing_unstorable_comes_out(
    name: str,
) -> None:
    wrongs: tuple[Any, ...] = (
        None,
        7,
        -1.5,
        True,
        "",
        "text",
        "x" * 70,
        [],
        [None],
        {},
        {"id": []},
        float("nan"),
    )
    for path in paths(sample(name)):
        for wrong in wrongs:
            # The event is wrapped, so that the empty path replaces the whole of it.
            wrapped: Any = {"event": sample(name)}
            place, last = wrapped, "event"
            for key in path:
                place, last = place[last], key
            place[last] = wrong
            event = wrapped["event"]
            envelope(event)
            decision = decide(event, US)
            assert isinstance(decision, Start | Prompt | Stop | Moved | Revoked | Ignored)
            if isinstance(decision, Start | Prompt | Moved) and decision.issue is not None:
                json.dumps(issue_message(decision.issue, workspace_id="w", repo="a/b"), allow_nan=False)
                assert (
                    max(len(decision.issue.id), len(decision.issue.identifier), len(decision.issue.team_id))
                    <= 64
                )


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = sorted({key for name in ALL for path in paths(sample(name)) for key in path if isinstance(key, str)})
EVENT_LIKE = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["Issue", "AgentSessionEvent", "AppUserNotification", "Comment", "OAuthApp", "PermissionChange"]
        ),
        "action": st.sampled_from(
            [
                "create",
                "update",
                "remove",
                "created",
                "prompted",
                "revoked",
                "issueUnassignedFromYou",
                "issueAssignedToYou",
            ]
        ),
    },
    optional={
        key: ANY_JSON | st.dictionaries(st.sampled_from(KEYS), ANY_JSON | st.just(US), max_size=8)
        for key in (
            "data",
            "actor",
            "updatedFrom",
            "agentSession",
            "agentActivity",
            "notification",
            "promptContext",
            "guidance",
            "appUserId",
            "createdAt",
            "webhookTimestamp",
            "previousComments",
            "addedTeamIds",
            "removedTeamIds",
        )
    },
)


@settings(max_examples=100, deadline=None)
@given(event=ANY_JSON | EVENT_LIKE, app_user_id=st.none() | st.just(US))
def test_any_json_is_decided_upon(event: Any, app_user_id: str | None) -> None:
    decision = decide(event, app_user_id)
    envelope(event)
    for text in values(decision):
        text.encode()
        assert "\x00" not in text

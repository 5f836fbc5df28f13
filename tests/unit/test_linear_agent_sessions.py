"""What a person asks of the agent in an agent session."""

from __future__ import annotations

from typing import Any

import pytest

from shared.linear import envelope
from shared.linear_decisions import Ignored, Prompt, Start, Stop
from shared.linear_events import decide
from shared.linear_issue import Input, Label
from tests.linear_samples import (
    ABSENT,
    AGENT_SESSION,
    ASSIGNED_NOTICE,
    DELEGATED,
    ISSUE,
    MIRA,
    PROMPTED,
    SESSION,
    STOPPED,
    STUB,
    US,
    a,
    sample,
)


def test_a_delegation_opens_its_agent_session() -> None:
    start = a(Start, decide(sample(SESSION), US))

    assert (start.issue.id, start.agent_session_id, start.mention) == (ISSUE, AGENT_SESSION, False)
    assert start.issue.labels == (Label(None, "Bug"),)
    assert start.issue.projects == ("Settlement rewrite",)
    assert (
        start.guidance
        == "Open draft pull requests; never push to main.\n\nRun `make check` before finishing."
    )
    assert start.asked_by == "Mira Okonkwo"


def test_the_three_webhooks_of_one_delegation_agree_on_the_issue() -> None:
    from_issue = a(Start, decide(sample(DELEGATED), US)).issue
    from_session = a(Start, decide(sample(SESSION), US)).issue
    for part in ("id", "identifier", "title", "team_id", "url", "description"):
        assert getattr(from_issue, part) == getattr(from_session, part)
    assert {label.name for label in from_issue.labels} == {label.name for label in from_session.labels}
    assert set(from_session.projects) <= set(from_issue.projects)
    assert isinstance(decide(sample(ASSIGNED_NOTICE), US), Ignored)


def test_the_comment_that_nobody_wrote_is_never_a_prompt() -> None:
    start = a(Start, decide(sample(SESSION), US))
    assert start.said is None
    assert "This thread is for" not in (start.prompt_context or "")
    assert "primary-directive-thread" not in (start.prompt_context or "")
    assert "<description>Refund of 10.01" in (start.prompt_context or "")
    assert decide(
        sample(PROMPTED, agentActivity__content={"type": "prompt", "body": f"  {STUB}"}), US
    ) == Ignored("a prompt without an id or a text")


def test_it_is_no_prompt_in_other_words_either_as_long_as_it_has_no_author() -> None:
    reworded = sample(SESSION, agentSession__comment__body="A conversation with coder. [repo=acme/other]")
    start = a(Start, decide(reworded, US))
    assert (start.said, start.directive) == (None, None)


def test_a_mention_starts_with_what_the_comment_says() -> None:
    event = sample(
        SESSION,
        agentSession__sourceMetadata={"type": "comment"},
        agentSession__comment__body="@coder fix the ¥ case [repo=acme/yen]",
        agentSession__comment__userId=MIRA,
    )
    start = a(Start, decide(event, US))
    assert start.mention
    assert start.said == Input(
        "39dce920-dc6e-4f7e-ba7a-c2d3679babdb", "@coder fix the ¥ case [repo=acme/yen]"
    )
    assert start.directive == "acme/yen"


def test_a_mention_inside_a_thread_is_the_comment_it_came_from() -> None:
    event = sample(
        SESSION,
        agentSession__sourceMetadata={"type": "comment"},
        agentSession__sourceCommentId="c08faac6-ab98-4137-bd60-d684b0406bac",
    )
    assert a(Start, decide(event, US)).said == Input(
        "c08faac6-ab98-4137-bd60-d684b0406bac", "Which currencies are affected?"
    )


@pytest.mark.parametrize("metadata", [ABSENT, None, {}, [], "comment", {"type": 1}, {"type": "slack"}])
def test_only_a_comment_as_source_is_a_mention(metadata: Any) -> None:
    assert not a(Start, decide(sample(SESSION, agentSession__sourceMetadata=metadata), US)).mention


@pytest.mark.parametrize("creator", [ABSENT, None])
def test_a_session_without_a_creator_starts_all_the_same(creator: Any) -> None:
    event = sample(SESSION, agentSession__creator=creator, agentSession__creatorId=creator)
    assert a(Start, decide(event, US)).asked_by is None


@pytest.mark.parametrize("issue", [ABSENT, None, [], "PAY-412"])
def test_a_session_without_an_issue_starts_nothing(issue: Any) -> None:
    assert isinstance(decide(sample(SESSION, agentSession__issue=issue), US), Ignored)


@pytest.mark.parametrize("name", [SESSION, PROMPTED, STOPPED])
def test_a_session_of_another_agent_is_not_ours(name: str) -> None:
    assert isinstance(decide(sample(name), "another app's user"), Ignored)
    assert not isinstance(decide(sample(name), None), Ignored)


def test_the_event_names_the_agents_user() -> None:
    assert envelope(sample(SESSION)).app_user_id == US


def test_a_prompt_is_told_apart_by_its_activity() -> None:
    prompt = a(Prompt, decide(sample(PROMPTED), US))
    assert prompt.said == Input("e5c8a63c-f3c1-4b25-b1a5-163b6dffc1cf", "Please also cover the ¥ case 🙏")
    assert (prompt.agent_session_id, prompt.issue_id, prompt.asked_by) == (
        AGENT_SESSION,
        ISSUE,
        "Mira Okonkwo",
    )
    assert prompt.issue is not None
    again = a(Prompt, decide(sample(PROMPTED, agentActivity__id="another"), US))
    assert again.said != prompt.said
    assert again.said.body == prompt.said.body


def test_a_prompt_can_answer_which_repository_is_meant() -> None:
    answer = sample(PROMPTED, agentActivity__content={"type": "prompt", "body": "[repo=acme/api] please"})
    answer["agentSession"]["issue"]["description"] = "[repo=acme/web]"
    assert a(Prompt, decide(answer, US)).directive == "acme/api"
    answer["agentActivity"]["content"]["body"] = "go on"
    assert a(Prompt, decide(answer, US)).directive == "acme/web"


def test_a_prompt_needs_no_issue_but_an_id_and_a_text() -> None:
    assert a(Prompt, decide(sample(PROMPTED, agentSession__issue=None), US)).issue is None
    contents: tuple[Any, ...] = (None, {}, [], "text", {"body": None}, {"body": " "}, {"body": 7})
    for content in contents:
        assert isinstance(decide(sample(PROMPTED, agentActivity__content=content), US), Ignored)
    assert isinstance(decide(sample(PROMPTED, agentActivity__id=None), US), Ignored)
    assert isinstance(decide(sample(PROMPTED, agentActivity=None), US), Ignored)


@pytest.mark.parametrize("signal", [ABSENT, None, "continue", "select", "auth"])
def test_a_text_with_a_known_signal_or_none_is_a_prompt(signal: Any) -> None:
    assert isinstance(decide(sample(PROMPTED, agentActivity__signal=signal), US), Prompt)


def test_a_text_with_an_unknown_signal_is_ignored() -> None:
    assert isinstance(decide(sample(PROMPTED, agentActivity__signal="rewind"), US), Ignored)


def test_a_stop_needs_neither_text_nor_issue() -> None:
    assert decide(sample(STOPPED), US) == Stop(
        "stopped in Linear", issue_id=ISSUE, agent_session_id=AGENT_SESSION
    )
    bare = sample(STOPPED, agentActivity__content=None, agentSession__issue=None, agentSession__issueId=None)
    assert decide(bare, US) == Stop("stopped in Linear", issue_id=None, agent_session_id=AGENT_SESSION)


def test_a_session_is_found_by_its_activity_when_it_is_not_described() -> None:
    event = sample(STOPPED, agentSession=None)
    assert a(Stop, decide(event, US)).agent_session_id == AGENT_SESSION
    event["agentActivity"]["agentSessionId"] = None
    assert isinstance(decide(event, US), Ignored)

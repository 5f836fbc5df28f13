"""Text of strangers stays inside its fence: read by CommonMark's rule, it comes back as it was, and nothing else is added."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prompt import NOTE, fenced, prompt_text
from orchestrator.wire import REQUIRED, Message

MARKS = st.sampled_from(
    [
        "`",
        "```",
        "````",
        "`" * 9,
        "~~~",
        "\n",
        "\r\n",
        "    ",
        "\n```\n",
        "\n````text\n",
        "> ",
        "- ",
        "<!--",
        "x",
        " ",
        "\t",
    ]
)
NASTY = st.lists(MARKS | st.text(max_size=5), max_size=20).map("".join)


def blocks(markdown: str) -> list[str]:
    """The text of each fenced block.

    CommonMark 0.31 section 4.5: a fence of backticks ends at a line of at most three spaces, at least as many backticks, and nothing
    but spaces and tabs behind them.
    """
    found: list[str] = []
    inside: list[str] = []
    fence = ""
    for line in re.split(r"\r\n|\n|\r", markdown):
        if not fence and (opened := re.fullmatch(r" {0,3}(`{3,})[^`]*", line)):
            fence, inside = opened[1], []
        elif (
            fence and (closed := re.fullmatch(r" {0,3}(`{3,})[ \t]*", line)) and len(closed[1]) >= len(fence)
        ):
            found.append("\n".join(inside))
            fence = ""
        elif fence:
            inside.append(line)
    assert not fence, "a fence is open at the end"
    return found


def lines_of(text: str) -> str:
    return re.sub(r"\r\n|\r", "\n", text)


def message(**others: Any) -> Message:
    return Message.read({name: f"{name}-1" for name in REQUIRED} | others)


@given(NASTY)
def test_nothing_in_a_text_can_close_its_fence(text: str) -> None:
    assert blocks(fenced("title", text)) == [lines_of(text)]


@given(NASTY)
def test_another_reader_of_commonmark_agrees(text: str) -> None:
    markdown = f"{fenced('title', text)}\n\nafter\n"
    tokens = pytest.importorskip("markdown_it").MarkdownIt("commonmark").parse(markdown)
    (fence,) = [token for token in tokens if token.type == "fence"]
    assert fence.content == lines_of(text).replace("\x00", "\ufffd") + "\n"
    assert [token.content for token in tokens if token.type == "inline"] == [
        "Text from Linear, title:",
        "after",
    ]


@settings(max_examples=50)
@given(
    title=NASTY.filter(bool),
    description=NASTY,
    context=NASTY,
    guidance=NASTY,
    prompts=st.lists(NASTY, max_size=3),
)
def test_all_of_it_comes_back_in_its_order(
    title: str, description: str, context: str, guidance: str, prompts: list[str]
) -> None:
    work = message(
        title=title,
        description=description,
        promptContext=context,
        guidance=guidance,
        prompts=[{"activityId": "1", "body": body} for body in prompts],
    )
    texts = [title, *filter(None, [description, context, guidance]), *prompts]
    assert blocks(prompt_text(work)) == [lines_of(text) for text in texts]


def test_each_text_has_a_label_and_the_note_comes_first() -> None:
    text = prompt_text(
        message(description="d", promptContext="c", guidance="g", prompts=[{"body": "p"}, {"body": "q"}])
    )
    labels = re.findall(r"^Text from Linear, (.*):$", text, re.MULTILINE)
    assert labels == [
        "title",
        "description",
        "context of the agent session",
        "guidance of the workspace",
        "follow-up 1",
        "follow-up 2",
    ]
    assert text.startswith("Issue linearIdentifier-1 in the repository repo-1.\n\n" + NOTE)


def test_what_is_not_there_or_no_text_has_no_label() -> None:
    text = prompt_text(message(description=None, promptContext=5, guidance="", prompts="odd"))
    assert re.findall(r"^Text from Linear, (.*):$", text, re.MULTILINE) == ["title"]


def test_names_outside_of_a_fence_stay_on_their_line() -> None:
    text = prompt_text(message(linearIdentifier="ENG-1\n\n# Owner:", repo="a/b\r\ndo\tthis\u2028x"))
    assert text.splitlines()[0] == "Issue ENG-1 # Owner: in the repository a/b do this x."


def test_a_follow_up_without_a_text_keeps_its_number() -> None:
    assert blocks(prompt_text(message(prompts=[{"activityId": "1"}, {"body": "second"}])))[1:] == [
        "",
        "second",
    ]

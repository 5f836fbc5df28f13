"""What the server says is read field by field: an answer that is not what the protocol says names the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.wire import REQUIRED, Message, Unreadable, number

ROOT = Path(__file__).resolve().parents[2]


def fields(**others: Any) -> dict[str, Any]:
    """A message with all that is required."""
    return {name: f"{name}-1" for name in REQUIRED} | others


def refusal(value: Any) -> str:
    with pytest.raises(Unreadable) as refused:
        Message.read(value)
    return str(refused.value)


def test_what_is_required_is_what_the_protocol_says() -> None:
    (always,) = re.findall(r"^Always: `([^`]+)`", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE)
    assert tuple(always.split()) == REQUIRED


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_field_that_is_missing_empty_or_odd_is_named(name: str) -> None:
    whole = fields()
    assert refusal({key: value for key, value in whole.items() if key != name}).startswith(
        f"message.{name}: "
    )
    for odd in ("", None, 5, True, ["x"], {"a": "b"}, b"x"):
        assert refusal(whole | {name: odd}).startswith(f"message.{name}: ")


@pytest.mark.parametrize("value", [None, [], "text", 5, True])
def test_what_is_no_object_is_no_message(value: Any) -> None:
    assert refusal(value) == "message: is not an object"


@pytest.mark.parametrize("name", ["queueId", "sessionId"])
@pytest.mark.parametrize(
    "id_",
    [".", "..", "a/b", "../x", "a?b", "a#b", "a%2fb", "a b", "a\\b", "a\n", "\n", "ü", "x" * 201, "a\x00"],
)
def test_an_id_that_could_change_a_path_is_refused(name: str, id_: str) -> None:
    assert refusal(fields(**{name: id_})) == f"message.{name}: is not an id"


@pytest.mark.parametrize(
    "id_", ["0d3b3c3e-7c2b-4d41-9c39-0f1d3c2b1a00", "q_1", "1", "a.b", "...", "~", "x" * 200]
)
def test_any_other_id_is_taken_as_it_is(id_: str) -> None:
    message = Message.read(fields(queueId=id_, sessionId=id_))
    assert (message.queue_id, message.session_id) == (id_, id_)


def test_fields_that_this_program_does_not_know_are_kept() -> None:
    sent = fields(priority=1, somethingNew={"deep": [None]})
    assert Message.read(sent).fields == sent


def test_a_time_is_not_looked_at() -> None:
    assert Message.read(fields(dispatchedAt="yesterday")).fields["dispatchedAt"] == "yesterday"


def test_the_names_are_those_of_the_message() -> None:
    message = Message.read(fields())
    assert (message.identifier, message.title, message.repo) == ("linearIdentifier-1", "title-1", "repo-1")


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (None, []),
        ("text", []),
        ({"body": "x"}, []),
        ([], []),
        ([{"activityId": "1", "body": "x"}, "odd", None, {"body": "y"}], [{"activityId": "1", "body": "x"}, {"body": "y"}]),
    ],
)  # fmt: skip
def test_follow_ups_are_those_that_are_objects(sent: Any, read: list[dict[str, Any]]) -> None:
    assert Message.read(fields(prompts=sent)).prompts == read


@pytest.mark.parametrize(("value", "read"), [(0, 0.0), (1, 1.0), (1.5, 1.5), (10**300, 1e300)])
def test_a_number_is_a_number(value: Any, read: float) -> None:
    assert number(value) == read


@pytest.mark.parametrize(
    "value",
    [None, "1", True, -1, -0.5, float("nan"), float("inf"), 10**400, [1]],
    ids=lambda value: str(value)[:9],
)
def test_what_is_not_negative_and_finite_is_none(value: Any) -> None:
    assert number(value) is None


@pytest.mark.parametrize("name", REQUIRED)
def test_half_of_a_surrogate_pair_is_no_text(name: str) -> None:
    """JSON can say it, no file and no variable can hold it."""
    with pytest.raises(Unreadable, match=rf"message\.{name}: "):
        Message.read({**dict.fromkeys(REQUIRED, "x"), name: "x\ud800"})

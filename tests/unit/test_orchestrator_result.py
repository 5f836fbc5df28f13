"""What an agent says on its standard output is read with patience: noise, odd fields and broken JSON cost nothing but themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.result import Progress, facts_in, last_object, progress_in, storable
from shared.messages import CompleteRequest

# -- progress -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("::progress 40 reading the code", Progress(40, "reading the code")),
        ("::progress 0", Progress(0, None)),
        ("::progress 100%", Progress(100, None)),
        ("::progress 41.9 tests", Progress(41, "tests")),
        ("  ::progress\t7%   two  words \r\n", Progress(7, "two  words")),
        ("::progress 5 ::progress 6", Progress(5, "::progress 6")),
        ("::progress 5 a\x00b\udc80", Progress(5, "ab?")),
        ("::progress 5 " + "x" * 3000, Progress(5, "x" * 2000)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_of_progress_says_how_far_it_is_and_what_it_does(line: str, progress: Progress) -> None:
    assert progress_in(line) == progress


@pytest.mark.parametrize(
    "line",
    ["", "::progress", "::progress 101", "::progress -1", "::progress x", "::progress 1000", "::progress 40x",
     "::progress40", ":progress 40", "and ::progress 40"],
)  # fmt: skip
def test_any_other_line_is_none(line: str) -> None:
    assert progress_in(line) is None


# -- the object at the end ----------------------------------------------------------------------------------------------

NESTED = {
    "prUrl": "https://x/1",
    "by": {"model": {"name": "m"}},
    "list": [{"a": 1}, {"b": [{"c": 2}]}],
    "summary": "} {\n]",
}


@pytest.mark.parametrize("indent", [None, 0, 1, 2, "\t"])
@pytest.mark.parametrize(
    "before", ["", "noise\n", "{ not json\n", '{"first": 1}\n', "[\n", "}\n", "é\x00{}x\n"]
)
@pytest.mark.parametrize(
    "after", ["", "\n", "\nnoise", "\nnoise { with } braces\n", "\n{ not json", "\n  {\n\n", " bye"]
)
def test_the_last_object_is_found_on_one_line_or_several_whatever_is_around_it(
    indent: int | str | None, before: str, after: str
) -> None:
    assert last_object(before + json.dumps(NESTED, indent=indent) + after) == NESTED


def test_of_several_the_last_counts() -> None:
    assert last_object('{"a": 1}\n \t{"b": 2}\n') == {"b": 2}
    assert last_object('{"a": 1}\n{"b": 2}\n') == {"b": 2}
    assert last_object(f'{json.dumps(NESTED, indent=2)}\n{{"b": 2}}') == {"b": 2}
    assert last_object(f'{{"b": 2}}\n{json.dumps(NESTED, indent=2)}') == NESTED


@pytest.mark.parametrize(
    "text",
    ["", "\n", "noise", "[1, 2]", '"text"', "[{}]x", "{", "{}}", 'noise {"a": 1}', "{'a': 1}", '{"a": 1,}', '{"a": ' + "1" * 5000 + "}",
     '{"a":\n' * 3000, '{"broken": nonsense,\n"list": [\n{"a": 1},\n{"prUrl": "b"}\n]}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_where_there_is_none_it_is_empty(text: str) -> None:
    assert last_object(text) == {}


def test_an_object_that_was_cut_at_its_beginning_is_not_one_of_its_inner_ones() -> None:
    whole = json.dumps(NESTED, indent=2)
    for cut in range(1, len(whole)):
        assert last_object(whole[cut:]) == {}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(), _JSON, max_size=4),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
    before=st.text(max_size=30),
)
def test_any_object_at_the_end_is_found(
    value: dict[str, Any], indent: int | None, ascii_only: bool, before: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert last_object(f"{before}\n{text}\n") == value


# -- its fields ---------------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "prUrl": "https://github.com/a/b/pull/1",
    "summary": "Done.",
    "tokensUsed": 1200,
    "costUsd": 0.5,
    "errorMessage": "none",
}
NO_TEXT: list[Any] = [5, True, ["x"], {"a": 1}]
ODD: dict[str, list[Any]] = {
    "prUrl": [*NO_TEXT, "", "x", "ftp://x/1", "javascript:alert(1)", "https://", "https://x/\n1", "https://[x", "https://x/" + "y" * 2000,
              "https://x/\u202e1", "//x/1"],
    "summary": NO_TEXT,
    "tokensUsed": ["1", True, [1], -1, 1.5, float("nan"), float("inf"), 2**53 + 1, 10**400],
    "costUsd": ["1", True, [1], -0.1, float("nan"), float("inf"), 1_000_001, 10**400],
    "errorMessage": NO_TEXT,
}  # fmt: skip


def test_good_fields_are_taken_and_others_are_not_looked_at() -> None:
    assert facts_in({**GOOD, "success": False, "attempt": 9, "more": {}}) == (GOOD, [])
    assert facts_in({}) == ({}, [])
    assert facts_in(dict.fromkeys(GOOD)) == ({}, [])


@pytest.mark.parametrize(
    ("name", "odd"),
    [(name, odd) for name, values in ODD.items() for odd in values],
    ids=lambda value: str(value)[:20],
)
def test_an_odd_field_is_named_and_does_not_lose_the_others(name: str, odd: Any) -> None:
    others = {key: value for key, value in GOOD.items() if key != name}
    assert facts_in({**GOOD, name: odd}) == (others, [name])


@pytest.mark.parametrize(
    ("name", "said", "taken"),
    [
        ("tokensUsed", 1200.0, 1200),
        ("tokensUsed", 2**53, 2**53),
        ("tokensUsed", 0, 0),
        ("costUsd", 3, 3.0),
        ("costUsd", 0, 0.0),
        ("summary", "", ""),
        ("summary", "x" * 10_001, "x" * 10_000),
        ("summary", "a\x00b\ud800c\U0001f600", "ab?c\U0001f600"),
        ("errorMessage", "two\nlines\ttab", "two\nlines\ttab"),
        ("prUrl", " https://x/1 ", "https://x/1"),
        ("prUrl", "HTTP://X/ü?a=b#c", "HTTP://X/ü?a=b#c"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_can_be_mended_is(name: str, said: Any, taken: Any) -> None:
    facts, odd = facts_in({name: said})
    assert (facts, odd) == ({name: taken}, [])
    assert type(facts[name]) is type(taken)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "prUrl": st.sampled_from(["http", " https", "HTTPS", "x"]).flatmap(
                lambda scheme: st.text(max_size=20).map(lambda rest: f"{scheme}://{rest}")
            )
            | _JSON,
            "summary": st.text(st.characters()) | _JSON,
            "tokensUsed": st.integers() | st.floats() | _JSON,
            "costUsd": st.integers() | st.floats() | _JSON,
            "errorMessage": st.text(st.characters()) | _JSON,
        },
    )
)
def test_the_server_takes_whatever_is_left(said: dict[str, Any]) -> None:
    facts, _ = facts_in(said)
    CompleteRequest.model_validate_json(json.dumps({"success": True, **facts}))


@given(st.text(st.characters()))
def test_what_is_storable_is_utf8_without_nul_and_otherwise_the_same(text: str) -> None:
    kept = storable(text)
    assert "\x00" not in kept
    assert kept.encode() == text.replace("\x00", "").encode(errors="replace")

"""The log says what happened and to which row, and has no place for a payload, a token or a secret."""

from __future__ import annotations

import ast
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pg8000
import pytest
from sqlalchemy.exc import ProgrammingError

from shared.errors import ConfigurationError, NotFound
from shared.log import log, log_exception, log_from, log_request, note

ROOT = Path(__file__).resolve().parents[2]
ID = uuid.UUID(int=7)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(autouse=True)
def _everything_is_written() -> Iterator[None]:
    log_from("DEBUG")
    yield
    log_from("INFO")


def written(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one line that was written."""
    (line,) = capsys.readouterr().out.splitlines()
    event: dict[str, Any] = json.loads(line)
    return event


def test_an_event_is_one_line_with_severity_message_and_ids(capsys: pytest.CaptureFixture[str]) -> None:
    log("INFO", "claimed", queue_id=ID, attempt=2, org_id=None)
    assert written(capsys) == {"severity": "INFO", "message": "claimed", "queue_id": str(ID), "attempt": 2}


@pytest.mark.parametrize("name", ["payload", "token", "secret", "body", "title", "message_body", "headers"])
def test_what_must_not_be_written_has_no_name(name: str) -> None:
    with pytest.raises(TypeError, match="is not a field of the log"):
        log("INFO", "claimed", **{name: "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_id", str(ID)),
        ("queue_id", {"title": "x"}),
        ("attempt", "2"),
        ("attempt", True),
        ("attempt", 2.0),
        ("event", {"title": "x"}),
        ("event", ["x"]),
        ("event", b"x"),
        ("finished", 1),
        ("duration_ms", "1"),
    ],
)
def test_a_field_takes_its_own_type_only(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"field '{name}' does not take"):
        log("INFO", "claimed", **{name: value})


@pytest.mark.parametrize(
    "word",
    [
        "dp_orch_" + "a" * 43,
        "lin_api_abcdef",
        "lin_wh_abcdef",
        "eyJhbGciOiJIUzI1NiJ9.e30.x",
        "Bearer x",
        "two\nlines",
        "x" * 129,
        "<b>",
    ],
)
def test_a_word_that_looks_like_a_credential_or_a_text_is_withheld(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log("INFO", "heard", event=word)
    assert written(capsys)["event"] == "(withheld)"


def test_nothing_below_the_level_is_written_but_mistakes_are_still_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_from("WARNING")
    log("INFO", "claimed")
    log("WARNING", "swept")
    assert written(capsys)["message"] == "swept"
    with pytest.raises(TypeError):
        log("DEBUG", "claimed", payload="x")


def test_lines_of_a_request_carry_its_trace_and_what_was_learnt(capsys: pytest.CaptureFixture[str]) -> None:
    with log_request(TRACE):
        note(org_id=ID)
        log("INFO", "claimed")
    event = written(capsys)
    assert (event["trace"], event["traceparent"], event["org_id"]) == (TRACE.split("-")[1], TRACE, str(ID))
    note(org_id=ID)
    log("INFO", "claimed")
    assert written(capsys) == {"severity": "INFO", "message": "claimed"}


@pytest.mark.parametrize("header", [None, "", "00-xyz-1-01", TRACE + "\n", "x" * 5000])
def test_a_malformed_trace_is_not_passed_on(header: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with log_request(header):
        log("INFO", "claimed")
    assert written(capsys) == {"severity": "INFO", "message": "claimed"}


def test_a_database_error_is_written_without_its_binds(capsys: pytest.CaptureFixture[str]) -> None:
    original = pg8000.ProgrammingError({"C": "57014", "M": "hunter2"})
    try:
        raise ProgrammingError("update t set payload = :p", {"p": "hunter2"}, original) from original  # noqa: TRY301 - for its frame
    except ProgrammingError as error:
        log_exception("a machine could not be swept", error, orchestrator_id=ID)
    out = capsys.readouterr().out
    event = json.loads(out)
    assert "hunter2" not in out
    assert (event["severity"], event["sqlstate"]) == ("ERROR", "57014")
    assert event["error"] == "sqlalchemy.exc.ProgrammingError"
    assert event["causes"] == [f"{type(original).__module__}.ProgrammingError"]
    (frame,) = event["stack"]
    assert frame.startswith("tests/unit/test_log.py:")
    assert frame.endswith("test_a_database_error_is_written_without_its_binds")


def test_frames_of_libraries_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        json.loads("{hunter2")
    except json.JSONDecodeError as error:
        log_exception("a request failed", error)
    event = written(capsys)
    assert [frame.split(":")[0] for frame in event["stack"]] == ["tests/unit/test_log.py"]
    assert "hunter2" not in json.dumps(event)


def test_a_configuration_error_is_the_one_whose_text_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    log_exception(
        "the configuration is wrong", ConfigurationError("DATABASE_URL is missing"), severity="CRITICAL"
    )
    assert written(capsys)["configuration"] == "DATABASE_URL is missing"
    log_exception("a request failed", NotFound("no such row: 'hunter2'"))
    assert "hunter2" not in capsys.readouterr().out


def test_every_message_in_the_code_is_a_constant() -> None:
    for folder in ("shared", "functions", "infra"):
        for path in (ROOT / folder).rglob("*.py"):
            for call in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and call.func.id in {"log", "log_exception"}
                ):
                    message = call.args[1 if call.func.id == "log" else 0]
                    assert isinstance(message, ast.Constant), f"{path}:{call.lineno}"

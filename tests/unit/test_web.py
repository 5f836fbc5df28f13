"""HTTP without a cloud: whatever is sent, the answer is the protocol's envelope and names the field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pg8000
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from functions.app import App
from functions.json_body import MAX_DEPTH, parse_object, path_text
from functions.web import (
    ANSWERS,
    Request,
    Response,
    Route,
    bearer_token,
    dispatch,
    integer_parameter,
    match,
    read_json,
)
from shared import errors
from shared.db import engine_for, transaction
from shared.errors import DispatchError, InvalidRequest, MethodNotAllowed, NotFound, Unauthenticated
from shared.settings import Settings

CODES = {
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "invalid_request": 400,
    "conflict": 409,
    "rate_limited": 429,
    "internal": 500,
    "service_unavailable": 503,
}


def nobody() -> App:
    """An App whose database refuses connections: nothing listens on port 9 of this machine."""
    settings = Settings.from_environment(
        {"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:9/d", "DATABASE_TLS": "off"}
    )
    return App(settings, engine_for(settings))


NOBODY = nobody()


def answer_to(error: Exception) -> Response:
    def handler(app: App, request: Request) -> Response:
        raise error

    return dispatch([Route("POST", "/", handler)], NOBODY, Request("POST", "/"))


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refusal:
        parse_object(body)
    return refusal.value


# -- routes -------------------------------------------------------------------------------------------------------------


def _echo(app: App, request: Request, **names: str) -> Response:
    return Response(200, dict(names))


ROUTES = [
    Route("POST", "/api/dispatch/claim", _echo),
    Route("POST", "/api/dispatch/{queue_id}/claim", _echo),
    Route("GET", "/api/sessions/{session_id}", _echo),
    Route("DELETE", "/api/sessions/{session_id}", _echo),
    Route("POST", "/", _echo),
]


@pytest.mark.parametrize(
    ("method", "path", "route", "names"),
    [
        ("POST", "/api/dispatch/claim", "/api/dispatch/claim", {}),
        ("POST", "/api/dispatch/abc/claim", "/api/dispatch/{queue_id}/claim", {"queue_id": "abc"}),
        ("POST", "/api/dispatch/abc/claim/", "/api/dispatch/{queue_id}/claim", {"queue_id": "abc"}),
        ("GET", "/api/sessions/abc", "/api/sessions/{session_id}", {"session_id": "abc"}),
        ("HEAD", "/api/sessions/abc", "/api/sessions/{session_id}", {"session_id": "abc"}),
        ("POST", "/", "/", {}),
        ("POST", "", "/", {}),
    ],
)
def test_a_path_finds_its_route(method: str, path: str, route: str, names: dict[str, str]) -> None:
    found, params = match(ROUTES, Request(method, path))
    assert (found.path, params) == (route, names)


@pytest.mark.parametrize(
    "path",
    [
        "/api",
        "/api/dispatch//claim",
        "/api/dispatch/a/b/claim",
        "/api/sessions/",
        "/API/dispatch/claim",
        "/api/dispatch/claim\n",
    ],
)
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        match(ROUTES, Request("POST", path))


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "PUT"])
def test_a_known_path_says_which_methods_it_answers(method: str) -> None:
    with pytest.raises(MethodNotAllowed):
        match(ROUTES, Request(method, "/api/sessions/abc"))
    response = dispatch(ROUTES, NOBODY, Request(method, "/api/sessions/abc"))
    assert (response.status, response.headers["allow"]) == (405, "DELETE, GET")


# -- credentials --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", ["Bearer dp_orch_x", "bearer dp_orch_x", "BEARER   dp_orch_x ", " Bearer dp_orch_x"]
)
def test_a_bearer_token_is_read(header: str) -> None:
    assert bearer_token(Request("GET", "/", headers={"authorization": header})) == "dp_orch_x"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic eA==",
        "dp_orch_x",
        "Bearer a b",
        "Bearer ä",
        "Bearer a\x00",
        "Bearer " + "x" * 5000,
    ],
)
def test_anything_else_is_no_credential(header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        bearer_token(Request("GET", "/", headers={} if header is None else {"authorization": header}))


# -- bodies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"  \n", b"{}"])
def test_an_empty_body_is_an_empty_object(body: bytes) -> None:
    assert read_json(Request("POST", "/", body=body), 10) == {}


def test_a_body_at_its_limit_passes_and_one_byte_more_does_not() -> None:
    assert read_json(Request("POST", "/", body=b'{"a":1}   '), 10) == {"a": 1}
    with pytest.raises(errors.BodyTooLarge):
        read_json(Request("POST", "/", body=b'{"a":1}    '), 10)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\xff{}", "body"),
        (b'{"a": "\xed\xa0\x80"}', "body"),
        ("{}".encode("utf-16"), "body"),
        (b"\xef\xbb\xbf{}", "body"),
        (b"{", "body"),
        (b"{'a': 1}", "body"),
        (b"null", "body"),
        (b"[]", "body"),
        (b'"x"', "body"),
        (b"1", "body"),
        (b"{} {}", "body"),
        (b'{"a": NaN}', "body"),
        (b'{"a": -Infinity}', "body"),
        (b'{"a": ' + b"9" * 5000 + b"}", "body"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b'{"a": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_001, "body"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "body"),
        (b'{"a": "\x00"}', "body"),
        (b'{"a": {"b": [0, {"c": "x\\u0000"}]}}', "a.b[1].c"),
        (b'{"a": ["\\ud800"]}', "a[0]"),
        (b'{"a": "\\udc00\\ud800"}', "a"),
        (b'{"a": {"x\\u0000": 1}}', "a.x\\x00"),
        (b'{"a": 9223372036854775808}', "a"),
        (b'{"a": 1e999}', "a"),
        (b'{"a": 1, "b": 2, "a": 3}', "a"),
    ],
)
def test_a_body_that_cannot_be_stored_is_refused_by_field(body: bytes, field: str) -> None:
    assert refused(body).details["field"] == field


def test_what_can_be_stored_passes_unchanged() -> None:
    body = {
        "emoji": "🔑",
        "deep": [[[{"a": None}]]],
        "big": 2**63 - 1,
        "small": -(2**63),
        "real": 1.5,
        "yes": True,
    }
    for ascii_only in (True, False):
        assert parse_object(json.dumps(body, ensure_ascii=ascii_only).encode()) == body
    deepest = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert "a" in parse_object(deepest)


def test_a_duplicate_among_many_names_is_found_without_comparing_all_pairs() -> None:
    names = ",".join(f'"n{i}":0' for i in range(200_000))
    assert refused(f'{{{names},"n199999":1}}'.encode()).details["field"] == "n199999"


def test_a_name_of_the_sender_is_shortened_and_harmless() -> None:
    assert path_text(["a" * 100, "é\n", 3]) == "a" * 40 + ".\\xe9\\n[3]"
    assert path_text([]) == "body"


@given(
    st.one_of(st.binary(max_size=60), st.text(alphabet='{}[]",:\\u0d8ae1 \x00', max_size=60).map(str.encode))
)
def test_no_bytes_cause_anything_but_an_object_or_a_refusal(body: bytes) -> None:
    try:
        answer = parse_object(body)
    except InvalidRequest as refusal:
        answer = {"message": refusal.message, "field": refusal.details["field"]}
    json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(("text", "value"), [(None, 16), ("1", 1), ("64", 64)])
def test_an_integer_parameter_in_range_is_read(text: str | None, value: int) -> None:
    request = Request("GET", "/", query={} if text is None else {"limit": text})
    assert integer_parameter(request, "limit", default=16, minimum=1, maximum=64) == value


@pytest.mark.parametrize("text", ["", "0", "65", "-1", "1.0", "x", " 1", "１", "1_0", "9" * 400])
def test_an_integer_parameter_out_of_range_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        integer_parameter(
            Request("GET", "/", query={"limit": text}), "limit", default=16, minimum=1, maximum=64
        )
    assert refusal.value.details["field"] == "limit"


# -- errors -------------------------------------------------------------------------------------------------------------

DECISIONS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DispatchError)
]


@pytest.mark.parametrize("kind", DECISIONS)
def test_every_decision_has_an_answer_in_the_protocols_codes(kind: type[DispatchError]) -> None:
    response = answer_to(kind("why", field="name") if kind is InvalidRequest else kind("why"))
    assert response.body is not None
    told = response.body["error"]
    status = ANSWERS.get(kind, (500, "internal"))[0]
    assert response.status == status
    assert told["code"] in CODES
    assert CODES[told["code"]] == status or (status in {405, 413} and told["code"] == "invalid_request")
    assert (told["message"] == "why") == (status != 500)
    assert ("retry-after" in response.headers) == (status in {429, 503})


def test_only_the_base_and_our_own_mistakes_are_missing_in_the_table() -> None:
    assert set(DECISIONS) - set(ANSWERS) == {DispatchError, errors.ConfigurationError}


def test_a_missing_credential_says_which_one_is_wanted() -> None:
    assert answer_to(Unauthenticated()).headers["www-authenticate"] == "Bearer"


def _database_error(code: str) -> DBAPIError:
    return OperationalError(
        "select :p", {"p": "hunter2"}, pg8000.ProgrammingError({"C": code, "M": "hunter2"})
    )


@pytest.mark.parametrize("code", ["57014", "55P03", "40001", "40P01"])
def test_contention_is_tried_again_soon(code: str) -> None:
    response = answer_to(_database_error(code))
    assert (response.status, response.headers["retry-after"]) == (503, "1")


def test_a_busy_pool_is_tried_again_soon() -> None:
    assert answer_to(PoolTimeout()).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "error", [_database_error("23505"), _database_error("42P01"), ValueError("hunter2"), KeyError("hunter2")]
)
def test_our_own_mistakes_are_500_without_a_word(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    response = answer_to(error)
    assert response.status == 500
    failed, answered = map(json.loads, (out := capsys.readouterr().out).splitlines())
    assert "hunter2" not in out + str(response.body)
    assert failed["error"].endswith(type(error).__name__)
    assert (answered["route"], answered["status"], answered["code"]) == ("/", 500, "internal")


def test_an_unreachable_database_is_503_with_retry_after() -> None:
    def handler(app: App, request: Request) -> Response:
        with transaction(app.engine):
            raise AssertionError

    response = dispatch([Route("GET", "/", handler)], NOBODY, Request("GET", "/"))
    assert (response.status, response.headers["retry-after"]) == (503, "5")


class _Model(BaseModel):
    name: str = Field(max_length=5)
    repos: list[int]


def test_a_model_refuses_by_field_and_never_repeats_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    def handler(app: App, request: Request) -> Response:
        _Model.model_validate(read_json(request, 1000))
        raise AssertionError

    body = json.dumps({"name": "hunter2", "repos": [1, "hunter2"]}).encode()
    response = dispatch([Route("POST", "/", handler)], NOBODY, Request("POST", "/", body=body))
    assert response.status == 400
    assert response.body is not None
    assert response.body["error"]["details"]["field"] == "name"
    assert response.body["error"]["details"]["others"] == ["repos[1]"]
    assert "hunter2" not in str(response.body) + capsys.readouterr().out


# -- answers and their line in the log ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    severity: str
    route: str | None
    status: int


@pytest.mark.parametrize(
    ("method", "path", "line"),
    [
        ("GET", "/api/sessions/hunter2", _Line("INFO", "/api/sessions/{session_id}", 200)),
        ("GET", "/hunter2", _Line("INFO", None, 404)),
    ],
)
def test_one_line_per_request_with_the_routes_template(
    method: str, path: str, line: _Line, capsys: pytest.CaptureFixture[str]
) -> None:
    dispatch(ROUTES, NOBODY, Request(method, path))
    (written,) = capsys.readouterr().out.splitlines()
    event: dict[str, Any] = json.loads(written)
    assert _Line(event["severity"], event.get("route"), event["status"]) == line
    assert event["duration_ms"] >= 0
    assert "hunter2" not in written


def test_an_answer_is_compact_json_that_nobody_keeps() -> None:
    body, headers = Response(200, {"a": [1, None]}).encoded()
    assert body == b'{"a":[1,null]}'
    assert headers == {"cache-control": "no-store", "content-type": "application/json"}
    assert Response(204).encoded() == (b"", {"cache-control": "no-store"})

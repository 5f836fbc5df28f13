"""Each answer of a server is one of a few decisions for the caller; the token goes to one address and into no message."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater, _seconds
from orchestrator.wire import REQUIRED, Completion, Held, Unreadable

URL = "http://dispatch.example"  # plain, because a client for TLS reads the store of certificates first
TOKEN = "hunter2-hunter2-hunter2"
HELD = Held("q-1", "s-1", "ENG-1", 2)
MESSAGE = {name: f"{name}-1" for name in REQUIRED}
Answer = httpx.Response | Exception
Result = TypeVar("Result")


class Server:
    """Answers in turn what it was given, the last one again and again, and keeps the requests."""

    def __init__(self, *answers: Answer | dict[str, Any]) -> None:
        self.requests: list[httpx.Request] = []
        self._answers = [
            httpx.Response(200, json=answer) if isinstance(answer, dict) else answer for answer in answers
        ]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def bodies(self) -> list[Any]:
        return [json.loads(request.content) if request.content else None for request in self.requests]

    def asked(self, use: Callable[[Client], Awaitable[Result]], url: str = URL) -> Result:
        """What `use` returns for a client of this server."""

        async def run() -> Result:
            client = Client(url, TOKEN, transport=httpx.MockTransport(self))
            try:
                return await use(client)
            finally:
                await client.aclose()

        return asyncio.run(run())

    def refusal(self, use: Callable[[Client], Awaitable[Any]] = lambda client: client.poll()) -> Exception:
        with pytest.raises(
            (TokenRefused, NotRegistered, ClaimLost, Refused, TryLater, Unreadable)
        ) as refused:
            self.asked(use)
        assert TOKEN not in "".join(traceback.format_exception(refused.value))
        return refused.value


def an_error(status: int, headers: dict[str, str] | None = None) -> httpx.Response:
    return httpx.Response(
        status, json={"error": {"code": "x", "message": "the server's own words"}}, headers=headers
    )


# -- what a status means ------------------------------------------------------------------------------------------------

MEANINGS: list[tuple[type[Exception], list[int]]] = [
    (TokenRefused, [401]),
    (NotRegistered, [403]),
    (ClaimLost, [404, 409]),
    (TryLater, [408, 425, 429, 500, 501, 502, 503, 504, 507, 511, 520, 599]),
    (Refused, [400, 402, 405, 406, 410, 411, 413, 414, 415, 418, 421, 422, 426, 428, 431, 451]),
]


@pytest.mark.parametrize(("kind", "status"), [(kind, status) for kind, all_ in MEANINGS for status in all_])
def test_a_status_is_one_decision_and_carries_the_servers_words(kind: type[Exception], status: int) -> None:
    error = Server(an_error(status)).refusal()
    assert type(error) is kind
    assert str(error) == "the server's own words"


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>", b"[]", b"null", b'"x"', b'{"error": "x"}', b'{"error": {}}', b"\xff", b"[" * 100_000],
    ids=lambda content: str(content[:10]),
)
def test_an_error_without_an_envelope_is_told_by_its_number(content: bytes) -> None:
    error = Server(httpx.Response(502, content=content)).refusal()
    assert type(error) is TryLater
    assert str(error) == "the server answers 502"


def test_a_long_text_of_the_server_is_cut() -> None:
    error = Server(httpx.Response(400, json={"error": {"message": "x" * 9999}})).refusal()
    assert str(error) == "x" * 500


@pytest.mark.parametrize("status", [403, 404])
def test_a_heartbeat_that_finds_no_machine_says_so(status: int) -> None:
    error = Server(an_error(status)).refusal(lambda client: client.heartbeat("o-1", 0))
    assert type(error) is NotRegistered


@pytest.mark.parametrize("status", [401, 403, 404, 409])
@pytest.mark.parametrize(
    "page",
    [
        httpx.Response(200, text="<html>404 Not Found</html>").content,
        b'{"message": "Forbidden"}',
        b'{"error": "nope"}',
        b'{"error": {"message": "no code"}}',
    ],
    ids=["page", "gateway", "text", "no code"],
)
def test_an_error_page_of_a_gateway_ends_no_claim_and_no_program(status: int, page: bytes) -> None:
    assert type(Server(httpx.Response(status, content=page)).refusal()) is TryLater


def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx limits the time between two bytes, not that of the whole."""

    async def drips(_: httpx.Request) -> httpx.Response:
        never: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        return await never

    async def story() -> None:
        client = Client(URL, TOKEN, transport=httpx.MockTransport(drips))
        with pytest.raises(TryLater):
            await client._ask("GET", "/api/dispatch/poll", patience=0.01)
        await client.aclose()

    monkeypatch.setattr("orchestrator.client.CONNECT_SECONDS", 0.01)
    asyncio.run(story())


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("target", ["https://elsewhere.example/", "/login"])
def test_a_redirect_is_waited_out_and_nothing_is_sent_there(status: int, target: str) -> None:
    server = Server(httpx.Response(status, headers={"location": target}), {"messages": []})
    error = server.refusal()
    assert type(error) is TryLater
    assert "the token is taken to no other address" in str(error)
    assert [str(request.url) for request in server.requests] == [f"{URL}/api/dispatch/poll"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>Welcome to the Hotel</html>", headers={"content-type": "text/html"}),
        httpx.Response(200),
        httpx.Response(200, json=["messages"]),
        httpx.Response(200, json=None),
        httpx.Response(200, content=b'{"messages": ['),
        httpx.Response(200, content=b"\xff\xfe{}"),
        httpx.Response(200, content=b"[" * 100_000),
    ],
    ids=["portal", "empty", "list", "null", "cut", "encoding", "deep"],
)
def test_a_page_of_somebody_else_is_no_answer(answer: httpx.Response) -> None:
    assert type(Server(answer).refusal()) is TryLater


@pytest.mark.parametrize(
    "broken",
    [
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.ReadTimeout("slow"),
        httpx.WriteTimeout("slow"),
        httpx.PoolTimeout("slow"),
        httpx.ReadError("reset"),
        httpx.WriteError("reset"),
        httpx.RemoteProtocolError("garbage"),
        httpx.DecodingError("gzip"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_breaks_is_no_answer_and_names_the_server(broken: Exception) -> None:
    server = Server(broken)
    error = server.refusal()
    assert type(error) is TryLater
    assert str(error) == f"dispatch.example does not answer ({type(broken).__name__})"
    assert error.retry_after is None
    assert len(server.requests) == 1  # whether to ask again is the caller's decision


# -- Retry-After --------------------------------------------------------------------------------------------------------


def waits(retry_after: str, status: int = 503) -> float | None:
    error = Server(an_error(status, {"retry-after": retry_after})).refusal()
    assert isinstance(error, TryLater)
    return error.retry_after


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("0", 0),
        ("7", 7),
        (" 7 ", 7),
        ("1.5", 1.5),
        ("-5", 0),
        ("3600", 3600),
        ("3601", 3600),
        ("9" * 300, 3600),
    ],
)
def test_seconds_are_obeyed_up_to_an_hour(said: str, seconds: float) -> None:
    assert waits(said) == seconds
    assert waits(said, status=429) == seconds


@pytest.mark.parametrize(
    "said",
    ["", "soon", "nan", "inf", "-inf", "9" * 400, "1 2", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"],
)
def test_garbage_is_not(said: str) -> None:
    assert waits(said) is None


def test_a_date_is_compared_with_the_clock_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    monkeypatch.setattr(time, "time", now.timestamp)
    for seconds, obeyed in ((90, 90), (-90, 0), (86_400, 3600), (10_000_000, 3600)):
        assert waits(format_datetime(now + timedelta(seconds=seconds), usegmt=True)) == obeyed
    assert waits("Sun, 01 Mar 2026 14:01:00 +0200") == 60


@settings(max_examples=50)
@given(
    st.text(st.characters(max_codepoint=255), max_size=40)
    | st.from_regex(r"\w{3}, \d+ (Jan|Feb) \d+ \d+:\d+:\d+ [+-]\d+")
)
def test_nothing_in_it_is_worse_than_garbage(said: str) -> None:
    seconds = _seconds(said)
    assert seconds is None or 0 <= seconds <= 3600


def test_where_the_server_names_none_there_is_none() -> None:
    error = Server(an_error(503)).refusal()
    assert isinstance(error, TryLater)
    assert error.retry_after is None


# -- what is sent -------------------------------------------------------------------------------------------------------


def test_each_request_carries_the_token_in_its_header_only() -> None:
    server = Server({"messages": []})
    server.asked(lambda client: client.poll(), URL + "/base/")
    (request,) = server.requests
    assert str(request.url) == f"{URL}/base/api/dispatch/poll"
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in str(request.url) + request.content.decode()


def test_a_server_that_has_not_shown_our_additions_is_not_asked_to_wait() -> None:
    server = Server({"messages": []}, {"messages": []}, {"messages": [], "pollAfterMs": 0}, {"messages": []})

    async def use(client: Client) -> None:
        for _ in range(5):
            await client.poll(wait=25)
        await client.poll()

    server.asked(use)
    asked = [request.url.query.decode() for request in server.requests]
    assert asked == ["", "", "", "waitSeconds=25", "waitSeconds=25", ""]


def test_a_waiting_poll_is_given_the_time_that_it_asks_for() -> None:
    server = Server({"messages": [], "pollAfterMs": 1000})

    async def use(client: Client) -> None:
        await client.poll()
        await client.poll(wait=25)

    server.asked(use)
    plain, waiting = (request.extensions["timeout"]["read"] for request in server.requests)
    assert waiting == plain + 25


async def _all_of_it(client: Client, attempt: int | None) -> None:
    held = Held("q", "s", "ENG-1", attempt)
    await client.release(held, "why")
    await client.report(held, percent=5, message="m", prompts_seen=2)
    await client.report(held)
    await client.complete(held, Completion(success=True, facts={"summary": "x"}, prompts_seen=2))
    await client.complete(held, Completion(success=False, facts={}))


def test_a_server_of_the_original_protocol_gets_only_what_it_knows() -> None:
    server = Server({"message": MESSAGE})
    claim = server.asked(lambda client: client.claim("q"))
    assert (claim.attempt, claim.lease, claim.message.queue_id) == (None, None, "queueId-1")
    server = Server({})
    server.asked(lambda client: _all_of_it(client, None))
    assert server.bodies() == [
        {"error": "why"},
        {"status": "running", "progressPercent": 5, "message": "m"},
        {"status": "running", "progressPercent": 0},
        {"success": True, "summary": "x"},
        {"success": False},
    ]


def test_a_server_of_ours_is_told_the_row_and_the_attempt_with_everything() -> None:
    server = Server({"message": MESSAGE, "attempt": 3, "leaseSeconds": 90})
    claim = server.asked(lambda client: client.claim("q"))
    assert (claim.attempt, claim.lease) == (3, 90.0)
    server = Server({})
    server.asked(lambda client: _all_of_it(client, 3))
    fence = {"attempt": 3, "queueId": "q"}
    assert server.bodies() == [
        {"error": "why", "attempt": 3},  # its row is in the path
        {"status": "running", "progressPercent": 5, "message": "m", "promptsSeen": 2, **fence},
        {"status": "running", "progressPercent": 0, "promptsSeen": 0, **fence},
        {"success": True, "summary": "x", "promptsSeen": 2, **fence},
        {"success": False, "promptsSeen": 0, **fence},
    ]


def test_each_method_is_one_route() -> None:
    server = Server({"orchestratorId": "o-1", "messages": [], "message": MESSAGE, "jwt": "x"})

    async def use(client: Client) -> None:
        await client.register(name="n", repos=["a/b"], max_jobs=2)
        await client.heartbeat("o-1", 1)
        await client.realtime_token()
        await client.poll()
        await client.claim("q-1")
        await client.renew(HELD, 3)
        await client.release(HELD, "x" * 20_000)
        await client.report(HELD)
        await client.complete(HELD, Completion(success=True, facts={}))

    server.asked(use)
    assert [f"{request.method} {request.url.path}" for request in server.requests] == [
        "POST /api/orchestrators/register",
        "POST /api/orchestrators/o-1/heartbeat",
        "POST /api/orchestrators/token",
        "GET /api/dispatch/poll",
        "POST /api/dispatch/q-1/claim",
        "POST /api/dispatch/q-1/renew",
        "POST /api/dispatch/q-1/release",
        "POST /api/sessions/s-1/status",
        "POST /api/sessions/s-1/complete",
    ]
    bodies = server.bodies()
    assert bodies[0] == {"name": "n", "repos": ["a/b"], "maxConcurrentJobs": 2}
    assert bodies[1] == {"activeJobs": 1}
    assert bodies[5] == {"attempt": 2, "promptsSeen": 3}
    assert len(bodies[6]["error"]) == 10_000


# -- what is read -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "seconds"), [(1500, 1.5), (0, 0.0), (None, None), (-1, None), ("5", None), (True, None)]
)
def test_a_hint_is_read_in_seconds(hint: Any, seconds: float | None) -> None:
    assert (
        Server({"messages": [], "pollAfterMs": hint}).asked(lambda client: client.poll()).poll_after
        == seconds
    )


@pytest.mark.parametrize("hint", ["NaN", "Infinity", "1e999", "1" + "0" * 400])
def test_a_hint_that_is_no_finite_number_is_none(hint: str) -> None:
    answer = httpx.Response(200, content=f'{{"messages": [], "pollAfterMs": {hint}}}')
    assert Server(answer).asked(lambda client: client.poll()).poll_after is None


def test_a_poll_brings_messages_and_what_is_to_be_stopped() -> None:
    polled = Server({"messages": [MESSAGE], "cancelled": ["q-1"]}).asked(lambda client: client.poll())
    assert [message.queue_id for message in polled.messages] == ["queueId-1"]
    assert polled.stop == {"q-1"}
    assert (
        Server({"messages": [], "cancelled": "q-1"}).asked(lambda client: client.poll()).stop == frozenset()
    )


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ({}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": [{}]}, "message.messageId"),
        ({"messages": [5]}, "message"),
    ],
)
def test_an_answer_that_is_not_what_the_protocol_says_names_the_field(
    answer: dict[str, Any], field: str
) -> None:
    error = Server(answer).refusal()
    assert type(error) is Unreadable
    assert str(error).startswith(f"{field}: ")


def test_nothing_is_fine_where_nothing_is_expected_and_else_named() -> None:
    server = Server(httpx.Response(204))
    server.asked(lambda client: client.heartbeat("o-1", 0))
    assert type(server.refusal()) is Unreadable
    assert (
        str(server.refusal(lambda client: client.register(name="n", repos=[], max_jobs=1)))
        == "orchestratorId: is no id"
    )
    assert str(server.refusal(lambda client: client.claim("q"))) == "message: is not an object"


def test_a_registration_has_the_realtime_credentials_where_there_are_any() -> None:
    def register(client: Client) -> Awaitable[Any]:
        return client.register(name="n", repos=[], max_jobs=1)

    assert Server({"orchestratorId": "o", "realtime": None}).asked(register) == ("o", None)
    assert Server({"orchestratorId": "o", "realtime": {"url": "u"}}).asked(register) == ("o", {"url": "u"})


def test_news_are_a_request_to_stop_and_follow_ups() -> None:
    def renew(client: Client) -> Awaitable[Any]:
        return client.renew(HELD, 0)

    assert Server({"leaseSeconds": 9}).asked(renew) == (False, [])
    assert Server({"cancelRequested": True, "prompts": [{"body": "x"}, "odd"]}).asked(renew) == (
        True,
        [{"body": "x"}],
    )
    assert Server({"cancelRequested": "yes", "prompts": {}}).asked(renew) == (False, [])


# -- connections --------------------------------------------------------------------------------------------------------


def test_after_a_reconnect_what_was_under_way_has_no_answer_and_what_follows_has() -> None:
    async def run() -> None:
        heard, connections = asyncio.Event(), 0
        serving: list[Any] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            serving.append(asyncio.current_task())
            await reader.readuntil(b"\r\n\r\n")
            heard.set()
            if connections > 1:
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"messages":[]}')
            await reader.read()  # until the other side closes
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN)
            under_way = asyncio.create_task(client.poll())
            await heard.wait()
            await client.reconnect()
            async with asyncio.timeout(10):  # sooner than the client's own patience ends
                with pytest.raises(TryLater):
                    await under_way
            assert (await client.poll()).messages == []
            await client.aclose()
            await asyncio.gather(*serving)

    asyncio.run(run())


@pytest.mark.parametrize("attempt", [0, -1, 10**30, "1", 1.5, True, None])
def test_an_attempt_that_is_no_count_is_none(attempt: object) -> None:
    server = Server({"message": MESSAGE, "attempt": attempt, "leaseSeconds": 60})
    claim = server.asked(lambda client: client.claim("q-1"))
    assert claim.attempt is None

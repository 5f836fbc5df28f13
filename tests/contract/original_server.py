"""A server that speaks the published bridge protocol and not a word more: what is outside of it is answered 400 and written down.

It is written from the protocol alone and shares no code with our functions or our orchestrator. Where the protocol is silent it is as
strict as a server may be, so that a client which gets along with it gets along with others.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import Any, Final, Literal, NamedTuple, Self
from urllib.parse import urlsplit

PATIENCE: Final = 20.0
ID: Final = "([A-Za-z0-9_-]+)"
AUTHORIZATION: Final = re.compile(r"Bearer dp_orch_[A-Za-z0-9_-]{43}")
STATUS_OF: Final = {
    "invalid_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "rate_limited": 429,
    "internal": 500,
    "service_unavailable": 503,
}


# -- what may be said ---------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """A member of a body. Absent or good: null is neither."""

    good: Callable[[Any], bool]
    required: bool = True


def text(low: int, high: int) -> Callable[[Any], bool]:
    """As the original counts it, in UTF-16: a sign outside of the basic plane is two."""
    return lambda value: (
        isinstance(value, str) and low <= len(value.encode("utf-16-le", "surrogatepass")) // 2 <= high
    )


def whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def web_address(value: Any) -> bool:
    """What every parser of addresses takes."""
    if not isinstance(value, str) or re.search(r"\s", value):
        return False
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


class Route(NamedTuple):
    """`name` is what the tests call it."""

    name: str
    method: str
    path: re.Pattern[str]
    body: Mapping[str, Field]


ROUTES: Final = (
    Route(
        "register",
        "POST",
        re.compile("/api/orchestrators/register"),
        {
            "name": Field(text(1, 120)),
            "repos": Field(names),
            "maxConcurrentJobs": Field(whole(1, 64), required=False),
        },
    ),
    Route(
        "heartbeat",
        "POST",
        re.compile(f"/api/orchestrators/{ID}/heartbeat"),
        {"activeJobs": Field(whole(0, 64), required=False)},
    ),
    Route("token", "POST", re.compile("/api/orchestrators/token"), {}),
    Route("poll", "GET", re.compile("/api/dispatch/poll"), {}),
    Route("claim", "POST", re.compile(f"/api/dispatch/{ID}/claim"), {}),
    Route("release", "POST", re.compile(f"/api/dispatch/{ID}/release"), {"error": Field(text(1, 10_000))}),
    Route(
        "status",
        "POST",
        re.compile(f"/api/sessions/{ID}/status"),
        {
            "status": Field(lambda value: value in ("running", "error")),
            "progressPercent": Field(whole(0, 100)),
            "message": Field(text(0, 2000), required=False),
        },
    ),
    Route(
        "complete",
        "POST",
        re.compile(f"/api/sessions/{ID}/complete"),
        {
            "success": Field(lambda value: isinstance(value, bool)),
            "prUrl": Field(web_address, required=False),
            "summary": Field(text(0, 10_000), required=False),
            "tokensUsed": Field(whole(0, 2**53), required=False),
            "costUsd": Field(amount, required=False),
            "errorMessage": Field(text(0, 10_000), required=False),
        },
    ),
    Route("session", "GET", re.compile(f"/api/sessions/{ID}"), {}),
)


class Outside(Exception):
    """The request is not in the protocol; says how."""


def read(
    method: str, target: str, headers: Message[str, str], body: bytes
) -> tuple[str, str, dict[str, Any]]:
    """The route's name, the id in the path and the body. Raises Outside."""
    if headers.get("Content-Type") != "application/json":
        raise Outside(f"{method} {target}: the content type is {headers.get('Content-Type')!r}")
    path, asked, _ = target.partition("?")
    if asked:
        raise Outside(f"{method} {target}: the original has no query parameters")
    for route in ROUTES:
        found = route.path.fullmatch(path)
        if found and route.method == method:
            said = _object(body, route, f"{method} {path}")
            return route.name, found[1] if found.groups() else "", said
    raise Outside(f"{method} {path}: there is no such route")


def _object(body: bytes, route: Route, where: str) -> dict[str, Any]:
    if body and not route.body:
        raise Outside(f"{where}: takes no body")
    try:
        said = json.loads(body or b"{}", parse_constant=_no_constant)
    except ValueError as error:
        raise Outside(f"{where}: no JSON: {error}") from None
    if not isinstance(said, dict):
        raise Outside(f"{where}: no object")
    for name in said.keys() - route.body.keys():
        raise Outside(f"{where}: {name} is unknown")
    for name, field in route.body.items():
        if name not in said:
            if field.required:
                raise Outside(f"{where}: {name} is missing")
        elif not field.good(said[name]):
            raise Outside(f"{where}: {name} is {str(said[name])[:80]!r}")
    return said


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# -- the server ---------------------------------------------------------------------------------------------------------


class Heard(NamedTuple):
    """A request that is in the protocol, and the status of its answer."""

    name: str
    id: str
    body: dict[str, Any]
    status: int
    at: float


class Answer(NamedTuple):
    """`body` None: the connection is closed instead."""

    status: int
    body: dict[str, Any] | None
    headers: Mapping[str, str] = {}

    @classmethod
    def error(cls, code: str, message: str, headers: Mapping[str, str] | None = None) -> Answer:
        return cls(STATUS_OF[code], {"error": {"code": code, "message": message}}, headers or {})


class Row:
    """A message in the queue, and its session."""

    def __init__(self, message: dict[str, Any], *, lost: Literal["once", "always"] | None) -> None:
        self.message, self.lost = message, lost
        self.queue_id: str = message["queueId"]
        self.session_id: str = message["sessionId"]
        self.state: Literal["waits", "held", "rests", "elsewhere", "over"] = "waits"
        self.said: list[dict[str, Any]] = []

    @property
    def result(self) -> dict[str, Any]:
        """The completion that counted."""
        assert self.state == "over", f"the work is not over, it {self.state}"
        return self.said[-1]


class OriginalServer:
    """`with OriginalServer() as server`. One organization, one token, one machine, a queue in memory.

    `hooks`: called while a request of that name is answered, before the answer goes out.
    `gives_out_again`: whether what is released waits again at once, or not as long as the test lasts.
    """

    def __init__(self) -> None:
        self.token = f"dp_orch_{secrets.token_urlsafe(32)}"
        self.machine, self.organization = f"machine_{secrets.token_hex(4)}", "organization-1"
        self.requests: list[Heard] = []
        self.violations: list[str] = []
        self.rows: list[Row] = []
        self.hooks: dict[str, Callable[[Heard], None]] = {}
        self.gives_out_again = True
        self.revoked = False
        self.most_held = 0
        self._registered = False
        self._failures: dict[str, list[Answer]] = {}
        self._unanswered: list[str] = []
        self._changed = threading.Condition()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # -- for the tests --------------------------------------------------------------------------------------------------

    def work(self, *, lost: Literal["once", "always"] | None = None, **more: Any) -> Row:
        """Something to do. `lost`: its claim is answered 409, and it is seen no more; or again and again."""
        number = len(self.rows) + 1
        message = {
            "messageId": f"message-{number}",
            "sessionId": f"session_{number}",
            "queueId": f"Queue-{number}",
            "orgId": self.organization,
            "workspaceId": "workspace",
            "linearIssueId": f"issue-{number}",
            "linearIdentifier": f"PAY-{number}",
            "title": "Split refunds",
            "teamId": "team",
            "repo": "acme/api",
            "targetOrchestratorId": self.machine,
            "dispatchedAt": _now(),
            **more,
        }
        row = Row(message, lost=lost)
        with self._changed:
            self.rows.append(row)
        return row

    def fails(self, name: str, answer: Answer) -> None:
        """The next request of that name gets this answer and has no effect."""
        self._failures.setdefault(name, []).append(answer)

    def leaves_unanswered(self, name: str) -> None:
        """The next request of that name has its effect, and then the connection is closed."""
        self._unanswered.append(name)

    def heard(self, name: str, times: int = 1, status: int = 200) -> list[Heard]:
        """Waits until that many requests were answered so. Returns all of them."""
        assert self.hears(name, times, status), (
            f"{name} {times}x in vain; heard {[(each.name, each.status) for each in self.requests]},"
            f" outside of the protocol {self.violations}"
        )
        return self.so_far(name, status)

    def hears(self, name: str, times: int, status: int = 200, within: float = PATIENCE) -> bool:
        """Whether that many requests have been answered so by then."""
        deadline = monotonic() + within
        with self._changed:
            while len(self.so_far(name, status)) < times:
                if monotonic() >= deadline:
                    return False
                self._changed.wait(max(deadline - monotonic(), 0))
        return True

    def so_far(self, name: str, status: int = 200) -> list[Heard]:
        return [each for each in list(self.requests) if (each.name, each.status) == (name, status)]

    # -- one request ----------------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Message[str, str], body: bytes) -> Answer:
        authorization = headers.get("Authorization", "")
        with self._changed:
            try:
                if not AUTHORIZATION.fullmatch(authorization):
                    raise Outside(f"{method} {target}: the authorization has another form")  # noqa: TRY301
                name, subject, said = read(method, target, headers, body)
                answer = self._decide(name, subject, said, authorization)
            except Outside as error:
                self.violations.append(str(error))
                self._changed.notify_all()
                return Answer.error("invalid_request", str(error))
            heard = Heard(name, subject, said, answer.status, monotonic())
            lost = name in self._unanswered
            if lost:
                self._unanswered.remove(name)
            self.requests.append(heard)
            self._changed.notify_all()
        if name in self.hooks:
            self.hooks[name](heard)
        return Answer(answer.status, None) if lost else answer

    def _decide(self, name: str, subject: str, said: dict[str, Any], authorization: str) -> Answer:
        if self.revoked or authorization != f"Bearer {self.token}":
            return Answer.error("unauthenticated", "the token is not known")
        if self._failures.get(name):
            return self._failures[name].pop(0)
        if name == "register":
            self._registered = True
            return Answer(200, {"orchestratorId": self.machine, "orgId": self.organization, "realtime": None})
        if not self._registered:
            return Answer.error("forbidden", "the machine is not registered")
        if name == "heartbeat":
            if subject != self.machine:
                raise Outside(f"heartbeat: {subject} is not the id of this machine")
            return Answer(200, {"ok": True})
        if name == "token":
            return Answer.error("service_unavailable", "realtime is not configured")
        if name == "poll":
            return Answer(200, {"messages": [row.message for row in self.rows if row.state == "waits"]})
        return self._on_row(name, self._row(name, subject), said)

    def _row(self, name: str, subject: str) -> Row:
        for row in self.rows:
            if subject == (row.queue_id if name in ("claim", "release") else row.session_id):
                return row
        raise Outside(f"{name}: nobody was told of the id {subject}")

    def _on_row(self, name: str, row: Row, said: dict[str, Any]) -> Answer:
        if name == "session":
            return Answer(200, {"session": {"id": row.session_id, "status": row.state}, "events": []})
        if name == "claim":
            return self._claim(row)
        if row.state == "over":
            # A report or a release that comes late, and a completion that comes twice: nothing happens.
            return Answer(200, _COMPLETED if name == "complete" else {"ok": True})
        if row.state != "held":
            return Answer.error("conflict", "the claim is not held")
        if name == "status":
            row.said.append(said)
            return Answer(200, {"ok": True})
        if name == "release":
            row.state = "waits" if self.gives_out_again else "rests"
            return Answer(200, {"ok": True})
        row.state = "over"
        row.said.append(said)
        return Answer(200, _COMPLETED)

    def _claim(self, row: Row) -> Answer:
        if row.lost == "once":
            row.state = "elsewhere"
        if row.lost or row.state != "waits":
            return Answer.error("conflict", "somebody else has it")
        row.state = "held"
        self.most_held = max(self.most_held, sum(each.state == "held" for each in self.rows))
        return Answer(200, {"message": row.message})


_COMPLETED: Final = {"status": "completed", "linearSynced": True}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _handler(server: OriginalServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer, which is not held back for the other end's acknowledgement

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = server.answer(self.command, self.path, self.headers, body)
            if answer.body is None:
                self.close_connection = True
                return
            sent = json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler

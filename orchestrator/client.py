"""The orchestrator API over HTTP: one method per route, and four kinds of failure, one per decision of the caller.

Nothing here repeats a request: whether that is right depends on what it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from orchestrator.wire import (
    PATH_SAFE,
    Claim,
    Completion,
    Held,
    Message,
    News,
    Polled,
    Registration,
    Unreadable,
    number,
)

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 20.0
MOST_ATTEMPTS: Final = 1_000_000


class TokenRefused(Exception):
    """The server does not know this token any more: it was revoked, has expired, or never was one."""


class NotRegistered(Exception):
    """The token is valid, but the server has no machine for it."""


class ClaimLost(Exception):
    """The claim is not this machine's, or not any more."""


class Refused(Exception):
    """The server understood and says no; asking again gets the same answer."""


class TryLater(Exception):
    """No answer, or none that counts. `retry_after`: seconds, where the server named them."""

    def __init__(self, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Client:
    """One server, one token. `extended`: the server has shown that it speaks our additions to the published protocol."""

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self.extended = False
        self._token = token
        self._transport = transport
        self._http = self._connect()

    def _connect(self) -> httpx.AsyncClient:
        # Redirects are not followed: the token is for this address and goes to no other.
        return httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=16, max_keepalive_connections=4, keepalive_expiry=60),
            transport=self._transport,
            # The certificates' store takes 8 MB and 20 ms to read; without TLS nobody looks at it.
            verify=urlsplit(self.url).scheme == "https",
        )

    async def reconnect(self) -> None:
        """Drops all connections: after a sleep the other end has forgotten them, and nobody would say so."""
        old, self._http = self._http, self._connect()
        await old.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    # -- the machine ----------------------------------------------------------------------------------------------------

    async def register(self, *, name: str, repos: list[str], max_jobs: int) -> Registration:
        """`POST /api/orchestrators/register`"""
        body = {"name": name, "repos": repos, "maxConcurrentJobs": max_jobs}
        answer = await self._ask("POST", "/api/orchestrators/register", body)
        orchestrator_id = answer.get("orchestratorId")
        if not isinstance(orchestrator_id, str) or not PATH_SAFE.fullmatch(orchestrator_id):
            raise Unreadable("orchestratorId: is no id")
        realtime = answer.get("realtime")
        return Registration(orchestrator_id, realtime if isinstance(realtime, dict) else None)

    async def heartbeat(self, orchestrator_id: str, active_jobs: int) -> None:
        """`POST /api/orchestrators/:id/heartbeat`. Raises NotRegistered when the server has forgotten the machine."""
        try:
            await self._ask(
                "POST", f"/api/orchestrators/{orchestrator_id}/heartbeat", {"activeJobs": active_jobs}
            )
        except ClaimLost as error:
            raise NotRegistered(str(error)) from None

    async def realtime_token(self) -> Mapping[str, Any]:
        """`POST /api/orchestrators/token`: `jwt` and `expiresAt`."""
        return await self._ask("POST", "/api/orchestrators/token")

    # -- the row --------------------------------------------------------------------------------------------------------

    async def poll(self, *, wait: int = 0) -> Polled:
        """`GET /api/dispatch/poll`. `wait`: seconds that a server with `listen` may take to answer; others ignore it."""
        query = f"?waitSeconds={wait}" if wait and self.extended else ""
        answer = await self._ask("GET", f"/api/dispatch/poll{query}", patience=ANSWER_SECONDS + wait)
        messages, hint, stop = (
            answer.get("messages"),
            number(answer.get("pollAfterMs")),
            answer.get("cancelled"),
        )
        if not isinstance(messages, list):
            raise Unreadable("messages: is not a list")
        self.extended = self.extended or hint is not None
        return Polled(
            [Message.read(message) for message in messages],
            None if hint is None else hint / 1000,
            frozenset(str(queue_id) for queue_id in stop) if isinstance(stop, list) else frozenset(),
        )

    async def claim(self, queue_id: str) -> Claim:
        """`POST /api/dispatch/:queueId/claim`. Raises ClaimLost when somebody was faster."""
        answer = await self._ask("POST", f"/api/dispatch/{queue_id}/claim")
        attempt, lease = answer.get("attempt"), number(answer.get("leaseSeconds"))
        return Claim(
            Message.read(answer.get("message")),
            attempt if type(attempt) is int and 0 < attempt <= MOST_ATTEMPTS else None,
            lease,
        )

    async def renew(self, held: Held, prompts_seen: int) -> News:
        """`POST /api/dispatch/:queueId/renew`. Raises ClaimLost."""
        body = {"attempt": held.attempt, "promptsSeen": prompts_seen}
        return _news(await self._ask("POST", f"/api/dispatch/{held.queue_id}/renew", body))

    async def release(self, held: Held, error: str) -> None:
        """`POST /api/dispatch/:queueId/release`. Raises ClaimLost."""
        body: dict[str, Any] = {"error": error[:10_000]}
        if held.attempt is not None:
            body["attempt"] = held.attempt
        await self._ask("POST", f"/api/dispatch/{held.queue_id}/release", body)

    # -- the session ----------------------------------------------------------------------------------------------------

    async def report(
        self, held: Held, *, percent: int = 0, message: str | None = None, prompts_seen: int = 0
    ) -> News:
        """`POST /api/sessions/:id/status`: it is running. Raises ClaimLost."""
        body: dict[str, Any] = {"status": "running", "progressPercent": percent}
        if message is not None:
            body["message"] = message
        if held.attempt is not None:
            body |= {"attempt": held.attempt, "queueId": held.queue_id, "promptsSeen": prompts_seen}
        return _news(await self._ask("POST", f"/api/sessions/{held.session_id}/status", body))

    async def complete(self, held: Held, completion: Completion) -> None:
        """`POST /api/sessions/:id/complete`; repeating it is harmless. Raises ClaimLost."""
        body: dict[str, Any] = {"success": completion.success, **completion.facts}
        if held.attempt is not None:
            body |= {
                "attempt": held.attempt,
                "queueId": held.queue_id,
                "promptsSeen": completion.prompts_seen,
            }
        await self._ask("POST", f"/api/sessions/{held.session_id}/complete", body)

    # -- one request ----------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        patience: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        try:
            # httpx limits each read; an answer that drips would take for ever.
            async with asyncio.timeout(patience + CONNECT_SECONDS):
                answer = await self._http.request(
                    method, path, json=body, timeout=httpx.Timeout(patience, connect=CONNECT_SECONDS)
                )
        except (httpx.HTTPError, TimeoutError) as error:
            raise TryLater(f"{urlsplit(self.url).netloc} does not answer ({type(error).__name__})") from error
        if answer.is_success:
            return _object(answer)
        raise _failure(answer)


def _object(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code == 204:
        return {}
    try:
        value = answer.json()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        # A captive portal or a proxy's page: what the server says will be readable again.
        raise TryLater("the answer is not from the server: it is no JSON")
    return value


def _news(answer: Mapping[str, Any]) -> News:
    prompts = answer.get("prompts")
    return News(
        answer.get("cancelRequested") is True,
        [prompt for prompt in prompts if isinstance(prompt, dict)] if isinstance(prompts, list) else [],
    )


# Refusals that end a claim or the program. They count only in the protocol's envelope: an error page of a gateway or a portal has these
# numbers too, and says nothing about a claim.
_REFUSALS: Final[dict[int, type[Exception]]] = {
    401: TokenRefused,
    403: NotRegistered,
    404: ClaimLost,
    409: ClaimLost,
}


def _failure(answer: httpx.Response) -> Exception:
    """The answer's meaning for the caller; the server's own text, where there is one in the envelope."""
    status, text, ours = answer.status_code, f"the server answers {answer.status_code}", False
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        error = answer.json()["error"]
        text = str(error["message"])[:500]
        ours = isinstance(error["code"], str)
    if status in _REFUSALS:
        return _REFUSALS[status](text) if ours else TryLater(f"{text}, but not as a dispatch server does")
    if status in (408, 425, 429) or status >= 500:
        return TryLater(text, _seconds(answer.headers.get("retry-after")))
    if answer.is_redirect:
        return TryLater(
            "the server sends elsewhere; the token is taken to no other address than the URL that was given"
        )
    return Refused(text)


def _seconds(retry_after: str | None) -> float | None:
    """RFC 9110 section 10.2.3: seconds, or a date (compared with this machine's clock, and bounded for that reason)."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            moment = parsedate_to_datetime(retry_after).timestamp()
        except (ValueError, OverflowError):
            return None
        seconds = moment - time.time()
    return min(max(seconds, 0.0), 3600.0) if math.isfinite(seconds) else None

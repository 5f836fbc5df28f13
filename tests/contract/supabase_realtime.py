"""Supabase Realtime as far as changes of tables go: it speaks as that server does, and Postgres decides who is told (tests/supabase.py).

The server itself cannot be had here. What a client notices of it is taken from https://supabase.com/docs/guides/realtime/protocol and, for
joins, tokens and their expiry, from realtime_channel.ex in github.com/supabase/realtime. It does not decode the log of the database: a test
says what was committed, so that events can be late, doubled, or lost.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import jwt
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from tests.supabase import Changes

PATIENCE = 15
ANON_KEY = "the-public-key-of-the-tests"
JWT_SECRET = "the-jwt-secret-of-the-tests-0123456789"


@dataclass(eq=False)
class Channel:
    """One subscription. `wanted`: its `postgres_changes`, each with the id that the server has given it."""

    socket: ServerConnection
    topic: str
    join_ref: str
    token: str
    claims: dict[str, Any]
    wanted: list[dict[str, Any]]
    subscribed: bool = False

    async def push(self, event: str, payload: Any, ref: str | None = None) -> None:
        """Sends a message of protocol version 1.0.0."""
        message = {"topic": self.topic, "event": event, "payload": payload, "ref": ref}
        with suppress(ConnectionClosed):
            await self.socket.send(json.dumps(message))

    async def says(self, status: str, message: str, extension: str = "system") -> None:
        """Pushes a system message."""
        name = self.topic.removeprefix("realtime:")
        await self.push(
            "system", {"status": status, "message": message, "extension": extension, "channel": name}
        )


@dataclass
class SupabaseRealtime:
    """A server in a thread of its own, for clients in this process and in others; everything here may be called from any thread."""

    database_url: str
    open: bool = True
    """Whether connections are accepted."""
    answers: bool = True
    """Whether joins are answered."""
    joins: list[str] = field(default_factory=list)
    """The tokens of all joins, also of those that were refused."""
    refreshes: list[str] = field(default_factory=list)
    """The tokens that came over open connections."""
    channels: list[Channel] = field(default_factory=list)
    url: str = ""
    _ahead: float = 0.0

    # -- for the tests --------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def committed(self, action: str, table: str, **key: object) -> int:
        """The row with this key was inserted or updated. Returns how many channels were told."""
        told: int = self._do(
            self._committed(action, table, {name: str(value) for name, value in key.items()})
        )
        return told

    def later(self, seconds: float) -> None:
        """Sets its clock that much ahead: tokens expire."""
        self._ahead += seconds
        self._do(self._expire())

    def cut(self) -> None:
        """All connections break, without a word."""
        self._do(self._cut())

    def until(self, happened: Callable[[SupabaseRealtime], Any]) -> None:
        """Returns when that is so."""
        with self._changed:
            assert self._changed.wait_for(lambda: happened(self), PATIENCE), (len(self.joins), self.channels)

    @property
    def subscribed(self) -> int:
        """How many channels are told of changes."""
        return sum(channel.subscribed for channel in self.channels)

    # -- the server -----------------------------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def _happened(self) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _start(self) -> None:
        self._changes = Changes(self.database_url)
        self._server: Server = await serve(
            self._connection, "127.0.0.1", 0, process_request=self._handshake, close_timeout=1
        )
        self.url = f"http://127.0.0.1:{next(iter(self._server.sockets)).getsockname()[1]}"

    async def _stop(self) -> None:
        await self._cut()
        self._server.close()
        await self._server.wait_closed()
        self._changes.close()

    async def _cut(self) -> None:
        for socket in list(self._server.connections):
            socket.transport.abort()
            await socket.wait_closed()

    def _handshake(self, socket: ServerConnection, request: Request) -> Response | None:
        target = urlsplit(request.path)
        asked = parse_qs(target.query)
        if target.path != "/realtime/v1/websocket":
            return socket.respond(HTTPStatus.NOT_FOUND, "")
        if not self.open:
            return socket.respond(HTTPStatus.SERVICE_UNAVAILABLE, "")
        good = asked.get("apikey") == [ANON_KEY] and asked.get("vsn") == ["1.0.0"]
        return None if good else socket.respond(HTTPStatus.FORBIDDEN, "")

    async def _connection(self, socket: ServerConnection) -> None:
        try:
            async for text in socket:
                await self._message(socket, json.loads(text))
                self._happened()
        except ConnectionClosed:
            pass
        finally:
            self.channels = [channel for channel in self.channels if channel.socket is not socket]
            self._happened()

    async def _message(self, socket: ServerConnection, message: dict[str, Any]) -> None:
        topic, event, payload, ref = (message[name] for name in ("topic", "event", "payload", "ref"))
        mine = [each for each in self.channels if each.socket is socket and each.topic == topic]
        if event == "phx_join":
            await self._join(socket, topic, ref, payload)
        elif (topic, event) == ("phoenix", "heartbeat"):
            await Channel(socket, topic, "", "", {}, []).push(
                "phx_reply", {"status": "ok", "response": {}}, ref
            )
        elif event == "access_token":
            for channel in mine:
                await self._refresh(channel, payload["access_token"])
        elif event == "phx_leave":
            for channel in mine:
                await channel.push("phx_reply", {"status": "ok", "response": {}}, ref)
                await self._shut(channel)

    async def _join(self, socket: ServerConnection, topic: str, ref: str, payload: Any) -> None:
        token = payload.get("access_token")
        self.joins.append(token)
        if not self.answers:
            return
        wanted = [
            {**params, "id": index + 1001}
            for index, params in enumerate(payload["config"].get("postgres_changes") or [])
        ]
        channel = Channel(socket, topic, ref, token, {}, wanted)
        refusal = self._refusal(token)
        if refusal is not None:
            await channel.push(
                "phx_reply",
                {"status": "error", "response": {"reason": f"InvalidJWTToken: {refusal}"}},
                ref,
            )
            return
        channel.claims = jwt.decode(token, options={"verify_signature": False})
        self.channels.append(channel)
        await channel.push("phx_reply", {"status": "ok", "response": {"postgres_changes": wanted}}, ref)
        await self._subscribe(channel)

    async def _refresh(self, channel: Channel, token: str) -> None:
        self.refreshes.append(token)
        if token == channel.token:
            return
        refusal = self._refusal(token)
        if refusal is not None:
            await channel.says("error", refusal)
            await self._shut(channel)
            return
        channel.token, channel.claims = token, jwt.decode(token, options={"verify_signature": False})
        await self._subscribe(channel)

    def _refusal(self, token: Any) -> str | None:
        """Why it is not accepted."""
        try:
            claims = jwt.decode(token, JWT_SECRET, ["HS256"], options={"verify_exp": False})
        except jwt.InvalidTokenError:
            return "Failed to validate JWT signature"
        if not claims.get("role") or not isinstance(claims.get("exp"), int):
            return "Fields `role` and `exp` are required in JWT"
        over = int(time.time() + self._ahead) - claims["exp"]
        return f"Token has expired {over} seconds ago" if over >= 0 else None

    async def _expire(self) -> None:
        for channel in list(self.channels):
            if (refusal := self._refusal(channel.token)) is not None:
                await channel.says("error", refusal)
                await self._shut(channel)

    async def _shut(self, channel: Channel) -> None:
        self.channels.remove(channel)
        await channel.push("phx_close", {}, channel.join_ref)

    async def _subscribe(self, channel: Channel) -> None:
        channel.subscribed = all(
            self._changes.may_be_asked_for(params, channel.claims["role"]) for params in channel.wanted
        )
        if channel.subscribed:
            await channel.says("ok", "Subscribed to PostgreSQL", "postgres_changes")
        else:
            await channel.says(
                "error", "Unable to subscribe to changes with given parameters", "postgres_changes"
            )

    async def _committed(self, action: str, table: str, key: dict[str, str]) -> int:
        told = 0
        for channel in self.channels:
            if channel.subscribed:
                ids, data = self._changes.shown(action, table, key, channel.wanted, channel.claims)
                if ids:
                    await channel.push("postgres_changes", {"ids": ids, "data": data})
                    told += 1
        return told

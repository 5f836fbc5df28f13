"""A TCP proxy between a test and a server, mostly its database: counts round trips, cuts connections, plays a network that is away."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy.engine import make_url

CHUNK = 65536


class Proxy:
    """Forwards bytes. One round trip is a change of direction: the client speaks after the server has spoken."""

    def __init__(self, url: str) -> None:
        target = make_url(url)
        self._target = (target.host or "127.0.0.1", target.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._forgotten: set[socket.socket] = set()
        self._closed = False
        self._down = False
        self.round_trips = 0
        self.connections = 0
        self.url = target.set(host="127.0.0.1", port=self._listener.getsockname()[1]).render_as_string(
            hide_password=False
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._down:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            self.connections += 1
            self._pairs.append((client, server))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        client_speaks = False
        with client, server, suppress(OSError, ValueError):
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(CHUNK)
                    self._flowing.wait()
                    if not data:
                        return
                    if client in self._forgotten:
                        continue
                    if source is client and not client_speaks:
                        self.round_trips += 1
                    client_speaks = source is client
                    (server if source is client else client).sendall(data)

    def cut(self) -> None:
        """Closes every connection on both sides, as a restarted gateway does."""
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def down(self) -> None:
        """Closes every connection, and each new one at once."""
        self._down = True
        self.cut()

    def up(self) -> None:
        """Ends that."""
        self._down = False

    def freeze(self) -> None:
        """From now on nothing passes and nobody is told: a dead peer without a FIN."""
        self._flowing.clear()

    def forget(self) -> None:
        """The connections that are open now go nowhere and nobody is told; new ones pass: a gateway that has lost its table."""
        self._forgotten.update(client for client, _ in self._pairs)

    def thaw(self) -> None:
        """Lets everything pass again, what was held back included."""
        self._flowing.set()

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(
                socket.SHUT_RDWR
            )  # closing alone would not wake the thread that waits in accept
        self._listener.close()
        self.cut()

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Appends the round trips of the block to the list that it yields."""
        before, found = self.round_trips, list[int]()
        yield found
        found.append(self.round_trips - before)


@contextmanager
def counting_proxy(url: str) -> Iterator[Proxy]:
    """A proxy in front of the database that `url` names; `proxy.url` leads through it."""
    proxy = Proxy(url)
    try:
        yield proxy
    finally:
        proxy.close()

"""A server in which every test gets a database of its own, copied from one that the project's migrations have made."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import pg8000.native
from sqlalchemy.engine import make_url


class Databases:
    """The server at `url`, whichever database that names. Names are random: workers and other runs may share a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        server = make_url(url)
        self._connection = pg8000.native.Connection(
            server.username or "",
            host=server.host or "",
            port=server.port or 5432,
            password=server.password,
            database=server.database,
            ssl_context=False,
        )
        self._done_with: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_all_but(0)
        self._connection.close()

    @contextmanager
    def fresh(self, template: str | None = None) -> Iterator[str]:
        """The URL of a database for the block: empty, or a copy of the one that the URL `template` names."""
        # All but the last: where a session is still on its way out, the server looks again only after 100 ms.
        self._drop_all_but(1)
        name = f"dispatch_test_{secrets.token_hex(6)}"
        copied = f"template {make_url(template).database} strategy file_copy" if template else ""
        self._connection.run(f"create database {name} {copied}")
        try:
            yield make_url(self.url).set(database=name).render_as_string(hide_password=False)
        finally:
            self._done_with.append(name)

    def _drop_all_but(self, kept: int) -> None:
        while len(self._done_with) > kept:
            self._connection.run(f"drop database if exists {self._done_with.pop(0)} with (force)")

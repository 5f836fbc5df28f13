"""A server in which every test gets a database of its own, copied from one that the project's migrations have made."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pg8000.native
from sqlalchemy.engine import make_url

from infra.local.postgres import create_database


class Databases:
    """The server at `url`, whichever database that names. Names are random: workers and other runs may share a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    @contextmanager
    def fresh(self, template: str | None = None) -> Iterator[str]:
        """The URL of a database that exists for the block: empty, or a copy of the one that the URL `template` names."""
        source = None if template is None else make_url(template).database
        url = create_database(self.url, f"dispatch_test_{secrets.token_hex(6)}", source)
        try:
            yield url
        finally:
            self._drop(url)

    def _drop(self, url: str) -> None:
        server = make_url(self.url)
        with pg8000.native.Connection(
            server.username or "postgres",
            host=server.host or "127.0.0.1",
            port=server.port or 5432,
            password=server.password,
            database=server.database,
            ssl_context=False,
        ) as connection:
            connection.run(f"drop database if exists {make_url(url).database} with (force)")

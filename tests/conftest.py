"""Every test that asks for a database gets one of its own, in a real Postgres.

The server is the one that DATABASE_URL names, else one of our own for each worker of the run: it starts in a second, and workers
that share nothing need no agreement. A test's database is a copy of a migrated one: 30 ms instead of a migration.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from infra.admin.migrate import migrate
from infra.local.postgres import LocalPostgres, find_binaries
from shared.db import engine_for
from shared.settings import Settings
from tests.databases import Databases


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """The server. Not below pytest's own temporary folder, which is closed to the user that runs Postgres for root."""
    if existing := os.environ.get("DATABASE_URL"):
        yield Databases(existing)
        return
    folder = Path(tempfile.mkdtemp(prefix="dispatch-test-"))
    folder.chmod(0o755)
    try:
        with LocalPostgres(folder / "postgres", binaries=find_binaries(os.environ), durable=False) as server:
            yield Databases(server.url("postgres"))
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def migrated(postgres: Databases) -> Iterator[str]:
    """The URL of the database that the tests' own are copied from; nobody connects to it."""
    with postgres.fresh() as url:
        migrate(url, tls="off")
        yield url


@pytest.fixture
def database_url(postgres: Databases, migrated: str) -> Iterator[str]:
    """The URL of this test's database: migrated, without rows."""
    with postgres.fresh(migrated) as url:
        yield url


@pytest.fixture
def settings(database_url: str) -> Settings:
    """Settings for this test's database; what a test needs differently it changes by `settings.model_copy(update=…)`."""
    return Settings.from_environment(
        {
            "DATABASE_URL": database_url,
            "DATABASE_TLS": "off",
            "BRIDGE_ENCRYPTION_KEY": base64.b64encode(bytes(range(32))).decode(),
            "CRON_SECRET": "the-cron-of-the-tests",
        }
    )


@pytest.fixture
def engine(settings: Settings) -> Iterator[Engine]:
    """The product's own engine on this test's database."""
    made = engine_for(settings)
    yield made
    made.dispose()

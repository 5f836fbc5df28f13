"""The transaction: the one thing that every function which changes rows asks for.

`transaction(engine)` is the only maker of a `Tx`, and `with transaction(` stands only where the reader looks for the boundary:
in `functions/`, in `infra/`, and in `shared/sweep.py`, whose pass is many short transactions (decisions/0008).
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from sqlalchemy import URL, Connection, Engine, Row, TextClause, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DisconnectionError

from shared import one_flight

if TYPE_CHECKING:
    from shared.settings import Settings

SCHEMA_REVISION: Final = "0003"
"""The newest migration that this code needs; compared with the database's by `schema_revision`."""

sql = text
Statement = TextClause
AnyRow = Row[*tuple[Any, ...]]


class Limits(NamedTuple):
    """How long a transaction may take, in milliseconds, before the server ends it: the functions' deadlines are shorter
    than any user's patience, and a frozen instance must not hold a lock until it thaws."""

    statement_ms: int
    lock_ms: int
    idle_ms: int

    def begin(self) -> str:
        """BEGIN and the limits as one parameterless text, so that they travel with the first statement.

        READ COMMITTED is said aloud: the conditional updates rely on re-reading a row that another transaction changed.
        `set local` only: anything that outlives the transaction would leak to another client of a pooler.
        """
        return (
            "begin isolation level read committed; "
            f"set local statement_timeout = {self.statement_ms}; set local lock_timeout = {self.lock_ms}; "
            f"set local idle_in_transaction_session_timeout = {self.idle_ms}"
        )


# A silent database is given up half a second after the statement's limit: a webhook and a machine hear 503 within 5 s.
WEBHOOK = Limits(3_000, 500, 5_000)
CLAIM = Limits(4_000, 1_000, 5_000)
SWEEP = Limits(30_000, 2_000, 10_000)
OPERATOR = Limits(60_000, 5_000, 60_000)

_MAKER: Final = object()


@final
class Tx:
    """An open transaction. Cannot be made, only received from `transaction`; refuses to work once that block has ended."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection, maker: object) -> None:
        if maker is not _MAKER:
            raise TypeError("a Tx is not made, it is received: with transaction(engine) as tx")
        self._connection: Connection | None = connection

    def __init_subclass__(cls) -> None:
        raise TypeError("Tx is final: whatever is not a Tx must not pass for one")

    def _open(self) -> Connection:
        if self._connection is None:
            raise RuntimeError(
                "this transaction is over: what it would have changed cannot be committed with the rest"
            )
        return self._connection

    def all(self, statement: Statement, /, **binds: Any) -> Sequence[AnyRow]:
        """Runs a statement and returns its rows."""
        return self._open().execute(statement, binds).all()

    def first(self, statement: Statement, /, **binds: Any) -> AnyRow | None:
        """Runs a statement and returns its first row, or None: zero rows is an answer, not an error."""
        return self._open().execute(statement, binds).first()

    def run(self, statement: Statement, /, **binds: Any) -> int:
        """Runs a statement without reading rows and returns how many it changed."""
        return self._open().execute(statement, binds).rowcount


@contextmanager
def transaction(engine: Engine, limits: Limits = CLAIM) -> Iterator[Tx]:
    """Opens a transaction; commits when the block ends, rolls back when it raises.

    BEGIN is sent together with the first statement and nothing is sent for a block that runs none.

    Raises TypeError for an engine in AUTOCOMMIT: there the statements of one block would commit one by one.
    """
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT" or getattr(
            driver, "autocommit", False
        ):
            raise TypeError("this engine is in AUTOCOMMIT: its statements would not commit together")
        assert isinstance(driver, one_flight.Connection)
        driver.begin_with(limits.begin(), patience=limits.statement_ms / 1000 + 0.5)
        tx = Tx(connection, _MAKER)
        try:
            yield tx
            connection.commit()
        finally:
            tx._connection = None  # noqa: SLF001 - the maker of the seal also breaks it


def engine_for(settings: Settings) -> Engine:
    """The engine of one function instance: a small pool over the one-flight driver.

    A connection costs 4 to 60 ms to open, so it is kept; it is looked at (no round trip) each time it is taken, because an
    instance may have been frozen since and the server or a NAT gateway may have dropped it meanwhile.
    """
    url = make_url(settings.database_url.get_secret_value())
    options = _options(settings, url, "devpilot-dispatch")
    engine = create_engine(
        url.set(drivername="postgresql+pg8000", query={}),
        creator=lambda: one_flight.connect(**options),
        paramstyle=one_flight.PARAMSTYLE,
        pool_size=settings.database_pool_size,
        max_overflow=0,
        pool_timeout=settings.database_connect_timeout_seconds,
        pool_recycle=300,
    )

    @event.listens_for(engine, "checkout")
    def _refuse_a_dead_connection(driver: one_flight.Connection, *_: object) -> None:
        if not driver.usable():
            raise DisconnectionError("the connection died while it was not in use")

    return engine


CHANNEL: Final = "dispatch_queue"
"""What `listen on` makes the database say on it: the id of a machine that has something to look at."""

# The server ends a listener that has asked nothing for five minutes, or whose network has taken nothing for half a minute: what it has not
# read is kept for it and for everybody behind it, and a frozen instance would never read. Sent with the start of the connection, because
# a pooler refuses them there, and behind a pooler there is nothing to hear.
UNHEARD: Final = {"idle_session_timeout": "300000", "tcp_user_timeout": "30000"}


def listener_for(settings: Settings) -> one_flight.Connection:
    """A connection outside of any pool and any transaction that hears what is said on `CHANNEL`, from now on.

    Raises whatever the driver does when DATABASE_LISTEN_URL does not lead to a database.
    """
    assert settings.database_listen_url is not None
    url = make_url(settings.database_listen_url.get_secret_value())
    connection = one_flight.connect(
        **_options(settings, url, "devpilot-dispatch listen"), startup_params=UNHEARD
    )
    try:
        connection.execute_simple(f"listen {CHANNEL}")
    except BaseException:
        connection.close()
        raise
    return connection


def _options(settings: Settings, url: URL, name: str) -> dict[str, Any]:
    return {
        "user": url.username,
        "password": url.password,
        "host": url.host,
        "port": url.port or 5432,
        "database": url.database,
        "timeout": settings.database_connect_timeout_seconds,
        "ssl_context": _tls(settings),
        "application_name": name,
    }


def _tls(settings: Settings) -> ssl.SSLContext | bool:
    """One verified context for the process: building one costs about 20 ms, and the driver would build one per connection."""
    if settings.database_tls == "off":
        return False
    return ssl.create_default_context(cafile=settings.database_ca_file)


REVISION = sql("select max(version_num) from alembic_version")


def schema_revision(tx: Tx) -> str | None:
    """The newest migration that the database has, e.g. `0001`."""
    row = tx.first(REVISION)
    return None if row is None else row[0]

"""The driver's connection: one round trip a statement, never outside its transaction, never used again once it is in doubt."""

from __future__ import annotations

import importlib
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from shutil import which
from typing import Any

import pg8000
import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from shared import one_flight
from shared.db import Limits, Tx, engine_for, sql, transaction
from shared.one_flight import error_code, is_connection_failure
from shared.settings import Settings
from tests.roundtrips import Proxy, counting_proxy

ONE = sql("select cast(:n as integer)")
PATIENT = Limits(10_000, 10_000, 10_000)


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with counting_proxy(database_url) as made:
        yield made


@pytest.fixture
def through(proxy: Proxy, settings: Settings) -> Iterator[Engine]:
    changed = Settings.from_environment(
        {
            "DATABASE_URL": proxy.url,
            "DATABASE_TLS": "off",
            "DATABASE_POOL_SIZE": "1",
            "DATABASE_CONNECT_TIMEOUT_SECONDS": "2",
        }
    )
    engine = engine_for(changed)
    with transaction(engine) as tx:
        tx.first(ONE, n=0)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("statements", [1, 2, 5])
def test_a_transaction_takes_one_round_trip_a_statement_and_one_for_its_commit(
    proxy: Proxy, through: Engine, statements: int
) -> None:
    with proxy.counted() as round_trips, transaction(through) as tx:
        for number in range(statements):
            assert tx.first(ONE, n=number) == (number,)
    assert round_trips == [statements + 1]


def test_a_statement_without_parameters_is_no_exception(proxy: Proxy, through: Engine) -> None:
    with proxy.counted() as round_trips, transaction(through) as tx:
        tx.first(sql("select 1"))
    assert round_trips == [2]


def test_a_block_that_runs_nothing_sends_nothing(proxy: Proxy, through: Engine) -> None:
    with proxy.counted() as round_trips, transaction(through):
        pass
    assert round_trips == [0]


def test_a_rollback_takes_one_round_trip_and_leaves_nothing(proxy: Proxy, through: Engine) -> None:
    with transaction(through) as tx:
        tx.run(sql("create table kept (n integer)"))

    def fails() -> None:
        with transaction(through) as tx:
            tx.run(sql("insert into kept values (:n)"), n=1)
            raise KeyError

    with proxy.counted() as round_trips, pytest.raises(KeyError):
        fails()
    assert round_trips == [2]
    with transaction(through) as tx:
        assert tx.all(sql("select * from kept")) == []


def test_a_statement_never_runs_when_its_begin_fails(through: Engine) -> None:
    """All of it is in front of one Sync: the server skips whatever follows an error."""
    with transaction(through) as tx:
        tx.run(sql("create table kept (n integer)"))
    broken = Limits(-5, 1_000, 1_000)
    with pytest.raises(DBAPIError), transaction(through, broken) as tx:
        tx.run(sql("insert into kept values (:n)"), n=1)
    with transaction(through) as tx:
        assert tx.all(sql("select * from kept")) == []


def test_the_limits_end_with_the_transaction(through: Engine) -> None:
    with transaction(through, Limits(1_234, 567, 8_901)) as tx:
        assert tx.first(sql("show statement_timeout")) == ("1234ms",)
        assert tx.first(sql("show lock_timeout")) == ("567ms",)
        assert tx.first(sql("show transaction_isolation")) == ("read committed",)
    with through.connect() as connection:
        assert connection.exec_driver_sql("show statement_timeout").scalar() == "0"


def test_committing_a_failed_transaction_raises_and_never_looks_like_a_commit(through: Engine) -> None:
    def swallows() -> None:
        with transaction(through) as tx, suppress(DBAPIError):
            tx.run(sql("select 1 / :n"), n=0)

    with pytest.raises(DBAPIError):
        swallows()
    with transaction(through) as tx:
        assert tx.first(ONE, n=1) == (1,)


def test_an_error_is_known_by_its_sqlstate(through: Engine) -> None:
    with pytest.raises(DBAPIError) as raised, transaction(through) as tx:
        tx.run(sql("select 1 / :n"), n=0)
    assert error_code(raised.value) == "22012"
    assert not is_connection_failure(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        1,
        2**40,
        -1.5,
        True,
        "é🧾'\"",
        "",
        b"\x00\xff",
        Decimal("12.340000"),
        uuid.UUID(int=7),
        datetime(2026, 11, 30, 9, 14, 2, 118_000, tzinfo=UTC),
        [uuid.UUID(int=1), uuid.UUID(int=2)],
        ["a", 'b"c', "d,e"],
        [],
    ],
    ids=repr,
)
def test_values_come_back_as_they_went(through: Engine, value: Any) -> None:
    types = {
        int: "bigint",
        float: "float8",
        bool: "boolean",
        str: "text",
        bytes: "bytea",
        Decimal: "numeric",
        uuid.UUID: "uuid",
        datetime: "timestamptz",
        list: "uuid[]" if value and isinstance(value, list) and isinstance(value[0], uuid.UUID) else "text[]",
    }
    with transaction(through) as tx:
        row = tx.first(sql(f"select cast(:value as {types[type(value)]})"), value=value)
    assert row is not None
    assert row[0] == value
    assert type(row[0]) is type(value)


def test_null_and_json_come_back_too(through: Engine) -> None:
    with transaction(through) as tx:
        assert tx.first(sql("select cast(:value as uuid)"), value=None) == (None,)
        assert tx.first(sql("select cast(:value as jsonb)"), value='{"a": [1, null]}') == ({"a": [1, None]},)


def test_one_name_in_many_places_is_sent_once(through: Engine) -> None:
    with transaction(through) as tx:
        assert tx.first(sql("select :a || :b || :a"), a="x", b="y") == ("xyx",)


# -- doubt --------------------------------------------------------------------------------------------------------------


def test_a_connection_that_was_closed_meanwhile_is_replaced_without_failing_the_next_transaction(
    proxy: Proxy, through: Engine
) -> None:
    proxy.cut()
    with transaction(through) as tx:
        assert tx.first(ONE, n=1) == (1,)
    assert proxy.connections == 2


def test_a_backend_that_was_terminated_meanwhile_is_replaced_too(through: Engine, engine: Engine) -> None:
    with transaction(through) as tx:
        row = tx.first(sql("select pg_backend_pid()"))
    assert row is not None
    with transaction(engine) as tx:
        tx.first(sql("select pg_terminate_backend(:pid, 5000)"), pid=row[0])
    with transaction(through) as tx:
        assert tx.first(ONE, n=1) == (1,)


def test_a_silent_peer_is_given_up_after_the_timeout_and_never_handed_out_again(
    proxy: Proxy, through: Engine
) -> None:
    """The answer that is still under way would be taken for the answer to the next statement."""
    proxy.freeze()
    with pytest.raises(DBAPIError) as raised, transaction(through) as tx:
        tx.first(ONE, n=41)
    assert is_connection_failure(raised.value)
    proxy.thaw()
    for number in range(3):
        with transaction(through) as tx:
            assert tx.first(ONE, n=number) == (number,)
    assert proxy.connections == 2


def test_after_a_long_pause_a_silent_peer_costs_one_short_probe_and_not_the_request(
    proxy: Proxy, through: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen instance is thawed; meanwhile a gateway has forgotten its connection without telling anybody."""
    with through.connect() as connection:
        driver = connection.connection.driver_connection
    monkeypatch.setattr(one_flight, "IDLE_SECONDS", 0)
    monkeypatch.setattr(one_flight, "PROBE_SECONDS", 0.2)
    proxy.freeze()
    assert isinstance(driver, one_flight.Connection)
    assert driver.usable() is False
    proxy.thaw()
    with transaction(through) as tx:
        assert tx.first(ONE, n=1) == (1,)


def test_a_refused_connection_is_known_as_such(database_url: str) -> None:
    nobody = make_url(database_url).set(port=1).render_as_string(hide_password=False)
    engine = engine_for(Settings.from_environment({"DATABASE_URL": nobody, "DATABASE_TLS": "off"}))
    with pytest.raises((DBAPIError, OSError)) as raised, transaction(engine) as tx:
        tx.first(ONE, n=1)
    assert is_connection_failure(raised.value)
    engine.dispose()


def test_another_version_of_the_driver_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg8000, "__version__", "9.9.9")
    with pytest.raises(ImportError, match=r"9\.9\.9"):
        importlib.reload(one_flight)


# -- the pooler ---------------------------------------------------------------------------------------------------------

PGBOUNCER = which("pgbouncer") or which("/usr/sbin/pgbouncer")


@pytest.fixture
def pooled(database_url: str, tmp_path: Path) -> Iterator[str]:
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    url = make_url(database_url)
    folder = tmp_path
    (folder / "users").write_text(f'"{url.username}" "{url.password}"\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(
        f"""
        [databases]
        * = host={url.host} port={url.port}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = plain
        auth_file = {folder}/users
        pool_mode = transaction
        default_pool_size = 3
        max_client_conn = 100
        ignore_startup_parameters = extra_float_digits
        """.replace("        ", "")
    )
    for path in (folder, *folder.parents[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    for file in folder.iterdir():
        file.chmod(0o644)
    process = subprocess.Popen(
        [PGBOUNCER, "-u", "nobody", str(configuration)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _until(lambda: _answers(port))
        yield url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)
    finally:
        process.terminate()
        process.wait(timeout=10)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_behind_a_transaction_mode_pooler_eight_clients_get_their_own_answers(pooled: str) -> None:
    environment = {"DATABASE_URL": pooled, "DATABASE_TLS": "off", "DATABASE_CONNECT_TIMEOUT_SECONDS": "30"}
    wrong: list[tuple[int, Any]] = []
    failed: list[Exception] = []

    def client(number: int) -> None:
        engine = engine_for(Settings.from_environment(environment))
        try:
            for turn in range(250):
                with transaction(engine, PATIENT) as tx:
                    _check(tx, number * 1000 + turn)
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            failed.append(error)
        engine.dispose()

    def _check(tx: Tx, n: int) -> None:
        for _ in range(2):
            row = tx.first(ONE, n=n)
            if row != (n,):
                wrong.append((n, row))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert failed == []
    assert wrong == []

"""The schema comes to a database by `infra.admin.migrate`, whatever is there already and whoever else is at it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from pydantic import SecretStr
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.engine import make_url

from infra.admin.migrate import ONE_AT_A_TIME, SCRIPTS, current, migrate
from shared.db import SCHEMA_REVISION, engine_for, schema_revision, sql, transaction
from shared.errors import Conflict, DatabaseUnavailable
from shared.settings import Settings
from tests.databases import Databases
from tests.given import a_machine, a_tenant, row_of, violations, work

EVERY = sorted(path.name[:4] for path in (SCRIPTS / "versions").glob("[0-9]*.py"))


@pytest.fixture
def empty(postgres: Databases) -> Iterator[str]:
    with postgres.fresh() as url:
        yield url


@contextmanager
def by_hand(url: str) -> Iterator[Engine]:
    """A plain engine, for what the product never does."""
    engine = create_engine(
        make_url(url).set(drivername="postgresql+pg8000"),
        connect_args={"ssl_context": False},
        poolclass=NullPool,
    )
    yield engine
    engine.dispose()


def run(url: str, statement: str) -> None:
    with by_hand(url) as engine, engine.begin() as connection:
        connection.exec_driver_sql(statement)


def test_an_empty_database_gets_every_migration_and_a_second_run_finds_nothing_to_do(empty: str) -> None:
    assert current(empty, tls="off") is None
    assert migrate(empty, tls="off")[-1] == SCHEMA_REVISION
    assert migrate(empty, tls="off") == []
    assert current(empty, tls="off") == SCHEMA_REVISION


def test_the_code_asks_for_the_newest_migration(engine: Engine) -> None:
    with transaction(engine) as tx:
        assert schema_revision(tx) == SCHEMA_REVISION


def test_a_database_with_work_in_it_keeps_it(engine: Engine, database_url: str) -> None:
    tenant = a_tenant(engine)
    queued = work(engine, tenant, a_machine(engine, tenant))
    assert migrate(database_url, tls="off") == []
    assert row_of(engine, queued) is not None


WORK_OF_THE_FIRST_VERSION = """
    insert into organizations (id, name) values ('00000000-0000-7000-8000-000000000001', 'first');
    insert into workspaces (org_id, id, linear_organization_id, name, webhook_secret)
    values ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000002', 'linear', 'w', 'sealed');
    insert into orchestrators (org_id, id, name)
    values ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000003', 'laptop');
    begin;
    insert into dispatch_sessions (org_id, id, workspace_id, orchestrator_id, linear_issue_id, linear_identifier, team_id, title, repo)
    values ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000004',
            '00000000-0000-7000-8000-000000000002', '00000000-0000-7000-8000-000000000003', 'i', 'PAY-1', 't', 'T', 'acme/api');
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload)
    values ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000005',
            '00000000-0000-7000-8000-000000000003', '00000000-0000-7000-8000-000000000004', '{}');
    commit;
"""


def test_a_database_with_work_in_it_gets_what_came_since_it_was_made(empty: str, settings: Settings) -> None:
    run(empty, (SCRIPTS / "sql" / "0001_core.sql").read_text())
    run(empty, "create table alembic_version (version_num varchar(32) primary key)")
    run(empty, "insert into alembic_version values ('0001')")
    run(empty, WORK_OF_THE_FIRST_VERSION)
    assert migrate(empty, tls="off") == EVERY[1:]
    engine = engine_for(settings.model_copy(update={"database_url": SecretStr(empty)}))
    with transaction(engine) as tx:
        assert tx.all(sql("select attempts, prompts_told, wanted_again from dispatch_queue")) == [
            (0, 0, False)
        ]
    tenant = a_tenant(engine)
    work(engine, tenant, a_machine(engine, tenant))
    assert violations(engine) == []
    engine.dispose()


def test_first_runs_at_once_wait_for_each_other_and_apply_each_migration_once(empty: str) -> None:
    with by_hand(empty) as engine, ThreadPoolExecutor(3) as pool:
        with engine.begin() as before_them:
            before_them.exec_driver_sql(ONE_AT_A_TIME)
            runs = [pool.submit(migrate, empty, tls="off") for _ in range(3)]
            waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
            while before_them.exec_driver_sql(waiting).scalar_one() < len(runs):
                assert not any(run.done() for run in runs)
        assert sorted(run.result() for run in runs) == [[], [], EVERY]


def test_a_migration_that_fails_leaves_nothing_behind(empty: str) -> None:
    run(empty, "create table dispatch_queue (theirs integer)")
    with pytest.raises(Conflict, match='"dispatch_queue" already exists'):
        migrate(empty, tls="off")
    assert current(empty, tls="off") is None
    run(empty, "create table organizations (free_for_the_taking integer)")


def test_a_database_of_a_newer_version_is_left_alone(database_url: str) -> None:
    run(database_url, "update alembic_version set version_num = '9999'")
    with pytest.raises(Conflict, match="newer version"):
        migrate(database_url, tls="off")
    assert current(database_url, tls="off") == "9999"


def test_a_database_that_cannot_be_reached_is_named_so(empty: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="does not exist"):
        migrate(empty + "_missing", tls="off")
    nobody_listens = make_url(empty).set(port=1).render_as_string(hide_password=False)
    with pytest.raises(DatabaseUnavailable, match=r"at 127\.0\.0\.1:1 cannot be used: Connection refused"):
        migrate(nobody_listens, tls="off")


def test_a_table_that_stays_in_use_is_not_waited_for(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.admin.migrate.DO_NOT_QUEUE_FOR_TABLES", "set local lock_timeout = '20ms'")
    with by_hand(database_url) as engine, engine.begin() as somebody:
        somebody.exec_driver_sql("lock table alembic_version in access exclusive mode")
        with pytest.raises(DatabaseUnavailable, match="in use; nothing was changed, try again"):
            migrate(database_url, tls="off")

"""The embedded server: there when it is asked for, gone when whoever asked is gone, and its data still there the next time."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pg8000.native
import pytest
from sqlalchemy.engine import make_url

from infra.local import postgres as launcher
from infra.local import server_process, unprivileged
from infra.local.postgres import LocalPostgres, find_binaries
from infra.local.unprivileged import Account
from shared.errors import ConfigurationError, Conflict, DatabaseUnavailable
from tests.conftest import a_folder_for_postgres

ROOT = Path(__file__).parents[2]
LAUNCH = """
import os, signal, sys
from pathlib import Path
from infra.local.postgres import LocalPostgres, find_binaries

with LocalPostgres(Path(sys.argv[1]), binaries=find_binaries(os.environ), durable=False) as server:
    print(server.url("postgres"), flush=True)
    signal.pause()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with a_folder_for_postgres() as folder:
        yield folder / "postgres"


def server_in(folder: Path, **options: str) -> LocalPostgres:
    return LocalPostgres(folder, binaries=find_binaries(os.environ), durable=False, options=options)


def answer(url: str, statement: str) -> object:
    where = make_url(url)
    with pg8000.native.Connection(
        where.username or "",
        host=where.host or "",
        port=where.port or 0,
        password=where.password,
        database=where.database,
        ssl_context=False,
    ) as connection:
        rows = connection.run(statement)
        return rows[0][0] if rows else None


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", make_url(url).port or 0)) == 0


def process_of_the_server_in(folder: Path) -> int:
    return int((folder / "cluster" / "postmaster.pid").read_text().split()[0])


def until(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_data_and_password_are_still_there_at_the_next_start(folder: Path) -> None:
    server = server_in(folder)
    with server:
        first = server.create_database("dispatch")
        answer(first, "create table kept as select 42 as answer")
    assert not listens(first)
    with server_in(folder) as again:
        assert again.create_database("dispatch") == again.url()
        assert answer(again.url(), "select answer from kept") == 42
        assert make_url(again.url()).password == make_url(first).password


def test_the_password_is_required_and_it_and_the_log_are_for_nobody_elses_eyes(folder: Path) -> None:
    with server_in(folder) as server:
        for secret in ("password", "server.log"):
            assert (folder / secret).stat().st_mode & 0o777 == 0o600
        wrong = make_url(server.url("postgres")).set(password="guess").render_as_string(hide_password=False)
        with pytest.raises(pg8000.exceptions.DatabaseError, match="28P01"):
            answer(wrong, "select 1")


def test_the_servers_options_are_the_callers(folder: Path) -> None:
    with server_in(folder, max_connections="7") as server:
        assert answer(server.url("postgres"), "show max_connections") == "7"
        assert answer(server.url("postgres"), "show listen_addresses") == "127.0.0.1"
        assert answer(server.url("postgres"), "show unix_socket_directories") == ""


def test_a_durable_server_is_the_default(folder: Path) -> None:
    with LocalPostgres(folder, binaries=find_binaries(os.environ)) as server:
        assert answer(server.url("postgres"), "show fsync") == "on"


def test_a_folder_that_is_in_use_is_refused_and_its_server_left_alone(folder: Path) -> None:
    with server_in(folder) as server:
        with pytest.raises(Conflict, match=f"in use by process {os.getpid()}"):
            server_in(folder).start()
        assert answer(server.url("postgres"), "select 1") == 1


def test_a_server_that_does_not_start_says_why_and_frees_the_folder(folder: Path) -> None:
    with pytest.raises(
        DatabaseUnavailable, match=r"did not start[\s\S]*unrecognized configuration parameter"
    ):
        server_in(folder, no_such_option="1").start()
    with server_in(folder) as server:
        assert answer(server.url("postgres"), "select 1") == 1


def test_a_taken_port_is_an_error_only_if_the_caller_chose_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        chosen = LocalPostgres(folder, binaries=find_binaries(os.environ), port=port, durable=False)
        with pytest.raises(DatabaseUnavailable, match="Address already in use"):
            chosen.start()
        offers = iter([port, port, server_process.free_port()])
        monkeypatch.setattr(launcher, "free_port", lambda: next(offers))
        with server_in(folder) as server:
            assert make_url(server.url()).port != port


# -- the end ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher in a process (and a process group) of its own, and the URL of its server."""
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, folder],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_kill_9_of_the_launcher_takes_the_server_down(
    launched: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    process, url = launched
    answer(url, "create table kept as select 42 as answer")
    process.kill()
    assert until(lambda: not listens(url))
    with server_in(folder) as server:
        assert answer(server.url("postgres"), "select answer from kept") == 42


def test_the_next_start_waits_for_a_server_whose_launcher_was_just_killed(
    launched: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    process, url = launched
    answer(url, "create table kept as select 42 as answer")
    left = process_of_the_server_in(folder)
    os.kill(left, signal.SIGSTOP)  # it would be gone too soon to be in anybody's way
    process.kill()
    process.wait()
    awakening = threading.Timer(0.3, os.kill, (left, signal.SIGCONT))
    awakening.start()
    try:
        with server_in(folder) as server:
            assert answer(server.url("postgres"), "select answer from kept") == 42
    finally:
        awakening.join()


def test_ctrl_c_reaches_the_launcher_which_ends_the_server_in_order(
    launched: tuple[subprocess.Popen[str], str], folder: Path
) -> None:
    process, url = launched
    assert os.getpgid(process_of_the_server_in(folder)) != os.getpgid(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=20)
    assert not listens(url)
    assert "database system is shut down" in (folder / "server.log").read_text()


def test_the_mark_of_a_server_that_has_gone_does_not_block_even_if_another_program_has_its_process_id(
    folder: Path,
) -> None:
    with server_in(folder):
        mark = (folder / "cluster" / "postmaster.pid").read_text().splitlines()
    with subprocess.Popen(["/bin/sleep", "60"], **Account.for_postgres().popen_options()) as other:
        (folder / "cluster" / "postmaster.pid").write_text("\n".join([str(other.pid), *mark[1:]]) + "\n")
        try:
            with server_in(folder) as server:
                assert answer(server.url("postgres"), "select 1") == 1
            assert other.poll() is None
        finally:
            other.kill()


def test_a_first_start_that_was_interrupted_begins_anew(folder: Path) -> None:
    binaries = binaries_in(folder.parent / "interrupted")
    (binaries / "initdb").write_text("#!/bin/sh\necho 18 > ${1#--pgdata=}/PG_VERSION\nkill -9 $$\n")
    with pytest.raises(DatabaseUnavailable, match="could not be created"):
        LocalPostgres(folder, binaries=binaries).start()
    with server_in(folder) as server:
        assert answer(server.url("postgres"), "select 1") == 1


# -- as root ------------------------------------------------------------------------------------------------------------

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with a_folder_for_postgres() as folder:
        monkeypatch.setattr(unprivileged, "ELSEWHERE", folder / "elsewhere")
        yield folder / "elsewhere"


@as_root
def test_data_below_a_closed_folder_goes_elsewhere_and_is_found_again(
    tmp_path: Path, elsewhere: Path
) -> None:
    data = tmp_path / "postgres"  # pytest closes its folders to everybody else, as /root is closed
    with server_in(data) as server:
        answer(server.url("postgres"), "create table kept as select 42 as answer")
    assert data.resolve().parent == elsewhere
    with server_in(data) as server:
        assert answer(server.url("postgres"), "select answer from kept") == 42
    data.unlink()
    with server_in(data) as server:
        assert answer(server.url("postgres"), "select to_regclass('kept')") is None


@as_root
def test_binaries_below_a_closed_folder_are_copied_once_with_their_libraries_at_the_same_distance(
    tmp_path: Path, folder: Path, elsewhere: Path
) -> None:
    tree = find_binaries(os.environ).resolve().parent
    closed = tmp_path / tree.parent.name / tree.name
    shutil.copytree(tree, closed, symlinks=True, ignore=shutil.ignore_patterns("include"))
    libraries = tree.parent.with_name(f"{tree.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, tmp_path / libraries.name)
    for _ in range(2):
        with LocalPostgres(folder, binaries=closed / "bin", durable=False) as server:
            assert answer(server.url("postgres"), "select 1") == 1
    (copy,) = elsewhere.iterdir()
    assert (copy / tree.parent.name / tree.name / "bin" / "postgres").is_file()
    assert (copy / libraries.name).is_dir() == libraries.is_dir()


# -- the binaries -------------------------------------------------------------------------------------------------------


def binaries_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for program in ("initdb", "postgres"):
        (folder / program).touch(mode=0o755)
    return folder


def test_pg_bin_is_preferred_to_everything(tmp_path: Path) -> None:
    mine = binaries_in(tmp_path / "mine")
    assert find_binaries({"PG_BIN": str(mine), "PATH": ""}) == mine


def test_a_pg_bin_without_the_programs_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"PG_BIN={tmp_path}"):
        find_binaries({"PG_BIN": str(tmp_path)})


def test_the_newest_supported_version_of_the_system_is_taken_before_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "WHEELS", ())
    monkeypatch.setattr(launcher, "SYSTEM", tmp_path / "system")
    on_path = binaries_in(tmp_path / "path")
    binaries_in(tmp_path / "system" / "9" / "bin")
    assert find_binaries({"PATH": str(on_path)}) == on_path
    for version in ("15", "9.6", "16"):
        binaries_in(tmp_path / "system" / version / "bin")
    assert find_binaries({"PATH": str(on_path)}) == tmp_path / "system" / "16" / "bin"


def test_without_any_binaries_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "WHEELS", ())
    monkeypatch.setattr(launcher, "SYSTEM", tmp_path)
    with pytest.raises(ConfigurationError, match=r"requirements-dev\.txt.*PG_BIN.*DATABASE_URL"):
        find_binaries({"PATH": str(tmp_path)})

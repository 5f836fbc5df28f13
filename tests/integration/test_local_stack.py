"""`make serve` as a newcomer meets it: what it prints works, and what it cannot do it says in one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from infra.admin import views
from infra.local import linear
from infra.local.operator_environment import kept
from infra.local.seed import Demo, seed
from infra.local.server_process import free_port
from shared import orchestrators, workspaces
from shared.crypto import KeyRing
from shared.db import OPERATOR, transaction
from shared.settings import Settings
from tests.conftest import a_folder_for_postgres
from tests.steps import committed

ROOT = Path(__file__).resolve().parents[2]
NOBODY_LISTENS = "postgresql://u:hunter2@127.0.0.1:1/dispatch"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def command(*words: object, **environment: str) -> list[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "PG_BIN") if name in os.environ}
    return [
        *("env", "-i", *(f"{name}={value}" for name, value in {**inherited, **environment}.items())),
        *(sys.executable, "-m", *map(str, words)),
    ]


def ended(*words: object, **environment: str) -> Ended:
    done = subprocess.run(
        command(*words, **environment), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def data() -> Iterator[Path]:
    with a_folder_for_postgres() as folder:
        yield folder / "data"


@contextmanager
def served_in_the_background_of_a_script(
    data: Path, port: int
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The stack, started as a shell without job control starts what ends with `&`; and what it has printed."""
    with subprocess.Popen(
        command("infra.local", "--data", data, "--port", port),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509 - there is one thread
    ) as process:
        assert process.stdout is not None
        printed = ""
        try:
            for line in process.stdout:
                printed += line
                if "the data stays in" in line:
                    break
            yield process, printed
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_what_serve_prints_works_and_interrupting_it_ends_it_wherever_it_was_started(data: Path) -> None:
    port = free_port()
    with served_in_the_background_of_a_script(data, port) as (process, printed):
        (operator,) = re.findall(r"the operator +(.+)", printed)
        assert (data / "operator.env").stat().st_mode & 0o777 == 0o600
        assert not re.search(r"postgres(ql)?://|BRIDGE_ENCRYPTION_KEY", printed)
        for words in ("doctor", "reencrypt", "sessions list"):
            line = operator.replace("sessions list", words)
            done = subprocess.run(
                ["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done

        (url, secret) = re.findall(r"infra\.local\.linear (\S+) (\S+)", printed)[0]
        sent = ended("infra.local.linear", url + "/", secret)
        assert (sent.code, sent.out[:8]) == (0, "200 PAY-")
        assert ended("infra.local.linear", url, "another").code == 1

        again = ended("infra.local", "--data", data, "--port", port)
        assert (again.code, again.err.count("\n")) == (1, 1)
        assert f"in use by process {process.pid}" in again.err
        assert "make serve DATA=.local2 PORT=8081" in again.err
        assert (data / "operator.env").exists()

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert not (data / "operator.env").exists()


def test_a_port_that_is_taken_is_one_sentence(data: Path, database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = ended("infra.local", "--data", data, "--port", port, DATABASE_URL=database_url)
    assert answer.code == 1
    assert answer.err == (
        f"make serve: port {port} of 127.0.0.1 cannot be used: Address already in use; "
        "take another one, e.g. `make serve PORT=8081`, or any that is free, PORT=0\n"
    )
    assert ended("infra.local", "--port", "70000").code == 2


def test_a_database_url_that_leads_nowhere_is_one_sentence_that_says_what_to_unset(data: Path) -> None:
    answer = ended("infra.local", "--data", data, "--port", 0, DATABASE_URL=NOBODY_LISTENS)
    assert answer.code == 1
    assert answer.err == (
        "make serve: the database at 127.0.0.1:1 cannot be used: Connection refused; "
        "unset DATABASE_URL to use the embedded Postgres\n"
    )


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = ended("infra.local", "--data", tmp_path / "file" / "data", "--port", 0)
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert str(tmp_path / "file") in answer.err


def test_the_operators_file_is_what_a_shell_reads_back_even_over_one_that_was_open_to_all(
    tmp_path: Path,
) -> None:
    file = tmp_path / "operator.env"
    file.write_text("STALE=1\n")
    odd = {"DATABASE_URL": "postgresql://u:it's $HOME `x`@h/d", "LOG_LEVEL": "INFO"}
    with kept(odd, file):
        assert file.stat().st_mode & 0o777 == 0o600
        read = subprocess.run(
            ["/bin/sh", "-c", f'. {file}; printf %s "$DATABASE_URL$STALE"'],
            capture_output=True,
            text=True,
            check=True,
        )
        assert read.stdout == odd["DATABASE_URL"]
    assert not file.exists()


# -- the demo organization ----------------------------------------------------------------------------------------------


def test_a_restart_finds_its_tokens_and_replaces_those_that_were_revoked(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    said: list[str] = []

    def start() -> Demo:
        return seed(engine, settings, tmp_path / "demo.json", say=said.append)

    first = start()
    assert start() == first
    with transaction(engine, OPERATOR) as tx:
        for token in views.tokens(tx, org_id=UUID(first.org_id), limit=10):
            if token.label == "laptop":
                orchestrators.revoke_token(tx, org_id=UUID(first.org_id), token_id=token.id)
    second = start()
    assert second.tokens["desktop"] == first.tokens["desktop"]
    assert committed(engine, orchestrators.authenticate, second.tokens["laptop"]).org_id == UUID(first.org_id)
    assert said == ["demo: the token of laptop was not valid any more; here is a new one"]
    assert Demo(**json.loads((tmp_path / "demo.json").read_text())) == second == start()


def test_a_restart_signs_with_the_secret_that_the_operator_has_rotated_to(
    engine: Engine, settings: Settings, tmp_path: Path
) -> None:
    first = seed(engine, settings, tmp_path / "demo.json")
    org_id, new = UUID(first.org_id), "lin_wh_the_new_one_of_the_demo"
    with transaction(engine, OPERATOR) as tx:
        (workspace,) = views.workspaces(tx, org_id=org_id, limit=2)
        assert workspaces.rotate_secret(
            tx, KeyRing.of(settings), org_id=org_id, workspace_id=workspace.id, webhook_secret=new
        )
    assert seed(engine, settings, tmp_path / "demo.json") == replace(first, webhook_secret=new)


# -- Linear's part ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "no answer from http://127.0.0.1:1: Connection refused; is `make serve`"),
        ("127.0.0.1:8080", "127.0.0.1:8080 is no address of a server"),
        ("http://", "http:// is no address of a server"),
        ("http://[", "http://["),
        ("http://localhost:port", "http://localhost:port is no address of a server"),
    ],
)
def test_a_webhook_that_cannot_be_sent_is_one_sentence(
    capsys: pytest.CaptureFixture[str], url: str, said: str
) -> None:
    assert linear.main([url, "secret"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_webhooks_of_one_second_are_about_issues_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time_ns()
    clock = iter([now, now + 2_000_000, now + 900_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    monkeypatch.setattr(linear, "send", lambda *_: httpx.Response(200, text="{}"))
    assert [linear.main(["http://127.0.0.1:1", "secret"]) for _ in range(3)] == [0, 0, 0]
    assert len(set(re.findall(r"PAY-\d+", capsys.readouterr().out))) == 3

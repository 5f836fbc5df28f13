"""Each function as the cloud starts it: the real command of functions-framework, one entry point a process."""

from __future__ import annotations

import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from infra.local.seed import REPO, TEAM, TEAM_ROUTE
from infra.local.stack import free_port
from shared.db import OPERATOR, sql, transaction
from tests.contract.conftest import CRON_SECRET, ROOT, answers
from tests.given import a_machine, a_tenant
from tests.linear_given import SECRET, happened
from tests.linear_samples import DELEGATED, US

LIMIT = 5 * 1024 * 1024
APP_USER = sql("update workspaces set app_user_id = :us where org_id = :org_id")


@contextmanager
def function(target: str, environment: dict[str, str], log: Path) -> Iterator[str]:
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("functions-framework")),
        "--source",
        "functions/gcp.py",
        "--target",
        target,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], **environment},
            stdout=output,
            stderr=output,
        )
    try:
        answers(process, f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_sweep_alone_answers_a_tick(served: dict[str, Any], tmp_path: Path) -> None:
    with function("sweep", served["environment"], tmp_path / "log") as url:
        assert (
            httpx.post(url, headers={"Authorization": f"Bearer {CRON_SECRET}"}, timeout=60).status_code == 200
        )
        assert httpx.get(url, timeout=60).status_code == 405
        assert httpx.options(url, timeout=60).status_code == 405


def test_the_claim_alone_answers_a_machine(served: dict[str, Any], tmp_path: Path) -> None:
    engine: Engine = served["engine"]
    machine = a_machine(engine, a_tenant(engine))
    without_keys = {
        name: value
        for name, value in served["environment"].items()
        if name not in ("BRIDGE_ENCRYPTION_KEY", "CRON_SECRET")
    }
    with function("claim", without_keys, tmp_path / "log") as url:
        headers = {"Authorization": f"Bearer {machine.token}"}
        assert httpx.get(f"{url}/api/dispatch/poll", headers=headers, timeout=60).json()["messages"] == []
        assert httpx.head(f"{url}/api/dispatch/poll", headers=headers, timeout=60).status_code == 200
        wrong = httpx.delete(f"{url}/api/dispatch/poll", headers=headers, timeout=60)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
        assert httpx.get(f"{url}/nowhere", headers=headers, timeout=60).status_code == 404
        long = httpx.post(
            f"{url}/api/dispatch/claim", headers=headers, content=b" " * (256 * 1024 + 1), timeout=60
        )
        assert (long.status_code, long.json()["error"]["details"]["field"]) == (413, "body")


def test_the_webhook_alone_verifies_the_very_bytes_up_to_its_limit(
    served: dict[str, Any], tmp_path: Path
) -> None:
    engine: Engine = served["engine"]
    event = happened(DELEGATED)
    tenant = a_tenant(
        engine, linear_organization_id=event["organizationId"], webhook_secret=served["keys"].seal(SECRET)
    )
    with transaction(engine, OPERATOR) as tx:
        tx.run(APP_USER, us=US, org_id=tenant.org_id)
        tx.run(TEAM_ROUTE, org_id=tenant.org_id, workspace_id=tenant.workspace_id, team=TEAM, repo=REPO)
    a_machine(engine, tenant, repos=[REPO])
    with function("webhook", served["environment"], tmp_path / "log") as url:

        def send(body: bytes, **headers: str) -> httpx.Response:
            signature = hmac.digest(SECRET.encode(), body, "sha256").hex()
            return httpx.post(
                url, content=body, headers={"Linear-Signature": signature, **headers}, timeout=60
            )

        body = json.dumps(event, ensure_ascii=False, indent=1).encode()
        assert send(body).json()["outcome"] == "started"
        assert send(body + b" ").json()["outcome"] == "joined"
        padded = json.dumps(event).encode()
        assert send(padded + b" " * (LIMIT - len(padded))).status_code == 200
        assert send(padded + b" " * (LIMIT + 1 - len(padded))).status_code == 413
        assert send(b"\xff\xfe").status_code == 400
        assert send(b"{").status_code == 400
        assert send(b"").status_code == 401
        assert httpx.get(url, timeout=60).status_code == 405
        one_changed = body.replace(b"PAY-412", b"PAY-413", 1)
        headers = {"LINEAR-SIGNATURE": hmac.digest(SECRET.encode(), body, "sha256").hex()}
        assert httpx.post(url, content=one_changed, headers=headers, timeout=60).status_code == 401
        signature = hmac.digest(SECRET.encode(), body, "sha256").hex()
        again = httpx.post(
            url,
            content=iter([body[:100], body[100:]]),
            headers={"linear-signature": f"sha256={signature}"},
            timeout=60,
        )
        assert again.json()["outcome"] == "heard_before", "a chunked body has no length"


@pytest.mark.parametrize(
    ("target", "missing", "named"),
    [
        ("webhook", "BRIDGE_ENCRYPTION_KEY", "BRIDGE_ENCRYPTION_KEY"),
        ("sweep", "CRON_SECRET", "CRON_SECRET"),
        ("claim", "DATABASE_URL", "DATABASE_URL"),
    ],
)
def test_a_missing_setting_stops_the_start_with_its_name(
    served: dict[str, Any], tmp_path: Path, target: str, missing: str, named: str
) -> None:
    environment = {name: value for name, value in served["environment"].items() if name != missing}
    with pytest.raises(AssertionError), function(target, environment, tmp_path / "log"):
        pass
    log = (tmp_path / "log").read_text()
    assert named in log
    assert served["environment"][missing] not in log


def test_an_unknown_setting_stops_the_start_with_its_name(served: dict[str, Any], tmp_path: Path) -> None:
    environment = {**served["environment"], "DISPATCH_MAX_ATEMPTS": "7"}
    with pytest.raises(AssertionError), function("claim", environment, tmp_path / "log"):
        pass
    assert "DISPATCH_MAX_ATEMPTS" in (tmp_path / "log").read_text()


def test_a_request_that_ends_in_the_middle_is_not_acted_on(url: str) -> None:
    port = int(url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST /linear HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert httpx.get(f"{url}/api/dispatch/poll", timeout=60).status_code == 401

"""A machine for the demo: registers, polls, claims one piece of work at a time over HTTP, and behaves as it is told.

`python -m infra.local.demo_machine URL NAME complete|hang|fail`, with the token in DEMO_TOKEN. The real one is the orchestrator program.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import httpx


def main(url: str, name: str, behaviour: str) -> None:
    """Runs until it is killed."""
    http = httpx.Client(
        base_url=url, headers={"Authorization": f"Bearer {os.environ['DEMO_TOKEN']}"}, timeout=10
    )
    registration = {"name": name, "repos": ["quartz/payments"], "maxConcurrentJobs": 2}
    me = (
        http.post("/api/orchestrators/register", json=registration)
        .raise_for_status()
        .json()["orchestratorId"]
    )
    print(f"{name}: registered as {me}", flush=True)
    while True:
        http.post(f"/api/orchestrators/{me}/heartbeat", json={})
        for message in http.get("/api/dispatch/poll").raise_for_status().json()["messages"]:
            claim = http.post(f"/api/dispatch/{message['queueId']}/claim")
            if claim.status_code == 200:
                work(http, name, claim.json(), behaviour)
        time.sleep(0.2)


def work(http: httpx.Client, name: str, claim: dict[str, Any], behaviour: str) -> None:
    """Does, leaves or fails the work."""
    message, attempt = claim["message"], claim["attempt"]
    session = f"/api/sessions/{message['sessionId']}"
    print(f"{name}: claimed {message['linearIdentifier']} (attempt {attempt})", flush=True)
    http.post(
        f"{session}/status",
        json={"status": "running", "progressPercent": 40, "message": "reading the code", "attempt": attempt},
    )
    if behaviour == "hang":
        while True:
            time.sleep(60)
    if behaviour == "fail":
        http.post(
            f"/api/dispatch/{message['queueId']}/release",
            json={"error": "the tests do not pass", "attempt": attempt},
        )
        return
    done = {
        "success": True,
        "prUrl": "https://github.com/quartz/payments/pull/7",
        "summary": "Rounds the last part.",
        "attempt": attempt,
    }
    http.post(f"{session}/complete", json=done).raise_for_status()
    print(f"{name}: completed {message['linearIdentifier']}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])

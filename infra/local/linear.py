"""Plays Linear: signs a webhook from sample data as Linear would and sends it.

`python -m infra.local.linear URL SECRET [--title …] [--description …]`
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

SAMPLE = Path(__file__).with_name("samples") / "delegated.json"


def delegated(title: str, number: int, *, description: str | None = None) -> dict[str, Any]:
    """The event of an issue that somebody delegates to the agent just now; a new issue with each call."""
    event: dict[str, Any] = json.loads(SAMPLE.read_text())
    now = datetime.now(UTC)
    issue = event["data"]
    issue.update(id=str(uuid.uuid4()), number=number, identifier=f"PAY-{number}", title=title)
    issue["url"] = f"https://linear.app/quartzworks/issue/PAY-{number}"
    if description is not None:
        issue["description"] = description
    event.update(url=issue["url"], createdAt=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"))
    event["webhookTimestamp"] = int(now.timestamp() * 1000)
    return event


def send(url: str, event: dict[str, Any], secret: str) -> httpx.Response:
    """Delivers an event once, signed over the bytes that are sent. Linear would repeat it after 1 min, 1 h and 6 h on anything but 200."""
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    headers = {
        "Content-Type": "application/json; charset=utf-8",
        "Linear-Event": event["type"],
        "Linear-Delivery": str(uuid.uuid4()),
        "Linear-Signature": hmac.new(secret.encode(), body, hashlib.sha256).hexdigest(),
    }
    return httpx.post(f"{url.rstrip('/')}/linear/webhook", content=body, headers=headers, timeout=10)


def main(words: Sequence[str] | None = None) -> int:
    """Sends one event. Returns the exit code: 0 for an answer of 200, 1 for anything else."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.local.linear", description="send a signed webhook, as Linear would"
    )
    parser.add_argument("url")
    parser.add_argument("secret")
    parser.add_argument("--title", default="Rounding drops a cent on split refunds")
    parser.add_argument("--description")
    options = parser.parse_args(words)
    # Of each millisecond of a day its own: an issue is named by its number, and two of one number are hard to tell apart.
    number = time.time_ns() // 1_000_000 % 100_000_000
    event = delegated(options.title, number, description=options.description)
    try:
        answer = send(options.url, event, options.secret)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        print(f"{options.url} is no address of a server: {error}", file=sys.stderr)
        return 1
    except httpx.TransportError as error:
        reason = str(error).rpartition("] ")[2] or type(error).__name__
        print(f"no answer from {options.url}: {reason}; is `make serve` running there?", file=sys.stderr)
        return 1
    print(answer.status_code, event["data"]["identifier"], answer.text)
    return 0 if answer.status_code == 200 else 1


if __name__ == "__main__":
    sys.exit(main())

"""An agent for the tests: writes down that it ran, and then does what the title of its work says.

`python agent.py RECORD`. A line of RECORD: dispatch id, attempt, process, and what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def record(*words: object) -> None:
    """One line in one write: lines of agents that run at once do not mix."""
    line = " ".join(
        map(str, (os.environ["DISPATCH_ID"], os.environ["DISPATCH_ATTEMPT"], os.getpid(), *words))
    )
    descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (line + "\n").encode())
    os.close(descriptor)


def main() -> int:
    record("started")
    message = json.loads(sys.stdin.readline())
    assert message == json.loads(Path(os.environ["DISPATCH_MESSAGE_FILE"]).read_text())
    what, _, rest = message["title"].partition(" ")
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["/bin/sleep", "1000"]) if what in ("parent", "stubborn") else None
    record("began", *([child.pid] if child else []))
    if what in ("hang", "stubborn"):
        time.sleep(1000)
    if what == "exit":
        print(
            json.dumps({"errorMessage": "the tests do not pass"}) if " because" in rest else "no object here"
        )
        return int(rest.split()[0])
    if what == "variables":
        record("variables", *sorted(os.environ))
    if what == "progress":
        print("::progress 40 reading the code", flush=True)
        time.sleep(float(rest))
    if what == "listen":
        record("heard", json.loads(sys.stdin.readline())["body"])
    if what == "prompts":
        time.sleep(float(rest or 0))
        record("prompts", *[prompt["body"] for prompt in message.get("prompts", [])])
    print("some output")
    print(
        json.dumps(
            {
                "prUrl": "https://github.com/acme/api/pull/7",
                "summary": f"Did {message['linearIdentifier']}.",
                "tokensUsed": 1200,
                "costUsd": 0.25,
            },
            indent=2,
        )
    )
    record("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make demo`: the main job end to end, on real parts, with two of the things that go wrong.

Waits are on the state of the database, never on time that has to be guessed; the timeouts of the product are set to seconds.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import UUID

from sqlalchemy import Engine

from infra.local import linear
from infra.local.seed import REPO
from infra.local.stack import ROOT, Cron, Stack, running
from shared import session_history
from shared.db import OPERATOR, engine_for, sql, transaction
from shared.session_history import Session
from shared.settings import Settings

IMPATIENT = {
    "DISPATCH_CLAIM_TIMEOUT_SECONDS": "3",
    "DISPATCH_BACKOFF_BASE_SECONDS": "1",
    "DISPATCH_MAX_ATTEMPTS": "3",
    "ORCHESTRATOR_OFFLINE_AFTER_SECONDS": "3",
    "DISPATCH_REROUTE_AFTER_SECONDS": "3",
    "LOG_LEVEL": "INFO",
}
# What a coding agent does, as the orchestrator sees it. The one that hangs ends when its orchestrator is gone, so that nothing is left.
AGENTS = {
    "complete": """echo '::progress 40 reading the code'
        echo '{"prUrl": "https://github.com/quartz/payments/pull/7", "summary": "Rounds the last part."}'""",
    "hang": "echo '::progress 40 reading the code'; while kill -0 $PPID 2>/dev/null; do sleep 0.2; done",
    "fail": """echo '{"errorMessage": "the tests do not pass"}'; exit 75""",
}
BY_IDENTIFIER = sql(
    "select id from dispatch_sessions where org_id = :org_id and linear_identifier = :identifier"
)
VIOLATIONS = sql("select violation, session_id from dispatch_invariants")
NAMES = sql("select id, name from orchestrators where org_id = :org_id")
START = time.monotonic()


def _indented(name: str, output: IO[bytes]) -> None:
    """Shows what an orchestrator says below the story."""
    for line in output:
        print(f"          {name}: {line.decode(errors='replace').split(' ', 1)[-1].rstrip()}", flush=True)


def say(text: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


class Story:
    """What the demo's three parts share: the stack, its database, and the machines that are running."""

    def __init__(self, stack: Stack, engine: Engine, folder: Path) -> None:
        self.stack, self.engine, self.folder = stack, engine, folder
        self.org_id = UUID(stack.demo.org_id)

    @contextmanager
    def machine(self, name: str, behaviour: str) -> Iterator[subprocess.Popen[bytes]]:
        """An orchestrator in a process of its own; killed at the end, which for the one that hangs is the point."""
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "connect", "--name", name],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "ORCHESTRATOR_URL": self.stack.url,
                "ORCHESTRATOR_TOKEN": self.stack.demo.tokens[name],
                "ORCHESTRATOR_REPOS": REPO,
                "ORCHESTRATOR_EXEC": shlex.join(["sh", "-c", AGENTS[behaviour]]),
                "ORCHESTRATOR_STATE": str(self.folder / f"{name}-{behaviour}"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        threading.Thread(target=_indented, args=(name, process.stdout), daemon=True).start()
        try:
            self.until(f"{name} to register", lambda: name in self.names().values())
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def names(self) -> dict[UUID, str]:
        """The machines' names by id."""
        with transaction(self.engine, OPERATOR) as tx:
            return {row[0]: row[1] for row in tx.all(NAMES, org_id=self.org_id)}

    def delegate(self, title: str, number: int) -> UUID:
        """Sends the signed webhook and returns the session that it has made."""
        event = linear.delegated(title, number)
        answer = linear.send(self.stack.url, event, self.stack.demo.webhook_secret)
        say(f"Linear -> webhook: {event['data']['identifier']} delegated; answered {answer.status_code}")
        answer.raise_for_status()
        with transaction(self.engine, OPERATOR) as tx:
            row = tx.first(BY_IDENTIFIER, org_id=self.org_id, identifier=event["data"]["identifier"])
        assert row is not None, answer.text
        session_id: UUID = row[0]
        return session_id

    def session(self, session_id: UUID) -> Session:
        """The session as it stands."""
        with transaction(self.engine, OPERATOR) as tx:
            found = session_history.get_session(tx, org_id=self.org_id, session_id=session_id)
        assert found is not None
        return found

    def until(self, what: str, reached: Callable[[], bool], seconds: float = 40) -> None:
        """Waits for a state, saying for what; a demo that hangs would prove the opposite."""
        deadline, said = time.monotonic() + seconds, time.monotonic() + 2
        while not reached():
            if time.monotonic() > deadline:
                raise SystemExit(f"demo: waited {seconds:g} s for {what}, in vain")
            if time.monotonic() > said:
                say(f"… waiting for {what}")
                said = deadline
            time.sleep(0.05)

    def timeline(self, session_id: UUID) -> None:
        """Prints what happened to a session: seconds since it was created, event, attempt, machine."""
        found, names = self.session(session_id), self.names()
        with transaction(self.engine, OPERATOR) as tx:
            events = session_history.timeline(tx, org_id=self.org_id, session_id=session_id)
        print(
            f"\n          {found.linear_identifier}  {found.title}\n          session {found.id}: {found.status}"
        )
        for event in events:
            after = (event.created_at - events[0].created_at).total_seconds()
            attempt = f"attempt {event.attempt}" if event.attempt is not None else ""
            by = names.get(event.orchestrator_id, "") if event.orchestrator_id is not None else ""
            print(
                f"          {after:8.3f} s  {event.type:14} {attempt:10} {by:8} {_detail(event.data)}".rstrip()
            )
        print(flush=True)


def _detail(data: dict[str, Any] | None) -> str:
    return ", ".join(
        f"{name}: {value}"
        for name, value in (data or {}).items()
        if name in ("error", "message", "prUrl", "reason")
    )


def tell(story: Story) -> None:
    """The three parts."""
    with story.machine("laptop", "complete"):
        say("1. delegated, claimed, completed")
        first = story.delegate("Rounding drops a cent on split refunds", 412)
        story.until("the laptop to complete it", lambda: story.session(first).status == "complete")
    story.timeline(first)

    say("2. the machine dies while it works")
    with story.machine("laptop", "hang") as laptop:
        second = story.delegate("Currency without minor unit", 413)
        story.until("the laptop to claim and report", lambda: story.session(second).status == "running")
        laptop.kill()
        say("laptop: killed in the middle of the work; its claim expires, the cron tick sweeps it")
    with story.machine("desktop", "complete"):
        story.until(
            "the desktop to complete it as attempt 2", lambda: story.session(second).status == "complete"
        )
    story.timeline(second)

    say("3. it fails until it is dropped, and is sent again")
    with story.machine("desktop", "fail"):
        third = story.delegate("Flaky settlement test", 414)
        story.until("the third attempt to fail", lambda: story.session(third).status == "error")
    say("dropped: a dead letter now. The cause is mended; the operator redrives it")
    dispatchctl(story, "redrive", str(third))
    with story.machine("desktop", "complete"):
        story.until("the desktop to complete it", lambda: story.session(third).status == "complete")
    story.timeline(third)


def dispatchctl(story: Story, *arguments: str) -> None:
    """Runs the operator's command as the operator would."""
    say(f"$ python -m infra.admin {' '.join(arguments)}")
    environment = {**os.environ, **story.stack.environment}
    subprocess.run([sys.executable, "-m", "infra.admin", *arguments], cwd=ROOT, env=environment, check=True)


def main() -> None:
    """Sets up, tells the three parts, checks the invariants, cleans up."""
    with tempfile.TemporaryDirectory(prefix="dispatch-demo-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        data.chmod(
            0o755
        )  # the embedded Postgres runs as another user when this is root, and must be able to enter
        log = data / "functions.log"
        with running(data, overrides=IMPATIENT, say=say, log=log) as stack:
            engine = engine_for(Settings.from_environment(stack.environment))
            try:
                with Cron(stack, every=1):
                    tell(Story(stack, engine, data))
                with transaction(engine, OPERATOR) as tx:
                    violations = tx.all(VIOLATIONS)
            finally:
                engine.dispose()
        if violations:
            raise SystemExit(f"demo: the invariants do not hold: {violations}")
        say("dispatch_invariants: no violations. Everything is stopped and removed.")


if __name__ == "__main__":
    main()

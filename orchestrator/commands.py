"""What the commands do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from orchestrator import services
from orchestrator.client import ClaimLost, Client, NotRegistered, Refused, TokenRefused, TryLater
from orchestrator.config import Config, Misconfigured, file_path, words
from orchestrator.delivery import Desk
from orchestrator.journal import Journal, look_into
from orchestrator.loop import End, Machine, Orchestrator
from orchestrator.pace import Pace
from orchestrator.runner import Command
from orchestrator.screen import printable, screen_for
from orchestrator.transports import Transport
from orchestrator.transports.listen import Listen
from orchestrator.transports.poll import Poll
from orchestrator.wire import Registration, Unreadable

DAY: Final = 86_400


# -- connect and once ---------------------------------------------------------------------------------------------------


def work(config: Config, *, once: bool) -> int:
    """Takes work until told to end, or until there is none. Raises Misconfigured, Busy."""
    command = _command(config)
    journal = Journal(config.state)
    screen = screen_for()
    try:
        _forget_old_sessions(config, {entry.session_id for entry in journal.unfinished()})
        end = asyncio.run(_work(config, command, journal, screen, once=once))
    finally:
        screen.close()
        journal.close()
    if end.why is not None:
        print(f"orchestrator: {printable(end.why)}", file=sys.stderr)
    return end.code


async def _work(config: Config, command: Command, journal: Journal, screen: Any, *, once: bool) -> End:
    client = Client(config.url, config.token)

    def desk(**parts: Any) -> Desk:
        return Desk(screen=screen, sessions=config.state / "sessions", **parts)

    machine = Machine(config.name, config.repos, config.max_jobs, config.grace)
    orchestrator = Orchestrator(machine, client, journal, command, desk)
    try:
        return await orchestrator.run(
            lambda registration: _transport(config, client, orchestrator.pace, registration, screen),
            once=once,
        )
    finally:
        await client.aclose()


def _transport(
    config: Config, client: Client, pace: Pace, registration: Registration, screen: Any
) -> Transport:
    if config.transport == "poll":
        return Poll(pace)
    if config.transport == "realtime":
        if registration.realtime is not None and find_spec("realtime") is not None:
            from orchestrator.transports.realtime import Realtime  # noqa: PLC0415 - an extra, and 30 MB

            return Realtime(client, pace, registration.realtime)
        why = (
            "the server has no realtime"
            if registration.realtime is None
            else "the package `realtime` is not installed"
        )
        screen.event("transport", using="listen", why=why)
    return Listen(client, pace)


def _command(config: Config) -> Command:
    if config.exec is None:
        raise Misconfigured(
            "exec is missing: which command does the work? Give --exec, ORCHESTRATOR_EXEC, or exec in the file"
        )
    environment = config.environment(os.environ)
    if shutil.which(config.exec[0], path=environment.get("PATH")) is None:
        raise Misconfigured(f"exec: there is no command {config.exec[0]!r} here")
    return Command(
        config.exec,
        environment,
        directory=config.directory,
        interactive=config.interactive,
        timeout=config.timeout,
        patience=config.patience,
    )


def _forget_old_sessions(config: Config, unfinished: set[str]) -> None:
    folder = config.state / "sessions"
    if not folder.is_dir():
        return
    for session in folder.iterdir():
        with suppress(OSError):
            if (
                session.name not in unfinished
                and session.stat().st_mtime < time.time() - config.keep_days * DAY
            ):
                shutil.rmtree(session, ignore_errors=True)


# -- status -------------------------------------------------------------------------------------------------------------


def status(config: Config, *, as_json: bool) -> int:
    """What this machine is doing, from its own journal; asks no server."""
    owner, entries = look_into(config.state)
    rows = [
        {
            "issue": entry.identifier,
            "attempt": entry.attempt,
            "state": entry.state,
            "process": entry.pid,
            "seconds": round(time.time() - entry.since),
            "log": str(config.state / "sessions" / entry.session_id / "output.log"),
        }
        for entry in entries
    ]
    if as_json:
        print(
            json.dumps(
                {
                    "url": config.url,
                    "name": config.name,
                    "process": owner,
                    "state": str(config.state),
                    "work": rows,
                }
            )
        )
        return 0
    print(
        f"{config.name} at {config.url}: {'not running' if owner is None else f'running as process {owner}'}"
    )
    for row in rows:
        attempt = "" if row["attempt"] is None else f", attempt {row['attempt']}"
        print(
            f"  {printable(str(row['issue']))}{attempt}: {row['state']} for {row['seconds']} s; {row['log']}"
        )
    if not rows:
        print("  nothing unfinished")
    elif owner is None:
        print("  the next start takes these up")
    return 0


# -- doctor -------------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    good: bool
    said: str


def doctor(config: Config, *, as_json: bool) -> int:
    """Looks at everything that has to be right; changes nothing on the server. Exit code 1 when something is not."""
    checks = [*_checks_here(config), *asyncio.run(_checks_there(config))]
    good = all(check.good for check in checks)
    if as_json:
        print(json.dumps({"good": good, "checks": [check._asdict() for check in checks]}))
    else:
        for check in checks:
            print(f"{'ok  ' if check.good else 'FAIL'}  {check.name}: {printable(check.said)}")
    return 0 if good else 1


def _checks_here(config: Config) -> Iterator[Check]:
    try:
        command = _command(config)
        yield Check("command", good=True, said=words(command.argv))
    except Misconfigured as error:
        yield Check("command", good=False, said=str(error))
    writable = os.access(config.state if config.state.exists() else _existing(config.state), os.W_OK)
    yield Check(
        "state folder", good=writable, said=f"{config.state}{'' if writable else ' cannot be written'}"
    )
    missing = [name for name in config.env if name not in os.environ]
    said = f"not set: {', '.join(missing)}" if missing else f"{len(config.env)} passed on besides the usual"
    yield Check("variables", good=not missing, said=said)
    if config.transport == "realtime":
        there = find_spec("realtime") is not None
        yield Check(
            "transport",
            good=there,
            said="realtime" if there else "realtime needs `pip install realtime`; without it: listen",
        )


def _existing(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.exists())


async def _checks_there(config: Config) -> list[Check]:
    client = Client(config.url, config.token)
    host = urlsplit(config.url).netloc
    try:
        polled = await client.poll()
    except TryLater as error:
        return [Check("server", good=False, said=str(error))]
    except TokenRefused as error:
        return [
            Check("server", good=True, said=f"{host} answers"),
            Check("token", good=False, said=str(error)),
        ]
    except NotRegistered:
        token = Check("token", good=True, said="valid; `connect` registers the machine")
    except (Refused, ClaimLost, Unreadable) as error:
        return [Check("server", good=False, said=f"{host} answers, but not as a dispatch server: {error}")]
    else:
        token = Check("token", good=True, said=f"valid; {len(polled.messages)} waiting")
    finally:
        await client.aclose()
    clock = Check("clock", good=True, said="plays no part: the server's decides")
    return [Check("server", good=True, said=f"{host} answers"), token, clock]


# -- service ------------------------------------------------------------------------------------------------------------


def service(kind: str, file: Path | None) -> int:
    """Prints a description that starts `connect` with the owner's file. The token is not in it."""
    path = (file or file_path(os.environ)).absolute()
    print(services.DESCRIPTIONS[kind](_how_this_was_started(), path, os.environ), end="")
    return 0


def _how_this_was_started() -> list[str]:
    """The words before the command: a single file names itself, a checkout its module."""
    started = Path(sys.argv[0]).absolute()
    return (
        [sys.executable, str(started)] if started.suffix == ".pyz" else [sys.executable, "-m", "orchestrator"]
    )

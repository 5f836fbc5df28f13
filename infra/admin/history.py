"""`sessions`: what was asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from infra.admin import queue_views
from infra.admin.arguments import Group, word
from infra.admin.console import Console, names_of
from infra.admin.output import Printer, and_to_be_stopped, duration
from shared import session_history
from shared.db import OPERATOR, transaction
from shared.session_history import Event

OPEN: Final = ("pending", "dispatched", "running")
OVER: Final = ("complete", "error", "cancelled")
EVENTS: Final = 1000
ENDS_AN_ATTEMPT: Final = ("released", "dead_lettered", *OVER)

# What of an event's data is shown: facts of ours and the machine's words. Its payload and people's prompts are not.
TOLD: Final = (
    "error",
    "message",
    "reason",
    "status",
    "progressPercent",
    "prUrl",
    "repo",
    "from",
    "to",
    "availableAt",
)


def add_to(commands: Group) -> None:
    """Adds the commands."""
    group = commands.group("sessions", "what was asked for, and what became of it")
    listed = group.command("list", list_sessions, "newest first").limited(50)
    listed.takes(
        "--status",
        choices=(*OPEN, *OVER, "open"),
        action="append",
        help="may be repeated; `open` stands for pending, dispatched and running",
    )
    listed.takes("--issue", type=word, metavar="IDENTIFIER", help="the issue's identifier, e.g. PAY-412")
    listed.takes("--machine", type=word, metavar="NAME", help="the orchestrator's name or id")
    show = group.command("show", show_session, "one session with its attempts and its history")
    show.takes(
        "session", type=word, metavar="SESSION", help="its id, or the issue's identifier for the newest"
    )


def list_sessions(console: Console) -> int:
    """`sessions list`"""
    options = console.options
    statuses = None
    if options.status:
        statuses = [
            status for wanted in options.status for status in (OPEN if wanted == "open" else (wanted,))
        ]
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        rows = session_history.listed(
            tx,
            org_id=org_id,
            limit=options.limit,
            statuses=statuses,
            identifier=options.issue,
            orchestrator_id=None
            if options.machine is None
            else console.machine(tx, org_id, options.machine).id,
        )
    columns = {
        "issue": "linear_identifier",
        "session": "id",
        "status": "status",
        "why": "error_code",
        "attempts": "attempts",
        "machine": "machine",
        "repo": "repo",
        "age": "age_seconds",
        "title": "title",
    }
    if not console.printer.as_json:
        rows = [
            row._replace(
                status=and_to_be_stopped(
                    row.status, stop_requested=row.stop_requested, wanted_again=row.wanted_again
                )
            )
            for row in rows
        ]
    console.show_list(rows, columns, nothing="no session" if statuses is None else "no such session")
    return 0


class Entry(NamedTuple):
    """An event as it is shown. `since_start` and `since_previous`: seconds with three decimals, as text."""

    at: datetime
    since_start: str
    since_previous: str
    event: str
    attempt: int | None
    machine: str | None
    detail: str


class Attempt(NamedTuple):
    """One claim, from its event to the one that ended it. `outcome` is None while it is held."""

    attempt: int | None
    queue_id: UUID | None
    machine: str | None
    started_at: datetime
    ended_at: datetime | None
    took_seconds: float | None
    outcome: str | None


def show_session(console: Console) -> int:
    """`sessions show SESSION`"""
    with transaction(console.engine, OPERATOR) as tx:
        session = console.session(tx, console.options.session)
        events = session_history.timeline(tx, org_id=session.org_id, session_id=session.id, limit=EVENTS)
        names = names_of(tx, session.org_id)
        row = queue_views.row_of(tx, org_id=session.org_id, session_id=session.id)
    attempts = attempts_of(events, names)
    facts = {**session._asdict(), "machine": names.get(session.orchestrator_id)}
    if console.printer.as_json:
        queue = None if row is None else row._asdict()
        timeline = [
            {**event._asdict(), "machine": names.get(event.orchestrator_id), "data": _told(event)}
            for event in events
        ]
        told = [each._asdict() for each in attempts]
        console.printer.json({**facts, "queue": queue, "attempts": told, "timeline": timeline})
        return 0
    console.printer.facts({**facts, **_standing(row)})
    _show_history(console.printer, attempts, _entries(events, names))
    if len(events) == EVENTS:
        console.printer.hint(f"these are the oldest {EVENTS} events; there may be more")
    return 0


def _show_history(printer: Printer, attempts: Sequence[Attempt], entries: Sequence[Entry]) -> None:
    columns = {
        "attempt": "attempt",
        "machine": "machine",
        "claimed": "started_at",
        "took": "took_seconds",
        "outcome": "outcome",
    }
    shown = [
        each._replace(machine=each.machine or "removed", outcome=each.outcome or "held") for each in attempts
    ]
    print()
    printer.rows(shown, columns, nothing="never claimed")
    columns = {
        "at (UTC)": "at",
        "since start": "since_start",
        "since previous": "since_previous",
        "event": "event",
        "attempt": "attempt",
        "machine": "machine",
        "detail": "detail",
    }
    print()
    printer.rows(entries, columns, nothing="no history")


def _standing(row: queue_views.Row | None) -> dict[str, Any]:
    """Why an open session does not move: where its row stands."""
    if row is None:
        return {}
    return {
        "queue_row": row.queue_id,
        "queue_state": and_to_be_stopped(
            row.state, stop_requested=row.stop_requested, wanted_again=row.wanted_again
        ),
        "claimed_for_seconds": row.claim_age_seconds,
        "next_attempt_in_seconds": row.next_attempt_in_seconds,
        "last_error": row.last_error,
    }


def attempts_of(events: Sequence[Event], names: Mapping[Any, str]) -> list[Attempt]:
    """The claims in a history, oldest first, each with what ended it."""
    attempts = []
    for position, event in enumerate(events):
        if event.type != "claimed":
            continue
        end = next(
            (
                later
                for later in events[position + 1 :]
                if later.type in ENDS_AN_ATTEMPT
                and (later.queue_id, later.attempt) == (event.queue_id, event.attempt)
                # A report of `error` is not the end while the row exists: it carries a status, the end does not.
                and "status" not in (later.data or {})
            ),
            None,
        )
        attempts.append(
            Attempt(
                event.attempt,
                event.queue_id,
                names.get(event.orchestrator_id),
                event.created_at,
                None if end is None else end.created_at,
                None if end is None else round((end.created_at - event.created_at).total_seconds(), 3),
                None if end is None else end.type,
            )
        )
    return attempts


def _entries(events: Sequence[Event], names: Mapping[Any, str]) -> list[Entry]:
    entries = []
    by_id = {str(machine_id): name for machine_id, name in names.items()}
    for event, previous in zip(events, [events[0], *events] if events else [], strict=False):
        entries.append(
            Entry(
                event.created_at,
                _elapsed(events[0].created_at, event.created_at),
                _elapsed(previous.created_at, event.created_at),
                event.type,
                event.attempt,
                names.get(event.orchestrator_id),
                "; ".join(f"{name}: {by_id.get(str(value), value)}" for name, value in _told(event).items()),
            )
        )
    return entries


def _told(event: Event) -> dict[str, Any]:
    data = event.data or {}
    return {name: data[name] for name in TOLD if data.get(name) is not None}


def _elapsed(since: datetime, until: datetime) -> str:
    seconds = (until - since).total_seconds()
    return f"+{seconds:.3f} s" if seconds < 60 else f"+{duration(seconds)}"

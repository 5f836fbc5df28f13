"""`queue`, `dead-letters`, `redrive`, `cancel`, `sweep`: what waits, what was given up, and what the operator does about it."""

from __future__ import annotations

import contextlib
import sys
from typing import Final

from sqlalchemy.exc import IntegrityError

from infra.admin import queue_views
from infra.admin.arguments import Group, repo, word
from infra.admin.console import Console, Meant
from infra.admin.output import and_to_be_stopped
from shared import dead_letters, dispatch_queue, reopening
from shared.db import OPERATOR, transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import Conflict
from shared.sweep import sweep_once

AN_OPEN_SESSION: Final = Meant("open session", lambda session: session.ended_at is None)
A_DEAD_LETTER: Final = Meant(
    "dead letter", lambda session: session.status == "error" and session.error_code != "failed"
)


def add_to(commands: Group) -> None:
    """Adds the commands."""
    queue = commands.group("queue", "the rows that are still to be delivered")
    listed = queue.command("list", list_queue, "oldest first").limited()
    listed.takes(
        "--state", choices=("waiting", "claimed"), help="waiting ones include those that are backing off"
    )
    listed.takes("--machine", type=word, metavar="NAME", help="the orchestrator's name or id")

    letters = commands.group("dead-letters", "work that was given up")
    letters.command("list", list_dead_letters, "newest first").limited()

    again = commands.command("redrive", redrive, "send a dead letter again")
    again.takes("session", type=word, metavar="SESSION", help="its id, or its issue's identifier")
    again.takes(
        "--repo", type=repo, metavar="OWNER/NAME", help="where routing had found none, or the wrong one"
    )
    stop = commands.command("cancel", cancel, "stop work: waiting work ends, a machine that has it is told")
    stop.takes("session", type=word, metavar="SESSION", help="its id, or its issue's identifier")
    stop.takes(
        "--reason",
        type=word,
        default="cancelled by the operator",
        metavar="TEXT",
        help="kept in the session's history",
    )
    commands.command(
        "sweep", sweep, "one tick of recovery, as the scheduler does every minute", of_everything=True
    )


def list_queue(console: Console) -> int:
    """`queue list`"""
    options = console.options
    with transaction(console.engine, OPERATOR) as tx:
        org_id = console.organization(tx)
        rows = queue_views.queue(
            tx,
            org_id=org_id,
            limit=options.limit,
            claimed=options.state != "waiting",
            waiting=options.state != "claimed",
            orchestrator_id=None
            if options.machine is None
            else console.machine(tx, org_id, options.machine).id,
        )
    columns = {
        "issue": "linear_identifier",
        "session": "session_id",
        "machine": "machine",
        "state": "state",
        "attempts": "attempts",
        "age": "age_seconds",
        "claimed for": "claim_age_seconds",
        "next attempt in": "next_attempt_in_seconds",
        "last error": "last_error",
    }
    if not console.printer.as_json:
        rows = [
            row._replace(
                state=and_to_be_stopped(
                    row.state, stop_requested=row.stop_requested, wanted_again=row.wanted_again
                )
            )
            for row in rows
        ]
    console.show_list(rows, columns, nothing="nothing is to be delivered")
    return 0


def list_dead_letters(console: Console) -> int:
    """`dead-letters list`"""
    with transaction(console.engine, OPERATOR) as tx:
        rows = dead_letters.dead_letters(tx, org_id=console.organization(tx), limit=console.options.limit)
    columns = {
        "issue": "linear_identifier",
        "session": "session_id",
        "repo": "repo",
        "attempts": "attempts",
        "died": "died_at",
        "reason": "reason",
        "error": "error",
        "title": "title",
    }
    console.show_list(rows, columns, nothing="no dead letters")
    return 0


def redrive(console: Console) -> int:
    """`redrive SESSION`"""
    options = console.options
    try:
        with transaction(console.engine, OPERATOR) as tx:
            session = console.session(tx, options.session, meant=A_DEAD_LETTER)
            queue_id = reopening.redrive(
                tx,
                org_id=session.org_id,
                session_id=session.id,
                repo=options.repo,
                offline_after=console.settings.orchestrator_offline_after_seconds,
            )
    except IntegrityError:
        raise Conflict("the issue was started anew at this very moment: nothing was redriven") from None
    console.printer.said(
        f"{session.linear_identifier} waits again, from attempt 1: queue row {queue_id}",
        session_id=session.id,
        queue_id=queue_id,
        outcome="redriven",
    )
    return 0


def cancel(console: Console) -> int:
    """`cancel SESSION`"""
    with transaction(console.engine, OPERATOR) as tx:
        session = console.session(tx, console.options.session, meant=AN_OPEN_SESSION)
        before = queue_views.row_of(tx, org_id=session.org_id, session_id=session.id)
        outcome = dispatch_queue.cancel(
            tx, org_id=session.org_id, session_id=session.id, reason=console.options.reason
        )
    if outcome is None:
        raise Conflict(f"{session.linear_identifier} is over already: {session.status}")
    asked = before is not None and before.stop_requested and not before.wanted_again
    sentence = {
        "cancelled": "is cancelled: no machine had it",
        "stop_requested": f"{'was asked to stop already' if asked else 'is to be stopped'}: its machine learns it with its next "
        "renewal, report or poll; one that never answers is swept, and the work is not delivered again",
    }[outcome]
    console.printer.said(
        f"{session.linear_identifier} {sentence}",
        session_id=session.id,
        outcome=outcome,
        asked_before=asked,
    )
    return 0


def sweep(console: Console) -> int:
    """`sweep`: exit code 1 when some machine's batch was refused by the database."""
    settings = console.settings
    # What the sweep logs is for the operator's eyes: standard output is the result alone.
    with contextlib.redirect_stdout(sys.stderr):
        report = sweep_once(
            console.engine,
            policy=RetryPolicy.of(settings),
            retention_hours=settings.webhook_delivery_retention_hours,
            batch_rows=settings.sweep_batch_rows,
            budget_seconds=settings.sweep_budget_seconds,
        )
    console.printer.facts(report.as_dict())
    if not report.finished:
        console.printer.hint("the time was up before the work was done: run it again")
    return 1 if report.failed else 0

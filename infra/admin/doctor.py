"""`doctor`: what has to hold for work to be delivered, checked one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Final, Literal, NamedTuple

from sqlalchemy.exc import DBAPIError

from infra.admin import listen, realtime, views
from infra.admin.arguments import Group
from infra.admin.console import Console
from infra.admin.failures import explained, is_unreachable
from infra.admin.output import SENTENCE, counted
from shared import dispatch_queue
from shared.crypto import KeyRing
from shared.db import CHANNEL, OPERATOR, SCHEMA_REVISION, Tx, listener_for, schema_revision, sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.errors import ConfigurationError, SchemaOutdated
from shared.workspaces import Sealed

OLDEST_SERVER: Final = 15
SKEW_SECONDS: Final = (
    30  # ages of signed events are measured with the functions' clocks, everything else with the database's
)
HEARD_WITHIN_SECONDS: Final = 2
MISSED_TICKS_SECONDS: Final = 300  # a claim that is overdue by five ticks of a minute: nobody sweeps


class Finding(NamedTuple):
    """One check. `note` is worth knowing and nothing to mend; `wrong` makes the exit code 1."""

    check: str
    state: Literal["ok", "note", "wrong"]
    detail: str


def add_to(commands: Group) -> None:
    """Adds the command."""
    commands.command(
        "doctor",
        doctor,
        "check the database, the schema, the invariants, the secrets and the machines",
        of_everything=True,
    )


def doctor(console: Console) -> int:
    """`doctor`: exit code 1 when something is wrong, 3 when the database cannot be reached."""
    findings: list[Finding] = []
    code = 0
    try:
        for check in (
            _database,
            _schema,
            _invariants,
            _secrets,
            _machines,
            _backlog,
            _sweep,
            _listen,
            _realtime,
        ):
            with transaction(console.engine, OPERATOR) as tx:
                findings.extend(check(console, tx))
        if console.settings.database_listen_url is not None:
            findings.append(_hears(console))
    except SchemaOutdated as error:
        findings.append(Finding("schema", "wrong", error.message))
    except (DBAPIError, OSError) as error:
        message, code = explained(error, console.settings), 3 if is_unreachable(error) else 1
        findings.append(Finding("database", "wrong", message))
    columns = {"check": "check", "state": "state", "detail": "detail"}
    console.printer.rows(findings, columns, nothing="", last=SENTENCE)
    wrong = sum(finding.state == "wrong" for finding in findings)
    are = "is" if wrong == 1 else "are"
    console.printer.hint(f"{wrong} of these {are} wrong" if wrong else "nothing is wrong")
    return code or min(wrong, 1)


SERVER = sql("""
    select current_setting('server_version'), cast(current_setting('server_version_num') as integer) / 10000,
           cast(extract(epoch from clock_timestamp()) as double precision)
""")


def _database(console: Console, tx: Tx) -> Iterator[Finding]:
    # The first statement opens the connection; the second one, timed, is what the clocks are compared by.
    tx.first(SERVER)
    before, started = time.time(), time.monotonic()
    row = tx.first(SERVER)
    took = time.monotonic() - started
    assert row is not None
    version, major, theirs = row
    tls = "verified TLS" if console.settings.database_tls == "verify" else "no TLS"
    yield Finding("connection", "ok", f"{took * 1000:.1f} ms a statement, {tls}")
    old = major < OLDEST_SERVER
    yield Finding(
        "server",
        "wrong" if old else "ok",
        f"PostgreSQL {version}" + (f"; {OLDEST_SERVER} is needed" if old else ""),
    )
    ahead = theirs - (before + took / 2)
    yield Finding(
        "clocks",
        "wrong" if abs(ahead) > SKEW_SECONDS else "ok",
        f"the database's is {ahead:+.3f} s from this machine's",
    )


def _schema(_: Console, tx: Tx) -> Iterator[Finding]:
    try:
        found = schema_revision(tx) or "none"
    except DBAPIError as error:
        if is_unreachable(error):
            raise
        found = "none"
    if found < SCHEMA_REVISION or found == "none":
        raise SchemaOutdated(
            f"the database is at migration {found}, this code needs {SCHEMA_REVISION}: run `migrate`"
        )
    yield Finding(
        "schema",
        "ok",
        f"migration {found}" + (f", this code knows {SCHEMA_REVISION}" if found > SCHEMA_REVISION else ""),
    )


VIOLATIONS = sql("select violation, org_id, session_id from dispatch_invariants limit 21")


def _invariants(_: Console, tx: Tx) -> Iterator[Finding]:
    violations = tx.all(VIOLATIONS)
    if not violations:
        yield Finding("invariants", "ok", "every session has exactly one of: a queue row, an end")
    for violation, org_id, session_id in violations[:20]:
        yield Finding("invariants", "wrong", f"{violation}: session {session_id} of organization {org_id}")
    if len(violations) > 20:
        yield Finding("invariants", "wrong", "and more: select * from dispatch_invariants")


SECRETS = sql("""
    select org_id, id, webhook_secret, webhook_secret_previous, linear_token, name, status, status_reason
      from workspaces
     order by org_id, name
     limit 1000
""")


def _secrets(console: Console, tx: Tx) -> Iterator[Finding]:
    rows = tx.all(SECRETS)
    if not rows:
        yield Finding("workspaces", "note", "none is connected yet")
        return
    try:
        keys = KeyRing.of(console.settings)
    except ConfigurationError as error:
        yield Finding("secrets", "wrong", f"{error.message}: what is stored cannot be opened")
        return
    for *sealed, name, status, reason in rows:
        check = f"workspace {name}"
        if status == "revoked":
            yield Finding(
                check,
                "wrong",
                f"Linear has taken the access away: {reason or 'no reason known'}; `workspace set-token`",
            )
        yield from _openable(check, keys, Sealed(*sealed))


def _openable(check: str, keys: KeyRing, stored: Sealed) -> Iterator[Finding]:
    secrets = {
        "webhook secret": stored.webhook_secret,
        "previous webhook secret": stored.webhook_secret_previous,
        "token": stored.linear_token,
    }
    present = {name: sealed for name, sealed in secrets.items() if sealed is not None}
    stale = False
    for name, sealed in present.items():
        try:
            keys.open(sealed)
            stale = stale or not keys.sealed_with_first_key(sealed)
        except ConfigurationError as error:
            yield Finding(check, "wrong", f"{name}: {error.message}")
            return
    yield Finding(check, "ok", f"{', '.join(present)}: can be opened")
    if stale:
        yield Finding(check, "note", "sealed with an older key: `reencrypt`")
    if stored.webhook_secret_previous is not None:
        yield Finding(
            check, "note", "a rotation of the webhook secret is under way: `workspace rotate-secret --finish`"
        )
    if stored.linear_token is None:
        yield Finding(check, "note", "has no Linear token: nothing is written back to Linear")


def _machines(console: Console, tx: Tx) -> Iterator[Finding]:
    offline_after = console.settings.orchestrator_offline_after_seconds
    organizations = views.organizations(tx, limit=1000)
    if not organizations:
        yield Finding("organizations", "note", "there is none yet: `org create NAME`")
    for organization in organizations:
        machines = views.machines(tx, org_id=organization.id, limit=1000, offline_after=offline_after)
        online = sum(machine.online for machine in machines)
        waiting = sum(machine.waiting for machine in machines)
        held = counted(sum(machine.held for machine in machines), "row")
        detail = f"{online} of {len(machines)} online, {held} held, {waiting} waiting"
        stuck = waiting > 0 and online == 0
        state: Literal["ok", "note", "wrong"] = "wrong" if stuck else "ok" if online else "note"
        yield Finding(f"machines of {organization.name}", state, detail)
        locked_out = views.machines_without_a_token(tx, org_id=organization.id, limit=20)
        if locked_out:
            yield Finding(
                f"machines of {organization.name}",
                "note",
                f"no valid token, so it can ask for nothing: {', '.join(locked_out)}; `token mint`, then register with the same name",
            )


def _backlog(console: Console, tx: Tx) -> Iterator[Finding]:
    rows, age = dispatch_queue.depth(tx)
    limit = console.settings.dispatch_claim_timeout_seconds
    late = age > limit
    detail = f"{counted(rows, 'row')}; the oldest that could be claimed has waited {age:.0f} s"
    yield Finding(
        "queue",
        "wrong" if late else "ok",
        detail + (f", more than {limit} s: `queue list --state waiting`" if late else ""),
    )


def _sweep(console: Console, tx: Tx) -> Iterator[Finding]:
    policy = RetryPolicy.of(console.settings)
    overdue = RetryPolicy(
        claim_timeout=policy.claim_timeout + MISSED_TICKS_SECONDS, reroute_after=policy.reroute_after
    )
    machines = dispatch_queue.machines_to_sweep(tx, policy=overdue)
    unswept = sum(machine.has_expired_claims for machine in machines)
    detail = (
        f"claims of {counted(unswept, 'machine')} expired over {MISSED_TICKS_SECONDS} s ago: "
        "is the scheduler calling the sweep?"
    )
    yield Finding("sweep", "wrong" if unswept else "ok", detail if unswept else "no claim is overdue")


SAY = sql("select pg_notify(:channel, :word)")


def _listen(console: Console, tx: Tx) -> Iterator[Finding]:
    on, heard = listen.is_on(tx), console.settings.database_listen_url is not None
    if on and not heard:
        yield Finding(
            "listen", "note", "it is on, which every enqueue pays for, and DATABASE_LISTEN_URL is not set"
        )
    elif heard and not on:
        yield Finding("listen", "wrong", "DATABASE_LISTEN_URL is set, but commits say nothing: `listen on`")
    else:
        yield Finding("listen", "ok", "commits wake the polls that wait" if on else "off: machines poll")


def _realtime(console: Console, tx: Tx) -> Iterator[Finding]:
    if found := realtime.judged(tx, told=console.settings.supabase_url is not None):
        yield Finding("realtime", *found)


def _hears(console: Console) -> Finding:
    """Whether a word that is said through DATABASE_URL arrives: it does not through a pooler, nor in another database."""
    try:
        with closing(listener_for(console.settings)) as listener:
            with transaction(console.engine, OPERATOR) as tx:
                tx.first(SAY, channel=CHANNEL, word="doctor")
            until = time.monotonic() + HEARD_WITHIN_SECONDS
            while (left := until - time.monotonic()) > 0:
                if "doctor" in listener.notified(left):
                    return Finding(
                        "listen", "ok", "what is said through DATABASE_URL arrives at DATABASE_LISTEN_URL"
                    )
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is wrong
        return Finding("listen", "wrong", f"DATABASE_LISTEN_URL cannot be used: {type(error).__name__}")
    return Finding(
        "listen",
        "wrong",
        "nothing arrives at DATABASE_LISTEN_URL: it must lead to the same database, and not through a pooler",
    )

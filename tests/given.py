"""What a test starts from: tenants, machines and work, made with the same functions that the product uses.

Time is never waited for: rows are aged in the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from shared import dispatch_queue, orchestrators, sessions
from shared.db import OPERATOR, Tx, sql, transaction
from shared.dispatch_queue import RetryPolicy
from shared.ids import new_id
from shared.sessions import NewSession

POLICY = RetryPolicy()
REPO = "acme/api"


@dataclass(frozen=True)
class Tenant:
    """An organization with one connected workspace."""

    org_id: UUID
    workspace_id: UUID


@dataclass(frozen=True)
class Machine:
    """A registered machine and its token."""

    org_id: UUID
    id: UUID
    token: str
    token_id: UUID


@dataclass(frozen=True)
class Queued:
    """A session and its queue row."""

    org_id: UUID
    session_id: UUID
    queue_id: UUID


NEW_ORGANIZATION = sql("insert into organizations (id, name) values (:id, :name)")
NEW_WORKSPACE = sql("""
    insert into workspaces (org_id, id, linear_organization_id, name, webhook_secret) values (:org_id, :id, :linear, 'Linear', :secret)
""")


def a_tenant(
    engine: Engine, *, linear_organization_id: str | None = None, webhook_secret: str = "sealed"
) -> Tenant:
    """An organization with one connected workspace; the secret is stored as given (sealed by the caller where it matters)."""
    org_id, workspace_id = new_id(), new_id()
    with transaction(engine, OPERATOR) as tx:
        tx.run(NEW_ORGANIZATION, id=org_id, name=f"org {org_id}")
        tx.run(
            NEW_WORKSPACE,
            org_id=org_id,
            id=workspace_id,
            linear=linear_organization_id or str(new_id()),
            secret=webhook_secret,
        )
    return Tenant(org_id, workspace_id)


def a_machine(
    engine: Engine,
    tenant: Tenant,
    *,
    repos: Sequence[str] = (REPO,),
    max_jobs: int = 64,
    name: str | None = None,
) -> Machine:
    """A registered, online machine."""
    with transaction(engine, OPERATOR) as tx:
        token_id, token = orchestrators.mint_token(tx, org_id=tenant.org_id)
        machine_id = orchestrators.register(
            tx,
            orchestrators.authenticate(tx, token),
            name=name or f"machine {token_id}",
            repos=repos,
            concurrency_limit=max_jobs,
        )
    return Machine(tenant.org_id, machine_id, token, token_id)


def a_message(title: str = "Fix the rounding", **more: Any) -> dict[str, Any]:
    """The issue's part of a message, as the webhook writes it into the queue row."""
    issue_id = str(new_id())
    return {
        "workspaceId": "w",
        "linearIssueId": issue_id,
        "linearIdentifier": "PAY-1",
        "title": title,
        "teamId": "team",
        "repo": REPO,
        **more,
    }


def a_session(
    tx: Tx, tenant: Tenant, machine: Machine, *, issue_id: str | None = None, repo: str = REPO
) -> UUID:
    """An open session without its row: committing it alone is refused."""
    session_id = sessions.open_session(
        tx,
        NewSession(
            org_id=tenant.org_id,
            workspace_id=tenant.workspace_id,
            linear_issue_id=issue_id or str(new_id()),
            linear_identifier="PAY-1",
            team_id="team",
            title="Fix the rounding",
            repo=repo,
            orchestrator_id=machine.id,
        ),
    )
    assert session_id is not None
    return session_id


def work(
    engine: Engine, tenant: Tenant, machine: Machine, *, issue_id: str | None = None, repo: str = REPO
) -> Queued:
    """A session with its queue row, committed together."""
    with transaction(engine, OPERATOR) as tx:
        session_id = a_session(tx, tenant, machine, issue_id=issue_id, repo=repo)
        queue_id = dispatch_queue.enqueue_dispatch(
            tx,
            org_id=tenant.org_id,
            orchestrator_id=machine.id,
            session_id=session_id,
            message=a_message(repo=repo),
        )
    return Queued(tenant.org_id, session_id, queue_id)


def claimed(engine: Engine, machine: Machine, queued: Queued) -> dispatch_queue.Work:
    """That row, claimed by its machine."""
    with transaction(engine) as tx:
        got = dispatch_queue.claim(
            tx,
            org_id=machine.org_id,
            orchestrator_id=machine.id,
            queue_id=queued.queue_id,
            concurrency_limit=64,
        )
    assert got is not None
    return got


AGE_CLAIM = sql("""
    update dispatch_queue set claimed_at = claimed_at - make_interval(secs => :seconds) where org_id = :org_id and id = :queue_id
""")
AGE_BACKOFF = sql("""
    update dispatch_queue set available_at = available_at - make_interval(secs => :seconds) where org_id = :org_id and id = :queue_id
""")
AGE_HEARTBEAT = sql("""
    update orchestrators
       set last_heartbeat_at = last_heartbeat_at - make_interval(secs => :seconds),
           created_at = created_at - make_interval(secs => :seconds)
     where org_id = :org_id and id = :orchestrator_id
""")


def the_claim_is_older_by(engine: Engine, queued: Queued, seconds: float) -> None:
    """As if the claim had been made or renewed that much earlier."""
    with transaction(engine, OPERATOR) as tx:
        tx.run(AGE_CLAIM, org_id=queued.org_id, queue_id=queued.queue_id, seconds=seconds)


def the_backoff_has_passed(engine: Engine, queued: Queued) -> None:
    """As if the row had waited out any backoff."""
    with transaction(engine, OPERATOR) as tx:
        tx.run(AGE_BACKOFF, org_id=queued.org_id, queue_id=queued.queue_id, seconds=3600)


def the_machine_was_last_heard(engine: Engine, machine: Machine, seconds_ago: float) -> None:
    """As if the machine's last heartbeat were that long ago."""
    with transaction(engine, OPERATOR) as tx:
        tx.run(AGE_HEARTBEAT, org_id=machine.org_id, orchestrator_id=machine.id, seconds=seconds_ago)


ROW = sql("select * from dispatch_queue where org_id = :org_id and id = :queue_id")
SESSION = sql("select * from dispatch_sessions where org_id = :org_id and id = :session_id")
EVENTS = sql(
    "select type from session_events where org_id = :org_id and session_id = :session_id order by id"
)
VIOLATIONS = sql("select violation from dispatch_invariants")


def row_of(engine: Engine, queued: Queued) -> Any:
    """The queue row as it stands, or None."""
    with transaction(engine) as tx:
        return tx.first(ROW, org_id=queued.org_id, queue_id=queued.queue_id)


def session_of(engine: Engine, queued: Queued) -> Any:
    """The session as it stands."""
    with transaction(engine) as tx:
        return tx.first(SESSION, org_id=queued.org_id, session_id=queued.session_id)


def history_of(engine: Engine, queued: Queued) -> list[str]:
    """The types of the session's events, oldest first."""
    with transaction(engine) as tx:
        return [row[0] for row in tx.all(EVENTS, org_id=queued.org_id, session_id=queued.session_id)]


def violations(engine: Engine) -> list[str]:
    """What contradicts the guarantee; the tests end by asserting that it is nothing."""
    with transaction(engine) as tx:
        return [row[0] for row in tx.all(VIOLATIONS)]

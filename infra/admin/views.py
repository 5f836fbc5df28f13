"""What the lists show. Read only, bounded by `limit`, ages by the database's clock; no secret and no payload is selected."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql


class Organization(NamedTuple):
    """A tenant."""

    id: UUID
    name: str
    workspaces: int
    machines: int
    created_at: datetime

    def names(self) -> Sequence[str]:
        """What it may be called."""
        return (self.name,)


ORGANIZATIONS = sql("""
    select o.id, o.name,
           (select count(*) from workspaces w where w.org_id = o.id), (select count(*) from orchestrators m where m.org_id = o.id),
           o.created_at
      from organizations o
     order by o.name
     limit :limit
""")


def organizations(tx: Tx, *, limit: int) -> list[Organization]:
    """All tenants by name."""
    return [Organization(*row) for row in tx.all(ORGANIZATIONS, limit=limit)]


OF_SESSION = sql("""
    select o.id from organizations o
     where exists (select from dispatch_sessions s where s.org_id = o.id and s.id = :session_id)
     limit 2
""")


def organizations_of_session(tx: Tx, *, session_id: UUID) -> list[UUID]:
    """Whose session this is: an id is nearly enough to know, one probe for each organization."""
    return [row[0] for row in tx.all(OF_SESSION, session_id=session_id)]


class Workspace(NamedTuple):
    """A connected Linear workspace. `rotating`: the previous webhook secret is still valid."""

    id: UUID
    name: str
    linear_organization_id: str
    app_user_id: str | None
    status: str
    status_reason: str | None
    rotating: bool
    has_linear_token: bool
    created_at: datetime

    def names(self) -> Sequence[str]:
        """What it may be called."""
        return (self.name, self.linear_organization_id)


WORKSPACES = sql("""
    select id, name, linear_organization_id, app_user_id, status, status_reason,
           webhook_secret_previous is not null, linear_token is not null, created_at
      from workspaces
     where org_id = :org_id
     order by name, id
     limit :limit
""")


def workspaces(tx: Tx, *, org_id: UUID, limit: int) -> list[Workspace]:
    """The organization's workspaces by name."""
    return [Workspace(*row) for row in tx.all(WORKSPACES, org_id=org_id, limit=limit)]


class Machine(NamedTuple):
    """An orchestrator. `held` and `waiting` count queue rows (waiting to 10 000); `active_jobs` is what it last said of itself."""

    id: UUID
    name: str
    online: bool
    max_concurrent_jobs: int
    active_jobs: int | None
    held: int
    waiting: int
    heartbeat_age_seconds: float | None
    last_heartbeat_at: datetime | None
    repos: list[str]

    def names(self) -> Sequence[str]:
        """What it may be called."""
        return (self.name,)


MACHINES = sql("""
    select o.id, o.name, coalesce(o.last_heartbeat_at > now() - make_interval(secs => :offline_after), false),
           o.max_concurrent_jobs, o.active_jobs,
           (select count(*) from dispatch_queue q where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is not null),
           (select count(*) from (select from dispatch_queue q
                                   where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is null limit 10000) w),
           cast(extract(epoch from now() - o.last_heartbeat_at) as double precision), o.last_heartbeat_at,
           array(select repo from repo_routes r where r.org_id = o.org_id and r.orchestrator_id = o.id order by repo limit 1000)
      from orchestrators o
     where o.org_id = :org_id
     order by o.name
     limit :limit
""")


def machines(tx: Tx, *, org_id: UUID, limit: int, offline_after: int) -> list[Machine]:
    """The organization's machines by name."""
    return [
        Machine(*row) for row in tx.all(MACHINES, org_id=org_id, limit=limit, offline_after=offline_after)
    ]


WITHOUT_A_TOKEN = sql("""
    select o.name from orchestrators o
     where o.org_id = :org_id
       and not exists (select from orchestrator_tokens t
                        where t.org_id = o.org_id and t.orchestrator_id = o.id and t.revoked_at is null
                          and (t.expires_at is null or t.expires_at > now()))
     order by o.name
     limit :limit
""")


def machines_without_a_token(tx: Tx, *, org_id: UUID, limit: int) -> list[str]:
    """The names of those whose every token was revoked or has expired."""
    return [row[0] for row in tx.all(WITHOUT_A_TOKEN, org_id=org_id, limit=limit)]


class MachineName(NamedTuple):
    """A machine's id and name."""

    id: UUID
    name: str


MACHINE_NAMES = sql("select id, name from orchestrators where org_id = :org_id order by name limit 10000")


def machine_names(tx: Tx, *, org_id: UUID) -> list[MachineName]:
    """Ids and names alone: a timeline needs no counts."""
    return [MachineName(*row) for row in tx.all(MACHINE_NAMES, org_id=org_id)]


class Token(NamedTuple):
    """A machine's token, by what is stored of it. `status`: active, expired or revoked."""

    id: UUID
    prefix: str
    label: str | None
    machine: str | None
    status: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    revoked_at: datetime | None


TOKENS = sql("""
    select t.id, t.prefix, t.label, o.name,
           case when t.revoked_at is not null then 'revoked' when t.expires_at <= now() then 'expired' else 'active' end,
           t.created_at, t.expires_at, t.last_used_at, t.revoked_at
      from orchestrator_tokens t
      left join orchestrators o on o.org_id = t.org_id and o.id = t.orchestrator_id
     where t.org_id = :org_id
     order by t.revoked_at is not null, t.created_at desc, t.id desc
     limit :limit
""")


def tokens(tx: Tx, *, org_id: UUID, limit: int) -> list[Token]:
    """The organization's tokens: those that are valid first, newest first."""
    return [Token(*row) for row in tx.all(TOKENS, org_id=org_id, limit=limit)]


EXPIRY = sql("select expires_at from orchestrator_tokens where org_id = :org_id and id = :token_id")


def expiry_of_token(tx: Tx, *, org_id: UUID, token_id: UUID) -> datetime | None:
    """When the token ends by itself; None: never."""
    row = tx.first(EXPIRY, org_id=org_id, token_id=token_id)
    return None if row is None else row[0]

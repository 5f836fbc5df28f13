"""Machines: who is calling, what they serve, and which of them a piece of work goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from shared.db import Tx, sql
from shared.errors import Conflict, Forbidden, Unauthenticated
from shared.ids import new_id, new_token, token_hash
from shared.log import note

TOKEN_PREFIX_LENGTH = 12


class Machine(NamedTuple):
    """Whose token this is. `orchestrator_id` is None until the token has been used to register."""

    org_id: UUID
    token_id: UUID
    orchestrator_id: UUID | None
    name: str | None
    concurrency_limit: int | None
    use_is_stale: bool

    def registered(self) -> UUID:
        """The machine's id. Raises Forbidden for a token that no machine has registered with yet."""
        if self.orchestrator_id is None:
            raise Forbidden(
                "this token has not been used to register a machine yet: POST /api/orchestrators/register first"
            )
        return self.orchestrator_id


# Revoked and expired tokens match nothing: revocation takes effect with the next statement. Also a part of dispatch_queue.POLL.
WHO = """
    select t.org_id, t.id as token_id, t.orchestrator_id, o.name, o.max_concurrent_jobs,
           t.last_used_at is null or t.last_used_at < now() - interval '1 minute' as use_is_stale
      from orchestrator_tokens t
      left join orchestrators o on o.org_id = t.org_id and o.id = t.orchestrator_id
     where t.token_hash = :token_hash and t.revoked_at is null and (t.expires_at is null or t.expires_at > now())
"""
AUTHENTICATE = sql(WHO)

# The second statement of a claim sees what an earlier claim of the same machine has committed, because this one waited for it: that
# makes the concurrency limit hold. NO KEY UPDATE does not stand in the way of an enqueue's foreign key.
LOCK_MACHINE = sql("""
    select max_concurrent_jobs from orchestrators where org_id = :org_id and id = :orchestrator_id for no key update
""")


def authenticate(tx: Tx, token: str) -> Machine:
    """Whose request this is.

    Raises Unauthenticated for a token that is malformed, unknown, expired or revoked; the answer does not say which.
    """
    row = tx.first(AUTHENTICATE, token_hash=token_hash(token))
    if row is None:
        raise Unauthenticated("unknown, expired or revoked token")
    machine = Machine(*row)
    note_use(tx, machine)
    return machine


def lock_machine(tx: Tx, *, org_id: UUID, orchestrator_id: UUID) -> int:
    """Lets the claims of one machine pass one by one; returns its concurrency limit."""
    row = tx.first(LOCK_MACHINE, org_id=org_id, orchestrator_id=orchestrator_id)
    assert row is not None
    return int(row[0])


NOTE_USE = sql("""
    update orchestrator_tokens set last_used_at = now()
     where org_id = :org_id and id = :token_id and (last_used_at is null or last_used_at < now() - interval '1 minute')
""")


def note_use(tx: Tx, machine: Machine) -> None:
    """Writes `last_used_at`, at most once a minute: a write on every poll would be most of the database's work.

    From here on, the lines that this request logs name the machine.
    """
    note(org_id=machine.org_id, orchestrator_id=machine.orchestrator_id)
    if machine.use_is_stale:
        tx.run(NOTE_USE, org_id=machine.org_id, token_id=machine.token_id)


# -- registration -------------------------------------------------------------------------------------------------------

# Two registrations under one name pass one by one: a rename would otherwise meet the other's insert at the unique index.
LOCK_NAME = sql(
    "select pg_advisory_xact_lock(hashtextextended(:name, hashtextextended(cast(:org_id as text), 0)))"
)
BY_NAME = sql("select id from orchestrators where org_id = :org_id and name = :name")
RENAME = sql("""
    update orchestrators set name = :name, max_concurrent_jobs = :limit, last_heartbeat_at = now()
     where org_id = :org_id and id = :orchestrator_id
""")
UPSERT = sql("""
    insert into orchestrators (org_id, id, name, max_concurrent_jobs, last_heartbeat_at)
    values (:org_id, :orchestrator_id, :name, :limit, now())
    on conflict (org_id, name) do update set max_concurrent_jobs = excluded.max_concurrent_jobs, last_heartbeat_at = now()
    returning id
""")
BIND_TOKEN = sql("""
    update orchestrator_tokens set orchestrator_id = :orchestrator_id
     where org_id = :org_id and id = :token_id and orchestrator_id is distinct from :orchestrator_id
""")
# Sorted insert, and only what differs is touched: two registrations at once cannot deadlock on each other's routes.
REPLACE_ROUTES = sql("""
    with wanted as (select distinct repo from unnest(cast(:repos as text[])) as repo),
    gone as (
      delete from repo_routes
       where org_id = :org_id and orchestrator_id = :orchestrator_id and source = 'machine' and repo not in (select repo from wanted)
    )
    insert into repo_routes (org_id, repo, orchestrator_id, source)
    select :org_id, repo, :orchestrator_id, 'machine' from wanted order by repo
    on conflict do nothing
""")


def register(tx: Tx, machine: Machine, *, name: str, repos: Sequence[str], concurrency_limit: int) -> UUID:
    """Makes or updates the machine that this token belongs to, and replaces the routes that it brought itself.

    An unbound token joins the machine of that name (a replaced token keeps its machine) or makes it. A bound token keeps its machine:
    another name renames it, so that its work stays with it.

    Raises Conflict when the name belongs to another machine: a token must not take over what waits for somebody else.
    """
    tx.run(LOCK_NAME, org_id=machine.org_id, name=name)
    if machine.orchestrator_id is None or machine.name == name:
        row = tx.first(
            UPSERT, org_id=machine.org_id, orchestrator_id=new_id(), name=name, limit=concurrency_limit
        )
        assert row is not None
        orchestrator_id: UUID = row[0]
        tx.run(BIND_TOKEN, org_id=machine.org_id, token_id=machine.token_id, orchestrator_id=orchestrator_id)
    else:
        orchestrator_id = machine.orchestrator_id
        if tx.first(BY_NAME, org_id=machine.org_id, name=name) is not None:
            raise Conflict(f"another machine of this organization is called {name!r}", field="name")
        tx.run(
            RENAME, org_id=machine.org_id, orchestrator_id=orchestrator_id, name=name, limit=concurrency_limit
        )
    tx.run(REPLACE_ROUTES, org_id=machine.org_id, orchestrator_id=orchestrator_id, repos=list(repos))
    return orchestrator_id


HEARTBEAT = sql("""
    update orchestrators set last_heartbeat_at = now(), active_jobs = coalesce(cast(:active_jobs as integer), active_jobs)
     where org_id = :org_id and id = :orchestrator_id
""")


def heartbeat(tx: Tx, *, org_id: UUID, orchestrator_id: UUID, active_jobs: int | None) -> bool:
    """Notes that the machine lives. Says nothing about its claims: those live by renewals."""
    return tx.run(HEARTBEAT, org_id=org_id, orchestrator_id=orchestrator_id, active_jobs=active_jobs) == 1


# -- routing ------------------------------------------------------------------------------------------------------------

# Online before offline, then the least loaded. An offline machine may still be chosen: a closed lid is the normal case, the row waits,
# and the sweep hands it on if the machine stays away. Load is counted to 65 a machine: more than any limit.
CHOOSE_MACHINE = """
    select o.id
      from repo_routes r
      join orchestrators o on o.org_id = r.org_id and o.id = r.orchestrator_id
      cross join lateral (select o.last_heartbeat_at > now() - make_interval(secs => :offline_after) as online) seen
      cross join lateral (
        select count(*) as held from (
          select from dispatch_queue q where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is not null
          union all
          (select from dispatch_queue q where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is null limit 65)
        ) counted) busy
     where r.org_id = :org_id and r.repo = {repo}
     order by coalesce(seen.online, false) desc,
              o.id is not distinct from cast(:preferred as uuid) desc,
              busy.held::float / o.max_concurrent_jobs,
              o.last_heartbeat_at desc nulls last,
              o.id
     limit 1
"""
ROUTE = sql(CHOOSE_MACHINE.format(repo=":repo"))


def route(
    tx: Tx, *, org_id: UUID, repo: str, offline_after: int, preferred: UUID | None = None
) -> UUID | None:
    """The machine that work on `repo` goes to; None when no machine of the organization serves it.

    Args:
        preferred: the machine that worked on it before; taken if it is online, since it has the checkout.
    """
    row = tx.first(ROUTE, org_id=org_id, repo=repo, offline_after=offline_after, preferred=preferred)
    return None if row is None else row[0]


REPOS_SERVED = sql("select distinct repo from repo_routes where org_id = :org_id order by repo limit 25")


def repos_served(tx: Tx, *, org_id: UUID) -> list[str]:
    """The repositories that some machine of the organization serves, 25 at most: what to offer when an issue matches none."""
    return [row[0] for row in tx.all(REPOS_SERVED, org_id=org_id)]


# -- tokens -------------------------------------------------------------------------------------------------------------

MINT = sql("""
    insert into orchestrator_tokens (org_id, id, token_hash, prefix, label, expires_at)
    values (:org_id, :token_id, :token_hash, :prefix, :label,
            now() + make_interval(days => cast(:days as integer)))
""")


def mint_token(
    tx: Tx, *, org_id: UUID, label: str | None = None, days: int | None = None
) -> tuple[UUID, str]:
    """Makes a token for a machine. Returns its id and the token itself: this is the only time that it can be seen."""
    token, token_id = new_token(), new_id()
    tx.run(
        MINT,
        org_id=org_id,
        token_id=token_id,
        token_hash=token_hash(token),
        prefix=token[:TOKEN_PREFIX_LENGTH],
        label=label,
        days=days,
    )
    return token_id, token


REVOKE = sql("""
    update orchestrator_tokens set revoked_at = now() where org_id = :org_id and id = :token_id and revoked_at is null
""")


def revoke_token(tx: Tx, *, org_id: UUID, token_id: UUID) -> bool:
    """Ends a token at once; False when there is no such token or it was revoked before."""
    return tx.run(REVOKE, org_id=org_id, token_id=token_id) == 1


# -- removal ------------------------------------------------------------------------------------------------------------

# FOR UPDATE waits for enqueues that are under way and makes later ones wait: what is counted next is all there is.
LOCK_FOR_REMOVAL = sql(
    "select name from orchestrators where org_id = :org_id and id = :orchestrator_id for update"
)
WORK_OF = sql("""
    select count(*) filter (where claimed_at is not null), count(*) filter (where claimed_at is null)
      from dispatch_queue
     where org_id = :org_id and orchestrator_id = :orchestrator_id
""")
REMOVE = sql("delete from orchestrators where org_id = :org_id and id = :orchestrator_id")


class Burden(NamedTuple):
    """The rows that are meant for a machine: `held` by it at this moment, and `waiting` for it."""

    held: int
    waiting: int


def remove(tx: Tx, *, org_id: UUID, orchestrator_id: UUID) -> Burden | None:
    """Removes a machine with its tokens and routes; its sessions stay. None when that was done.

    Returns the rows that stand in the way otherwise: nothing is changed then, because work that is deleted with its machine is lost.
    """
    if tx.first(LOCK_FOR_REMOVAL, org_id=org_id, orchestrator_id=orchestrator_id) is None:
        return None
    row = tx.first(WORK_OF, org_id=org_id, orchestrator_id=orchestrator_id)
    assert row is not None
    burden = Burden(*row)
    if any(burden):
        return burden
    tx.run(REMOVE, org_id=org_id, orchestrator_id=orchestrator_id)
    return None

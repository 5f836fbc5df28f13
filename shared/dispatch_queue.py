"""The dispatch queue: every change of a row, in the order of a row's life.

enqueue -> poll -> claim -> renew -> settle, or release / sweep (back to waiting, or dropped), or cancel.

The row is the delivery guarantee: it is committed with its session and exists exactly as long as that session still has to be
delivered. Each statement stands above its one function. The guard is in the WHERE clause; zero rows is an answer (None), not an
error. A claim is `(queue id, attempt)`, and that pair fences everything a machine says about it. `attempt=None` stands for clients
of the original protocol, which send none: then the caller's current claim is meant.

Lock order, for all of them: queue row, then session. Time is the database's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from shared.db import Tx, sql
from shared.errors import Unauthenticated
from shared.ids import new_id, token_hash
from shared.orchestrators import WHO, Machine, note_use

if TYPE_CHECKING:
    from shared.settings import Settings


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a claim counts as abandoned, and what happens then. Durations in seconds."""

    claim_timeout: int = 1800
    max_attempts: int = 5
    backoff_base: int = 60
    backoff_cap: int = 900
    offline_after: int = 90
    reroute_after: int = 300

    @classmethod
    def of(cls, settings: Settings) -> RetryPolicy:
        """What this deployment has decided."""
        return cls(
            claim_timeout=settings.dispatch_claim_timeout_seconds,
            max_attempts=settings.dispatch_max_attempts,
            backoff_base=settings.dispatch_backoff_base_seconds,
            backoff_cap=settings.dispatch_backoff_cap_seconds,
            offline_after=settings.orchestrator_offline_after_seconds,
            reroute_after=settings.dispatch_reroute_after_seconds,
        )


class Work(NamedTuple):
    """A row as its machine sees it. `attempts` counts the claims so far; after a claim it is this claim's attempt."""

    queue_id: UUID
    session_id: UUID
    payload: dict[str, Any]
    attempts: int
    created_at: datetime


# -- enqueue ------------------------------------------------------------------------------------------------------------

ENQUEUE = sql("""
    insert into dispatch_queue (org_id, id, orchestrator_id, session_id, payload)
    values (:org_id, :queue_id, :orchestrator_id, :session_id, cast(:payload as jsonb))
""")


def enqueue_dispatch(
    tx: Tx, *, org_id: UUID, orchestrator_id: UUID, session_id: UUID, message: dict[str, Any]
) -> UUID:
    """Commits the work together with whatever else `tx` commits: the session that it is for.

    Args:
        message: the issue's part of the wire message (30 keys at most, JSON); ids and times are added when it is read.

    Returns the id of the queue row.
    Raises IntegrityError when the session already has a row, or (at COMMIT) when it is over.
    Source: `enqueueDispatch(tx, …)` of the DevPilot texts: the transaction is the required first argument.
    """
    queue_id = new_id()
    tx.run(
        ENQUEUE,
        org_id=org_id,
        queue_id=queue_id,
        orchestrator_id=orchestrator_id,
        session_id=session_id,
        payload=json.dumps(message),
    )
    return queue_id


# -- poll ---------------------------------------------------------------------------------------------------------------

# One statement for the request that there are most of: who is asking, what waits for it, what it should stop, and when to look again.
# Only the machine's own rows are read, whatever else is in the table: the index `queue_waiting` is in exactly this order.
POLL = sql(f"""
    with machine as ({WHO})
    select m.org_id, m.token_id, m.orchestrator_id, m.name, m.max_concurrent_jobs, m.use_is_stale,
           array(select q.id from dispatch_queue q
                  where q.org_id = m.org_id and q.orchestrator_id = m.orchestrator_id
                    and q.claimed_at is not null and q.cancel_requested_at is not null),
           (select cast(extract(epoch from q.available_at - now()) * 1000 as bigint) from dispatch_queue q
             where q.org_id = m.org_id and q.orchestrator_id = m.orchestrator_id and q.claimed_at is null and q.available_at > now()
             order by q.available_at
             limit 1),
           w.id, w.session_id, w.payload, w.attempts, w.created_at
      from machine m
      left join lateral (
        select q.id, q.session_id, q.payload, q.attempts, q.created_at, q.available_at
          from dispatch_queue q
         where q.org_id = m.org_id and q.orchestrator_id = m.orchestrator_id
           and q.claimed_at is null and q.available_at <= now()
         order by q.available_at, q.id
         limit :limit) w on true
     order by w.available_at, w.id
""")


class Polled(NamedTuple):
    """What a machine learns by looking: what it could claim now, which of its claims to stop, and when the next row is due."""

    machine: Machine
    work: list[Work]
    stop_requests: list[UUID]
    next_due_ms: int | None


def poll(tx: Tx, *, token: str, limit: int) -> Polled:
    """What the machine with this token could claim now, oldest first. Changes no row.

    Raises Unauthenticated for a token that is malformed, unknown, expired or revoked.
    """
    rows = tx.all(POLL, token_hash=token_hash(token), limit=limit)
    if not rows:
        raise Unauthenticated("unknown, expired or revoked token")
    machine = Machine(*rows[0][:6])
    note_use(tx, machine)
    return Polled(
        machine, [Work(*row[8:]) for row in rows if row[8] is not None], list(rows[0][6]), rows[0][7]
    )


# -- claim --------------------------------------------------------------------------------------------------------------

# What a claim leaves behind besides the row: the session's status and the fact itself. The unique index on that fact makes the
# same (queue id, attempt) impossible to record twice. Rows and sessions are named by value or by array, here and below: a
# join may be planned as a walk over all that the tenant has, which it is while the planner takes the table for small. (PostgreSQL 15 may
# take an array for that as well; a single value never.)
_ONE, _SEVERAL = "= (select {0} from {1})", "= any (array(select {0} from {1}))"
_CLAIMED = """
    , told as (
      update dispatch_sessions s
         set status = 'dispatched', started_at = coalesce(s.started_at, now()), updated_at = now()
       where s.org_id = :org_id and s.id {named}
    ), noted as (
      insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt)
      select :org_id, c.session_id, 'claimed', cast(:orchestrator_id as uuid), c.id, c.attempts from claimed c
    )
    select id, session_id, payload, attempts, created_at from claimed order by available_at, id
"""

# THE claim: two machines racing for one row cannot both win, because the second UPDATE waits for the first, looks at the row
# again and finds `claimed_at is null` false. Nothing else is needed for that: no lock, no coordinator.
# The count respects the machine's limit; callers take the machine's row lock first (orchestrators.authenticate), so that two
# requests of one machine do not both see the last free place.
CLAIM = sql(f"""
    with claimed as (
      update dispatch_queue
         set claimed_at = now(), claimed_by = :orchestrator_id, attempts = attempts + 1,
             prompts_told = jsonb_array_length(coalesce(payload -> 'prompts', '[]'))
       where org_id = :org_id and id = :queue_id and orchestrator_id = :orchestrator_id
         and claimed_at is null and available_at <= now()
         and (select count(*) from dispatch_queue held
               where held.org_id = :org_id and held.orchestrator_id = :orchestrator_id and held.claimed_at is not null) < :limit
      returning id, session_id, payload, attempts, created_at, available_at
    ) {_CLAIMED.format(named=_ONE.format("session_id", "claimed"))}
""")


def claim(
    tx: Tx, *, org_id: UUID, orchestrator_id: UUID, queue_id: UUID, concurrency_limit: int
) -> Work | None:
    """Claims one row for the machine that it is meant for; None when it is not to be had (lost race, backoff, machine full)."""
    row = tx.first(
        CLAIM, org_id=org_id, orchestrator_id=orchestrator_id, queue_id=queue_id, limit=concurrency_limit
    )
    return None if row is None else Work(*row)


# MATERIALIZED: inlined into the join, the LIMIT could be evaluated again and claim more rows than asked for.
# SKIP LOCKED only avoids waiting: the WHERE clause of the UPDATE is what makes a claim right (a test takes SKIP LOCKED away).
CLAIM_MANY = sql(f"""
    with candidates as materialized (
      select id from dispatch_queue
       where org_id = :org_id and orchestrator_id = :orchestrator_id
         and claimed_at is null and available_at <= now()
       order by available_at, id
       limit least(:limit, greatest(0, :concurrency_limit - (
               select count(*) from dispatch_queue held
                where held.org_id = :org_id and held.orchestrator_id = :orchestrator_id and held.claimed_at is not null)))
         for update skip locked
    ), claimed as (
      update dispatch_queue q
         set claimed_at = now(), claimed_by = :orchestrator_id, attempts = q.attempts + 1,
             prompts_told = jsonb_array_length(coalesce(q.payload -> 'prompts', '[]'))
       where q.org_id = :org_id and q.id = any (array(select id from candidates)) and q.claimed_at is null and q.available_at <= now()
      returning q.id, q.session_id, q.payload, q.attempts, q.created_at, q.available_at
    ) {_CLAIMED.format(named=_SEVERAL.format("session_id", "claimed"))}
""")


def claim_many(
    tx: Tx, *, org_id: UUID, orchestrator_id: UUID, limit: int, concurrency_limit: int
) -> list[Work]:
    """Claims up to `limit` rows of this machine in one statement, oldest first, never more than it has places for."""
    rows = tx.all(
        CLAIM_MANY,
        org_id=org_id,
        orchestrator_id=orchestrator_id,
        limit=limit,
        concurrency_limit=concurrency_limit,
    )
    return [Work(*row) for row in rows]


# -- renew --------------------------------------------------------------------------------------------------------------


class Renewal(NamedTuple):
    """A claim that is still held. `prompts` are the follow-ups so far: `{activityId, body, createdAt}` each."""

    queue_id: UUID
    attempt: int
    cancel_requested: bool
    prompts: list[dict[str, Any]]


# A claim is named by its row (renew) or by its session (a progress report is proof of life too).
_RENEW = """
    update dispatch_queue
       set claimed_at = now()
     where org_id = :org_id and {named} and claimed_by = :orchestrator_id and claimed_at is not null
       and attempts = coalesce(cast(:attempt as integer), attempts)
    returning id, attempts, cancel_requested_at is not null, coalesce(payload -> 'prompts', '[]')
"""
RENEW_ROW = sql(_RENEW.format(named="id = :queue_id"))
RENEW_SESSION = sql(
    _RENEW.format(named="session_id = :session_id and id = coalesce(cast(:queue_id as uuid), id)")
)


def renew(
    tx: Tx,
    *,
    org_id: UUID,
    orchestrator_id: UUID,
    attempt: int | None,
    queue_id: UUID | None = None,
    session_id: UUID | None = None,
) -> Renewal | None:
    """Starts the claim's timeout anew; None when the claim is not held any more. Name it by row, by session, or by both."""
    named = {"queue_id": queue_id} if session_id is None else {"queue_id": queue_id, "session_id": session_id}
    statement = RENEW_ROW if session_id is None else RENEW_SESSION
    row = tx.first(statement, org_id=org_id, orchestrator_id=orchestrator_id, attempt=attempt, **named)
    return None if row is None else Renewal(*row)


# -- settle -------------------------------------------------------------------------------------------------------------

# No `claimed_at is not null`: a sweep may have released the row meanwhile. As long as `attempts` is still this claim's, nobody
# else has started, and throwing finished work away helps nobody. The message comes back only where something in it is still to be done.
SETTLE = sql("""
    delete from dispatch_queue
     where org_id = :org_id and session_id = :session_id and claimed_by = :orchestrator_id
       and id = coalesce(cast(:queue_id as uuid), id)
       and attempts = coalesce(cast(:attempt as integer), attempts)
    returning id, attempts, cancel_requested_at is not null, wanted_again, coalesce(cast(:prompts_seen as integer), prompts_told),
              case when wanted_again or jsonb_array_length(coalesce(payload -> 'prompts', '[]'))
                                        > coalesce(cast(:prompts_seen as integer), prompts_told) then payload end
""")


class Settled(NamedTuple):
    """A delivery that is over. `cancel_requested`: the machine had been asked to stop; `wanted_again`: and the work was wanted after that.

    `payload` is there where the message holds more than `prompts_seen` follow-ups, or is wanted again.
    """

    queue_id: UUID
    attempt: int
    cancel_requested: bool
    wanted_again: bool
    prompts_seen: int
    payload: dict[str, Any] | None

    def left_to_do(self, *, success: bool) -> dict[str, Any] | None:
        """The message that the session has to begin anew with; None when nothing is left.

        What was stopped and wanted again is done again whole, unless it succeeded all the same; otherwise what is left are the
        follow-ups that came in too late for the agent. Those of before a stop went with it.
        """
        if self.payload is None or (self.cancel_requested and not self.wanted_again):
            return None
        if self.wanted_again and not success:
            return self.payload
        unseen = self.payload.get("prompts", [])[self.prompts_seen :]
        return {**self.payload, "prompts": unseen} if unseen else None


def settle(
    tx: Tx,
    *,
    org_id: UUID,
    orchestrator_id: UUID,
    session_id: UUID,
    attempt: int | None,
    queue_id: UUID | None = None,
    prompts_seen: int | None = None,
) -> Settled | None:
    """Ends the delivery: the row goes, and the caller closes the session in the same transaction. None: the claim is lost.

    Args:
        queue_id: with `attempt`, which claim is meant. A session that began anew has another row, whose attempts count from 1 again.
        prompts_seen: how many follow-ups the agent was given; None: those of the message as it was claimed.
    """
    row = tx.first(
        SETTLE,
        org_id=org_id,
        session_id=session_id,
        orchestrator_id=orchestrator_id,
        queue_id=queue_id,
        attempt=attempt,
        prompts_seen=prompts_seen,
    )
    return None if row is None else Settled(*row)


# -- release and sweep --------------------------------------------------------------------------------------------------


class GivenUp(NamedTuple):
    """What became of a claim that was given back or had expired: `released`, `dropped` or `cancelled`."""

    queue_id: UUID
    session_id: UUID
    attempt: int
    outcome: str


# Giving back and expiring are one transition. Below the attempt limit the row waits again, after min(n^2 * base, cap); at the limit it
# is dropped and the session fails, keeping the payload as a dead letter; with a stop request it ends as cancelled, not redelivered,
# unless it was wanted again after that.
# The branches ask `g`, the locked row, and not `q`: in the statement's snapshot `q` may still be the version before the lock.
_GIVE_UP = """
    , released as (
      update dispatch_queue q
         set claimed_at = null, last_error = :error, cancel_requested_at = null, wanted_again = false,
             available_at = now() + make_interval(secs => least(power(g.attempts, 2) * :backoff_base, :backoff_cap) * {jitter})
        from given_up g
       where q.org_id = :org_id and q.id {rows} and q.id = g.id and q.claimed_at is not null
         and g.attempts < :max_attempts and not g.cancelled
      returning q.org_id, q.id, q.session_id, q.attempts, q.claimed_by, q.available_at
    ), dropped as (
      delete from dispatch_queue q
       using given_up g
       where q.org_id = :org_id and q.id {rows} and q.id = g.id and q.claimed_at is not null
         and (g.attempts >= :max_attempts or g.cancelled)
      returning q.org_id, q.id, q.session_id, q.attempts, q.claimed_by, q.payload, g.cancelled
    ), told as (
      update dispatch_sessions s
         set status = o.status, error_code = o.error_code, error_message = o.error, ended_at = o.ended_at, updated_at = now()
        from (select session_id, 'pending' as status, null as error_code, null as error, null::timestamptz as ended_at from released
              union all
              select session_id, 'cancelled', null, null, now() from dropped where cancelled
              union all
              select session_id, 'error', 'attempts_exhausted', cast(:error as text), now() from dropped where not cancelled) o
       where s.org_id = :org_id and s.id {sessions} and s.id = o.session_id and s.ended_at is null
    ), noted as (
      insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
      select org_id, session_id, 'released', claimed_by, id, attempts,
             jsonb_build_object('error', cast(:error as text), 'availableAt', available_at)
        from released
      union all
      select org_id, session_id, case when cancelled then 'cancelled' else 'dead_lettered' end, claimed_by, id, attempts,
             jsonb_build_object('error', cast(:error as text))
             || case when cancelled then '{{}}' else jsonb_build_object('reason', 'attempts_exhausted', 'payload', payload) end
        from dropped
    )
    select id, session_id, attempts, 'released' from released
    union all
    select id, session_id, attempts, case when cancelled then 'cancelled' else 'dropped' end from dropped
"""

RELEASE = sql(
    """
    with given_up as materialized (
      select id, session_id, attempts, cancel_requested_at is not null and not wanted_again as cancelled
        from dispatch_queue
       where org_id = :org_id and id = :queue_id and claimed_by = :orchestrator_id and claimed_at is not null
         and attempts = coalesce(cast(:attempt as integer), attempts)
         for update
    )"""
    + _GIVE_UP.format(
        jitter="1", rows=_ONE.format("id", "given_up"), sessions=_ONE.format("session_id", "given_up")
    )
)


def release(
    tx: Tx,
    *,
    org_id: UUID,
    orchestrator_id: UUID,
    queue_id: UUID,
    attempt: int | None,
    error: str,
    policy: RetryPolicy,
) -> GivenUp | None:
    """Gives a claim back (a nack): it waits, is dropped or ends as cancelled. None: the claim is not held any more."""
    row = tx.first(
        RELEASE,
        org_id=org_id,
        queue_id=queue_id,
        orchestrator_id=orchestrator_id,
        attempt=attempt,
        error=error,
        backoff_base=policy.backoff_base,
        backoff_cap=policy.backoff_cap,
        max_attempts=policy.max_attempts,
    )
    return None if row is None else GivenUp(*row)


# Two overlapping ticks share the rows (SKIP LOCKED) and neither waits. A claim that was renewed after this statement began is looked at
# again under its lock and left alone. Jitter up to 10 % on top of the backoff: a stalled fleet must not return in one instant.
SWEEP = sql(
    """
    with given_up as materialized (
      select id, session_id, attempts, cancel_requested_at is not null and not wanted_again as cancelled
        from dispatch_queue
       where org_id = :org_id and orchestrator_id = :orchestrator_id
         and claimed_at < now() - make_interval(secs => :claim_timeout)
       order by claimed_at
       limit :limit
         for update skip locked
    )"""
    + _GIVE_UP.format(
        jitter="(1 + random() * 0.1)",
        rows=_SEVERAL.format("id", "given_up"),
        sessions=_SEVERAL.format("session_id", "given_up"),
    )
)


def sweep(tx: Tx, *, org_id: UUID, orchestrator_id: UUID, limit: int, policy: RetryPolicy) -> list[GivenUp]:
    """Releases, drops or cancels up to `limit` expired claims of one machine, oldest first, as if each had been given back."""
    rows = tx.all(
        SWEEP,
        org_id=org_id,
        orchestrator_id=orchestrator_id,
        limit=limit,
        claim_timeout=policy.claim_timeout,
        error="claim expired",
        backoff_base=policy.backoff_base,
        backoff_cap=policy.backoff_cap,
        max_attempts=policy.max_attempts,
    )
    return [GivenUp(*row) for row in rows]


# Two index probes a machine, however many rows wait or are held in time. Reads across organizations, changes and locks nothing.
MACHINES_TO_SWEEP = sql("""
    select o.org_id, o.id, expired.found, stranded.found
      from orchestrators o
      cross join lateral (
        select exists (select from dispatch_queue q
                        where q.org_id = o.org_id and q.orchestrator_id = o.id
                          and q.claimed_at < now() - make_interval(secs => :claim_timeout)) as found) expired
      cross join lateral (
        select coalesce(o.last_heartbeat_at, o.created_at) < now() - make_interval(secs => :reroute_after)
               and exists (select from dispatch_queue q
                            where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is null) as found) stranded
     where expired.found or stranded.found
     order by o.org_id, o.id
""")


class MachineToSweep(NamedTuple):
    """A machine with expired claims, or one that has been offline for long while rows wait for it."""

    org_id: UUID
    orchestrator_id: UUID
    has_expired_claims: bool
    has_stranded_rows: bool


def machines_to_sweep(tx: Tx, *, policy: RetryPolicy) -> list[MachineToSweep]:
    """Where a sweep has something to do; nearly always nowhere."""
    rows = tx.all(MACHINES_TO_SWEEP, claim_timeout=policy.claim_timeout, reroute_after=policy.reroute_after)
    return [MachineToSweep(*row) for row in rows]


# -- re-route -----------------------------------------------------------------------------------------------------------

# The waiting rows of one machine are dealt to the free places of the others that serve the same repo and are online: the n-th row of
# a repo gets the n-th place, emptiest machine first. Rows beyond the places stay; so do those whose place an older row of another repo
# has taken. Rows that nobody could take are not looked at: as many as the limit would hide those behind them for ever.
# `held` is counted to 65 at most: more than any machine's limit.
REROUTE = sql("""
    with rooms as materialized (
      select o.id, o.max_concurrent_jobs as size, busy.held
        from orchestrators o
        cross join lateral (
          select count(*) as held
            from (select from dispatch_queue q where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is not null
                  union all
                  (select from dispatch_queue q where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is null limit 65)
                 ) counted) busy
       where o.org_id = :org_id and o.id <> :orchestrator_id and busy.held < o.max_concurrent_jobs
         and o.last_heartbeat_at > now() - make_interval(secs => :offline_after)
    ), waiting as materialized (
      select id, repo, available_at, row_number() over (partition by repo order by available_at, id) as place
        from (select q.id, q.available_at, s.repo
                from dispatch_queue q
                join dispatch_sessions s on s.org_id = q.org_id and s.id = q.session_id
               where q.org_id = :org_id and q.orchestrator_id = :orchestrator_id and q.claimed_at is null
                 and (cast(:queue_ids as uuid[]) is null or q.id = any (cast(:queue_ids as uuid[])))
                 and exists (select from repo_routes r join rooms on rooms.id = r.orchestrator_id
                              where r.org_id = :org_id and r.repo = s.repo)
               order by q.available_at, q.id
               limit :limit
                 for update of q skip locked) locked
    ), places as (
      select r.repo, rooms.id as orchestrator_id, taken,
             row_number() over (partition by r.repo order by (rooms.held + taken)::float / rooms.size, rooms.id) as place
        from rooms
        join repo_routes r on r.org_id = :org_id and r.orchestrator_id = rooms.id
        cross join lateral generate_series(0, rooms.size - rooms.held::integer - 1) taken
       where r.repo in (select repo from waiting)
    ), dealt as (
      select w.id, p.orchestrator_id,
             row_number() over (partition by p.orchestrator_id, p.taken order by w.available_at, w.id) as claimant
        from waiting w join places p using (repo, place)
    ), rerouted as (
      update dispatch_queue q
         set orchestrator_id = d.orchestrator_id
        from dealt d
       where q.org_id = :org_id and q.id = d.id and d.claimant = 1
         and q.claimed_at is null and q.orchestrator_id = :orchestrator_id
      returning q.id, q.session_id, q.attempts, q.orchestrator_id
    ), told as (
      update dispatch_sessions s
         set orchestrator_id = r.orchestrator_id, updated_at = now()
        from rerouted r
       where s.org_id = :org_id and s.id = any (array(select session_id from rerouted)) and s.id = r.session_id
    ), noted as (
      insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
      select :org_id, session_id, 'rerouted', orchestrator_id, id, attempts,
             jsonb_build_object('from', cast(:orchestrator_id as uuid), 'to', orchestrator_id)
        from rerouted
    )
    select id, orchestrator_id from rerouted
""")


def reroute(
    tx: Tx,
    *,
    org_id: UUID,
    orchestrator_id: UUID,
    limit: int,
    policy: RetryPolicy,
    queue_ids: Sequence[UUID] | None = None,
) -> dict[UUID, UUID]:
    """Hands waiting rows of one machine (all, or just `queue_ids`) to others that serve the repo, are online and have room.

    Returns the rows that moved: queue id -> new machine. Whatever found no machine waits where it is: nothing is lost.
    """
    rows = tx.all(
        REROUTE,
        org_id=org_id,
        orchestrator_id=orchestrator_id,
        limit=limit,
        offline_after=policy.offline_after,
        queue_ids=None if queue_ids is None else list(queue_ids),
    )
    return {row[0]: row[1] for row in rows}


# -- cancel -------------------------------------------------------------------------------------------------------------

# The row is locked by a statement of its own: a claim that commits while this waits turns the cancel into a stop request. In one
# statement it could not, since an UPDATE tests the CHECKs on its snapshot's version of the row, the unclaimed one, before it looks again.
LOCK_FOR_CANCEL = sql(
    "select id from dispatch_queue where org_id = :org_id and session_id = :session_id for update"
)
CANCEL = sql("""
    with row as (
      select id, session_id, attempts, claimed_by, claimed_at is not null as claimed,
             cancel_requested_at is not null and not wanted_again as asked
        from dispatch_queue
       where org_id = :org_id and session_id = :session_id
    ), gone as (
      delete from dispatch_queue q using row where q.org_id = :org_id and q.session_id = :session_id and not row.claimed
    ), asked as (
      update dispatch_queue q
         set cancel_requested_at = greatest(q.cancel_requested_at, coalesce(cast(:at as timestamptz), now())), wanted_again = false
        from row
       where q.org_id = :org_id and q.session_id = :session_id and row.claimed
    ), told as (
      update dispatch_sessions s
         set status = 'cancelled', ended_at = now(), updated_at = now()
        from row
       where s.org_id = :org_id and s.id = :session_id and not row.claimed
    ), noted as (
      insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
      select :org_id, session_id, case when claimed then 'stop_requested' else 'cancelled' end, claimed_by, id, attempts,
             jsonb_build_object('reason', cast(:reason as text))
        from row
       where not asked
    )
    select claimed from row
""")


def cancel(tx: Tx, *, org_id: UUID, session_id: UUID, reason: str, at: datetime | None = None) -> str | None:
    """Stops the work: `cancelled` when nobody had it, `stop_requested` when a machine has to be told, None when it is over.

    Args:
        at: when the stop was asked for, by Linear's clock; None: now. What is asked for later makes the work wanted again.
    """
    if tx.first(LOCK_FOR_CANCEL, org_id=org_id, session_id=session_id) is None:
        return None
    row = tx.first(CANCEL, org_id=org_id, session_id=session_id, reason=reason, at=at)
    assert row is not None
    return "stop_requested" if row[0] else "cancelled"


# Only while nobody has it: a machine that is at work keeps what it was given. Whoever had it before did so in another repository: its
# late completion is not one of this work (claimed_by).
REDIRECT = sql("""
    with redirected as (
      update dispatch_queue
         set orchestrator_id = :orchestrator_id, claimed_by = null,
             payload = payload || jsonb_build_object('repo', cast(:repo as text))
       where org_id = :org_id and session_id = :session_id and claimed_at is null
      returning id, session_id, attempts
    ), told as (
      update dispatch_sessions s
         set orchestrator_id = :orchestrator_id, repo = :repo, updated_at = now()
       where s.org_id = :org_id and s.id = any (array(select session_id from redirected))
    )
    insert into session_events (org_id, session_id, type, orchestrator_id, queue_id, attempt, data)
    select :org_id, session_id, 'rerouted', cast(:orchestrator_id as uuid), id, attempts, jsonb_build_object('repo', cast(:repo as text))
      from redirected
    returning id
""")


def redirect(tx: Tx, *, org_id: UUID, session_id: UUID, orchestrator_id: UUID, repo: str) -> bool:
    """Points waiting work at another repository and machine. False when a machine has it already, or it is over."""
    row = tx.first(REDIRECT, org_id=org_id, session_id=session_id, orchestrator_id=orchestrator_id, repo=repo)
    return row is not None


# -- standing -----------------------------------------------------------------------------------------------------------

STANDING = sql("""
    select orchestrator_id, claimed_by, attempts, claimed_at is null and available_at <= now()
      from dispatch_queue
     where org_id = :org_id and id = :queue_id
""")


class Standing(NamedTuple):
    """How a row stands. `claimable`: nobody holds it and its backoff has passed."""

    orchestrator_id: UUID
    claimed_by: UUID | None
    attempts: int
    claimable: bool


def standing(tx: Tx, *, org_id: UUID, queue_id: UUID) -> Standing | None:
    """Why an operation on the row may have matched nothing; only ever read after it did."""
    row = tx.first(STANDING, org_id=org_id, queue_id=queue_id)
    return None if row is None else Standing(*row)


# -- amend --------------------------------------------------------------------------------------------------------------

AMEND = sql("""
    update dispatch_queue
       set payload = payload || cast(:changes as jsonb)
                     || case when cast(:prompt as jsonb) is null then '{}'
                             else jsonb_build_object('prompts', coalesce(payload -> 'prompts', '[]') || cast(:prompt as jsonb)) end,
           wanted_again = wanted_again or coalesce(cancel_requested_at < cast(:asked_at as timestamptz), false)
     where org_id = :org_id and session_id = :session_id
    returning id, claimed_at is not null
""")


class Amended(NamedTuple):
    """The row whose message was changed, and whether a machine is already at work on it."""

    queue_id: UUID
    claimed: bool


def amend(
    tx: Tx,
    *,
    org_id: UUID,
    session_id: UUID,
    changes: dict[str, Any] | None = None,
    prompt: dict[str, Any] | None = None,
    asked_at: datetime | None = None,
) -> Amended | None:
    """Changes the message of work that is still to be delivered: fields of the issue, or one more follow-up. None: it is over.

    Args:
        asked_at: when somebody asked for the work (again), by Linear's clock: after a stop that is pending, it is wanted again.
    """
    row = tx.first(
        AMEND,
        org_id=org_id,
        session_id=session_id,
        changes=json.dumps(changes or {}),
        prompt=None if prompt is None else json.dumps(prompt),
        asked_at=asked_at,
    )
    return None if row is None else Amended(*row)


# -- depth --------------------------------------------------------------------------------------------------------------

# One probe a machine for the oldest, and a count that stops at 1 000 (0.4 ms; to 10 000 it took 4): a tick must cost the same beside a
# million waiting rows.
DEPTH = sql("""
    select (select count(*) from (select from dispatch_queue limit 1000) counted),
           (select extract(epoch from now() - min(oldest.available_at))
              from orchestrators o
              cross join lateral (
                select q.available_at from dispatch_queue q
                 where q.org_id = o.org_id and q.orchestrator_id = o.id and q.claimed_at is null and q.available_at <= now()
                 order by q.available_at
                 limit 1) oldest)
""")


class Depth(NamedTuple):
    """How much work there is: `rows` counts to 1 000, the age (seconds) is of the oldest row that could be claimed now."""

    rows: int
    oldest_claimable_age_seconds: float


def depth(tx: Tx) -> Depth:
    """The two numbers to alert on, over all organizations."""
    row = tx.first(DEPTH)
    assert row is not None
    return Depth(row[0], round(float(row[1] or 0), 3))
